"""Whatever order tasks end in: the same result bit for bit, no deadlock, no part touched while it
is busy; and planted bugs are caught.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import pytest
from covering import first_of
from graphs import problem
from simulated_faults import Faults, rehearse
from simulated_memory import BusyPart, EmptyPart, Values, reference

from burst_rt.errors import InternalError
from burst_rt.planning.choose import choose
from burst_rt.planning.masks import Causal, Full
from burst_rt.scheduler import (
    COMPUTE,
    CONTROL,
    NETWORK,
    Cost,
    Engine,
    Graph,
    GraphBuilder,
    Lane,
    Op,
    Part,
    Policy,
    Schedule,
    check_graph,
    check_world,
    critical_path,
    program_order,
)
from burst_rt.scheduler.simulator import (
    Deadlock,
)

_WORK = Op("work")

# Machines, as the lanes they give a rank. All have the names that strategies use, and a second one
# to compute on.
_STREAM = Lane("compute", ordered=True, device=0)
_NCCL = Lane("network", ordered=True, device=0, in_program_order=True)
_MACHINES: dict[str, tuple[Lane, ...]] = {
    "one core": (COMPUTE, Lane("copy", max_in_flight=1), NETWORK, CONTROL),
    "many cores": (Lane("compute"), Lane("copy"), NETWORK, CONTROL),
    "few messages": (
        COMPUTE,
        Lane("copy", max_in_flight=1),
        Lane("network", in_program_order=True, max_in_flight=2),
        CONTROL,
    ),
    "streams": (_NCCL, _STREAM, Lane("copy", ordered=True, device=0), CONTROL),
    "two devices": (_STREAM, Lane("copy", ordered=True, device=1), _NCCL, CONTROL),
    "streams and MPI": (_STREAM, Lane("copy", ordered=True, device=0), NETWORK, CONTROL),
}

_NUM_BATCHES = 8
_WORLDS_PER_BATCH = 150
_ORDERS_PER_WORLD = 5
_ORDERS_PER_RING = 6
_MORE_ORDERS_PER_RING = 40  # make test-all
_ORDERS_PER_PLANTED_BUG = 300


def _ended(schedules: Sequence[Schedule], order: int, *, validate: bool = False) -> Values:
    """What all parts hold once tasks, messages and news have taken as long as the seed `order`
    says.
    """
    return rehearse(schedules, Faults(order), engine=partial(Engine, validate=validate)).values


def _shuffled(seed: int) -> Policy:
    return lambda graph: random.Random(seed).sample(range(len(graph.tasks)), len(graph.tasks))


def _on(machine: str, graphs: Sequence[Graph]) -> list[Graph]:
    return [
        replace(graph, lanes={lane.name: lane for lane in _MACHINES[machine]}) for graph in graphs
    ]


# Random worlds.

_Step = tuple[int, int] | list[tuple[int, int, int, int]]


def _random_world(rng: random.Random, machine: str, disorder: float) -> list[Graph]:
    """Programs of 1 to 4 ranks: steps of one story, in which a rank computes or some ranks exchange
    messages.

    Every rank goes by the story's order, up to `disorder` steps off; without any the ranks can
    never wait for each other in a circle.
    """
    world_size, num_parts = rng.randint(1, 4), rng.randint(3, 5)
    story = [_random_step(rng, world_size, num_parts) for _ in range(rng.randint(3, 14))]
    graphs = []
    for rank in range(world_size):
        g = GraphBuilder(rank, world_size, _MACHINES[machine])
        parts = [g.buffer(f"b{i}", size_bytes=8, initialised=True)[0] for i in range(num_parts)]
        for number in sorted(range(len(story)), key=lambda i: i + disorder * rng.random()):
            _add_step(g, rng, parts, number, story[number])
        graphs.append(g.build())
    return graphs


def _random_step(rng: random.Random, world_size: int, num_parts: int) -> _Step:
    """(rank, number of parts read), or messages: (source, part, destination, part)."""
    if world_size == 1 or rng.random() < 0.5:
        return rng.randrange(world_size), rng.randint(0, 2)
    messages: list[tuple[int, int, int, int]] = []
    if rng.random() < 0.4:
        sent, received = rng.sample(range(num_parts), 2)
        messages = [(rank, sent, (rank + 1) % world_size, received) for rank in range(world_size)]
    for _ in range(rng.randint(0 if messages else 1, 3)):
        source, destination = rng.sample(range(world_size), 2)
        sent, received = rng.randrange(num_parts), rng.randrange(num_parts)
        busy_there = {
            part
            for s, part, d, other in messages
            for part, rank in ((part, s), (other, d))
            if rank == destination
        }
        received_here = {other for _, _, d, other in messages if d == source}
        if received not in busy_there and sent not in received_here:
            messages.append((source, sent, destination, received))
    return messages


def _add_step(
    g: GraphBuilder, rng: random.Random, parts: Sequence[Part], number: int, step: _Step
) -> None:
    if isinstance(step, list):
        sends = [
            (parts[sent], destination) for source, sent, destination, _ in step if source == g.rank
        ]
        recvs = [
            (parts[received], source)
            for source, _, destination, received in step
            if destination == g.rank
        ]
        if sends or recvs:
            g.exchange(f"exchange {number}", sends=sends, recvs=recvs, tag=number)
    elif step[0] == g.rank:
        changed, *read = rng.sample(parts, 1 + step[1])
        lane, cost = rng.choice(("compute", "copy")), Cost(rng.randrange(4))
        if rng.random() < 0.5:
            g.compute(f"write {number}", _WORK, reads=read, writes=[changed], cost=cost, lane=lane)
        else:
            g.compute(
                f"add {number}", _WORK, reads=read, accumulates=[changed], cost=cost, lane=lane
            )


def _random_schedules(rng: random.Random, graphs: Sequence[Graph]) -> list[Schedule]:
    return [
        Schedule.of(
            graph, rng.choice((critical_path, program_order, _shuffled(rng.randrange(1000))))
        )
        for graph in graphs
    ]


@pytest.mark.parametrize("batch", first_of(range(_NUM_BATCHES), 4))
def test_random_worlds_give_the_result_of_program_order_in_every_order(batch: int) -> None:
    for seed in range(batch * _WORLDS_PER_BATCH, (batch + 1) * _WORLDS_PER_BATCH):
        rng = random.Random(seed)
        graphs = _random_world(rng, rng.choice([*_MACHINES]), disorder=0.0)
        check_world(graphs)
        expected = reference(graphs)
        for order in range(_ORDERS_PER_WORLD):
            schedules = _random_schedules(rng, graphs)
            assert _ended(schedules, order, validate=order == 0) == expected, (
                f"world {seed}, order {order}"
            )


# Not "few messages": two at a time may get through where one by one cannot, and the verifier plays
# the worst case.
@pytest.mark.parametrize("machine", [machine for machine in _MACHINES if machine != "few messages"])
def test_what_the_verifier_says_of_deadlocks_is_what_happens(machine: str) -> None:
    verdicts: list[str] = []
    for seed in range(500):
        rng = random.Random(seed)
        graphs = _random_world(rng, machine, disorder=2.0)
        verdict = _verdict(graphs)
        verdicts.append(verdict)
        for order in range(3):
            schedules = _random_schedules(rng, graphs)
            if verdict.startswith("deadlock"):
                with pytest.raises(Deadlock):
                    _ended(schedules, order)
            elif not verdict:
                _ended(schedules, order)
    assert verdicts.count("") > 50
    assert sum(verdict.startswith("deadlock") for verdict in verdicts) > 20
    assert all(
        "an ordered lane matches messages by order" in verdict
        for verdict in verdicts
        if verdict and not verdict.startswith("deadlock")
    )


def _verdict(graphs: Sequence[Graph]) -> str:
    """What the verifier has against a world."""
    try:
        check_world(graphs)
    except InternalError as error:
        return str(error)
    return ""


# Rings, as the strategies build them.

_DIRECTIONS = {
    "forward": ("burst", True),
    "forward of ring-q": ("ring-q", True),
    "backward of burst": ("burst", False),
    "backward of ring-kv": ("ring-kv", False),
}


def _rings(world_size: int, direction: str) -> Iterator[list[Graph]]:
    """Graphs of all ranks for every mask and layout, at a length that divides by nothing."""
    strategy, forward = _DIRECTIONS[direction]
    for mask in (Full(), Causal()):
        for kind in ("zigzag", "striped", "contiguous"):
            small = problem(
                31, 31, world_size, mask=mask, kinds=(kind, kind), heads=(2, 1), head_dim=4
            )
            ring = choose(small, strategy, forward=forward).program
            yield [ring.graph(rank) for rank in range(world_size)]


@pytest.mark.parametrize(
    "orders",
    [
        pytest.param(range(_ORDERS_PER_RING), id="some"),
        pytest.param(
            range(_ORDERS_PER_RING, _MORE_ORDERS_PER_RING), id="more", marks=pytest.mark.long
        ),
    ],
)
@pytest.mark.parametrize("direction", _DIRECTIONS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_rings_give_the_result_of_program_order_in_every_order(
    world_size: int, direction: str, orders: range
) -> None:
    for number, ring in enumerate(_rings(world_size, direction)):
        expected = reference(ring)
        rng = random.Random(number)
        for machine in ("one core", "streams", "streams and MPI"):
            graphs = _on(machine, ring)
            check_world(graphs)
            for order in orders:
                # The policy that users get, and now and then any.
                schedules = (
                    _random_schedules(rng, graphs)
                    if order % 4 == 0
                    else [Schedule.of(graph) for graph in graphs]
                )
                assert _ended(schedules, order) == expected, (
                    f"ring {number} on {machine}, order {order}"
                )


@pytest.mark.parametrize("machine", ["one core", "streams"])
def test_an_engine_of_a_ring_keeps_its_invariants_at_every_step(machine: str) -> None:
    for ring in _rings(3, "backward of ring-kv"):
        schedules = [Schedule.of(graph) for graph in _on(machine, ring)]
        for order in range(3):
            _ended(schedules, order, validate=True)


# The net: bugs planted in one rank's scheduler must show.


def _ignoring(schedule: Schedule, first: int, second: int) -> Schedule:
    """The same schedule, in which `second` no longer waits for `first`."""
    on_issue = [
        [v for v in edges if (u, v) != (first, second)] for u, edges in enumerate(schedule.on_issue)
    ]
    on_done = [
        [v for v in edges if (u, v) != (first, second)] for u, edges in enumerate(schedule.on_done)
    ]
    after = [
        tuple(u for u in edges if (u, v) != (first, second))
        for v, edges in enumerate(schedule.after)
    ]
    num_before = [n - (v == second) for v, n in enumerate(schedule.num_before)]
    return replace(schedule, on_issue=on_issue, on_done=on_done, after=after, num_before=num_before)


def _needed_edges(graph: Graph) -> Iterator[tuple[int, int]]:
    """Edges that no other path replaces."""
    for v, before in enumerate(graph.predecessors):
        for u in before:
            without = tuple(
                tuple(p for p in edges if (p, i) != (u, v))
                for i, edges in enumerate(graph.predecessors)
            )
            try:
                check_graph(replace(graph, predecessors=without))
            except InternalError:
                yield u, v


def _shows(schedules: Sequence[Schedule], expected: Values) -> bool:
    """Whether some order brings the planted bug to light."""
    for order in range(_ORDERS_PER_PLANTED_BUG):
        try:
            if _ended(schedules, order) != expected:
                return True
        except (BusyPart, EmptyPart, Deadlock):
            return True
    return False


def _is_write_after_read(graph: Graph, first: int, second: int) -> bool:
    u, v = graph.tasks[first], graph.tasks[second]
    written = {*u.writes, *u.accumulates}
    return bool({*u.reads} & {*v.writes}) and not written & {*v.reads, *v.writes, *v.accumulates}


@pytest.mark.parametrize("direction", _DIRECTIONS)
def test_an_engine_that_ignores_one_edge_is_caught(direction: str) -> None:
    num_edges = num_double_buffers = 0
    for ring in _rings(4, direction):
        graphs = _on("many cores", ring)
        expected = reference(graphs)
        schedules = [Schedule.of(graph) for graph in graphs]
        for u, v in _needed_edges(graphs[1]):
            planted = [schedules[0], _ignoring(schedules[1], u, v), *schedules[2:]]
            names = f"{graphs[1].tasks[u].name!r} -> {graphs[1].tasks[v].name!r}"
            assert _shows(planted, expected), f"nothing shows that the edge {names} is ignored"
            num_edges += 1
            num_double_buffers += _is_write_after_read(graphs[1], u, v)
    assert num_edges > 60  # far more than a handful: the loop above has looked at real graphs
    assert num_double_buffers >= 5


def test_a_stream_that_does_not_wait_for_the_other_streams_event_is_caught() -> None:
    for ring in _rings(3, "backward of burst"):
        graphs = _on("streams", ring)
        expected = reference(graphs)
        schedules = [Schedule.of(graph) for graph in graphs]
        deaf = replace(schedules[2], after=[()] * len(graphs[2].tasks))
        assert any(schedules[2].after)
        assert _shows([*schedules[:2], deaf], expected)


def test_an_ordered_network_that_is_not_issued_in_program_order_is_caught() -> None:
    num_caught = 0
    for ring in _rings(4, "backward of ring-kv"):
        graphs = _on("streams", ring)
        expected = reference(graphs)
        out_of_order = replace(
            graphs[0], lanes={**graphs[0].lanes, "network": replace(_NCCL, in_program_order=False)}
        )
        for policy in range(5):
            num_caught += _shows(
                [Schedule.of(out_of_order, _shuffled(policy)), *map(Schedule.of, graphs[1:])],
                expected,
            )
    # A shuffled policy may happen to keep the order.
    assert num_caught > 15
