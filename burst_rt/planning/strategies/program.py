"""The `Program` protocol, what a strategy makes: all ranks' graphs, messages, bytes, footprint.

A program is the graphs of all ranks for one direction, and what the ranks send and hold.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import NamedTuple, Protocol

from burst_rt.planning.problem import Problem, TileShape
from burst_rt.scheduler import HOST_LANES, Graph, Lane, Op, Transfer

__all__ = ["AGREE", "Choice", "Footprint", "Program"]

# Every graph of an attention call opens with this task; nothing is sent before it is done.
AGREE = Op("agree")


class Footprint(NamedTuple):
    """The memory of a rank, in bytes, and its largest tile.

    Inputs, outputs and the buffers that its graph receives into are not counted.
    """

    sums: int  # running state, gradient sums that are not outputs themselves, lse and delta
    copies: int  # copies of the rank's own tensors, where they must be made
    tile: TileShape
    # The part of `sums` that is not held where the kernel writes gradients itself. A hybrid holds
    # the gradients that it sends back, in the inputs' type, even then.
    spared: int = 0


class Program(Protocol):
    """One direction of one strategy. Frozen and hashable; graphs hold names and numbers only."""

    @property
    def problem(self) -> Problem:
        """The problem that all ranks together compute."""

    @property
    def forward(self) -> bool:
        """Whether the direction is forward; else it is backward."""

    @property
    def queries_travel(self) -> bool:
        """Whether the query side travels; else keys and values do."""

    @property
    def ring_size(self) -> int:
        """Number of ranks, or groups of ranks, over which the keys of a query are spread.

        1 if all keys are in one place.
        """

    @property
    def wiring(self) -> Hashable:
        """A description of what goes where: equal for programs whose graphs differ only in pieces
        and costs.

        The mask is in it only by the rows that ranks need of each other.
        """

    def graph(self, rank: int, lanes: tuple[Lane, ...] = HOST_LANES) -> Graph:
        """The graph of one rank.

        The lanes are the lanes of the rank's machine: HOST_LANES, DEVICE_LANES or NCCL_LANES.
        """

    def messages(self, rank: int) -> Iterator[Transfer]:
        """All messages that a rank sends or receives; those between two ranks in their order.

        It is told from what happens to each block, and not from a rank's tasks, as graphs are
        built: graphs are verified against it.
        """

    def wire_bytes(self) -> int:
        """Bytes that all ranks together send."""

    def forget(self) -> None:
        """Lets go of what graphs are made from. It is found again where it is asked for."""

    def tiles(self, rank: int) -> Iterator[tuple[tuple[range, ...], tuple[range, ...]]]:
        """The positions of queries and of keys, by runs, of each tile that a kernel does."""

    def footprint(self, rank: int) -> Footprint:
        """See `Footprint`."""

    def __str__(self) -> str:
        """A description of what travels, in words."""


class Choice(NamedTuple):
    """The program taken, and what it was chosen from."""

    program: Program
    strategy: str  # the name of the strategy taken
    candidates: dict[str, int]  # bytes that all ranks together would send with each candidate
    kernel: str | None = None  # the tile kernel that belongs to the strategy, if there is one
    # the forecast time of each candidate, where forecasts were made
    seconds: Mapping[str, float] | None = None
