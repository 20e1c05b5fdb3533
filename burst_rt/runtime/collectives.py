"""Ring collectives as tasks of a graph: all-gather, reduce-scatter, all-reduce (P. Patarasuk and X.
Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009). Pure: no
torch, no MPI. For: tensor parallelism, sums of gradients, pipelines of one's own.

All work on a buffer of W parts, W being the world size, part r of which is rank r's; parts may
differ in size, or be empty. Each takes W-1 hops (all-reduce twice as many), in which every rank
sends one part to the next rank and receives one from the rank before. Messages' tags begin at
`tag`; each function returns the first tag it has left free. `reads`: what must be there before
anything is sent.

Received parts are added up by compute tasks `Op("add", (buffer, part, slot))` on `lane`:
buffer[part] += slot, one of a double-buffered pair named "<buffer> slot0" and "<buffer> slot1".
Sums are made in the order of the ring: the same bits in every run, and after an all-reduce on every
rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from burst_rt.scheduler import COMPUTE, Buffer, Cost, GraphBuilder, Op, Part

__all__ = ["all_gather", "all_reduce", "even_parts", "reduce_scatter"]


def even_parts(count: int, num_parts: int) -> list[int]:
    """`count` in parts that differ by at most one, the larger ones first."""
    return [count // num_parts + (part < count % num_parts) for part in range(num_parts)]


def all_gather(
    g: GraphBuilder, whole: Buffer, *, tag: int = 0, reads: Sequence[Buffer] = ()
) -> int:
    """Before: a rank's own part is there; after: all parts are.

    Rank r sends size(whole) - size(part r + 1): (W-1)/W of the whole where parts are equal.
    """
    rank, world = g.rank, g.world_size
    for hop in range(world - 1):
        coming = whole[(rank - hop - 1) % world]
        _exchange(
            g,
            f"{whole.name} gather {hop}",
            whole[(rank - hop) % world],
            coming,
            coming.size_bytes,
            tag + hop,
            reads,
        )
    return tag + world - 1


def reduce_scatter(
    g: GraphBuilder,
    whole: Buffer,
    *,
    tag: int = 0,
    reads: Sequence[Buffer] = (),
    lane: str = COMPUTE.name,
) -> int:
    """Before: every rank has a term of every part; after: a rank's own part is the sum of all
    ranks' terms, and the others are used up.

    Rank r sends size(whole) - size(part r): (W-1)/W of the whole where parts are equal.
    """
    rank, world = g.rank, g.world_size
    largest = max(part.size_bytes for part in whole.parts)
    slots = [
        g.buffer(f"{whole.name} slot{number}", size_bytes=largest)
        for number in range(min(2, world - 1))
    ]
    for hop in range(world - 1):
        slot, coming = slots[hop % 2], whole[(rank - hop - 2) % world]
        _exchange(
            g,
            f"{whole.name} reduce {hop}",
            whole[(rank - hop - 1) % world],
            slot[0],
            coming.size_bytes,
            tag + hop,
            reads,
        )
        if coming.size_bytes:
            op, cost = (
                Op("add", (whole.name, coming.index, slot.name)),
                Cost(0, 3 * coming.size_bytes),
            )
            g.compute(
                f"{whole.name} add {hop}",
                op,
                reads=[slot],
                accumulates=[coming],
                cost=cost,
                lane=lane,
            )
    return tag + world - 1


def all_reduce(
    g: GraphBuilder,
    whole: Buffer,
    *,
    tag: int = 0,
    reads: Sequence[Buffer] = (),
    lane: str = COMPUTE.name,
) -> int:
    """Before: every rank has a term of every part; after: every part is the sum of all ranks'
    terms, on every rank.

    A reduce-scatter, then an all-gather. Rank r sends 2 size(whole) - size(part r) - size(part r +
    1): 2 (W-1)/W of the whole where parts are equal.
    """
    return all_gather(
        g, whole, tag=reduce_scatter(g, whole, tag=tag, reads=reads, lane=lane), reads=reads
    )


def _exchange(
    g: GraphBuilder,
    name: str,
    out: Part,
    into: Part,
    size_bytes: int,
    tag: int,
    reads: Sequence[Buffer],
) -> None:
    """One hop: a part out, `size_bytes` in. What is empty is neither sent nor received."""
    sends = [(out, (g.rank + 1) % g.world_size)] if out.size_bytes else []
    recvs = [(into, (g.rank - 1) % g.world_size, size_bytes)] if size_bytes else []
    if sends or recvs:
        g.exchange(name, sends=sends, recvs=recvs, tag=tag, reads=reads)
