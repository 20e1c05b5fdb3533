"""Calls of one rank that need no driver, against the float64 spec: their kernels go to the caller's
stream. Under the interpreter the stream is a stand-in, and kernels have ended when they return.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from graphs import Window
from spec import errors_of
from tolerances import ERROR
from worlds import Case, attend

import burst_rt
from benchmarks.gpu_stub import StubGpu, stub_context
from burst_rt import Causal, Context, First, Full, SlidingWindow
from burst_rt.kernels import QKV, Gradients, Tile, Upstream
from burst_rt.kernels.triton import TritonKernel
from burst_rt.runtime.process import process

_CASES = {
    "causal": Case(61, mask=Causal()),
    "grouped, bf16, two rows": Case(
        45, batch=2, heads=4, kv_heads=2, mask=Causal(), dtype=torch.bfloat16
    ),
    "fp16, v of its own width": Case(
        37, head_dim=24, v_head_dim=16, mask=Full(), dtype=torch.float16
    ),
    "a window": Case(70, mask=Causal() & (SlidingWindow(9, 0) | First(3))),
    "few queries": Case(13, kv_len=70, mask=Causal(), dtype=torch.bfloat16),
    "rows that see nothing": Case(40, kv_len=23, mask=Causal()),
    "softcap, alibi": Case(45, mask=Causal(), softcap=3.0, alibi="heads", scale=0.3),
    "some gradients": Case(45, mask=Causal(), needs_grad=(False, True, False)),
    "queries' gradients": Case(45, mask=Causal(), needs_grad=(True, False, False)),
    "a mask without spans, in parts, bf16": Case(45, mask=Window(), dtype=torch.bfloat16),
    "striped": Case(45, mask=Causal(), kind="striped"),
}
# The gradient of sinks is not the kernels' own: that backward takes the way of all other calls.
_SINKS = Case(45, mask=Causal(), sinks=True, dtype=torch.bfloat16)


@contextmanager
def _context() -> Iterator[Context]:
    """A context of one rank: on a GPU, or on the stand-in for one."""
    if torch.cuda.is_available():
        with burst_rt.init(device="cuda", kernel="triton") as ctx:
            ctx.attention.poison = False
            yield ctx
        return
    ctx = stub_context(StubGpu(), 1)
    ctx.attention.poison = False  # tests poison memory, which takes the other way
    yield ctx
    ctx.close()
    process.open.discard(ctx.runtime)


@pytest.mark.parametrize("name", _CASES)
def test_one_tile_against_the_spec(name: str) -> None:
    case = _CASES[name]
    with _context() as ctx:
        found = attend(ctx, case)
        assert ctx.runtime.last_run is not None
        assert ctx.runtime.last_run[1] is None  # there was no driver
    for field, error in errors_of(found, case.truth).items():
        assert error < ERROR[torch.float32 if field == "lse" else case.dtype], (field, error)


def test_sinks_against_the_spec() -> None:
    with _context() as ctx:
        found = attend(ctx, _SINKS)
        assert ctx.runtime.last_run is not None
        assert ctx.runtime.last_run[1] is not None
    for field, error in errors_of(found, _SINKS.truth).items():
        assert error < ERROR[torch.float32 if field == "lse" else _SINKS.dtype], (field, error)


def test_both_ways_give_the_same_bits() -> None:
    case = _CASES["grouped, bf16, two rows"]
    with _context() as ctx:
        straight = attend(ctx, case)
        ctx.stats()  # from here on, times are taken: calls have a driver
        driven = attend(ctx, case)
        assert ctx.runtime.last_run is not None
        assert ctx.runtime.last_run[1] is not None
    for x, y in zip(straight, driven, strict=True):
        assert (x is None) == (y is None)
        assert x is None or y is None or torch.equal(x, y)


@pytest.mark.parametrize("lse_grad", [False, True])
def test_a_backward_gets_the_output_where_lse_has_no_gradient(
    lse_grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either way: kernels that take it would give other bits otherwise."""
    case = Case(45, mask=Causal(), lse_grad=lse_grad)
    seen: list[torch.Tensor | None] = []
    backward = TritonKernel.backward

    def spied(
        self: TritonKernel, qkv: QKV, upstream: Upstream, tile: Tile, grads: Gradients
    ) -> None:
        seen.append(upstream.out)
        backward(self, qkv, upstream, tile, grads)

    monkeypatch.setattr(TritonKernel, "backward", spied)
    with _context() as ctx:
        out = attend(ctx, case).out
        ctx.stats()  # from here on, times are taken: calls have a driver
        attend(ctx, case)
    assert len(seen) == 2
    for given in seen:
        assert (given is None) == lse_grad
        assert given is None or torch.equal(given.cpu(), out)
