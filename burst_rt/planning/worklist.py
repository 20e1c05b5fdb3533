"""A tile as spans of columns and lists of work, which is all that kernels of GPUs need of a mask.

`column_spans` says, row by row, which columns of the tile are seen. `work_list` cuts the tile into
blocks of rows x blocks of columns and lists the blocks that are seen in whole and those that are
seen in part. Nothing here knows of positions' steps, of layouts, or of a mask by name.

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
    "MOST_VECTORS", "ColumnSpans", "WorkList", "bounds_of", "column_spans", "work_list",
]  # fmt: skip

Integers = np.ndarray[Any, np.dtype[np.int32]]

# Up to so many spans a row, kernels take one vector of starts and one of stops for each; more are
# compressed.
MOST_VECTORS = 4
# What a block may be.
_WHOLE, _CUT = np.int8(1), np.int8(2)
# A row that covers a block counts so many times as one that touches it: a block of 64 columns is
# touched by far fewer spans. Sums are whole numbers, and exact in float64.
_COVERED = 1 << 24
# Cells of the table of blocks that are counted at once: counts are 64-bit.
_SOME_BLOCKS = 1 << 22


class ColumnSpans(NamedTuple):
    """What the rows of a tile see of its columns.

    Row r of batch row b sees column c where bounds[b, 0, w, r] <= c < bounds[b, 1, w, r] for a span
    w. Spans of a row do not overlap. Those it does not have are empty and come last.
    """

    bounds: Integers  # `[batch or 1, 2, width, rows]`; 1: every batch row sees the same
    num_columns: int  # of the tile

    @property
    def width(self) -> int:
        """Spans a row: a power of two, where they are no more than `MOST_VECTORS`."""
        return int(self.bounds.shape[2])

    def for_kernels(self) -> Integers:
        """The bounds as kernels take them: compressed, where there are more than a few a row."""
        return self.bounds if self.width <= MOST_VECTORS else _compressed(self.bounds)


class WorkList(NamedTuple):
    """The blocks of a tile that are seen, as runs of blocks that follow each other.

    A line is a block of rows, and its runs are of blocks of columns; or, `by_columns`, the other
    way round. Lines are in order of their work, those with most to do first, else by number.

    Worked example: 5 x 5 cells, causal, in blocks of 2 x 2, by rows. Line 2 (row 4) sees the column
    blocks 0 and 1 in whole, and 2, which is shorter, in part; line 1 sees 0 in whole and 1 in part:

        lines = [[[2, 0, 1, 2], [1, 2, 3, 4], [0, 4, 4, 5]]]
        runs = [[0, 2], [2, 3], [0, 1], [1, 2], [0, 1], [0, 0]]
    """

    # int32 `[batch or 1, lines, 4]`: a line's number, its first whole run, its first cut run, and
    # one after its last run.
    lines: Integers
    # int32 `[runs + 1, 2]`: first block, one after the last block. The last one is [0, 0] and of
    # no line: what stands at the place of a line's runs can be loaded even if it has none.
    runs: Integers
    # Whether a line has a cut run.
    masked: bool

    @property
    def single(self) -> bool:
        """Whether no line has more than one whole run and one cut run."""
        return bool((np.diff(self.lines[..., 1:]) <= 1).all())


def column_spans(mask: Mask, rows: tuple[range, ...], columns: tuple[range, ...]) -> ColumnSpans:
    """What queries at the positions `rows` see of keys at the positions `columns`, by columns.

    By the mask's spans, or its outline where it has none. Raises InternalError where positions do
    not ascend along the columns.
    """
    q, kv = list(filter(len, rows)), list(filter(len, columns))
    ascending = all(run.step > 0 or len(run) == 1 for run in kv)
    if not ascending or any(a[-1] >= b[0] for a, b in pairwise(kv)):
        raise InternalError(f"a tile's columns must stand at ascending positions, got {columns}")
    return ColumnSpans(bounds_of(columns_seen(mask, tuple(q), tuple(kv))), sum(map(len, kv)))


def bounds_of(spans: Spans) -> Integers:
    """`ColumnSpans.bounds` of spans of columns: the empty ones go."""
    there = spans.starts < spans.stops
    batch, rows, _ = there.shape
    most = int(there.sum(-1).max(initial=0))
    width = most if most > MOST_VECTORS else 1 << (max(1, most) - 1).bit_length()
    bounds = np.zeros((batch, 2, width, rows), np.int32)
    if (there[..., 1:] <= there[..., :-1]).all():  # the empty ones come last already
        for side, bound in enumerate(spans):
            into = bounds[:, side, :most].transpose(0, 2, 1)
            np.copyto(into, bound[..., :most], where=there[..., :most], casting="same_kind")
        return bounds
    row = np.nonzero(there)
    place = (np.cumsum(there, axis=-1) - 1)[row]
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
    there = lists[..., 0] < lists[..., 1]
    last = np.cumsum(there.sum(-1))
    ends = np.stack([np.concatenate([[0], last[:-1]]), last], -1)
    own = ends[np.cumsum(fresh.reshape(-1)) - 1].reshape(batch, rows, 2)
    own += rows * (batch - np.arange(batch))[:, None, None]
    return np.concatenate([own.reshape(-1, 2), lists[there]]).astype(np.int32)


def work_list(
    spans: ColumnSpans,
    block_rows: int,
    block_columns: int,
    *,
    by_columns: bool = False,
    joined: bool = False,
    whole: bool = True,
) -> WorkList:
    """The blocks of `block_rows` x `block_columns` cells that are seen.

    A block is whole where every row of it sees all of its columns by one span, and it has as many
    columns as others; it is cut where it is seen otherwise. No block stands in two runs.
    by_columns: a line is a block of columns. joined: if any block is cut, all that are seen are
    listed as cut, so that blocks which follow each other are one run. Without `whole` all that are
    seen are listed as cut.
    """
    blocks = _blocks(spans, block_rows, block_columns)
    if by_columns:
        blocks = np.ascontiguousarray(blocks.transpose(0, 2, 1))
    seen = blocks > 0
    masked = bool((blocks == _CUT).any() if whole else seen.any())
    if masked and (joined or not whole):
        blocks = np.where(seen, np.int8(_CUT), np.int8(0))
    batch, num_lines, _ = blocks.shape
    work = seen.sum(-1)
    flat = blocks.reshape(batch * num_lines, -1)
    found = [_runs(flat == kind) for kind in (_WHOLE, _CUT)]
    # The runs of each kind of each line: [2, batch, lines].
    counts = np.stack([np.bincount(line, minlength=len(flat)) for line, _ in found])
    counts = counts.reshape(2, batch, num_lines)
    order = np.argsort(-work, axis=-1, kind="stable")
    # Runs stand in the order of lines, the whole ones of a line before the cut ones.
    lines, cuts = np.concatenate([x for x, _ in found]), len(found[0][0])
    is_cut = np.arange(len(lines)) >= cuts
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.arange(num_lines)[None, :], axis=-1)
    rank += num_lines * np.arange(batch)[:, None]
    runs = np.concatenate([x for _, x in found])[np.lexsort((is_cut, rank.reshape(-1)[lines]))]
    whole, cut = np.take_along_axis(counts, order[None], axis=-1)
    ends = np.cumsum(whole + cut).reshape(batch, num_lines)
    index = np.stack([order, ends - cut - whole, ends - cut, ends], axis=-1)
    runs = np.concatenate([runs, np.zeros((1, 2), np.int64)])
    return WorkList(index.astype(np.int32), runs.astype(np.int32), masked)


def _blocks(
    spans: ColumnSpans, block_rows: int, block_columns: int
) -> np.ndarray[Any, np.dtype[np.int8]]:
    """0, _WHOLE or _CUT for each block: int8 `[batch or 1, blocks of rows, blocks of columns]`."""
    batch, _, _, num_rows = spans.bounds.shape
    across, down = -(-spans.num_columns // block_columns), -(-num_rows // block_rows)
    in_line = np.full((down, 1), block_rows)
    in_line[-1:] += num_rows - down * block_rows
    found = np.empty((batch, down, across), np.int8)
    for row, first, last in _parts(batch, down, across):
        starts, stops = spans.bounds[row, :, :, first * block_rows : last * block_rows]
        starts_in, stops_in = starts // block_columns, stops // block_columns
        starts_past, stops_past = -(-starts // block_columns), -(-stops // block_columns)
        # One table has both counts, each cell how many rows touch it and how many cover it.
        touch, cover = (
            _steps(*bounds, block_rows, across)
            for bounds in ((starts_in, stops_past), (starts_past, stops_in))
        )
        steps = np.bincount(
            np.concatenate([touch[0], cover[0]]),
            np.concatenate([touch[1], cover[1] * _COVERED]),
            minlength=(last - first) * (across + 1),
        )
        counts = np.cumsum(steps.reshape(-1, across + 1), axis=1)[:, :-1]
        found[row, first:last] = (counts > 0) * _CUT
        found[row, first:last][counts >= in_line[first:last] * _COVERED] = _WHOLE
    return found


def _parts(batch: int, down: int, across: int) -> Iterator[tuple[int, int, int]]:
    """Batch row, first and last line of parts of the table that are not too large."""
    some = max(1, _SOME_BLOCKS // max(1, across))
    for row in range(batch):
        for first in range(0, down, some):
            yield row, first, min(first + some, down)


def _steps(first: Integers, last: Integers, block_rows: int, across: int) -> tuple[Any, Any]:
    """Where the count of intervals [first, last) that hold a block changes along a line of blocks.

    first, last: `[width, rows]`. Returns places in a flat table `[lines, across + 1]`, and by how
    much. Empty intervals, and those with last < first, hold none.
    """
    # Rows that follow each other are mostly alike, and are one step.
    fresh = np.ones(first.shape, bool)
    fresh[:, 1:] = (first[:, 1:] != first[:, :-1]) | (last[:, 1:] != last[:, :-1])
    fresh[:, ::block_rows] = True
    at = np.flatnonzero(fresh)
    alike = np.diff(at, append=fresh.size)
    filled = np.flatnonzero(first.reshape(-1)[at] < last.reshape(-1)[at])
    at, alike = at[filled], alike[filled]
    begin = at % first.shape[1] // block_rows * (across + 1)
    places = [begin + bound.reshape(-1)[at] for bound in (first, last)]
    return np.concatenate(places), np.concatenate([alike, -alike])


def _runs(there: np.ndarray[Any, np.dtype[np.bool_]]) -> tuple[Any, Any]:
    """Where each line of booleans is True: the runs' lines, and their bounds `[runs, 2]`."""
    edges = np.zeros((there.shape[0], there.shape[1] + 1), bool)
    edges[:, 1:] = there
    edges[:, :-1] ^= there
    # Starts and ends by turns. numpy takes far longer for the places of two dimensions.
    line, place = np.divmod(np.flatnonzero(edges), edges.shape[1])
    return line[::2], place.reshape(-1, 2)
