"""A tile as calls of torch's fused CPU attention, and bands: which rows and columns each one gets.

The fused kernel computes cells in blocks of up to 256 rows by 512 columns. For a triangle of up to
512 rows it computes every cell; for 1,024 rows, 1.5 times the visible cells. So a triangle of few
rows is taken apart: into small triangles along its diagonal, and the squares between them, which
have no hidden cells:

    T
    S T          one call for the four small triangles T, one for the two small squares S,
    L L T        one for the large square L
    L L S T

Blocks that lie alike along a diagonal are one call: each is a batch row of it.

A window (a band) is done by the fused kernel in strips of a few rows, under a mask, where it is
narrow or `bands.py` cannot do it; else it is left whole, for `bands.py`.

Stairs are a triangle whose small triangles are squares, without an edge to hide.

Nothing is computed here; all is numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from burst_rt.kernels.base import Tile
from burst_rt.planning.masks import Piece, Relation, Shape

__all__ = [
    "MOST_STRIP_COLUMNS",
    "STRIP",
    "STRIP_COLUMNS",
    "KernelCall",
    "PartSize",
    "kernel_calls",
    "narrow_in_strips",
    "parts_under_the_mask",
]

# The relation of the mask to some rows and columns of a tile.
_Relation: TypeAlias = Callable[[slice, slice], Relation]

# Number of rows of a strip: as few as the fused kernel takes at once, so that little is computed
# outside the band.
STRIP = 32
# Maximum number of columns of all strips of a call.
STRIP_COLUMNS = 16384
# Keys that a row sees beside its first one, in the widest band that is done in strips. The strips
# of `bands.py` take more calls of torch, and the fused kernel is slower under a mask.
_NARROW = {"forward": 512, "backward": 256}
# Columns of the strips of a narrow band, for each of its rows, at most.
MOST_STRIP_COLUMNS = {direction: 1 + width // STRIP for direction, width in _NARROW.items()}


class PartSize(NamedTuple):
    """The most of a tile that one call of the fused kernel does.

    The kernel spreads heads over threads. One head for each thread is enough. Transfers move on
    between calls, and with all heads at once a call can take the better part of a second.
    """

    q_len: int  # rows
    kv_len: int  # columns
    kv_heads: int  # kv heads for each thread
    edge: int = 0  # rows of the small triangles; 0: none is taken apart
    # Rows of the largest triangle that is taken apart. In a larger one the blocks waste a smaller
    # share, and adding up its parts costs more.
    largest: int = 0
    strips: bool = True  # whether bands are strips for the fused kernel; else they are left whole


class KernelCall(NamedTuple):
    """One call of the fused kernel: a block of the tile, or several alike along a diagonal.

    A band that is left whole is a call, too (see `bands.py`).
    """

    rows: slice  # rows of the tile that the first block has
    columns: slice  # columns of the tile that the first block has
    shape: Shape = Shape.RECTANGLE  # the cells that are seen; no stairs
    num_blocks: int = 1
    step: int = 0  # rows, and columns, from one block to the next
    first: bool = False  # whether it comes before any other call for its rows

    @property
    def overlaps(self) -> bool:
        """Whether blocks share columns."""
        return self.num_blocks > 1 and self.columns.stop - self.columns.start > self.step

    def block_by_block(self) -> Iterator[KernelCall]:
        """Each block as a call of its own."""
        for number in range(self.num_blocks):
            rows, columns = (_moved(x, number * self.step) for x in (self.rows, self.columns))
            yield self._replace(rows=rows, columns=columns, num_blocks=1, step=0)

    def first_block(self) -> Piece:
        """The first block as a piece of the tile."""
        (a, b), (c, d) = ((x.start, x.stop) for x in (self.rows, self.columns))
        return Piece(a, b, c, d, self.shape, 0)


def narrow_in_strips(part: PartSize, pieces: Sequence[Piece], *, forward: bool) -> PartSize:
    """The part, with strips for the bands of a tile where all of them are narrow."""
    narrow = _NARROW["forward" if forward else "backward"]
    sides = (
        (p.q_stop - p.q_start, p.kv_stop - p.kv_start) for p in pieces if p.shape is Shape.BAND
    )
    strips = all(columns - rows <= narrow for rows, columns in sides)
    return part._replace(strips=part.strips or strips)


class _Seen(NamedTuple):
    """What some rows see of a piece that has all of them."""

    full: Sequence[tuple[int, int]] = ()  # first and end of columns that all the rows see
    # The calls for all else. Each iterator begins with calls that together have all the rows once.
    partial: Sequence[Iterator[KernelCall]] = ()


@lru_cache(maxsize=64)
def kernel_calls(
    pieces: tuple[Piece, ...], part: PartSize, batched: bool
) -> tuple[tuple[slice, tuple[KernelCall, ...]], ...]:
    """The pieces of a tile in runs of rows of bounded size, each with its calls.

    pieces: none of them under the mask. batched: whether a call may have several blocks. These are
    batch rows of the call, so a tensor that already has batch rows cannot have them. The parts are
    kept, for tiles that come again.
    """
    return tuple((rows, tuple(calls)) for rows, calls in _parts(pieces, part, batched, None))


def parts_under_the_mask(
    tile: Tile, part: PartSize, batched: bool
) -> Iterator[tuple[slice, Iterator[KernelCall]]]:
    """The calls that `kernel_calls` returns, for a tile that has pieces under the mask."""
    return _parts(tile.pieces, part, batched, tile.relation)


def _parts(
    all_pieces: tuple[Piece, ...], part: PartSize, batched: bool, relation: _Relation | None
) -> Iterator[tuple[slice, Iterator[KernelCall]]]:
    edges = sorted({edge for piece in all_pieces for edge in (piece.q_start, piece.q_stop)})
    pieces: list[Piece] = []
    to_come = deque(sorted(all_pieces, key=itemgetter(0)))  # sorted by first row
    for top, bottom in pairwise(edges):
        pieces = [piece for piece in pieces if bottom <= piece.q_stop]
        while to_come and to_come[0].q_start == top:
            pieces.append(to_come.popleft())
        q_len = part.q_len
        for piece in pieces:  # whole levels of stairs
            q_len -= q_len % piece.step if 0 < piece.step < q_len else 0
        for a in range(top, bottom, q_len) if pieces else ():
            rows = slice(a, min(a + q_len, bottom))
            calls = _calls_for(rows, pieces, part, relation)
            yield (
                rows,
                calls if batched else (one for call in calls for one in call.block_by_block()),
            )


def _calls_for(
    rows: slice, pieces: list[Piece], part: PartSize, relation: _Relation | None
) -> Iterator[KernelCall]:
    """The calls for some rows that are all in every piece.

    Full rectangles come first, joined where they touch.
    """
    seen = [_seen_of(piece, rows, part, relation) for piece in pieces]
    full = _joined([columns for of_piece in seen for columns in of_piece.full])
    columns_of = (columns for touching in full for columns in _split(*touching, part.kv_len))
    rectangles = (iter([KernelCall(rows, columns, first=True)]) for columns in columns_of)
    first = True
    for calls in (*rectangles, *(calls for of_piece in seen for calls in of_piece.partial)):
        for call in calls:
            yield call._replace(first=first and call.first)
        first = False


def _seen_of(piece: Piece, rows: slice, part: PartSize, relation: _Relation | None) -> _Seen:
    """What some rows see of a piece."""
    match piece.shape:
        case Shape.RECTANGLE:
            return _Seen(full=[(piece.kv_start, piece.kv_stop)])
        case Shape.LOWER | Shape.UPPER:
            return _triangle(piece, rows, part)
        case Shape.BAND:
            left = _diagonal(piece, rows)
            width = piece.kv_stop - piece.kv_start - (piece.q_stop - piece.q_start) + 1
            return _Seen(partial=[_band(rows, slice(left, left + width), part)])
        case Shape.STAIRS:
            first, calls = _stairs(rows, piece)
            return _Seen(full=[(piece.kv_start, first)], partial=[calls])
        case Shape.MASKED:
            assert relation is not None
            return _under_the_mask(piece, rows, part, relation)


def _diagonal(piece: Piece, rows: slice) -> int:
    """The column at which the diagonal of a triangle, or of a band, enters some rows."""
    entry: int = min(piece.kv_start + rows.start - piece.q_start, piece.kv_stop)
    return entry


def _under_the_mask(piece: Piece, rows: slice, part: PartSize, relation: _Relation) -> _Seen:
    """What the mask leaves of some rows of a piece, asked about some columns at a time."""
    full, partial = [], []
    for columns in _split(piece.kv_start, piece.kv_stop, part.kv_len):
        match relation(rows, columns):
            case Relation.FULL:
                full.append((columns.start, columns.stop))
            case Relation.PARTIAL:
                partial.append(iter([KernelCall(rows, columns, Shape.MASKED, first=True)]))
    return _Seen(full, partial)


def _triangle(piece: Piece, rows: slice, part: PartSize) -> _Seen:
    """Some rows of a triangle: columns that all of them see, beside a smaller triangle."""
    left, lower = _diagonal(piece, rows), piece.shape is Shape.LOWER
    right = min(left + rows.stop - rows.start, piece.kv_stop)
    full = [(piece.kv_start, left) if lower else (right, piece.kv_stop)]
    if left >= right:
        return _Seen(full)
    call = KernelCall(rows, slice(left, right), piece.shape, first=True)
    if lower and right - left > part.largest:
        return _Seen(full, [iter([call])])
    return _Seen(full, [_taken_apart(call, part.edge, right - left)])


def _stairs(rows: slice, piece: Piece) -> tuple[int, Iterator[KernelCall]]:
    """Some rows of stairs: the column up to which all of them see, and what they see beyond it."""
    size, at = piece.step, rows.start - piece.q_start
    level = at // size * size
    first = min(piece.kv_start + level + size, piece.kv_stop)
    height = rows.stop - rows.start
    if level < at or height % size:
        below = (x for x in piece.levels() if rows.start < x.q_stop and x.q_start < rows.stop)
        levels = ((max(x.q_start, rows.start), min(x.q_stop, rows.stop), x.kv_stop) for x in below)
        return first, (KernelCall(slice(a, b), slice(first, c)) for a, b, c in levels if first < c)
    # The levels are whole: the first one has nothing left, and the others are stairs again.
    above = slice(rows.start + size, rows.stop), slice(first, first + height - size)
    if size >= height:
        return first, iter(())
    triangle = KernelCall(*above, Shape.LOWER)
    return first, _taken_apart(triangle, size, height, squares=True)


def _taken_apart(
    triangle: KernelCall, edge: int, most: int, *, squares: bool = False
) -> Iterator[KernelCall]:
    """A triangle as small ones and the squares between them that have fewer than `most` rows.

    squares: whether the small ones are squares, too, as in stairs.
    """
    rows, columns = triangle.rows, triangle.columns
    size = columns.stop - columns.start
    small = triangle._replace(shape=Shape.RECTANGLE) if squares else triangle
    if not 0 < edge < size:
        yield small
        return
    if rows.start + size < rows.stop:  # below a triangle of more rows than columns
        yield KernelCall(slice(rows.start + size, rows.stop), columns, first=True)

    def blocks(
        like: KernelCall, at: tuple[int, int], lengths: tuple[int, int], many: int, step: int
    ) -> KernelCall:
        (a, c), (q_len, kv_len) = at, lengths
        a, c = a + rows.start, c + columns.start
        return like._replace(
            rows=slice(a, a + q_len), columns=slice(c, c + kv_len), num_blocks=many, step=step
        )

    for start, length, many in _blocks_of(size, edge, edge):
        yield blocks(small, (start, start), (length, length), many, edge)
    square = KernelCall(rows, columns)
    while edge < min(size, most):
        for start, length, many in _blocks_of(size - edge, edge, 2 * edge):
            low = ((start + edge, start), (length, edge))
            at, lengths = low if triangle.shape is Shape.LOWER else (x[::-1] for x in low)
            yield blocks(square, at, lengths, many, 2 * edge)
        edge *= 2


def _band(rows: slice, window: slice, part: PartSize) -> Iterator[KernelCall]:
    """A band. window: what its first row sees."""
    width, num_rows = window.stop - window.start, rows.stop - rows.start
    if not part.strips:
        columns = slice(window.start, window.stop - 1 + num_rows)
        yield KernelCall(rows, columns, Shape.BAND, first=True)
        return
    most = max(1, STRIP_COLUMNS // (width + STRIP))  # strips in a call
    for start, length, many in _blocks_of(num_rows, STRIP, STRIP):
        for number in range(0, many, most):
            on = start + number * STRIP
            strip = _moved(slice(0, length), rows.start + on)
            columns = _moved(slice(0, width + length - 1), window.start + on)
            count = min(most, many - number)
            yield KernelCall(strip, columns, Shape.BAND, count, STRIP, first=True)


def _blocks_of(size: int, length: int, step: int) -> Iterator[tuple[int, int, int]]:
    """(start, length, number) of the blocks that begin at 0, step, ... before `size`.

    The last block may be shorter, and is then separate.
    """
    many = max(0, size - length + step) // step
    if many:
        yield 0, length, many
    if many * step < size:
        yield many * step, size - many * step, 1


def _moved(x: slice, by: int) -> slice:
    return slice(x.start + by, x.stop + by)


def _joined(ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Ranges that do not overlap. Ranges that touch become one; empty ranges are left out."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if start < stop:
            joined.append(
                (joined.pop()[0], stop) if joined and joined[-1][1] == start else (start, stop)
            )
    yield from joined


def _split(start: int, stop: int, size: int) -> Iterator[slice]:
    return (slice(c, min(c + size, stop)) for c in range(start, stop, size))
