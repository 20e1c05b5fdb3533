"""What a call on a GPU asks the device for, in counts: the host's code is real, the GPU is not.

`python -m benchmarks host` measures the time that goes with it.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from standin import build_cuda_standin, with_standin
from triton.compiler.errors import CompilationError
from triton.experimental.gluon.language._core import builtin

import burst_rt
from benchmarks.gpu_stub import Case, StubGpu, counts_of, stub_context, stub_triton
from burst_rt.errors import DeviceError, InputError
from burst_rt.kernels.triton import (
    backward_hopper,
    chosen,
    kernel,
    producer,
    start,
    tables,
    tuned,
    turns,
)
from burst_rt.kernels.triton.configs import default_config
from burst_rt.runtime.process import process
from burst_rt.telemetry.messages import Group
from burst_rt.telemetry.rank.call_log import CallLog, Totals

pytestmark = [
    pytest.mark.builds,
    pytest.mark.skipif(sys.platform != "linux", reason="triton is made for Linux"),
]


class _World:
    """A context on the stub, and two warm calls: a forward and a backward."""

    def __init__(self, case: Case, gpu: StubGpu) -> None:
        self.gpu = gpu
        self.ctx = stub_context(gpu, case.world_size)
        self.ctx.attention.poison = False  # tests poison memory, which takes the other way
        self.calls = case.calls(self.ctx)
        self.warm()

    def warm(self) -> None:
        for call in self.calls * 2:
            call()

    def counts(self) -> list[dict[str, int]]:
        return [counts_of(self.gpu, call) for call in self.calls]


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[_World]:
    gpu = StubGpu()
    with stub_triton(gpu.asked):
        made = _World(getattr(request, "param", _ONE), gpu)
        yield made
        made.ctx.close()
        process.open.discard(made.ctx.runtime)


_ONE = Case(1, heads=2, tokens=256, head_dim=64)
_WIDE = Case(1, heads=2, tokens=256, head_dim=128)
_RING = Case(4, heads=1, tokens=256, head_dim=64)


def test_a_call_of_one_tile_asks_for_its_stream_its_memory_and_its_kernels(world: _World) -> None:
    """No event, no stream of its own, no wait: out and lse, and in the backward lse with delta."""
    forward, backward = world.counts()
    assert forward == {"current stream": 1, "launches": 1, "tensors made": 2}
    assert backward == {"current stream": 1, "launches": 3, "tensors made": 4}


def test_a_call_of_one_tile_holds_its_results_alone(world: _World) -> None:
    q, k, v = (torch.randn(1, 256, 2, 64, dtype=torch.bfloat16) for _ in range(3))
    plans = burst_rt.explain(q, k, v, causal=True, layout=world.ctx.layout(256))
    assert plans.forward.memory().sums == 0


@pytest.mark.parametrize("world", [_RING], indirect=True)
def test_a_ring_asks_for_little(world: _World) -> None:
    """Of 4 ranks, whose 8 blocks make 7 tiles after this rank's own: 3 exchanges, and sums back."""
    forward, backward = world.counts()
    for counts in (forward, backward):
        assert counts["streams entered"] == 1
        assert counts["current stream"] <= 2
        assert "of these with times" not in counts
        assert "elapsed times" not in counts
        assert "current stream, by Triton" not in counts  # no launch by Triton's own way
    graphs = [world.ctx.runtime.last_run]
    assert graphs[0] is not None
    tasks = [task for task in graphs[0][0].tasks if task.lane != "control"]
    # An event before the first task, one after each, one for each of two lanes, one at the end.
    assert backward["events recorded"] == len(tasks) + 4
    tiles = [task for task in tasks if task.op is not None and task.op.name == "backward"]
    deltas = [task for task in tasks if task.op is not None and task.op.name == "delta"]
    assert backward["launches"] == 2 * len(tiles) + len(deltas)


@pytest.mark.parametrize("world", [_RING], indirect=True)
def test_sums_that_travel_are_not_zeroed_first(world: _World) -> None:
    """The kernel writes them. Zeroes are only of this rank's own sums, made in one go."""
    zeroed = 0
    zero_ = torch.Tensor.zero_

    def counted(x: torch.Tensor) -> torch.Tensor:
        nonlocal zeroed
        zeroed += 1
        return zero_(x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "zero_", counted)
        world.calls[1]()
    assert zeroed == 0


@pytest.mark.parametrize("world", [_ONE, _RING], indirect=True)
def test_times_are_read_when_somebody_asks(world: _World) -> None:
    """140 calls ask for no times. After `stats` calls take them, and read some of older ones."""
    asked: Counter[str] = Counter()
    for _ in range(140):
        asked += Counter(counts_of(world.gpu, world.calls[0]))
    assert asked["elapsed times"] == asked["of these with times"] == 0
    before = world.ctx.stats()
    assert before.compute_s == 0
    counts = counts_of(world.gpu, world.calls[0])
    assert counts["of these with times"] > 0
    assert "elapsed times" not in counts
    num_calls = world.ctx.stats().calls
    assert world.gpu.asked["elapsed times"] > 0
    assert num_calls == before.calls + 1


@pytest.mark.parametrize("world", [_ONE, _RING], indirect=True)
def test_a_run_without_times_has_no_trace(world: _World) -> None:
    with pytest.raises(InputError, match="took no times"):
        world.ctx.gather_last_run()
    world.calls[0]()
    (graph, trace), *_ = world.ctx.gather_last_run()
    assert {span.task for span in trace} == {task.id for task in graph.tasks}


def test_who_looks_on_sees_every_task(world: _World) -> None:
    log = CallLog(Group("0", [0], "local", ""), Totals())
    world.ctx.runtime.observer = log
    assert world.counts()[0]["of these with times"] > 0
    assert log.totals.counts.calls == 2


def test_fresh_memory_is_poisoned(world: _World) -> None:
    world.ctx.attention.poison = True
    assert world.counts()[0]["events recorded"] > 0  # the other way, which fills it


def _launches(call: Callable[[], object]) -> list[tuple[object, ...]]:
    """The arguments of a call's launches, addresses in place of tensors."""
    launches: list[tuple[object, ...]] = []

    def note(*arguments: object) -> None:
        launches.append(arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.gpu_stub.note_launch", note)
        call()
    return [
        tuple(x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments)
        for arguments in launches
    ]


@pytest.mark.parametrize("world", [_ONE, _RING], indirect=True)
def test_a_kept_launch_is_the_one_that_triton_would_make(world: _World) -> None:
    """Arguments of Triton's own way and of a kept launch are equal, but for fresh memory."""
    for call in world.calls:
        kept = _launches(call)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernel, "restart", lambda *_: False)
            own = _launches(call)
        assert len(kept) == len(own) > 0
        for one, other in zip(kept, own, strict=True):
            assert len(one) == len(other)
            same = [a == b for a, b in zip(one, other, strict=True)]
            # All but results (9 pointers at most), and the inputs always.
            assert sum(same) >= len(same) - 9
            assert all(same[7:12]) or len(same) > 12


def test_tables_that_are_gone_are_made_again(world: _World) -> None:
    """A kept launch holds addresses, and not the tables: those have a bound of their own."""
    tables._tables._kept.clear()
    gc.collect()
    forward, backward = world.counts()
    assert (forward["current stream, by Triton"], forward["launches"]) == (1, 1)
    # The delta has no tables.
    assert (backward["current stream, by Triton"], backward["launches"]) == (2, 3)
    assert "current stream, by Triton" not in world.counts()[0]


def test_addresses_off_16_bytes_have_kernels_of_their_own(world: _World) -> None:
    layout = world.ctx.layout(256)
    q = torch.randn(256 * 2 * 64 + 1, dtype=torch.bfloat16)[1:].view(1, 256, 2, 64)
    k, v = (torch.randn(1, 256, 2, 64, dtype=torch.bfloat16) for _ in range(2))

    def call() -> None:
        burst_rt.burst_attention(q, k, v, layout=layout, causal=True)

    for _ in range(3):
        counts = counts_of(world.gpu, call)
        assert (counts["current stream, by Triton"], counts["launches"]) == (1, 1)


def test_a_triton_that_was_not_read_keeps_nothing(
    world: _World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "_TRIED", ((3, 1), (3, 2)))
    start.untried_triton.cache_clear()
    try:
        case = Case(1, heads=3, tokens=256, head_dim=64)
        calls = case.calls(world.ctx)
        for call in calls * 2:
            call()
        assert counts_of(world.gpu, calls[0])["current stream, by Triton"] == 1
        assert str(start.untried_triton()).endswith("was not tried with burst_rt; 3.1 to 3.2 were")
    finally:
        start.untried_triton.cache_clear()


def test_memory_that_runs_out_in_a_kernel_is_an_error_of_its_task(
    world: _World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on the other way: it says which task, and what a call takes; no later call is made."""

    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(kernel.TritonKernel, "forward", no_memory)
    with pytest.raises(DeviceError, match=r"out of memory in 'hop 0 .*this call takes") as raised:
        world.calls[0]()
    assert raised.value.task == "hop 0 q0 kv0.0"
    assert world.ctx.runtime.broken is raised.value


def test_memory_that_runs_out_before_a_kernel_breaks_nothing(
    world: _World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("none left")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", no_memory)
        with pytest.raises(DeviceError, match="out of memory on cpu: this call takes"):
            world.calls[0]()
    assert world.ctx.runtime.usable
    world.calls[0]()


def test_an_error_of_a_kernel_breaks_the_context(
    world: _World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise ValueError("odd")

    monkeypatch.setattr(kernel.TritonKernel, "forward", fails)
    with pytest.raises(ValueError, match="odd") as raised:
        world.calls[0]()
    assert world.ctx.runtime.broken is raised.value


def test_calls_of_many_scales_keep_a_bounded_number_of_things(
    world: _World, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = world.ctx.layout(256)
    q, k, v = (torch.randn(1, 256, 2, 64, dtype=torch.bfloat16) for _ in range(3))
    monkeypatch.setattr("burst_rt.attention.planner._MOST_KEPT", 4)
    plan = burst_rt.explain(q, k, v, layout=layout, causal=True).forward
    for number in range(1, 20):
        burst_rt.burst_attention(q, k, v, layout=layout, causal=True, scale=float(number))
        assert len(plan.kept) <= 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch would find the stand-in of libcuda")
@pytest.mark.parametrize(("world_size", "head_dim"), [(1, 128), (2, 64)])
def test_what_is_kept_reaches_the_driver_as_triton_gives_it(
    tmp_path: Path, world_size: int, head_dim: int
) -> None:
    """Through Triton's real launcher: the same parameters, with the pointers of this call."""
    folder = build_cuda_standin(tmp_path)
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, root / "tests" / "launches.py", str(world_size), str(head_dim)],
        env=with_standin(folder, TRITON_LIBCUDA_PATH=str(folder), PYTHONPATH=str(root)),
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told: dict[bool, list[tuple[str, object, int]]] = {False: [], True: []}
    for name, kept, pointers, parameters, stream in json.loads(done.stdout):
        assert pointers == parameters[: len(pointers)]
        told[kept].append((name, parameters[len(pointers) :], stream))
    forward = [launch for launch in told[False] if launch[0].startswith("forward")]
    backward = told[False][len(forward) :]
    assert len(forward) >= world_size
    assert len(backward) >= 3
    assert told[True] == [*forward, *forward, *backward]


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_kernel_that_triton_cannot_compile_gives_way(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gluon without a function that Hopper's kernels call: calls take the others, and say so once.

    `burst-rt bench tune`, which tries one kernel after another, has the error itself.
    """

    def removed(*_: object, _semantic: object = None) -> None:
        raise RuntimeError("the load has been removed")

    # Triton's cache on disk does not ask what a name means.
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
    for module in (producer, turns, backward_hopper):
        monkeypatch.setattr(module, "async_load", builtin(removed))
    monkeypatch.setattr(chosen, "_no_producer", [])
    gpu = StubGpu()
    q, k, v = (torch.randn(1, 256, 2, 128, dtype=torch.bfloat16) for _ in range(3))
    wanted = default_config(kind, 90, 128, 2, producer=True)
    others = {name: default_config(name, 90, 128, 2) for name in ("forward", "dq", "dkdv")}
    found = others | {kind: wanted}
    monkeypatch.setattr(chosen, "config_of", lambda kind, *_: found.get(kind))
    with stub_triton(gpu.asked):
        with tuned.trial_of(kind, wanted), pytest.raises(CompilationError):
            _World(_WIDE, gpu)
        assert chosen.why_no_producer() is None
        with pytest.warns(
            RuntimeWarning, match=r"the kernels with a producer \(RuntimeError: the load has been"
        ) as said:
            made = _World(_WIDE, gpu)
        assert sum("cannot compile" in str(warning.message) for warning in said) == 1
        assert [counts["launches"] for counts in made.counts()] == [1, 3]
        explained = burst_rt.explain(q, k, v, causal=True, layout=made.ctx.layout(256))
        assert "cannot compile the kernels with a producer" in str(explained)
        made.ctx.close()
        process.open.discard(made.ctx.runtime)
