"""Rounds: what travels past what stays, once; the messages and the bytes of it.

A ring is one round; `ring-naive` makes several, one after another. What is here is told from what
happens to each block. `ring_builder.py` tells the same from one rank's tasks, and the verifier
compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import count
from typing import NamedTuple

from burst_rt.planning.needs import Needed, Rows, num_rows
from burst_rt.planning.operations import ForwardTile, TileOperation
from burst_rt.planning.roles import Role
from burst_rt.planning.strategies.hops import Hops
from burst_rt.scheduler import Transfer

__all__ = ["Round", "RowRange"]


class RowRange(NamedTuple):
    """Consecutive rows of a tensor as bytes of its part."""

    role: Role
    size_bytes: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class Round(Hops):
    """What travels, what is resident, and what a tile does."""

    operation: type[TileOperation]  # the operation of a tile
    bundle: tuple[tuple[Role, int], ...]  # the tensors that travel, with their bytes a token
    sums: tuple[tuple[Role, int], ...] = ()  # the sums that travel, with their bytes a token
    resident_roles: tuple[Role, ...]  # the tensors that stay
    resident_sums: tuple[Role, ...]  # the sums that stay, to which a tile adds

    def messages(self, rank: int, tag: int = 0) -> Iterator[Transfer]:
        """See `Program.messages`. tag: the first one, of `num_tags`."""
        tags = count(tag)
        for hop in range(self.problem.world_size):
            for source, target in self.route.passes(hop):
                yield from self._bundle_messages(rank, source, target, next(tags))
            if hop:
                for block in range(self.num_blocks):
                    yield from self._sum_messages(rank, hop, block, next(tags))

    def _bundle_messages(self, rank: int, source: int, target: int, tag: int) -> Iterator[Transfer]:
        """Messages of the bundles that a rank has at hop `source`, or gets for hop `target`."""
        for block in range(self.num_blocks):
            senders, receivers = self.holders[source][block], self.holders[target][block]
            for owner in {senders.index(rank), receivers.index(rank)}:
                rows = self.bundles[owner][block][target]
                for sent in self.row_ranges(self.bundle, owner, block, rows):
                    yield Transfer(senders[owner], receivers[owner], tag, sent.size_bytes)

    # In step with `RingBuilder._pass_sums`, on purpose a second telling of the same truth: that one
    # is what a rank does, this one is what it is verified against. Who changes one changes the
    # other; the verifier refuses the program as long as they differ.
    def _sum_messages(self, rank: int, hop: int, block: int, tag: int) -> Iterator[Transfer]:
        """Messages of the sums of blocks numbered `block` that `rank` sends or receives after
        `hop`.
        """
        senders = self.holders[hop][block]
        onward = self.holders[(hop + 1) % len(self.holders)][block]
        for owner in {rank, senders.index(rank), onward.index(rank)}:
            sum_hop = self.sum_hops[owner][block].get(hop)
            if sum_hop is None:
                continue
            receiver = owner if sum_hop.returns_to_owner else onward[owner]
            if rank in (senders[owner], receiver):
                rows = self.sum_rows[owner][block][hop]
                for sent in self.row_ranges(self.sums, owner, block, rows):
                    yield Transfer(senders[owner], receiver, tag, sent.size_bytes)

    @property
    def num_tags(self) -> int:
        """Number of tags of all ranks' messages."""
        hops = range(self.problem.world_size)
        return sum(len(self.route.passes(hop)) for hop in hops) + self.num_blocks * (len(hops) - 1)

    @property
    def forward(self) -> bool:
        return self.operation is ForwardTile

    @property
    def adds(self) -> bool:
        """Whether tiles add to anything. Nothing has tiles if only sinks need a gradient."""
        return bool(self.sums or self.resident_sums)

    @cached_property
    def needed(self) -> Needed:
        """See `Hops.needed`: nothing is needed where tiles add to nothing."""
        nothing = ((),) * self.problem.world_size
        return super().needed if self.adds else self._by_block(lambda owner, block: nothing)

    def wire_bytes(self) -> int:
        """Bytes that all ranks together send."""
        sent, rows_in = 0, cache(num_rows)  # many messages have the same rows
        for owner, blocks in enumerate(self.bundles):
            for block, bundles in enumerate(blocks):
                length = self.block_len(owner, block)
                sums = self.sum_rows[owner][block].values()
                for tensors, messages in ((self.bundle, bundles), (self.sums, sums)):
                    # As `row_ranges` has them.
                    by_row = sum(size for role, size in tensors if not role.pairs)
                    by_block = sum(size for role, size in tensors if role.pairs)
                    sent += by_row * sum(map(rows_in, messages))
                    sent += by_block * length * sum(map(bool, messages))
        return sent

    def row_ranges(
        self, tensors: tuple[tuple[Role, int], ...], owner: int, block: int, rows: Rows
    ) -> list[RowRange]:
        """The parts of a block's tensors that are sent along with some rows.

        Pairs of numbers travel for all rows of the block, because they are few bytes.
        """
        all_rows = ((0, self.block_len(owner, block)),) if rows else ()
        return [
            RowRange(role, (stop - start) * size, start * size)
            for role, size in tensors
            for start, stop in (all_rows if role.pairs else rows)
        ]
