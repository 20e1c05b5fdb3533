"""The host driver on ranks that are threads: whole runs, deadlines, signs of life, peers that
leave, and what it refuses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace

import pytest

from burst_rt.drivers import DriverOptions, HostDriver, Watch, host
from burst_rt.drivers import watch as watch_module
from burst_rt.errors import (
    BurstError,
    ContractMismatch,
    DeviceError,
    InternalError,
    PeerLost,
    ProtocolError,
    Stalled,
)
from burst_rt.planning.operations import Delta
from burst_rt.scheduler import Cost, Graph, GraphBuilder, Op, Schedule, Trace, check_world, run
from burst_rt.transport import LocalTransport, LocalWorld, NoticeKind

# Longer than anything here takes on the slowest machine; a wait that reaches it has failed.
_LONG_S = 30.0
_BYTES = 8


@dataclass
class _Opening:
    """Decides `after_s` after its start, with `error` or without."""

    after_s: float = 0.0
    error: BurstError | None = None
    started_s: float | None = None
    num_tests: int = 0
    number: int = 1

    def start(self) -> None:
        self.started_s = time.perf_counter()

    def test(self) -> bool:
        assert self.started_s is not None
        self.num_tests += 1
        return time.perf_counter() - self.started_s >= self.after_s

    def failure(self) -> BurstError | None:
        return self.error


@dataclass
class _Rank:
    """One rank's end of a world, its memory (8 bytes a part) and what a run leaves behind."""

    world: LocalWorld
    graph: Graph
    timeout_s: float = _LONG_S
    stall_s: float = _LONG_S
    opening: _Opening = field(default_factory=_Opening)
    one_of_several: bool = False

    def __post_init__(self) -> None:
        self.transport: LocalTransport = self.world.transport(self.graph.rank)
        self.watch = Watch(self.world.control(self.graph.rank))
        self.bytes = [
            bytearray(bytes([16 * self.graph.rank + part.id]) * _BYTES) for part in self.graph.parts
        ]
        self.ops: dict[str, Callable[..., None]] = {
            "add": self.add,
            "sleep": time.sleep,
            "progress": self.make_progress,
        }
        self.driver = HostDriver(
            self.graph,
            self.transport,
            DriverOptions(
                operations={Op: lambda op: self.ops[op.name](*op.args)},
                memory={i: memoryview(part) for i, part in enumerate(self.bytes)},
                watch=self.watch,
                opening=self.opening,
                timeout_s=self.timeout_s,
                stall_s=self.stall_s,
                one_of_several=self.one_of_several,
            ),
        )

    def add(self, source: int, target: int) -> None:
        """Every byte of a part is added to those of another."""
        for i in range(_BYTES):
            self.bytes[target][i] = (3 * self.bytes[target][i] + self.bytes[source][i]) % 256

    def make_progress(self, duration_s: float) -> None:
        """Computes for a while as a kernel should: it lets the driver have its turn now and
        then.
        """
        until_s = time.perf_counter() + duration_s
        while time.perf_counter() < until_s:
            time.sleep(0.01)
            self.driver.progress()

    def run(self) -> Trace:
        run(Schedule.of(self.graph), self.driver, validate=True)
        return self.driver.trace


def _run_together(mains: Sequence[Callable[[], object]]) -> None:
    """Runs functions in a thread each; raises what one of them raised. They end by themselves: all
    they wait for has a deadline.
    """
    with ThreadPoolExecutor(len(mains)) as pool:
        for running in [pool.submit(main) for main in mains]:
            running.result()


def _receiver(peer: int = 1, world_size: int = 2) -> Graph:
    """Rank 0 opens the call, receives a part, and adds it to another."""
    g = GraphBuilder(0, world_size)
    agreed = g.buffer("agreed")
    out, slot = g.buffer("out", initialised=True), g.buffer("slot", size_bytes=_BYTES)
    g.compute("agree", Op("agree"), writes=[agreed], lane="control")
    g.exchange("receive", recvs=[(slot, peer)], tag=0, reads=[agreed], hop=3)
    g.compute("tile", Op("add", (slot[0].id, out[0].id)), reads=[slot], accumulates=[out], hop=4)
    return g.build()


def _sender(rank: int = 1, world_size: int = 2, *, first: Sequence[Op] = (), to: int = 0) -> Graph:
    """A rank that performs some operations, one after another, and then sends a part."""
    g = GraphBuilder(rank, world_size)
    source = g.buffer("source", size_bytes=_BYTES, initialised=True)
    for i, op in enumerate(first):
        g.compute(f"first {i}", op, accumulates=[source])
    g.exchange("send", sends=[(source, to)], tag=0)
    return g.build()


# Whole runs.


def _ring(rank: int, world_size: int) -> Graph:
    g = GraphBuilder(rank, world_size)
    agreed = g.buffer("agreed")
    own = g.buffer("own", size_bytes=_BYTES, initialised=True)
    slots = [g.buffer(f"slot{i}", size_bytes=_BYTES) for i in range(2)]
    out = g.buffer("out", initialised=True)
    g.compute("agree", Op("agree"), writes=[agreed], lane="control")
    for hop in range(world_size):
        here = slots[hop % 2] if hop else own
        if hop + 1 < world_size:
            sends, recvs = (
                [(here, (rank + 1) % world_size)],
                [(slots[(hop + 1) % 2], (rank - 1) % world_size)],
            )
            g.exchange(f"hop {hop}", sends=sends, recvs=recvs, tag=hop, reads=[agreed])
        g.compute(
            f"tile {hop}", Op("add", (here[0].id, out[0].id)), reads=[here], accumulates=[out]
        )
    return g.build()


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_a_ring_over_threads(world_size: int) -> None:
    graphs = [_ring(rank, world_size) for rank in range(world_size)]
    check_world(graphs)
    for _ in range(5):
        world = LocalWorld(world_size)
        ranks = [_Rank(world, graph) for graph in graphs]
        _run_together([rank.run for rank in ranks])
        for rank in ranks:
            own, out = (
                next(part.id for part in rank.graph.parts if part.buffer == name)
                for name in ("own", "out")
            )
            number = rank.graph.rank
            value = 16 * number + out
            for hop in range(world_size):
                value = 3 * value + 16 * ((number - hop) % world_size) + own
            assert rank.bytes[out] == bytes([value % 256]) * _BYTES
            spans = {span.task: span for span in rank.driver.trace}
            assert sorted(spans) == [task.id for task in rank.graph.tasks]
            assert all(span.issued_s <= span.started_s <= span.ended_s for span in spans.values())
            assert [(s.name, s.lane, s.size_bytes) for _, s in sorted(spans.items())] == [
                (t.name, t.lane, t.cost.size_bytes) for t in rank.graph.tasks
            ]
            total = (world_size - 1) * _BYTES
            assert (rank.transport.bytes_sent, rank.transport.bytes_received) == (total, total)


def test_times_add_up() -> None:
    world = LocalWorld(2)
    receiver, sender = _Rank(world, _receiver()), _Rank(world, _sender(first=[Op("sleep", (0.5,))]))
    _run_together([receiver.run, sender.run])
    # The other rank computed all the time that this one waited for its message.
    assert sender.driver.compute_s >= 0.5
    assert sender.driver.wait_s < 0.5
    assert 0.25 <= receiver.driver.wait_s < _LONG_S
    assert receiver.driver.compute_s < 0.5


def _oversleep(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], object]) -> None:
    """The first sleep of a wait takes half a second; at its beginning something happens."""
    naps = iter([meanwhile])

    def sleep(_: float) -> None:
        for happens in naps:
            happens()
            time.sleep(0.5)

    clock = SimpleNamespace(perf_counter=time.perf_counter, sleep=sleep)
    monkeypatch.setattr(watch_module, "time", clock)


def test_what_came_while_a_wait_overslept_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    world = LocalWorld(2)
    receiver, sender = _Rank(world, _receiver(), stall_s=0.1), _Rank(world, _sender())
    _oversleep(monkeypatch, sender.run)
    receiver.run()
    groups = [world.control(rank) for rank in range(2)]
    pending = groups[0].allgather(b"0")
    _oversleep(monkeypatch, lambda: groups[1].allgather(b"1"))
    Watch(groups[0]).wait_for(pending, 0.1, "unshard")
    assert pending.result() == [b"0", b"1"]


def _suspend(monkeypatch: pytest.MonkeyPatch, then: Callable[[], object]) -> None:
    """An hour passes in the third sleep of a wait; something happens in the tenth after it."""
    clock, sleep, hours = time.perf_counter, time.sleep, 0
    naps = iter(range(1, 13))

    def nap(seconds: float) -> None:
        nonlocal hours
        sleep(seconds)
        match next(naps, 0):
            case 3:
                hours = 1
            case 12:
                then()

    monkeypatch.setattr(time, "perf_counter", lambda: clock() + 3600 * hours)
    monkeypatch.setattr(time, "sleep", nap)


def test_no_deadline_passes_while_a_job_is_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    world = LocalWorld(2)
    receiver, sender = _Rank(world, _receiver(), stall_s=5.0), _Rank(world, _sender())
    _suspend(monkeypatch, sender.run)
    receiver.run()
    monkeypatch.undo()
    groups = [world.control(rank) for rank in range(2)]
    pending = groups[0].allgather(b"0")
    _suspend(monkeypatch, lambda: groups[1].allgather(b"1"))
    Watch(groups[0]).wait_for(pending, 5.0, "unshard")
    assert pending.result() == [b"0", b"1"]


def test_waiting_burns_no_core() -> None:
    world = LocalWorld(2)
    receiver, sender = _Rank(world, _receiver()), _Rank(world, _sender(first=[Op("sleep", (1.0,))]))
    used_s: list[float] = []

    def receive() -> None:
        before_s = time.thread_time()
        receiver.run()
        used_s.append(time.thread_time() - before_s)

    _run_together([receive, sender.run])
    assert used_s[0] < 0.5


# Deadlines.


@pytest.mark.parametrize("sends", [True, False])
def test_a_rank_that_is_in_a_later_call_may_have_sent_its_messages(
    monkeypatch: pytest.MonkeyPatch, *, sends: bool
) -> None:
    """Its word comes by another way than they do, and before them."""
    monkeypatch.setattr("burst_rt.drivers.base._ASKS_AFTER_S", 0.5)
    world = LocalWorld(2)
    receiver = _Rank(world, _receiver(), one_of_several=True)

    def send_late() -> None:
        time.sleep(1.5)  # the receiver has asked, and waited for longer than it waits for an answer
        Watch(world.control(1)).say_entered(2, waited_s=1.0, timeout_s=1.0)
        time.sleep(0.1)
        if sends:
            world.transport(1).isend(memoryview(bytearray(_BYTES)), 0, 0)

    if sends:
        _run_together([receiver.run, send_late])
        return
    with pytest.raises(ContractMismatch, match=r"rank 1 left this step.* and waits in call 2\."):
        _run_together([receiver.run, send_late])


def test_a_peer_that_never_sends_is_a_stall() -> None:
    receiver = _Rank(LocalWorld(2), _receiver(), stall_s=0.3)
    began_s = time.perf_counter()
    with pytest.raises(
        Stalled,
        match=(
            r"rank 0: nothing moved for 0\.\d s \(stall_s\) in task 'receive', which waits for "
            r"rank 1; last sign of life: none"
        ),
    ) as caught:
        receiver.run()
    assert 0.3 <= time.perf_counter() - began_s < _LONG_S
    assert (caught.value.rank, caught.value.peer, caught.value.task) == (0, 1, "receive")
    assert caught.value.elapsed_s is not None
    assert caught.value.elapsed_s >= 0.3


def test_a_stall_names_the_peer_whose_message_is_open() -> None:
    """The other peer's message has come: that rank is not the one that is stuck."""
    g = GraphBuilder(0, 3)
    slots = [g.buffer(f"slot {peer}", size_bytes=_BYTES) for peer in (1, 2)]
    g.exchange("receive", recvs=[(slots[0], 1), (slots[1], 2)], tag=0)
    world = LocalWorld(3)
    receiver = _Rank(world, g.build(), stall_s=0.3)
    world.transport(1).isend(memoryview(bytearray(_BYTES)), 0, 0)
    with pytest.raises(
        Stalled, match=r"in task 'receive', which waits for rank 2; last sign of life"
    ) as caught:
        receiver.run()
    assert caught.value.peer == 2


def test_after_a_stall_late_messages_touch_nothing() -> None:
    world = LocalWorld(2)
    receiver = _Rank(world, _receiver(), stall_s=0.1)
    with pytest.raises(Stalled):
        receiver.run()
    before = [bytes(part) for part in receiver.bytes]
    late = world.transport(1)
    late.isend(memoryview(b"too late"), 0, 0)
    assert late.poll() == []
    assert [bytes(part) for part in receiver.bytes] == before


def test_a_message_starts_the_deadline_again() -> None:
    world = LocalWorld(2)
    g = GraphBuilder(0, 2)
    slots = [g.buffer(f"slot{i}", size_bytes=_BYTES) for i in range(4)]
    for tag, slot in enumerate(slots):
        g.exchange(f"receive {tag}", recvs=[(slot, 1)], tag=tag)
    receiver = _Rank(world, g.build(), stall_s=0.8)

    def send_slowly() -> None:
        transport = world.transport(1)
        for tag in range(len(slots)):
            time.sleep(0.3)
            transport.isend(memoryview(bytearray(_BYTES)), 0, tag)

    _run_together([receiver.run, send_slowly])
    assert len(receiver.driver.trace) == len(slots)


@pytest.mark.parametrize("teller", [1, 2])
def test_a_sign_of_life_from_any_rank_extends_the_wait(teller: int) -> None:
    world = LocalWorld(3)
    receiver = _Rank(world, _receiver(world_size=3), stall_s=0.8)

    def live_then_send() -> None:
        control, transport = world.control(teller), world.transport(1)
        for beat in range(10):
            control.notify(0, NoticeKind.ALIVE, beat)
            time.sleep(0.15)
        transport.isend(memoryview(bytearray(_BYTES)), 0, 0)

    _run_together([receiver.run, live_then_send])
    assert len(receiver.driver.trace) == len(receiver.graph.tasks)


def test_once_the_signs_of_life_end_so_does_the_wait() -> None:
    world = LocalWorld(2)
    receiver = _Rank(world, _receiver(), stall_s=0.3)
    world.control(1).notify(0, NoticeKind.ALIVE, 17)
    with pytest.raises(Stalled, match=r"last sign of life: \{1: 'task 17'\}"):
        receiver.run()


@pytest.mark.parametrize(
    "first",
    [[Op("progress", (1.8,))], [Op("sleep", (0.1,))] * 18],
    ids=["one long task", "many short ones"],
)
def test_a_rank_that_computes_for_long_is_not_taken_for_a_stuck_one(first: list[Op]) -> None:
    world = LocalWorld(2)
    receiver, sender = (
        _Rank(world, _receiver(), stall_s=0.8),
        _Rank(world, _sender(first=first), stall_s=0.8),
    )
    _run_together([receiver.run, sender.run])
    assert 1 in receiver.watch.alive


def test_who_waits_for_one_that_waits_hears_of_the_rank_that_computes() -> None:
    world = LocalWorld(3)
    g = GraphBuilder(1, 3)
    slot = g.buffer("slot", size_bytes=_BYTES)
    g.exchange("receive", recvs=[(slot, 2)], tag=0)
    g.exchange("send on", sends=[(slot, 0)], tag=0)
    graphs = [
        _receiver(world_size=3),
        g.build(),
        _sender(2, 3, first=[Op("progress", (1.8,))], to=1),
    ]
    check_world(graphs)
    _run_together([_Rank(world, graph, stall_s=0.8).run for graph in graphs])


# The opening.


def test_ranks_that_never_enter_are_a_stall() -> None:
    receiver = _Rank(LocalWorld(2), _receiver(), timeout_s=0.3, opening=_Opening(after_s=_LONG_S))
    with pytest.raises(
        Stalled, match=r"rank 0: waited 0\.\d s \(timeout_s\) for the other ranks to enter call \d+"
    ) as caught:
        receiver.run()
    assert (caught.value.rank, caught.value.task) == (0, "agree")


def test_entering_may_take_longer_than_a_message() -> None:
    world = LocalWorld(2)
    receiver = _Rank(world, _receiver(), stall_s=0.2, opening=_Opening(after_s=0.6))
    sender = world.transport(1)
    sender.isend(memoryview(bytearray(_BYTES)), 0, 0)
    receiver.run()
    assert receiver.transport.bytes_received == _BYTES


def test_when_the_opening_fails_nothing_is_posted() -> None:
    world = LocalWorld(2)
    error = ContractMismatch("the ranks do not agree")
    receiver = _Rank(world, _receiver(), opening=_Opening(after_s=0.1, error=error))
    with pytest.raises(ContractMismatch) as caught:
        receiver.run()
    assert caught.value is error
    sender = world.transport(1)
    sender.isend(memoryview(bytearray(_BYTES)), 0, 0)
    assert sender.poll() == []


def test_work_that_needs_no_message_runs_before_the_opening_has_ended() -> None:
    g = GraphBuilder(0, 2)
    agreed, out = g.buffer("agreed"), g.buffer("out", initialised=True)
    g.compute("agree", Op("agree"), writes=[agreed], lane="control")
    g.compute("tile", Op("progress", (0.3,)), accumulates=[out])
    rank = _Rank(LocalWorld(2), g.build(), opening=_Opening(after_s=0.2))
    rank.run()
    spans = {span.name: span for span in rank.driver.trace}
    assert spans["tile"].started_s < spans["agree"].ended_s
    # The tile's progress polls the opening, too.
    assert rank.opening.num_tests > 5


class _Rounds(_Opening):
    """Decides when it is asked for the third time."""

    def test(self) -> bool:
        return super().test() and self.num_tests >= 3


@pytest.mark.parametrize(("flops", "waits"), [(0, False), (10**6, False), (10**13, True)])
def test_a_long_task_waits_a_moment_for_the_opening(
    flops: int, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_MOST_PATIENCE_S", _LONG_S)
    g = GraphBuilder(0, 2)
    agreed, out = g.buffer("agreed"), g.buffer("out", initialised=True)
    g.compute("agree", Op("agree"), writes=[agreed], lane="control")
    g.compute("tile", Op("sleep", (0.01,)), accumulates=[out], cost=Cost(flops=flops))
    rank = _Rank(LocalWorld(2), g.build(), opening=_Rounds())
    rank.run()
    spans = {span.name: span for span in rank.driver.trace}
    assert (spans["agree"].ended_s <= spans["tile"].started_s) == waits


def test_a_long_task_waits_no_longer_than_a_moment() -> None:
    g = GraphBuilder(0, 2)
    agreed, out = g.buffer("agreed"), g.buffer("out", initialised=True)
    g.compute("agree", Op("agree"), writes=[agreed], lane="control")
    g.compute("tile", Op("sleep", (0.01,)), accumulates=[out], cost=Cost(flops=10**15))
    rank = _Rank(LocalWorld(2), g.build(), opening=_Opening(after_s=1.0))
    rank.run()
    spans = {span.name: span for span in rank.driver.trace}
    assert spans["tile"].ended_s < spans["agree"].ended_s


# Ranks that leave.


@pytest.mark.parametrize(
    ("code", "how"), [(0, "closed its context or ended normally"), (3, r"failed \(exit code 3\)")]
)
def test_a_peer_that_left_and_owes_a_message_is_lost(code: int, how: str) -> None:
    world = LocalWorld(2)
    receiver = _Rank(world, _receiver())
    Watch(world.control(1)).say_left(code)
    with pytest.raises(PeerLost, match=f"rank 0: rank 1 {how}") as caught:
        receiver.run()
    assert (caught.value.rank, caught.value.peer) == (0, 1)


def test_a_rank_that_left_before_the_call_was_opened_is_lost_to_all() -> None:
    world = LocalWorld(3)
    receiver = _Rank(world, _receiver(world_size=3), opening=_Opening(after_s=_LONG_S))
    Watch(world.control(2)).say_left(0)
    with pytest.raises(PeerLost, match="rank 0: rank 2 closed its context"):
        receiver.run()


def test_a_peer_may_leave_once_it_has_done_its_part() -> None:
    world = LocalWorld(2)
    receiver = _Rank(world, _receiver(), opening=_Opening(after_s=0.2))
    world.transport(1).isend(memoryview(bytearray(_BYTES)), 0, 0)
    Watch(world.control(1)).say_left(0, last_call=receiver.opening.number)
    receiver.run()
    assert receiver.transport.bytes_received == _BYTES


# Rank 2 owes nothing, but its leaving may be why the others stand still: unless it left well.
@pytest.mark.parametrize("code", [0, 1])
def test_a_rank_that_owes_nothing_is_missed_only_if_it_failed(code: int) -> None:
    world = LocalWorld(3)
    receiver = _Rank(world, _receiver(world_size=3))
    Watch(world.control(2)).say_left(code, last_call=receiver.opening.number)

    def send_late() -> None:
        time.sleep(2.0)
        world.transport(1).isend(memoryview(bytearray(_BYTES)), 0, 0)

    if code:
        with pytest.raises(PeerLost, match=r"rank 0: rank 2 failed \(exit code 1\)"):
            _run_together([receiver.run, send_late])
    else:
        _run_together([receiver.run, send_late])
        assert receiver.transport.bytes_received == _BYTES


# Computing.


def test_progress_keeps_messages_moving_while_a_task_computes() -> None:
    world = LocalWorld(2)
    g = GraphBuilder(0, 2)
    out, slot = g.buffer("out", initialised=True), g.buffer("slot", size_bytes=_BYTES)
    g.exchange("receive", recvs=[(slot, 1)], tag=0)
    g.compute("tile", Op("until it came"), accumulates=[out])
    receiver = _Rank(world, g.build())

    def compute_until_received() -> None:
        world.transport(1).isend(memoryview(bytearray(_BYTES)), 0, 0)
        deadline_s = time.perf_counter() + _LONG_S
        while not any(span.name == "receive" for span in receiver.driver.trace):
            assert time.perf_counter() < deadline_s, "the message was not taken while the tile ran"
            receiver.driver.progress()

    receiver.ops["until it came"] = compute_until_received
    receiver.run()
    assert [span.name for span in receiver.driver.trace] == ["receive", "tile"]


def test_a_message_that_waited_for_another_leaves_while_a_task_computes() -> None:
    world = LocalWorld(2)
    g = GraphBuilder(0, 2)
    out, slot = g.buffer("out", initialised=True), g.buffer("slot", size_bytes=_BYTES)
    g.exchange("receive", recvs=[(slot, 1)], tag=0)
    g.exchange("pass on", sends=[(slot, 1)], tag=1)
    g.compute("tile", Op("until it is back"), accumulates=[out])
    rank = _Rank(world, g.build())

    def compute_until_it_is_back() -> None:
        peer, back = world.transport(1), bytearray(_BYTES)
        peer.isend(memoryview(bytearray(b"x" * _BYTES)), 0, 0)
        peer.irecv(memoryview(back), 0, 1)
        deadline_s = time.perf_counter() + _LONG_S
        while bytes(back) != b"x" * _BYTES:
            assert time.perf_counter() < deadline_s, "nothing was sent while the tile ran"
            rank.driver.progress()
            peer.poll()

    rank.ops["until it is back"] = compute_until_it_is_back
    rank.run()
    assert {span.name for span in rank.driver.trace} == {"receive", "pass on", "tile"}


def test_compute_tasks_run_one_at_a_time_in_the_callers_thread() -> None:
    g = GraphBuilder(0, 1)
    for i in range(5):
        g.compute(f"tile {i}", Op("note", (i,)), writes=[g.buffer(f"b{i}")])
    rank = _Rank(LocalWorld(1), g.build())
    noted: list[int] = []
    rank.ops["note"] = noted.append
    rank.run()
    assert noted == [0, 1, 2, 3, 4]
    spans = sorted(rank.driver.trace, key=lambda span: span.started_s)
    assert all(before.ended_s <= after.started_s for before, after in pairwise(spans))


def test_an_operation_that_nobody_can_do_is_a_defect() -> None:
    g = GraphBuilder(0, 1)
    g.compute("tile", Delta(1), writes=[g.buffer("b")])
    with pytest.raises(
        InternalError,
        match=(r"task 'tile' asks for operation Delta\(part=1\); this driver has \['Op'\]"),
    ) as caught:
        _Rank(LocalWorld(1), g.build()).run()
    assert caught.value.task == "tile"


def test_what_an_operation_raises_comes_out_as_it_is() -> None:
    g = GraphBuilder(0, 1)
    g.compute("tile", Op("fail"), writes=[g.buffer("b")])
    rank = _Rank(LocalWorld(1), g.build())
    error = ValueError("a bug in a kernel")

    def fail() -> None:
        raise error

    rank.ops["fail"] = fail
    with pytest.raises(ValueError, match="a bug in a kernel") as caught:
        rank.run()
    assert caught.value is error


@pytest.mark.parametrize("left", [False, True])
def test_an_error_of_a_wait_names_the_task_and_its_hop(left: bool) -> None:
    world = LocalWorld(2)
    if left:
        Watch(world.control(1)).say_left(1)
    with pytest.raises(PeerLost if left else Stalled) as caught:
        _Rank(world, _receiver(), stall_s=_LONG_S if left else 0.2).run()
    assert (caught.value.task, caught.value.hop) == ("receive", 3)


@pytest.mark.parametrize("error", [MemoryError("no more"), DeviceError("it broke")])
def test_an_error_of_an_operation_names_the_task_and_its_hop(error: Exception) -> None:
    world = LocalWorld(2)
    receiver = _Rank(world, _receiver())
    world.transport(1).isend(memoryview(bytearray(_BYTES)), 0, 0)

    def fail(part: int, other: int) -> None:
        raise error

    receiver.ops["add"] = fail
    with pytest.raises(DeviceError) as caught:
        receiver.run()
    assert (caught.value.task, caught.value.hop) == ("tile", 4)


def test_a_message_of_the_wrong_size_comes_out_as_a_protocol_error() -> None:
    world = LocalWorld(2)
    receiver = _Rank(world, _receiver())
    world.transport(1).isend(memoryview(b"short"), 0, 0)
    with pytest.raises(ProtocolError, match="expected 8 bytes from rank 1, got 5"):
        receiver.run()


def test_waiting_for_nothing_is_a_defect() -> None:
    with pytest.raises(InternalError, match="nothing under way"):
        _Rank(LocalWorld(1), GraphBuilder(0, 1).build()).driver.wait()


# Watches on their own.


def test_a_watch_knows_who_left_and_who_lives() -> None:
    world = LocalWorld(3)
    watch, others = Watch(world.control(0)), [Watch(world.control(rank)) for rank in (1, 2)]
    watch.require_all()
    others[0].say_alive(5)
    others[0].say_alive(6)
    others[1].say_left(70, "ValueError: no more")
    watch.look()
    assert [(peer, task) for peer, (_, task) in watch.alive.items()] == [(1, 6)]
    assert [(peer, how.code, how.error) for peer, how in watch.left.items()] == [
        (2, 70, "ValueError: no more")
    ]
    with pytest.raises(
        PeerLost, match=r"rank 0: rank 2 failed \(exit code 70\) with ValueError: no more"
    ):
        watch.require_all()
    others[0].look()
    assert [*others[0].left] == [2]
    assert watch.lost(1) is None, "what it sent last may still be on its way"


def test_a_stall_names_the_ranks_that_have_not_entered() -> None:
    world = LocalWorld(4)
    watch, *others = (Watch(world.control(rank)) for rank in range(4))
    # Rank 1 waits in the same call, rank 2 in an earlier one, rank 3 says nothing.
    others[0].say_entered(7, waited_s=0.6, timeout_s=1.0)
    others[1].say_entered(6, waited_s=0.6, timeout_s=1.0)
    with pytest.raises(
        Stalled, match=r"to enter unshard \(call 7\): ranks 2, 3 have not entered it\."
    ):
        watch.wait_for(_Never(), 0.2, "unshard", number=7)
    # After half the time each told everybody. Who comes late says so at once to those that wait.
    others[2].look()
    assert others[2].entered == {0: 7, 1: 7, 2: 6}
    others[2].say_entered(7, waited_s=0.0, timeout_s=1.0)
    watch.look()
    assert watch.entered == {1: 7, 2: 6, 3: 7}
    assert (str(watch.absent(7)), watch.absent(7).only) == ("rank 2 has", 2)


class _Never:
    def test(self) -> bool:
        return False


def test_a_collective_that_never_ends_is_a_stall() -> None:
    watch = Watch(LocalWorld(2).control(0))
    with pytest.raises(
        Stalled, match=r"rank 0: waited 0\.2 s for the other ranks to enter unshard"
    ) as caught:
        watch.wait_for(_Never(), 0.2, "unshard")
    assert caught.value.elapsed_s is not None
    assert 0.2 <= caught.value.elapsed_s < _LONG_S


def test_a_collective_is_not_waited_for_once_a_rank_has_left() -> None:
    world = LocalWorld(2)
    watch = Watch(world.control(0))
    Watch(world.control(1)).say_left(0)
    with pytest.raises(PeerLost):
        watch.wait_for(_Never(), _LONG_S, "unshard")


def test_a_collective_that_has_ended_is_taken_whoever_has_left() -> None:
    world = LocalWorld(2)
    groups = [world.control(rank) for rank in range(2)]
    pending = [group.allgather(b"%d" % group.rank) for group in groups]
    Watch(groups[1]).say_left(0)
    time.sleep(0.01)
    Watch(groups[0]).wait_for(pending[0], _LONG_S, "unshard")
    assert pending[0].result() == [b"0", b"1"]
