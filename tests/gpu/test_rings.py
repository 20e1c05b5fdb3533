"""Whole rings on one GPU: ranks as threads, each on streams of its own, against the float64 spec.
Only where there is a GPU.

"interpreted" cases elsewhere prove the kernels' arithmetic; this proves what needs hardware:
streams, events, transfers, the compiler.
"""

from __future__ import annotations

import time

import pytest
import torch
from spec import errors_of, reference
from tolerances import ERROR
from worlds import Case, attend, attend_over_threads

import burst_rt
from burst_rt import Causal
from burst_rt.drivers.device import TorchDevice
from burst_rt.errors import InputError

_WHOLE = torch.__version__ >= "2.13"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

_CASES = {
    "full": Case(500, heads=2, head_dim=64),
    "causal": Case(500, heads=2, head_dim=64, mask=Causal()),
    "striped, grouped": Case(
        257, heads=4, kv_heads=2, head_dim=128, mask=Causal(), kind="striped", strategy="ring-kv"
    ),
    "contiguous, odd head": Case(
        300, heads=2, head_dim=80, batch=2, mask=Causal(), kind="contiguous", strategy="burst"
    ),
    "few queries": Case(64, kv_len=500, head_dim=64, mask=Causal(), strategy="burst"),
    "bf16": Case(1000, heads=4, kv_heads=2, head_dim=128, dtype=torch.bfloat16, mask=Causal()),
    # For compute-sanitizer too: the kernels of the one above, and not much to do.
    "short bf16": Case(300, heads=4, kv_heads=2, head_dim=128, dtype=torch.bfloat16, mask=Causal()),
    "fp16": Case(700, heads=2, head_dim=64, dtype=torch.float16),
    "three tokens": Case(3, mask=Causal()),
}


@pytest.mark.parametrize("transport", ["local", "staged"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("name", _CASES)
def test_rings_against_the_spec(name: str, world_size: int, transport: str) -> None:
    case = _CASES[name]
    inputs = case.inputs()
    truth = reference(*inputs, mask=case.mask)
    found = attend_over_threads(world_size, case, device="cuda", transport=transport, timeout_s=60)
    for field, error in errors_of(found, truth).items():
        assert error < ERROR[torch.float32 if field == "lse" else case.dtype], (field, error)


def test_the_same_bits_every_time() -> None:
    case = _CASES["bf16"]
    runs = [attend_over_threads(2, case, device="cuda", timeout_s=60) for _ in range(5)]
    for other in runs[1:]:
        for x, y in zip(runs[0], other, strict=True):
            assert (x is None) == (y is None)
            assert x is None or y is None or torch.equal(x, y)


def test_nccl_with_one_rank() -> None:
    pytest.importorskip("cupy.cuda.nccl")
    case = _CASES["bf16"]
    inputs = case.inputs()
    with burst_rt.init(device="cuda", transport="nccl", timeout_s=60) as ctx:
        assert ctx.why_transport.startswith("nccl")
        found = attend(ctx, case, inputs)
        # From a thread of its own the watchdog sees that both calls have ended.
        assert ctx.runtime._watchdog is not None
        end_s = time.monotonic() + 20
        while ctx.runtime._watchdog._calls and time.monotonic() < end_s:
            time.sleep(0.01)
        assert not ctx.runtime._watchdog._calls
    for field, error in errors_of(found, reference(*inputs, mask=case.mask)).items():
        assert error < ERROR[torch.float32 if field == "lse" else case.dtype], (field, error)


def test_a_stream_of_the_callers_own() -> None:
    """Inputs that are still being made on the caller's stream are waited for; outputs can be used
    on it at once.
    """
    case = _CASES["causal"]
    with burst_rt.init(device="cuda") as ctx, torch.cuda.stream(torch.cuda.Stream()):
        layout = ctx.layout(case.q_len)
        x = torch.randn(1, case.q_len, 2, 64, device="cuda")
        torch.cuda._sleep(50_000_000)  # some 25 ms
        late = x * 2
        got = burst_rt.burst_attention(late, late, late, causal=True, layout=layout)
        assert isinstance(got, torch.Tensor)
        got = got + 0
        torch.cuda.synchronize()
        again = burst_rt.burst_attention(late, late, late, causal=True, layout=layout)
        assert isinstance(again, torch.Tensor)
        assert torch.equal(got, again)


@pytest.mark.skipif(not _WHOLE, reason="before torch 2.13 the call is not compiled")
def test_no_cuda_graph_holds_a_call() -> None:
    """With "reduce-overhead" only what stands around the call is replayed."""
    with burst_rt.init(device="cuda") as ctx, torch.no_grad():
        layout = ctx.layout(256)

        def model(x: torch.Tensor) -> torch.Tensor:
            return burst_rt.burst_attention(2 * x, x, x, causal=True, layout=layout).sin()

        compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
        x = torch.randn(1, 256, 2, 64, device="cuda")
        for _ in range(4):  # to warm up, to record, to replay
            x = x + 1
            before = ctx.stats().calls
            torch.testing.assert_close(compiled(x), model(x))
            assert ctx.stats().calls == before + 2
        with (
            pytest.raises(InputError, match="CUDA graph"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            model(x)
        model(x)


def test_the_cpu_gives_the_same_within_rounding() -> None:
    case = _CASES["causal"]
    on_cpu = attend_over_threads(2, case)
    on_gpu = attend_over_threads(2, case, device="cuda", timeout_s=60)
    for field, error in errors_of(on_gpu, on_cpu).items():
        assert error < 2 * ERROR[torch.float32], (field, error)


# Tests poison memory, and calls that poison it take the way of all other calls; so the tests of the
# straight way switch that off.


def _slow(made: torch.Tensor) -> torch.Tensor:
    """`made`, some 25 ms later on the current stream; zeros until then."""
    late = torch.zeros_like(made)
    torch.cuda._sleep(50_000_000)
    return late.copy_(made)


@pytest.mark.parametrize("kernel", ["triton", "auto"])
def test_one_tile_goes_to_the_callers_stream(kernel: str) -> None:
    """A call of one rank on a side stream, right behind slow work on it, forward and backward; then
    the same from another stream: kept launches and tables serve both.
    """
    with burst_rt.init(device="cuda", kernel=kernel) as ctx:
        ctx.attention.poison = False
        layout = ctx.layout(512)
        ready = [torch.randn(1, 512, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4)]

        def call(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
            out = burst_rt.burst_attention(q, k, v, causal=True, layout=layout)
            assert isinstance(out, torch.Tensor)
            return [out, *torch.autograd.grad(out, (q, k, v), inputs[3])]

        wanted = call(ready)
        torch.cuda.synchronize()
        for _ in range(2):  # the second time launches are kept for these streams
            for stream in (torch.cuda.Stream(), torch.cuda.current_stream(), torch.cuda.Stream()):
                with torch.cuda.stream(stream):
                    found = call([_slow(x) for x in ready])
                    found = [x + 0 for x in found]
                torch.cuda.synchronize()
                for x, y in zip(found, wanted, strict=True):
                    assert torch.equal(x, y)


def test_memory_of_one_tile_is_its_streams() -> None:
    """All tensors of a call are dropped right behind it, and another stream's work takes memory at
    once: the call's results are right all the same.
    """
    with burst_rt.init(device="cuda", kernel="triton") as ctx:
        ctx.attention.poison = False
        layout = ctx.layout(2048)
        side = torch.cuda.Stream()
        inputs = [
            torch.randn(1, 2048, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3)
        ]
        wanted = burst_rt.burst_attention(*inputs, causal=True, layout=layout)
        assert isinstance(wanted, torch.Tensor)
        torch.cuda.synchronize()
        sums = []
        for _ in range(20):
            late = [_slow(x) for x in inputs[:1]] + [x * 1 for x in inputs[1:]]
            out = burst_rt.burst_attention(*late, causal=True, layout=layout)
            assert isinstance(out, torch.Tensor)
            sums.append(out == wanted)
            del late, out
            with torch.cuda.stream(side):
                garbage = [torch.full_like(x, torch.nan) for x in inputs * 4]
                del garbage
        torch.cuda.synchronize()
        assert all(bool(same.all()) for same in sums)


def test_a_call_of_one_tile_has_no_event_until_times_are_asked_for() -> None:
    case = _CASES["bf16"]
    inputs = case.inputs()
    with burst_rt.init(device="cuda", kernel="triton") as ctx:
        ctx.attention.poison = False
        found = attend(ctx, case, inputs)
        assert ctx.runtime.last_run is not None
        assert ctx.runtime.last_run[1] is None
        with pytest.raises(InputError, match="took no times"):
            ctx.gather_last_run()
        timed = attend(ctx, case, inputs)
        assert ctx.stats().calls == 4
        ((graph, trace),) = ctx.gather_last_run()
        assert {span.task for span in trace} == {task.id for task in graph.tasks}
        torch.cuda.synchronize()
        assert ctx.stats().compute_s > 0
    for x, y in zip(found, timed, strict=True):
        assert (x is None) == (y is None)
        assert x is None or y is None or torch.equal(x, y)


def test_events_are_used_again_and_again() -> None:
    """A device makes no more events once calls are warm, and waits stay right."""
    case = _CASES["bf16"]
    with burst_rt.init(device="cuda", kernel="triton") as ctx:
        ctx.attention.poison = False
        device = ctx.runtime.machine._streams
        assert isinstance(device, TorchDevice)
        runs, idle = [], []
        for _ in range(20):
            ctx.stats()  # calls take times, which are read here
            runs.append(attend(ctx, case, case.inputs()))
            torch.cuda.synchronize()
            idle.append(sum(map(len, device._idle)))
        assert idle[-1] <= idle[4]
    for other in runs[1:]:
        for x, y in zip(runs[0], other, strict=True):
            assert x is None or y is None or torch.equal(x, y)
