"""Means and sums over ranks: what they refuse. What means are is checked in tests/mpi."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import burst_rt
from burst_rt.errors import InputError

_X = torch.ones(3)


@pytest.mark.parametrize(
    ("values", "options", "why"),
    [
        (2.5, {}, "values must be a tensor of floating-point numbers, got float"),
        (torch.ones(3, dtype=torch.int64), {}, "got torch.int64"),
        (_X, {"weights": torch.ones(2)}, r"values' shape \(3,\), .* got torch.float32 \(2,\)"),
        (_X, {"weights": [1, 1, 1]}, "got list"),
        (_X, {"weights": torch.ones(3, requires_grad=True)}, "got .*, which requires grad"),
        (_X, {"weights": torch.ones(3, dtype=torch.complex64)}, "got torch.complex64"),
        (_X, {}, "there is no process group"),
        (_X, {"group": "cp"}, "mean_over_ranks: group must be a torch.distributed process group"),
    ],
)
def test_what_is_refused(values: Any, options: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        burst_rt.mean_over_ranks(values, **options)


def test_a_sum_of_all_ranks_numbers_is_differentiated() -> None:
    """Each rank weighs all numbers by its own; a number's gradient is the sum of the weights."""

    def run(ctx: burst_rt.Context) -> tuple[list[float], list[float]]:
        x = torch.zeros(3, dtype=torch.float64)
        x[ctx.rank] = 2.0 + ctx.rank
        total = burst_rt.sum_over_ranks(x.requires_grad_(), group=ctx)
        (total * (10.0**ctx.rank) * torch.tensor([1, 2, 3])).sum().backward()
        assert x.grad is not None
        return total.tolist(), x.grad.tolist()

    assert burst_rt.run_local(3, run) == [([2.0, 3.0, 4.0], [111.0, 222.0, 333.0])] * 3


@pytest.mark.parametrize("given", [torch.nn.Parameter(_X), torch.nn.Linear(2, 2)])
def test_what_is_no_list_of_parameters_is_refused(given: Any) -> None:
    with (
        burst_rt.init() as ctx,
        pytest.raises(
            InputError,
            match=r"^average_gradients: parameters must be several .* give \[parameter\]",
        ),
    ):
        burst_rt.average_gradients(given, group=ctx)


def test_the_function_that_was_called_is_named() -> None:
    with pytest.raises(InputError, match=r"^cross_entropy: there is no process group"):
        burst_rt.cross_entropy(torch.ones(3, 5), torch.ones(3, dtype=torch.int64))
    with pytest.raises(InputError, match=r"^cross_entropy: labels: expected \(3,\), .* got \(2,\)"):
        burst_rt.cross_entropy(torch.ones(3, 5), torch.ones(2, dtype=torch.int64))


_SPARSE = torch.nn.Parameter(torch.ones(3, 2))
_NAMED: Any = {"a": torch.nn.Parameter(_X)}
_SPARSE.grad = torch.ones(3, 2).to_sparse()
_LOGITS, _LABELS = torch.zeros(3, 5), torch.ones(3, dtype=torch.int64)
# What one rank calls, and what all ranks are told.
_WRONG: dict[str, tuple[Callable[[Any], object], str]] = {
    "values": (lambda ctx: burst_rt.mean_over_ranks(2.5, group=ctx), "values must be a tensor"),  # type: ignore[arg-type]
    "weights": (
        lambda ctx: burst_rt.mean_over_ranks(_X, torch.ones(2), group=ctx),
        "weights must be a tensor",
    ),
    "16-bit sums": (
        lambda ctx: burst_rt.sum_over_ranks(_X.half(), group=ctx),
        "expected float32 or float64, got torch.float16",
    ),
    "a group": (lambda _: burst_rt.cross_entropy(_LOGITS, _LABELS, group=3), "group must be"),  # type: ignore[arg-type]
    "no group": (lambda _: burst_rt.cross_entropy(_LOGITS, _LABELS), "there is no process group"),
    "no group, gradients": (lambda _: burst_rt.average_gradients([]), "there is no process group"),
    "None": (
        lambda ctx: burst_rt.average_gradients([None], group=ctx),  # type: ignore[list-item]
        "got NoneType at place 0",
    ),
    "a number": (lambda ctx: burst_rt.average_gradients(3, group=ctx), "got int; for one"),  # type: ignore[arg-type]
    "a dict": (
        lambda ctx: burst_rt.average_gradients(_NAMED, group=ctx),
        "got dict",
    ),
    "names": (
        lambda ctx: burst_rt.average_gradients(
            torch.nn.Linear(2, 2).named_parameters(),  # type: ignore[arg-type]
            group=ctx,
        ),
        "got tuple at place 0",
    ),
    "sparse gradients": (
        lambda ctx: burst_rt.average_gradients([_SPARSE], group=ctx),
        "the gradient of parameter 0 of shape (3, 2) must be dense",
    ),
    "no labels": (lambda ctx: burst_rt.cross_entropy(_LOGITS, None, group=ctx), "got NoneType"),  # type: ignore[arg-type]
    "a list": (lambda ctx: burst_rt.cross_entropy(_LOGITS, [1] * 3, group=ctx), "got list"),  # type: ignore[arg-type]
    "labels on meta": (
        lambda ctx: burst_rt.cross_entropy(_LOGITS, _LABELS.to("meta"), group=ctx),
        "labels: expected a dense tensor of torch.int64, got torch.int64 (3,) on meta",
    ),
    "logits in a list": (
        lambda ctx: burst_rt.cross_entropy([1.0], _LABELS, group=ctx),  # type: ignore[arg-type]
        "logits: expected dense floating-point numbers [..., classes], got list",
    ),
    "a logit": (
        lambda ctx: burst_rt.cross_entropy(torch.ones(()), _LABELS[0], group=ctx),
        "got torch.float32 () on cpu",
    ),
    "complex logits": (
        lambda ctx: burst_rt.cross_entropy(_LOGITS + 1j, _LABELS, group=ctx),
        "got torch.complex64 (3, 5) on cpu",
    ),
    "sparse logits": (
        lambda ctx: burst_rt.cross_entropy(_LOGITS.to_sparse(), _LABELS, group=ctx),
        "on cpu, torch.sparse_coo",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", _WRONG)
@pytest.mark.parametrize("everyone", [False, True])
def test_what_one_rank_does_wrong_all_are_told(case: str, everyone: bool) -> None:
    """And the ranks go on; where all of them are wrong, each has its own error."""
    call, said = _WRONG[case]

    def run(ctx: burst_rt.Context) -> None:
        wrong = everyone or ctx.rank == 1
        with pytest.raises(InputError, match=re.escape(said)):
            call(ctx) if wrong else burst_rt.mean_over_ranks(_X, group=ctx)
        assert burst_rt.mean_over_ranks(_X, group=ctx) == 1

    burst_rt.run_local(2, run, timeout_s=20)


def test_sums_of_tensors_in_any_order_of_memory() -> None:
    """Also where it is the gradient that is transposed."""

    def run(ctx: burst_rt.Context) -> bool:
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
        total = burst_rt.sum_over_ranks(x.t(), group=ctx)
        x.requires_grad_()
        weights = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
        (burst_rt.sum_over_ranks(x, group=ctx).t().contiguous() * weights).sum().backward()
        assert x.grad is not None
        return torch.equal(total, 2 * x.detach().t()) and torch.equal(x.grad, 2 * weights.t())

    assert burst_rt.run_local(2, run) == [True, True]


def test_ranks_whose_gradients_lie_in_memory_otherwise_take_the_same_reductions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("burst_rt.runtime.gradients.piece_bytes", lambda size: 64)

    def run(ctx: burst_rt.Context) -> list[list[float]]:
        parameters = [torch.nn.Parameter(torch.zeros(24)) for _ in range(3)]
        gradients = torch.arange(72.0).split(24) if ctx.rank else torch.ones(3, 24).unbind()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            # Views of one tensor on rank 0; on rank 1 one is missing, or each has its own memory.
            parameter.grad = gradient if ctx.rank == 0 else gradient.clone()
        if ctx.rank == 2:
            parameters[1].grad = None
        burst_rt.average_gradients(parameters, group=ctx)
        return [[float(x) for x in p.grad[:2]] for p in parameters if p.grad is not None]

    assert burst_rt.run_local(2, run) == [[[0.5, 1.0], [12.5, 13.0], [24.5, 25.0]]] * 2
    three = [[1 / 3, 1.0], [(24 + 1) / 3, (25 + 1) / 3], [(48 + 48 + 1) / 3, (49 + 49 + 1) / 3]]
    for found in burst_rt.run_local(3, run):
        assert found[1] == pytest.approx(three[1])
        assert found[2] == pytest.approx(three[2])
