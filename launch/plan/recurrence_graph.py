"""The tasks of a recurrence in the graph of one rank of a spread layer.

Each rank makes the maps of its runs of tokens. States then go along the positions, from each run to
the next; a rank folds a state into its run's map and sends the result on. The recurrence begins
when the rank's states are there. A short convolution first needs the last tokens of the run before.
The backward goes the other way. `burst_rt/planning/recurrences.py` has the costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise

from burst_rt.launch.plan.layer_sizes import Spread
from burst_rt.planning.recurrences import RecurrenceSizes
from burst_rt.scheduler import COMPUTE, Buffer, Cost, GraphBuilder, Op, Part

__all__ = ["RecurrenceGraph"]

# The first tag of these messages, above all tags of collectives and attention.
_FIRST_TAG = 1 << 24


class RecurrenceGraph:
    """Adds the tasks to a graph.

    agreed: the agreement, before which nothing is sent. lane: where states are folded, in parallel
    with the products: on the compute lane a long product would delay the states of all later runs.
    """

    def __init__(
        self, g: GraphBuilder, spread: Spread, core: RecurrenceSizes, agreed: Buffer, lane: str
    ) -> None:
        self.g, self.spread, self.core, self.agreed, self.lane = g, spread, core, agreed, lane
        self.rows, self.size = spread.rows(g.rank), spread.input_bytes

    def forward(self, wide: Buffer, narrow: Part) -> None:
        """From the product in to the product out."""
        convolved = self.g.buffer("recurrence convolved")
        self._convolve(wide, convolved[0], forward=True)
        self._recur(convolved, narrow, forward=True)

    def backward(self, dnarrow: Buffer, dwide: Part) -> None:
        """From the gradient of what goes into the product out to that of the product in."""
        dconvolved = self.g.buffer("recurrence dconvolved")
        self._recur(dnarrow, dconvolved[0], forward=False)
        self._convolve(dconvolved, dwide, forward=False)

    def _convolve(self, reads: Buffer, writes: Part, *, forward: bool) -> None:
        size = self.core.halo_bytes(self.size, self.spread.batch)
        before: list[Part] = []
        for at, first, second in self._neighbours(size, forward):
            if self.g.rank == first:
                packed = self._made(f"pack {at}", size, list(reads.parts), COMPUTE.name)
                self._exchange("tokens", at, sends=[(packed, second)])
            if self.g.rank == second:
                before.append(self._receive("tokens", at, first, size))
        numbers = (2 if forward else 4) * self.rows * self.core.channels // self.spread.share
        self.g.compute(
            "convolution",
            Op("convolution"),
            reads=[reads, *before],
            writes=[writes],
            cost=Cost(0, numbers * self.size),
        )

    def _recur(self, reads: Buffer, writes: Part, *, forward: bool) -> None:
        core, share = self.core, self.spread.share
        size, moved = core.state_bytes(self.spread.batch), core.moved_bytes(self.rows, self.size)
        known: list[Part] = []  # the maps of the rank's runs, and the states that have come
        for at, first, second in self._neighbours(size, forward):
            if not known:
                known += self.g.buffer("recurrence maps").parts
                cost = Cost(core.map_flops(self.rows), moved)
                self.g.compute("maps", Op("recurrence"), reads=[reads], writes=known, cost=cost)
            if self.g.rank == first:
                folded = self._made(f"fold {at}", size, known, self.lane)
                self._exchange("state", at, sends=[(folded, second)])
            if self.g.rank == second:
                known.append(self._receive("state", at, first, size))
        flops = core.forward_flops if forward else core.backward_flops
        self.g.compute(
            "recurrence",
            Op("recurrence"),
            reads=[reads, *known],
            writes=[writes],
            cost=Cost(flops(self.rows) // share, (1 if forward else 3) * moved // share),
        )

    def _made(self, name: str, size: int, reads: Sequence[Part], lane: str) -> Part:
        """What a task of this name makes to be sent."""
        message = self.g.buffer(f"{name} out", size_bytes=size)
        op, _, _ = name.partition(" ")
        cost = Cost(0, 3 * size)  # two numbers are read for each that is written, at most
        self.g.compute(name, Op(op), reads=reads, writes=[message], cost=cost, lane=lane)
        return message[0]

    def _receive(self, what: str, at: int, peer: int, size: int) -> Part:
        message = self.g.buffer(f"{what} in {at}", size_bytes=size)[0]
        self._exchange(what, at, recvs=[(message, peer)])
        return message

    def _exchange(
        self,
        what: str,
        at: int,
        *,
        sends: Sequence[tuple[Part, int]] = (),
        recvs: Sequence[tuple[Part, int]] = (),
    ) -> None:
        tag = _FIRST_TAG + 2 * at + (what == "state")
        name = f"{what} {'out' if sends else 'in'} {at}"
        self.g.exchange(name, sends=sends, recvs=recvs, tag=tag, reads=[self.agreed])

    def _neighbours(self, size: int, forward: bool) -> Iterator[tuple[int, int, int]]:
        """(place, rank before, rank after) where two consecutive runs are of different ranks.

        Places count along the positions; backward, from the end. size: the bytes that go from one
        to the next; where there are none, there are no neighbours.
        """
        if self.spread.tensor_parallel or not size:
            return
        owners = self._owners if forward else self._owners[::-1]
        for at, (first, second) in enumerate(pairwise(owners)):
            if first != second:
                yield at, first, second

    @cached_property
    def _owners(self) -> list[int]:
        """The ranks of all runs along the positions."""
        runs = self.spread.layout.runs
        starts = sorted((run.start, rank) for rank, own in enumerate(runs) for run in own if run)
        return [rank for _, rank in starts]
