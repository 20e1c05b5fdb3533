"""The CUDA driver's order, without a GPU: on a device that keeps the books, no use of any part may
be unordered. And the nets must hold.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import FakeDevice, FakeMessages, FakeWire, Part, Race

from burst_rt.drivers import CudaDriver, DriverOptions, Watch
from burst_rt.errors import BurstError, ContractMismatch, DeviceError, Stalled
from burst_rt.job.flight import FlightRecord
from burst_rt.job.flights import read_flight
from burst_rt.scheduler import (
    CONTROL,
    DEVICE_LANES,
    NCCL_LANES,
    NETWORK,
    Graph,
    GraphBuilder,
    Lane,
    Op,
    Schedule,
    run,
)
from burst_rt.telemetry.messages import EndedCall, Group, PlanSummary
from burst_rt.telemetry.model.timeline import SPAN
from burst_rt.telemetry.rank.call_log import CallLog, Totals
from burst_rt.transport import LocalWorld, NoticeKind

_COPIES = (Lane("d2h", ordered=True, device=0), Lane("h2d", ordered=True, device=0))
_LANES = {"nccl": NCCL_LANES, "mpi": DEVICE_LANES, "staged": (*DEVICE_LANES, *_COPIES)}


class Opened:
    """An agreement reached, or refused, after some polls."""

    number = 1

    def __init__(self, polls: int, refusal: BurstError | None = None) -> None:
        self.left = polls
        self.refusal = refusal

    def start(self) -> None:
        pass

    def test(self) -> bool:
        self.left -= 1
        return self.left < 0

    def failure(self) -> BurstError | None:
        return self.refusal


def random_graph(rng: random.Random, lanes: tuple[Lane, ...]) -> Graph:
    """Up to 25 tasks over few parts, so that they get in each other's way."""
    g = GraphBuilder(0, 3, lanes)
    agreed = g.buffer("agreed")
    parts = [g.buffer(f"b{i}", size_bytes=8, initialised=True) for i in range(rng.randint(2, 6))]
    g.compute("agree", Op("agree"), writes=[agreed], lane=CONTROL.name)
    streams = [lane.name for lane in lanes if lane.ordered and not lane.in_program_order]
    for i in range(rng.randint(3, 25)):
        chosen = rng.sample(parts, min(len(parts), rng.randint(1, 3)))
        if rng.random() < 0.4:
            sends = [(part, rng.randint(1, 2)) for part in chosen[1:]]
            g.exchange(
                f"x{i}", sends=sends, recvs=[(chosen[0], rng.randint(1, 2))], tag=i, reads=[agreed]
            )
            continue
        cut = [rng.randint(0, len(chosen)) for _ in range(2)]
        reads, writes, accumulates = (
            chosen[: min(cut)],
            chosen[min(cut) : max(cut)],
            chosen[max(cut) :],
        )
        changed = tuple(part.parts[0].id for part in (*writes, *accumulates))
        read = tuple(part.parts[0].id for part in (*reads, *accumulates))
        lane = rng.choice(streams)
        g.compute(
            f"t{i}",
            Op("work", (read, changed)),
            reads=reads,
            writes=writes,
            accumulates=accumulates,
            lane=lane,
        )
    return g.build()


def drive(
    device: FakeDevice,
    graph: Graph,
    *,
    work: Callable[..., None] | None = None,
    wire: FakeWire | None = None,
    watch: Watch | None = None,
    opening: Opened | None = None,
    timeout_s: float = 20.0,
    stall_s: float = 20.0,
    flight: FlightRecord | None = None,
) -> CudaDriver:
    """One run of the graph, its parts being the same memory for every run on this device."""
    schedule = Schedule.of(graph)
    polls = device.random.randint(0, 5)
    options = DriverOptions(
        operations={Op: lambda op: (work or device.use)(*op.args)},
        memory={part.id: Part(part.id) for part in graph.parts},
        watch=watch or Watch(LocalWorld(3).control(0)),
        opening=opening or Opened(polls),
        timeout_s=timeout_s,
        stall_s=stall_s,
        flight=flight,
    )
    driver = CudaDriver(schedule, device, FakeMessages(device), wire or FakeWire(device), options)
    run(schedule, driver)
    return driver


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(334), id="some"),
        pytest.param(range(334, 3334), id="more", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("kind", _LANES)
def test_no_use_of_memory_is_unordered(kind: str, seeds: range) -> None:
    """1,000 random graphs over all kinds of lanes (10,000 with the long cases), each run twice in a
    row; the caller uses all memory before, between and after.
    """
    for seed in seeds:
        device = FakeDevice(seed)
        graph = random_graph(random.Random(seed), _LANES[kind])
        everything = range(len(graph.parts))
        for _ in range(2):
            device.use((), everything, "caller")
            drive(device, graph).join()
        device.use((), everything, "caller")
        assert device.num_uses >= 3 + 2 * (len(graph.tasks) - 1)


def _caught(kind: str, **broken: Any) -> int:  # methods of FakeDevice
    """Of 300 random graphs: in how many a race is found."""
    found = 0
    for seed in range(300):
        device = FakeDevice(seed)
        for name, method in broken.items():
            setattr(device, name, method.__get__(device))
        graph = random_graph(random.Random(seed), _LANES[kind])
        try:
            device.use((), range(len(graph.parts)), "caller")
            drive(device, graph).join()
            device.use((), range(len(graph.parts)), "caller")
        except Race:
            found += 1
    return found


@pytest.mark.parametrize("kind", _LANES)
def test_a_missing_wait_is_caught(kind: str) -> None:
    """Streams that do not wait for events: most graphs have two lanes that share memory."""
    assert _caught(kind) == 0
    assert (
        _caught(
            kind,
            wait=lambda device, stream, event: (
                FakeDevice.wait(device, stream, event) if stream == "host" else None
            ),
        )
        > 250
    )


@pytest.mark.parametrize("kind", ["mpi", "staged"])
def test_events_the_host_does_not_wait_for_are_caught(kind: str) -> None:
    """A host that takes every event as happened without its having happened."""
    assert _caught(kind, happened=lambda device, event: True) > 200


@pytest.mark.parametrize("dropped", ["compute", "network"])
def test_one_lane_that_waits_for_nothing_is_caught(dropped: str) -> None:
    assert (
        _caught(
            "nccl",
            wait=lambda d, stream, event: (
                None if stream == dropped else FakeDevice.wait(d, stream, event)
            ),
        )
        > 100
    )


def test_two_calls_in_flight_that_share_memory() -> None:
    """From two streams of the caller's: in order if the second waits for what `join` of the first
    returned, a race if not.
    """
    races = 0
    for seed in range(300):
        graph = random_graph(random.Random(seed), NCCL_LANES)
        for waits in (True, False):
            device = FakeDevice(seed)
            released = drive(device, graph).join()
            # Fresh lanes, as another context of the same process has them.
            device.lane = lambda name: f"other {name}"  # type: ignore[method-assign]
            device.current = "other caller"
            if waits:
                device.wait("other caller", released)
            try:
                drive(device, graph).join()
            except Race:
                assert not waits
                races += 1
    assert races > 250


def test_an_ordered_graph_is_never_waited_for() -> None:
    """With NCCL the host sees no event, so no tile waits for it; only the ranks' agreement does."""

    def never(device: FakeDevice, event: object) -> bool:
        raise AssertionError("the host asked for an event")

    for seed in range(100):
        device = FakeDevice(seed)
        device.happened = never.__get__(device)  # type: ignore[method-assign]
        drive(device, random_graph(random.Random(seed), NCCL_LANES)).join()


def test_tiles_are_queued_behind_the_one_that_runs() -> None:
    """Over MPI: all tiles whose data is there are on the stream before any of them has ended."""
    g = GraphBuilder(0, 3, DEVICE_LANES)
    state, slots = (
        g.buffer("state", initialised=True),
        [g.buffer(f"s{i}", size_bytes=8, initialised=True) for i in range(2)],
    )
    for i, slot in enumerate((*slots, slots[0])):
        g.compute(
            f"t{i}",
            Op("work", ((slot.parts[0].id,), (state.parts[0].id,))),
            reads=[slot],
            accumulates=[state],
        )
    g.exchange("x", recvs=[(slots[0], 1)], tag=0)
    g.compute(
        "t3",
        Op("work", ((slots[0].parts[0].id,), (state.parts[0].id,))),
        reads=[slots[0]],
        accumulates=[state],
    )
    device = FakeDevice()
    seen: list[int] = []
    happened = device.happened
    device.happened = lambda event: seen.append(device.num_uses) or happened(event)  # type: ignore[func-returns-value,method-assign]
    drive(device, g.build()).join()
    assert seen[0] == 3  # t0, t1 and t2 were issued before the host first asked
    assert device.num_uses == 5


def test_spans_of_device_tasks_come_when_they_have_ended() -> None:
    device = FakeDevice(3)
    graph = random_graph(random.Random(3), DEVICE_LANES)
    driver = drive(device, graph)
    driver.settle(20.0)
    spans = {span.task: span for span in driver.trace}
    assert set(spans) == set(range(len(graph.tasks)))
    assert all(span.issued_s > 0 and span.ended_s >= span.started_s for span in spans.values())
    assert driver.compute_s >= 0
    assert NETWORK.name in {span.lane for span in spans.values()}


def test_a_rank_that_ends_in_a_launch_leaves_the_task_in_its_record(tmp_path: Path) -> None:
    device, flight = FakeDevice(3), FlightRecord(tmp_path, 0, 3)
    graph = random_graph(random.Random(3), DEVICE_LANES)
    launched: list[str | None] = []

    def doing() -> str | None:
        read = read_flight(tmp_path, 0)
        assert read is not None
        return None if read.doing is None else read.doing.name

    def work(*args: Any) -> None:
        launched.append(doing())
        if len(launched) == 5:
            raise SystemExit
        device.use(*args)

    flight.enter(1, "forward", time.perf_counter(), graph)
    with pytest.raises(SystemExit):
        drive(device, graph, work=work, flight=flight)
    names = {task.name for task in graph.tasks}
    assert len(set(launched)) == 5
    assert set(launched) <= names
    assert doing() == launched[-1]


def test_telemetry_gets_a_devices_spans_when_they_have_ended_and_never_waits() -> None:
    device = FakeDevice(3)
    graph = random_graph(random.Random(3), DEVICE_LANES)
    schedule = Schedule.of(graph)
    entered: list[int] = []  # what was asked of the device before the log entered it
    log = CallLog(
        Group("0-2", [0, 1, 2], "mpi", ""), Totals(), enter=lambda: entered.append(len(asked))
    )
    driver = drive(device, graph)
    happened, asked = device.happened, list[object]()

    def note(event: Any) -> bool:
        asked.append(event)
        return happened(event)

    device.happened = note  # type: ignore[method-assign]
    log.began(5, driver)
    log.ended(schedule, driver, None)
    messages, polls = log.take(), 1
    while not messages:
        messages, polls = log.take(), polls + 1
    assert polls > 1  # the device had not ended when it was first asked
    plan, call = messages
    assert isinstance(plan, PlanSummary)
    assert isinstance(call, EndedCall)
    assert [task.name for task in plan.tasks] == [task.name for task in graph.tasks]
    assert len(call.spans) == SPAN.itemsize * len(graph.tasks)
    assert log.totals.message(0).compute_s == driver.compute_s > 0
    # It began and ended when the device did, whatever the host has done since.
    spans = list(driver.trace)
    assert call.started_s == max(driver.entered_s, log._started_s)
    assert call.ended_s == max([call.started_s, *(span.ended_s for span in spans)])
    assert log.take() == []
    assert asked
    assert entered == [0]


def test_calls_on_a_device_that_are_dropped_count_as_the_others() -> None:
    device = FakeDevice(3)
    graph = random_graph(random.Random(3), DEVICE_LANES)
    schedule, driver = Schedule.of(graph), drive(device, graph)
    while not driver.settled():
        pass
    totals = Totals()
    totals.in_step = True
    log = CallLog(Group("0-2", [0, 1, 2], "mpi", ""), totals)

    def attend(number: int) -> None:
        log.began(number, driver)
        log._started_s = 0.0
        log.ended(schedule, driver, None)

    attend(0)
    assert totals.counts.total_s == 0.0, "the host does not know yet"
    log.take()
    once = totals.message(0)
    assert once.total_s == once.step_call_s > 0
    for number in range(1, 258):  # the last finds no room
        attend(number)
    while log.take():
        pass
    assert log.num_dropped == 1
    counts = totals.message(1)
    assert (counts.calls, counts.traced_calls) == (258, 257)
    for name in ("compute_s", "wait_s", "total_s", "step_call_s"):
        assert getattr(counts, name) == pytest.approx(258 * getattr(once, name)), name


def test_a_task_that_fails_is_the_runs_error() -> None:
    def fail(*_: object) -> None:
        raise DeviceError("out of memory")

    graph = next(
        g
        for g in (random_graph(random.Random(s), NCCL_LANES) for s in range(20))
        if any(t.op and t.op.name == "work" for t in g.tasks)
    )
    with pytest.raises(DeviceError, match="out of memory"):
        drive(FakeDevice(), graph, work=fail)


def test_nothing_is_issued_after_a_task_that_finds_no_memory() -> None:
    """With NCCL all of a graph is issued in one go; what comes after the tile must not be sent."""
    found = 0
    for seed in range(200):
        graph = random_graph(random.Random(seed), NCCL_LANES)
        device = FakeDevice(seed)
        issued: list[int] = []

        def work(reads: object, changed: object, issued: list[int] = issued) -> None:
            issued.append(1)
            if len(issued) == 2:
                raise torch.OutOfMemoryError("CUDA out of memory")

        exchange = []
        device.use = lambda *args, **options: exchange.append(len(issued))  # type: ignore[method-assign]  # noqa: B023
        if sum(1 for task in graph.tasks if task.op and task.op.name == "work") < 2:
            drive(device, graph, work=work)
            continue
        with pytest.raises(
            DeviceError, match=r"rank 0: out of memory in 't\d+' \(CUDA out of memory\)"
        ):
            drive(device, graph, work=work)
        found += 1
        assert len(issued) == 2
        assert all(count < 2 for count in exchange)
    assert found > 100


def _no_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_refused_call_leaves_the_wire_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was sent, and the next call needs it."""
    device, ended = FakeDevice(), []
    wire = FakeWire(device)
    wire.cancel = lambda: ended.append("cancel")  # type: ignore[method-assign]
    g = GraphBuilder(0, 3, NCCL_LANES)
    agreed, part = g.buffer("agreed"), g.buffer("b", size_bytes=8, initialised=True)
    g.compute("agree", Op("agree"), writes=[agreed], lane=CONTROL.name)
    g.compute("tile", Op("work", ((), (1,))), accumulates=[part])
    g.exchange("x", sends=[(part, 1)], tag=0, reads=[agreed])
    with pytest.raises(ContractMismatch, match="other arguments"):
        drive(device, g.build(), wire=wire, opening=Opened(3, ContractMismatch("other arguments")))
    assert not ended
    monkeypatch.setattr(device, "use", _no_memory)
    with pytest.raises(DeviceError, match="out of memory"):
        drive(device, g.build(), wire=wire)
    assert ended == ["cancel"]  # anything else ends it


def test_devices_that_hang_do_not_keep_each_other_alive() -> None:
    """Each rank says that it is alive while its device works; that must not count where one's own
    device is waited for.
    """
    g = GraphBuilder(0, 3, DEVICE_LANES)
    part = g.buffer("b", size_bytes=8, initialised=True)
    g.compute("tile", Op("work", ((), (0,))), accumulates=[part])
    g.exchange("x", sends=[(part, 1)], tag=0)
    world = LocalWorld(3)
    device, other, over = FakeDevice(), world.control(1), threading.Event()
    device.happened = lambda event: False  # type: ignore[method-assign]

    def beat() -> None:
        while not over.wait(0.02):
            other.notify(0, NoticeKind.ALIVE, 0)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(Stalled, match="the device has not finished 'tile'"):
            drive(device, g.build(), timeout_s=0.5, watch=Watch(world.control(0)))
    finally:
        over.set()
        thread.join()


def test_a_device_that_never_ends_is_given_up() -> None:
    device = FakeDevice()
    device.happened = lambda event: False  # type: ignore[method-assign]
    g = GraphBuilder(0, 3, DEVICE_LANES)
    part = g.buffer("b", size_bytes=8, initialised=True)
    g.compute("tile 7", Op("work", ((), (0,))), accumulates=[part])
    g.exchange("x", sends=[(part, 1)], tag=0)
    started_s = time.perf_counter()
    with pytest.raises(Stalled, match="the device has not finished 'tile 7'") as caught:
        drive(device, g.build(), timeout_s=0.3)
    assert caught.value.task == "tile 7"
    assert 0.3 < time.perf_counter() - started_s < 5


def test_a_caller_whose_own_work_never_ends_is_given_up() -> None:
    device = FakeDevice()
    device.happened = lambda event: False  # type: ignore[method-assign]
    g = GraphBuilder(0, 3, DEVICE_LANES)
    g.exchange("x", sends=[(g.buffer("b", size_bytes=8, initialised=True), 1)], tag=0)
    world = LocalWorld(3)
    with pytest.raises(Stalled, match="what the caller put on its stream"):
        drive(device, g.build(), timeout_s=0.3, watch=Watch(world.control(0)), stall_s=0.2)
    peer = Watch(world.control(1))
    peer.require_all()
    peer.look()
    assert 0 in peer.alive  # the others do not take this rank for a stuck one meanwhile
