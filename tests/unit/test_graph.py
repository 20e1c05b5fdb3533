"""The graph builder: derived edges against a brute-force reading of the program, and what it
refuses.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest

from burst_rt.errors import InputError
from burst_rt.scheduler import Buffer, Cost, Graph, GraphBuilder, Message, Op, Part, Task

_NUM_RANDOM_GRAPHS = 2_000
_WORK = Op("work")


def _pick(rng: random.Random, buffers: list[Buffer], at_most: int) -> list[Buffer | Part]:
    picked = rng.sample(buffers, rng.randint(0, at_most))
    return [
        buffer if rng.random() < 0.3 else buffer[rng.randrange(len(buffer.parts))]
        for buffer in picked
    ]


def _random_graph(seed: int) -> Graph:
    """A program of computing tasks and exchanges over few parts, so that nearly everything
    conflicts with something.
    """
    rng = random.Random(seed)
    g = GraphBuilder(0, 3)
    buffers = [
        g.buffer(f"b{i}", parts=rng.randint(1, 3), size_bytes=8, initialised=rng.random() < 0.5)
        for i in range(rng.randint(2, 5))
    ]
    for i in range(rng.randint(1, 16)):
        if rng.random() < 0.3:
            parts = [part for buffer in buffers for part in buffer.parts]
            rng.shuffle(parts)
            num_sends, num_recvs = rng.randint(1, 2), rng.randint(0, 2)
            sends = [(part, rng.choice((1, 2))) for part in parts[:num_sends]]
            recvs = [
                (part, rng.choice((1, 2))) for part in parts[num_sends : num_sends + num_recvs]
            ]
            g.exchange(f"x{i}", sends=sends, recvs=recvs, tag=i)
        else:
            g.compute(
                f"c{i}",
                _WORK,
                reads=_pick(rng, buffers, 2),
                writes=_pick(rng, buffers, 1),
                accumulates=_pick(rng, buffers, 1),
            )
    return g.build()


def _touches(task: Task) -> tuple[set[int], set[int]]:
    """(parts whose old value the task needs, parts it changes)."""
    return {*task.reads, *task.accumulates}, {*task.writes, *task.accumulates}


def _conflicts(graph: Graph) -> list[set[int]]:
    """For each task the earlier ones that must not swap with it: one of the two changes what the
    other touches.
    """
    conflicts = []
    for later in graph.tasks:
        later_reads, later_writes = _touches(later)
        earlier_ones = set()
        for earlier in graph.tasks[: later.id]:
            reads, writes = _touches(earlier)
            if writes & (later_reads | later_writes) or reads & later_writes:
                earlier_ones.add(earlier.id)
        conflicts.append(earlier_ones)
    return conflicts


def _reachable(before: Iterable[Iterable[int]]) -> list[set[int]]:
    """For each task all it waits for, directly or not."""
    closure: list[set[int]] = []
    for direct in before:
        closure.append(set(direct).union(*(closure[u] for u in direct)))
    return closure


def test_derived_edges_order_all_conflicts_and_nothing_else() -> None:
    num_edges = 0
    for seed in range(_NUM_RANDOM_GRAPHS):
        graph = _random_graph(seed)
        conflicts = _conflicts(graph)
        for task, before in enumerate(graph.predecessors):
            assert set(before) <= conflicts[task], (
                f"seed {seed}: task {task} has an edge from a task it has no conflict with"
            )
        assert _reachable(graph.predecessors) == _reachable(conflicts), f"seed {seed}"
        num_edges += sum(map(len, graph.predecessors))
    assert num_edges > 10 * _NUM_RANDOM_GRAPHS


def test_edges_are_listed_once_ascending_and_both_ways() -> None:
    for seed in range(_NUM_RANDOM_GRAPHS // 10):
        graph = _random_graph(seed)
        assert all(
            list(edges) == sorted(set(edges)) for edges in (*graph.predecessors, *graph.successors)
        )
        forward = {(u, v) for v, before in enumerate(graph.predecessors) for u in before}
        assert forward == {(u, v) for u, after in enumerate(graph.successors) for v in after}
        assert all(u < v for u, v in forward)


def test_the_double_buffer_of_the_docstring() -> None:
    g = GraphBuilder(rank=2, world_size=4)
    kv = [g.buffer("kv0", size_bytes=8, initialised=True), g.buffer("kv1", size_bytes=8)]
    out = g.buffer("out", size_bytes=8, initialised=True)
    hop0 = g.exchange("hop 0", sends=[(kv[0], 3)], recvs=[(kv[1], 1)], tag=0)
    tile0 = g.compute("tile 0", Op("tile", (0,)), reads=[kv[0]], accumulates=[out])
    tile1 = g.compute("tile 1", Op("tile", (1,)), reads=[kv[1]], accumulates=[out])
    hop1 = g.exchange("hop 1", sends=[(kv[1], 3)], recvs=[(kv[0], 1)], tag=1)
    before = g.build().predecessors
    assert before[tile0] == ()
    assert before[tile1] == (hop0, tile0)
    # It overwrites what hop 0 sends and tile 0 reads, and passes on what hop 0 brings; tile 1 only
    # reads what it reads too.
    assert before[hop1] == (hop0, tile0)


def test_a_task_knows_its_hop() -> None:
    g = GraphBuilder(0, 2)
    part = g.buffer("kv", size_bytes=8, initialised=True)
    g.exchange("on", sends=[(part, 1)], tag=0, hop=1)
    g.compute("tile", _WORK, reads=[part], hop=2)
    g.compute("finish", _WORK, reads=[part])
    assert [task.hop for task in g.build().tasks] == [1, 2, None]


def test_accumulations_into_one_part_form_a_chain_in_program_order() -> None:
    g = GraphBuilder(0, 1)
    total = g.buffer("total", parts=2, initialised=True)
    ids = [g.compute(f"add {i}", _WORK, accumulates=[total[i % 2]]) for i in range(6)]
    assert g.build().predecessors == ((), (), *((i - 2,) for i in ids[2:]))


def test_memory_of_another_builder_is_refused() -> None:
    g, other = GraphBuilder(0, 2), GraphBuilder(0, 2)
    g.buffer("x", size_bytes=4)
    for foreign in (other.buffer("x", size_bytes=4), other.buffer("y", size_bytes=4)[0]):
        with pytest.raises(InputError, match="belongs to another builder"):
            g.compute("task", Op("op"), reads=[foreign])
        with pytest.raises(InputError, match="belongs to another builder"):
            g.exchange("hop", sends=[(foreign, 1)], tag=0)


def test_a_name_alone_is_an_operation_on_what_the_task_declares() -> None:
    g = GraphBuilder(0, 1)
    a, b, c = (g.buffer(name, parts=2, initialised=True) for name in "abc")
    task = g.compute(
        "t", "work", reads=(each for each in (a, b[1])), writes=[b[0]], accumulates=[c]
    )
    node = g.build().tasks[task]
    assert node.op == Op("work", (a, b[1], b[0], c))
    assert node.reads == (a[0].id, a[1].id, b[1].id)


def test_naming_a_buffer_names_all_its_parts() -> None:
    g = GraphBuilder(0, 1)
    buffer = g.buffer("b", parts=3, size_bytes=(1, 2, 3))
    assert [part.size_bytes for part in buffer.parts] == [1, 2, 3]
    assert [part.name for part in buffer.parts] == ["b[0]", "b[1]", "b[2]"]
    for i in range(3):
        g.compute(f"write {i}", _WORK, writes=[buffer[i]])
    g.compute("read", _WORK, reads=[buffer, buffer[1]])
    graph = g.build()
    assert graph.tasks[3].reads == (0, 1, 2)
    assert graph.predecessors[3] == (0, 1, 2)


def test_an_exchange_declares_what_its_messages_touch() -> None:
    g = GraphBuilder(0, 3)
    ready = g.buffer("ready", initialised=True)
    out = g.buffer("out", parts=2, size_bytes=16, initialised=True)
    slot = g.buffer("slot", size_bytes=16)
    task = g.exchange(
        "swap", sends=[(out[0], 1), (out[0], 2, 4)], recvs=[(slot, 1, 12)], tag=7, reads=[ready]
    )
    node = g.build().tasks[task]
    assert node.sends == (Message(out[0].id, 1, 7, 16), Message(out[0].id, 2, 7, 4))
    assert node.recvs == (Message(slot[0].id, 1, 7, 12),)
    assert node.reads == (ready[0].id, out[0].id)
    assert node.writes == (slot[0].id,)
    assert node.cost == Cost(0, 20)
    assert node.is_exchange


def test_a_built_graph_does_not_change_when_the_builder_goes_on() -> None:
    g = GraphBuilder(0, 1)
    buffer = g.buffer("b", initialised=True)
    g.compute("one", _WORK, accumulates=[buffer])
    first = g.build()
    g.compute("two", _WORK, accumulates=[buffer])
    assert (len(first.tasks), first.successors) == (1, ((),))
    assert g.build().successors == ((1,), ())


def _builder() -> GraphBuilder:
    return GraphBuilder(0, 2)


def _two_part_buffer(g: GraphBuilder) -> Buffer:
    return g.buffer("two", parts=2, size_bytes=4, initialised=True)


def _one(g: GraphBuilder) -> Buffer:
    return g.buffer("one", size_bytes=4, initialised=True)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: GraphBuilder(2, 2), "rank must be in"),
        (lambda: GraphBuilder(-1, 2), "rank must be in"),
        (lambda: [g := _builder(), _one(g), _one(g)], "name 'one' is taken"),
        (lambda: _builder().buffer("b", parts=2, size_bytes=(1, 2, 3)), "expected 2 part sizes"),
        (lambda: _builder().buffer("b", parts=0), "expected 0 part sizes"),
        (lambda: _builder().buffer("b", size_bytes=-1), "at least 0 bytes"),
        (
            lambda: _builder().compute("c", _WORK, lane="tensor cores"),
            "lane of task 'c' must be one of .*, got 'tensor cores'",
        ),
        (lambda: _builder().exchange("x", tag=0), "at least one send or receive"),
        (
            lambda: (g := _builder()).exchange("x", sends=[(_two_part_buffer(g), 1)], tag=0),
            "carries one part, got a buffer of 2",
        ),
        (
            lambda: (g := _builder()).exchange("x", sends=[(_one(g), 0)], tag=0),
            "peer must be another rank",
        ),
        (
            lambda: (g := _builder()).exchange("x", sends=[(_one(g), 2)], tag=0),
            "peer must be another rank",
        ),
        (lambda: (g := _builder()).exchange("x", sends=[(_one(g), 1, 5)], tag=0), "1 to 4 bytes"),
        (lambda: (g := _builder()).exchange("x", recvs=[(_one(g), 1, 0)], tag=0), "1 to 4 bytes"),
        (lambda: (g := _builder()).exchange("x", sends=[(_one(g), 1)], tag=-1), "non-negative"),
        (
            lambda: (
                (g := _builder(), b := _one(g))
                and g.exchange("x", sends=[(b, 1)], recvs=[(b, 1)], tag=0)
            ),
            "sent and received",
        ),
        (
            lambda: (
                (g := _builder(), b := _one(g)) and g.exchange("x", recvs=[(b, 1), (b, 1)], tag=0)
            ),
            "received twice",
        ),
    ],
)
def test_a_mistake_is_refused_by_name(mistake: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        mistake()
