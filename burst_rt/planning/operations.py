"""What the tasks of attention's graphs do: one frozen type for each operation.

`name` is what telemetry shows and what machine files rate. Parts are given by their numbers in the
graph; blocks are counted by owner. `attention/execute` performs the operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from burst_rt.planning.masks import Piece
from burst_rt.planning.needs import Rows
from burst_rt.planning.roles import Role

__all__ = [
    "Add", "BackwardTile", "Blank", "Delta", "Finish", "ForwardTile", "Keep", "Pack",
    "Probabilities", "Products", "ScoreGradients", "Scores", "Softmax", "SumSinks", "Tensors",
    "TileOperation", "Unpack", "Weigh",
]  # fmt: skip

# Tensors by role, each with the number of the part that holds it.
Tensors = tuple[tuple[Role, int], ...]


@dataclass(frozen=True, kw_only=True)
class TileOperation:
    """What all operations on a tile know: a travelling block against the shard at home."""

    owner: int  # whose block travels
    block: int  # which of the owner's blocks
    pieces: tuple[Piece, ...]  # what the mask leaves of the tile
    reads: Tensors  # the tensors the tile reads
    adds: Tensors  # the sums the tile adds to
    starts_sums: bool  # whether this tile begins the sums that travel
    first: bool  # whether this is the first tile of the rank
    last: bool  # whether this is the last tile of the rank
    name: ClassVar[str]


class ForwardTile(TileOperation):
    """Folds a tile into the running state."""

    name = "forward"


class BackwardTile(TileOperation):
    """Adds the gradients of a tile to their sums."""

    name = "backward"


class Scores(TileOperation):
    """Writes the scores of a tile into whole rows of scores (`ring-naive`)."""

    name = "scores"


class Weigh(TileOperation):
    """Adds the values of a tile, weighted by whole rows of probabilities (`ring-naive`)."""

    name = "weigh"


class Probabilities(TileOperation):
    """Writes the probabilities of a tile into whole rows (`ring-naive`)."""

    name = "probabilities"


class ScoreGradients(TileOperation):
    """Adds dv of a tile, and makes gradients of scores from its probabilities (`ring-naive`)."""

    name = "score gradients"


class Products(TileOperation):
    """Adds dq and dk of a tile (`ring-naive`)."""

    name = "products"


@dataclass(frozen=True)
class Delta:
    """Computes lse and delta of one part of the rank's own queries."""

    part: int  # index of the part of the rows
    name: ClassVar[str] = "delta"


@dataclass(frozen=True)
class SumSinks:
    """Adds up all ranks' shares of the gradient of the sinks, in the place of the rank's own."""

    shares: tuple[int, ...]  # number of the part of each rank's share
    name: ClassVar[str] = "sum sinks"


@dataclass(frozen=True)
class Add:
    """Adds sums that have arrived to the rank's own sums."""

    role: Role  # of the sums
    block: int  # which of the rank's own blocks
    own: int  # number of the part that is added to
    arrived: int  # number of the part that has arrived
    rows: Rows  # which rows of the part have arrived
    name: ClassVar[str] = "add"


@dataclass(frozen=True)
class Blank:
    """Fills whole rows of scores with the value for "no key seen" (`ring-naive`)."""

    name: ClassVar[str] = "blank"


@dataclass(frozen=True)
class Softmax:
    """Turns whole rows of scores into probabilities, unnormalised (`ring-naive`)."""

    name: ClassVar[str] = "softmax"


@dataclass(frozen=True)
class Finish:
    """Writes out and lse from the running state, where no tile writes them."""

    name: ClassVar[str] = "finish"


@dataclass(frozen=True)
class Pack:
    """Copies what another member of an all-to-all group needs into the part to be sent."""

    tensor: Role
    gather: bool  # whether tokens were spread and heads will be; else the way back
    member: int  # number of the other member in the group
    part: int  # number of the part that is written
    name: ClassVar[str] = "pack"


@dataclass(frozen=True)
class Unpack:
    """Copies what has come from another member out of the part that received it."""

    tensor: Role
    gather: bool  # as in `Pack`
    member: int  # number of the other member in the group
    part: int  # number of the part that is read
    name: ClassVar[str] = "unpack"


@dataclass(frozen=True)
class Keep:
    """Copies what stays on this rank: the rank's own heads of its own tokens."""

    tensor: Role
    gather: bool  # as in `Pack`
    name: ClassVar[str] = "keep"
