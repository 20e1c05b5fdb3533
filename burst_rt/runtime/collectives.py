"""Collectives as tasks of a graph: all-gather, reduce-scatter, all-reduce, scans, ranges of rows.

For tensor parallelism, sums of gradients, and custom pipelines. Pure: no torch, no MPI. The
opposite of an all-gather is a reduce-scatter, the opposite of `gather_ranges` is `reduce_ranges`,
and the opposite of a scan is a scan in reverse: a backward sends gradients by the opposite of its
forward's collective.

All-gather, reduce-scatter and all-reduce go round a ring; source: P. Patarasuk and X. Yuan,
"Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009. They work on a
buffer of W parts, where W is the world size and part r belongs to rank r. Parts may differ in size,
or be empty. An all-gather or a reduce-scatter takes W-1 hops, an all-reduce twice as many. In each
hop every rank sends one part to the next rank and receives one part from the rank before. `reads`:
buffers that must be written before anything is sent.

The tags of messages begin at `tag`. Functions that do not return a buffer return the first free
tag; the others use one tag.

Compute tasks `Op("add", (part, slot))` add up the received tensors: part += slot. In a ring they
are on `lane`, and the slot is one of a double-buffered pair named "<buffer> slot0" and "<buffer>
slot1". `Pipeline.run` needs neither the slots nor a function for "add". Terms are added in the
order of the graph, so every run gives the same bits. After an all-reduce every rank has the same
bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from burst_rt.errors import InputError
from burst_rt.scheduler import COMPUTE, Buffer, Cost, GraphBuilder, Op, Part

__all__ = [
    "all_gather",
    "all_reduce",
    "even_parts",
    "gather_ranges",
    "reduce_ranges",
    "reduce_scatter",
    "scan",
]  # fmt: skip


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
            (coming, coming.size_bytes),
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
            (slot[0], coming.size_bytes),
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
                looks_at=[(slot[0], coming.size_bytes, 0)],
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


def scan(
    g: GraphBuilder, total: Buffer, before: Buffer, *, reverse: bool = False, tag: int = 0
) -> int:
    """Gives every rank the sum of the earlier ranks' terms, in `before`; reverse: of later ranks'.

    Before, every rank has its term in `total`. After, `total` has the sum up to this rank's term.
    The first rank's `before` stays as it was: let it hold zeros. Both buffers have one part, of the
    same size. The sum goes from rank to rank, so each rank but the last sends size(total) bytes.
    """
    source, to = (g.rank + 1, g.rank - 1) if reverse else (g.rank - 1, g.rank + 1)
    if 0 <= source < g.world_size:
        g.exchange(f"{total.name} receive", recvs=[(before, source)], tag=tag)
        op, cost = Op("add", (total, before)), Cost(0, 3 * total[0].size_bytes)
        g.compute(f"{total.name} add", op, reads=[before], accumulates=[total], cost=cost)
    if 0 <= to < g.world_size:
        g.exchange(f"{total.name} pass on", sends=[(total, to)], tag=tag)
    return tag + 1


def gather_ranges(
    g: GraphBuilder,
    name: str,
    counts: Sequence[int],
    ranges: Sequence[tuple[int, int]],
    row_bytes: int,
    *,
    tag: int = 0,
) -> Buffer:
    """Gives every rank a range of all ranks' rows, straight from their owners: near tokens, say.

    counts: how many rows each rank has, of `row_bytes` bytes each. ranges: the rows (start, stop)
    that each rank gets, of all ranks' rows in the order of the ranks. A rank's own rows must be
    within its range.

    Returns the new buffer `name`. Its part s is what the range has of rank s's rows, so one tensor
    of stop - start rows can be the buffer. Before, a rank's own part is there; after, all parts
    are. Every rank sends at most one message to each other rank, all in one exchange.
    """
    whole, others, wanted = _range(g, name, counts, ranges, row_bytes)
    if others or wanted:
        sends = [(whole[g.rank], rank, size, offset) for rank, size, offset in wanted]
        g.exchange(f"{name} gather", sends=sends, recvs=others, tag=tag)
    return whole


def reduce_ranges(
    g: GraphBuilder,
    name: str,
    counts: Sequence[int],
    ranges: Sequence[tuple[int, int]],
    row_bytes: int,
    *,
    tag: int = 0,
) -> Buffer:
    """Gives every rank the sum of what all ranks have in their ranges for the rank's own rows.

    The opposite of `gather_ranges`, whose arguments and buffer it shares. Before, all parts are
    there, each with terms; after, a rank's own part is the sum. The rank's own terms come first,
    then the others' in the order of the ranks.
    """
    whole, others, wanted = _range(g, name, counts, ranges, row_bytes)
    slots = [g.buffer(f"{name} from {rank}", size_bytes=size) for rank, size, _ in wanted]
    if others or wanted:
        recvs = [(slot, rank) for slot, (rank, _, _) in zip(slots, wanted, strict=True)]
        g.exchange(f"{name} reduce", sends=others, recvs=recvs, tag=tag)
    for slot, (rank, size, offset) in zip(slots, wanted, strict=True):
        g.compute(
            f"{name} add {rank}",
            Op("add", (whole[g.rank], slot, offset)),
            reads=[slot],
            accumulates=[whole[g.rank]],
            cost=Cost(0, 3 * size),
        )
    return whole


def _range(
    g: GraphBuilder,
    name: str,
    counts: Sequence[int],
    ranges: Sequence[tuple[int, int]],
    row_bytes: int,
) -> tuple[Buffer, list[tuple[Part, int]], list[tuple[int, int, int]]]:
    """The buffer of this rank's range; its parts that have rows of other ranks, with the rank; and
    its own rows that other ranks want: (rank, size, offset), in bytes.
    """
    rank, world = g.rank, g.world_size
    if len(counts) != world or len(ranges) != world:
        raise InputError(
            f"{name!r}: counts and ranges must have one entry for each of {world} ranks, got "
            f"{len(counts)} and {len(ranges)}"
        )
    stops = list(accumulate(counts))
    starts = [0, *stops[:-1]]
    for r, (start, stop) in enumerate(ranges):
        if not 0 <= start <= starts[r] <= stops[r] <= stop <= stops[-1]:
            raise InputError(
                f"{name!r}: the range of rank {r} must be within 0 to {stops[-1]} and hold the "
                f"rank's own rows, {starts[r]} to {stops[r]}; got {start} to {stop}"
            )

    def held(whose: int, owner: int) -> tuple[int, int]:
        """Size and offset of what a range has of an owner's rows."""
        first, last = max(ranges[whose][0], starts[owner]), min(ranges[whose][1], stops[owner])
        return max(0, last - first) * row_bytes, (first - starts[owner]) * row_bytes

    sizes = [held(rank, owner)[0] for owner in range(world)]
    whole = g.buffer(name, parts=world, size_bytes=sizes, initialised=True)
    others = [(part, r) for r, part in enumerate(whole.parts) if r != rank and part.size_bytes]
    wanted = [(r, *held(r, rank)) for r in range(world) if r != rank and held(r, rank)[0]]
    return whole, others, wanted


def _exchange(
    g: GraphBuilder,
    name: str,
    out: Part,
    incoming: tuple[Part, int],
    tag: int,
    reads: Sequence[Buffer],
) -> None:
    """One hop: sends `out`, receives a part of so many bytes. Empty parts make no message."""
    into, size_bytes = incoming
    sends = [(out, (g.rank + 1) % g.world_size)] if out.size_bytes else []
    recvs = [(into, (g.rank - 1) % g.world_size, size_bytes)] if size_bytes else []
    if sends or recvs:
        g.exchange(name, sends=sends, recvs=recvs, tag=tag, reads=reads)
