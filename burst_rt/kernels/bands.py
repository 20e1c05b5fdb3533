"""Bands (what a window leaves of a tile) on a CPU, by matrix products.

torch's fused CPU attention computes all cells of a block, and is fast where a block has many rows.
A block of many rows of a band has many hidden cells. So a band is done here, in strips of a few
rows. Each strip has the columns that its rows see; in its two corners cells are hidden:

    o o o l
    u o o o      a strip of 2 rows of a band with 3 keys a row: u and l are its corners

A strip's scores are kept transposed, `[kv heads, columns, rows]`. Every product then has a long
side, and the operand that the BLAS library copies is the small one. A kv head has the rows of all
its query heads, one head's after another. The products add to dk and dv where these are.

exp2 takes as long for a tiny result as for any other; torch's exp takes two hundred times as long
for a subnormal one (torch 2.13, with MKL). Scores get their factor log2(e) only after lse has been
taken from them: then the largest probability of a row that sees one key well is exactly 1.

How many rows a strip has depends on torch's number of threads, and so do the results' last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import product
from math import e, log2
from typing import NamedTuple

import torch

from burst_rt.kernels.base import QKV, Gradients, State, Upstream, fold, sum_dtype
from burst_rt.kernels.cuts import Cut
from burst_rt.planning.masks import WIDEST_BAND
from burst_rt.planning.problem import TileShape

__all__ = ["backward_of_band", "forward_of_band", "scratch_of_band"]

# Rows of a strip for each thread, of all heads together, where a head then has neither too few nor
# too many. More have larger corners; fewer make for more calls of torch.
_ROWS = 128
# Rows of a strip of one head: the fewest and the most.
_FEWEST, _MOST = 16, 256
# kv heads of a strip, for each thread: the scores of more leave the cache.
_KV_HEADS = 2
_LOG2_E = log2(e)
# Numbers of each row that adding a band's result to a state takes at most: factors, and the like.
_OF_FOLD = 6


class _Strips(NamedTuple):
    """Strips of equal length, one below the other, of one batch row and some heads."""

    batch_row: int
    rows: slice  # of the tile
    columns: slice  # of the tile
    heads: slice
    kv_heads: slice
    group: int  # query heads of a kv head
    length: int  # rows of a strip
    width: int  # columns of a strip

    def tokens_of(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, H, D] -> [1, rows, heads, D]: a view."""
        return x[self.batch_row, None, self.rows, self.heads]

    def rows_of(self, x: torch.Tensor) -> torch.Tensor:
        """[B, H, S] -> [1, heads, rows]: a view."""
        return x[self.batch_row, None, self.heads, self.rows]

    def packed(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[B, S, H, D] -> [strips, kv heads, rows of a strip, D] in a type: a copy."""
        x = self.tokens_of(x)[0].unflatten(0, (-1, self.length)).unflatten(2, (-1, self.group))
        x = x.permute(0, 2, 3, 1, 4)
        return torch.empty(x.shape, dtype=dtype, device=x.device).copy_(x).flatten(2, 3)

    def packed_rows(self, x: torch.Tensor) -> torch.Tensor:
        """[B, H, S] -> [strips, kv heads, 1, rows of a strip]: a copy."""
        x = self.rows_of(x)[0].unflatten(0, (-1, self.group)).unflatten(2, (-1, self.length))
        x = x.permute(2, 0, 1, 3)
        return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x).flatten(2).unsqueeze(2)

    def unpacked(self, x: torch.Tensor) -> torch.Tensor:
        """The reverse of `packed`: [1, rows, heads, D]."""
        x = x.unflatten(2, (self.group, -1)).permute(0, 3, 1, 2, 4)
        return x.flatten(2, 3).flatten(0, 1).unsqueeze(0)

    def unpacked_rows(self, x: torch.Tensor) -> torch.Tensor:
        """The reverse of `packed_rows`: [1, heads, rows]."""
        x = x.squeeze(2).unflatten(2, (self.group, -1)).permute(1, 2, 0, 3)
        return x.flatten(0, 1).flatten(1).unsqueeze(0)

    def keys(self, x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """[B, S, kv heads, D] -> [kv heads, columns of a strip, D] in a type, for each strip.

        Views of x where x has that type. Strips share columns.
        """
        x = x[self.batch_row, self.columns, self.kv_heads].to(dtype).transpose(0, 1)
        return x.unfold(1, self.width, self.length).mT.unbind(1)

    def scores(self, q: torch.Tensor) -> torch.Tensor:
        """Memory for a strip's scores: [kv heads, columns of a strip, rows of a strip]."""
        return q.new_empty(q.shape[1], self.width, q.shape[2])

    def corners(self, scores: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        """Views of scores, each with what is to be added to it: -inf beside the band."""
        first, last = (_corner(self.length, self.group, x, scores.dtype) for x in (True, False))
        length = self.length
        return (scores[:, :length], first), (scores[:, self.width - length :], last)


def forward_of_band(
    qkv: QKV, scale: float, cut: Cut, state: State, progress: Callable[[], None]
) -> None:
    """Folds a band into the rows of the state that it covers. Takes at most `scratch_of_band`.

    progress: called now and then.
    """
    for strips in _strips(qkv, cut):
        _forward(strips, qkv, scale, state, first=cut.first)
        progress()


def backward_of_band(
    qkv: QKV,
    upstream: Upstream,
    scale: float,
    cut: Cut,
    sums: Gradients,
    progress: Callable[[], None],
) -> None:
    """Adds the gradients of a band to the sums. Takes at most `scratch_of_band`.

    progress: called now and then.
    """
    for strips in _strips(qkv, cut):
        _backward(strips, qkv, upstream, scale, sums)
        progress()


# Some strips are a function of their own, so that their memory is free before others take theirs.
def _forward(strips: _Strips, qkv: QKV, scale: float, state: State, *, first: bool) -> None:
    dtype = state.acc.dtype
    q = strips.packed(qkv.q, dtype).mul_(scale)
    acc = q.new_empty(*q.shape[:3], qkv.v.shape[3])
    m, l = (q.new_empty(*q.shape[:2], 1, q.shape[2]) for _ in range(2))  # noqa: E741
    s = strips.scores(q)
    corners = strips.corners(s)
    keys, values = strips.keys(qkv.k, dtype), strips.keys(qkv.v, dtype)
    each = (q.mT.unbind(), keys, values, acc.unbind(), m.unbind(), l.unbind())
    for some_q, some_k, some_v, some_acc, top, total in zip(*each, strict=True):
        _scores_of(some_k, some_q, s, corners)
        torch.amax(s, 1, keepdim=True, out=top)
        p = s.sub_(top).mul_(_LOG2_E).exp2_()
        torch.sum(p, 1, keepdim=True, out=total)
        torch.bmm(p.mT, some_v, out=some_acc)
    out, lse = acc.div_(l.mT), m.add_(l.log_())
    here = state._replace(
        acc=strips.tokens_of(state.acc), m=strips.rows_of(state.m), l=strips.rows_of(state.l)
    )
    rows = slice(0, here.acc.shape[1])
    fold(strips.unpacked(out), strips.unpacked_rows(lse), here, rows, first=first)


def _backward(strips: _Strips, qkv: QKV, upstream: Upstream, scale: float, sums: Gradients) -> None:
    dtype = upstream.lse.dtype
    q, dout = strips.packed(qkv.q, dtype).mul_(scale), strips.packed(upstream.dout, dtype)
    lse, delta = strips.packed_rows(upstream.lse), strips.packed_rows(upstream.delta)
    keys, values = strips.keys(qkv.k, dtype), strips.keys(qkv.v, dtype)
    no_sums = (None,) * len(keys)
    dk, dv = (no_sums if x is None else strips.keys(x, dtype) for x in (sums.dk, sums.dv))
    dq = None if sums.dq is None else torch.empty_like(q)
    s, ds = strips.scores(q), strips.scores(q)
    corners = strips.corners(s)
    rows = (q.unbind(), dout.unbind(), lse.unbind(), delta.unbind())
    columns = (keys, values, no_sums if dq is None else dq.unbind(), dk, dv)
    for (
        some_q, some_dout, some_lse, some_delta, some_k, some_v, some_dq, some_dk, some_dv,
    ) in zip(*rows, *columns, strict=True):  # fmt: skip
        _scores_of(some_k, some_q.mT, s, corners)
        p = s.sub_(some_lse).mul_(_LOG2_E).exp2_()
        if some_dv is not None:
            some_dv.baddbmm_(p, some_dout)
        torch.bmm(some_v, some_dout.mT, out=ds)
        ds.sub_(some_delta).mul_(p)
        if some_dk is not None:
            some_dk.baddbmm_(ds, some_q)
        if some_dq is not None:
            torch.bmm(ds.mT, some_k, out=some_dq)
    if dq is not None:
        assert sums.dq is not None
        strips.tokens_of(sums.dq).add_(strips.unpacked(dq), alpha=scale)


def scratch_of_band(forward: bool, dtype: torch.dtype, tile: TileShape, most_rows: int) -> int:
    """The most memory in bytes that a band takes in a tile of a shape.

    most_rows: of the tile, in one band.
    """
    group = tile.num_heads // tile.num_kv_heads
    rows, step = min(tile.q_len, most_rows), _kv_heads_of(tile.num_kv_heads)
    # Keys and values are cast where they are of another type.
    cast = 2 * (sum_dtype(dtype) != dtype)
    numbers = 0
    for kv_heads in {step, tile.num_kv_heads % step} - {0}:  # the last heads may be fewer
        length = _length(kv_heads, group)
        scores = min(tile.kv_len, WIDEST_BAND + length) * group * length
        of_rows = rows * group * ((3 if forward else 4) * (tile.head_dim + 1) + _OF_FOLD * forward)
        columns = min(tile.kv_len, rows + WIDEST_BAND) * tile.head_dim
        each = scores * (1 if forward else 2) + of_rows + columns * cast
        corners = 4 * group * length**2  # of the strips, and of the last one
        numbers = max(numbers, kv_heads * each + corners)
    return numbers * sum_dtype(dtype).itemsize


def _strips(qkv: QKV, cut: Cut) -> Iterator[_Strips]:
    """A band in strips of equal length; the last one may be shorter, and comes by itself."""
    batch, _, num_heads, _ = qkv.q.shape
    num_kv_heads = qkv.k.shape[2]
    group = num_heads // num_kv_heads
    step = _kv_heads_of(num_kv_heads)
    num_rows, num_columns = (x.stop - x.start for x in (cut.rows, cut.columns))
    seen = num_columns - num_rows + 1  # columns, by a row
    for batch_row, a in product(range(batch), range(0, num_kv_heads, step)):
        b = min(a + step, num_kv_heads)
        length = _length(b - a, group)
        whole = num_rows - num_rows % length
        for first, stop, some in ((0, whole, length), (whole, num_rows, num_rows - whole)):
            if first == stop:
                continue
            yield _Strips(
                batch_row=batch_row,
                rows=slice(cut.rows.start + first, cut.rows.start + stop),
                columns=slice(cut.columns.start + first, cut.columns.start + stop + seen - 1),
                heads=slice(a * group, b * group),
                kv_heads=slice(a, b),
                group=group,
                length=some,
                width=some + seen - 1,
            )


def _kv_heads_of(num_kv_heads: int) -> int:
    """How many kv heads a strip has."""
    return min(num_kv_heads, _KV_HEADS * torch.get_num_threads())


def _length(kv_heads: int, group: int) -> int:
    """How many rows of each query head a strip of so many kv heads has."""
    rows = _ROWS * torch.get_num_threads() // (kv_heads * group) // _FEWEST * _FEWEST
    return min(max(rows, _FEWEST), _MOST)


def _scores_of(
    k: torch.Tensor,
    q: torch.Tensor,
    scores: torch.Tensor,
    corners: tuple[tuple[torch.Tensor, torch.Tensor], ...],
) -> None:
    """Writes the scores of a strip."""
    torch.bmm(k, q, out=scores)
    for corner, hidden in corners:
        corner.add_(hidden)


# Strips have one length, or two where the last strip is shorter; there are two corners of each,
# kept for the next call.
@lru_cache(maxsize=8)
def _corner(length: int, group: int, first: bool, dtype: torch.dtype) -> torch.Tensor:
    """What hides cells of a corner `[columns, rows]`: 0, or -inf beside the band.

    first: of the strip's first columns, which row i sees from the column i on; else of its last
    ones, which row i sees up to the column i.
    """
    row = torch.arange(length, device="cpu")
    column = row[:, None]
    hidden = column < row if first else column > row
    zeros = torch.zeros(length, length, dtype=dtype, device="cpu")
    return zeros.masked_fill_(hidden, -torch.inf).repeat(1, group)
