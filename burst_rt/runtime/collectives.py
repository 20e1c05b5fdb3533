"""Ring collectives as tasks of a graph: all-gather, reduce-scatter, all-reduce.

Source: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", JPDC 2009. For tensor parallelism, sums of gradients, and custom pipelines. Pure: no
torch, no MPI.

All collectives work on a buffer of W parts, where W is the world size and part r belongs to rank r.
Parts may differ in size, or be empty. An all-gather or a reduce-scatter takes W-1 hops, an
all-reduce twice as many. In each hop every rank sends one part to the next rank and receives one
part from the rank before. The tags of the messages begin at `tag`, and each function returns the
first free tag. `reads`: buffers that must be written before anything is sent.

Received parts are added up by compute tasks `Op("add", (part, slot))` on `lane`: part += slot. The
slot is one of a double-buffered pair named "<buffer> slot0" and "<buffer> slot1". `Pipeline.run`
needs neither the slots nor a function for "add". Terms are added in the order of the ring, so every
run gives the same bits. After an all-reduce every rank has the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from burst_rt.scheduler import COMPUTE, Buffer, Cost, GraphBuilder, Op, Part

__all__ = ["all_gather", "all_reduce", "even_parts", "reduce_scatter"]


def even_parts(count: int, num_parts: int) -> list[int]:
    """`count` split into parts that differ by at most one, the larger parts first."""
    return [count // num_parts + (part < count % num_parts) for part in range(num_parts)]


def all_gather(
    g: GraphBuilder, whole: Buffer, *, tag: int = 0, reads: Sequence[Buffer] = ()
) -> int:
    """Gives every rank all parts. Before, a rank's own part is there; after, all parts are there.

    Rank r sends size(whole) - size(part r + 1) bytes: (W-1)/W of the whole where parts are equal.
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
    """Gives every rank the sum of its own part.

    Before, every rank has a term of every part. After, a rank's own part is the sum of all ranks'
    terms, and the rank's other parts have been overwritten. Rank r sends
    size(whole) - size(part r) bytes: (W-1)/W of the whole where parts are equal.
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
                Op("add", (coming, slot)),
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
    """Gives every rank the sum of every part: a reduce-scatter, then an all-gather.

    Before, every rank has a term of every part. After, every part is the sum of all ranks' terms,
    on every rank. Rank r sends 2 size(whole) - size(part r) - size(part r + 1) bytes: 2 (W-1)/W of
    the whole where parts are equal.
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
    """One hop: sends `out`, receives `size_bytes` into `into`. Empty parts make no message."""
    sends = [(out, (g.rank + 1) % g.world_size)] if out.size_bytes else []
    recvs = [(into, (g.rank - 1) % g.world_size, size_bytes)] if size_bytes else []
    if sends or recvs:
        g.exchange(name, sends=sends, recvs=recvs, tag=tag, reads=reads)
