"""`mean_over_ranks`: what it refuses. What it computes is checked on ranks, in tests/mpi."""

from __future__ import annotations

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
