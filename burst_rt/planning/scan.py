"""Recurrences over ranks as programs: the state goes from segment to segment, by position.

A recurrence (linear attention, a delta rule, a state space, a short convolution) is affine in its
state: a segment of consecutive tokens is one map, S -> A S + B, and maps compose. So a rank can do
most of a segment's work before the state has come that the segment begins from. The work has five
stages, the same in both directions; a backward goes through the positions from the last to the
first, and its state is the gradient of the state.

| stage | what it does | after |
|---|---|---|
| prepare | what needs no state: in a forward the maps of short chunks of tokens | |
| compose | the segment's own map, from the maps of its chunks | prepare |
| fold | the state after the segment, by its map | compose; the state before |
| advance | the state before each chunk in turn, and after the segment | the state before |
| emit | the results of the segment's tokens | advance |

A segment may be RELAYED: the state after it comes from `advance`, which waits for the state before
it. Nothing is done twice, but all advances follow each other. Or it is FOLDED: it composes its map
while it waits, and then only short folds follow each other. OPEN: its state does not depend on the
state before it, as of a convolution that remembers fewer tokens than the segment has.

Bytes do not depend on the number of tokens: each segment but the last sends one state.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import pairwise
from typing import ClassVar, NamedTuple

from burst_rt.errors import InputError
from burst_rt.planning.layouts import Layout
from burst_rt.planning.strategies import AGREE
from burst_rt.scheduler import (
    HOST_LANES,
    Buffer,
    Cost,
    Graph,
    GraphBuilder,
    Lane,
    Transfer,
)

__all__ = [
    "STAGES", "Advance", "Collect", "Compose", "Emit", "Fold", "Offer", "Prepare", "Scan",
    "Segment", "StageFlops", "Way", "segments_of", "ways_of",
]  # fmt: skip


class Segment(NamedTuple):
    """Consecutive positions that lie side by side in the shard of one rank."""

    owner: int
    begin: int  # where the segment begins in the owner's shard, in tokens
    positions: range

    @property
    def shard(self) -> slice:
        """The segment's tokens in the owner's shard."""
        return slice(self.begin, self.begin + len(self.positions))


class Way(Enum):
    """How the state after a segment is made; see the module."""

    RELAYED = "relayed"
    FOLDED = "folded"
    OPEN = "open"


class StageFlops(NamedTuple):
    """Floating-point operations of the stages: of one token, for `fold` of one segment."""

    prepare: int
    compose: int
    fold: int
    advance: int
    emit: int

    def backward(self) -> StageFlops:
        """Those of the backward: it makes the forward's chunks and states again, and every product
        has two gradients.
        """
        return StageFlops(2 * self.prepare, self.compose, self.fold, self.advance, 4 * self.emit)


@dataclass(frozen=True)
class _Stage:
    """A stage of one segment. number: the segment's, in the order of positions."""

    number: int
    name: ClassVar[str]


class Prepare(_Stage):
    """See the module's table."""

    name = "prepare"


class Compose(_Stage):
    """See the module's table."""

    name = "compose"


class Fold(_Stage):
    """See the module's table."""

    name = "fold"


class Advance(_Stage):
    """See the module's table."""

    name = "advance"


class Emit(_Stage):
    """See the module's table."""

    name = "emit"


@dataclass(frozen=True)
class Offer:
    """Puts this rank's gradient of the last state where it is sent from."""

    name: ClassVar[str] = "offer"


@dataclass(frozen=True)
class Collect:
    """Adds up the gradients of the last state of all ranks, in the order of ranks."""

    name: ClassVar[str] = "collect"


STAGES = (Prepare, Compose, Fold, Advance, Emit)


def segments_of(layout: Layout) -> tuple[Segment, ...]:
    """The segments of a layout, in the order of positions.

    Two runs of a rank that follow each other, in positions and in the shard, are one segment.
    Raises InputError for striped layouts, whose runs are single tokens.
    """
    segments: list[Segment] = []
    for owner, runs in enumerate(layout.runs):
        begin = 0
        for run in runs:
            if len(run) > 1 and run.step != 1:
                raise InputError(
                    f"layout: a recurrence takes layouts of consecutive tokens, got kind "
                    f"{layout.kind!r}; take 'zigzag', 'contiguous' or 'balanced'"
                )
            if run:
                positions = range(run.start, run.start + len(run))
                last = segments[-1] if segments else None
                if last and last.owner == owner and last.positions.stop == positions.start:
                    segments[-1] = last._replace(
                        positions=range(last.positions.start, positions.stop)
                    )
                else:
                    segments.append(Segment(owner, begin, positions))
            begin += len(run)
    return tuple(sorted(segments, key=lambda segment: segment.positions.start))


def ways_of(
    segments: Sequence[Segment], flops: StageFlops, memory: int | None, *, forward: bool
) -> tuple[Way, ...]:
    """The way of each segment.

    memory: how many tokens the state remembers; None: all. Segments are folded where the last rank
    then ends earlier than if they were relayed; operations alone count. The first segment in the
    direction knows its state, so it has nothing to gain from a map; the last one sends nothing.
    """
    if memory is not None:
        return tuple(
            Way.OPEN if len(segment.positions) >= memory else Way.RELAYED for segment in segments
        )
    order = range(len(segments)) if forward else range(len(segments) - 1, -1, -1)
    folded = [Way.RELAYED] * len(segments)
    for number in list(order)[1:-1]:
        folded[number] = Way.FOLDED
    relayed = [Way.RELAYED] * len(segments)
    ended = {
        way: _ends(segments, ways, flops, order)
        for way, ways in ((Way.FOLDED, folded), (Way.RELAYED, relayed))
    }
    return tuple(folded if ended[Way.FOLDED] < ended[Way.RELAYED] else relayed)


def _ends(
    segments: Sequence[Segment], ways: Sequence[Way], flops: StageFlops, order: range
) -> float:
    """When the last rank ends, in operations: ranks first do what needs no state."""
    free: dict[int, float] = {}
    for segment, way in zip(segments, ways, strict=True):
        per_token = flops.prepare + (flops.compose if way is Way.FOLDED else 0)
        free[segment.owner] = free.get(segment.owner, 0) + per_token * len(segment.positions)
    state = 0.0  # when the state before the segment is there
    for number in order:
        segment, tokens = segments[number], len(segments[number].positions)
        begun = max(free[segment.owner], state)
        if ways[number] is Way.FOLDED:
            state = begun + flops.fold
            free[segment.owner] = state + (flops.advance + flops.emit) * tokens
        else:
            state = begun + flops.advance * tokens
            free[segment.owner] = state + flops.emit * tokens
    return max(free.values(), default=0.0)


@dataclass(frozen=True, kw_only=True)
class Scan:
    """One direction of one recurrence over ranks, as plain numbers; see the module.

    ways: of the segments, in the order of positions. state_bytes: of the state of all batch rows.
    shares_last: whether all ranks get the last state (forward), or bring a gradient of it
    (backward).
    """

    world_size: int
    segments: tuple[Segment, ...]
    ways: tuple[Way, ...]
    state_bytes: int
    flops: StageFlops
    batch: int
    forward: bool
    shares_last: bool

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The numbers of the segments, as the state passes through them."""
        numbers = range(len(self.segments))
        return tuple(numbers if self.forward else reversed(numbers))

    @property
    def last_owner(self) -> int:
        """The rank that has the last position."""
        return self.segments[-1].owner

    @property
    def wiring(self) -> Hashable:
        """See `Program.wiring`."""
        owners = tuple(segment.owner for segment in self.segments)
        return Scan, owners, self.ways, self.state_bytes, self.forward, self.shares_last

    def wire_bytes(self) -> int:
        """Bytes that all ranks together send."""
        links = len(self.segments) - 1 + (self.world_size - 1 if self.shares_last else 0)
        return links * self.state_bytes

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The ranks that the state passes through, in that order."""
        return tuple(self.segments[number].owner for number in self.order)

    @cached_property
    def alternate(self) -> bool:
        """Whether no state waits for another, so that all go on in two rounds."""
        return all(self.ways[number] is Way.OPEN for number in self.order[:-1])

    def tag(self, place: int) -> int:
        """The tag of the message that leaves the segment at this place of `order`.

        Tags ascend in the order of a rank's exchanges. The gradients of the last state come first,
        with tag 0, and the last state goes last.
        """
        first = int(self.shares_last and not self.forward)
        return first + place + (len(self.order) * (place % 2) if self.alternate else 0)

    @property
    def last_tag(self) -> int:
        """The tag of the messages of the last state, or of its gradients."""
        return 2 * len(self.order) if self.forward else 0

    def messages(self, rank: int) -> Iterator[Transfer]:
        """See `Program.messages`."""
        last = self.last_owner
        ends = [(last, other) for other in range(self.world_size) if other != last]
        shared = [
            Transfer(*(pair if self.forward else pair[::-1]), self.last_tag, self.state_bytes)
            for pair in (ends if self.shares_last else ())
        ]
        links = sorted(
            Transfer(source, receiver, self.tag(place), self.state_bytes)
            for place, (source, receiver) in enumerate(pairwise(self.owners))
        )
        for transfer in (*links, *shared) if self.forward else (*shared, *links):
            if rank in transfer[:2]:
                yield transfer

    def graph(self, rank: int, lanes: tuple[Lane, ...] = HOST_LANES) -> Graph:
        """The graph of one rank; see `Program.graph`."""
        return _Builder(self, rank, lanes).graph()

    def __str__(self) -> str:
        counts = ", ".join(f"{self.ways.count(way)} {way.value}" for way in Way if way in self.ways)
        return f"{len(self.segments)} segments ({counts}), a state of {self.state_bytes:,} bytes"


class _Builder:
    """Builds the graph of one rank.

    A segment's place is its number in `Scan.order`. The exchanges of a rank follow each other in
    the order of their tags, the same on every rank, so that lanes that keep program order (NCCL's)
    cannot wait for each other in a circle.
    """

    def __init__(self, scan: Scan, rank: int, lanes: tuple[Lane, ...]) -> None:
        self.scan, self.rank = scan, rank
        self.g = GraphBuilder(rank, scan.world_size, lanes)
        self.agreed = self.g.buffer("agreed")
        self.g.compute("agree", AGREE, writes=[self.agreed], lane="control")

    def graph(self) -> Graph:
        scan, g = self.scan, self.g
        places = [place for place, owner in enumerate(scan.owners) if owner == self.rank]
        for place in places:
            self._stage(Prepare, place, writes=[g.buffer(f"prepared {place}")])
        for place in places:
            if self._way(place) is Way.FOLDED:
                prepared = g.buffers[f"prepared {place}"]
                self._stage(Compose, place, reads=[prepared], writes=[g.buffer(f"map {place}")])
        if scan.shares_last and not scan.forward:
            self._bring()
        for place in places:
            self._declare(place)
        if scan.alternate:
            self._alternate(places)
        for place in places:
            self._pass(place)
        if scan.shares_last and scan.forward:
            self._give()
        return g.build()

    def _declare(self, place: int) -> None:
        """The memory of a segment's states; an open segment knows the state after it already."""
        g, size = self.g, self.scan.state_bytes
        if place:
            g.buffer(f"before {place}", size_bytes=size)
        after = g.buffer(f"after {place}", size_bytes=size)
        if self._way(place) is Way.OPEN:
            self._stage(Fold, place, reads=[g.buffers[f"prepared {place}"]], writes=[after])

    def _alternate(self, places: Sequence[int]) -> None:
        """All messages of states at once, in the order of their tags."""
        scan = self.scan
        links = [(scan.tag(place), self._send, place) for place in places]
        links += [(scan.tag(place - 1), self._receive, place) for place in places if place]
        for _, exchange, place in sorted(links, key=lambda link: link[0]):
            exchange(place)

    def _way(self, place: int) -> Way:
        return self.scan.ways[self.scan.order[place]]

    def _pass(self, place: int) -> None:
        """The state comes to a segment, and goes on."""
        g, way, alternate = self.g, self._way(place), self.scan.alternate
        after, advanced = g.buffers[f"after {place}"], g.buffer(f"advanced {place}")
        reads = [g.buffers[f"prepared {place}"]]
        if not alternate and place:
            self._receive(place)
        if place:
            reads.append(g.buffers[f"before {place}"])
        elif "collected" in g.buffers:
            reads.append(g.buffers["collected"])
        if way is Way.FOLDED:
            needs = [g.buffers[f"map {place}"], g.buffers[f"before {place}"]]
            self._stage(Fold, place, reads=needs, writes=[after])
            reads.append(after)  # other ranks wait for the fold, and for nothing that comes later
        if way is not Way.RELAYED and not alternate:
            self._send(place)
        writes = [advanced, after] if way is Way.RELAYED else [advanced]
        self._stage(Advance, place, reads=reads, writes=writes)
        if way is Way.RELAYED and not alternate:
            self._send(place)
        self._stage(Emit, place, reads=[advanced], writes=[g.buffer(f"emitted {place}")])

    def _stage(
        self, kind: type[_Stage], place: int, *, reads: Sequence[Buffer] = (),
        writes: Sequence[Buffer],
    ) -> None:  # fmt: skip
        """Adds one stage of one segment."""
        scan, number = self.scan, self.scan.order[place]
        tokens = 1 if kind is Fold else len(scan.segments[number].positions)
        flops = getattr(scan.flops, kind.name) * tokens * scan.batch
        self.g.compute(
            f"{kind.name} {number}", kind(number), reads=reads, writes=writes, cost=Cost(flops),
            hop=place,
        )  # fmt: skip

    def _send(self, place: int) -> None:
        """Sends the state after the segment on; nothing, after the last segment."""
        scan = self.scan
        if place + 1 < len(scan.order):
            self.g.exchange(
                f"send {place}", sends=[(self.g.buffers[f"after {place}"], scan.owners[place + 1])],
                tag=scan.tag(place), reads=[self.agreed], hop=place,
            )  # fmt: skip

    def _receive(self, place: int) -> None:
        """Receives the state before a segment."""
        scan = self.scan
        self.g.exchange(
            f"receive {place}", recvs=[(self.g.buffers[f"before {place}"], scan.owners[place - 1])],
            tag=scan.tag(place - 1), reads=[self.agreed], hop=place - 1,
        )  # fmt: skip

    def _give(self) -> None:
        """The last state goes to every rank that has not made it."""
        scan, last, g = self.scan, self.scan.last_owner, self.g
        if scan.world_size == 1:
            return
        sends, recvs = [], []
        if self.rank == last:
            after = g.buffers[f"after {len(scan.order) - 1}"]
            sends = [(after, rank) for rank in range(scan.world_size) if rank != last]
        else:
            recvs = [(g.buffer("last", size_bytes=scan.state_bytes), last)]
        g.exchange("last", sends=sends, recvs=recvs, tag=scan.last_tag, reads=[self.agreed])

    def _bring(self) -> None:
        """Every rank's gradient of the last state goes to the rank that made the state."""
        scan, g, last = self.scan, self.g, self.scan.last_owner
        offered = g.buffer("offered", size_bytes=scan.state_bytes)
        g.compute("offer", Offer(), writes=[offered])
        others = [rank for rank in range(scan.world_size) if rank != last]
        if self.rank != last:
            sends = [(offered, last)]
            g.exchange("last", sends=sends, tag=scan.last_tag, reads=[self.agreed])
            return
        reads = [offered]
        if others:
            brought = g.buffer("brought", parts=len(others), size_bytes=scan.state_bytes)
            recvs = list(zip(brought.parts, others, strict=True))
            g.exchange("last", recvs=recvs, tag=scan.last_tag, reads=[self.agreed])
            reads.append(brought)
        collected = g.buffer("collected", size_bytes=scan.state_bytes)
        g.compute("collect", Collect(), reads=reads, writes=[collected])
