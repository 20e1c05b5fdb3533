"""Sums and means over ranks: the loss of a step, and the gradients of parameters.

DDP and FSDP2 average gradients over their ranks: what they differentiate is the mean of the ranks'
losses. Where every rank's loss is the mean over all tokens of all ranks, that is the same number,
and the gradients are right as they come, however unevenly the ranks share the tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
import torch.distributed as dist

from burst_rt.errors import InputError
from burst_rt.runtime.ends import Group, process_group

__all__ = [
    "RanksOrGroup",
    "average_gradients",
    "mean_over_ranks",
    "sum_over_ranks",
    "weighted_mean",
]


@runtime_checkable
class Ranks(Protocol):
    """Ranks that add up tensors without torch.distributed: a `Context`."""

    @property
    def world_size(self) -> int:
        """How many they are."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `Context.all_reduce`."""


RanksOrGroup: TypeAlias = "Group | Ranks"


def mean_over_ranks(
    values: torch.Tensor, weights: torch.Tensor | None = None, *, group: RanksOrGroup | None = None
) -> torch.Tensor:
    """The weighted mean of all ranks' values, on every rank: sum(weights * values) / sum(weights).

    values: any shape, float64, float32, bfloat16 or float16, such as the losses of this rank's
        tokens. Ranks may have different numbers of values, or none.
    weights: numbers or booleans of values' shape, such as `labels != -100`; None: all count alike.
    group: all ranks over which gradients are averaged. A process group, a DeviceMesh of one axis,
        or a Context. None: all ranks of torch.distributed.

    Returns a scalar, float64 for float64 values and float32 otherwise, summed in float64; NaN where
    the weights sum to 0. Differentiable: every rank's backward differentiates the sum of all ranks'
    results. All results are the same mean, so the average of the ranks' gradients is the gradient
    of the mean.

    Collective: one all-reduce in the forward and one in the backward; both block as torch's, or
    `Context.all_reduce`, do. Raises InputError, on this rank alone, before anything is sent.
    """
    return weighted_mean(values, weights, group, "mean_over_ranks")


def weighted_mean(
    values: torch.Tensor, weights: torch.Tensor | None, group: RanksOrGroup | None, name: str
) -> torch.Tensor:
    """`mean_over_ranks` by the name of the function that was called, for errors."""
    if not isinstance(values, torch.Tensor) or not values.is_floating_point():
        raise InputError(
            f"{name}: values must be a tensor of floating-point numbers, got {_described(values)}"
        )
    if weights is None:
        weights = torch.ones_like(values, requires_grad=False)
    elif (
        not isinstance(weights, torch.Tensor)
        or weights.shape != values.shape
        or weights.requires_grad
        or weights.is_complex()
    ):
        raise InputError(
            f"{name}: weights must be a tensor of real numbers or booleans, of values' shape "
            f"{tuple(values.shape)}, that does not require grad; got {_described(weights)}"
        )
    weights = weights.double()
    sums = torch.stack([(weights * values).sum(), weights.sum()])
    total, weight = sum_over_ranks(sums, group=group, name=name)
    mean: torch.Tensor = total / weight
    return mean.to(torch.promote_types(values.dtype, torch.float32))


def sum_over_ranks(
    x: torch.Tensor, *, group: RanksOrGroup | None = None, name: str = "sum_over_ranks"
) -> torch.Tensor:
    """The sum of all ranks' x, on every rank: float32 or float64, of one shape on all ranks.

    group, gradients, blocking and errors: as in `mean_over_ranks`. name: who asks.
    """
    found: torch.Tensor = _SumOverRanks.apply(x, _ranks_of(group, name))  # type: ignore[no-untyped-call]
    return found


@torch.no_grad()
def average_gradients(
    parameters: Iterable[torch.nn.Parameter], *, group: RanksOrGroup | None = None
) -> None:
    """Gives every rank the mean of all ranks' gradients, in place, as DDP and FSDP2 would.

    For models in no wrapper. parameters: the same list on every rank, with dense gradients. Their
    values must be the same on every rank too, which nothing checks: make the model from one seed,
    or broadcast it. A parameter that has no gradient on any rank keeps none. One that has a
    gradient on some ranks only counts as 0 on the others. group: as in `mean_over_ranks`, and the
    same as there.

    Collective: one all-reduce for each dtype, of all its gradients, and one of a number a
    parameter. 16-bit gradients are summed in float32. Gradients that lie in memory one behind the
    other, as views of one tensor, are not copied. Blocks as `mean_over_ranks` does. Raises
    InputError, on this rank alone, for a model or a tensor in place of several parameters.
    """
    ranks = _ranks_of(group, "average_gradients")
    if isinstance(parameters, (torch.Tensor, torch.nn.Module)):
        raise InputError(
            "average_gradients: parameters must be several parameters, such as "
            f"model.parameters(), got {type(parameters).__name__}; for one, give [parameter]"
        )
    wanted = [parameter for parameter in parameters if parameter.requires_grad]
    if not wanted:
        return
    device = wanted[0].device
    have = torch.tensor([p.grad is not None for p in wanted], dtype=torch.float64, device=device)
    _all_reduce(have, ranks)
    used = [p for p, count in zip(wanted, have.tolist(), strict=True) if count]
    size = ranks.size() if isinstance(ranks, dist.ProcessGroup) else ranks.world_size

    def kind(parameter: torch.nn.Parameter) -> str:
        return f"{parameter.dtype} {parameter.device}"

    for _, same in groupby(sorted(used, key=kind), key=kind):
        members = list(same)
        for parameter in members:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        grads = [parameter.grad for parameter in members if parameter.grad is not None]
        flat = _one_tensor(grads)
        copied = flat is None or flat.dtype.itemsize < 4
        if flat is None:
            flat = torch.cat([grad.flatten() for grad in grads])
        flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
        _all_reduce(flat, ranks)
        flat /= size
        if copied:
            for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(part.view_as(grad))


def _one_tensor(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The memory of tensors that lie one behind the other; None where they do not."""
    first, at = parts[0], parts[0].storage_offset()
    memory = first.untyped_storage().data_ptr()
    for part in parts:
        follows = part.storage_offset() == at and part.untyped_storage().data_ptr() == memory
        if not follows or not part.is_contiguous():
            return None
        at += part.numel()
    return first.as_strided((at - first.storage_offset(),), (1,))


def _ranks_of(group: RanksOrGroup | None, name: str) -> dist.ProcessGroup | Ranks:
    if group is None and not dist.is_initialized():
        raise InputError(
            f"{name}: there is no process group; call torch.distributed.init_process_group(), or "
            "give group="
        )
    if group is None:
        return dist.group.WORLD  # type: ignore[return-value]  # set, as there is a process group
    if isinstance(group, Ranks):
        return group
    found: dist.ProcessGroup = process_group(group, name)
    return found


def _all_reduce(x: torch.Tensor, ranks: dist.ProcessGroup | Ranks) -> None:
    if isinstance(ranks, dist.ProcessGroup):
        dist.all_reduce(x, group=ranks)
    elif ranks.world_size > 1:
        ranks.all_reduce(x)


def _described(x: object) -> str:
    if not isinstance(x, torch.Tensor):
        return type(x).__name__
    return f"{x.dtype} {tuple(x.shape)}{', which requires grad' if x.requires_grad else ''}"


class _SumOverRanks(torch.autograd.Function):
    """`apply(x, ranks)` -> the sum of all ranks' x. The gradient is the sum of all ranks'."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: Any) -> torch.Tensor:
        """Blocks as the ranks' all-reduce does; so does the backward."""
        ctx.ranks = ranks
        total = x.clone()
        _all_reduce(total, ranks)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _SumOverRanks.apply(grad, ctx.ranks), None  # type: ignore[no-untyped-call]
