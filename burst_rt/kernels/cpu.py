"""Tiles on a CPU by torch's fused CPU attention, called in parts of bounded size.

16-bit inputs are cast to float32 part by part. Sums are then float32 whatever the input, and
torch's own 16-bit backward is several times slower on a CPU without native bfloat16.

The fused backward takes the output O and uses only rowsum(dO * O). It is given O' = dO * delta /
|dO|^2 instead: then rowsum(dO * O') = delta exactly, so that O never has to travel. Where |dO|^2 is
near overflow or underflow, O' = u * delta / (amax * |u|^2) with u = dO / amax and amax the row's
largest |dO|.

A tile of a handful of cells is done in float64 instead. Where a row sees one to three keys, its
gradients are differences of nearly equal numbers, and O' costs a rounding more than O does.

The fused kernel has no softcap: with one, parts that fit into the cache are done by matrix products
(`UntiledKernel`). ALiBi is a float mask a part. The fused kernel has one head_dim: where v has
another, the smaller tensors of a part are padded with zeros.

Two habits of the fused kernel are worked around here: it crashes on empty tensors (so it is never
called with one), and it gives a row that sees no key lse 0 instead of -inf.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from math import isqrt
from operator import itemgetter
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from burst_rt.kernels.base import (
    QKV,
    Gradients,
    Kernel,
    State,
    Tile,
    Upstream,
    Work,
    fold,
    sum_dtype,
)
from burst_rt.kernels.naive import NaiveKernel, UntiledKernel
from burst_rt.planning.masks import Piece, Relation
from burst_rt.planning.problem import TileShape

__all__ = ["CpuKernel"]

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class _Part(NamedTuple):
    """The most of a tile that one call of the fused kernel does.

    The kernel spreads heads over threads. More than one head for each thread gains nothing and lets
    transfers move on less often: with all heads at once a call can take the better part of a
    second.
    """

    q_len: int  # rows
    kv_len: int  # columns
    kv_heads: int  # for each thread


# Large enough that adding up the parts costs about one percent.
_PART = _Part(4096, 4096, 1)
# For a tile of small pieces, or under a mask, which is made as a matrix: fewer rows and columns,
# more heads.
_SMALL_PART = _Part(1024, 1024, 4)
# The most cells of a mask that are made at once, of all batch rows and heads that it tells apart.
_MOST_MASKED = 1 << 24
# Where each head has a matrix of scores or of distances of its own.
_MATRIX_PART = _Part(512, 512, 1)
# Bytes a cell while a mask is made: booleans.
_MASK_BYTES = 3
# Bytes that the fused kernel takes for itself, about: scores of 256 queries x 512 keys, twice in
# the backward.
_FUSED_BYTES = 2**20
# The most cells of a tile that is done in float64.
_HANDFUL = 16
# Between these, a norm's square is neither near overflow nor near underflow in float32, and so not
# in float64.
_TINY, _HUGE = 1e-15, 1e15

_naive, _untiled = NaiveKernel(), UntiledKernel()


class _Cut(NamedTuple):
    """One call of the fused kernel."""

    rows: slice  # of the tile
    columns: slice  # of the tile
    triangle: bool = False  # whether row i sees only the columns j <= i
    upper: bool = False  # whether row i sees only the columns j >= i
    piece: Piece | None = None  # the piece whose mask hides cells, if there is one

    def alone(self) -> Piece:
        """The call as a piece of the tile."""
        (a, b), (c, d) = ((x.start, x.stop) for x in (self.rows, self.columns))
        return Piece(a, b, c, d, self.triangle, self.piece is not None, 0, self.upper)


class CpuKernel(Kernel):
    """See `Kernel`. float64, float32, bfloat16, float16; any head_dim."""

    name = "cpu"

    def refuses(self, work: Work) -> str | None:
        """Refuses all but CPU tensors of a floating type."""
        if work.device.type != "cpu":
            return f"the cpu kernel takes CPU tensors, got {work.device}"
        if work.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            return f"the cpu kernel takes float64, float32, bfloat16 and float16, got {work.dtype}"
        return None

    def forward(self, qkv: QKV, tile: Tile, state: State) -> None:
        """See `Kernel.forward`."""
        if _is_handful(qkv):
            _naive.forward(qkv, tile, state)
            return
        if tile.first:
            state.start(tile.terms.sinks)
        part = _part_of(tile, qkv)
        for heads, kv_heads in _some_heads(qkv, part):
            some = _of_heads(qkv, heads, kv_heads)
            some_state = state._replace(
                acc=_cut(state.acc, 2, heads), m=_cut(state.m, 1, heads), l=_cut(state.l, 1, heads)
            )
            some_tile = _tile_of_heads(tile, heads)._replace(first=False, last=False)
            for _, cuts in _parts(tile, part):
                for cut in cuts:
                    if tile.terms.softcap is None:
                        _forward_part(some, some_tile, some_state, cut)
                    else:
                        _untiled.forward(
                            some, some_tile._replace(pieces=(cut.alone(),)), some_state
                        )
                    tile.progress()
        if tile.last:
            state.finish()

    def backward(self, qkv: QKV, upstream: Upstream, tile: Tile, grads: Gradients) -> None:
        """See `Kernel.backward`."""
        if _is_handful(qkv):
            _naive.backward(qkv, upstream, tile, grads)
            return
        part = _part_of(tile, qkv)
        for heads, kv_heads in _some_heads(qkv, part):
            some = _of_heads(qkv, heads, kv_heads)
            dout, (lse, delta) = (
                upstream.dout,
                (_cut(x, 1, heads) for x in (upstream.lse, upstream.delta)),
            )
            some_upstream = Upstream(_cut(dout, 2, heads), lse, delta)
            at = zip(grads, (heads, kv_heads, kv_heads), strict=True)
            sums = Gradients(*(None if x is None else _cut(x, 2, those) for x, those in at))
            some_tile = _tile_of_heads(tile, heads)
            for rows, cuts in _parts(tile, part):
                capped = tile.terms.softcap is not None
                queries = None if capped else _Queries(some.q, some_upstream, rows)
                for cut in cuts:
                    if queries is None:
                        _untiled.backward(
                            some, some_upstream, some_tile._replace(pieces=(cut.alone(),)), sums
                        )
                    else:
                        _backward_part(queries, some, some_tile, cut, sums)
                    tile.progress()

    def scratch_bytes(self, forward: bool, dtype: torch.dtype, tile: TileShape) -> int:
        """See `Kernel.scratch_bytes`. The parts' sizes bound it.

        It counts casts of the inputs, O', copies in reverse order, the fused kernel's results and
        own buffers, the mask, twice, and matrices of scores or of distances.
        """
        size = sum_dtype(dtype).itemsize
        # One channel more, which some rows need (see `_Queries`).
        channels = tile.batch * (tile.head_dim if forward else tile.head_dim + 1) * size
        q_part = kv_part = matrix = 0
        of_heads = tile.scores.softcap or tile.scores.alibi_slopes
        for part in (_MATRIX_PART,) if of_heads else (_PART, _SMALL_PART):
            kv_heads = min(tile.num_kv_heads, part.kv_heads * torch.get_num_threads())
            heads = kv_heads * (tile.num_heads // tile.num_kv_heads)
            q_part = max(q_part, min(tile.q_len, part.q_len) * heads * channels)
            kv_part = max(kv_part, min(tile.kv_len, part.kv_len) * kv_heads * channels)
            shape = tile._replace(
                num_heads=heads,
                q_len=min(tile.q_len, part.q_len),
                kv_len=min(tile.kv_len, part.kv_len),
            )
            matrix = _untiled.scratch_bytes(forward, dtype, shape) if of_heads else 0
        masked = min(tile.q_len, _SMALL_PART.q_len) * min(tile.kv_len, _SMALL_PART.kv_len)
        mask = min(masked * tile.masked, _MOST_MASKED) * (size + _MASK_BYTES)
        cast, turned = sum_dtype(dtype) != dtype, tile.flipped
        if forward:
            q_parts, kv_parts = 1 + cast + 2 * turned, 2 * (cast + turned)
        else:
            q_parts = kv_parts = 2 + 2 * cast + 4 * turned
        fused = _FUSED_BYTES if forward else 2 * _FUSED_BYTES
        return q_part * q_parts + kv_part * kv_parts + mask + matrix + fused


def _part_of(tile: Tile, qkv: QKV) -> _Part:
    if tile.terms.softcap is not None or tile.terms.alibi_slopes is not None:
        return _MATRIX_PART
    if any(piece.masked for piece in tile.pieces):
        heads = min(qkv.k.shape[2], _SMALL_PART.kv_heads * torch.get_num_threads())
        apart = tile.mask.num_apart(qkv.q.shape[0], heads * (qkv.q.shape[2] // qkv.k.shape[2]))
        side = max(1, isqrt(_MOST_MASKED // apart))
        q_len, kv_len, kv_heads = _SMALL_PART
        return _Part(min(q_len, side), min(kv_len, side), kv_heads)
    q_len = max((piece.q_stop - piece.q_start for piece in tile.pieces), default=0)
    kv_len = max((piece.kv_stop - piece.kv_start for piece in tile.pieces), default=0)
    small = q_len <= _SMALL_PART.q_len and kv_len <= _SMALL_PART.kv_len
    return _SMALL_PART if small else _PART


def _is_handful(qkv: QKV) -> bool:
    return qkv.q.shape[1] * qkv.k.shape[1] <= _HANDFUL


def _some_heads(qkv: QKV, part: _Part) -> Iterator[tuple[slice, slice]]:
    """The heads of q, and of k and v, for each call."""
    num_kv_heads, step = qkv.k.shape[2], part.kv_heads * torch.get_num_threads()
    group = qkv.q.shape[2] // num_kv_heads
    for a in range(0, num_kv_heads, step):
        b = min(a + step, num_kv_heads)
        yield slice(a * group, b * group), slice(a, b)


def _of_heads(qkv: QKV, heads: slice, kv_heads: slice) -> QKV:
    return QKV(_cut(qkv.q, 2, heads), _cut(qkv.k, 2, kv_heads), _cut(qkv.v, 2, kv_heads))


def _tile_of_heads(tile: Tile, heads: slice) -> Tile:
    """The tile for some of its query heads."""
    first_head = tile.first_head + heads.start
    return tile._replace(first_head=first_head, terms=tile.terms.of_heads(heads))


def _parts(tile: Tile, part: _Part) -> Iterator[tuple[slice, Iterator[_Cut]]]:
    """The tile in runs of rows of bounded size, each with its cuts."""
    edges = sorted({edge for piece in tile.pieces for edge in (piece.q_start, piece.q_stop)})
    pieces: list[Piece] = []
    to_come = deque(sorted(tile.pieces, key=itemgetter(0)))  # by their first row
    for top, bottom in pairwise(edges):
        pieces = [piece for piece in pieces if bottom <= piece.q_stop]
        while to_come and to_come[0].q_start == top:
            pieces.append(to_come.popleft())
        for a in range(top, bottom, part.q_len) if pieces else ():
            rows = slice(a, min(a + part.q_len, bottom))
            yield rows, _cuts(tile, pieces, rows, part.kv_len)


def _cuts(tile: Tile, pieces: list[Piece], rows: slice, kv_part: int) -> Iterator[_Cut]:
    """What some rows, all of which are in every piece, are to compute.

    Full rectangles come first, joined where they touch.
    """
    full, rest = [], []
    for piece in pieces:
        if piece.masked:
            for columns in _split(piece.kv_start, piece.kv_stop, kv_part):
                relation = tile.relation(rows, columns)
                if relation is Relation.FULL:
                    full.append((columns.start, columns.stop))
                elif relation is Relation.PARTIAL:
                    rest.append(_Cut(rows, columns, piece=piece))
            continue
        # Where a triangle crosses these rows; a triangle of so many rows and columns is left of it.
        # The triangle is not cut: the fused kernel by itself leaves out most of what is masked, and
        # the larger the triangle, the larger that share.
        left = min(piece.kv_start + rows.start - piece.q_start, piece.kv_stop)
        right = min(left + rows.stop - rows.start, piece.kv_stop)
        if piece.diagonal:
            full.append((piece.kv_start, left))
        elif piece.upper:
            full.append((right, piece.kv_stop))
        else:
            full.append((piece.kv_start, piece.kv_stop))
        if left < right and (piece.diagonal or piece.upper):
            columns = slice(left, right)
            rest.append(_Cut(rows, columns, triangle=piece.diagonal, upper=piece.upper))
    for start, stop in _joined(full):
        yield from (_Cut(rows, columns) for columns in _split(start, stop, kv_part))
    yield from rest


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


# A part is a function of its own, so that a part's memory is free before the next part takes its
# memory.
def _forward_part(qkv: QKV, tile: Tile, state: State, cut: _Cut) -> None:
    rows, columns = cut.rows, cut.columns
    wide = state.acc.dtype
    cut, seen, mask = _under_a_mask(qkv.q, tile, cut, wide)
    q = _wide(_cut(qkv.q, 1, rows), wide)
    k, v = (_wide(_cut(x, 1, columns), wide) for x in (qkv.k, qkv.v))
    head_dim = v.shape[3]
    q, k, v = _alike(q, k, v)
    if cut.upper:
        # Backwards in rows and columns, one triangle is the other.
        q, k, v = (x.flip(2) for x in (q, k, v))
    causal = cut.triangle or cut.upper
    out, lse = _forward(q, k, v, 0.0, causal, attn_mask=mask, scale=tile.scale)
    if cut.upper:
        out, lse = out.flip(2), lse.flip(2)
    if seen is not None:
        lse = lse.masked_fill(~seen.any(-1), -torch.inf)
    fold(out[..., :head_dim].transpose(1, 2), lse, state, rows)


def _under_a_mask(
    q: torch.Tensor, tile: Tile, cut: _Cut, dtype: torch.dtype
) -> tuple[_Cut, torch.Tensor | None, torch.Tensor | None]:
    """A cut as the fused kernel gets it, its cells that are seen, and the mask for its scores.

    With ALiBi, which takes a mask anyway, a triangle is in the mask and the cut is a rectangle.
    """
    rows, columns = cut.rows, cut.columns
    bias = tile.bias(rows, columns, dtype)
    if bias is None and cut.piece is None:
        return cut, None, None
    seen = tile.visible(cut.alone(), rows, columns, q)
    if bias is None:
        assert seen is not None
        return cut, seen, torch.where(seen, torch.zeros((), dtype=dtype), -torch.inf)
    if seen is not None:
        bias.masked_fill_(~seen, -torch.inf)
    return _Cut(rows, columns), seen, bias


class _Queries:
    """Some rows of the query side, in the form that the fused backward takes.

    q, dout and out (O' of the module's text) are `[batch, heads, q, d]`, lse `[batch, heads, q]`.
    first: the rows' first row in the tile. extra: whether the rows have one channel more. It is
    needed where a row of dout is 0, or nearly, and the row's delta is not (a gradient of lse
    alone).
    """

    def __init__(self, q: torch.Tensor, upstream: Upstream, rows: slice) -> None:
        wide = sum_dtype(q.dtype)
        self.first = rows.start
        self.q, self.dout = _alike(*(_wide(_cut(x, 1, rows), wide) for x in (q, upstream.dout)))
        self.lse, delta = (_cut(x, 2, rows) for x in (upstream.lse, upstream.delta))
        stand_in = _stand_in(self.dout, delta)
        self.extra = stand_in is None
        if stand_in is None:
            # The channel more is 1 in dout and delta in O', so that it carries delta whatever dout
            # is; in q, k and v it is 0.
            stand_in = pad(delta.unsqueeze(-1), (self.q.shape[3], 0))
            self.q, self.dout = pad(self.q, (0, 1)), pad(self.dout, (0, 1), value=1.0)
        self.out = stand_in


def _backward_part(queries: _Queries, qkv: QKV, tile: Tile, cut: _Cut, sums: Gradients) -> None:
    rows, columns = cut.rows, cut.columns
    here = slice(rows.start - queries.first, rows.stop - queries.first)
    wide = queries.q.dtype
    k, v = _alike(*(_wide(_cut(x, 1, columns), wide) for x in (qkv.k, qkv.v)))
    if queries.extra:
        k, v = pad(k, (0, 1)), pad(v, (0, 1))
    cut, _, mask = _under_a_mask(qkv.q, tile, cut, wide)
    sides = (queries.dout, queries.q, queries.out, queries.lse)
    dout, q, out, lse = (_cut(x, 2, here) for x in sides)
    if cut.upper:
        dout, q, k, v, out, lse = (x.flip(2) for x in (dout, q, k, v, out, lse))
    causal = cut.triangle or cut.upper
    grads = _backward(dout, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=tile.scale)
    if cut.upper:
        grads = tuple(grad.flip(2) for grad in grads)
    for total, at, grad in zip(sums, (rows, columns, columns), grads, strict=True):
        if total is not None:
            _cut(total, 1, at).add_(grad[..., : total.shape[3]].transpose(1, 2))


def _stand_in(dout: torch.Tensor, delta: torch.Tensor) -> torch.Tensor | None:
    """O' of the module's text, `[batch, heads, q, d]` like dout.

    None where a row of dout is 0, or nearly, and delta is not.
    """
    norm = torch.linalg.vector_norm(dout, dim=-1)
    least, most = torch.aminmax(norm)
    if least.item() > _TINY and most.item() < _HUGE:
        stand_in: torch.Tensor = dout * (delta / norm.square_()).unsqueeze(-1)
        return stand_in
    amax = dout.abs().amax(-1)
    u = dout / amax.clamp_min(torch.finfo(dout.dtype).tiny).unsqueeze(-1)
    weight = torch.where(delta == 0, 0.0, delta / amax / torch.linalg.vecdot(u, u))
    return u.mul_(weight.unsqueeze(-1)) if bool(torch.isfinite(weight).all()) else None


def _cut(x: torch.Tensor, dim: int, at: slice) -> torch.Tensor:
    """x[..., at, ...] by a cheaper call, and without a call where that is all of x."""
    length = at.stop - at.start
    return x if x.shape[dim] == length else x.narrow(dim, at.start, length)


def _alike(*tensors: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with as many channels as the widest; channels of 0 are added."""
    widest = max(x.shape[3] for x in tensors)
    return (x if x.shape[3] == widest else pad(x, (0, widest - x.shape[3])) for x in tensors)


def _wide(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[B, S, H, D] -> [B, H, S, D] in the sums' type; a view where x has that type."""
    return x.to(dtype).transpose(1, 2)
