"""Softcap, ALiBi slopes, sinks and a head_dim of v's own in the Triton kernels, against the spec.

Interpreted on a CPU, or compiled on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from spec import errors_of, reference
from tolerances import ERROR, ROUNDING, SINKS
from worlds import Case, attend_over_threads

from burst_rt import Causal, Mask, SlidingWindow
from burst_rt.kernels import sum_dtype
from burst_rt.kernels.triton.scores import tanh

_DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
_BASE = Case(35, heads=2, kv_heads=1, head_dim=16, mask=Causal())


@pytest.mark.parametrize(
    ("world", "changes"),
    [
        (1, {"sinks": True}),
        (2, {"sinks": True, "strategy": "burst", "q_len": 40, "kv_len": 20}),  # blind rows
        (3, {"sinks": True, "strategy": "ring-q", "q_len": 40, "kv_len": 20, "batch": 2}),
        (1, {"softcap": 2.0}),
        (2, {"softcap": 2.0, "mask": SlidingWindow(9, 3), "dtype": torch.bfloat16}),
        (1, {"alibi": "heads", "mask": None}),
        (2, {"alibi": "batch and heads", "strategy": "all-to-all", "batch": 2, "kv_heads": 2}),
        (1, {"v_head_dim": 33}),
        (2, {"head_dim": 48, "v_head_dim": 32, "dtype": torch.float16, "strategy": "burst"}),
        (1, {"head_dim": 192, "v_head_dim": 128, "heads": 1}),
        (2, {"sinks": True, "softcap": 1.5, "alibi": "heads", "v_head_dim": 20}),
    ],
)
def test_against_the_spec(world: int, changes: dict[str, Any]) -> None:
    case = _BASE.but(**changes)
    result = attend_over_threads(world, case, kernel="triton")
    for name, error in errors_of(result, case.truth).items():
        most = SINKS if name == "dsinks" else ERROR
        assert error < most[sum_dtype(case.dtype) if name == "lse" else case.dtype], (name, error)


# Functions, of which a tile is done in parts: of some kv heads, or of each head alone.
_FUNCTIONS: dict[str, Callable[[Any, Any, Any], Any]] = {  # of tensors, or of numbers
    "heads alike": lambda head, q, kv: (q + kv) % 3 < 2,
    "heads apart": lambda head, q, kv: (q + kv + head) % 3 < 2,
}


@pytest.mark.parametrize("own", [{"alibi": "batch and heads"}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("function", _FUNCTIONS)
def test_parts_have_the_terms_of_their_heads(
    function: str, own: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sees = _FUNCTIONS[function]
    monkeypatch.setattr("burst_rt.kernels.triton.parts._MOST_CELLS", 2 * 35 * 128)
    mask = Mask.from_function(lambda batch, head, q, kv: sees(head, q, kv))
    case = _BASE.but(mask=mask, heads=4, kv_heads=2, batch=2, **own)
    head, q, kv = torch.meshgrid(*map(torch.arange, (4, 35, 35)), indexing="ij")
    slopes, sinks = case.of_heads()
    cells = sees(head, q, kv).expand(2, -1, -1, -1)
    truth = reference(*case.inputs(), mask=cells, alibi_slopes=slopes, sinks=sinks)
    for name, error in errors_of(attend_over_threads(1, case, kernel="triton"), truth).items():
        assert error < (SINKS if name == "dsinks" else ERROR)[torch.float32], (name, error)


@triton.jit  # type: ignore[untyped-decorator]
def _tanh_kernel(p_x, p_y, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    o = tl.arange(0, SIZE)
    tl.store(p_y + o, tanh(tl.load(p_x + o)))


def test_the_hyperbolic_tangent() -> None:
    sizes = torch.logspace(-30, 60, 2047, base=2.0)
    x = torch.cat((-sizes, sizes, torch.zeros(2))).to(_DEVICE)
    y = torch.full_like(x, torch.nan)
    _tanh_kernel[(1,)](x, y, SIZE=4096)
    truth = torch.tanh(x.double())
    assert ((y - truth).abs() <= 4 * ROUNDING[torch.float32] * truth.abs()).all()
