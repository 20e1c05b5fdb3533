"""What is seen of calls that were issued and have not ended, on doubles of a device and of NCCL;
and how it ends the job."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from issued import HeldDevice, HeldWire, context_of, exchange_graph

import burst_rt
from burst_rt import Context
from burst_rt.drivers.device import TorchDevice
from burst_rt.drivers.watch import Backoff, SharedWatch, Watch
from burst_rt.errors import BurstError, ContractMismatch, DeviceError, PeerLost, Stalled
from burst_rt.job.ending import mpi_takes_threads
from burst_rt.runtime import runtime
from burst_rt.runtime.process import process
from burst_rt.transport import LocalWorld, NoticeKind

_SOON_S = 20.0


@dataclass
class Ends:
    """What would have ended the job."""

    errors: list[BurstError] = field(default_factory=list)
    came: threading.Event = field(default_factory=threading.Event)

    def __call__(self, error: BurstError, abort: Callable[[], None]) -> None:
        abort()
        self.errors.append(error)
        self.came.set()

    def one(self) -> BurstError:
        assert self.came.wait(_SOON_S)
        (error,) = self.errors
        return error


@dataclass
class World:
    """Two ranks; tests hold up rank 0, and rank 1 is whatever else a test makes of it."""

    control: LocalWorld
    ctx: list[Context]
    device: list[HeldDevice]
    wire: list[HeldWire]

    def run(self) -> None:
        """Issues a pipeline on both ranks."""

        def one(rank: int) -> None:
            ctx = self.ctx[rank]
            pipeline = ctx.pipeline(lambda rank: exchange_graph(rank, 2))
            buffers = {name: torch.zeros(8, dtype=torch.uint8) for name in ("mine", "theirs")}
            pipeline.run(buffers=buffers, ops={"work": lambda: None})

        self.both(one)

    def both(self, one: Callable[[int], Any]) -> None:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(one, range(2)))

    def fails(self, code: int = 1) -> None:
        """Rank 1 says so, as a rank does that runs out of memory in a later call, or dies of its
        own error."""
        self.ctx[1].runtime.watch.say_left(code)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Ends:
    ends = Ends()
    monkeypatch.setattr(runtime, "end_job", ends)
    return ends


@pytest.fixture
def world() -> Iterator[World]:
    yield from _world(timeout_s=_SOON_S)


@pytest.fixture
def hasty() -> Iterator[World]:
    """The same with a short deadline."""
    yield from _world(timeout_s=1.0)


def _world(timeout_s: float) -> Iterator[World]:
    local = LocalWorld(2)
    ranks = [context_of(local.control(rank), timeout_s) for rank in range(2)]
    world = World(local, *(list(made) for made in zip(*ranks, strict=True)))
    yield world
    for ctx, device, wire in ranks:
        device.held.clear()
        wire.inside.set()
        ctx.close()
        process.open.discard(ctx.runtime)
        assert ctx.runtime._watchdog is not None
        ctx.runtime._watchdog.stop()
        assert ctx.runtime._watchdog._thread is None or not ctx.runtime._watchdog._thread.is_alive()


def _about(error: BurstError, task: str, why: str) -> None:
    """It says who, in which call, at which task, and why."""
    number = r"rank 0: call \d+ \(Pipeline\.run\) was issued and has not ended"
    assert re.match(rf"{number}, at '{task}': {why}", error.message), error.message
    assert (error.rank, error.task) == (0, task)


def test_a_peer_that_fails_after_issuing(world: World, ends: Ends) -> None:
    world.device[0].held.add("network")
    world.run()
    assert not ends.came.wait(0.3)  # as long as nobody fails, it may take its time
    world.fails()
    error = ends.one()
    _about(error, "hop 1", r"rank 1 failed \(exit code 1\)")
    assert type(error) is PeerLost
    assert error.peer == 1
    assert world.wire[0].cancelled.is_set()
    with pytest.raises(PeerLost, match="this context broke in an earlier call"):
        world.ctx[0].all_reduce(torch.zeros(1))


def test_a_peers_device_that_fails_is_everybodys_error_and_they_are_told(
    world: World, ends: Ends
) -> None:
    world.device[0].held.add("network")
    world.run()
    world.fails(DeviceError.exit_code)
    assert type(ends.one()) is DeviceError
    world.ctx[1].runtime.watch.look()
    assert world.ctx[1].runtime.watch.left[0][1] == DeviceError.exit_code


def test_an_error_of_nccls_that_comes_late(world: World, ends: Ends) -> None:
    world.device[0].held.add("network")
    world.run()
    world.wire[0].error = "NCCL_ERROR_REMOTE_ERROR"
    error = ends.one()
    _about(error, "hop 1", "NCCL failed while moving data: NCCL_ERROR_REMOTE_ERROR")
    assert type(error) is DeviceError
    assert world.wire[0].cancelled.is_set()


def test_a_message_that_never_ends(hasty: World, ends: Ends) -> None:
    hasty.device[0].held.add("network")
    hasty.run()
    error = ends.one()
    _about(error, "hop 1", r"no task of the call has ended for \d\.\d s \(timeout_s\)")
    assert type(error) is Stalled
    assert error.elapsed_s is not None
    assert error.elapsed_s > 1.0
    assert hasty.wire[0].cancelled.is_set()


def test_no_time_passes_while_the_job_is_suspended(
    hasty: World, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    hasty.device[0].held.add("network")
    hasty.run()
    assert not ends.came.wait(0.2)
    clock = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + 3600)
    assert not ends.came.wait(0.2)
    _about(ends.one(), "hop 1", r"no task of the call has ended for 1\.\d s")


def test_work_of_the_callers_may_take_as_long_as_it_likes(hasty: World, ends: Ends) -> None:
    hasty.device[0].held |= {"caller", "compute", "network"}
    hasty.run()
    assert not ends.came.wait(1.7)
    hasty.device[0].held -= {"caller", "compute"}
    _about(ends.one(), "hop 1", "no task of the call has ended for")


def test_tasks_that_end_are_progress(hasty: World, ends: Ends) -> None:
    hasty.device[0].held |= {"compute", "network"}
    hasty.run()
    time.sleep(0.5)
    hasty.device[0].held.remove("network")
    assert not ends.came.wait(0.7)
    _about(ends.one(), "own tile", "no task of the call has ended for")


def test_a_thread_that_does_not_come_back_from_nccl(hasty: World, ends: Ends) -> None:
    """Two ranks that have not met connect there."""
    hasty.wire[0].inside.clear()
    hasty.run()  # comes back, because the watchdog ends it
    _about(ends.one(), "hop 1", r"NCCL has not started its messages for \d\.\d s \(timeout_s\)")
    assert hasty.wire[0].cancelled.is_set()


def test_a_peer_that_fails_while_this_rank_connects_with_it(world: World, ends: Ends) -> None:
    world.wire[0].inside.clear()
    thread = threading.Thread(target=world.run)
    thread.start()
    assert world.wire[0].entered_once.wait(_SOON_S)
    world.fails()
    _about(ends.one(), "hop 1", "rank 1 failed")
    thread.join(_SOON_S)
    assert not thread.is_alive()


def test_a_device_that_fails(world: World, ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(event: object) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    world.device[0].held.add("network")
    world.run()
    monkeypatch.setattr(world.device[0], "happened", broken)
    error = ends.one()
    assert type(error) is DeviceError
    assert (
        "(Pipeline.run) was issued and has not ended: the device failed: CUDA error: an illegal"
        in error.message
    )


@pytest.mark.parametrize("held", [set(), {"compute"}], ids=["ended", "tiles only"])
def test_what_a_failure_cannot_harm_goes_on(world: World, ends: Ends, held: set[str]) -> None:
    """A call that has ended, or whose messages have: its results are right. The next call says
    that the rank is gone."""
    world.device[0].held |= held
    world.run()
    world.fails()
    assert not ends.came.wait(1.5)
    with pytest.raises(PeerLost, match=r"rank 1 failed \(exit code 1\)"):
        world.ctx[0].all_reduce(torch.zeros(1))


def test_a_peer_that_ended_well_is_none_that_failed(world: World, ends: Ends) -> None:
    world.device[0].held.add("network")
    world.run()
    world.ctx[1].close()
    assert not ends.came.wait(1.5)


def test_a_call_that_is_refused_leaves_nothing_to_watch(world: World, ends: Ends) -> None:
    def one(rank: int) -> None:
        ctx = world.ctx[rank]
        x = torch.zeros(1, 8, 1 + rank, 16)
        with pytest.raises(ContractMismatch):
            burst_rt.burst_attention(x, x, x, layout=ctx.layout(16))

    world.both(one)
    world.run()
    assert not ends.came.wait(0.3)


def test_the_thread_sleeps_while_nothing_is_under_way(
    world: World, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    watchdog = world.ctx[0].runtime._watchdog
    assert watchdog is not None
    assert watchdog._thread is None  # not before the first call
    looks: list[float] = []
    look = watchdog._look
    monkeypatch.setattr(watchdog, "_look", lambda: looks.append(time.monotonic()) or look())  # type: ignore[func-returns-value]
    world.run()
    while watchdog._calls:
        time.sleep(0.01)
    num_looks = len(looks)
    time.sleep(0.3)
    assert len(looks) == num_looks
    world.run()
    while watchdog._calls:
        time.sleep(0.01)
    assert len(looks) > num_looks


def test_attention_is_watched_by_name(world: World, ends: Ends) -> None:
    """Forward and backward, the oldest first; what they compute is nothing, because nothing is
    sent."""

    def one(rank: int) -> None:
        x = torch.zeros(1, 8, 1, 16, requires_grad=True)
        out = burst_rt.burst_attention(x, x, x, layout=world.ctx[rank].layout(16))
        with torch.autograd.set_multithreading_enabled(False):
            out.sum().backward()

    world.device[0].held.add("network")
    world.both(one)
    watchdog = world.ctx[0].runtime._watchdog
    assert watchdog is not None
    assert [call.name for call in watchdog._calls] == [
        "burst_attention",
        "backward of burst_attention",
    ]
    world.fails()
    assert "(burst_attention) was issued and has not ended" in ends.one().message


def test_a_closed_contexts_calls_are_watched_to_their_end(hasty: World, ends: Ends) -> None:
    hasty.device[0].held.add("network")
    hasty.run()
    hasty.ctx[0].close()
    _about(ends.one(), "hop 1", "no task of the call has ended for")


def test_an_error_of_this_ranks_own_call_is_the_one_that_is_told(world: World, ends: Ends) -> None:
    """A tile finds no memory: the others hear of it, the program has its error, and the job is
    not ended behind its back."""

    def one(rank: int) -> None:
        ran: list[None] = []

        def work() -> None:
            ran.append(None)
            if rank == 0 and len(ran) == 2:  # after its message
                raise torch.OutOfMemoryError("CUDA out of memory")

        pipeline = world.ctx[rank].pipeline(lambda rank: exchange_graph(rank, 2))
        buffers = {name: torch.zeros(8, dtype=torch.uint8) for name in ("mine", "theirs")}
        world.device[1].held.add("network")
        if rank == 0:
            with pytest.raises(DeviceError, match="out of memory"):
                pipeline.run(buffers=buffers, ops={"work": work})
        else:
            pipeline.run(buffers=buffers, ops={"work": work})

    world.both(one)
    error = ends.one()
    assert type(error) is DeviceError
    assert (error.rank, error.peer) == (1, 0)
    assert world.wire[0].cancelled.is_set()


def test_the_thread_does_not_disturb_a_capture_of_the_programs(
    world: World, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is on the right device before it asks anything, and CUDA is told that captures of other
    threads do not concern it."""
    did: list[object] = []

    class Driver:
        @staticmethod
        def cuThreadExchangeStreamCaptureMode(mode: Any) -> int:
            did.append((mode._obj.value, threading.current_thread().name))
            return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name: did.append(name) or Driver)  # type: ignore[func-returns-value]
    monkeypatch.setattr(torch.cuda, "set_device", did.append)
    device = TorchDevice(torch.device("cuda", 1))
    monkeypatch.setattr(world.device[0], "enter_to_watch", device.enter_to_watch)
    world.run()
    watchdog = world.ctx[0].runtime._watchdog
    assert watchdog is not None
    while watchdog._calls:
        time.sleep(0.01)
    assert did == [torch.device("cuda", 1), "libcuda.so.1", (1, "burst_rt watchdog 0")]


def test_host_contexts_have_neither_thread_nor_lock() -> None:
    with burst_rt.init(device="cpu") as ctx:
        assert ctx.runtime._watchdog is None
        assert type(ctx.runtime.watch) is Watch


def test_notices_are_read_by_one_thread_at_a_time() -> None:
    """None is lost, and who goes through them is not disturbed."""
    world = LocalWorld(2)
    watch, other, inside, over = (
        SharedWatch(world.control(0)),
        world.control(1),
        [0],
        threading.Event(),
    )
    notices = watch.control.notices

    def alone() -> list[Any]:
        inside[0] += 1
        assert inside[0] == 1
        found = notices()
        time.sleep(0)
        inside[0] -= 1
        return found

    watch.control.notices = alone  # type: ignore[method-assign]

    def read() -> None:
        while not over.is_set():
            watch.look()
            assert watch.lost(1) is None

    with ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(read) for _ in range(3)]
        for task in range(2000):
            other.notify(0, NoticeKind.ALIVE, task)
        time.sleep(0.05)
        over.set()
        for reader in readers:
            reader.result(_SOON_S)
    assert watch.alive[1][1] == 1999


@pytest.mark.parametrize(
    ("level", "initialized", "finalized", "may"),
    [
        (3, True, False, True),
        (2, True, False, False),
        (3, False, False, False),
        (3, True, True, False),
    ],
)
def test_a_second_thread_keeps_out_of_an_mpi_that_takes_one(
    monkeypatch: pytest.MonkeyPatch, level: int, initialized: bool, finalized: bool, may: bool
) -> None:
    mpi = SimpleNamespace(
        THREAD_MULTIPLE=3,
        Query_thread=lambda: level,
        Is_initialized=lambda: initialized,
        Is_finalized=lambda: finalized,
    )
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    assert mpi_takes_threads() is may


def test_the_end_of_a_job_is_a_line_and_an_exit_code() -> None:
    """Whatever the program's own thread does, and even if the device cannot be told."""
    source = """
import threading, time
from burst_rt.job.ending import end_job
from burst_rt.errors import Stalled
threading.Thread(target=end_job, args=(Stalled("rank 3: call 7 (Pipeline.run) ..."),
lambda: time.sleep(60))).start()
time.sleep(60)
"""
    started_s = time.monotonic()
    words = [sys.executable, "-P", "-c", source]
    done = subprocess.run(words, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == Stalled.exit_code
    assert done.stderr == "burst-rt: Stalled: rank 3: call 7 (Pipeline.run) ...\n"
    assert time.monotonic() - started_s < 30


def test_a_wait_polls_hot_before_it_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("burst_rt.drivers.watch._HOT_S", 60.0)
    backoff = Backoff()
    assert not backoff.pause()
    monkeypatch.setattr("burst_rt.drivers.watch._HOT_S", 0.0)
    assert backoff.pause()
