"""cuDNN's attention and Tri Dao's FlashAttention 2, through torch, behind the `Kernel` protocol.

These kernels give their result in the inputs' 16 bits. Where a single call is all there is (a world
of one, one rectangle or one square under the diagonal), this is the rounding that every result has
at its end, and nothing is lost. Where the results of several calls are added up, each is rounded
before it is added; that is done only where the user has said partials="16bit".

Their backward takes O where the protocol has delta. It gets the O' of `stand_in.py`, in 16 bits.
That costs no accuracy: delta = rowsum(dO * O') is then off by about sqrt(3 / head_dim) roundoffs of
itself. With O itself it is off by more, because the terms of O are larger than their sum. (Emulated
for head sizes 16 to 128, grouped heads, gradients of lse: 0.6 to 0.8 roundoffs in dq, dk, dv with
O, with O' and with delta itself.)

A gradient of lse may make delta so large relative to dO that O' needs the range of bfloat16 (see
`stand_ins_in_16_bits`). float16 has no such range. Only the device knows whether the range is
needed, and nothing here waits for the device. So float16 is taken in the forward only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from burst_rt.kernels.base import (
    QKV,
    Gradients,
    Kernel,
    Results,
    State,
    Tile,
    Upstream,
    Work,
    fold,
    write_from_sums,
)
from burst_rt.kernels.conditions import deterministic, too_old
from burst_rt.kernels.stand_in import stand_ins_in_16_bits
from burst_rt.planning.masks import Piece, Shape
from burst_rt.planning.problem import TileShape

__all__ = ["CudnnKernel", "FlashKernel"]

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
_cudnn_forward = torch.ops.aten._scaled_dot_product_cudnn_attention.default
_cudnn_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default

# Number of bytes that both kernels load at a time: tensors with another start or step are copied
# first.
_ALIGNED_BYTES = 16
# The shapes of pieces that the vendors' kernels compute; stairs, as rectangles.
_SHAPES = (Shape.RECTANGLE, Shape.LOWER, Shape.STAIRS)


class _Call(NamedTuple):
    """One call of a vendor's kernel."""

    rows: slice  # rows of the tile
    columns: slice  # columns of the tile
    causal: bool  # whether row i sees only the columns j <= i; the call is then a square

    def of(self, qkv: QKV) -> QKV:
        """The call's part of a tile's inputs, with heads before tokens."""
        q, k, v = qkv
        return QKV(
            _heads_first(q, self.rows), _heads_first(k, self.columns), _heads_first(v, self.columns)
        )


class _VendorKernel(Kernel):
    """The base of the two kernels.

    They take bfloat16, and float16 in the forward only; masks whose tiles are rectangles and
    triangles.
    """

    name: str
    most_head_dim: int
    # The kind of device that tensors must be on; tests with doubles of torch's operators set
    # another.
    device_type = "cuda"

    def refuses(self, work: Work) -> str | None:
        """See `Kernel.refuses`."""
        if work.device.type != self.device_type:
            return (
                f"the {self.name} kernel takes {self.device_type.upper()} tensors, got "
                f"{work.device}"
            )
        if work.dtype not in (torch.bfloat16, torch.float16):
            return f"the {self.name} kernel takes bfloat16 and float16, got {work.dtype}"
        if work.dtype == torch.float16 and not work.forward:
            return (
                f"the {self.name} kernel's backward takes bfloat16 only: its stand-in for the "
                "output does not fit into the range of float16"
            )
        reason = self._other_scores(work) or self._other_shapes(work)
        reason = reason or self._short_columns(work.tiles) or self._missing(work.device)
        return reason or refuses_partials(self.name, work)

    def _other_scores(self, work: Work) -> str | None:
        """Why the kernel has not the scores or the head_dims of some work, or None."""
        if work.scores.softcap or work.scores.alibi_slopes:
            return (
                f"the {self.name} kernel has no softcap and no ALiBi, and {work.scores} were asked"
            )
        if len(set(work.head_dims)) > 1:
            return (
                f"the {self.name} kernel takes one head_dim for q, k and v, got {work.head_dim} "
                f"and {work.v_head_dim} of v"
            )
        if work.head_dim % 8 or not 8 <= work.head_dim <= self.most_head_dim:
            return (
                f"the {self.name} kernel takes a head_dim that is a multiple of 8, at most "
                f"{self.most_head_dim}, got {work.head_dim}"
            )
        return None

    def _other_shapes(self, work: Work) -> str | None:
        """Why the kernel cannot compute the pieces of some work, or None."""
        if any(piece.shape not in _SHAPES for pieces in work.tiles for piece in pieces):
            return (
                f"the {self.name} kernel computes rectangles and triangles only, and "
                f"{work.mask!r} cuts this call's tiles into other shapes"
            )
        return None

    def repeatable(self, forward: bool) -> bool:
        """See `Kernel.repeatable`: the forward only.

        The backward adds up in an order that differs every time.
        """
        return forward

    def writes_results(self, work: Work, tile: TileShape) -> bool:
        """See `Kernel.writes_results`: where a single call does all of the tile."""
        (pieces,) = work.tiles
        calls = list(_calls(pieces))
        return not work.scores.sinks and [call.rows for call in calls] == [slice(0, tile.q_len)]

    def writes_gradients(self, work: Work, tile: TileShape) -> bool:
        """See `Kernel.writes_gradients`: where a single call does all of the tile."""
        (pieces,) = work.tiles
        return _covers(list(_calls(pieces)), tile.q_len, tile.kv_len)

    def remarks(self, work: Work) -> tuple[str, ...]:
        """See `Kernel.remarks`: whether partials are in 16 bits; whether results are repeatable."""
        remarks = remarks_on_partials(work)
        if not self.repeatable(work.forward):
            remarks += ("its sums differ in the last bits from run to run",)
        return remarks

    def forward(self, qkv: QKV, tile: Tile, state: State) -> None:
        """See `Kernel.forward`."""
        calls = list(_calls(tile.pieces))
        alone = tile.first and tile.last and tile.score_options.sinks is None
        if alone and [call.rows for call in calls] == [slice(0, qkv.q.shape[1])]:
            # Nothing is added up: the call's result is the tile's result.
            out, lse = self._part(qkv, calls[0], tile.scale)
            state.out.copy_(out)
            state.lse.copy_(lse)
        else:
            if tile.first:
                state.start(tile.score_options.sinks)
            for call in calls:
                fold(*self._part(qkv, call, tile.scale), state, call.rows)
            if tile.last:
                state.finish()
        tile.progress()

    def backward(self, qkv: QKV, upstream: Upstream, tile: Tile, grads: Gradients) -> None:
        """See `Kernel.backward`."""
        dout, out = stand_ins_in_16_bits(upstream.dout, upstream.delta)
        calls = list(_calls(tile.pieces))
        writes = tile.only and _covers(calls, qkv.q.shape[1], qkv.k.shape[1])

        def run(into: Gradients) -> None:
            for call in calls:
                rows, columns = call.rows, call.columns
                results = Results(
                    _heads_first(out, rows),
                    upstream.lse[:, :, rows].contiguous(),
                    _heads_first(dout, rows),
                    None,
                )
                found = self._call_backward(call.of(qkv), results, call.causal, tile.scale)
                for x, at, grad in zip(into, (rows, columns, columns), found, strict=True):
                    if x is not None and writes:
                        x.copy_(grad.transpose(1, 2))
                    elif x is not None:
                        x[:, at].add_(grad.transpose(1, 2))

        if tile.only and not writes:
            write_from_sums(grads, run)
        else:
            run(grads)
        tile.progress()

    def scratch_bytes(self, forward: bool, dtype: torch.dtype, tile: TileShape) -> int:
        """See `Kernel.scratch_bytes`. It grows with the tile.

        It counts copies of inputs that are not aligned and a part's results. The backward also
        counts O' and the temporaries that make it, and what FlashAttention takes for itself: the
        float32 dq, and the dk, dv of every query head. The sum has not been measured yet.
        """
        token = tile.batch * tile.head_dim * dtype.itemsize
        q, kv = token * tile.q_len * tile.num_heads, token * tile.kv_len * tile.num_kv_heads
        if forward:
            return 2 * q + 2 * kv
        of_all_heads = (
            token * tile.kv_len * tile.num_heads if tile.num_heads > tile.num_kv_heads else 0
        )
        return 2 * q + 2 * kv + 4 * q + q + 2 * kv + 4 * q // dtype.itemsize + 2 * of_all_heads

    def _part(self, qkv: QKV, call: _Call, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """out `[batch, q, heads, d]` in 16 bits and lse `[batch, heads, q]` of one call."""
        rows = call.rows
        out, lse = self._call_forward(call.of(qkv), call.causal, scale)
        # Kernels may pad the rows of lse, or give it one dimension more.
        return out.transpose(1, 2), lse.flatten(2)[:, :, : rows.stop - rows.start]

    def _short_columns(self, tiles: Iterable[tuple[Piece, ...]]) -> str | None:
        return None

    def _missing(self, device: torch.device) -> str | None:
        """Why torch cannot run the kernel here, or None."""
        raise NotImplementedError

    def _call_forward(
        self, qkv: QKV, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse. All tensors have heads before tokens, here and in the backward."""
        raise NotImplementedError

    def _call_backward(
        self, qkv: QKV, results: Results, causal: bool, scale: float
    ) -> Iterable[torch.Tensor]:
        """dq, dk and dv. `results` has no dlse: O' takes the place of out, and carries dlse."""
        raise NotImplementedError


class FlashKernel(_VendorKernel):
    """FlashAttention 2 (arXiv 2307.08691). head_dim is a multiple of 8, at most 256.

    Its backward gives the same bits every time where torch.use_deterministic_algorithms(True) is in
    force.
    """

    name = "flash"
    most_head_dim = 256

    def repeatable(self, forward: bool) -> bool:
        """See `Kernel.repeatable`."""
        return forward or deterministic()

    def _missing(self, device: torch.device) -> str | None:
        if not torch.backends.cuda.is_flash_attention_available():
            return (
                "the flash kernel needs a torch that was built with FlashAttention; torch "
                f"{torch.__version__} was built without it"
            )
        return too_old(self.name, device)

    def _call_forward(
        self, qkv: QKV, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = _flash_forward(*qkv, 0.0, causal, scale=scale)
        return out, lse

    def _call_backward(
        self, qkv: QKV, results: Results, causal: bool, scale: float
    ) -> Iterable[torch.Tensor]:
        (q, k, _), (out, lse, dout, _) = qkv, results
        # The state of a random generator, which is not read without dropout.
        seed, offset = (torch.empty(n, dtype=torch.uint64, device=q.device) for n in (2, 0))
        grads: Iterable[torch.Tensor] = _flash_backward(
            dout, *qkv, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, offset,
            scale=scale
        )  # fmt: skip
        return grads


class CudnnKernel(_VendorKernel):
    """cuDNN's attention (9.0 or newer). head_dim is a multiple of 8, at most 128."""

    name = "cudnn"
    most_head_dim = 128

    def _short_columns(self, tiles: Iterable[tuple[Piece, ...]]) -> str | None:
        if any(
            call.columns.stop - call.columns.start == 1
            for pieces in tiles
            for call in _calls(pieces)
        ):
            return (
                "the cudnn kernel takes at least 2 keys at a time, and this call has a tile "
                "with a single key"
            )
        return None

    def _missing(self, device: torch.device) -> str | None:
        version = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
        if version is None or version < 90000:
            return (
                f"the cudnn kernel needs cuDNN 9.0 or newer, and torch {torch.__version__} has "
                f"{version or 'none'}"
            )
        return too_old(self.name, device)

    def _call_forward(
        self, qkv: QKV, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = _cudnn_forward(*qkv, None, True, 0.0, causal, scale=scale)
        return out, lse

    def _call_backward(
        self, qkv: QKV, results: Results, causal: bool, scale: float
    ) -> Iterable[torch.Tensor]:
        (q, k, _), (out, lse, dout, _) = qkv, results
        # The state of a random generator, which is not read without dropout.
        seed, offset = (torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2))
        # lse has the shape that the forward gives, because torch hands the shape on to cuDNN. dO
        # and O are made dense, because some versions of torch keep cuDNN graphs by the strides of
        # q, k and v alone, and would reuse a graph for a dO and an O of other strides.
        dout, out = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (dout, out))
        grads: Iterable[torch.Tensor] = _cudnn_backward(
            dout, *qkv, out, lse.unsqueeze(-1), seed, offset, None, None, None, q.shape[2],
            k.shape[2], 0.0, causal, scale=scale
        )  # fmt: skip
        return grads


def _calls(pieces: tuple[Piece, ...]) -> Iterator[_Call]:
    """The pieces as rectangles, and squares under the diagonal. Stairs are rectangles.

    Where a triangle has more rows than columns, the rows below its square see all columns.
    """
    for piece in pieces:
        rows, columns = piece.rows, piece.columns
        if piece.shape is Shape.STAIRS:
            yield from _calls(tuple(piece.levels()))
            continue
        if piece.shape is Shape.RECTANGLE:
            yield _Call(rows, columns, causal=False)
            continue
        size = min(rows.stop - rows.start, columns.stop - columns.start)
        # The two vendors align the diagonal of a part that is not square at different corners.
        yield _Call(
            slice(rows.start, rows.start + size),
            slice(columns.start, columns.start + size),
            causal=True,
        )
        if rows.start + size < rows.stop:
            yield _Call(slice(rows.start + size, rows.stop), columns, causal=False)


def _covers(calls: Sequence[_Call], q_len: int, kv_len: int) -> bool:
    """Whether a single call does all rows and columns of a tile."""
    whole = slice(0, q_len), slice(0, kv_len)
    return [(call.rows, call.columns) for call in calls] == [whole]


def refuses_partials(name: str, work: Work) -> str | None:
    """Why a kernel that gives its results in 16 bits may not do this work, or None."""
    if work.partials != "exact" or _whole(work):
        return None
    return (
        f"the {name} kernel rounds each partial result to {_bare(work.dtype)}, and here "
        f"{'sinks' if _sunk(work) else 'several partial results'} are added up; "
        "burst_rt.init(partials='16bit') allows that"
    )


def remarks_on_partials(work: Work) -> tuple[str, ...]:
    """The remark of such a kernel (`Kernel.remarks`) if it rounds partial results."""
    if _whole(work):
        return ()
    return (f"partials are 16-bit: each partial result is rounded to {_bare(work.dtype)}",)


def _whole(work: Work) -> bool:
    """Whether a single call does all the work, so that nothing is added up."""
    return (
        not _sunk(work)
        and work.ring_size == 1
        and sum(1 for pieces in work.tiles for _ in _calls(pieces)) == 1
    )


def _sunk(work: Work) -> bool:
    """Whether sinks are added to what a call returns; in the backward they are in lse."""
    return work.forward and work.scores.sinks


def _heads_first(x: torch.Tensor, rows: slice) -> torch.Tensor:
    """[B, S, H, D] -> [B, H, rows, D], as a view where it is aligned."""
    x = x[:, rows]
    step = _ALIGNED_BYTES // x.itemsize
    if x.data_ptr() % _ALIGNED_BYTES or any(stride % step for stride in x.stride()[:-1]):
        x = x.clone(memory_format=torch.contiguous_format)
    return x.transpose(1, 2)


def _bare(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
