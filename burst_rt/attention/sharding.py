"""A layout of one context: cuts tensors into shards, and puts shards together again.

`planning/layouts.py` decides which rank owns which positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

import torch

from burst_rt.arguments import check_kinds, describe_value, holds_values, is_real
from burst_rt.attention.mask_check import check_mask
from burst_rt.attention.state import AttentionState
from burst_rt.drivers import raw_bytes
from burst_rt.errors import InputError
from burst_rt.kernels import DTYPES, sum_dtype
from burst_rt.opaque import opaque
from burst_rt.planning.layouts import BALANCED, WHOLE, Layout, make_layout, mask_for_layout
from burst_rt.planning.masks import Mask
from burst_rt.planning.numbers import Numbers
from burst_rt.planning.problem import Problem
from burst_rt.planning.recurrences import RecurrenceSizes
from burst_rt.runtime.runtime import Runtime

__all__ = [
    "AUTO", "CELLS_OF_WIDTH", "LAYOUTS", "ContextLayout", "LayerCosts", "choose_layout",
    "positions_on",
]  # fmt: skip

AUTO = "auto"
# What the rest of a model's layer costs for a token, in cells of attention, by the model's width:
# 12 * width**2 weights, the usual layer, of 2 operations, over 4 * width operations of a cell.
CELLS_OF_WIDTH = 6


def positions_on(device: torch.device, layout: Layout, rank: int) -> torch.Tensor:
    """The global positions of a rank's tokens, int64. Made on the device: nothing is copied."""
    runs = layout.runs[rank]
    return torch.cat([torch.arange(b.start, b.stop, b.step, device=device) for b in runs])


@opaque
@dataclass(frozen=True)
class ContextLayout:
    """The tokens that each rank of a context holds. Made by `Context.layout`."""

    attention: AttentionState = field(repr=False)  # what the context's calls share
    map: Layout  # the positions of every rank
    # Compiled programs know the layout by this number; no other object has the same number.
    number: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", LAYOUTS.give(self))

    def __deepcopy__(self, memo: object) -> ContextLayout:
        """The layout itself, which nobody changes: a copy of a model is on the same ranks."""
        return self

    def __reduce__(self) -> NoReturn:
        raise InputError(
            "layout: a layout belongs to its context, and cannot be pickled; send seq_len and "
            "kind, and make it again with ctx.layout"
        )

    @property
    def runtime(self) -> Runtime:
        return self.attention.runtime

    @property
    def kind(self) -> str:
        return self.map.kind

    @property
    def seq_len(self) -> int:
        return self.map.seq_len

    @property
    def shard_len(self) -> int:
        """Number of tokens that this rank holds."""
        return self.map.shard_len(self.runtime.rank)

    @check_kinds
    def positions(self, rank: int | None = None) -> torch.Tensor:
        """Global positions of a rank's tokens in local order; the default is this rank.

        int64 `[shard_len]`, on the context's device. Raises InputError for a rank that is not
        there.
        """
        owner = self.runtime.rank if rank is None else rank
        if not 0 <= owner < self.runtime.world_size:
            raise InputError(
                f"layout.positions: rank must be in [0, {self.runtime.world_size}), got {rank}"
            )
        return positions_on(self.runtime.device, self.map, owner)

    @check_kinds
    def shard(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """A copy of this rank's tokens of a full tensor, along `dim`, in local order.

        Local; differentiable. Raises InputError for another length along `dim`.
        """
        if not -x.ndim <= dim < x.ndim or x.shape[dim] != self.seq_len:
            raise InputError(
                f"layout.shard: expected {self.seq_len} tokens along dim {dim}, got shape "
                f"{tuple(x.shape)}"
            )
        return x.index_select(dim, positions_on(x.device, self.map, self.runtime.rank))

    def unshard(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """The full tensor, on every rank, from every rank's shard, through the host's memory.

        Collective; blocks at most the context's `timeout_s` for each of its two rounds. Not
        differentiable: a tensor that requires grad is refused (InputError, on every rank); pass
        x.detach().
        """
        runtime = self.runtime
        error = self._refuses(x, dim)
        if error:
            runtime.refuse("unshard", error)
        others = tuple(n for i, n in enumerate(x.shape) if i != dim % x.ndim)
        about = {
            "call": "unshard",
            "layout": str(self.map),
            "other dims": str(others),
            "dim": str(dim),
            "dtype": str(x.dtype),
        }
        mine = x.detach().resolve_conj().resolve_neg().movedim(dim, 0).contiguous()
        pending = runtime.collective(
            about, lambda: runtime.control.allgather(raw_bytes(mine.cpu()).tobytes())
        )
        full = torch.empty((self.seq_len, *mine.shape[1:]), dtype=x.dtype, device=x.device)
        for rank, raw in enumerate(pending.result()):
            if raw:
                shard = torch.frombuffer(bytearray(raw), dtype=x.dtype).view(
                    self.map.shard_len(rank), *mine.shape[1:]
                )
                full[positions_on(x.device, self.map, rank)] = shard.to(x.device)
        return full.movedim(0, dim)

    def _refuses(self, x: torch.Tensor, dim: int) -> InputError | None:
        """Why `unshard` cannot take this rank's tensor, or None."""
        where = "layout.unshard:"
        if not isinstance(x, torch.Tensor):
            return InputError(f"{where} expected a tensor, got {type(x).__name__}")
        if not holds_values(x):
            return InputError(
                f"{where} expected a dense tensor that holds values, got {describe_value(x)}"
            )
        if (
            isinstance(dim, bool)
            or not isinstance(dim, int)
            or not -x.ndim <= dim < x.ndim
            or x.shape[dim] != self.shard_len
        ):
            return InputError(
                f"{where} expected {self.shard_len} tokens along dim {dim}, got shape "
                f"{tuple(x.shape)}"
            )
        if x.requires_grad and torch.is_grad_enabled():
            return InputError(
                f"{where} x must not require grad, because unshard is not differentiable; pass "
                "x.detach()"
            )
        return None


class LayerCosts(NamedTuple):
    """What layouts count a model's layer by. None: as in `Context.layout`."""

    heads: tuple[int, int] | None = None  # query heads, kv heads
    head_dim: int | None = None
    dtype: torch.dtype | None = None  # attention's tensors have it
    token_cells: float | None = None  # what all but attention costs for a token, in cells


def choose_layout(
    attention: AttentionState,
    seq_len: int,
    kind: str,
    mask: Mask | None,
    costs: LayerCosts,
    recurrences: Sequence[RecurrenceSizes] = (),
) -> Layout:
    """The layout that `Context.layout` makes from its arguments. Local. Raises InputError."""
    heads, head_dim, dtype, token_cells = costs
    if token_cells is not None and (
        kind != WHOLE or not is_real(token_cells) or not 0 <= token_cells < math.inf
    ):
        raise InputError(
            f"layout: token_cells is a number of at least 0, for kind 'whole' only, got "
            f"{token_cells!r} and kind {kind!r}"
        )
    wrong = [sizes for sizes in recurrences if not isinstance(sizes, RecurrenceSizes)]
    if wrong or (len(recurrences) and kind != AUTO):
        raise InputError(
            "layout: recurrences are burst_rt.recurrence.RecurrenceSizes, for kind 'auto' only, "
            f"got {type(wrong[0]).__name__ if wrong else 'sizes'} and kind {kind!r}"
        )
    world_size = attention.runtime.world_size
    if kind not in (AUTO, WHOLE) and (heads, head_dim, dtype) != (None, None, None):
        raise InputError(
            "layout: heads, head_dim and dtype are for the kinds 'auto' and 'whole' only, got kind "
            f"{kind!r}"
        )
    if kind not in (AUTO, BALANCED, WHOLE):
        return make_layout(kind, seq_len, world_size, mask)
    plain = make_layout("zigzag", seq_len, world_size)
    mask = mask_for_layout(kind, mask, seq_len)
    check_mask(mask, seq_len, seq_len, batch=mask.batch, shared=world_size > 1)
    if kind == BALANCED:
        return make_layout(kind, seq_len, world_size, mask)
    num_heads, num_kv_heads, head_dim = _shape(
        (32, 8) if heads is None else heads, 128 if head_dim is None else head_dim
    )
    dtype = torch.bfloat16 if dtype is None else dtype
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        raise InputError(
            f"layout: dtype must be float64, float32, bfloat16 or float16, got {dtype!r}"
        )
    problem = Problem(
        q_layout=plain,
        kv_layout=plain,
        mask=mask.bound(seq_len, seq_len),
        batch=mask.batch,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        input_bytes=dtype.itemsize,
        sum_bytes=sum_dtype(dtype).itemsize,
        needs_grad=(True, True, True),
    )
    if kind == AUTO:
        return attention.planner.layout(problem, tuple(recurrences))
    width = float(num_heads * head_dim)  # numpy takes no larger integers than 64 bits
    return attention.planner.whole(
        problem, CELLS_OF_WIDTH * width if token_cells is None else float(token_cells)
    )


def _shape(heads: tuple[int, int], head_dim: int) -> tuple[int, int, int]:
    given: object = heads
    numbers = (*heads, head_dim) if isinstance(given, tuple) and len(given) == 2 else ()
    if not numbers or any(type(n) is not int or n < 1 for n in numbers) or heads[0] % heads[1]:
        raise InputError(
            "layout: heads must be (query heads, kv heads), the first a multiple of the second, "
            f"and head_dim at least 1, got {heads!r} and {head_dim!r}"
        )
    return (*heads, head_dim)


# Every layout that is alive, by its number.
LAYOUTS: Numbers[ContextLayout] = Numbers(2**41)
