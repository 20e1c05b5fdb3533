"""A key-value cache over ranks as plain numbers: who owns which position, and what queries see.

Position p of a sequence belongs to rank (p // block) % W. A rank keeps its positions in ascending
order, in columns. So a rank's shard is even within a block, whatever the lengths of the sequences,
and column c of rank r is position c // block * block * W + r * block + c % block of every sequence.

A chunk of new tokens is an attention problem like any other. Its queries and its keys are numbered
rank by rank: first the queries (columns) of rank 0, then those of rank 1. Where rows of the batch
have different lengths, one number means another position in each row; `CachedMask` knows which.
Which rows are sent is decided by lengths that are rounded up (`BatchRows.room`), so that few chunks
need a new graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import overload

import numpy as np

from burst_rt.planning.layouts import Layout
from burst_rt.planning.masks import (
    Mask,
    Piece,
    Positions,
    Spans,
    positions_of,
    spans_of,
    structured,
)
from burst_rt.planning.masks.pieces import MOST_SPANS, split
from burst_rt.planning.masks.spans import END, beside, intersect, one_span
from burst_rt.planning.needs import ROWS_TOGETHER
from burst_rt.planning.problem import Problem, ScoreFlags

__all__ = ["BatchRows", "CachedMask", "Dealt", "in_columns"]

# The least that lengths are rounded to, in tokens of all ranks.
_LEAST_ROOM = 1024
_NO_OPTIONS = ScoreFlags()


@dataclass(frozen=True)
class Dealt:
    """Positions dealt to ranks in blocks, in turn."""

    block: int
    world_size: int

    def owner(self, position: int) -> int:
        """The rank that owns a position."""
        return position // self.block % self.world_size

    @overload
    def count(self, length: int, rank: int) -> int: ...
    @overload
    def count(self, length: Positions, rank: int | Positions) -> Positions: ...
    def count(self, length: int | Positions, rank: int | Positions) -> int | Positions:
        """How many of the first `length` positions belong to a rank.

        Where the rank owns position `length`, this is the column of that position. Worked example:
        in blocks of 4 over 2 ranks, of 10 positions 6 belong to rank 0 (0 to 3, 8 and 9) and 4 to
        rank 1.
        """
        turns, rest = divmod(length, self.block * self.world_size)
        remainder = rest - rank * self.block
        if isinstance(remainder, int):
            # numpy takes twenty times as long for one number, and a decode asks for some.
            return turns * self.block + min(max(remainder, 0), self.block)
        return turns * self.block + np.clip(remainder, 0, self.block)

    def position(self, column: Positions, rank: int | Positions) -> Positions:
        """The position at a column of a rank."""
        turn, rest = np.divmod(column, self.block)
        return np.asarray((turn * self.world_size + rank) * self.block + rest, np.int64)


@dataclass(frozen=True)
class BatchRows:
    """The rows of a batch while a chunk is added: one number for each row, or one for all."""

    before: tuple[int, ...]  # tokens that were cached before
    tokens: tuple[int, ...]  # new tokens
    padding: tuple[int, ...]  # padding tokens at the left of the cached and new tokens
    capacity: int  # the most tokens that there may be

    @staticmethod
    def of(
        before: Sequence[int], tokens: Sequence[int], padding: Sequence[int], capacity: int
    ) -> BatchRows:
        """Rows that are all alike are one row."""
        numbers = list(zip(before, tokens, padding, strict=True))
        alike = numbers[:1] if len(set(numbers)) == 1 else numbers
        before, tokens, padding = (tuple(each) for each in zip(*alike, strict=True))
        return BatchRows(before, tokens, padding, capacity)

    def __len__(self) -> int:
        return len(self.before)

    @property
    def after(self) -> tuple[int, ...]:
        """Tokens that are cached afterwards."""
        return tuple(a + b for a, b in zip(self.before, self.tokens, strict=True))

    def queries(self, dealt: Dealt, rank: int) -> int:
        """The most new tokens that a rank owns of any row."""
        rows = zip(self.before, self.after, strict=True)
        return max(dealt.count(b, rank) - dealt.count(a, rank) for a, b in rows)

    @property
    def room(self) -> int:
        """The largest `after`, rounded up to a sixteenth to an eighth of itself."""
        return min(_rounded_up(max(self.after)), self.capacity)

    def columns(self, dealt: Dealt, rank: int) -> int:
        """The columns of a rank's shard that a chunk looks at, in whole `ROWS_TOGETHER`."""
        return -(-dealt.count(self.room, rank) // ROWS_TOGETHER) * ROWS_TOGETHER

    def spans(self, structure: Mask, places: Positions) -> Spans:
        """What queries at these places of their rows see of the rows' positions.

        places: `[rows, queries]`, below 0 for none. structure: what a query sees of a whole
        sequence, without regard to padding.
        """
        rows = []
        for number, at in enumerate(places):
            there = (at >= self.padding[number]) & (at < self.after[number])
            row = structure.spans(np.where(there, at, 0))
            first, last = self.padding[number], self.after[number]
            own = one_span(np.where(there, first, END), np.where(there, last, END), like=at)
            rows.append(intersect(row, own))
        return beside(rows, axis=0)


def _step_of(length: int) -> int:
    """What a length is rounded to."""
    return max(_LEAST_ROOM, 1 << max(0, (length - 1).bit_length() - 4))


def _rounded_up(length: int) -> int:
    return -(-length // _step_of(length)) * _step_of(length)


@dataclass(frozen=True)
class CachedMask(Mask):
    """What the queries of a chunk see of a cache, by the numbers of the module's text."""

    structure: Mask  # what a query sees by its position in its row
    dealt: Dealt
    rows: BatchRows

    @property
    def batch(self) -> int:
        """See `Mask.batch`."""
        return len(self.rows)

    @property
    def alike(self) -> Mask:
        """See `Mask.alike`: one row of rounded lengths, without padding."""
        tokens, room = min(_rounded_up(max(self.rows.tokens)), self.rows.capacity), self.rows.room
        rows = BatchRows((max(0, room - tokens),), (tokens,), (0,), max(room, tokens))
        return CachedMask(self.structure, self.dealt, rows)

    @property
    def sent(self) -> Mask:
        """See `Mask.sent`: what any query sees that may stand in such a chunk."""
        first = min(self.rows.before)
        first -= first % _step_of(self.rows.room)
        return _Sent(self.structure, self.dealt, first, self.rows.room)

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        """See `Mask.layouts`."""
        return self.layout(queries=True), self.layout(queries=False)

    def layout(self, *, queries: bool) -> Layout:
        """The layout of the chunk's queries, or of the columns that the chunk looks at."""
        return _layout(self.dealt, self.rows, queries)

    def problem(
        self,
        *,
        batch: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        input_bytes: int,
        sum_bytes: int,
        v_head_dim: int = 0,
        scores: ScoreFlags = _NO_OPTIONS,
    ) -> Problem:
        """The attention of one layer to the chunk. Arguments: as for `Problem`."""
        return Problem(
            q_layout=self.layout(queries=True), kv_layout=self.layout(queries=False),
            mask=self, batch=batch, num_heads=num_heads, num_kv_heads=num_kv_heads,
            head_dim=head_dim, v_head_dim=v_head_dim, input_bytes=input_bytes,
            sum_bytes=sum_bytes, needs_grad=(False, False, False), scores=scores,
        )  # fmt: skip

    def spans(self, q: Positions) -> Spans:
        """One span for each rank and span of the structure."""
        rows = self.rows.spans(self.structure, self._places(q))
        return _numbered(rows, self.dealt, self._firsts(queries=False))

    def columns(self, q: range, kv: range) -> Spans:
        """By the spans of the ranks that the columns are of."""
        return _of_tile(self, q, kv)

    def pieces(self, q: range, kv: range) -> tuple[Piece, ...]:
        """See `Mask.pieces`: of one rank there are few spans, though there may be many ranks."""
        tile = self.columns(q, kv) if q and kv else None
        return super().pieces(q, kv) if tile is None or tile.width > MOST_SPANS else split(tile)

    def _places(self, q: Positions) -> Positions:
        """Where the queries stand in their rows, `[rows, queries]`; -1 for none.

        q: as the mask sees them, at i + Skv - Sq.
        """
        shift = self.layout(queries=False).seq_len - self.layout(queries=True).seq_len
        firsts = np.array(self._firsts(queries=True), np.int64)
        index = q - shift
        rank = np.searchsorted(firsts, index, side="right") - 1
        # Ranks without queries begin where the next rank does.
        rank = np.clip(rank, 0, self.dealt.world_size - 1)
        by_row = []
        for before, after in zip(self.rows.before, self.rows.after, strict=True):
            first = self.dealt.count(np.full_like(index, before), rank)
            position = self.dealt.position(first + index - firsts[rank], rank)
            by_row.append(np.where(position < after, position, -1))
        return np.stack(by_row)

    def _firsts(self, *, queries: bool) -> list[int]:
        """The number of each rank's first query, or column."""
        return _firsts(self.layout(queries=queries))


@dataclass(frozen=True)
class _Sent(Mask):
    """The keys that any query at positions from `first` to below `room` sees."""

    structure: Mask
    dealt: Dealt
    first: int
    room: int

    @structured(steady=True)
    def spans(self, q: Positions) -> Spans:
        """The same for all queries."""
        starts, stops = self.structure.spans(positions_of(range(self.first, self.room)))
        hull = Spans(
            starts.min((0, 1), keepdims=True).clip(0),
            np.where(starts < stops, stops, 0).max((0, 1), keepdims=True).clip(0, self.room),
        )
        rows = BatchRows((0,), (self.room,), (0,), self.room)
        numbers = _numbered(hull, self.dealt, _firsts(_layout(self.dealt, rows, False)))
        shape = (1, len(q), numbers.width)
        return Spans(*(np.broadcast_to(bound, shape) for bound in numbers))


def _numbered(spans: Spans, dealt: Dealt, firsts: Sequence[int]) -> Spans:
    """Spans of positions by the numbers of columns: one for each rank and span."""
    parts = [in_columns(spans, dealt, rank) for rank in range(dealt.world_size)]
    first, last = (
        np.concatenate([part[bound] + at for part, at in zip(parts, firsts, strict=True)], axis=-1)
        for bound in range(2)
    )
    return Spans(np.where(first < last, first, END), np.where(first < last, last, END))


def _firsts(layout: Layout) -> list[int]:
    """The number of each rank's first token."""
    lengths = map(layout.shard_len, range(layout.world_size))
    return list(accumulate(lengths, initial=0))[:-1]


def in_columns(spans: Spans, dealt: Dealt, rank: int) -> Spans:
    """Spans of positions as spans of a rank's columns; those of none are empty."""
    starts, stops = (np.where(bound == END, 0, bound) for bound in spans)
    return Spans(*(dealt.count(np.maximum(bound, 0), rank) for bound in (starts, stops)))


@lru_cache(maxsize=64)
def _layout(dealt: Dealt, rows: BatchRows, queries: bool) -> Layout:
    count = rows.queries if queries else rows.columns
    runs, first = [], 0
    for rank in range(dealt.world_size):
        length = count(dealt, rank)
        # A shard travels as two blocks; nothing travels in a world of one.
        ends = [0, length] if dealt.world_size == 1 else [0, _half(length), length]
        runs.append(tuple(range(first + a, first + b) for a, b in pairwise(ends)))
        first += length
    lengths = "/".join(str(sum(map(len, of_rank))) for of_rank in runs)
    return Layout("cache", first, dealt.world_size, tuple(runs), lengths)


def _half(length: int) -> int:
    """About half of a shard, at a boundary of `ROWS_TOGETHER` where there are so many rows."""
    half = (length + 1) // 2
    return -(-half // ROWS_TOGETHER) * ROWS_TOGETHER if half > ROWS_TOGETHER else half


@lru_cache(maxsize=16)
def _positions_seen(mask: CachedMask, q: range) -> Spans:
    return mask.rows.spans(mask.structure, mask._places(positions_of(q)))


@lru_cache(maxsize=64)
def _of_tile(mask: CachedMask, q: range, kv: range) -> Spans:
    """What the queries see of some columns, by columns of the run `kv`."""
    firsts = mask._firsts(queries=False)
    lengths = [mask.layout(queries=False).shard_len(r) for r in range(mask.dealt.world_size)]
    owners = (r for r, at in enumerate(firsts) if at <= kv.start < at + lengths[r])
    rank = next(owners)
    if kv.stop > firsts[rank] + lengths[rank]:
        # An all-to-all brings the columns of several ranks together.
        return spans_of(mask, q).columns(kv)
    spans = in_columns(_positions_seen(mask, q), mask.dealt, rank)
    offset = kv.start - firsts[rank]
    return Spans(*(np.clip(bound - offset, 0, len(kv)) for bound in spans))
