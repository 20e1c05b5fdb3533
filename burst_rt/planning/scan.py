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

Where sequences share their beginnings the segments are a forest, and a chain is the forest of one
path. In a forward the state after a segment goes to all that follow it, in one message to each rank
that has any. In a backward the gradients of these are added up on each rank first: the same
messages the other way.

Bytes do not depend on the number of tokens: each message is one state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple, TypeAlias

from burst_rt.planning.segments import Segment, Sources, StageFlops, Way, sources_of
from burst_rt.planning.strategies import AGREE
from burst_rt.scheduler import (
    HOST_LANES,
    Buffer,
    Cost,
    Graph,
    GraphBuilder,
    Lane,
    Part,
    Transfer,
)

__all__ = [
    "STAGES", "Advance", "Collect", "Compose", "Emit", "Fold", "Offer", "Prepare", "Scan",
]  # fmt: skip

# A state in a rank's memory: the name of a buffer, and the number of its part.
_State: TypeAlias = tuple[str, int]


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
    """Adds up gradients of one state, in the order given, so that the sum has the same bits every
    time.
    """

    total: _State
    parts: tuple[_State, ...]
    name: ClassVar[str] = "collect"


STAGES = (Prepare, Compose, Fold, Advance, Emit)


class _Link(NamedTuple):
    """One message: what a rank has of the state before a segment of another rank.

    Segments are named by their places; see `Scan.order`.
    """

    place: int  # the last segment that the state comes from: the message leaves after it
    receiver: int
    target: int  # the first of the receiver's segments that begin from it
    part: int  # the number of the message among those that come for this segment


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
        """The numbers of the segments, as the state passes through them: each after its sources."""
        numbers = range(len(self.segments))
        return tuple(numbers if self.forward else reversed(numbers))

    @property
    def last_owner(self) -> int:
        """The rank that has the last position."""
        return self.segments[-1].owner

    @property
    def wiring(self) -> Hashable:
        """See `Program.wiring`."""
        chain = tuple((segment.owner, segment.before) for segment in self.segments)
        return Scan, chain, self.ways, self.state_bytes, self.forward, self.shares_last

    def wire_bytes(self) -> int:
        """Bytes that all ranks together send."""
        messages = len(self.links) + (self.world_size - 1 if self.shares_last else 0)
        return messages * self.state_bytes

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The ranks that the state passes through, in that order."""
        return tuple(self.segments[number].owner for number in self.order)

    @cached_property
    def sources(self) -> Sources:
        """See `sources_of`."""
        return sources_of(self.segments, forward=self.forward)

    @cached_property
    def is_chain(self) -> bool:
        """Whether each segment goes on from the one before it in the row."""
        befores = [segment.before for segment in self.segments]
        return befores == [None, *range(len(befores) - 1)]

    @cached_property
    def goes_on(self) -> tuple[bool, ...]:
        """Whether the state after the segment at each place is needed by another segment."""
        sources = {source for befores in self.sources for source in befores}
        return tuple(place in sources for place in range(len(self.order)))

    def keeps(self, place: int) -> bool:
        """Whether the state after a segment is made: where it goes on, and at the end."""
        return self.goes_on[place] or place + 1 == len(self.order)

    @cached_property
    def links(self) -> tuple[_Link, ...]:
        """All messages of states between segments."""
        links: dict[tuple[int, int], _Link] = {}
        for target, befores in enumerate(self.sources):
            receiver = self.owners[target]
            lasts = {self.owners[at]: at for at in befores if self.owners[at] != receiver}
            new = sorted(at for at in lasts.values() if (at, receiver) not in links)
            for index, at in enumerate(new):
                links[at, receiver] = _Link(at, receiver, target, index)
        return tuple(links.values())

    @cached_property
    def _arrivals(self) -> dict[tuple[int, int], _State]:
        """Where messages arrive, by the place that they leave and the receiver."""
        return {
            (link.place, link.receiver): (f"before {link.target}", link.part) for link in self.links
        }

    def parts(self, place: int, rank: int) -> tuple[_State, ...]:
        """The states of a rank that add up to what it has of the state before a segment, which on
        the segment's own rank is all of it. Empty where the segment begins from the first state.
        """
        befores, owners = self.sources[place], self.owners
        parts = [(f"after {at}", 0) for at in befores if owners[at] == rank]
        if rank == owners[place]:
            lasts = {owners[at]: at for at in befores if owners[at] != rank}
            parts += [self._arrivals[at, rank] for at in lasts.values()]
        return tuple(parts)

    def before(self, place: int, rank: int) -> _State | None:
        """Where a rank has the state before a segment, or its part of it; see `parts`."""
        parts = self.parts(place, rank)
        if len(parts) > 1:
            return f"sum {place}", 0
        return parts[0] if parts else None

    @cached_property
    def alternate(self) -> bool:
        """Whether no state waits for another, so that all go on in two rounds."""
        ways = (self.ways[number] for number in self.order)
        return all(way is Way.OPEN for way, on in zip(ways, self.goes_on, strict=True) if on)

    def tag(self, place: int) -> int:
        """The tag of the messages that leave the segment at this place of `order`.

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
            Transfer(self.owners[x.place], x.receiver, self.tag(x.place), self.state_bytes)
            for x in self.links
        )
        for transfer in (*links, *shared) if self.forward else (*shared, *links):
            if rank in transfer[:2]:
                yield transfer

    def graph(self, rank: int, lanes: tuple[Lane, ...] = HOST_LANES) -> Graph:
        """The graph of one rank; see `Program.graph`."""
        return _Builder(self, rank, lanes).graph()

    def __str__(self) -> str:
        counts = ", ".join(f"{self.ways.count(way)} {way.value}" for way in Way if way in self.ways)
        along = "" if self.is_chain else " along the paths of a tree"
        return (
            f"{len(self.segments)} segments{along} ({counts}), a state of {self.state_bytes:,} "
            "bytes"
        )


class _Builder:
    """Builds the graph of one rank.

    A segment's place is its number in `Scan.order`. The exchanges of a rank follow each other in
    the order of their tags, the same on every rank, so that lanes that keep program order (NCCL's)
    cannot wait for each other in a circle.
    """

    def __init__(self, scan: Scan, rank: int, lanes: tuple[Lane, ...]) -> None:
        self.scan, self.rank = scan, rank
        self.places = [place for place, owner in enumerate(scan.owners) if owner == rank]
        self.g = GraphBuilder(rank, scan.world_size, lanes)
        self.agreed = self.g.buffer("agreed")
        self.g.compute("agree", AGREE, writes=[self.agreed], lane="control")
        # This rank's messages, by the place that they leave.
        self.sent: dict[int, list[_Link]] = {}
        self.received: dict[int, _Link] = {}
        for link in scan.links:
            if link.receiver == rank:
                self.received[link.place] = link
            elif scan.owners[link.place] == rank:
                self.sent.setdefault(link.place, []).append(link)

    def graph(self) -> Graph:
        scan, g = self.scan, self.g
        for place in self.places:
            self._stage(Prepare, place, writes=[g.buffer(f"prepared {place}")])
        for place in self.places:
            if self._way(place) is Way.FOLDED:
                prepared = g.buffers[f"prepared {place}"]
                self._stage(Compose, place, reads=[prepared], writes=[g.buffer(f"map {place}")])
        if scan.shares_last and not scan.forward:
            self._bring()
        arriving = Counter(link.target for link in self.received.values())
        for place in self.places:
            self._declare(place, arriving[place])
        places = range(len(scan.order))
        if scan.alternate:
            # All messages of states at once.
            for place in sorted(places, key=scan.tag):
                self._send(place)
                self._receive(place)
        for place in places:
            if scan.owners[place] == self.rank:
                self._pass(place)
            elif not scan.alternate:
                self._receive(place)
        if scan.shares_last and scan.forward:
            self._give()
        return g.build()

    def _declare(self, place: int, arriving: int) -> None:
        """The memory of a segment's states; an open segment knows the state after it already."""
        g, size = self.g, self.scan.state_bytes
        if arriving:
            g.buffer(f"before {place}", parts=arriving, size_bytes=size)
        if self.scan.keeps(place):
            after = g.buffer(f"after {place}", size_bytes=size)
            if self._way(place) is Way.OPEN:
                self._stage(Fold, place, reads=[g.buffers[f"prepared {place}"]], writes=[after])

    def _way(self, place: int) -> Way:
        return self.scan.ways[self.scan.order[place]]

    def _part(self, state: _State) -> Part:
        name, index = state
        return self.g.buffers[name][index]

    def _before(self, place: int) -> list[Part]:
        """What this rank has of the state before a segment, added up; none of the first state."""
        g, scan = self.g, self.scan
        total = scan.before(place, self.rank)
        if total is None:
            return [g.buffers["collected"][0]] if "collected" in g.buffers else []
        parts = scan.parts(place, self.rank)
        if len(parts) > 1:
            added = g.buffer(total[0], size_bytes=scan.state_bytes)
            reads = [self._part(part) for part in parts]
            op = Collect(total, parts)
            g.compute(f"collect {place}", op, reads=reads, writes=[added], hop=place)
        return [self._part(total)]

    def _pass(self, place: int) -> None:
        """The state comes to a segment, and goes on."""
        g, way, alternate = self.g, self._way(place), self.scan.alternate
        advanced = g.buffer(f"advanced {place}")
        after = [g.buffers[f"after {place}"]] if self.scan.keeps(place) else []
        before = self._before(place)
        reads: list[Buffer | Part] = [g.buffers[f"prepared {place}"], *before]
        if way is Way.FOLDED:
            self._stage(Fold, place, reads=[g.buffers[f"map {place}"], *before], writes=after)
            reads += after  # other ranks wait for the fold, and for nothing that comes later
        if way is not Way.RELAYED and not alternate:
            self._send(place)
        writes = [advanced, *after] if way is Way.RELAYED else [advanced]
        self._stage(Advance, place, reads=reads, writes=writes)
        if way is Way.RELAYED and not alternate:
            self._send(place)
        self._stage(Emit, place, reads=[advanced], writes=[g.buffer(f"emitted {place}")])

    def _stage(
        self, kind: type[_Stage], place: int, *, reads: Sequence[Buffer | Part] = (),
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
        """Sends the state after a segment on, with what was added to it, where other ranks wait."""
        links = self.sent.get(place)
        if links:
            # In a backward there is one link; in a forward nothing is added.
            (state,) = self._before(links[0].target)
            self.g.exchange(
                f"send {place}", sends=[(state, link.receiver) for link in links],
                tag=self.scan.tag(place), reads=[self.agreed], hop=place,
            )  # fmt: skip

    def _receive(self, place: int) -> None:
        """Receives what comes after a segment of another rank, if anything does."""
        link = self.received.get(place)
        if link:
            part = self.g.buffers[f"before {link.target}"][link.part]
            number = f" {link.part}" if link.part else ""
            self.g.exchange(
                f"receive {link.target}{number}", recvs=[(part, self.scan.owners[place])],
                tag=self.scan.tag(place), reads=[self.agreed], hop=place,
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
        parts, reads = [("brought", i) for i in range(len(others))], [offered]
        if others:
            brought = g.buffer("brought", parts=len(others), size_bytes=scan.state_bytes)
            recvs = list(zip(brought.parts, others, strict=True))
            g.exchange("last", recvs=recvs, tag=scan.last_tag, reads=[self.agreed])
            reads.append(brought)
        collected = g.buffer("collected", size_bytes=scan.state_bytes)
        parts.insert(self.rank, ("offered", 0))  # the order of ranks
        op = Collect(("collected", 0), tuple(parts))
        g.compute("collect", op, reads=reads, writes=[collected])
