"""A GPU that is not there: the host's side of a GPU call, on a CPU, with what it asks for counted.

Triton's driver, the streams, the wire of NCCL and the other ranks are stand-ins. Triton compiles
its kernels for an H100, launches do nothing, tensors lie on the CPU: all other code is the real
one. `python gpu_stub.py CASE ...` answers each line of its standard input with thread CPU times;
`benchmarks/host.py` asks it in two builds, so that it takes from burst_rt what both have.

What it cannot show: what CUDA and torch's allocator take, and what is done for CUDA tensors alone
(the device is entered, a table is awaited).
"""

from __future__ import annotations

import inspect
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import burst_rt
from burst_rt import Context
from burst_rt.attention.state import AttentionState
from burst_rt.drivers.device import TorchDevice
from burst_rt.kernels.triton import TritonKernel, chosen
from burst_rt.runtime.choosing import TransportChoice
from burst_rt.runtime.machine import Machine
from burst_rt.runtime.runtime import Runtime
from burst_rt.transport import LocalWorld

__all__ = ["CASES", "Case", "StubGpu", "counts_of", "note_launch", "stub_context", "stub_triton"]

_CPU = torch.device("cpu")
# Functions of torch that make a tensor, where the package calls them.
_MAKERS = ("empty", "zeros", "empty_like", "zeros_like")


# Whether a build's events have times where it does not say so: in builds that cannot say so.
_TIMED = "timed" not in inspect.signature(TorchDevice.record).parameters


class StubGpu:
    """A `StreamDevice` of plain objects. `asked` counts what it is asked for."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

    def enter(self) -> None:
        pass

    def enter_to_watch(self) -> None:
        pass

    def is_current(self) -> bool:
        return True

    def caller(self) -> str:
        self.asked["current stream"] += 1
        return "caller"

    def lane(self, name: str) -> str:
        return name

    def handle(self, stream: str) -> int:
        return 1

    def record(self, stream: str, *, timed: bool = _TIMED) -> object:
        self.asked["events recorded"] += 1
        self.asked["of these with times"] += timed
        return object()

    def wait(self, stream: str, event: object) -> None:
        self.asked["waits"] += 1

    def happened(self, event: object) -> bool:
        self.asked["events queried"] += 1
        return True

    def seconds(self, first: object, last: object) -> float:
        self.asked["elapsed times"] += 1
        return 0.0

    def origin(self) -> tuple[object, float]:
        return object(), time.perf_counter()

    def on(self, stream: str, name: str = "") -> Any:
        self.asked["streams entered"] += 1
        return nullcontext()

    def begin(self, name: str) -> None:
        pass

    def end(self) -> None:
        pass


class _StubWire:
    """An `OrderedTransport` whose messages go nowhere."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.bytes_sent = self.bytes_received = 0
        self.entered_s: float | None = None

    def exchange(self, sends: Any, recvs: Any, stream: int) -> None:
        pass

    def check(self) -> None:
        pass

    def cancel(self) -> None:
        pass

    def close(self) -> None:
        pass


class _Done:
    """What a control group has begun, and has ended."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def test(self) -> bool:
        return True

    def result(self) -> Any:
        return self._value


class _StubControl:
    """A `ControlGroup` whose other ranks agree at once."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size
        self.places = [(0, rank) for rank in range(size)]

    def allreduce_max(self, values: Any) -> _Done:
        return _Done(list(values))

    def allreduce_sum(self, array: Any) -> _Done:
        return _Done(array)

    def allgather(self, payload: bytes) -> _Done:
        return _Done([payload] * self.size)

    def notify(self, *_: Any) -> None:
        pass

    def notices(self) -> list[Any]:
        return []

    def close(self) -> None:
        pass


def _stub_driver(asked: Counter[str]) -> Any:
    """A driver of Triton's for an H100 that launches nothing."""

    class Launcher:
        def __init__(self, source: Any, metadata: Any) -> None:
            pass

        def __call__(self, *arguments: Any) -> None:
            asked["launches"] += 1
            note_launch(*arguments)

    def current_stream(device: int) -> int:
        asked["current stream, by Triton"] += 1
        return 1

    properties = {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}
    return SimpleNamespace(
        launcher_cls=Launcher,
        utils=SimpleNamespace(
            load_binary=lambda *_: ("module", 0, 100, 0, 1024),
            get_device_properties=lambda device: properties,
        ),
        get_current_device=lambda: 0,
        get_current_stream=current_stream,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_active_torch_device=lambda: _CPU,
        is_active=lambda: True,
    )


def note_launch(*arguments: object) -> None:
    """Is told the arguments of each launch, for tests that replace it."""


@contextmanager
def stub_triton(asked: Counter[str]) -> Iterator[None]:
    """Inside, Triton and its kernels take the CPU for an H100."""
    forget_all()
    with (
        mock.patch.object(driver, "_active", _stub_driver(asked)),
        mock.patch.object(chosen, "under_interpreter", return_value=False),
        mock.patch.object(chosen, "arch_or_none", return_value=90),
        mock.patch.object(chosen, "processors", return_value=132),
        mock.patch.object(TritonKernel, "refuses", return_value=None),
    ):
        yield
    forget_all()


def forget_all() -> None:
    """Lets go of kernels that were compiled for a driver."""
    from burst_rt.kernels.triton import backward_hopper, delta, dkdv, dq, forward, forward_hopper

    for kernel in (
        delta.delta_kernel, dkdv.dkdv_kernel, dq.dq_kernel, forward.forward_kernel,
        forward_hopper.forward_hopper_kernel, backward_hopper.backward_hopper_kernel,
    ):  # fmt: skip
        for compiled, *_ in kernel.device_caches.values():
            for each in compiled.values():
                each.module = None  # else Triton 3.8 asks the driver to unload it
        kernel.device_caches.clear()


def stub_context(gpu: StubGpu, world_size: int) -> Context:
    """A context of rank 0 on the stub, over NCCL where it is not alone."""
    alone = world_size == 1
    control: Any = LocalWorld(1).control(0) if alone else _StubControl(world_size)
    choice = TransportChoice("local", "a stub") if alone else TransportChoice("nccl", "", "nccl")
    carrier: Any = LocalWorld(1).transport(0) if alone else _StubWire(0, world_size)
    machine = Machine(_CPU, choice, carrier, streams=gpu)
    runtime = Runtime(machine, control, timeout_s=600, stall_s=30)
    state = AttentionState(runtime, kernel="triton", partials="exact", check_finite=False)
    return Context(runtime, state)


class Case(NamedTuple):
    """A causal call of rank 0."""

    world_size: int
    heads: int
    tokens: int  # a rank's: few, because torch's operators do their work, on a CPU
    head_dim: int = 128

    def calls(self, ctx: Context) -> tuple[Callable[[], object], Callable[[], object]]:
        """A forward, and a backward of a forward that was made before."""
        layout = ctx.layout(self.tokens * self.world_size)
        shape = (1, self.tokens, self.heads, self.head_dim)
        q, k, v, dout = (torch.randn(shape, dtype=torch.bfloat16) for _ in range(4))
        inputs = [x.requires_grad_() for x in (q, k, v)]

        def forward() -> torch.Tensor:
            strategy = "auto" if self.world_size == 1 else "ring-kv"
            return burst_rt.burst_attention(*inputs, layout=layout, causal=True, strategy=strategy)

        out = forward()
        return forward, lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


CASES = {
    "one": Case(1, heads=16, tokens=1024),
    "ring of 2": Case(2, heads=1, tokens=256),
    "ring of 8": Case(8, heads=1, tokens=256),
    "ring of 64": Case(64, heads=1, tokens=256),
}


def counts_of(gpu: StubGpu, call: Callable[[], object]) -> dict[str, int]:
    """What a call asks the device and torch for."""
    gpu.asked.clear()
    with ExitStack() as patches:
        for name in _MAKERS:
            patches.enter_context(mock.patch.object(torch, name, _counting(gpu, name)))
        call()
    return {name: number for name, number in sorted(gpu.asked.items()) if number}


def _counting(gpu: StubGpu, name: str) -> Callable[..., torch.Tensor]:
    make = getattr(torch, name)

    def counted(*arguments: Any, **options: Any) -> torch.Tensor:
        gpu.asked["tensors made"] += 1
        result: torch.Tensor = make(*arguments, **options)
        return result

    return counted


def _thread_s(call: Callable[[], object], number: int) -> float:
    """The median of the thread CPU times of some calls, in seconds."""
    times = []
    for _ in range(number):
        start_s = time.thread_time()
        call()
        times.append(time.thread_time() - start_s)
    return sorted(times)[len(times) // 2]


def _answer(name: str) -> None:
    """Prints what a case's two calls ask for, then times: a line for each line that is read."""
    torch.set_num_threads(1)
    case, gpu = CASES[name], StubGpu()
    number = 300 if case.world_size == 1 else max(5, 160 // case.world_size)
    with stub_triton(gpu.asked):
        ctx = stub_context(gpu, case.world_size)
        calls = case.calls(ctx)
        for call in calls * 3:
            call()
        asked = [counts_of(gpu, call) for call in calls]
        worst: Counter[str] = Counter()
        for _ in range(140):
            worst |= Counter(counts_of(gpu, calls[0]))
        print(json.dumps([*asked, worst]), flush=True)
        for _ in sys.stdin:
            print(json.dumps([_thread_s(call, number) for call in calls]), flush=True)
    sys.stdout.flush()


if __name__ == "__main__":
    import os

    _answer(sys.argv[1])
    os._exit(0)  # watchdogs of the stub have nothing to end
