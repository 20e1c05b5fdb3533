"""A tile for GPU kernels: spans of its columns, and lists of the blocks seen in full or in part.

`column_spans` says, row by row, which columns of the tile are seen. `work_list` divides the tile
into blocks of rows x blocks of columns and lists the blocks that are seen in full and those that
are seen in part. Nothing here knows of positions' steps, of layouts, or of a mask by name.

Pure numpy: tables are data, made on the host and copied to the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from burst_rt.errors import InternalError
from burst_rt.planning.masks import Mask, Spans, columns_seen

__all__ = [
    "MOST_VECTORS", "ColumnSpans", "Integers", "OrderedWork", "WorkList", "ascends", "bounds_of",
    "column_spans", "ordered_work", "work_list",
]  # fmt: skip

Integers = np.ndarray[Any, np.dtype[np.int32]]

# Maximum number of spans a row for which kernels take one vector of starts and one of stops each;
# more are compressed.
MOST_VECTORS = 4
# What a block may be.
_FULL, _PARTIAL = np.int8(1), np.int8(2)
# Weight of a span that covers a block, relative to one that touches it: far fewer spans touch a
# block of 64 columns.
_COVERED = 1 << 24
# Maximum number of blocks of the table that are counted at once.
_SOME_BLOCKS = 1 << 22


class ColumnSpans(NamedTuple):
    """The columns of a tile that its rows see.

    Row r of batch row b sees column c where bounds[b, 0, w, r] <= c < bounds[b, 1, w, r] for a span
    w. Spans of a row are in order and do not overlap. Missing spans are empty and come last.
    """

    bounds: Integers  # `[batch or 1, 2, width, rows]`; 1: every batch row sees the same
    num_columns: int  # columns of the tile

    @property
    def width(self) -> int:
        """Spans a row: a power of two, if it is not above `MOST_VECTORS`."""
        return int(self.bounds.shape[2])

    def for_kernels(self) -> Integers:
        """The bounds as kernels take them: compressed, where there are more than a few a row."""
        return self.bounds if self.width <= MOST_VECTORS else _compressed(self.bounds)


class WorkList(NamedTuple):
    """The blocks of a tile that are seen, as runs of blocks that follow each other.

    A line is a block of rows, and its runs are of blocks of columns; or, `by_columns`, the other
    way round. Lines are in order of their work, those with most to do first, else by number.

    Worked example: 5 x 5 cells, causal, in blocks of 2 x 2, by rows. Line 2 (row 4) sees the column
    blocks 0 and 1 in full, and 2, which is shorter, in part; line 1 sees 0 in full and 1 in part:

        lines = [[[2, 0, 1, 2], [1, 2, 3, 4], [0, 4, 4, 5]]]
        runs = [[0, 2], [2, 3], [0, 1], [1, 2], [0, 1], [0, 0]]
    """

    # int32 `[batch or 1, lines, 4]`: a line's number, its first full run, its first partial run,
    # and one after its last run.
    lines: Integers
    # int32 `[runs + 1, 2]`: first block, one after the last block. The last one is [0, 0] and
    # belongs to no line, so that the place of a line's runs can be loaded even if the line has
    # none.
    runs: Integers
    # Whether a line has a partial run.
    masked: bool

    @property
    def single(self) -> bool:
        """Whether no line has more than one full run and one partial run."""
        return bool((np.diff(self.lines[..., 1:]) <= 1).all())


class OrderedWork(NamedTuple):
    """The blocks of a tile that are seen, for blocks of columns that add to blocks of rows in turn.

    Blocks of columns take their turns by descending number.

    Worked example: the 5 x 5 cells of `WorkList`. The columns' block 0 is seen by row blocks 0, in
    part, 1 and 2, in full; the rows' block 1 sees columns' blocks up to 1:

        lines = [[[0, 1, 3, 3], [1, 2, 3, 3], [2, 2, 2, 3]]]
        lasts = [[0, 1, 2]]
    """

    # int32 `[batch or 1, blocks of columns, 4]`: first block of rows that sees the columns, first
    # one that sees them in full, one after the last of these, and one after the last block of rows.
    lines: Integers
    lasts: Integers  # int32 `[batch or 1, blocks of rows]`: last block of columns that is seen
    masked: bool  # whether a block is seen in part


def column_spans(mask: Mask, rows: tuple[range, ...], columns: tuple[range, ...]) -> ColumnSpans:
    """The columns that queries at the positions `rows` see, among keys at the positions `columns`.

    By the mask's spans, or its outline where it has none. Raises InternalError where positions do
    not ascend along the columns.
    """
    q, kv = list(filter(len, rows)), list(filter(len, columns))
    if not ascends(columns):
        raise InternalError(f"a tile's columns must stand at ascending positions, got {columns}")
    return ColumnSpans(bounds_of(columns_seen(mask, tuple(q), tuple(kv))), sum(map(len, kv)))


def ascends(runs: tuple[range, ...]) -> bool:
    """Whether positions ascend along all the runs."""
    filled = list(filter(len, runs))
    steps = all(run.step > 0 or len(run) == 1 for run in filled)
    return steps and all(a[-1] < b[0] for a, b in pairwise(filled))


def bounds_of(spans: Spans) -> Integers:
    """`ColumnSpans.bounds` of spans of columns: the empty ones go."""
    filled = spans.starts < spans.stops
    batch, rows, _ = filled.shape
    most = int(filled.sum(-1).max(initial=0))
    width = most if most > MOST_VECTORS else 1 << (max(1, most) - 1).bit_length()
    bounds = np.zeros((batch, 2, width, rows), np.int32)
    if (filled[..., 1:] <= filled[..., :-1]).all():  # the empty ones come last already
        for side, bound in enumerate(spans):
            into = bounds[:, side, :most].transpose(0, 2, 1)
            np.copyto(into, bound[..., :most], where=filled[..., :most], casting="same_kind")
        return bounds
    row = np.nonzero(filled)
    place = (np.cumsum(filled, axis=-1) - 1)[row]
    for side, bound in enumerate(spans):
        bounds[row[0], side, place, row[1]] = bound[row]
    return bounds


def _compressed(bounds: Integers) -> Integers:
    """The spans of `ColumnSpans.bounds` as compressed rows: int32 `[batch * rows + spans, 2]`.

    First each row says which spans are its own: the number of the first one and one after the last,
    counted in pairs of numbers from where the lines of its batch row begin. Then come the spans,
    start and stop. Rows that follow each other and see the same share their spans.

    Worked example: rows that see [0, 2) and [5, 6), the same again, and [3, 4):

        [[3, 5], [3, 5], [5, 6], [0, 2], [5, 6], [3, 4]]
    """
    batch, _, _, rows = bounds.shape
    fresh = np.ones((batch, rows), bool)
    fresh[:, 1:] = False
    for bound in bounds.reshape(batch, -1, rows).swapaxes(0, 1):  # a numpy reduction takes longer
        fresh[:, 1:] |= bound[:, 1:] != bound[:, :-1]
    row = np.nonzero(fresh)
    lists = bounds[row[0], :, :, row[1]].transpose(0, 2, 1)  # [lists, width, 2]
    filled = lists[..., 0] < lists[..., 1]
    last = np.cumsum(filled.sum(-1))
    ends = np.stack([np.concatenate([[0], last[:-1]]), last], -1)
    own = ends[np.cumsum(fresh.reshape(-1)) - 1].reshape(batch, rows, 2)
    own += rows * (batch - np.arange(batch))[:, None, None]
    return np.concatenate([own.reshape(-1, 2), lists[filled]]).astype(np.int32)


def work_list(
    spans: ColumnSpans,
    block_rows: int,
    block_columns: int,
    *,
    by_columns: bool = False,
    full: bool = True,
) -> WorkList:
    """The blocks of `block_rows` x `block_columns` cells that are seen.

    A block is full where every row of it sees all of its columns by one span, and it has as many
    columns as others; it is partial where it is seen otherwise. No block is in two runs.
    by_columns: a line is a block of columns. Without `full` all blocks that are seen are
    listed as partial.
    """
    blocks = _blocks(spans, block_rows, block_columns)
    if by_columns:
        blocks = np.ascontiguousarray(blocks.transpose(0, 2, 1))
    masked = bool(((blocks == _PARTIAL) if full else blocks).any())
    if not full:
        blocks = np.minimum(blocks, 1) * _PARTIAL
    batch, num_lines, _ = blocks.shape
    line, bounds, kind = _runs(blocks.reshape(batch * num_lines, -1))
    work = np.bincount(line, bounds[:, 1] - bounds[:, 0], batch * num_lines)
    order = np.argsort(-work.reshape(batch, num_lines), axis=-1, kind="stable")
    # Runs are in the order of lines, the full ones of a line before the partial ones.
    in_order = (order + num_lines * np.arange(batch)[:, None]).reshape(-1)
    rank = np.empty_like(in_order)
    rank[in_order] = np.arange(len(in_order))
    runs = bounds[np.lexsort((kind, rank[line]))]
    num_full, num_runs = (
        np.bincount(lines, minlength=len(rank))[in_order] for lines in (line[kind == _FULL], line)
    )
    ends = np.cumsum(num_runs)
    index = np.stack([order.reshape(-1), ends - num_runs, ends - num_runs + num_full, ends], -1)
    runs = np.concatenate([runs, np.zeros((1, 2), np.int64)])
    return WorkList(
        index.reshape(batch, num_lines, 4).astype(np.int32), runs.astype(np.int32), masked
    )


def ordered_work(spans: ColumnSpans, block_rows: int, block_columns: int) -> OrderedWork | None:
    """The work of a tile, for blocks of columns that take turns; None where it has gaps.

    There is a gap where a block that is not seen lies between two that are, in a line of rows or of
    columns. Where a line of columns has several runs of full blocks, the longest counts as full.
    """
    kinds = _blocks(spans, block_rows, block_columns)
    seen = kinds > 0
    first, end = _bounds_of(seen, 1)
    whole, cut = _longest(kinds == _FULL, first)
    first_seen, lasts = _bounds_of(seen, 2)
    if (seen.sum(1) != end - first).any() or (seen.sum(2) != lasts - first_seen).any():
        return None
    lines = np.stack([first, whole, cut, end], -1).astype(np.int32)
    masked = bool(((end - first) != (cut - whole)).any())
    return OrderedWork(lines, (lasts - 1).astype(np.int32), masked)


def _bounds_of(seen: np.ndarray[Any, np.dtype[np.bool_]], axis: int) -> tuple[Any, Any]:
    """The first place that is set along an axis, and one after the last; 0 and 0 if none is."""
    any_set = seen.any(axis)
    first = seen.argmax(axis)
    end = seen.shape[axis] - np.flip(seen, axis).argmax(axis)
    return np.where(any_set, first, 0), np.where(any_set, end, 0)


def _longest(
    full: np.ndarray[Any, np.dtype[np.bool_]], otherwise: np.ndarray[Any, Any]
) -> tuple[Any, Any]:
    """The bounds of the longest run that is set along the rows of each column; empty if none is."""
    batch, down, across = full.shape
    whole, cut = otherwise.copy(), otherwise.copy()
    runs = np.zeros((batch, across), np.int64)  # how many are set up to a row, one after another
    for row in range(down):
        runs = np.where(full[:, row], runs + 1, 0)
        longer = runs > cut - whole
        cut = np.where(longer, row + 1, cut)
        whole = np.where(longer, row + 1 - runs, whole)
    return whole, cut


def _blocks(
    spans: ColumnSpans, block_rows: int, block_columns: int
) -> np.ndarray[Any, np.dtype[np.int8]]:
    """0, _FULL or _PARTIAL, by block: int8 `[batch or 1, blocks of rows, blocks of columns]`."""
    batch, _, _, num_rows = spans.bounds.shape
    across, down = -(-spans.num_columns // block_columns), -(-num_rows // block_rows)
    kinds = np.empty((batch, down, across), np.int8)
    for row, first, last in _parts(batch, down, across):
        bounds = spans.bounds[row, :, :, first * block_rows : last * block_rows]
        # The lines one after the other; the last place of each is behind its blocks.
        width, places = across + 1, (last - first) * (across + 1)
        place, change = _steps(bounds, block_rows, block_columns, width)
        in_order = np.argsort(place, kind="stable")
        place, count = place[in_order], np.cumsum(change[in_order])
        # The count from a place on, up to the next, is that after all changes there.
        final = np.diff(place, append=-1) != 0
        place, count = place[final], count[final]
        in_line = np.minimum(num_rows - (first + place // width) * block_rows, block_rows)
        kind = np.where(count >= in_line * _COVERED, _FULL, (count > 0) * _PARTIAL)
        table = np.repeat(np.append(np.int8(0), kind), np.diff(place, prepend=0, append=places))
        kinds[row, first:last] = table.reshape(-1, width)[:, :across]
    return kinds


def _parts(batch: int, down: int, across: int) -> Iterator[tuple[int, int, int]]:
    """Batch row, first and last line of parts of the table that are not too large."""
    some = max(1, _SOME_BLOCKS // max(1, across))
    for row in range(batch):
        for first in range(0, down, some):
            yield row, first, min(first + some, down)


def _steps(bounds: Integers, block_rows: int, block_columns: int, width: int) -> tuple[Any, Any]:
    """The places where a line's count of spans that touch, or cover, a block changes.

    bounds: `[2, spans, rows]`, starts and stops. Returns places in a flat table `[lines, width]`,
    and by how much the count changes there. A span that covers a block counts _COVERED times, and
    once for touching it.
    """
    # Twice the number of the block that a bound is in, and 1 more unless the block begins there.
    at = bounds // block_columns
    inside = bounds != at * block_columns
    at *= 2
    at += inside
    # Rows that follow each other are mostly alike, and are one step.
    fresh = np.ones(bounds.shape[1:], bool)
    fresh[:, 1:] = (at[..., 1:] != at[..., :-1]).any(0)
    fresh[:, ::block_rows] = True
    where = np.flatnonzero(fresh)
    alike = np.diff(where, append=fresh.size)
    line = where % fresh.shape[1] // block_rows * width
    start, stop = at.reshape(2, -1)[:, where]
    places, changes = [], []
    # A span covers the blocks that lie in it, and touches those at its ends too.
    for first, last, times in (
        (start // 2, (stop + 1) // 2, 1),
        ((start + 1) // 2, stop // 2, _COVERED),
    ):
        filled = first < last
        places += [(line + bound)[filled] for bound in (first, last)]
        count = alike[filled] * times
        changes += [count, -count]
    return np.concatenate(places), np.concatenate(changes)


def _runs(blocks: np.ndarray[Any, np.dtype[np.int8]]) -> tuple[Any, Any, Any]:
    """The runs of equal blocks of each line; 0 means a hidden block.

    blocks: `[lines, blocks]`. Returns, for each run, its line, its bounds `[runs, 2]`, and its
    block.
    """
    lines, width = blocks.shape
    # Line after line, a 0 before the first block and one behind the last block of each.
    flat = np.zeros(1 + lines * (width + 1), np.int8)
    flat[1:].reshape(lines, width + 1)[:, :width] = blocks
    places = np.flatnonzero(flat[1:] != flat[:-1])
    kind = flat[1:][places]
    at = np.flatnonzero(kind)
    # Every entry that is not 0 has a next place: the 0 behind the line, at the latest.
    line, first = np.divmod(places[at], width + 1)
    ends = places[at + 1] - line * (width + 1)
    return line, np.stack([first, ends], -1), kind[at]
