"""Bands (what a window leaves of a tile) on a CPU, by matrix products.

torch's fused CPU attention computes all cells of a block, and is fast where a block has many rows.
A block of many rows of a band has many hidden cells. So a band is done here, in strips of a few
rows. Each strip has the columns that its rows see, and in two corners of it cells are hidden:

    u o o l
      u o o l      a strip of 2 rows of a band with 3 keys a row: u and l are its corners

A strip's scores are kept transposed, `[kv heads, columns, rows]`. Every product then has a long
side, and the operand that the BLAS library copies is the small one. A kv head has the rows of all
its query heads, one head's after another. The products add to dk and dv where these are.

Scores, m and lse are in units of log 2, for exp2. exp2 takes as long for a tiny result as for any
other; torch's exp takes two hundred times as long for a subnormal one (torch 2.13, with MKL).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import e, log, log2
from typing import NamedTuple

import torch

from burst_rt.kernels.base import QKV, Gradients, State, Upstream, fold, sum_dtype
from burst_rt.kernels.cuts import WIDEST_BAND, Cut
from burst_rt.planning.problem import TileShape

__all__ = ["backward_of_band", "forward_of_band", "scratch_of_band"]

# Rows of a strip for each thread, of all heads together. More have larger corners; fewer make for
# more calls of torch.
_ROWS = 128
# Rows of a strip of one head: the fewest and the most.
_FEWEST, _MOST = 16, 256
# kv heads of a strip, for each thread: the scores of more leave the cache.
_KV_HEADS = 2
_LOG2_E, _LOG_2 = log2(e), log(2)


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
        return torch.empty(x.shape, dtype=dtype).copy_(x).flatten(2, 3)

    def packed_rows(self, x: torch.Tensor) -> torch.Tensor:
        """[B, H, S] -> [strips, kv heads, 1, rows of a strip]: a copy."""
        x = self.rows_of(x)[0].unflatten(0, (-1, self.group)).unflatten(2, (-1, self.length))
        x = x.permute(2, 0, 1, 3)
        return torch.empty(x.shape, dtype=x.dtype).copy_(x).flatten(2).unsqueeze(2)

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

    def scores(self, dtype: torch.dtype) -> torch.Tensor:
        """Memory for a strip's scores: [kv heads, columns of a strip, rows of a strip]."""
        num_kv_heads = self.kv_heads.stop - self.kv_heads.start
        return torch.empty(num_kv_heads, self.width, self.group * self.length, dtype=dtype)

    def corners(self, scores: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        """Views of scores, each with what is to be added to it: -inf beside the band."""
        upper, lower = (_corner(self.length, self.group, x, scores.dtype) for x in (False, True))
        length = self.length
        return (scores[:, :length], upper), (scores[:, self.width - length :], lower)


def forward_of_band(qkv: QKV, scale: float, cut: Cut, state: State) -> None:
    """Folds a band into the rows of the state that it covers. Takes at most `scratch_of_band`."""
    dtype = state.acc.dtype
    for strips in _strips(qkv, cut):
        q = strips.packed(qkv.q, dtype).mul_(scale * _LOG2_E)
        keys, values = strips.keys(qkv.k, dtype), strips.keys(qkv.v, dtype)
        acc = q.new_empty(*q.shape[:3], qkv.v.shape[3])
        m, l = (q.new_empty(*q.shape[:2], 1, q.shape[2]) for _ in range(2))  # noqa: E741
        s = strips.scores(dtype)
        corners = strips.corners(s)
        each = (q.mT.unbind(), keys, values, acc.unbind(), m.unbind(), l.unbind())
        for some_q, some_k, some_v, some_acc, top, total in zip(*each, strict=True):
            _scores_of(some_k, some_q, s, corners)
            torch.amax(s, 1, keepdim=True, out=top)
            p = s.sub_(top).exp2_()
            torch.sum(p, 1, keepdim=True, out=total)
            torch.bmm(p.mT, some_v, out=some_acc)
        out, lse = acc.div_(l.mT), m.mul_(_LOG_2).add_(l.log_())
        here = state._replace(
            acc=strips.tokens_of(state.acc), m=strips.rows_of(state.m), l=strips.rows_of(state.l)
        )
        all_rows = slice(0, here.acc.shape[1])
        fold(strips.unpacked(out), strips.unpacked_rows(lse), here, all_rows, first=cut.first)


def backward_of_band(qkv: QKV, upstream: Upstream, scale: float, cut: Cut, sums: Gradients) -> None:
    """Adds the gradients of a band to the sums. Takes at most `scratch_of_band`."""
    dtype = upstream.lse.dtype
    for strips in _strips(qkv, cut):
        q = strips.packed(qkv.q, dtype).mul_(scale * _LOG2_E)
        dout = strips.packed(upstream.dout, dtype)
        lse = strips.packed_rows(upstream.lse).mul_(_LOG2_E)
        delta = strips.packed_rows(upstream.delta)
        keys, values = strips.keys(qkv.k, dtype), strips.keys(qkv.v, dtype)
        no_sums = (None,) * len(keys)
        dk, dv = (no_sums if x is None else strips.keys(x, dtype) for x in (sums.dk, sums.dv))
        dq = None if sums.dq is None else torch.empty_like(q)
        s, ds = strips.scores(dtype), strips.scores(dtype)
        corners = strips.corners(s)
        rows = (q.unbind(), dout.unbind(), lse.unbind(), delta.unbind())
        columns = (keys, values, no_sums if dq is None else dq.unbind(), dk, dv)
        for (
            some_q, some_dout, some_lse, some_delta, some_k, some_v, some_dq, some_dk, some_dv,
        ) in zip(*rows, *columns, strict=True):  # fmt: skip
            _scores_of(some_k, some_q.mT, s, corners)
            p = s.sub_(some_lse).exp2_()
            if some_dv is not None:
                some_dv.baddbmm_(p, some_dout)
            torch.bmm(some_v, some_dout.mT, out=ds)
            ds.sub_(some_delta).mul_(p)
            if some_dk is not None:
                some_dk.baddbmm_(ds, some_q, alpha=_LOG_2)
            if some_dq is not None:
                torch.bmm(ds.mT, some_k, out=some_dq)
        if dq is not None:
            assert sums.dq is not None
            strips.tokens_of(sums.dq).add_(strips.unpacked(dq), alpha=scale)


def scratch_of_band(forward: bool, dtype: torch.dtype, tile: TileShape, rows: int) -> int:
    """The most memory in bytes that a band of up to so many rows takes, in a tile of a shape."""
    group = tile.num_heads // tile.num_kv_heads
    kv_heads, length = _size(tile.num_kv_heads, group)
    width = min(tile.kv_len, WIDEST_BAND + length)
    scores = kv_heads * width * group * length
    of_rows = min(tile.q_len, rows) * kv_heads * group * (tile.head_dim + 1)
    # Keys and values are cast where they are of another type.
    columns = min(tile.kv_len, rows + WIDEST_BAND) * kv_heads * tile.head_dim
    cast = sum_dtype(dtype) != dtype
    numbers = scores * (1 if forward else 2) + of_rows * (3 if forward else 4) + columns * 2 * cast
    return numbers * sum_dtype(dtype).itemsize


def _strips(qkv: QKV, cut: Cut) -> Iterator[_Strips]:
    """A band in strips; those of unequal length, and of other heads, apart."""
    batch, _, num_heads, _ = qkv.q.shape
    num_kv_heads = qkv.k.shape[2]
    group = num_heads // num_kv_heads
    step, length = _size(num_kv_heads, group)
    num_rows, num_columns = (x.stop - x.start for x in (cut.rows, cut.columns))
    reach = num_columns - num_rows + 1  # columns that a row sees
    whole = num_rows - num_rows % length
    for batch_row in range(batch):
        for a in range(0, num_kv_heads, step):
            b = min(a + step, num_kv_heads)
            for first, stop, some in ((0, whole, length), (whole, num_rows, num_rows - whole)):
                if first == stop:
                    continue
                yield _Strips(
                    batch_row=batch_row,
                    rows=slice(cut.rows.start + first, cut.rows.start + stop),
                    columns=slice(cut.columns.start + first, cut.columns.start + stop + reach - 1),
                    heads=slice(a * group, b * group),
                    kv_heads=slice(a, b),
                    group=group,
                    length=some,
                    width=some + reach - 1,
                )


def _size(num_kv_heads: int, group: int) -> tuple[int, int]:
    """How many kv heads a strip has, and how many rows of each query head."""
    threads = torch.get_num_threads()
    kv_heads = min(num_kv_heads, _KV_HEADS * threads)
    rows = _ROWS * threads // (kv_heads * group) // _FEWEST * _FEWEST
    return kv_heads, min(max(rows, _FEWEST), _MOST)


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


# The strips of a call, and of most calls, are of one or two lengths.
@lru_cache(maxsize=8)
def _corner(length: int, group: int, lower: bool, dtype: torch.dtype) -> torch.Tensor:
    """What hides cells of a corner `[columns, rows]`: of a triangle on the diagonal's one side."""
    row = torch.arange(length, device="cpu")
    column = row[:, None]
    hidden = column > row if lower else column < row
    zeros = torch.zeros(length, length, dtype=dtype, device="cpu")
    return zeros.masked_fill_(hidden, -torch.inf).repeat(1, group)
