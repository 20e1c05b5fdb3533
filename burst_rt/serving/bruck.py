"""Bruck's all-gather as tasks of a graph: every rank gets one block of each rank, in few rounds.

Source: J. Bruck et al., "Efficient algorithms for all-to-all communications in multiport
message-passing systems", IEEE TPDS 1997. It takes ceil(log2 W) rounds for any number W of ranks,
and so little time where blocks are small; a ring takes W - 1 rounds.

A rank holds the blocks of itself and of the ranks after it, in that order: block j is that of rank
(rank + j) % W. In round i it has 2^i blocks, sends its first blocks to the rank 2^i before it, and
receives as many from the rank 2^i after it. The last round moves only what is missing.

What a round receives is one part of the buffer: part 0 is the rank's own block, part 1 + i what
round i receives. If the parts lie one after another in memory, so do the blocks.

Worked example, rank 0 of 5: it has block 0; round 0 brings 1, round 1 brings 2 and 3, and
round 2 brings 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from burst_rt.scheduler import Buffer, GraphBuilder, Transfer

__all__ = ["bruck_gather", "bruck_messages", "bruck_parts"]


def bruck_parts(world_size: int) -> tuple[int, ...]:
    """How many blocks each part holds: 1, the rank's own, then what each round receives."""
    rounds = range((world_size - 1).bit_length())
    return (1, *(min(1 << i, world_size - (1 << i)) for i in rounds))


def bruck_gather(g: GraphBuilder, blocks: Buffer, block_bytes: int, *, tag: int = 0) -> int:
    """Gives every rank all blocks. Before, a rank's own block is in part 0 of `blocks`.

    blocks: with `bruck_parts` blocks of `block_bytes` in its parts. Every rank sends W - 1 blocks.
    A message carries a part or its beginning, so round i sends at most i + 1 messages. The tags
    begin at `tag`; returns the first free one.
    """
    rank, world = g.rank, g.world_size
    counts = bruck_parts(world)
    for i, num_blocks in enumerate(counts[1:]):
        distance = 1 << i
        sends, recvs = [], []
        left, offset = num_blocks, 0
        for part, held in zip(blocks.parts, counts[: i + 1], strict=False):
            size = min(left, held) * block_bytes
            if size:
                sends.append((part, (rank - distance) % world, size))
                recvs.append((blocks[i + 1], (rank + distance) % world, size, offset))
            left, offset = left - min(left, held), offset + size
        g.exchange(f"{blocks.name} round {i}", sends=sends, recvs=recvs, tag=tag + i, hop=i)
    return tag + len(counts) - 1


def bruck_messages(rank: int, world_size: int, block_bytes: int) -> Iterator[Transfer]:
    """The messages of a gather that a rank sends or receives; the tags begin at 0."""
    counts = bruck_parts(world_size)
    for i, num_blocks in enumerate(counts[1:]):
        before, after = (rank - (1 << i)) % world_size, (rank + (1 << i)) % world_size
        # A rank holds its parts in turn, up to the blocks that are missing.
        held = [min(num_blocks, sum(counts[:n])) for n in range(i + 2)]
        for source, receiver in ((rank, before), (after, rank)):
            for start, stop in pairwise(held):
                if start < stop:
                    yield Transfer(source, receiver, i, (stop - start) * block_bytes)
