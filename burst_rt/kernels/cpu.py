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
another, the smaller tensors of a part are padded with zeros. `bands.py` does bands without it.

Three habits of the fused kernel are worked around here: it crashes on empty tensors (so it is never
called with one), it gives a row that sees no key lse 0 instead of -inf, and with fewer keys than a
vector of the processor holds it takes a row of NaN for such a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from math import isqrt
from operator import itemgetter
from typing import Any

import torch
from torch.nn.functional import pad

from burst_rt.kernels.bands import backward_of_band, forward_of_band, scratch_of_band
from burst_rt.kernels.base import (
    DTYPES,
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
from burst_rt.kernels.cuts import (
    STRIP,
    STRIP_COLUMNS,
    Cut,
    PartSize,
    parts_of,
    parts_under_the_mask,
)
from burst_rt.kernels.decode import Partial, Seen, folded, lowest, parts_of_columns
from burst_rt.kernels.naive import NaiveKernel, UntiledKernel
from burst_rt.planning.masks import Piece
from burst_rt.planning.problem import TileShape

__all__ = ["CpuKernel", "cpu_capabilities"]

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


# Size of the parts of a tile, large enough that adding them up costs about one percent.
_PART = PartSize(4096, 4096, 1, edge=128, largest=1024, strips=False)
# Size of the parts of a tile of small pieces, or under a mask, which is made as a matrix: fewer
# rows and columns, more heads.
_SMALL_PART = PartSize(1024, 1024, 4, edge=128, largest=1024, strips=False)
# Maximum mean of the smaller side of a tile's pieces for which they count as small.
_SMALL_SIDE = 1536
# Rows of the largest triangle that the backward takes apart, where that gains more.
_LARGEST_BACKWARD = 1536
# Maximum number of mask cells that are made at once, over all batch rows and heads that the mask
# tells apart.
_MOST_MASKED = 1 << 24
# Size of the parts if each head has a matrix of distances of its own.
_DISTANCES_PART = PartSize(512, 512, 1)
# Approximate number of cells of all heads' matrices of scores. They fit into the cache, and the C
# library does not give their memory back to the system after each part, to get it again page by
# page.
_MATRIX_CELLS = 3 << 16
# Number of bytes a cell while a mask is made: booleans.
_MASK_BYTES = 3
# Approximate number of bytes that the fused kernel allocates: scores of 256 queries x 512 keys,
# twice in the backward.
_FUSED_BYTES = 2**20
# Minimum number of keys: the float32 numbers of the longest vectors.
_FEWEST_KEYS = 16
# Maximum number of cells of a tile that is done in float64.
_HANDFUL = 16
# Between these, a norm's square is neither near overflow nor near underflow in float32, and so not
# in float64.
_TINY, _HUGE = 1e-15, 1e15

_naive, _untiled = NaiveKernel(), UntiledKernel()


class CpuKernel(Kernel):
    """See `Kernel`. float64, float32, bfloat16, float16; any head_dim."""

    name = "cpu"

    def work_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The type that the fused kernel gets, for inputs of a type."""
        return sum_dtype(dtype)

    def refuses(self, work: Work) -> str | None:
        """Refuses all but CPU tensors of a floating type."""
        if work.device.type != "cpu":
            return f"the {self.name} kernel takes CPU tensors, got {work.device}"
        if work.dtype not in DTYPES:
            names = "float64, float32, bfloat16 and float16"
            return f"the {self.name} kernel takes {names}, got {work.dtype}"
        return None

    def forward(self, qkv: QKV, tile: Tile, state: State) -> None:
        """See `Kernel.forward`."""
        if _is_handful(qkv):
            _naive.forward(qkv, tile, state)
            return
        # Whether the first part of each row may be written where there is nothing yet.
        fresh = (
            tile.first and tile.score_options.sinks is None and tile.score_options.softcap is None
        )
        if tile.first and not (fresh and _in_every_row(tile.pieces, qkv.q.shape[1])):
            state.start(tile.score_options.sinks)
        part, dtype = self.part_of(tile, qkv, forward=True), self.work_dtype(qkv.q.dtype)
        together = qkv.q.shape[0] == 1 and part.edge > 0
        for heads, kv_heads in _some_heads(qkv, part):
            some = _of_heads(qkv, heads, kv_heads)
            some_state = state._replace(
                acc=_cut(state.acc, 2, heads), m=_cut(state.m, 1, heads), l=_cut(state.l, 1, heads)
            )
            some_tile = _tile_of_heads(tile, heads)._replace(first=False, last=False)
            for _, cuts in _parts(tile, part, together):
                for each in cuts:
                    cut = each._replace(first=each.first and fresh)
                    if tile.score_options.softcap is not None:
                        alone = some_tile._replace(pieces=(cut.alone(),))
                        _untiled.forward(some, alone, some_state)
                    elif cut.band and not part.strips:
                        forward_of_band(some, tile.scale, cut, some_state, tile.progress)
                    else:
                        _forward_part(some, some_tile, some_state, cut, dtype)
                    tile.progress()
        if tile.last:
            state.finish()

    def decode(
        self, qkv: QKV, seen: Seen, scale: float, softcap: float | None, into: Partial
    ) -> None:
        """See `Kernel.decode`. Sequences that see the same columns are done together."""
        if softcap is not None:
            super().decode(qkv, seen, scale, softcap, into)
            return
        found = seen.hulls
        if len(set(found)) == 1:
            _decode(qkv, seen, found[0], scale, into)
            return
        for row, hull in enumerate(found):
            at = slice(row, row + 1)
            _decode(QKV(*(x[at] for x in qkv)), seen.row(row), hull, scale, into.rows(at))

    def backward(self, qkv: QKV, upstream: Upstream, tile: Tile, grads: Gradients) -> None:
        """See `Kernel.backward`."""
        if _is_handful(qkv):
            _naive.backward(qkv, upstream, tile, grads)
            return
        part, dtype = self.part_of(tile, qkv, forward=False), self.work_dtype(qkv.q.dtype)
        together = qkv.q.shape[0] == 1 and part.edge > 0
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
            for rows, cuts in _parts(tile, part, together):
                queries: _Queries | None = None
                for cut in cuts:
                    if tile.score_options.softcap is not None:
                        alone = some_tile._replace(pieces=(cut.alone(),))
                        _untiled.backward(some, some_upstream, alone, sums)
                    elif cut.band and not part.strips:
                        backward_of_band(some, some_upstream, tile.scale, cut, sums, tile.progress)
                    else:
                        queries = queries or _Queries(some.q, some_upstream, rows, dtype)
                        _backward_part(queries, some, some_tile, cut, sums)
                    tile.progress()

    def part_of(self, tile: Tile, qkv: QKV, *, forward: bool) -> PartSize:
        """The most of a tile that one call of the fused kernel does."""
        part = self._size_of(tile, qkv)
        if forward or not part.edge:
            return part
        return part._replace(largest=_LARGEST_BACKWARD)

    def _size_of(self, tile: Tile, qkv: QKV) -> PartSize:
        if tile.score_options.softcap is not None:
            return _matrix_part(qkv.q.shape[0] * (qkv.q.shape[2] // qkv.k.shape[2]))
        if tile.score_options.alibi_slopes is not None:
            return _DISTANCES_PART
        if any(piece.masked for piece in tile.pieces):
            heads = min(qkv.k.shape[2], _SMALL_PART.kv_heads * torch.get_num_threads())
            apart = tile.mask.num_apart(qkv.q.shape[0], heads * (qkv.q.shape[2] // qkv.k.shape[2]))
            side = max(1, isqrt(_MOST_MASKED // apart))
            part = _SMALL_PART
            return part._replace(q_len=min(part.q_len, side), kv_len=min(part.kv_len, side))
        # Bands are taken in strips of a few rows anyway.
        sides = [
            (piece.q_stop - piece.q_start, piece.kv_stop - piece.kv_start)
            for piece in tile.pieces
            if not piece.band
        ]
        if sum(map(min, sides)) > _SMALL_SIDE * len(sides):
            return _PART
        # Where all pieces are smaller than a part, a call has more heads, and as many rows in all.
        banded = len(sides) < len(tile.pieces)
        longest = _SMALL_PART.q_len if banded else max(map(max, sides), default=_SMALL_PART.q_len)
        more = max(1, _SMALL_PART.q_len // longest)
        return _SMALL_PART._replace(kv_heads=_SMALL_PART.kv_heads * more)

    def scratch_bytes(self, forward: bool, dtype: torch.dtype, tile: TileShape) -> int:
        """See `Kernel.scratch_bytes`. The parts' sizes bound it.

        It counts casts of the inputs, O', the fused kernel's results and own buffers, the mask,
        twice, and matrices of scores or of distances; for bands, what `scratch_of_band` says.
        """
        size = sum_dtype(dtype).itemsize
        # One channel more, which some rows need (see `_Queries`).
        channels = tile.batch * (tile.head_dim if forward else tile.head_dim + 1) * size
        q_part = kv_part = matrix = 0
        of_heads = tile.scores.softcap or tile.scores.alibi_slopes
        parts = (_DISTANCES_PART,) if of_heads else (_PART, _SMALL_PART)
        if tile.scores.softcap:
            parts = (_matrix_part(tile.batch * (tile.num_heads // tile.num_kv_heads)),)
        group = tile.num_heads // tile.num_kv_heads
        strips = tile.banded and (of_heads or self.work_dtype(dtype) != sum_dtype(dtype))
        for part in parts:
            of_longest = part.kv_heads * torch.get_num_threads()
            kv_heads = min(tile.num_kv_heads, of_longest)
            # A call has few rows of many heads, or many rows of few.
            rows = min(tile.q_len * tile.num_kv_heads, part.q_len * of_longest) * group
            columns = min(tile.kv_len * tile.num_kv_heads, part.kv_len * of_longest)
            if strips:
                columns = STRIP_COLUMNS * kv_heads
            q_part = max(q_part, rows * channels)
            kv_part = max(kv_part, columns * channels)
            shape = tile._replace(
                num_heads=kv_heads * group,
                q_len=min(tile.q_len, part.q_len),
                kv_len=min(tile.kv_len, part.kv_len),
            )
            matrix = _untiled.scratch_bytes(forward, dtype, shape) if of_heads else 0
        masked = min(tile.q_len, _SMALL_PART.q_len) * min(tile.kv_len, _SMALL_PART.kv_len)
        masked = min(masked * tile.masked, _MOST_MASKED)
        if strips:
            masked = max(masked, STRIP * min(tile.kv_len, STRIP_COLUMNS))
        mask = masked * (size + _MASK_BYTES)
        cast = sum_dtype(dtype) != dtype
        q_parts, kv_parts = (1 + cast, 2 * cast) if forward else (2 + 2 * cast, 2 + 2 * cast)
        fused = _FUSED_BYTES if forward else 2 * _FUSED_BYTES
        by_fused = q_part * q_parts + kv_part * kv_parts + mask + matrix + fused
        if not tile.banded or strips:
            return by_fused
        return max(by_fused, scratch_of_band(forward, dtype, tile, _PART.q_len))


def cpu_capabilities() -> Mapping[str, Any]:  # flags, numbers, names
    """The capabilities of this CPU as torch tells them; nothing before torch 2.12."""
    found: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return found


def _matrix_part(heads: int) -> PartSize:
    """Parts for matrices of scores of this number of heads, over all batch rows."""
    side = max(128, isqrt(_MATRIX_CELLS // heads) // 64 * 64)
    return PartSize(side, side, 1)


def _is_handful(qkv: QKV) -> bool:
    return qkv.q.shape[1] * qkv.k.shape[1] <= _HANDFUL


def _in_every_row(pieces: tuple[Piece, ...], num_rows: int) -> bool:
    """Whether every row certainly has a part. A piece under the mask may turn out empty."""
    rows = 0  # that have
    for piece in sorted(pieces, key=itemgetter(0)):
        if piece.masked or piece.q_start > rows:
            return False
        rows = max(rows, piece.q_stop)
    return rows == num_rows


def _parts(tile: Tile, part: PartSize, together: bool) -> Iterable[tuple[slice, Iterable[Cut]]]:
    """The tile in runs of rows of bounded size, each with its cuts."""
    if any(piece.masked for piece in tile.pieces):
        return parts_under_the_mask(tile, part, together)
    return parts_of(tile.pieces, part, together)


def _some_heads(qkv: QKV, part: PartSize) -> Iterator[tuple[slice, slice]]:
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
    return tile._replace(first_head=first_head, score_options=tile.score_options.of_heads(heads))


# A part is a function of its own, so that a part's memory is free before the next part takes its
# memory.
def _forward_part(qkv: QKV, tile: Tile, state: State, cut: Cut, dtype: torch.dtype) -> None:
    causal, seen, mask = _hidden(qkv.q, tile, cut, state.acc.dtype)
    q = _heads_first(_blocks(qkv.q, 1, cut.rows, cut), dtype)
    k, v = (_keys(x, cut, dtype) for x in (qkv.k, qkv.v))
    head_dim = v.shape[3]
    q, k, v = _alike(q, k, v)
    out, lse = _attend(q, k, v, causal, mask, tile.scale)
    if seen is not None:
        lse = lse.masked_fill(~seen.any(-1), -torch.inf)
    some = state._replace(
        acc=_blocks(state.acc, 1, cut.rows, cut),
        m=_blocks(state.m, 2, cut.rows, cut),
        l=_blocks(state.l, 2, cut.rows, cut),
    )
    out = out[..., :head_dim].transpose(1, 2)
    fold(out, lse, some, slice(0, out.shape[1]), first=cut.first)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    mask: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out `[batch, heads, q, d]` and lse `[batch, heads, q]` of a part, by the fused kernel; of few
    keys by matrix products.
    """
    if k.shape[2] >= _FEWEST_KEYS:
        found: tuple[torch.Tensor, torch.Tensor] = _forward(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        )
        return found
    work = sum_dtype(q.dtype)
    k, v = (x.to(work).repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = (q.to(work) @ k.mT).mul_(scale)
    if causal:
        s.masked_fill_(torch.ones(s.shape[2:], dtype=torch.bool).triu_(1), -torch.inf)
    if mask is not None:
        s.add_(mask)
    top, info = s.amax(-1, keepdim=True), torch.finfo(work)
    # exp(-inf - -inf) would be NaN: such a row sees no key.
    p = s.sub_(top.clamp_min(info.min)).exp_()
    # By one product the sum of p is rounded as the sums of p * v are.
    out, total = (p @ pad(v, (0, 1), value=1.0)).split((v.shape[3], 1), -1)
    lse = (top + total.log()).squeeze(-1)
    return (out / total.clamp_min(info.tiny)).to(q.dtype), lse


def _hidden(
    q: torch.Tensor, tile: Tile, cut: Cut, dtype: torch.dtype
) -> tuple[bool, torch.Tensor | None, torch.Tensor | None]:
    """Three arguments of the fused kernel that hide cells of a cut: whether it hides them itself,
    as under a causal mask; the cells that are seen, if a row may see none; and the mask for its
    scores.

    The fused kernel knows lower triangles only. With ALiBi, which takes a mask anyway, these are
    in the mask, too.
    """
    rows, columns = cut.rows, cut.columns
    bias = tile.bias(rows, columns, dtype)
    if bias is None and cut.piece is None:
        if cut.upper or cut.band:
            lengths = rows.stop - rows.start, columns.stop - columns.start
            return False, None, _beside(*lengths, cut.upper, dtype)
        return cut.triangle, None, None
    seen = tile.visible(cut.alone(), rows, columns, q)
    if bias is None:
        assert seen is not None
        return False, seen, torch.where(seen, torch.zeros((), dtype=dtype), -torch.inf)
    if seen is not None:
        bias.masked_fill_(~seen, -torch.inf)
    return False, seen, bias


def _decode(qkv: QKV, seen: Seen, hull: tuple[int, int], scale: float, into: Partial) -> None:
    """Does `CpuKernel.decode` for sequences that see only columns within one hull."""
    (q, k, v), dtype = qkv, into.lse.dtype
    batch, heads, kv_heads = q.shape[0], q.shape[2], k.shape[2]
    sums, q = into.grouped(kv_heads), folded(q, kv_heads, dtype)
    first, last = hull
    if first == last:
        into.start()
        return
    # Columns that need not be copied are done at once.
    copied = k.dtype != dtype or k.shape[3] != v.shape[3]
    column_bytes = batch * kv_heads * 2 * max(k.shape[3], v.shape[3]) * dtype.itemsize
    whole = (range(first, last),)
    for columns in parts_of_columns(first, last, column_bytes) if copied else whole:
        at = slice(columns.start, columns.stop)
        rows, keys, values = _alike(q, *(_heads_first(_cut(x, 1, at), dtype) for x in (k, v)))
        hidden = seen.hidden(columns, q.device)
        mask = None
        if hidden is not None:
            # The rows of a kv head are the rows of its query heads, one after another.
            hidden = hidden.repeat(1, heads // kv_heads, 1).unsqueeze(1)
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
        out, lse = _attend(rows, keys, values, False, mask, scale)
        if hidden is not None:
            lse = lse.masked_fill(hidden.all(-1), lowest(lse))
        out = out[..., : v.shape[3]]
        if columns.start == first:
            sums.out.copy_(out)
            sums.lse.copy_(lse)
        else:
            sums.fold(out, lse)


# Most cuts of a window are equal.
@lru_cache(maxsize=4)
def _beside(q_len: int, kv_len: int, upper: bool, dtype: torch.dtype) -> torch.Tensor:
    """The mask `[q, kv]` of an upper triangle, or a band: -inf outside it, else 0."""
    shape = Piece(0, q_len, 0, kv_len, False, False, 0, upper, not upper)
    q, kv = (torch.arange(length, device="cpu") for length in (q_len, kv_len))
    mask = torch.zeros(q_len, kv_len, dtype=dtype, device="cpu")
    return mask.masked_fill_(~shape.shows(q[:, None], kv), -torch.inf)


class _Queries:
    """Some rows of the query side, in the form that the fused backward takes.

    q, dout and out (O' of the module's text) are `[batch, heads, q, d]`, lse `[batch, heads, q]`.
    first: the rows' first row in the tile. extra: whether the rows have one channel more. It is
    needed where a row of dout is 0, or nearly, and the row's delta is not (a gradient of lse
    alone).
    """

    def __init__(
        self, q: torch.Tensor, upstream: Upstream, rows: slice, dtype: torch.dtype
    ) -> None:
        self.first = rows.start
        self.q, self.dout = _alike(
            *(_heads_first(_cut(x, 1, rows), dtype) for x in (q, upstream.dout))
        )
        self.lse, delta = (_cut(x, 2, rows) for x in (upstream.lse, upstream.delta))
        stand_in = _stand_in(self.dout.to(delta.dtype), delta)
        self.extra = stand_in is None
        if stand_in is None:
            # The channel more is 1 in dout and delta in O', so that it carries delta whatever dout
            # is; in q, k and v it is 0.
            stand_in = pad(delta.unsqueeze(-1), (self.q.shape[3], 0))
            self.q, self.dout = pad(self.q, (0, 1)), pad(self.dout, (0, 1), value=1.0)
        self.out = stand_in.to(dtype)


def _backward_part(queries: _Queries, qkv: QKV, tile: Tile, cut: Cut, sums: Gradients) -> None:
    here = slice(cut.rows.start - queries.first, cut.rows.stop - queries.first)
    dtype = queries.q.dtype
    k, v = _alike(*(_keys(x, cut, dtype) for x in (qkv.k, qkv.v)))
    if queries.extra:
        k, v = pad(k, (0, 1)), pad(v, (0, 1))
    causal, _, mask = _hidden(qkv.q, tile, cut, queries.lse.dtype)
    sides = (queries.dout, queries.q, queries.out, queries.lse)
    dout, q, out, lse = (_blocks(x, 2, here, cut) for x in sides)
    grads = _backward(dout, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=tile.scale)
    for total, at, grad in zip(sums, (cut.rows, cut.columns, cut.columns), grads, strict=True):
        if total is None:
            continue
        grad = grad[..., : total.shape[3]].transpose(1, 2)
        if at is cut.rows or not cut.overlaps:
            _blocks(total, 1, at, cut).add_(grad)
            continue
        for one, block in zip(cut.apart(), grad.split(1), strict=True):
            _cut(total, 1, one.columns).add_(block)


def _stand_in(dout: torch.Tensor, delta: torch.Tensor) -> torch.Tensor | None:
    """O' of the module's text, `[batch, heads, q, d]` like dout.

    None where a row of dout is 0, or nearly, and delta is not.
    """
    norm = torch.linalg.vector_norm(dout, dim=-1)
    least, most = torch.aminmax(norm)
    if least.item() > _TINY and most.item() < _HUGE:
        stand_in: torch.Tensor = dout * (delta / norm.square_()).unsqueeze(-1)
        return stand_in
    # A row below the smallest normal number is as good as 0: u would not be of length 1.
    amax = dout.abs().amax(-1)
    tiny = torch.finfo(dout.dtype).tiny
    u = dout / amax.clamp_min(tiny).unsqueeze(-1)
    amax.masked_fill_(amax < tiny, 0.0)
    weight = torch.where(delta == 0, 0.0, delta / amax / torch.linalg.vecdot(u, u))
    return u.mul_(weight.unsqueeze(-1)) if bool(torch.isfinite(weight).all()) else None


def _cut(x: torch.Tensor, dim: int, at: slice) -> torch.Tensor:
    """x[..., at, ...] by a cheaper call, and without a call where that is all of x."""
    length = at.stop - at.start
    return x if x.shape[dim] == length else x.narrow(dim, at.start, length)


def _blocks(x: torch.Tensor, dim: int, at: slice, cut: Cut) -> torch.Tensor:
    """The tokens (a dimension of x) of a cut's blocks: of one block as they are, of several blocks
    each as a batch row.

    at: the tokens of the first block.
    """
    if cut.num_blocks == 1:
        return _cut(x, dim, at)
    size, strides = list(x.shape), list(x.stride())
    size[0], size[dim] = cut.num_blocks, at.stop - at.start
    strides[0] = cut.step * strides[dim]
    return x.as_strided(size, strides, x.storage_offset() + at.start * strides[dim])


def _alike(*tensors: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with as many channels as the widest; channels of 0 are added."""
    widest = max(x.shape[3] for x in tensors)
    return (x if x.shape[3] == widest else pad(x, (0, widest - x.shape[3])) for x in tensors)


def _keys(x: torch.Tensor, cut: Cut, dtype: torch.dtype) -> torch.Tensor:
    """A cut's keys or values, heads first, in a type."""
    return _heads_first(_blocks(x, 1, cut.columns, cut), dtype)


def _heads_first(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[B, S, H, D] -> [B, H, S, D] in a type; a view where x has that type."""
    return x.to(dtype).transpose(1, 2)
