"""Whatever goes wrong, every run ends, with the right result or a typed error; a seed gives it
again; and planted bugs are caught.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise

import pytest
from covering import first_of
from rehearsed_worlds import (
    DIRECTIONS,
    MACHINES,
    WORLDS,
    World,
    ending,
    make_world,
    rehearse_world,
)
from simulated_faults import Faults, Loss, Stall, verdict

from burst_rt.errors import InternalError, PeerLost, Stalled
from burst_rt.scheduler import (
    Engine,
    Event,
    Finish,
    Instruction,
    PeerGone,
    Schedule,
    TaskDone,
    TaskFailed,
    check_graph,
)
from burst_rt.scheduler.simulator import Deadlock

_NUM_BATCHES = 10
_SEEDS_PER_BATCH = 1000
_SEEDS_PER_PLANTED_BUG = 200


# Each batch plays every world.
@pytest.mark.parametrize("batch", first_of(range(_NUM_BATCHES), 2))
def test_every_run_ends_with_the_right_result_or_a_typed_error(batch: int) -> None:
    endings: Counter[str] = Counter()
    for seed in range(batch * _SEEDS_PER_BATCH, (batch + 1) * _SEEDS_PER_BATCH):
        world = make_world(*WORLDS[seed % len(WORLDS)])
        faults = Faults.draw(seed, len(world.graphs))
        rehearsal = rehearse_world(world, faults)
        assert verdict(rehearsal, faults, world.expected) == "", (
            f"seed {seed}: {world.name}, {faults}"
        )
        endings.update(ending(rehearsal))
    # Each way to end has been seen, and often.
    assert (
        min(endings["finished"], endings["PeerLost"], 5 * endings["Stalled"])
        > _SEEDS_PER_BATCH // 10
    ), endings


@pytest.mark.parametrize("machine", MACHINES)
def test_a_seed_replays_bit_for_bit(machine: str) -> None:
    world = make_world(4, "backward of burst", machine)
    traces = set()
    for seed in range(40):
        first, again = (rehearse_world(world, Faults.draw(seed, 4), spans=True) for _ in range(2))
        assert (first.values, first.finished, first.spans) == (
            again.values,
            again.finished,
            again.spans,
        )
        assert [repr(error) for error in first.errors] == [repr(error) for error in again.errors]
        traces.add(repr(first.spans))
    assert len(traces) == 40


# One fault at a time, and who hears of it.


def _faults(seed: int, *, stalls: Iterable[Stall] = (), losses: Iterable[Loss] = ()) -> Faults:
    return replace(Faults.draw(seed, 1), stalls=tuple(stalls), losses=tuple(losses))


@pytest.mark.parametrize("machine", MACHINES)
def test_who_needs_a_lost_rank_hears_of_it(machine: str) -> None:
    world = make_world(4, "forward", machine)
    for seed in range(20):
        faults = _faults(seed, losses=[Loss(2, 0.0)])
        rehearsal = rehearse_world(world, faults)
        assert verdict(rehearsal, faults, world.expected) == ""
        # Nobody can agree without it: all hear of it, of it or of one that gave up for it.
        assert [type(error) for error in rehearsal.errors] == [
            PeerLost,
            PeerLost,
            type(None),
            PeerLost,
        ]
        assert any(error is not None and error.peer == 2 for error in rehearsal.errors)


def test_a_rank_that_stands_still_for_ever_is_given_up_after_the_deadline() -> None:
    world = make_world(3, "forward", "host")
    for seed in range(20):
        faults = _faults(seed, stalls=[Stall(0, 0.0, float("inf"))])
        rehearsal = rehearse_world(world, faults)
        assert verdict(rehearsal, faults, world.expected) == ""
        assert rehearsal.finished == (False, False, False)
        stalled = [error for error in rehearsal.errors if isinstance(error, Stalled)]
        # The ranks wait for it to agree; the first to give up is whom the others hear of.
        assert stalled
        assert all(
            error.task == "agree" and error.elapsed_s == faults.timeout_s for error in stalled
        )


def test_a_rank_that_stands_still_for_a_while_costs_time_and_nothing_else() -> None:
    world = make_world(3, "backward of ring-kv", "nccl")
    for seed in range(20):
        ends = []
        for stalls in ([], [Stall(1, 0.0, 1000.0)]):
            faults = _faults(seed, stalls=stalls)
            rehearsal = rehearse_world(world, faults, spans=True)
            assert verdict(rehearsal, faults, world.expected) == ""
            assert rehearsal.finished == (True, True, True)
            ends.append(max(span.ended_s for spans in rehearsal.spans for span in spans))
        assert ends[0] < 1000.0 < ends[1]


def test_without_deadlines_a_lost_peer_still_ends_a_run_and_a_stalled_one_does_not() -> None:
    world = make_world(3, "forward", "host")
    lost = Faults(1, losses=(Loss(0, 0.0),))
    assert verdict(rehearse_world(world, lost), lost, world.expected) == ""
    with pytest.raises(Deadlock, match="rank 1 never ends"):
        rehearse_world(world, Faults(1, stalls=(Stall(0, 0.0, float("inf")),)))


def test_the_verdict_names_what_is_wrong() -> None:
    world = make_world(2, "forward", "host")
    none, loss = _faults(0), _faults(0, losses=[Loss(1, 0.0)])
    right = rehearse_world(world, none)
    assert verdict(right, none, world.expected) == ""
    wrong = replace(right, values=[right.values[0], [*right.values[1][:-1], 7]])
    assert f"rank 1 finished with wrong values in parts [{len(right.values[1]) - 1}]" in verdict(
        wrong, none, world.expected
    )
    unfinished = replace(right, finished=(False, True), errors=(Stalled("late"), None))
    assert "rank 0 did not finish, although no fault was harmful: late" in verdict(
        unfinished, none, world.expected
    )
    assert verdict(unfinished, loss, world.expected) == ""
    untyped = replace(unfinished, errors=(InternalError("oops"), None))
    assert "rank 0 neither finished nor raised PeerLost or Stalled: InternalError" in verdict(
        untyped, loss, world.expected
    )


# The net: planted bugs must show.


def _shows(world: World, engine: Callable[[Schedule], Engine] = Engine) -> bool:
    """Whether some seed brings a planted bug to light: a run that ends wrongly, or one that a check
    inside it ends.
    """
    for seed in range(_SEEDS_PER_PLANTED_BUG):
        faults = Faults.draw(seed, len(world.graphs))
        try:
            if verdict(rehearse_world(world, faults, engine), faults, world.expected):
                return True
        except InternalError:
            return True
    return False


def _with(world: World, rank: int, schedule: Schedule) -> World:
    return replace(
        world, schedules=(*world.schedules[:rank], schedule, *world.schedules[rank + 1 :])
    )


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_net_catches_nothing_where_nothing_is_planted(direction: str, machine: str) -> None:
    assert not _shows(make_world(3, direction, machine))


@pytest.mark.parametrize("machine", ["host", "staged"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_missing_write_after_read_edge_is_caught(direction: str, machine: str) -> None:
    world = make_world(4, direction, machine)
    graph = world.graphs[1]
    num_planted = 0
    for v, before in enumerate(graph.predecessors):
        for u in before:
            first, second = graph.tasks[u], graph.tasks[v]
            if not second.recvs or not {*first.reads} & {*second.writes}:
                continue
            # A receive into a slot that is being read. The edge counts where no other path replaces
            # it.
            without = tuple(
                tuple(p for p in edges if (p, i) != (u, v))
                for i, edges in enumerate(graph.predecessors)
            )
            after = tuple(
                tuple(s for s in edges if (i, s) != (u, v))
                for i, edges in enumerate(graph.successors)
            )
            planted = replace(graph, predecessors=without, successors=after)
            try:
                check_graph(planted)
            except InternalError:
                shows = _shows(_with(world, 1, Schedule.of(planted)))
                assert shows, f"nothing shows that {first.name!r} -> {second.name!r} is missing"
                num_planted += 1
    assert num_planted >= 2


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_swapped_tags_are_caught(direction: str) -> None:
    world = make_world(4, direction, "host")
    graph = world.graphs[2]
    receives = [task.id for task in graph.tasks if task.recvs]
    for first, second in pairwise(receives):
        tags = {first: graph.tasks[second].recvs[0].tag, second: graph.tasks[first].recvs[0].tag}
        tasks = [
            replace(task, recvs=tuple(m._replace(tag=tags[task.id]) for m in task.recvs))
            if task.id in tags
            else task
            for task in graph.tasks
        ]
        planted = Schedule.of(replace(graph, tasks=tuple(tasks)))
        assert _shows(_with(world, 2, planted)), (
            f"nothing shows that tasks {first} and {second} receive each other's tags"
        )


class _Forgetful(Engine):
    """Never hears of one completion."""

    def handle(self, events: Iterable[Event]) -> list[Instruction]:
        return super().handle(
            [event for event in events if event != TaskDone(len(self.state) // 2)]
        )


class _Hasty(Engine):
    """Takes an edge for satisfied once its first task is issued."""

    def __init__(self, schedule: Schedule) -> None:
        on_issue = [
            [*now, *later] for now, later in zip(schedule.on_issue, schedule.on_done, strict=True)
        ]
        super().__init__(replace(schedule, on_issue=on_issue, on_done=[[] for _ in on_issue]))


class _Early(Engine):
    """Finishes one task too early."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule)
        self._num_left -= 1


class _Deaf(Engine):
    """Does not hear that something has failed."""

    def handle(self, events: Iterable[Event]) -> list[Instruction]:
        return super().handle([event for event in events if isinstance(event, TaskDone)])


class _Brazen(Engine):
    """Calls it finished when something has failed."""

    def handle(self, events: Iterable[Event]) -> list[Instruction]:
        heard = [*events]
        return (
            [Finish()]
            if any(isinstance(event, PeerGone | TaskFailed) for event in heard)
            else super().handle(heard)
        )


@pytest.mark.parametrize("machine", ["host", "nccl", "staged"])
@pytest.mark.parametrize("broken", [_Forgetful, _Hasty, _Early, _Deaf, _Brazen])
def test_a_broken_engine_is_caught(broken: type[Engine], machine: str) -> None:
    assert _shows(make_world(3, "backward of ring-kv", machine), broken)


@pytest.mark.parametrize("machine", ["host", "nccl"])
def test_an_engine_keeps_its_invariants_under_faults(machine: str) -> None:
    def validating(schedule: Schedule) -> Engine:
        return Engine(schedule, validate=True)

    world = make_world(3, "backward of burst", machine)
    for seed in range(40):
        faults = Faults.draw(seed, 3)
        assert verdict(rehearse_world(world, faults, validating), faults, world.expected) == ""
