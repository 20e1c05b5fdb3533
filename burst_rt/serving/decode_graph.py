"""Decode: a few new queries, which every rank has, against keys that are spread over the ranks.

Each rank attends to its own keys. What comes of that, out and lse of the rows, is one block; the
blocks of all ranks come together by Bruck's all-gather (`bruck.py`), and every rank
merges them in the order of ranks. Keys never travel.

What a row sees is data of a call and not part of the graph. Nor are lengths: the number of keys is
here for costs only, and may be rounded up.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from burst_rt.planning.roles import Role
from burst_rt.scheduler import HOST_LANES, Cost, Graph, GraphBuilder, Lane, Transfer
from burst_rt.serving.bruck import bruck_gather, bruck_messages, bruck_parts

__all__ = ["Attend", "Decode", "Merge"]


@dataclass(frozen=True)
class Attend:
    """Attends to this rank's own keys, and writes the rank's block."""

    name: ClassVar[str] = "attend"


@dataclass(frozen=True)
class Merge:
    """Merges the blocks of all ranks in the order of ranks, and writes out."""

    name: ClassVar[str] = "merge"


@dataclass(frozen=True, kw_only=True)
class Decode:
    """One decode as plain numbers, over all ranks; its graphs and bytes."""

    world_size: int
    batch: int
    num_queries: int  # queries of each sequence
    num_heads: int  # query heads
    num_kv_heads: int
    head_dim: int  # head dimension of q and k
    v_head_dim: int  # head dimension of v and out
    input_bytes: int  # bytes of one element of the inputs
    sum_bytes: int  # bytes of one element of the sums
    keys: int  # keys of a sequence, over all ranks

    @property
    def rows(self) -> int:
        """Rows of queries, of all sequences and heads."""
        return self.batch * self.num_queries * self.num_heads

    @property
    def block_bytes(self) -> int:
        """Bytes of a rank's block: out and lse of every row."""
        return self.rows * (self.v_head_dim + 1) * self.sum_bytes

    @property
    def num_rounds(self) -> int:
        """How many exchanges follow each other."""
        return len(bruck_parts(self.world_size)) - 1

    @property
    def wiring(self) -> Hashable:
        """See `Program.wiring`: equal for decodes whose graphs differ in costs only."""
        return Decode, self.world_size, self.block_bytes

    def wire_bytes(self) -> int:
        """Bytes that all ranks together send."""
        return self.world_size * (self.world_size - 1) * self.block_bytes

    def graph(self, rank: int, lanes: tuple[Lane, ...] = HOST_LANES) -> Graph:
        """The graph of one rank; see `Program.graph`.

        There is no agreement: the ranks agree once a step, before the first layer's decode.
        """
        world, out_bytes = self.world_size, self.rows * self.v_head_dim * self.input_bytes
        g = GraphBuilder(rank, world, lanes)
        out = g.buffer(Role.OUT)
        counts = bruck_parts(world)
        blocks = g.buffer(
            "blocks", parts=len(counts), size_bytes=[n * self.block_bytes for n in counts]
        )
        g.compute("attend", Attend(), writes=[blocks[0]], cost=self._cost())
        bruck_gather(g, blocks, self.block_bytes)
        merging = Cost(0, world * self.block_bytes + out_bytes)
        g.compute("merge", Merge(), reads=[blocks], writes=[out], cost=merging)
        return g.build()

    def messages(self, rank: int) -> Iterator[Transfer]:
        """See `Program.messages`."""
        return bruck_messages(rank, self.world_size, self.block_bytes)

    def _cost(self) -> Cost:
        """The cost of attending to a rank's share of the keys, each of which is read once."""
        keys = -(-self.keys // self.world_size)
        channels = self.head_dim + self.v_head_dim
        read = self.batch * self.num_kv_heads * keys * channels * self.input_bytes
        queries = self.rows * self.head_dim * self.input_bytes
        return Cost(2 * self.rows * keys * channels, read + queries + self.block_bytes)

    def __str__(self) -> str:
        what = f"{self.num_queries} queries of {self.batch} sequences, up to {self.keys:,} keys"
        return f"{what}; out and lse travel, {self.num_rounds} rounds"
