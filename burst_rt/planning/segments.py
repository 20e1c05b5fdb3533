"""The segments of a layout, what follows what, and the way in which each passes the state on.

Segments follow each other by position. Where sequences share their beginnings (`PrefixTree`) they
are a forest: a segment also ends where paths part, and all that go on from there follow it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from enum import Enum
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from burst_rt.errors import InputError
from burst_rt.planning.layouts import Layout

__all__ = [
    "Segment", "Sources", "StageFlops", "Way", "check_runs", "segments_of", "sources_of", "ways_of",
]  # fmt: skip

# For each place in the order of a direction, the places whose states make the one before it.
Sources: TypeAlias = tuple[tuple[int, ...], ...]
# Branches of a row without a tree.
_NONE: Mapping[int, int] = MappingProxyType({})


class Segment(NamedTuple):
    """Consecutive positions that lie side by side in the shard of one rank.

    before: the number of the segment that this one goes on from; None: it begins the sequence, or a
    tree.
    """

    owner: int
    begin: int  # where the segment begins in the owner's shard, in tokens
    positions: range
    before: int | None = None

    @property
    def shard(self) -> slice:
        """The segment's tokens in the owner's shard."""
        return slice(self.begin, self.begin + len(self.positions))


class Way(Enum):
    """How the state after a segment is made; see `scan.py`."""

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


def check_runs(layout: Layout) -> None:
    """Raises InputError for striped layouts, whose runs are single tokens."""
    if any(len(run) > 1 and run.step != 1 for runs in layout.runs for run in runs):
        raise InputError(
            f"layout: a recurrence takes layouts of consecutive tokens, got kind "
            f"{layout.kind!r}; take 'zigzag', 'contiguous' or 'balanced'"
        )


def segments_of(layout: Layout, branches: Mapping[int, int] = _NONE) -> tuple[Segment, ...]:
    """The segments of a layout, in the order of positions.

    Two runs of a rank that follow each other, in positions and in the shard, are one segment.
    branches: see `PrefixTree.branches`. Raises InputError for striped layouts.
    """
    check_runs(layout)
    cuts = sorted({*branches, *(before + 1 for before in branches.values())})
    segments = [part for run in _runs_of(layout) for part in _parts_of(run, cuts)]
    segments.sort(key=lambda segment: segment.positions.start)
    ended = {segment.positions.stop: number for number, segment in enumerate(segments)}

    def before(start: int) -> int | None:
        return ended.get(branches.get(start, start - 1) + 1)

    return tuple(segment._replace(before=before(segment.positions.start)) for segment in segments)


def _runs_of(layout: Layout) -> list[Segment]:
    """The segments of a layout without a tree, in the order of ranks."""
    runs_of: list[Segment] = []
    for owner, runs in enumerate(layout.runs):
        begin = 0
        for run in runs:
            if run:
                positions = range(run.start, run.start + len(run))
                last = runs_of[-1] if runs_of else None
                if last and last.owner == owner and last.positions.stop == positions.start:
                    whole = range(last.positions.start, positions.stop)
                    runs_of[-1] = last._replace(positions=whole)
                else:
                    runs_of.append(Segment(owner, begin, positions))
            begin += len(run)
    return runs_of


def _parts_of(run: Segment, cuts: Sequence[int]) -> list[Segment]:
    """A segment cut at some positions, which ascend."""
    start, stop = run.positions.start, run.positions.stop
    bounds = [start, *cuts[bisect_right(cuts, start) : bisect_left(cuts, stop)], stop]
    return [
        Segment(run.owner, run.begin + first - start, range(first, end))
        for first, end in pairwise(bounds)
    ]


def sources_of(segments: Sequence[Segment], *, forward: bool) -> Sources:
    """What the states of a direction come from.

    In a forward a place is a segment's number, and each has a source at most. In a backward the
    last segment is at place 0, and the sources of a segment are all that follow it.
    """
    last = len(segments) - 1
    sources: list[tuple[int, ...]] = [()] * len(segments)
    for place in range(len(segments)):
        before = segments[place if forward else last - place].before
        if before is not None:
            source, target = (before, place) if forward else (place, last - before)
            sources[target] += (source,)
    return tuple(sources)


def ways_of(
    segments: Sequence[Segment], flops: StageFlops, memory: int | None, *, forward: bool
) -> tuple[Way, ...]:
    """The way of each segment.

    memory: how many tokens the state remembers; None: all. Segments are folded where the last rank
    then ends earlier than if they were relayed; operations alone count.
    """
    if memory is not None:
        return tuple(
            Way.OPEN if len(segment.positions) >= memory else Way.RELAYED for segment in segments
        )
    order = 1 if forward else -1
    placed, sources = segments[::order], sources_of(segments, forward=forward)
    relayed = [Way.RELAYED] * len(segments)
    folded = [
        Way.FOLDED if between else Way.RELAYED
        for between in _between_ranks([segment.owner for segment in placed], sources)
    ]
    ended = [_ends(placed, ways, flops, sources) for ways in (folded, relayed)]
    return tuple((folded if ended[0] < ended[1] else relayed)[::order])


def _between_ranks(owners: Sequence[int], sources: Sources) -> list[bool]:
    """Whether each segment waits for the state of another rank, and another rank for its own.

    Others have nothing to gain from a map: they know their state, or send nothing.
    """
    waits, passes = [False] * len(owners), [False] * len(owners)
    for place, befores in enumerate(sources):
        waits[place] = any(waits[at] or owners[at] != owners[place] for at in befores)
    for place in range(len(owners) - 1, -1, -1):
        for at in sources[place]:
            passes[at] |= passes[place] or owners[at] != owners[place]
    return [all(both) for both in zip(waits, passes, strict=True)]


def _ends(
    placed: Sequence[Segment], ways: Sequence[Way], flops: StageFlops, sources: Sources
) -> int:
    """When the last rank ends, in operations: ranks first do what needs no state."""
    free: dict[int, int] = {}
    for segment, way in zip(placed, ways, strict=True):
        per_token = flops.prepare + (flops.compose if way is Way.FOLDED else 0)
        free[segment.owner] = free.get(segment.owner, 0) + per_token * len(segment.positions)
    after: list[int] = []  # when the state after each segment is there
    for segment, way, befores in zip(placed, ways, sources, strict=True):
        tokens = len(segment.positions)
        begun = max(free[segment.owner], 0, *(after[at] for at in befores))
        if way is Way.FOLDED:
            after.append(begun + flops.fold)
            free[segment.owner] = after[-1] + (flops.advance + flops.emit) * tokens
        else:
            after.append(begun + flops.advance * tokens)
            free[segment.owner] = after[-1] + flops.emit * tokens
    return max(free.values(), default=0)
