"""Recurrences over ranks as graphs: verified for every world and layout, and what they send."""

from __future__ import annotations

from itertools import product

import pytest

from burst_rt.errors import InputError
from burst_rt.planning.layouts import make_layout
from burst_rt.planning.masks import Causal
from burst_rt.planning.scan import Scan
from burst_rt.planning.segments import StageFlops, Way, segments_of, ways_of
from burst_rt.scheduler import HOST_LANES, NCCL_LANES, Graph, check_share, check_world

_FLOPS = StageFlops(prepare=100, compose=70, fold=1000, advance=35, emit=22)


def _scan(kind: str, seq_len: int, world_size: int, memory: int | None, *, forward: bool) -> Scan:
    mask = Causal() if kind == "balanced" else None
    segments = segments_of(make_layout(kind, seq_len, world_size, mask))
    return Scan(
        world_size=world_size, segments=segments,
        ways=ways_of(segments, _FLOPS, memory, forward=forward), state_bytes=64, flops=_FLOPS,
        batch=1, forward=forward, shares_last=True,
    )  # fmt: skip


def _graphs(scan: Scan) -> list[Graph]:
    return [scan.graph(rank) for rank in range(scan.world_size)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "balanced"])
def test_graphs_of_every_world_are_right(kind: str, world_size: int) -> None:
    for seq_len, memory, forward, lanes in product(
        (1, 3, 17, 1000), (None, 3), (True, False), (HOST_LANES, NCCL_LANES)
    ):
        scan = _scan(kind, seq_len, world_size, memory, forward=forward)
        graphs = [scan.graph(rank, lanes) for rank in range(world_size)]
        check_world(graphs)
        for rank, graph in enumerate(graphs):
            check_share(graph, scan.messages(rank))
        assert sum(graph.wire_bytes for graph in graphs) == scan.wire_bytes()


def test_segments_cover_the_positions_in_order() -> None:
    for kind, world_size in product(("contiguous", "zigzag", "balanced"), (1, 2, 3, 7)):
        layout = make_layout(kind, 333, world_size, Causal() if kind == "balanced" else None)
        segments = segments_of(layout)
        assert [p for segment in segments for p in segment.positions] == list(range(333))
        for segment in segments:
            shard = [p for run in layout.runs[segment.owner] for p in run]
            assert shard[segment.shard] == list(segment.positions)


def test_runs_side_by_side_are_one_segment() -> None:
    segments = segments_of(make_layout("zigzag", 400, 2))
    assert [(segment.owner, len(segment.positions)) for segment in segments] == [
        (0, 100), (1, 200), (0, 100),
    ]  # fmt: skip


def test_striped_layouts_are_refused() -> None:
    with pytest.raises(InputError, match="got kind 'striped'; take 'zigzag', 'contiguous'"):
        segments_of(make_layout("striped", 100, 2))


def test_bytes_do_not_grow_with_tokens() -> None:
    short, long = (_scan("zigzag", n, 4, None, forward=True) for n in (64, 1 << 40))
    assert short.wire_bytes() == long.wire_bytes() == (6 + 3) * 64


def test_few_ranks_relay_and_many_fold() -> None:
    """With two ranks a map would be work for nothing; with 16 all others would wait for each."""
    few, many = (_scan("contiguous", 1 << 20, n, None, forward=True) for n in (2, 16))
    assert set(few.ways) == {Way.RELAYED}
    # The first segment knows its state, and nothing comes after the last one.
    assert many.ways == (Way.RELAYED, *(Way.FOLDED for _ in range(14)), Way.RELAYED)


def test_short_memories_need_no_chain() -> None:
    """Where every segment is as long as the memory, all states go at once, in two rounds."""
    scan = _scan("contiguous", 1000, 8, 3, forward=True)
    assert set(scan.ways) == {Way.OPEN}
    for graph in _graphs(scan):
        names = [task.name for task in graph.tasks if task.is_exchange]
        assert len(names) <= 3  # one state in, one out, and the last one
        sent = next((t for t in graph.tasks if t.is_exchange and t.sends), None)
        if sent is not None:
            received = {m.part for task in graph.tasks for m in task.recvs}
            before = set(graph.predecessors[sent.id])
            assert not any(set(graph.tasks[t].writes) & received for t in before)
    short = _scan("contiguous", 10, 8, 3, forward=True)
    assert Way.RELAYED in short.ways
