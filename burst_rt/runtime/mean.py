"""The mean of values that are spread over ranks: the loss of a step.

DDP and FSDP2 average gradients over their ranks: what they differentiate is the mean of the ranks'
losses. Where every rank's loss is the mean over all tokens of all ranks, that is the same number,
and the gradients are right as they come, however unevenly the ranks share the tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from burst_rt.errors import InputError
from burst_rt.runtime.ends import Group, process_group

__all__ = ["mean_over_ranks"]

_NAME = "mean_over_ranks"


def mean_over_ranks(
    values: torch.Tensor, weights: torch.Tensor | None = None, *, group: Group | None = None
) -> torch.Tensor:
    """The weighted mean of all ranks' values, on every rank: sum(weights * values) / sum(weights).

    values: any shape, float64, float32, bfloat16 or float16, such as the losses of this rank's
        tokens. Ranks may have different numbers of values, or none.
    weights: numbers or booleans of values' shape, such as `labels != -100`; None: all count alike.
    group: the process group, or DeviceMesh of one axis, whose ranks share the tokens: all ranks
        over which gradients are averaged. None: all ranks of torch.distributed.

    Returns a scalar, float64 for float64 values and float32 otherwise, summed in float64; NaN where
    the weights sum to 0. Differentiable: a rank's gradient is that of the sum of all ranks'
    results, so a mean of gradients over the group's ranks is the gradient of the mean.

    Collective: one all-reduce of torch in the forward and one in the backward; both block as
    torch's do. Raises InputError, on this rank alone, before anything is sent.
    """
    if not isinstance(values, torch.Tensor) or not values.is_floating_point():
        raise InputError(
            f"{_NAME}: values must be a tensor of floating-point numbers, got {_described(values)}"
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
            f"{_NAME}: weights must be a tensor of real numbers or booleans, of values' shape "
            f"{tuple(values.shape)}, that does not require grad; got {_described(weights)}"
        )
    if group is None and not dist.is_initialized():
        raise InputError(
            f"{_NAME}: there is no process group; call torch.distributed.init_process_group(), or "
            "give group="
        )
    ranks = dist.group.WORLD if group is None else process_group(group, _NAME)
    weights = weights.double()
    sums = torch.stack([(weights * values).sum(), weights.sum()])
    total, weight = _SumOverRanks.apply(sums, ranks)  # type: ignore[no-untyped-call]
    mean: torch.Tensor = total / weight
    return mean.to(torch.promote_types(values.dtype, torch.float32))


def _described(x: object) -> str:
    if not isinstance(x, torch.Tensor):
        return type(x).__name__
    return f"{x.dtype} {tuple(x.shape)}{', which requires grad' if x.requires_grad else ''}"


class _SumOverRanks(torch.autograd.Function):
    """`apply(x, group)` -> the sum of all ranks' x. The gradient is the sum of all ranks'."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        """Blocks as torch's all-reduce does; so does the backward."""
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _SumOverRanks.apply(grad, ctx.group), None  # type: ignore[no-untyped-call]
