"""Policies: permutations, transfers first, the longest tail first, ties by id; another order, never
another result.
"""

from __future__ import annotations

import random

import pytest

from burst_rt.errors import InternalError
from burst_rt.scheduler import (
    COMPUTE,
    Cost,
    Engine,
    Finish,
    Graph,
    GraphBuilder,
    Issue,
    Lane,
    Op,
    Policy,
    Schedule,
    TaskDone,
    critical_path,
    program_order,
)

_WORK = Op("work")


def _random_graph(seed: int) -> Graph:
    rng = random.Random(seed)
    g = GraphBuilder(0, 2)
    buffers = [g.buffer(f"b{i}", size_bytes=8, initialised=True) for i in range(5)]
    for i in range(rng.randint(1, 20)):
        read, write = rng.sample(buffers, 2)
        if rng.random() < 0.3:
            g.exchange(f"x{i}", sends=[(read, 1)], recvs=[(write, 1)], tag=i)
        else:
            g.compute(
                f"c{i}",
                _WORK,
                reads=[read],
                accumulates=[write],
                cost=Cost(rng.randrange(3), rng.randrange(3)),
            )
    return g.build()


def _shuffled(seed: int) -> Policy:
    return lambda graph: random.Random(seed).sample(range(len(graph.tasks)), len(graph.tasks))


def _order(graph: Graph, policy: Policy) -> list[int]:
    """Task ids as the policy would have them, best first."""
    place = policy(graph)
    return sorted(range(len(place)), key=place.__getitem__)


@pytest.mark.parametrize("policy", [critical_path, program_order])
def test_a_policy_returns_a_permutation_and_the_same_one_each_time(policy: Policy) -> None:
    for seed in range(200):
        graph = _random_graph(seed)
        assert sorted(policy(graph)) == list(range(len(graph.tasks)))
        assert policy(graph) == policy(graph)


def test_program_order_is_the_order_of_ids() -> None:
    graph = _random_graph(0)
    assert program_order(graph) == [task.id for task in graph.tasks]


def test_transfers_go_before_everything_else() -> None:
    for seed in range(200):
        graph = _random_graph(seed)
        kinds = [graph.tasks[t].is_exchange for t in _order(graph, critical_path)]
        assert kinds == sorted(kinds, reverse=True)


def test_a_transfer_goes_first_however_little_hangs_on_it() -> None:
    g = GraphBuilder(0, 2)
    small, large = (
        g.buffer("small", size_bytes=1, initialised=True),
        g.buffer("large", size_bytes=1, initialised=True),
    )
    g.compute("long", _WORK, accumulates=[large], cost=Cost(flops=10**12))
    g.exchange("short", sends=[(small, 1)], tag=0)
    assert _order(g.build(), critical_path) == [1, 0]


def _brute_force_tails(graph: Graph) -> list[int]:
    """The heaviest path from each task to any end, by trying all paths."""

    def tail(task: int) -> int:
        return graph.tasks[task].cost.flops + max(map(tail, graph.successors[task]), default=0)

    return [tail(task.id) for task in graph.tasks]


def test_among_compute_tasks_the_longest_tail_goes_first_and_ties_go_by_id() -> None:
    num_ties = 0
    for seed in range(200):
        rng = random.Random(seed)
        g = GraphBuilder(0, 1)
        buffers = [g.buffer(f"b{i}", initialised=True) for i in range(6)]
        for i in range(12):
            read, write = rng.sample(buffers, 2)
            # Powers of two add up without rounding whatever the nominal rate of the machine is.
            g.compute(
                f"c{i}",
                _WORK,
                reads=[read],
                accumulates=[write],
                cost=Cost(flops=2 ** rng.randrange(3)),
            )
        graph = g.build()
        tails = _brute_force_tails(graph)
        order = _order(graph, critical_path)
        assert [tails[t] for t in order] == sorted(tails, reverse=True), f"seed {seed}"
        num_ties += len(tails) - len(set(tails))
    assert num_ties > 0


def test_ties_go_by_id() -> None:
    g = GraphBuilder(0, 2)
    buffers = [g.buffer(f"b{i}", size_bytes=4, initialised=True) for i in range(8)]
    for i, buffer in enumerate(buffers):
        if i % 2:
            g.exchange(f"x{i}", sends=[(buffer, 1)], tag=i)
        else:
            g.compute(f"c{i}", _WORK, accumulates=[buffer], cost=Cost(flops=5))
    assert _order(g.build(), critical_path) == [1, 3, 5, 7, 0, 2, 4, 6]


@pytest.mark.parametrize("places", [[0, 0, 1], [0, 1], [0, 1, 2, 3], [1, 2, 3]])
def test_what_is_no_permutation_is_refused(places: list[int]) -> None:
    g = GraphBuilder(0, 1)
    for i in range(3):
        g.compute(f"c{i}", _WORK, writes=[g.buffer(f"b{i}")])
    with pytest.raises(InternalError, match="did not return a permutation of 3 tasks"):
        Schedule.of(g.build(), lambda graph: places)


def _compute(graph: Graph, policy: Policy) -> tuple[list[int], list[float]]:
    """Runs a graph one task at a time: (the order in which tasks ran, what all parts hold in the
    end).
    """
    values = [1.0 + part.id for part in graph.parts]
    engine = Engine(Schedule.of(graph, policy), validate=True)
    order: list[int] = []
    instructions = engine.start()
    while Finish() not in instructions:
        (task,) = (i.task for i in instructions if isinstance(i, Issue))
        order.append(task)
        read = sum(values[part] for part in graph.tasks[task].reads)
        for part in graph.tasks[task].accumulates:
            # Rounds differently in every order.
            values[part] = values[part] / 3.0 + read * 1.1
        instructions = engine.handle([TaskDone(task)])
    return order, values


def test_policies_change_the_order_but_not_one_bit_of_the_result() -> None:
    num_orders = 0
    for seed in range(200):
        rng = random.Random(seed)
        g = GraphBuilder(0, 1, [Lane(COMPUTE.name, max_in_flight=1)])
        buffers = [g.buffer(f"b{i}", initialised=True) for i in range(6)]
        for i in range(12):
            read, write = rng.sample(buffers, 2)
            g.compute(
                f"c{i}",
                _WORK,
                reads=[read],
                accumulates=[write],
                cost=Cost(flops=rng.randrange(1, 9)),
            )
        graph = g.build()
        runs = [
            _compute(graph, policy)
            for policy in (program_order, critical_path, _shuffled(seed), _shuffled(seed + 1))
        ]
        assert runs[0][0] == list(range(12))
        assert all(values == runs[0][1] for _, values in runs)
        num_orders += len({tuple(order) for order, _ in runs})
    assert num_orders > 3 * 200
