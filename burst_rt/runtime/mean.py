"""The mean over all ranks' tokens, its gradients as DDP and FSDP2 average them.

DDP and FSDP2 average gradients over their ranks: what they differentiate is the mean of the ranks'
losses. Where every rank's loss is the mean over all tokens of all ranks, that is the same number,
and the gradients are right as they come, however unevenly the ranks share the tokens.
"""

from __future__ import annotations

import math
from typing import NoReturn

import torch

from burst_rt.arguments import describe_value, holds_values
from burst_rt.errors import InputError
from burst_rt.runtime.sums import RanksOrGroup, add_over_ranks, refuse_in

__all__ = ["mean_of_sums", "mean_over_ranks", "weighted_mean"]

_SUMMED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def mean_over_ranks(
    values: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    group: RanksOrGroup | None = None,
    count: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """The weighted mean of all ranks' values, on every rank: sum(weights * values) / sum(weights).

    values: any shape, float64, float32, bfloat16 or float16, such as the losses of this rank's
        tokens. Ranks may have different numbers of values, or none.
    weights: numbers or booleans of values' shape, such as `labels != -100`; None: all count alike.
    group: all ranks over which gradients are averaged. A process group, a DeviceMesh of one axis,
        or a Context. None: all ranks of torch.distributed.
    count: the divisor instead of sum(weights), a number or a scalar tensor, the same on every rank.
        Where gradients of several micro-batches add up before a step: the sum of the weights of the
        whole step, over all of its micro-batches and all ranks. The results of the micro-batches
        then add up to the mean of the step.

    Returns a scalar, float64 for float64 values and float32 otherwise, summed in float64; NaN where
    the weights sum to 0. Differentiable: every rank's backward differentiates the sum of all ranks'
    results. All results are the same mean, so the average of the ranks' gradients is the gradient
    of the mean.

    Collective: one all-reduce in the forward and one in the backward, in which ranks also compare
    `count` and, in the backward, which mean it is of. They block as torch's, or
    `Context.all_reduce`, do. A `count` on a device is waited for. Raises InputError, before
    anything is sent: on every rank that waits for this one where group is a Context, else on this
    rank alone. Raises ContractMismatch on every rank where counts differ, or where ranks are in the
    backwards of different means; over a process group the result or the gradient is NaN instead on
    GPUs and in compiled programs.
    """
    return weighted_mean(values, weights, group, "mean_over_ranks", count)


def weighted_mean(
    values: torch.Tensor,
    weights: torch.Tensor | None,
    group: RanksOrGroup | None,
    name: str,
    count: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """`mean_over_ranks` by the name of the function that was called, for errors."""
    if (
        not isinstance(values, torch.Tensor)
        or values.dtype not in _SUMMED
        or not holds_values(values)
    ):
        _wrong(group, name, f"values must be a tensor of floating-point numbers, got "
               f"{describe_value(values)}")  # fmt: skip
    if weights is None:
        weights = torch.ones_like(values, requires_grad=False)
    elif (
        not isinstance(weights, torch.Tensor)
        or not holds_values(weights)
        or weights.shape != values.shape
        or weights.requires_grad
        or weights.is_complex()
    ):
        _wrong(
            group, name, "weights must be a tensor of real numbers or booleans, of values' shape "
            f"{tuple(values.shape)}, that does not require grad; got {describe_value(weights)}",
        )  # fmt: skip
    weights = weights.double()
    mean = mean_of_sums((weights * values).sum(), weights.sum(), group, name, count)
    return mean.to(torch.promote_types(values.dtype, torch.float32))


def mean_of_sums(
    total: torch.Tensor,
    weight: torch.Tensor,
    group: RanksOrGroup | None,
    name: str,
    count: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """All ranks' total over all ranks' weight, or over count; float64 scalars, as is the result.

    Collective; blocks, differentiates and raises as `mean_over_ranks` does.
    """
    number = None if count is None else _as_count(count, group, name)
    sums = torch.stack([total, weight])
    added, whole = add_over_ranks(sums, group=group, name=name, count=number)
    mean: torch.Tensor = added / (whole if number is None else number)
    return mean


def _as_count(count: object, group: RanksOrGroup | None, name: str) -> float:
    try:
        scalar = not isinstance(count, torch.Tensor) or count.ndim == 0
        number = float(count) if scalar else math.nan  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if not 0 < number < math.inf or isinstance(count, (bool, str)):
        got = (
            describe_value(count) if isinstance(count, torch.Tensor) and count.ndim else repr(count)
        )
        _wrong(group, name, "count must be a number above 0, or a scalar tensor of one: the "
               f"labelled tokens of the whole step, on all ranks; got {got}")  # fmt: skip
    return number


def _wrong(group: object, name: str, reason: str) -> NoReturn:
    refuse_in(group, name, InputError(f"{name}: {reason}"))
