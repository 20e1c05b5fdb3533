"""Operations of attention's tasks, one frozen type each; a strategy's own are in its module.

`name` is what telemetry shows and what machine files rate. Parts are given by their numbers in the
graph; blocks are counted by owner. `attention/execute` performs the operations. This module has the
operations that several strategies share; the others are in their strategies' modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from burst_rt.planning.masks import Piece
from burst_rt.planning.needs import Rows
from burst_rt.planning.roles import Role

__all__ = [
    "Add",
    "BackwardTile",
    "Delta",
    "FinishRows",
    "ForwardTile",
    "MergeRows",
    "Tensors",
    "TileOperation",
]

# Tensors by role, each with the number of the part that holds it.
Tensors = tuple[tuple[Role, int], ...]


@dataclass(frozen=True, kw_only=True)
class TileOperation:
    """The base of all operations on a tile, which is a travelling block against the shard at
    home.
    """

    owner: int  # rank whose block travels
    block: int  # number of the block among the owner's
    pieces: tuple[Piece, ...]  # pieces that the mask leaves of the tile
    reads: Tensors  # the tensors the tile reads
    adds: Tensors  # the sums the tile adds to
    starts_sums: bool  # whether this tile begins the sums that travel
    first: bool  # whether this is the first tile of the rank
    last: bool  # whether this is the last tile of the rank
    name: ClassVar[str]
    # Floating-point operations for one (query, key) pair, head and batch row, in units of head_dim
    # and of v's head_dim: 2 for each matrix product.
    flops: ClassVar[tuple[int, int]]


class ForwardTile(TileOperation):
    """Folds a tile into the running state."""

    name = "forward"
    flops = (2, 2)


class BackwardTile(TileOperation):
    """Adds the gradients of a tile to their sums; the gradients of a call's only tile may be
    written instead.
    """

    name = "backward"
    flops = (6, 4)


@dataclass(frozen=True)
class Delta:
    """Computes lse and delta of one part of the rank's own queries."""

    part: int  # index of the part of the rows
    name: ClassVar[str] = "delta"


@dataclass(frozen=True)
class Add:
    """Adds sums that have arrived to the rank's own sums."""

    role: Role  # the role of the sums
    block: int  # number of the block among the rank's own
    own: int  # number of the part that is added to
    arrived: int  # number of the part that has arrived
    rows: Rows  # rows of the part that have arrived
    name: ClassVar[str] = "add"


@dataclass(frozen=True)
class MergeRows:
    """Merges the running state of a block that has arrived at home into the rank's own state of
    it.
    """

    block: int  # number of the block among the rank's own
    arrived: Tensors  # the parts that have arrived
    rows: Rows  # rows of the block
    name: ClassVar[str] = "merge"


@dataclass(frozen=True)
class FinishRows:
    """Writes out and lse from the running state, where no tile writes them."""

    name: ClassVar[str] = "finish"
