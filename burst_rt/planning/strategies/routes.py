"""Routes: in which order a block visits the ranks, and which rank each rank gets the block from.

A block makes W - 1 steps. At step s each rank holds one block number b, of some owner, so that
every rank has a tile to do at every step. `holder` says which rank has an owner's block at a step;
`owner` is the inverse; `passes` says which bundles are passed on while the tiles of a step run. The
sums that belong to a block follow it step by step, as far as ranks add to them, and then come home.

| route | block of rank o at step s | passed on | sums |
|---|---|---|---|
| `OneRing`, direction 1 | o + s | to the next rank | with the block |
| `OneRing`, direction -1 | o - s | to the rank before | with the block |
| `TwoLevel`, L ranks a node | node + s // L, local number + s % L | inside the node; [1] | [2] |
| `Straight` | o + s | by the owner alone, to every rank | straight home |

[1] The first block that a node gets is also passed on to the next node. [2] With the block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from burst_rt.errors import InputError

__all__ = ["OneRing", "Route", "Straight", "TwoLevel"]


class Route(Protocol):
    """See the module's text. Frozen."""

    def __hash__(self) -> int:
        """Equal routes have equal hashes."""

    @property
    def num_slots(self) -> int:
        """Number of receive buffers that the bundles use in turn; `slot` numbers them."""

    @property
    def carries_sums(self) -> bool:
        """Whether a block's sums go along with it; else each rank sends its own straight home."""

    def holder(self, owner: int, step: int, block: int) -> int:
        """The rank that has block number `block` of `owner` at a step; at step 0 the owner."""

    def owner(self, rank: int, step: int, block: int) -> int:
        """The rank whose block number `block` a rank has at a step."""

    def passes(self, step: int) -> tuple[tuple[int, int], ...]:
        """The passes (from, to) that are made while the tiles of a step run.

        The holder at step `from` (this one or an earlier one) sends the bundle to the holder at the
        later step `to`. Each step but the first is the `to` of one pass.
        """

    def slot(self, step: int) -> int:
        """The number of the slot that receives the bundle of a step (from 1 on)."""


@dataclass(frozen=True)
class OneRing:
    """One ring of all ranks."""

    world_size: int
    directions: tuple[int, ...]  # each block's: 1 (to the next rank) or -1 (to the rank before)

    @property
    def num_slots(self) -> int:
        return 2

    @property
    def carries_sums(self) -> bool:
        return True

    def holder(self, owner: int, step: int, block: int) -> int:
        return (owner + step * self.directions[block]) % self.world_size

    def owner(self, rank: int, step: int, block: int) -> int:
        return (rank - step * self.directions[block]) % self.world_size

    def passes(self, step: int) -> tuple[tuple[int, int], ...]:
        return ((step, step + 1),) if step + 1 < self.world_size else ()

    def slot(self, step: int) -> int:
        return step % 2


@dataclass(frozen=True)
class Straight:
    """From the owner straight to every rank, and each rank's sums straight home.

    Nothing is sent that its receiver does not compute with.
    """

    world_size: int

    @property
    def num_slots(self) -> int:
        return 2

    @property
    def carries_sums(self) -> bool:
        return False

    def holder(self, owner: int, step: int, block: int) -> int:
        return (owner + step) % self.world_size

    def owner(self, rank: int, step: int, block: int) -> int:
        return (rank - step) % self.world_size

    def passes(self, step: int) -> tuple[tuple[int, int], ...]:
        return ((0, step + 1),) if step + 1 < self.world_size else ()

    def slot(self, step: int) -> int:
        return step % 2


@dataclass(frozen=True)
class TwoLevel:
    """Rings inside the nodes and rings between them.

    This is the double ring of LoongTrain (arXiv 2406.18485). A rank passes what it got from another
    node on to the next node at once, and has `ranks_per_node` steps until it needs the next block
    from there. A block from the rank's own node has one step. Raises InputError where the nodes are
    not equally large.
    """

    world_size: int
    ranks_per_node: int

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1 or self.world_size % self.ranks_per_node:
            raise InputError(
                "two-level: the number of ranks per node must divide the number of ranks, got "
                f"{self.ranks_per_node} ranks per node and {self.world_size} ranks; choose another "
                "strategy, or name the number of ranks per node: 'two-level:N'"
            )

    @property
    def num_slots(self) -> int:
        return 4

    @property
    def carries_sums(self) -> bool:
        return True

    def holder(self, owner: int, step: int, block: int) -> int:
        return self._moved(owner, step)

    def owner(self, rank: int, step: int, block: int) -> int:
        return self._moved(rank, -step)

    def passes(self, step: int) -> tuple[tuple[int, int], ...]:
        local = self.ranks_per_node
        # The other node comes first, because its way is longer.
        outer = (step + local,) if step % local == 0 and step + local < self.world_size else ()
        inner = (step + 1,) if (step + 1) % local else ()
        return tuple((step, to) for to in outer + inner)

    def slot(self, step: int) -> int:
        node_step, local_step = divmod(step, self.ranks_per_node)
        return local_step % 2 if local_step else 2 + node_step % 2

    def _moved(self, rank: int, steps: int) -> int:
        local = self.ranks_per_node
        sign = 1 if steps >= 0 else -1
        nodes, within = divmod(abs(steps) % self.world_size, local)
        node, number = divmod(rank, local)
        return (node + sign * nodes) * local % self.world_size + (number + sign * within) % local
