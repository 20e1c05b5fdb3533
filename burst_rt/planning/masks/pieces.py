"""Pieces: the cells of a tile as rectangles, triangles and bands, which kernels do fast.

A causal document is a rectangle and a lower triangle. A window is a band; a wide one is a lower
triangle, a rectangle and an upper triangle for each run of rows. Where positions are dealt to ranks
in blocks, causal cells between two ranks are stairs: a triangle of whole blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from burst_rt.planning.masks.spans import Positions, Spans

__all__ = ["MOST_SPANS", "WIDEST_BAND", "Piece", "Shape", "split"]

# Minimum number of rows that are worth a call of a kernel: fewer go under the mask, many at a time.
_FEW_ROWS = 64
_MASKED_ROWS = 512
# Maximum number of keys that a row of a band sees: a wider band is split into triangles and the
# rest between them.
WIDEST_BAND = 2048
# A tile whose rows see more spans than this goes under the mask as a whole.
MOST_SPANS = 8
# A tile of more runs than this goes under the mask as a whole.
_MOST_RUNS = 1024


class Shape(Enum):
    """Which cells of a box of rows and columns are seen; both are counted from the box's corner."""

    RECTANGLE = "rectangle"  # every cell
    LOWER = "lower triangle"  # row i sees columns j <= i
    UPPER = "upper triangle"  # row i sees columns j >= i; as many rows as columns
    # row i sees columns i to i + columns - rows; at least as many columns as rows
    BAND = "band"
    # row i sees columns j < (i // step + 1) * step; as many rows as columns
    STAIRS = "stairs"
    MASKED = "masked"  # the mask itself says which cells are seen

    # Kernels look up work by tuples of pieces in every call. Enum's own hash is a Python function.
    __hash__ = object.__hash__


class Piece(NamedTuple):
    """A part of a tile that a kernel can do in one go.

    Rows are counted from the start of the q-block, columns from the start of the kv-block.
    """

    q_start: int
    q_stop: int  # one after the last row
    kv_start: int
    kv_stop: int  # one after the last column
    shape: Shape
    # Number of cells that are seen; the mean if batch rows differ; without spans, the cells of the
    # outline.
    num_cells: int
    step: int = 0  # rows, and columns, of a step of stairs; 0 for other shapes

    @property
    def rows(self) -> slice:
        """The piece's rows of the tile."""
        return slice(self.q_start, self.q_stop)

    @property
    def columns(self) -> slice:
        """The piece's columns of the tile."""
        return slice(self.kv_start, self.kv_stop)

    def levels(self) -> Iterator[Piece]:
        """Stairs as rectangles, one for each level."""
        for number, start in enumerate(range(self.q_start, self.q_stop, self.step), 1):
            box = (start, min(start + self.step, self.q_stop), self.kv_start)
            stop = min(self.kv_start + number * self.step, self.kv_stop)
            cells = (box[1] - box[0]) * (stop - self.kv_start)
            yield Piece(*box, stop, Shape.RECTANGLE, cells)

    def shows(self, row: Any, column: Any) -> Any:  # ints, or tensors that broadcast
        """Whether the piece's shape leaves a cell seen; counted from the piece's corner."""
        match self.shape:
            case Shape.LOWER:
                return column <= row
            case Shape.UPPER:
                return column >= row
            case Shape.STAIRS:
                return column // self.step <= row // self.step
            case Shape.BAND:
                reach = self.kv_stop - self.kv_start - (self.q_stop - self.q_start)
                return (column >= row) & (column <= row + reach)
            case Shape.RECTANGLE | Shape.MASKED:
                return True


class _Run(NamedTuple):
    """Consecutive rows whose spans begin and end in straight lines."""

    start: int
    stop: int
    first: int  # the first column that the first row sees
    end: int  # one after the last column that the first row sees
    leans: bool  # whether each row begins one column after the row before; else in the same one
    grows: bool  # whether each row ends one column after the row before; else in the same one
    # If not 0, every `stairs` rows end `stairs` columns after the rows before.
    stairs: int = 0

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    @property
    def far_end(self) -> int:
        """The end (last + 1) of the columns that any row sees."""
        more = self.num_rows - self.stairs if self.stairs else (self.num_rows - 1) * self.grows
        return self.end + more

    @property
    def num_cells(self) -> int:
        rows, stairs = self.num_rows, self.stairs
        if stairs:
            return rows * (self.end - self.first) + rows * (rows - stairs) // 2
        return rows * (self.end - self.first) + rows * (rows - 1) // 2 * (self.grows - self.leans)

    def between(self, start: int, stop: int) -> _Run:
        """The rows from `start` up to before `stop`, counted from the start of the tile."""
        on = start - self.start
        return self._replace(
            start=start,
            stop=stop,
            first=self.first + on * self.leans,
            end=self.end + on * self.grows,
        )


def split(columns: Spans) -> tuple[Piece, ...]:
    """The cells of a tile as pieces that do not overlap.

    columns: the rows' spans, by columns of the tile. Many short runs of rows become one piece under
    the mask. So does a whole tile that has too many runs, or whose batch rows differ.
    """
    starts, stops = columns
    if not (starts < stops).any():
        return ()
    if len(starts) > 1:
        return (_box(columns),)
    runs = [list(_runs(starts[0, :, span], stops[0, :, span])) for span in range(columns.width)]
    if sum(map(len, runs)) > _MOST_RUNS:
        return (_box(columns),)
    if columns.width == 1:
        return tuple(_few_together(_climbed(runs[0])))
    pieces = tuple(piece for group in runs for run in group for piece in _pieces(run))
    # Pieces must not overlap: the cells of a piece's rows and columns must be its own.
    return pieces if _apart(pieces) else (_box(columns),)


def _box(columns: Spans) -> Piece:
    """All that is seen, as one piece under the mask."""
    starts, stops = columns
    filled = starts < stops
    rows = np.flatnonzero(filled.any((0, 2)))
    return Piece(
        int(rows[0]),
        int(rows[-1]) + 1,
        int(starts[filled].min()),
        int(stops[filled].max()),
        Shape.MASKED,
        -(-int((stops - starts).sum()) // len(starts)),
    )


def _runs(starts: Positions, stops: Positions) -> Iterator[_Run]:
    """The rows that see something, in runs as long as possible; one span for each row."""
    filled = starts < stops
    left, right = np.diff(starts), np.diff(stops)
    # A step is straight where both differences are 0 or 1.
    straight = filled[1:] & filled[:-1] & (left >> 1 == 0) & (right >> 1 == 0)
    kind = np.where(straight, 2 * left + right, -1)
    edges = np.flatnonzero(np.diff(kind, prepend=-2, append=-2))
    row = 0  # the first row that is in no run yet

    def alone(stop: int) -> Iterator[_Run]:
        for at in (row + np.flatnonzero(filled[row:stop])).tolist():
            yield _Run(at, at + 1, int(starts[at]), int(stops[at]), False, False)

    # Steps from row a to row a + 1, and so on to row b, are of one kind.
    for a, b in pairwise(edges.tolist()):
        if kind[a] < 0:
            yield from alone(b)
            row = max(row, b)
        elif row <= b:
            leans, grows = kind[a] >= 2, kind[a] % 2 == 1
            yield _Run(row, b + 1, int(starts[row]), int(stops[row]), bool(leans), bool(grows))
            row = b + 1
    yield from alone(len(starts))


def _pieces(run: _Run) -> Iterator[Piece]:
    """The cells of a run of rows."""
    width = run.end - run.first
    if not (run.leans and run.grows):
        yield from _corners(run)
    elif width <= WIDEST_BAND:
        box = (run.start, run.stop, run.first, run.far_end)
        yield Piece(*box, Shape.BAND, run.num_cells)
    else:
        # A run has so few rows at a time that the triangles on both sides do not overlap.
        for rows in _split_run(run, width - 1):
            yield from _corners(rows)


def _corners(run: _Run) -> Iterator[Piece]:
    """The cells of a run as a triangle on either side, where there is one, and what is between."""
    rows, first, end = run.num_rows, run.first, run.end
    if run.stairs:
        corner = end - run.stairs
        if first < corner:
            box = (run.start, run.stop, first, corner)
            yield Piece(*box, Shape.RECTANGLE, rows * (corner - first))
        box = (run.start, run.stop, corner, run.far_end)
        num_cells = rows * (rows + run.stairs) // 2
        yield Piece(*box, Shape.STAIRS, num_cells, run.stairs)
        return
    triangle = rows * (rows + 1) // 2
    if run.leans:
        box = (run.start, run.stop, first, first + rows)
        yield Piece(*box, Shape.UPPER, triangle)
        first += rows
    if run.grows:
        end -= 1
    if first < end:
        yield Piece(run.start, run.stop, first, end, Shape.RECTANGLE, rows * (end - first))
    if run.grows:
        yield Piece(run.start, run.stop, end, end + rows, Shape.LOWER, triangle)


def _split_run(run: _Run, most_rows: int) -> Iterator[_Run]:
    """The run in parts of about the same number of rows."""
    parts = -(-run.num_rows // most_rows)
    edges = [run.start + run.num_rows * part // parts for part in range(parts + 1)]
    yield from (run.between(start, stop) for start, stop in pairwise(edges))


def _climbed(runs: list[_Run]) -> list[_Run]:
    """The runs, with stairs as one run: as many rows each, and as many columns more each."""
    climbed: list[_Run] = []
    for run in runs:
        below = climbed[-1] if climbed else run
        rows = below.stairs or below.num_rows
        climbs = (
            _FEW_ROWS <= rows <= below.end - below.first
            and below.stop == run.start
            and below.first == run.first
            and run.num_rows == rows
            and run.end == below.far_end + rows
            and not (below.leans or below.grows or run.leans or run.grows)
        )
        climbed.append(climbed.pop()._replace(stop=run.stop, stairs=rows) if climbs else run)
    return climbed


def _few_together(runs: list[_Run]) -> Iterator[Piece]:
    """The pieces of runs of rows that see one span each; runs of few rows share pieces."""
    together: list[_Run] = []
    for run in runs:
        if together and (run.num_rows >= _FEW_ROWS or run.stop - together[0].start > _MASKED_ROWS):
            yield from _together(together)
            together = []
        if run.num_rows >= _FEW_ROWS:
            yield from _pieces(run)
        else:
            together.append(run)
    if together:
        yield from _together(together)


def _together(runs: list[_Run]) -> Iterator[Piece]:
    if len(runs) == 1:
        yield from _pieces(runs[0])
        return
    first = min(run.first for run in runs)
    end = max(run.far_end for run in runs)
    num_cells = sum(run.num_cells for run in runs)
    yield Piece(runs[0].start, runs[-1].stop, first, end, Shape.MASKED, num_cells)


def _apart(pieces: tuple[Piece, ...]) -> bool:
    """Whether no two pieces share a row and a column."""
    boxes = np.array([piece[:4] for piece in pieces])
    (top, bottom, left, right), other = boxes.T[..., None], boxes.T[:, None]
    meet = (top < other[1]) & (other[0] < bottom) & (left < other[3]) & (other[2] < right)
    return int(meet.sum()) == len(pieces)
