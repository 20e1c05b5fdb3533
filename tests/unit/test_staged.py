"""Staging: the same bytes arrive, in chunks that are bounded, in an order that no timing breaks;
the verifier reads them too.
"""

from __future__ import annotations

import re

import pytest
from covering import first_of
from graphs import problem
from simulated_faults import Faults, rehearse
from simulated_memory import reference

from burst_rt import Causal, Full
from burst_rt.errors import ConfigError
from burst_rt.planning.choose import choose
from burst_rt.scheduler import DEVICE_LANES, Graph, GraphBuilder, Schedule, check_world
from burst_rt.transport.staged import ToDevice, ToHost, stage_graph

_CHUNK = 1000
# A tile, an exchange with a neighbour or further on, a sum that travels, and the chunks of both.
_OF_A_HOP = re.compile(r"(?:hop|sum) (\d+)\b")


def graphs(
    world_size: int, strategy: str, *, forward: bool, causal: bool = False, device: bool = True
) -> list[Graph]:
    mask = Causal() if causal else Full()
    problem_ = problem(61 * world_size, 61 * world_size, world_size, mask=mask)
    program = choose(problem_, strategy, forward=forward).program
    return [program.graph(rank, *([DEVICE_LANES] if device else [])) for rank in range(world_size)]


# A tile, an exchange between neighbours or further on, a travelling sum; and their chunks.
_OF_A_HOP = re.compile(r"(?:hop|sum) (\d+)\b")
_KINDS = [("ring-kv", True), ("ring-q", True), ("ring-kv", False), ("burst", False)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("strategy", "forward"), _KINDS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_byte_goes_once_through_a_chunk(
    world_size: int, strategy: str, forward: bool, causal: bool
) -> None:
    plain = graphs(world_size, strategy, forward=forward, causal=causal)
    lowered = [stage_graph(graph, _CHUNK) for graph in plain]
    check_world(lowered)
    for before, after in zip(plain, lowered, strict=True):
        assert after.parts[: len(before.parts)] == before.parts
        chunks = {part.id for part in after.parts[len(before.parts) :]}
        assert len(chunks) == (4 if world_size > 1 else 0)
        for way in ("sends", "recvs"):
            messages = [m for task in before.tasks for m in getattr(task, way)]
            pieces = [m for task in after.tasks for m in getattr(task, way)]
            assert sum(m.size_bytes for m in pieces) == sum(m.size_bytes for m in messages)
            assert all(m.part in chunks and 0 < m.size_bytes <= _CHUNK for m in pieces)
            # What is copied covers each part as often as it was sent or received, from its first
            # byte to its last.
            copied: dict[int, list[tuple[int, int]]] = {}
            for task in after.tasks:
                if isinstance(task.op, ToHost if way == "sends" else ToDevice):
                    assert task.op.chunk in chunks
                    copied.setdefault(task.op.part, []).append((task.op.offset, task.op.size_bytes))
            for part in {m.part for m in messages}:
                wanted = [
                    (at, min(_CHUNK, m.size_bytes - at))
                    for m in messages
                    if m.part == part
                    for at in range(0, m.size_bytes, _CHUNK)
                ]
                assert sorted(copied[part]) == sorted(wanted)


@pytest.mark.parametrize("strategy", ["ring-q", "burst", "ring-naive", "hybrid:2", "two-level:2"])
@pytest.mark.parametrize("forward", [True, False])
def test_a_task_knows_the_hop_that_its_name_speaks_of(strategy: str, forward: bool) -> None:
    for plain in graphs(4, strategy, forward=forward):
        for task in (*plain.tasks, *stage_graph(plain, _CHUNK).tasks):
            named = _OF_A_HOP.match(task.name)
            assert task.hop == (int(named[1]) if named else None)


@pytest.mark.parametrize("seeds", first_of([range(20), range(20, 60)], 1), ids=["20", "40 more"])
@pytest.mark.parametrize("device", [True, False])
@pytest.mark.parametrize(("strategy", "forward"), _KINDS)
def test_any_order_gives_the_same_result(
    strategy: str, forward: bool, device: bool, seeds: range
) -> None:
    for world_size in (2, 3):
        lowered = [
            stage_graph(graph, _CHUNK)
            for graph in graphs(world_size, strategy, forward=forward, device=device)
        ]
        schedules = [Schedule.of(graph) for graph in lowered]
        wanted = reference(lowered)
        for seed in seeds:
            assert rehearse(schedules, Faults(seed)).values == wanted


def test_copies_and_messages_of_neighbouring_chunks_may_overlap() -> None:
    """Chunk 1 is copied to the host while chunk 0 is on the wire; chunk 2 needs the memory of chunk
    0.
    """
    g = GraphBuilder(0, 2, DEVICE_LANES)
    g.exchange("x", sends=[(g.buffer("b", size_bytes=4000, initialised=True), 1)], tag=0)
    graph = stage_graph(g.build(), _CHUNK)
    tasks = {task.name: task.id for task in graph.tasks}
    assert graph.predecessors[tasks["x d2h 1"]] == ()
    assert graph.predecessors[tasks["x d2h 2"]] == (tasks["x out 0"],)
    assert graph.predecessors[tasks["x out 1"]] == (tasks["x d2h 1"],)


def test_long_messages_have_larger_chunks_not_more() -> None:
    """A gigabyte to each side, with tags for more than a thousand chunks of the usual size."""
    g = GraphBuilder(0, 2)
    out, into = (
        g.buffer(name, size_bytes=1 << 30, initialised=name == "out") for name in ("out", "into")
    )
    g.exchange("x", sends=[(out, 1)], recvs=[(into, 1, 1 << 30)], tag=0)
    graph = stage_graph(g.build())
    assert (
        sum(bool(task.sends) for task in graph.tasks)
        == sum(bool(task.recvs) for task in graph.tasks)
        == 32
    )
    assert sum(m.size_bytes for task in graph.tasks for m in task.recvs) == 1 << 30


def test_chunks_of_one_tag_are_counted_together() -> None:
    g = GraphBuilder(0, 2)
    parts = [g.buffer(f"b{i}", size_bytes=3000, initialised=True) for i in range(2)]
    g.exchange("x", sends=[(part, 1) for part in parts], tag=0)
    with pytest.raises(ConfigError, match="cut into 6,000 chunks, at most 4,096"):
        stage_graph(g.build(), chunk_bytes=1)


def test_too_many_chunks_are_refused() -> None:
    g = GraphBuilder(0, 2, DEVICE_LANES)
    g.exchange("x", sends=[(g.buffer("b", size_bytes=4097, initialised=True), 1)], tag=0)
    with pytest.raises(ConfigError, match="use a layout of fewer runs"):
        stage_graph(g.build(), 1)
