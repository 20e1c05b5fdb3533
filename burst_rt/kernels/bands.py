"""Bands (what a window leaves of a tile) on a CPU: strips of a few rows, by matrix products.

torch's fused CPU attention computes all cells of a block, and is fast where a block has many rows.
A block of many rows of a band has many hidden cells. Therefore a wide band is done here, in strips
of a few rows (a narrow one by the fused kernel, see `cpu_calls.py`). Each strip has the columns
that its rows see; in its two corners cells are hidden:

    o o o l
    u o o o      a strip of 2 rows of a band with 3 keys a row: u and l are its corners

A strip's scores are kept transposed, `[columns, rows]`. Every product then has a long side, and the
operand that the BLAS library copies is the small one. A kv head has the rows of all its query
heads, one head's after another. Some strips are done at once, as the batch of a product.

A head's keys are copied to lie side by side, and so are the sums of their gradients. In a tensor of
many heads a head's rows lie far apart, at distances for which the processor's cache has few places.

torch's exp takes a hundred times as long for results that are subnormal or 0 as for others; exp2
takes longer for subnormal ones alone, ten times (torch 2.13, with MKL). Scores get their factor
log2(e) only after lse has been taken from them: then the largest probability of a row that sees one
key well is exactly 1.

How many strips are done at once depends on torch's number of threads, and so may the last bits of
results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import product
from math import e, log2, prod
from typing import NamedTuple

import torch

from burst_rt.kernels.base import QKV, Gradients, State, Upstream, fold, sum_dtype
from burst_rt.kernels.cpu_calls import KernelCall
from burst_rt.planning.masks import WIDEST_BAND
from burst_rt.planning.problem import TileShape

__all__ = ["backward_of_band", "forward_of_band", "scratch_of_band"]

# Number of rows of strips that are done at once, for each thread, over all query heads: with more,
# their scores leave the cache; with fewer, torch is called more often.
_ROWS = 128
# Number of rows of a strip over all query heads, and minimum number of rows of one head. More rows
# have larger corners; products with fewer are slower.
_STRIP_ROWS, _FEWEST = 32, 16
_LOG2_E = log2(e)
# Maximum number of numbers a row (factors and the like) that adding a band's result to a state
# takes.
_OF_FOLD = 6


class _Memory:
    """Memory that one head's strips take after another's. Allocating it again can take as long as
    computing in it.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._kept: dict[str, torch.Tensor] = {}

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """A tensor of a shape. It holds anything, and the next one of the name takes its memory."""
        size = prod(shape)
        kept = self._kept.get(name)
        if kept is None or kept.numel() < size:
            kept = self._kept[name] = torch.empty(size, dtype=self._dtype, device="cpu")
        return kept[:size].view(shape)


class _Strips(NamedTuple):
    """Strips of equal length, one below the other, of one kv head of one batch row.

    Some of them are done at once, then the next ones: a batch of strips.
    """

    batch_row: int
    rows: slice  # rows of the tile
    columns: slice  # columns of the tile
    kv_head: int
    group: int  # its query heads
    length: int  # rows of a strip
    width: int  # columns of a strip
    at_once: int  # strips of a batch

    @property
    def heads(self) -> slice:
        """The query heads."""
        return slice(self.kv_head * self.group, (self.kv_head + 1) * self.group)

    def tokens_of(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, H, D] -> [1, rows, heads, D]: a view."""
        return x[self.batch_row, None, self.rows, self.heads]

    def rows_of(self, x: torch.Tensor) -> torch.Tensor:
        """[B, H, S] -> [1, heads, rows]: a view."""
        return x[self.batch_row, None, self.heads, self.rows]

    def keys_of(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, kv heads, D] -> [columns, D]: a view."""
        return x[self.batch_row, self.columns, self.kv_head]

    def packed_keys(self, x: torch.Tensor, memory: _Memory, name: str) -> torch.Tensor:
        """[B, S, kv heads, D] -> [columns, D]: a copy, in the memory's type."""
        x = self.keys_of(x)
        return memory.take(name, *x.shape).copy_(x)

    def tokens(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[1, rows, heads, D] -> [strips, heads, rows of a strip, D], a view for each batch."""
        x = x[0].unflatten(0, (-1, self.at_once, self.length))
        return x.transpose(2, 3).unbind()

    def packed_rows(self, x: torch.Tensor) -> torch.Tensor:
        """[B, H, S] -> [batches, strips, 1, rows of a strip]: a copy."""
        x = self.rows_of(x)[0].unflatten(1, (-1, self.at_once, self.length)).permute(1, 2, 0, 3)
        return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x).flatten(2).unsqueeze(2)

    def unpacked_rows(self, x: torch.Tensor) -> torch.Tensor:
        """The reverse of `packed_rows`: [1, heads, rows]."""
        x = x.squeeze(2).unflatten(2, (self.group, -1)).permute(2, 0, 1, 3)
        return x.flatten(1).unsqueeze(0)

    def keys(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[columns, D] -> [strips, columns of a strip, D], a view for each batch.

        Strips share columns.
        """
        x = x.unfold(0, self.width, self.length).transpose(1, 2)
        x = x.unflatten(0, (-1, self.at_once))
        return x.unbind()

    def add_keys(self, total: torch.Tensor | None, x: torch.Tensor | None) -> None:
        """Adds [columns, D] to [B, S, kv heads, D], where these are wanted."""
        if total is not None and x is not None:
            self.keys_of(total).add_(x)

    def of_rows(self, memory: _Memory, name: str, channels: int) -> torch.Tensor:
        """Memory for the rows of a batch: [strips, heads, rows of a strip, channels]."""
        return memory.take(name, self.at_once, self.group, self.length, channels)

    def scores(self, memory: _Memory, name: str) -> torch.Tensor:
        """Memory for the scores of a batch: [strips, columns of a strip, rows of a strip]."""
        return memory.take(name, self.at_once, self.width, self.group * self.length)

    def corners(self, scores: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        """Views of scores, each with the terms to add to it: -inf outside the band."""
        first, last = (_corner(self.length, self.group, x, scores.dtype) for x in (True, False))
        length = self.length
        return (scores[:, :length], first), (scores[:, self.width - length :], last)


def forward_of_band(
    qkv: QKV, scale: float, band: KernelCall, state: State, progress: Callable[[], None]
) -> None:
    """Folds a band into the rows of the state that it covers. Takes at most `scratch_of_band`.

    progress: called now and then.
    """
    memory = _Memory(state.acc.dtype)
    for strips in _strips(qkv, band):
        _forward(strips, memory, qkv, scale, state, first=band.first)
        progress()


def backward_of_band(
    qkv: QKV,
    upstream: Upstream,
    scale: float,
    band: KernelCall,
    sums: Gradients,
    progress: Callable[[], None],
) -> None:
    """Adds the gradients of a band to the sums. Takes at most `scratch_of_band`.

    progress: called now and then.
    """
    memory = _Memory(upstream.lse.dtype)
    for strips in _strips(qkv, band):
        _backward(strips, memory, qkv, upstream, scale, sums)
        progress()


# Rows are copied to where the batch before had its own: there the cache has them.
def _forward(
    strips: _Strips, memory: _Memory, qkv: QKV, scale: float, state: State, *, first: bool
) -> None:
    sums = state._replace(
        acc=strips.tokens_of(state.acc), m=strips.rows_of(state.m), l=strips.rows_of(state.l)
    )
    out = sums.acc if first else torch.empty_like(sums.acc)
    q = strips.of_rows(memory, "q", qkv.q.shape[3])
    acc = strips.of_rows(memory, "acc", out.shape[3])
    q_rows, acc_rows = q.flatten(1, 2).mT, acc.flatten(1, 2)
    s = strips.scores(memory, "s")
    corners = strips.corners(s)
    k, v = strips.packed_keys(qkv.k, memory, "k"), strips.packed_keys(qkv.v, memory, "v")
    keys, values = strips.keys(k), strips.keys(v)
    queries, outs = strips.tokens(strips.tokens_of(qkv.q)), strips.tokens(out)
    m, l = out.new_empty(2, len(outs), s.shape[0], 1, s.shape[2])  # noqa: E741
    each = (queries, keys, values, outs, m.unbind(), l.unbind())
    for some_q, some_k, some_v, some_out, top, total in zip(*each, strict=True):
        q.copy_(some_q).mul_(scale)
        _scores_of(some_k, q_rows, s, corners)
        torch.amax(s, 1, keepdim=True, out=top)
        p = s.sub_(top).mul_(_LOG2_E).exp2_()
        torch.sum(p, 1, keepdim=True, out=total)
        torch.bmm(p.mT, some_v, out=acc_rows)
        torch.div(acc, total.view(*acc.shape[:3], 1), out=some_out)
    lse = strips.unpacked_rows(m.add_(l.log_()))
    if first:
        sums.m.copy_(lse)
        sums.l.copy_(sums.m > -torch.inf)
    else:
        fold(out, lse, sums, slice(0, out.shape[1]))


def _backward(
    strips: _Strips,
    memory: _Memory,
    qkv: QKV,
    upstream: Upstream,
    scale: float,
    sums: Gradients,
) -> None:
    lse, delta = strips.packed_rows(upstream.lse), strips.packed_rows(upstream.delta)
    q, dq = (strips.of_rows(memory, name, qkv.q.shape[3]) for name in ("q", "dq"))
    dout = strips.of_rows(memory, "dout", qkv.v.shape[3])
    q_rows, dq_rows, dout_rows = (x.flatten(1, 2) for x in (q, dq, dout))
    s, ds = strips.scores(memory, "s"), strips.scores(memory, "ds")
    corners = strips.corners(s)
    k, v = strips.packed_keys(qkv.k, memory, "k"), strips.packed_keys(qkv.v, memory, "v")
    dk = None if sums.dk is None else memory.take("dk", *k.shape).zero_()
    dv = None if sums.dv is None else memory.take("dv", *v.shape).zero_()
    keys, values = strips.keys(k), strips.keys(v)
    nothing = (None,) * len(keys)
    dks, dvs = (nothing if x is None else strips.keys(x) for x in (dk, dv))
    dqs = nothing if sums.dq is None else strips.tokens(strips.tokens_of(sums.dq))
    queries, douts = (strips.tokens(strips.tokens_of(x)) for x in (qkv.q, upstream.dout))
    rows = (queries, douts, lse.unbind(), delta.unbind())
    for (
        some_q, some_dout, some_lse, some_delta, some_k, some_v, some_dq, some_dk, some_dv,
    ) in zip(*rows, keys, values, dqs, dks, dvs, strict=True):  # fmt: skip
        q.copy_(some_q).mul_(scale)
        dout.copy_(some_dout)
        _scores_of(some_k, q_rows.mT, s, corners)
        p = s.sub_(some_lse).mul_(_LOG2_E).exp2_()
        if some_dv is not None:
            _add_products(some_dv, p, dout_rows)
        torch.bmm(some_v, dout_rows.mT, out=ds)
        ds.sub_(some_delta).mul_(p)
        if some_dk is not None:
            _add_products(some_dk, ds, q_rows)
        if some_dq is not None:
            torch.bmm(ds.mT, some_k, out=dq_rows)
            some_dq.add_(dq, alpha=scale)
    strips.add_keys(sums.dk, dk)
    strips.add_keys(sums.dv, dv)


def _add_products(sums: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Adds left @ right to sums, strip by strip: strips share rows of sums."""
    for total, a, b in zip(sums.unbind(), left.unbind(), right.unbind(), strict=True):
        total.addmm_(a, b)


def scratch_of_band(forward: bool, dtype: torch.dtype, tile: TileShape, most_rows: int) -> int:
    """The most memory in bytes that a band takes in a tile of a shape.

    most_rows: of the tile, in one band.
    """
    group = tile.num_heads // tile.num_kv_heads
    rows = min(tile.q_len, most_rows)
    length, at_once = _lengths(group)
    columns = min(tile.kv_len, rows + WIDEST_BAND) * tile.head_dim
    scores = min(tile.kv_len, WIDEST_BAND + length) * group * length * at_once
    batch = group * length * at_once * tile.head_dim
    of_rows = rows * group * (2 + 2 * _OF_FOLD)
    numbers = of_rows + batch * 3 + 4 * group * length**2
    if forward:
        numbers += columns * 2 + scores + rows * group * tile.head_dim
    else:
        numbers += columns * 4 + scores * 2
    return numbers * sum_dtype(dtype).itemsize


def _strips(qkv: QKV, band: KernelCall) -> Iterator[_Strips]:
    """A band in batches of strips; the last batch may have fewer, and the last strip be shorter."""
    batch, _, num_heads, _ = qkv.q.shape
    num_kv_heads = qkv.k.shape[2]
    group = num_heads // num_kv_heads
    num_rows, num_columns = (x.stop - x.start for x in (band.rows, band.columns))
    seen = num_columns - num_rows + 1  # columns, by a row
    length, at_once = _lengths(group)
    batches = num_rows - num_rows % (length * at_once)
    whole = num_rows - num_rows % length
    runs = (
        (0, batches, length, at_once),
        (batches, whole, length, (whole - batches) // length),
        (whole, num_rows, num_rows - whole, 1),
    )
    for batch_row, kv_head, (first, stop, strip_len, many) in product(
        range(batch), range(num_kv_heads), runs
    ):
        if first < stop:
            yield _Strips(
                batch_row=batch_row,
                rows=slice(band.rows.start + first, band.rows.start + stop),
                columns=slice(band.columns.start + first, band.columns.start + stop + seen - 1),
                kv_head=kv_head,
                group=group,
                length=strip_len,
                width=strip_len + seen - 1,
                at_once=many,
            )


def _lengths(group: int) -> tuple[int, int]:
    """Number of rows of a strip, and number of strips of a batch."""
    length = max(_STRIP_ROWS // group, _FEWEST)
    return length, max(1, _ROWS * torch.get_num_threads() // (length * group))


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
    """The terms that hide cells of a corner `[columns, rows]`: 0, or -inf outside the band.

    first: whether the corner has the strip's first columns, which row i sees from the column i on;
    else it has the last ones, which row i sees up to the column i.
    """
    row = torch.arange(length, device="cpu")
    column = row[:, None]
    hidden = column < row if first else column > row
    zeros = torch.zeros(length, length, dtype=dtype, device="cpu")
    return zeros.masked_fill_(hidden, -torch.inf).repeat(1, group)
