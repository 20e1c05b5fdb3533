"""What the tasks of attention's graphs do: one frozen type for each operation, with what it needs.

`name` is what telemetry shows, and what machine files rate. Parts are numbers of a graph's parts;
blocks are counted by owner. Who performs them: `attention/execute`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from burst_rt.planning.masks import Piece
from burst_rt.planning.roles import Role

__all__ = [
    "Add", "BackwardTile", "Blank", "Delta", "Finish", "ForwardTile", "Keep", "Pack",
    "Probabilities", "Products", "ScoreGradients", "Scores", "Softmax", "Tensors", "TileOperation",
    "Unpack", "Weigh",
]  # fmt: skip

# Tensors by role, each with the number of the part that holds it.
Tensors = tuple[tuple[Role, int], ...]


@dataclass(frozen=True, kw_only=True)
class TileOperation:
    """What all operations on a tile know: a travelling block against the shard at home."""

    owner: int  # whose block travels
    block: int  # which of the owner's blocks
    pieces: tuple[Piece, ...]  # what the mask leaves of the tile
    reads: Tensors
    adds: Tensors  # the sums the tile adds to
    starts_sums: bool  # whether those of the sums that travel begin with this tile
    first: bool  # whether it is the first tile of the rank
    last: bool  # whether it is the last one
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
    """Adds dv of a tile, and turns its probabilities into gradients of scores (`ring-naive`)."""

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
class Add:
    """Adds the sums that have arrived to the rank's own."""

    own: int  # part
    arrived: int  # part
    name: ClassVar[str] = "add"


@dataclass(frozen=True)
class Blank:
    """Fills whole rows of scores with what stands for no key seen (`ring-naive`)."""

    name: ClassVar[str] = "blank"


@dataclass(frozen=True)
class Softmax:
    """Turns whole rows of scores into probabilities, unnormalised (`ring-naive`)."""

    name: ClassVar[str] = "softmax"


@dataclass(frozen=True)
class Finish:
    """Writes out and lse from the running state, where no tile does."""

    name: ClassVar[str] = "finish"


@dataclass(frozen=True)
class Pack:
    """Copies what goes to another member of an all-to-all group into the part that is sent."""

    tensor: Role
    gather: bool  # from tokens spread to heads spread; else back
    member: int
    part: int
    name: ClassVar[str] = "pack"


@dataclass(frozen=True)
class Unpack:
    """Copies what has come from another member out of the part it was received into."""

    tensor: Role
    gather: bool
    member: int
    part: int
    name: ClassVar[str] = "unpack"


@dataclass(frozen=True)
class Keep:
    """Copies what stays on this rank: the piece of its own tokens and heads."""

    tensor: Role
    gather: bool
    name: ClassVar[str] = "keep"
