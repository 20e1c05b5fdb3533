"""Softcap, ALiBi slopes, sinks and a head_dim of v's own over ranks that are threads, against the
float64 spec: over strategies, worlds, masks, types and kernels.
"""

from __future__ import annotations

from typing import Any

import pytest
from spec import errors_of
from tolerances import ERROR
from worlds import Case, attend_over_threads

from burst_rt import Causal
from burst_rt.kernels import sum_dtype

_BASE = Case(61, heads=4, kv_heads=2, batch=2, mask=Causal())
_TERMS: dict[str, dict[str, Any]] = {
    "sinks": {"sinks": True},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi": "heads"},
    "narrow v": {"v_head_dim": 8},
    "wide v": {"v_head_dim": 20},
    "all": {"sinks": True, "softcap": 1.5, "alibi": "batch and heads", "v_head_dim": 8},
}


def _assert_right(world: int, case: Case, **options: Any) -> None:
    result = attend_over_threads(world, case, **options)
    for name, error in errors_of(result, case.truth).items():
        wide = name in ("lse", "dsinks")
        assert error < ERROR[sum_dtype(case.dtype) if wide else case.dtype], (name, error)
    assert (result.dsinks is not None) == case.sinks


@pytest.mark.parametrize("terms", _TERMS)
@pytest.mark.parametrize(
    ("strategy", "world", "kernel"),
    [
        ("burst", 1, "cpu"),
        ("ring-kv", 3, "cpu"),
        ("burst", 4, "naive"),
        ("bidirectional", 2, "naive"),
        ("two-level:2", 4, "cpu"),
        ("all-to-all", 2, "cpu"),
        ("hybrid:2", 4, "cpu"),
        ("ring-naive", 3, "cpu"),
        ("burst-untiled", 2, "auto"),
    ],
)
def test_every_strategy(terms: str, strategy: str, world: int, kernel: str) -> None:
    _assert_right(world, _BASE.but(**_TERMS[terms], strategy=strategy), kernel=kernel)
