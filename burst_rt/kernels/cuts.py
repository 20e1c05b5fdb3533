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

A window (a band) is left whole, for `bands.py`, or is done by the fused kernel in strips of a few
rows, under a mask.

Stairs are a triangle whose small triangles are squares, without an edge to hide.

Nothing is computed here; all is numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from burst_rt.kernels.base import Tile
from burst_rt.planning.masks import Piece, Relation

__all__ = ["STRIP", "STRIP_COLUMNS", "Cut", "PartSize", "parts_of", "parts_under_the_mask"]

# The relation of the mask to some rows and columns of a tile.
_Relation: TypeAlias = Callable[[slice, slice], Relation]

# Number of rows of a strip: as few as the fused kernel takes at once, so that little is computed
# outside the band.
STRIP = 32
# Maximum number of columns of all strips of a call.
STRIP_COLUMNS = 16384


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


class Cut(NamedTuple):
    """One call of the fused kernel, a block of the tile or several alike along a diagonal; or a
    band.
    """

    rows: slice  # rows of the tile that the first block has
    columns: slice  # columns of the tile that the first block has
    triangle: bool = False  # whether row i sees only the columns j <= i
    upper: bool = False  # whether row i sees only the columns j >= i
    band: bool = False  # whether row i sees only the columns i to i + columns - rows
    piece: Piece | None = None  # the piece whose mask hides cells, if there is one
    num_blocks: int = 1
    step: int = 0  # rows, and columns, from one block to the next
    first: bool = False  # whether it comes before any other cut of its rows

    @property
    def overlaps(self) -> bool:
        """Whether blocks share columns."""
        return self.num_blocks > 1 and self.columns.stop - self.columns.start > self.step

    def apart(self) -> Iterator[Cut]:
        """Each block by itself."""
        for number in range(self.num_blocks):
            rows, columns = (_moved(x, number * self.step) for x in (self.rows, self.columns))
            yield self._replace(rows=rows, columns=columns, num_blocks=1, step=0)

    def alone(self) -> Piece:
        """The first block as a piece of the tile."""
        (a, b), (c, d) = ((x.start, x.stop) for x in (self.rows, self.columns))
        return Piece(a, b, c, d, self.triangle, self.piece is not None, 0, self.upper, self.band)


@lru_cache(maxsize=64)
def parts_of(
    pieces: tuple[Piece, ...], part: PartSize, together: bool
) -> tuple[tuple[slice, tuple[Cut, ...]], ...]:
    """The pieces of a tile in runs of rows of bounded size, each with its cuts.

    pieces: none of them under the mask. together: whether a cut may have several blocks. These are
    batch rows of its call, so a tensor that already has batch rows cannot have them. The parts are
    kept, for calls that come again.
    """
    found = _parts(pieces, part, together, None)
    return tuple((rows, tuple(cuts)) for rows, cuts in found)


def parts_under_the_mask(
    tile: Tile, part: PartSize, together: bool
) -> Iterator[tuple[slice, Iterator[Cut]]]:
    """The cuts that `parts_of` returns, for a tile that has pieces under the mask."""
    return _parts(tile.pieces, part, together, tile.relation)


def _parts(
    all_pieces: tuple[Piece, ...], part: PartSize, together: bool, relation: _Relation | None
) -> Iterator[tuple[slice, Iterator[Cut]]]:
    edges = sorted({edge for piece in all_pieces for edge in (piece.q_start, piece.q_stop)})
    pieces: list[Piece] = []
    to_come = deque(sorted(all_pieces, key=itemgetter(0)))  # sorted by first row
    for top, bottom in pairwise(edges):
        pieces = [piece for piece in pieces if bottom <= piece.q_stop]
        while to_come and to_come[0].q_start == top:
            pieces.append(to_come.popleft())
        q_len = part.q_len
        for piece in pieces:  # whole levels
            q_len -= q_len % piece.stairs if 0 < piece.stairs < q_len else 0
        for a in range(top, bottom, q_len) if pieces else ():
            rows = slice(a, min(a + q_len, bottom))
            cuts = _cuts(relation, pieces, rows, part)
            yield rows, cuts if together else (one for cut in cuts for one in cut.apart())


def _cuts(
    relation: _Relation | None, pieces: list[Piece], rows: slice, part: PartSize
) -> Iterator[Cut]:
    """The cuts for some rows that are all in every piece.

    Full rectangles come first, joined where they touch.
    """
    full: list[tuple[int, int]] = []
    rest: list[Iterator[Cut]] = []  # each begins with cuts that together have all rows once
    for piece in pieces:
        if piece.masked:
            assert relation is not None
            for columns in _split(piece.kv_start, piece.kv_stop, part.kv_len):
                seen = relation(rows, columns)
                if seen is Relation.FULL:
                    full.append((columns.start, columns.stop))
                elif seen is Relation.PARTIAL:
                    rest.append(iter([Cut(rows, columns, piece=piece, first=True)]))
            continue
        # The column at which the diagonal of a triangle, or of a band, enters these rows.
        left = min(piece.kv_start + rows.start - piece.q_start, piece.kv_stop)
        if piece.band:
            width = piece.kv_stop - piece.kv_start - (piece.q_stop - piece.q_start) + 1
            rest.append(_band(rows, slice(left, left + width), part))
            continue
        if piece.stairs:
            first, cuts = _stairs(rows, piece)
            full.append((piece.kv_start, first))
            rest.append(cuts)
            continue
        right = min(left + rows.stop - rows.start, piece.kv_stop)
        if piece.diagonal:
            full.append((piece.kv_start, left))
        elif piece.upper:
            full.append((right, piece.kv_stop))
        else:
            full.append((piece.kv_start, piece.kv_stop))
        if left < right and (piece.diagonal or piece.upper):
            columns = slice(left, right)
            cut = Cut(rows, columns, triangle=piece.diagonal, upper=piece.upper, first=True)
            whole = piece.diagonal and right - left > part.largest
            rest.append(iter([cut]) if whole else _taken_apart(cut, part.edge, right - left))
    columns_of = (x for touching in _joined(full) for x in _split(*touching, part.kv_len))
    first = True
    for cuts in (*(iter([Cut(rows, columns, first=True)]) for columns in columns_of), *rest):
        for cut in cuts:
            yield cut._replace(first=first and cut.first)
        first = False


def _stairs(rows: slice, piece: Piece) -> tuple[int, Iterator[Cut]]:
    """Some rows of stairs: the column up to which all of them see, and what they see beyond it."""
    size, at = piece.stairs, rows.start - piece.q_start
    level = at // size * size
    first = min(piece.kv_start + level + size, piece.kv_stop)
    height = rows.stop - rows.start
    if level < at or height % size:
        below = (x for x in piece.levels() if rows.start < x.q_stop and x.q_start < rows.stop)
        levels = ((max(x.q_start, rows.start), min(x.q_stop, rows.stop), x.kv_stop) for x in below)
        return first, (Cut(slice(a, b), slice(first, c)) for a, b, c in levels if first < c)
    # The levels are whole: the first one has nothing left, and the others are stairs again.
    above = slice(rows.start + size, rows.stop), slice(first, first + height - size)
    cut = Cut(*above, triangle=True)
    return first, _taken_apart(cut, size, height, whole=True) if size < height else iter(())


def _taken_apart(cut: Cut, edge: int, most: int, *, whole: bool = False) -> Iterator[Cut]:
    """A triangle as small ones and the squares between them that have fewer than `most` rows.

    whole: whether the small ones are squares, too: stairs.
    """
    rows, columns = cut.rows, cut.columns
    size = columns.stop - columns.start
    small = cut._replace(triangle=False) if whole else cut
    if not 0 < edge < size:
        yield small
        return
    if rows.start + size < rows.stop:  # below a triangle of more rows than columns
        yield Cut(slice(rows.start + size, rows.stop), columns, first=True)

    def blocks(
        like: Cut, at: tuple[int, int], lengths: tuple[int, int], many: int, step: int
    ) -> Cut:
        (a, c), (q_len, kv_len) = at, lengths
        a, c = a + rows.start, c + columns.start
        return like._replace(
            rows=slice(a, a + q_len), columns=slice(c, c + kv_len), num_blocks=many, step=step
        )

    for start, length, many in _blocks_of(size, edge, edge):
        yield blocks(small, (start, start), (length, length), many, edge)
    square = Cut(rows, columns)
    while edge < min(size, most):
        for start, length, many in _blocks_of(size - edge, edge, 2 * edge):
            low = ((start + edge, start), (length, edge))
            at, lengths = low if cut.triangle else (x[::-1] for x in low)
            yield blocks(square, at, lengths, many, 2 * edge)
        edge *= 2


def _band(rows: slice, window: slice, part: PartSize) -> Iterator[Cut]:
    """A band. window: what its first row sees."""
    width, num_rows = window.stop - window.start, rows.stop - rows.start
    if not part.strips:
        yield Cut(rows, slice(window.start, window.stop - 1 + num_rows), band=True, first=True)
        return
    most = max(1, STRIP_COLUMNS // (width + STRIP))  # strips in a call
    for start, length, many in _blocks_of(num_rows, STRIP, STRIP):
        for number in range(0, many, most):
            on = start + number * STRIP
            some = _moved(slice(0, length), rows.start + on)
            columns = _moved(slice(0, width + length - 1), window.start + on)
            count = min(most, many - number)
            yield Cut(some, columns, band=True, num_blocks=count, step=STRIP, first=True)


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
