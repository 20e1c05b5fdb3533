"""Sums over ranks that autograd differentiates, over a context or a group of torch.distributed.

Ranks compare which sum a backward belongs to, because the sums themselves are paired up by their
order alone. A context's ranks do so in the agreement that opens the sum; a process group's ranks by
a reduction of two numbers.
"""

from __future__ import annotations

import struct
import weakref
import zlib
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, NoReturn, Protocol, TypeAlias, runtime_checkable

import torch
import torch.distributed as dist

from burst_rt.arguments import describe_value, holds_values
from burst_rt.eager import eager
from burst_rt.errors import ContractMismatch, InputError
from burst_rt.runtime.connections import Group, process_group
from burst_rt.runtime.reductions import all_reduce
from burst_rt.runtime.refusing import refuse
from burst_rt.runtime.runtime import Runtime

__all__ = [
    "RanksOrGroup",
    "SummingRanks",
    "add_over_ranks",
    "differs",
    "ranks_of",
    "refuse_in",
    "sum_in_place",
    "sum_over_ranks",
]  # fmt: skip

# Number of sums that each process group has made: the same on all of its ranks.
_num_sums: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
# Number of digests that a compared number may have.
_DIGESTS = 1 << 20


@runtime_checkable
class SummingRanks(Protocol):
    """Ranks that add up tensors without torch.distributed: a `Context`."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `Context.all_reduce`."""


RanksOrGroup: TypeAlias = "Group | SummingRanks"


def sum_over_ranks(x: torch.Tensor, *, group: RanksOrGroup | None = None) -> torch.Tensor:
    """The sum of all ranks' x, on every rank. Its gradient is the sum of all ranks' gradients.

    x: float64 or float32, any shape, the same on all ranks. group: as in `mean_over_ranks`. Where
    gradients are averaged over the ranks, as by DDP, the result is the gradient of the mean of the
    ranks' losses.

    With x that is 0 but at this rank's tokens (`layout.positions()`), every rank gets the numbers
    of all tokens, such as log-probabilities.

    Collective, and blocks, in the forward and in the backward, as `mean_over_ranks`. Raises
    InputError for another x, before anything is sent, as there.
    """
    if (
        not isinstance(x, torch.Tensor)
        or x.dtype not in (torch.float32, torch.float64)
        or not holds_values(x)
    ):
        error = f"sum_over_ranks: expected float32 or float64, got {describe_value(x)}"
        refuse_in(group, "sum_over_ranks", InputError(error))
    return add_over_ranks(x, group=group)


def add_over_ranks(
    x: torch.Tensor,
    *,
    group: RanksOrGroup | None = None,
    name: str = "sum_over_ranks",
    count: float | None = None,
) -> torch.Tensor:
    """`sum_over_ranks`, unchecked. name: the function that was called, for errors. count: a number
    that the ranks compare.
    """
    ranks = ranks_of(group, name)
    # The sum of a process group compiles.
    apply = _SumOverRanks.apply if isinstance(ranks, dist.ProcessGroup) else _apply_in_context
    total: torch.Tensor = apply(x, ranks, name, 0, count)
    return total


def ranks_of(group: RanksOrGroup | None, name: str) -> dist.ProcessGroup | SummingRanks:
    """The ranks that a user's object denotes.

    Raises InputError in the name of the function that was called, and then blocks as `refuse`
    does; on this rank alone, and at once, where there is a torch.distributed.
    """
    try:
        if group is None and not dist.is_initialized():
            raise InputError(
                f"{name}: there is no process group; call torch.distributed.init_process_group(), "
                "or give group="
            )
        if group is None:
            return dist.group.WORLD  # type: ignore[return-value]  # set, as there is one
        if isinstance(group, SummingRanks):
            return group
        ranks: dist.ProcessGroup = process_group(group, name)
    except InputError as error:
        # With torch.distributed the other ranks may wait in a collective of its, where nothing can
        # be told them. Else they wait in a context.
        if dist.is_initialized():
            raise
        refuse(name, error)
    return ranks


def refuse_in(group: object, name: str, error: InputError) -> NoReturn:
    """Raises the error: on every rank that waits for this one where group is a Context.

    There it blocks as `refuse` does. Ranks of torch.distributed cannot be told.
    """
    runtime = _runtime_of(group)
    if runtime is None:
        raise error
    refuse(name, error, runtime)


def _runtime_of(ranks: object) -> Runtime | None:
    """A Context's runtime; None for other ranks."""
    runtime = getattr(ranks, "runtime", None)
    return runtime if isinstance(runtime, Runtime) else None


def sum_in_place(
    x: torch.Tensor, ranks: dist.ProcessGroup | SummingRanks, about: Mapping[str, str] | None = None
) -> None:
    """Sums x in place. about: what a Context's ranks compare before, in words.

    Blocks as torch's all-reduce, or `Context.all_reduce`, does.
    """
    runtime = _runtime_of(ranks)
    if isinstance(ranks, dist.ProcessGroup):
        dist.all_reduce(x, group=ranks)
    elif ranks.world_size > 1 and runtime is not None:
        all_reduce(runtime, x, about)
    elif ranks.world_size > 1:
        ranks.all_reduce(x)


def differs(number: float, group: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
    """Whether the ranks of a process group have other numbers, as a scalar on the device.

    Collective; where the device is a GPU, nothing waits for it.
    """
    limits = torch.full((2,), float(number), dtype=torch.float64, device=device)
    limits[1].neg_()
    dist.all_reduce(limits, op=dist.ReduceOp.MAX, group=group)
    return limits.sum() != 0


class _SumOverRanks(torch.autograd.Function):
    """`apply(x, ranks, name, forward, count)` -> the sum of all ranks' x, whose gradient is the sum
    of all ranks' gradients.

    forward: in a backward the number of the sum that is differentiated, else 0. count: a number
    that must be the same on every rank, or None.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, ranks: Any, name: str, forward: int, count: float | None
    ) -> torch.Tensor:
        """Blocks as the ranks' all-reduce does; so does the backward."""
        ctx.ranks, ctx.name = ranks, name
        if isinstance(ranks, dist.ProcessGroup):
            total, ctx.number = _sum_in_group(x, ranks, name, forward, count)
            return total
        total = x.clone(memory_format=torch.contiguous_format)
        runtime = _runtime_of(ranks)
        with nullcontext() if runtime is None else runtime.backward_of(forward):
            sum_in_place(total, ranks, None if count is None else {"count": f"{count:.17g}"})
        ctx.number = 0 if runtime is None else runtime.number
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        total = _SumOverRanks.apply(grad, ctx.ranks, ctx.name, ctx.number, None)  # type: ignore[no-untyped-call]
        return total, None, None, None, None


_apply_in_context: Any = eager(_SumOverRanks.apply)


def _sum_in_group(
    x: torch.Tensor, group: dist.ProcessGroup, name: str, forward: int, count: float | None
) -> tuple[torch.Tensor, int]:
    """The sum of all ranks' x, and its number in the group. Compares the forward and the count.

    What is compared travels beside x, in one reduction of one shape: a rank that was given no count
    meets one that was. Raises ContractMismatch on every rank where they differ; on a GPU, and in a
    compiled program, the sum is NaN instead, because an error would have to wait for it.
    """
    compiled = torch.compiler.is_compiling()
    number = 0 if compiled else _next_number(group)
    same = [_compared(forward), _compared(None if compiled else count)]
    told = torch.tensor(same, dtype=torch.float64, device="cpu").flatten()
    if x.is_cuda and not compiled:
        told = told.pin_memory()  # or the host would wait for the device
    told = told.to(x.device, non_blocking=True)
    both = torch.cat([x.flatten().double(), told])
    dist.all_reduce(both, group=group)
    size = group.size()
    given, totals, squares = both[-6:].view(2, 3).unbind(1)
    # The numbers of those that gave one are equal where the mean of squares is the squared mean.
    other_forward, other_count = (given * squares != totals * totals).unbind()
    some_count = (given[1] != 0) & (given[1] != size)
    total = both[:-6].view_as(x).to(x.dtype)
    if compiled or x.is_cuda:
        return total.masked_fill(other_forward | other_count | some_count, torch.nan), number
    if bool(other_forward):
        raise ContractMismatch(
            f"{name}: the ranks are in the backwards of different means, this one in that of sum "
            f"{forward} of the group; run the backwards in the same order on every rank"
        )
    if bool(other_count | some_count):
        mine = "none" if count is None else f"{count:.17g}"
        raise ContractMismatch(
            f"{name}: count must be the same on every rank, got {mine} on this rank and another on "
            "others; add up the labelled tokens of all ranks"
        )
    return total, number


def _next_number(group: dist.ProcessGroup) -> int:
    _num_sums[group] = number = _num_sums.get(group, 0) + 1
    return number


def _compared(number: float | None) -> list[float]:
    """A number as the ranks add it up: whether there is one, its digest, the digest's square.

    Digests of 20 bits, so that sums over many ranks are exact. 0 and None: no number.
    """
    if not number:
        return [0.0, 0.0, 0.0]
    digest = number if number < _DIGESTS and number == int(number) else _digest(number)
    return [1.0, float(digest), float(digest * digest)]


def _digest(number: float) -> int:
    return zlib.crc32(struct.pack("<d", number)) % _DIGESTS
