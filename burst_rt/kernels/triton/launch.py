"""A tile as plain arguments, which every launcher needs, and what of them each call changes.

Here are also the strides that fit the kernels, and how tensors are loaded.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from burst_rt.errors import InternalError
from burst_rt.kernels.base import QKV, Gradients, ScoreOptions, State, Tile, Upstream
from burst_rt.kernels.triton.configs import Config, block_width
from burst_rt.kernels.triton.start import Layouts, Pointers
from burst_rt.kernels.triton.tables import Lists, SpanTable

__all__ = [
    "LOG2_E", "Meta", "OfBackward", "TileArguments", "both_of", "check_dense", "check_places",
    "check_state", "constants_of", "fit_descriptors", "meta_of", "of_forward", "options_of",
    "strides", "uses_descriptors",
]  # fmt: skip

LOG2_E = 1.4426950408889634
# Maximum stride from token to token: elements within a block of at most 256 rows are addressed in
# 32 bits.
_MAX_TOKEN_STRIDE = 2**31 // 256 - 1


class Meta(NamedTuple):
    """The constants of the tile kernels, for which they are compiled: their one `tl.constexpr`.

    As one record they go whole from kernel to function, and are one entry of the key by which
    Triton finds the compiled kernel. A kernel ignores what it does not name.
    """

    HEAD_DIM: int  # head dimension of q and k
    BLOCK_D: int  # columns of their blocks
    V_HEAD_DIM: int
    BLOCK_DV: int
    BLOCK_M: int  # queries in a block
    BLOCK_N: int  # keys in a block
    WIDTH: int  # spans a row; see `work.py`
    MASKED: bool  # whether there are cut runs
    SINGLE: bool  # whether no line has more than one run of a kind
    SOFTCAP: bool
    ALIBI: bool
    EVEN_M: bool  # whether blocks of queries divide the tile's
    EVEN_N: bool  # whether blocks of keys do
    DESCRIBED: bool  # whether loads go through tensor descriptors
    INTERPRET: bool  # whether Triton's interpreter runs the kernel
    # The forward alone: the state begins here; it ends here; it begins with sinks.
    FIRST: bool = False
    LAST: bool = False
    SINKS: bool = False
    # The backward alone: adds to sums instead of writing gradients; which of dk and dv are needed.
    ADDS: bool = False
    NEED_DK: bool = False
    NEED_DV: bool = False


class TileArguments(NamedTuple):
    """A tile without its tensors."""

    spans: SpanTable  # or cells
    lists: Lists  # by rows or by columns, with the block sizes of the kernel's configuration
    q_len: int
    kv_len: int
    scale: float  # scale of the scores
    first: bool  # see `Tile.first`
    last: bool
    interpret: bool  # whether Triton's interpreter runs the kernels
    score_options: ScoreOptions
    new_sums: str  # see `Tile.new_sums`
    # int32, positions of rows and columns; None if nothing needs them
    positions: tuple[torch.Tensor, torch.Tensor] | None

    def adds(self, side: str) -> bool:
        """Whether the gradients of a side, "q" or "kv", are added to sums, and not written."""
        return not (self.first and self.last) and self.new_sums != side

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """p_spans, p_lines and p_runs of a kernel."""
        return self.spans.bounds, self.lists.lines, self.lists.runs

    @property
    def places(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """p_slopes, p_rows and p_columns of a kernel. Without slopes, what is never read."""
        slopes, unread = self.score_options.alibi_slopes, self.spans.bounds
        if slopes is None or self.positions is None:
            return unread, unread, unread
        return slopes, *self.positions

    @property
    def cap_scale(self) -> float:
        """The factor of scores before the softcap; 0 without one."""
        cap = self.score_options.softcap
        return 0.0 if cap is None else self.scale / cap

    @property
    def scale_log2(self) -> float:
        """The scale of scores in powers of two; with a softcap, of what comes out of tanh.

        It is never so small that float32 makes it 0, because 0 times the -inf of unseen cells is
        NaN.
        """
        cap = self.score_options.softcap
        scale = self.scale if cap is None else cap
        return max(scale * LOG2_E, torch.finfo(torch.float32).tiny)


def strides(x: torch.Tensor) -> tuple[int, int, int]:
    """Batch, token and head stride of a BSHD tensor, in elements.

    Raises InternalError where the last dimension is not dense or tokens are too far apart.
    """
    batch, token, head, channel = x.stride()
    if channel != 1 or token > _MAX_TOKEN_STRIDE:
        raise InternalError(
            "the triton kernel takes tensors whose last dimension is dense and whose tokens are "
            f"at most {_MAX_TOKEN_STRIDE} elements "
            f"apart, got strides {x.stride()}"
        )
    return batch, token, head


def both_of(grads: Gradients) -> tuple[torch.Tensor, torch.Tensor]:
    """dk and dv as a kernel gets them.

    A gradient that is not needed gets the other one's tensor, which is then not touched for it.
    """
    dk = grads.dv if grads.dk is None else grads.dk
    dv = grads.dk if grads.dv is None else grads.dv
    assert dk is not None
    assert dv is not None
    return dk, dv


def constants_of(
    arguments: TileArguments, config: Config, *inputs: torch.Tensor, **others: bool
) -> dict[str, Meta | int]:
    """The constants of every kernel that does a tile and loads these BSHD tensors: q, k, v.

    others: fields of `Meta` that one kernel alone has.
    """
    meta = meta_of(arguments, config, *inputs, **others)
    return {"META": meta, **options_of(config.num_warps, num_stages=config.num_stages)}


def options_of(num_warps: int, **others: int) -> dict[str, int]:
    """The options with which every kernel is compiled.

    A product and a sum are one instruction. Triton 3.9 warns where nobody says whether they are,
    and announces two for 3.10.
    """
    return {"num_warps": num_warps, "enable_fp_fusion": True, **others}


def meta_of(
    arguments: TileArguments, config: Config, *inputs: torch.Tensor, **others: bool
) -> Meta:
    """META of `constants_of`."""
    head_dim, v_head_dim = inputs[0].shape[3], inputs[2].shape[3]
    return Meta(
        HEAD_DIM=head_dim,
        BLOCK_D=block_width(head_dim),
        V_HEAD_DIM=v_head_dim,
        BLOCK_DV=block_width(v_head_dim),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        # Where nothing is compared with the spans, their number makes no other kernel.
        WIDTH=arguments.spans.width if arguments.lists.masked else 1,
        MASKED=arguments.lists.masked,
        SINGLE=arguments.lists.single,
        SOFTCAP=arguments.score_options.softcap is not None,
        ALIBI=arguments.score_options.alibi_slopes is not None,
        EVEN_M=arguments.q_len % config.block_m == 0,
        EVEN_N=arguments.kv_len % config.block_n == 0,
        DESCRIBED=uses_descriptors(config, *inputs),
        INTERPRET=arguments.interpret,
        **others,
    )


def uses_descriptors(config: Config, *inputs: torch.Tensor) -> bool:
    """DESCRIBED of a kernel that loads these BSHD tensors.

    It is as configured if the copy engine can read all of the tensors, else False.
    """
    return config.loads == "descriptors" and fit_descriptors(*inputs)


def fit_descriptors(*inputs: torch.Tensor) -> bool:
    """Whether the addresses and the strides of BSHD tensors are multiples of 16 bytes.

    CUDA Driver API, cuTensorMapEncodeTiled.
    """
    return not any(
        number % 16
        for x in inputs
        for number in (x.data_ptr(), *(stride * x.itemsize for stride in x.stride()[:3]))
    )


def check_places(qkv: QKV, tile: Tile) -> None:
    """Raises InternalError unless the tile has a position for each token."""
    sides = (("q", qkv.q, tile.q_positions), ("kv", qkv.k, tile.kv_positions))
    for side, x, positions in sides:
        if sum(map(len, positions)) != x.shape[1]:
            raise InternalError(
                f"a tile with {x.shape[1]} {side} tokens must have as many positions, got "
                f"{positions}"
            )


def check_state(state: State) -> None:
    """acc and out may have any strides from batch row to batch row, and from token to token."""
    check_dense(state.m, state.l, state.lse)
    acc, out = state.acc, state.out
    if acc.stride()[2:] != (acc.shape[3], 1) or out.stride() != acc.stride():
        raise InternalError(
            "the triton kernel takes states whose tokens are dense, and whose acc and out lie "
            f"alike, got {tuple(acc.shape)} with strides {acc.stride()} and {out.stride()}"
        )


def check_dense(*tensors: torch.Tensor) -> None:
    """Raises InternalError for tensors that are not dense."""
    for x in tensors:
        if not x.is_contiguous():
            raise InternalError(
                f"the triton kernel takes dense states, lse and delta, got {tuple(x.shape)} with "
                f"strides {x.stride()}"
            )


def of_forward(qkv: QKV, tile: Tile, state: State) -> tuple[Pointers, Layouts]:
    """What differs from call to call of a forward, as `restart` takes it."""
    q, k, v = qkv
    acc, m, l, out, lse = state  # noqa: E741
    sinks = tile.score_options.sinks
    tensors = (q, k, v, acc, m, l, out, lse, m if sinks is None else sinks)
    return [x.data_ptr() for x in tensors], (q.stride(), k.stride(), v.stride(), acc.stride())


class OfBackward:
    """The same of a backward, for each of its two kernels."""

    def __init__(self, qkv: QKV, upstream: Upstream) -> None:
        q, k, v = qkv
        dout, lse, delta, _ = upstream
        self._pointers = [x.data_ptr() for x in (q, k, v, dout, lse, delta)]
        self._layouts = q.stride(), k.stride(), v.stride(), dout.stride(), dout.dtype

    def writing(self, *grads: torch.Tensor) -> tuple[Pointers, Layouts]:
        """grads: dk and dv, or dq."""
        strides = [x.stride() for x in grads]
        return self._pointers + [x.data_ptr() for x in grads], (*self._layouts, *strides)
