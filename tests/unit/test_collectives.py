"""Ring collectives: graphs that fit, the right sums, and as many bytes as their docstrings say."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import accumulate

import pytest
import torch

import burst_rt
from benchmarks.tensor_parallel import Collectives
from burst_rt import Context
from burst_rt.errors import ContractMismatch, InputError
from burst_rt.runtime.collectives import (
    all_gather,
    all_reduce,
    even_parts,
    gather_ranges,
    reduce_ranges,
    reduce_scatter,
    scan,
)
from burst_rt.scheduler import (
    HOST_LANES,
    NCCL_LANES,
    Buffer,
    Graph,
    GraphBuilder,
    Lane,
    check_world,
)

_WORLDS = (1, 2, 3, 4, 5)
# Parts that are equal, that differ, and that are empty.
_LENGTHS: dict[str, Callable[[int], int]] = {
    "equal": lambda rank: 3,
    "ragged": lambda rank: 2 + rank % 2,
    "one has all": lambda rank: 7 * (rank == 1),
}
_COLLECTIVES = (all_gather, reduce_scatter, all_reduce)


def graphs(
    collective: Callable[..., int], sizes: list[int], lanes: tuple[Lane, ...] = HOST_LANES
) -> tuple[list[Graph], list[int]]:
    built, tags = [], []
    for rank in range(len(sizes)):
        g = GraphBuilder(rank, len(sizes), lanes)
        whole: Buffer = g.buffer("whole", parts=len(sizes), size_bytes=sizes, initialised=True)
        tags.append(collective(g, whole, tag=5))
        built.append(g.build())
    return built, tags


@pytest.mark.parametrize("lanes", [HOST_LANES, NCCL_LANES])
@pytest.mark.parametrize("kind", _LENGTHS)
@pytest.mark.parametrize("world", _WORLDS)
def test_graphs_fit_and_send_what_they_say(world: int, kind: str, lanes: tuple[Lane, ...]) -> None:
    sizes = [8 * _LENGTHS[kind](rank) for rank in range(world)]
    for collective in _COLLECTIVES:
        built, tags = graphs(collective, sizes, lanes)
        check_world(built)
        used = [m.tag for graph in built for task in graph.tasks for m in task.sends]
        assert len(set(tags)) == 1
        assert all(5 <= tag < tags[0] for tag in used)
        for rank, graph in enumerate(built):
            gathered, reduced = sum(sizes) - sizes[(rank + 1) % world], sum(sizes) - sizes[rank]
            sent = sum(m.size_bytes for task in graph.tasks for m in task.sends)
            assert (
                sent
                == {
                    all_gather: gathered,
                    reduce_scatter: reduced,
                    all_reduce: gathered + reduced,
                }[collective]
            )


@pytest.mark.parametrize("kind", _LENGTHS)
@pytest.mark.parametrize("world", _WORLDS)
def test_values_over_ranks(world: int, kind: str) -> None:
    lengths = [_LENGTHS[kind](rank) for rank in range(world)]
    total = sum(lengths)
    # Whole numbers: sums are exact in any order.
    terms = torch.randint(
        -99, 99, (world, 2, total, 3), generator=torch.Generator().manual_seed(0)
    ).double()

    def call(ctx: Context) -> None:
        ring = Collectives(ctx.runtime)
        for batch in (1, 2):
            mine = terms[ctx.rank, :batch]
            own = mine.split(lengths, 1)[ctx.rank]
            gathered = torch.cat(
                [terms[rank, :batch].split(lengths, 1)[rank] for rank in range(world)], 1
            )
            assert torch.equal(ring.all_gather(own, lengths), gathered)
            assert torch.equal(
                ring.reduce_scatter(mine.clone(), lengths),
                terms[:, :batch].sum(0).split(lengths, 1)[ctx.rank],
            )
            assert torch.equal(ring.all_reduce(mine.clone()), terms[:, :batch].sum(0))

    burst_rt.run_local(world, call)


def test_an_all_reduce_gives_the_same_bits_everywhere_and_every_time() -> None:
    noise = torch.randn(4, 1001, generator=torch.Generator().manual_seed(0))

    def call(ctx: Context) -> list[torch.Tensor]:
        ring = Collectives(ctx.runtime)
        return [ring.all_reduce(noise[ctx.rank].clone()) for _ in range(3)]

    first, *others = [found for rank in burst_rt.run_local(4, call) for found in rank]
    assert all(torch.equal(first, other) for other in others)


def test_ranks_with_other_sizes_are_told_before_anything_is_sent() -> None:
    def call(ctx: Context) -> int:
        with pytest.raises(ContractMismatch, match="graphs"):
            Collectives(ctx.runtime).all_reduce(torch.zeros(8 + ctx.rank))
        return ctx.runtime.transport.bytes_sent

    assert burst_rt.run_local(3, call) == [0, 0, 0]


def test_parts_as_even_as_can_be() -> None:
    assert even_parts(10, 4) == [3, 3, 2, 2]
    assert even_parts(1, 3) == [1, 0, 0]


def windows(counts: list[int], wide: int) -> list[tuple[int, int]]:
    """Each rank's rows, and `wide` more on both sides where there are any."""
    stops = list(accumulate(counts))
    return [
        (max(0, stop - own - wide), min(stops[-1], stop + wide))
        for own, stop in zip(counts, stops, strict=True)
    ]


@pytest.mark.parametrize("lanes", [HOST_LANES, NCCL_LANES])
@pytest.mark.parametrize("wide", [0, 1, 5, 99])
@pytest.mark.parametrize("kind", _LENGTHS)
@pytest.mark.parametrize("world", _WORLDS)
def test_ranges_come_straight_from_their_owners(
    world: int, kind: str, wide: int, lanes: tuple[Lane, ...]
) -> None:
    counts = [_LENGTHS[kind](rank) for rank in range(world)]
    ranges = windows(counts, wide)
    for collective in (gather_ranges, reduce_ranges):
        built = []
        for rank in range(world):
            g = GraphBuilder(rank, world, lanes)
            whole = collective(g, "rows", counts, ranges, 24, tag=5)
            start, stop = ranges[rank]
            assert sum(part.size_bytes for part in whole.parts) == 24 * (stop - start)
            assert whole[rank].size_bytes == 24 * counts[rank]
            built.append(g.build())
        check_world(built)
        # Nothing is passed on: what is sent is what ranges have beside own rows.
        wanted = sum(stop - start for start, stop in ranges) - sum(counts)
        assert sum(graph.wire_bytes for graph in built) == 24 * wanted


@pytest.mark.parametrize("wide", [1, 5])
@pytest.mark.parametrize("kind", _LENGTHS)
@pytest.mark.parametrize("world", _WORLDS)
def test_ranges_are_gathered_and_summed(world: int, kind: str, wide: int) -> None:
    counts = [_LENGTHS[kind](rank) for rank in range(world)]
    ranges, stops = windows(counts, wide), list(accumulate(counts))
    rows = torch.arange(sum(counts) * 3).view(-1, 3)
    terms = [rows[start:stop] * 10**rank for rank, (start, stop) in enumerate(ranges)]
    sums = torch.zeros_like(rows)
    for (start, stop), term in zip(ranges, terms, strict=True):
        sums[start:stop] += term

    def pipeline(ctx: Context, collective: Callable[..., Buffer]) -> burst_rt.Pipeline:
        def build(rank: int) -> Graph:
            g = GraphBuilder(rank, world, ctx.lanes)
            collective(g, "rows", counts, ranges, 24)
            return g.build()

        return ctx.pipeline(build)

    def call(ctx: Context) -> None:
        start, stop = ranges[ctx.rank]
        own = slice(stops[ctx.rank] - counts[ctx.rank], stops[ctx.rank])
        mine = slice(own.start - start, own.stop - start)
        got = torch.full((stop - start, 3), -1)
        got[mine] = rows[own]
        pipeline(ctx, gather_ranges).run(buffers={"rows": got}, ops={})
        assert torch.equal(got, rows[start:stop])
        got = terms[ctx.rank].clone()
        pipeline(ctx, reduce_ranges).run(buffers={"rows": got}, ops={})
        assert torch.equal(got[mine], sums[own])

    burst_rt.run_local(world, call)


@pytest.mark.parametrize(
    ("counts", "ranges", "said"),
    [
        ([2, 3], [(0, 2), (3, 5)], "rank 1 must be within 0 to 5 and hold the rank's own rows, 2 "),
        ([2, 3], [(0, 1), (2, 5)], "rank 0 must be within 0 to 5 and hold the rank's own rows, 0 "),
        ([2, 3], [(0, 2), (2, 6)], "rank 1 must be within 0 to 5"),
        ([2, 3], [(-1, 2), (2, 5)], "rank 0 must be within 0 to 5"),
        ([2, 3, 4], [(0, 2), (2, 5)], "one entry for each of 2 ranks, got 3 and 2"),
    ],
)
def test_ranges_that_do_not_fit_are_refused(
    counts: list[int], ranges: list[tuple[int, int]], said: str
) -> None:
    for collective in (gather_ranges, reduce_ranges):
        with pytest.raises(InputError, match=re.escape(said)):
            collective(GraphBuilder(0, 2), "rows", counts, ranges, 8)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("world", _WORLDS)
def test_a_scan_sums_up_what_earlier_ranks_have(world: int, reverse: bool) -> None:
    def call(ctx: Context) -> tuple[list[int], list[int], int]:
        def build(rank: int) -> Graph:
            g = GraphBuilder(rank, world, ctx.lanes)
            own, before = (g.buffer(n, size_bytes=16, initialised=True) for n in ("own", "before"))
            assert scan(g, own, before, reverse=reverse, tag=3) == 4
            return g.build()

        own, before = torch.tensor([10**ctx.rank, 1]), torch.zeros(2, dtype=torch.int64)
        pipeline = ctx.pipeline(build)
        pipeline.run(buffers={"own": own, "before": before}, ops={})
        return own.tolist(), before.tolist(), pipeline.graph.wire_bytes

    built = []
    for rank in range(world):
        g = GraphBuilder(rank, world, NCCL_LANES)
        scan(g, *(g.buffer(n, size_bytes=16, initialised=True) for n in "ab"), reverse=reverse)
        built.append(g.build())
    check_world(built)
    for rank, (own, before, sent) in enumerate(burst_rt.run_local(world, call)):
        earlier = range(rank + 1, world) if reverse else range(rank)
        assert before == [sum(10**r for r in earlier), len(earlier)]
        assert own == [before[0] + 10**rank, before[1] + 1]
        assert sent == (0 if rank == (0 if reverse else world - 1) else 16)
