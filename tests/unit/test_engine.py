"""The engine: its table of transitions walked completely, when each kind of lane lets an edge pass,
and how a run ends.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product

import pytest
from graphs import problem

from burst_rt import Causal, errors
from burst_rt.planning.choose import choose
from burst_rt.scheduler import (
    COMPUTE,
    CONTROL,
    NCCL_LANES,
    NETWORK,
    Abort,
    Driver,
    Engine,
    Event,
    Finish,
    Graph,
    GraphBuilder,
    Instruction,
    Issue,
    Lane,
    Op,
    PeerGone,
    Schedule,
    Task,
    TaskDone,
    TaskFailed,
    TaskState,
    critical_path,
    program_order,
    run,
)
from burst_rt.scheduler.engine import TRANSITIONS

_WORK = Op("work")
_BAD = errors.DeviceError("it burnt")

_STREAM = Lane("stream", ordered=True, device=0)
_COPY = Lane("copy", ordered=True, device=0)
_OTHER_DEVICE = Lane("other", ordered=True, device=1)
_NO_DEVICE = Lane("no device", ordered=True)
_FREE = Lane("free")
_FREE_ON_DEVICE = Lane("free on device", device=0)
_ALL_LANES = (_STREAM, _COPY, _OTHER_DEVICE, _NO_DEVICE, _FREE, _FREE_ON_DEVICE)


def _chain(*lanes: Lane) -> Graph:
    """Tasks 0, 1, 2 ...: each needs what the one before it wrote; task i runs on lanes[i]."""
    g = GraphBuilder(0, 1, lanes)
    parts = [g.buffer(f"b{i}") for i in range(len(lanes))]
    for i, lane in enumerate(lanes):
        g.compute(
            f"t{i}", _WORK, reads=parts[i - 1 : i] if i else (), writes=[parts[i]], lane=lane.name
        )
    return g.build()


def _independent(num_tasks: int, *lanes: Lane) -> Graph:
    g = GraphBuilder(0, 1, lanes)
    for i in range(num_tasks):
        g.compute(f"t{i}", _WORK, writes=[g.buffer(f"b{i}")], lane=lanes[i % len(lanes)].name)
    return g.build()


def _schedule(graph: Graph) -> Schedule:
    return Schedule.of(graph, program_order)


def _engine(graph: Graph) -> Engine:
    return Engine(_schedule(graph), validate=True)


def _issued(instructions: Iterable[Instruction]) -> list[int]:
    return [i.task for i in instructions if isinstance(i, Issue)]


def _done(*tasks: int) -> list[Event]:
    return [TaskDone(task) for task in tasks]


# Transitions. A chain of two on a free lane brings its second task into every state by events
# alone.

_TO_STATE: dict[TaskState, Sequence[Event]] = {
    TaskState.WAITING: (),
    TaskState.ISSUED: _done(0),
    TaskState.DONE: _done(0, 1),
    TaskState.FAILED: [TaskDone(0), TaskFailed(1, _BAD)],
    TaskState.ABANDONED: [PeerGone(1, "gone")],
}


def _reach(state: TaskState) -> tuple[Engine, int]:
    """An engine and a task of it in `state`."""
    if state is TaskState.READY:
        # The lane takes one task at a time: the second is ready and has to wait.
        engine = _engine(_independent(2, COMPUTE))
        engine.start()
        return engine, 1
    # A third task keeps the run from ending with the second.
    engine = _engine(_chain(_FREE, _FREE, _FREE))
    engine.start()
    for event in _TO_STATE[state]:
        engine.handle([event])
    return engine, 1


@pytest.mark.parametrize("state", TaskState)
def test_every_state_is_reached_by_events(state: TaskState) -> None:
    engine, task = _reach(state)
    assert engine.state[task] is state


_EVENT_VERBS: dict[str, Event] = {"done": TaskDone(1), "failed": TaskFailed(1, _BAD)}
_VERBS = sorted({verb for _, verb in TRANSITIONS})


def test_the_table_speaks_of_all_states_and_verbs() -> None:
    assert {old for old, _ in TRANSITIONS} | set(TRANSITIONS.values()) == set(TaskState)
    assert _VERBS == ["abandoned", "done", "failed", "issued", "satisfied"]


@pytest.mark.parametrize("verb", _VERBS)
@pytest.mark.parametrize("state", TaskState)
def test_each_verb_in_each_state_moves_the_task_or_raises_with_its_story(
    state: TaskState, verb: str
) -> None:
    engine, task = _reach(state)
    expected = TRANSITIONS.get((state, verb))
    if expected is not None:
        engine._move(task, verb)
        assert engine.state[task] is expected
        return
    story = engine.story(task)
    with pytest.raises(errors.InternalError) as caught:
        engine._move(task, verb)
    assert str(caught.value) == f"impossible transition {verb!r}: {story}"
    assert caught.value.task == "t1"
    assert engine.state[task] is state


@pytest.mark.parametrize("verb", sorted(_EVENT_VERBS))
@pytest.mark.parametrize("state", [s for s in TaskState if s is not TaskState.ISSUED])
def test_an_event_about_a_task_that_is_not_running_is_a_defect(state: TaskState, verb: str) -> None:
    engine, _ = _reach(state)
    # An engine that has ended takes no event at all; the others say what is wrong with this one.
    message = (
        "after the run had ended"
        if state in (TaskState.FAILED, TaskState.ABANDONED)
        else f"impossible transition '{verb}': task 1 't1'"
    )
    with pytest.raises(errors.InternalError, match=message):
        engine.handle([_EVENT_VERBS[verb]])


@pytest.mark.parametrize(
    "event", [TaskDone(3), TaskDone(-1), TaskFailed(3, _BAD), TaskFailed(-1, _BAD)]
)
def test_an_event_about_no_task_of_the_graph_is_a_defect(event: Event) -> None:
    engine = _engine(_chain(_FREE, _FREE, _FREE))
    engine.start()
    with pytest.raises(errors.InternalError, match="no task of this graph"):
        engine.handle([event])


def test_a_story_tells_steps_state_and_what_the_task_waits_for() -> None:
    engine = _engine(_chain(_FREE, _FREE))
    engine.start()
    assert engine.story(1) == "task 1 't1' on lane 'free' is WAITING; []; waits for ['0 (ISSUED)']"
    engine.handle(_done(0))
    engine.handle(_done(1))
    assert engine.story(1) == (
        "task 1 't1' on lane 'free' is DONE; [step 3: satisfied; step 4: issued; step 5: done]; "
        "waits for ['0 (DONE)']"
    )


def test_start_and_handle_have_their_time() -> None:
    engine = _engine(_chain(_FREE))
    with pytest.raises(errors.InternalError, match="before start"):
        engine.handle(_done(0))
    assert engine.start() == [Issue(0, ())]
    with pytest.raises(errors.InternalError, match="twice"):
        engine.start()
    assert engine.handle(_done(0)) == [Finish()]
    with pytest.raises(errors.InternalError, match="after the run had ended"):
        engine.handle([])


def test_an_empty_graph_is_finished_at_the_start() -> None:
    assert _engine(GraphBuilder(0, 1).build()).start() == [Finish()]


# Lanes.


@pytest.mark.parametrize("second", _ALL_LANES, ids=lambda lane: lane.name)
@pytest.mark.parametrize("first", _ALL_LANES, ids=lambda lane: lane.name)
def test_when_an_edge_lets_the_second_task_go(first: Lane, second: Lane) -> None:
    same_lane = first is second and first.ordered
    same_device = (
        first.ordered
        and second.ordered
        and first.device is not None
        and first.device == second.device
    )
    graph = _chain(first, second)
    engine = _engine(graph)
    instructions = engine.start()
    if same_lane:
        assert instructions == [Issue(0, ()), Issue(1, ())]
    elif same_device:
        assert instructions == [Issue(0, ()), Issue(1, (0,))]
    else:
        assert instructions == [Issue(0, ())]
        assert engine.handle(_done(0)) == [Issue(1, ())]
        assert engine.handle(_done(1)) == [Finish()]
        return
    assert engine.unfinished() == [0, 1]
    assert engine.handle(_done(0)) == []
    assert engine.handle(_done(1)) == [Finish()]


def test_a_task_waits_for_all_events_of_its_device_and_only_for_those() -> None:
    g = GraphBuilder(0, 1, _ALL_LANES)
    parts = [g.buffer(f"b{i}") for i in range(5)]
    for part, lane in zip(parts, ("copy", "stream", "copy", "free", "other"), strict=True):
        g.compute(f"on {lane}", _WORK, writes=[part], lane=lane)
    last = g.compute("last", _WORK, reads=parts, lane="stream")
    engine = _engine(g.build())
    assert sorted(_issued(engine.start())) == [0, 1, 2, 3, 4]
    assert engine.handle(_done(3)) == []
    # The other device's task was the last to be reported; the copies only have to be waited for by
    # the stream itself.
    assert engine.handle(_done(4)) == [Issue(last, (0, 2))]


def test_a_long_chain_over_two_lanes_of_a_device_is_issued_at_once() -> None:
    graph = _chain(*(_STREAM, _COPY) * 5)
    instructions = _engine(graph).start()
    assert instructions == [Issue(i, (i - 1,) if i else ()) for i in range(10)]


@pytest.mark.parametrize("limit", [1, 2, 3, None])
def test_at_most_max_in_flight_tasks_of_a_lane_run(limit: int | None) -> None:
    engine = _engine(_independent(5, Lane("few", max_in_flight=limit)))
    running = _issued(engine.start())
    assert running == list(range(5 if limit is None else limit))
    instructions: list[Instruction] = []
    while running:
        instructions = engine.handle(_done(running.pop(0)))
        running += _issued(instructions)
        assert len(running) <= (5 if limit is None else limit)
    assert instructions == [Finish()]


def test_a_full_lane_does_not_hold_up_another() -> None:
    engine = _engine(_independent(4, COMPUTE, NETWORK))
    assert sorted(_issued(engine.start())) == [0, 1, 3]


@pytest.mark.parametrize("ordered", [False, True])
def test_a_lane_in_program_order_ignores_policy_and_readiness(ordered: bool) -> None:
    line = Lane("line", ordered=ordered, device=0, in_program_order=True)
    g = GraphBuilder(0, 1, (line, _FREE))
    gate, parts = g.buffer("gate"), [g.buffer(f"b{i}") for i in range(4)]
    g.compute("opens the gate", _WORK, writes=[gate], lane="free")
    for i, part in enumerate(parts):
        g.compute(f"t{i}", _WORK, reads=[gate] if i == 1 else (), writes=[part], lane="line")
    engine = Engine(
        Schedule.of(g.build(), lambda graph: [*reversed(program_order(graph))]), validate=True
    )
    # t2 and t3 could start at once, and the policy would have the last one first; but t1 has to
    # wait for the gate.
    assert _issued(engine.start()) == [1, 0]
    assert _issued(engine.handle(_done(0))) == [2, 3, 4]


def test_program_order_holds_under_a_limit_too() -> None:
    engine = Engine(
        Schedule.of(
            _independent(4, Lane("line", in_program_order=True, max_in_flight=2)), critical_path
        ),
        validate=True,
    )
    assert _issued(engine.start()) == [0, 1]
    assert _issued(engine.handle(_done(1))) == [2]
    assert _issued(engine.handle(_done(0, 2))) == [3]


def test_a_better_task_that_becomes_ready_overtakes() -> None:
    g = GraphBuilder(0, 1, (COMPUTE, _FREE))
    gate = g.buffer("gate")
    g.compute("gate", _WORK, writes=[gate], lane="free")
    for i in range(3):
        g.compute(f"t{i}", _WORK, reads=[gate] if i == 0 else (), writes=[g.buffer(f"b{i}")])
    engine = _engine(g.build())
    assert _issued(engine.start()) == [2, 0]
    engine.handle(_done(0))
    assert _issued(engine.handle(_done(2))) == [1]


# Ends.


@pytest.mark.parametrize("event", [TaskFailed(0, _BAD), PeerGone(3, "its process died")])
def test_after_a_failure_nothing_further_is_issued(event: Event) -> None:
    engine = _engine(_chain(_FREE, _FREE, _FREE))
    engine.start()
    # What happened after the failure in the same batch counts no more.
    (abort,) = engine.handle([event, TaskDone(0)])
    assert isinstance(abort, Abort)
    if isinstance(event, TaskFailed):
        assert abort.error is _BAD
        assert engine.state == [TaskState.FAILED, TaskState.ABANDONED, TaskState.ABANDONED]
    else:
        assert isinstance(abort.error, errors.PeerLost)
        assert (abort.error.peer, abort.error.rank) == (3, 0)
        assert "rank 3 was lost: its process died" in str(abort.error)
        assert engine.state == [TaskState.ABANDONED] * 3
    with pytest.raises(errors.InternalError, match="after the run had ended"):
        engine.handle(_done(0))


def test_what_was_done_before_a_failure_stays_done() -> None:
    engine = _engine(_independent(3, COMPUTE))
    engine.start()
    engine.handle(_done(0))
    (abort,) = engine.handle([TaskFailed(1, _BAD)])
    assert abort == Abort(_BAD)
    assert engine.state == [TaskState.DONE, TaskState.FAILED, TaskState.ABANDONED]


class _ScriptedDriver:
    """Ends tasks at once, in the order they were issued; `script` overrides what is reported of a
    task. The first `silent` waits return nothing.
    """

    on_events: Callable[[Sequence[TaskDone]], object] | None = None

    def __init__(self, script: dict[int, Event], silent: int = 0) -> None:
        self.script, self.silent = script, silent
        self.issued: list[tuple[int, tuple[int, ...]]] = []
        self.aborted = 0
        self._events: list[Event] = []

    def issue(self, task: Task, after: tuple[int, ...]) -> None:
        self.issued.append((task.id, after))
        self._events.append(self.script.get(task.id, TaskDone(task.id)))

    def wait(self) -> Sequence[Event]:
        if self.silent:
            self.silent -= 1
            return []
        events, self._events = self._events, []
        assert events, "the loop waits although nothing is under way"
        return events

    def abort(self) -> None:
        self.aborted += 1


def test_the_loop_runs_a_graph_to_its_end() -> None:
    driver = _ScriptedDriver({})
    checked: Driver = driver
    run(_schedule(_chain(_STREAM, _COPY, _FREE)), checked, validate=True)
    assert driver.issued == [(0, ()), (1, (0,)), (2, ())]
    assert driver.aborted == 0


def test_the_loop_aborts_the_driver_and_raises_what_a_task_raised() -> None:
    driver = _ScriptedDriver({1: TaskFailed(1, _BAD)})
    with pytest.raises(errors.DeviceError) as caught:
        run(_schedule(_independent(3, COMPUTE)), driver, validate=True)
    assert caught.value is _BAD
    assert driver.aborted == 1
    assert driver.issued == [(0, ()), (1, ())]


@pytest.mark.parametrize("graph", [_independent(3, COMPUTE), _chain(_FREE, COMPUTE, _FREE)])
@pytest.mark.parametrize("where", ["issue", "wait"])
def test_the_loop_aborts_the_driver_that_raises(
    graph: Graph, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = _ScriptedDriver({})

    def interrupted(*_: object) -> Sequence[Event]:
        raise KeyboardInterrupt

    monkeypatch.setattr(driver, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(_schedule(graph), driver)
    assert driver.aborted == 1


def test_a_schedule_is_a_line_where_each_task_waits_for_the_end_of_the_one_before() -> None:
    for line in (_chain(_FREE, COMPUTE, _FREE), _chain(_STREAM, _FREE, _OTHER_DEVICE)):
        assert _schedule(line).line == [_done(0), _done(1), _done(2)]
    assert _schedule(_independent(1, _FREE)).line == [_done(0)]
    assert _schedule(_chain(_FREE, _STREAM, _COPY)).line is None  # the copy waits on the device
    assert _schedule(_independent(2, COMPUTE)).line is None  # either might come first


@pytest.mark.parametrize("at", range(3))
def test_on_a_line_an_engine_hears_of_all_but_the_end_of_the_issued_task(at: int) -> None:
    line = _schedule(_chain(_FREE, COMPUTE, _FREE))
    for event, error in (
        (TaskFailed(at, _BAD), "it burnt"),
        (PeerGone(3, "its process died"), "rank 3 was lost: its process died"),
        (TaskDone((at + 1) % 3), f"impossible transition 'done': task {(at + 1) % 3} "),
        (TaskDone(7), "names no task of this graph"),
    ):
        driver = _ScriptedDriver({at: event})
        with pytest.raises(errors.BurstError, match=error):
            run(line, driver)
        assert driver.issued == [(task, ()) for task in range(at + 1)]
        assert driver.aborted == 1


def test_on_a_line_a_driver_may_report_nothing_for_a_while() -> None:
    driver = _ScriptedDriver({}, silent=2)
    run(_schedule(_chain(_FREE, COMPUTE, _FREE)), driver)
    assert driver.issued == [(0, ()), (1, ()), (2, ())]


# Validation: an engine whose bookkeeping was tampered with is found out at the next step.


def test_validation_finds_a_task_that_ran_before_its_predecessor() -> None:
    schedule = Schedule.of(_chain(_FREE, Lane("few", max_in_flight=1)), program_order)
    engine = Engine(replace(schedule, num_before=[0, 0], on_done=[[], []]), validate=True)
    with pytest.raises(errors.InternalError, match=r"before its edges were satisfied: task 1 't1'"):
        engine.start()


def test_validation_finds_wrong_lane_counts() -> None:
    engine = _engine(_independent(3, COMPUTE))
    engine.start()
    engine._in_flight[0] = 0
    with pytest.raises(errors.InternalError, match="lane counts are wrong"):
        engine.handle([])


def test_validation_finds_a_graph_that_cannot_end() -> None:
    engine = _engine(_independent(1, Lane("closed", max_in_flight=0)))
    with pytest.raises(errors.InternalError, match="nothing is running and tasks are left"):
        engine.start()


def test_random_graphs_run_to_their_end_under_validation() -> None:
    lanes = (
        *_ALL_LANES,
        COMPUTE,
        Lane("line", ordered=True, device=0, in_program_order=True),
        Lane("few", max_in_flight=2),
    )
    for seed in range(300):
        rng = random.Random(seed)
        g = GraphBuilder(0, 1, lanes)
        buffers = [g.buffer(f"b{i}", initialised=True) for i in range(6)]
        for i in range(rng.randint(1, 25)):
            read, write = rng.sample(buffers, 2)
            writes, accumulates = ([write], []) if rng.random() < 0.5 else ([], [write])
            g.compute(
                f"t{i}",
                _WORK,
                reads=[read],
                writes=writes,
                accumulates=accumulates,
                lane=rng.choice(lanes).name,
            )
        engine = _engine(g.build())
        running: list[int] = []
        instructions = engine.start()
        while Finish() not in instructions:
            running += _issued(instructions)
            batch = [
                running.pop(rng.randrange(len(running)))
                for _ in range(rng.randint(1, len(running)))
            ]
            instructions = engine.handle(_done(*batch))
        assert set(engine.state) == {TaskState.DONE}


def _rings() -> Iterator[Graph]:
    """The graphs of ranks over NCCL, of both directions."""
    for world_size, forward in product((1, 2, 5), (True, False)):
        for strategy in ("ring-kv", "burst", "direct", "hybrid:1"):
            p = problem(64 * world_size, 64 * world_size, world_size, mask=Causal())
            program = choose(p, strategy, forward=forward).program
            for rank in range(world_size):
                yield program.graph(rank, NCCL_LANES)


def test_where_all_tasks_go_onto_streams_two_batches_are_what_an_engine_issues() -> None:
    """The same tasks in the same order, each after the same ones, be it by an earlier wait."""
    fewer = 0
    for graph in _rings():
        schedule = Schedule.of(graph)
        assert schedule.batches is not None
        with_engine, without = _ScriptedDriver({}), _ScriptedDriver({})
        run(schedule, with_engine, validate=True)
        run(schedule, without)
        assert [task for task, _ in without.issued] == [task for task, _ in with_engine.issued]
        assert len(without.issued) == len(graph.tasks)
        assert _waited_for(schedule, without.issued) == _waited_for(schedule, with_engine.issued)
        fewer += sum(len(after) for _, after in with_engine.issued)
        fewer -= sum(len(after) for _, after in without.issued)
    assert fewer > 0


def _waited_for(
    schedule: Schedule, issued: Sequence[tuple[int, tuple[int, ...]]]
) -> dict[int, dict[int, int]]:
    """By task, for each other lane: how many of its tasks have ended before the task begins."""
    lanes, given = schedule.lane_of, defaultdict[int, list[int]](list)
    reached, found = defaultdict[int, dict[int, int]](dict), {}
    for task, after in issued:
        own = lanes[task]
        for other in after:
            number = given[lanes[other]].index(other) + 1
            reached[own][lanes[other]] = max(number, reached[own].get(lanes[other], 0))
        given[own].append(task)
        found[task] = dict(reached[own])
    return found


def test_there_are_no_batches_where_the_host_awaits_a_task() -> None:
    stream, copy = replace(_STREAM, max_in_flight=1), CONTROL
    assert _schedule(_chain(_STREAM, _COPY, _STREAM)).batches is not None
    assert _schedule(_chain(copy, _STREAM, _COPY)).batches is not None
    for lanes in ((_STREAM, _FREE), (_STREAM, _OTHER_DEVICE), (stream, _COPY), (_FREE, _STREAM)):
        assert _schedule(_chain(*lanes)).batches is None


@pytest.mark.parametrize("at", range(4))
def test_in_batches_an_engine_hears_of_all_but_the_ends_of_issued_tasks(at: int) -> None:
    schedule = _schedule(_chain(CONTROL, _STREAM, _COPY, _STREAM))
    for event, error in (
        (TaskFailed(at, _BAD), "it burnt"),
        (PeerGone(3, "its process died"), "rank 3 was lost: its process died"),
        (TaskDone(7), "names no task of this graph"),
    ):
        driver = _ScriptedDriver({at: event})
        with pytest.raises(errors.BurstError, match=error):
            run(schedule, driver)
        assert len(driver.issued) == (1 if at == 0 else 4)
        assert driver.aborted == 1
