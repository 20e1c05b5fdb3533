"""Recurrences over ranks as graphs: verified for every world and layout, and what they send."""

from __future__ import annotations

import random
from itertools import product

import pytest
from recurrences import drawn_tree, paths_of

from burst_rt.errors import InputError
from burst_rt.planning.layouts import Layout, make_layout
from burst_rt.planning.masks import Causal, PrefixTree
from burst_rt.planning.scan import Collect, Scan
from burst_rt.planning.segments import Segment, StageFlops, Way, segments_of, ways_of
from burst_rt.scheduler import HOST_LANES, NCCL_LANES, Graph, Lane, check_share, check_world

_FLOPS = StageFlops(prepare=100, compose=70, fold=1000, advance=35, emit=22)


def _scan(kind: str, seq_len: int, world_size: int, memory: int | None, *, forward: bool) -> Scan:
    mask = Causal() if kind == "balanced" else None
    segments = segments_of(make_layout(kind, seq_len, world_size, mask))
    return _scan_of(segments, world_size, memory, forward=forward, shares_last=True)


def _scan_of(
    segments: tuple[Segment, ...], world_size: int, memory: int | None, *, forward: bool,
    shares_last: bool = False,
) -> Scan:  # fmt: skip
    return Scan(
        world_size=world_size, segments=segments,
        ways=ways_of(segments, _FLOPS, memory, forward=forward), state_bytes=64, flops=_FLOPS,
        batch=1, forward=forward, shares_last=shares_last,
    )  # fmt: skip


def _checked(scan: Scan, lanes: tuple[Lane, ...] = HOST_LANES) -> list[Graph]:
    """The graphs of all ranks, verified."""
    graphs = [scan.graph(rank, lanes) for rank in range(scan.world_size)]
    check_world(graphs)
    for rank, graph in enumerate(graphs):
        check_share(graph, scan.messages(rank))
    assert sum(graph.wire_bytes for graph in graphs) == scan.wire_bytes()
    return graphs


def _graphs(scan: Scan) -> list[Graph]:
    return [scan.graph(rank) for rank in range(scan.world_size)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "balanced"])
def test_graphs_of_every_world_are_right(kind: str, world_size: int) -> None:
    for seq_len, memory, forward, lanes in product(
        (1, 3, 17, 1000), (None, 3), (True, False), (HOST_LANES, NCCL_LANES)
    ):
        _checked(_scan(kind, seq_len, world_size, memory, forward=forward), lanes)


def test_segments_cover_the_positions_in_order() -> None:
    for kind, world_size in product(("contiguous", "zigzag", "balanced"), (1, 2, 3, 7)):
        layout = make_layout(kind, 333, world_size, Causal() if kind == "balanced" else None)
        segments = segments_of(layout)
        assert [p for segment in segments for p in segment.positions] == list(range(333))
        for segment in segments:
            shard = [p for run in layout.runs[segment.owner] for p in run]
            assert shard[segment.shard] == list(segment.positions)


_SEEDS = [range(60), pytest.param(range(60, 600), marks=pytest.mark.long)]


@pytest.mark.parametrize("seeds", _SEEDS, ids=["few", "many"])
def test_drawn_trees(seeds: range) -> None:
    """Graphs of all ranks are right, and segments are those of the paths, cut nowhere else."""
    for seed in seeds:
        rng = random.Random(seed)
        n, world_size = rng.choice([1, 5, 40, 333]), rng.choice([1, 2, 3, 4, 8])
        lengths, parents = drawn_tree(rng, n)
        tree = PrefixTree(lengths, parents, tokens=n)
        for kind in ("contiguous", "zigzag", "balanced", "whole"):
            mask = Causal() & tree if kind in ("balanced", "whole") else None
            layout = make_layout(kind, n, world_size, mask)
            segments = segments_of(layout, tree.branches)
            _check_segments(segments, layout, paths_of(lengths, parents, n))
            bytes_sent = set()
            for memory, forward, lanes in product(
                (None, 3), (True, False), (HOST_LANES, NCCL_LANES)
            ):
                scan = _scan_of(segments, world_size, memory, forward=forward)
                _checked(scan, lanes)
                bytes_sent.add(scan.wire_bytes())
            # One message for each segment and other rank that goes on from it, both ways.
            owners = [segment.owner for segment in segments]
            links = {(s.before, s.owner) for s in segments if s.before is not None}
            apart = [link for link in links if owners[link[0]] != link[1]]
            assert bytes_sent == {64 * len(apart)}


def _check_segments(
    segments: tuple[Segment, ...], layout: Layout, paths: tuple[tuple[int, ...], ...]
) -> None:
    before: dict[int, int] = {}  # by token, the one before it on its path; -1: none
    for path in paths:
        before |= dict(zip(path, (-1, *path[:-1]), strict=True))
    assert [p for segment in segments for p in segment.positions] == sorted(before)
    befores = {segment.before for segment in segments}
    for number, segment in enumerate(segments):
        shard = [p for run in layout.runs[segment.owner] for p in run]
        assert shard[segment.shard] == list(segment.positions)
        first, *others = segment.positions
        assert all(before[place] == place - 1 for place in others)
        source = None if segment.before is None else segments[segment.before]
        assert before[first] == (source.positions[-1] if source else -1)
        last = segments[number - 1]
        if number and (last.owner, last.shard.stop) == (segment.owner, segment.begin):
            others_go_on = [s.before for s in segments].count(number - 1) > 1
            assert segment.before != number - 1 or others_go_on
    assert all(each is None or each < len(segments) for each in befores)


def test_a_chain_of_nodes_is_no_tree() -> None:
    layout = make_layout("zigzag", 400, 2)
    chain = PrefixTree([100, 0, 50, 250], [-1, 0, 1, 2])
    assert not chain.branches
    assert segments_of(layout, chain.branches) == segments_of(layout)


def test_states_of_a_tree_go_to_each_rank_once() -> None:
    """A question on ranks 0 and 1, four answers on ranks 1 to 3: by hand."""
    tree = PrefixTree([150, 30, 60, 70, 90], [-1, 0, 0, 0, 0])
    segments = segments_of(make_layout("contiguous", 400, 4), tree.branches)
    assert [(s.owner, s.positions.start, s.before) for s in segments] == [
        (0, 0, None), (1, 100, 0), (1, 150, 1), (1, 180, 1), (2, 200, 3), (2, 240, 1), (3, 300, 5),
        (3, 310, 1),
    ]  # fmt: skip
    forward, backward = (_scan_of(segments, 4, None, forward=way) for way in (True, False))
    sent = [t[:2] for rank in range(4) for t in forward.messages(rank)]
    assert sorted(set(sent)) == [(0, 1), (1, 2), (1, 3), (2, 3)]
    assert forward.wire_bytes() == backward.wire_bytes() == 5 * 64  # rank 1 sends rank 2 two states
    # On rank 1 the gradients of its two answers, of rank 2's and of rank 3's are added up.
    ops = [task.op for task in backward.graph(1).tasks]
    (total,) = [op for op in ops if isinstance(op, Collect)]
    assert len(total.parts) == 4


def test_ways_follow_the_paths() -> None:
    """Folded are those that wait for another rank, and for which another rank waits."""
    lengths = [1 << 18, *[1 << 14] * 8]
    tree = PrefixTree(lengths, [-1, *[0] * 8])
    n = sum(lengths)
    segments = segments_of(make_layout("contiguous", n, 16), tree.branches)
    ways = ways_of(segments, _FLOPS, None, forward=True)
    befores = {segment.before for segment in segments}
    folded = {number for number, way in enumerate(ways) if way is Way.FOLDED}
    inner = {number for number, s in enumerate(segments) if s.before is not None}
    assert folded
    assert folded <= inner & befores
    # All of the question but its beginning; answers end on their rank, or go on to the next.
    question = {number for number, s in enumerate(segments) if s.positions.stop <= lengths[0]}
    assert question - {0} <= folded
    one = segments_of(make_layout("contiguous", n, 1), tree.branches)
    assert set(ways_of(one, _FLOPS, None, forward=False)) == {Way.RELAYED}


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
