"""What a strategy makes of a problem: a program, that is the graphs of all ranks for one direction,
and what they send and hold.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from burst_rt.planning.problem import Problem, TileShape
from burst_rt.scheduler import HOST_LANES, Graph, Lane, Op

__all__ = ["AGREE", "Footprint", "Program"]

# Every graph opens with this task; nothing is sent before it is done.
AGREE = Op("agree")


class Footprint(NamedTuple):
    """What a rank holds beyond inputs, outputs and the buffers that its graph receives into, in
    bytes; and the largest tile.

    sums: running state, gradient sums that are not outputs themselves, lse and delta. copies: of
    its own tensors, where they must be made.
    """

    sums: int
    copies: int
    tile: TileShape


class Program(Protocol):
    """One direction of one strategy. Frozen and hashable; graphs hold names and numbers only."""

    @property
    def problem(self) -> Problem:
        """What is computed, over all ranks."""

    @property
    def forward(self) -> bool:
        """Which direction."""

    @property
    def ring_size(self) -> int:
        """How many ranks, or groups of ranks, the keys of a query are spread over: 1 where all are
        in one place.
        """

    def graph(self, rank: int, lanes: tuple[Lane, ...] = HOST_LANES) -> Graph:
        """The graph of one rank. The lanes are those of its machine: HOST_LANES, DEVICE_LANES or
        NCCL_LANES.
        """

    def wire_bytes(self) -> int:
        """Bytes that all ranks together send."""

    def footprint(self, rank: int) -> Footprint:
        """See `Footprint`."""

    def __str__(self) -> str:
        """What travels, in words."""
