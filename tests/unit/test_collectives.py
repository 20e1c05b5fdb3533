"""Ring collectives: graphs that fit, the right sums, and as many bytes as their docstrings say."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import burst_rt
from burst_rt import Context
from burst_rt.baselines.tensor_parallel import Collectives
from burst_rt.errors import ContractMismatch
from burst_rt.runtime.collectives import all_gather, all_reduce, even_parts, reduce_scatter
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
                == {all_gather: gathered, reduce_scatter: reduced, all_reduce: gathered + reduced}[
                    collective
                ]
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
