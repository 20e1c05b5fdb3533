"""Tiles on a CPU by torch's fused CPU attention, called in parts of bounded size.

16-bit inputs are cast to float32 part by part. Sums are then float32 whatever the input, and
torch's own 16-bit backward is several times slower on a CPU without native bfloat16.

The fused backward takes the output O, which does not travel: it is given the O' of `stand_in.py`.

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

from collections.abc import Iterable, Iterator
from math import isqrt
from operator import itemgetter
from typing import Any

import torch
from torch.nn.functional import pad

from burst_rt.kernels.bands import backward_of_band, forward_of_band
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
from burst_rt.kernels.cells import outside
from burst_rt.kernels.cpu_calls import (
    KernelCall,
    PartSize,
    kernel_calls,
    narrow_in_strips,
    parts_under_the_mask,
)  # fmt: skip
from burst_rt.kernels.cpu_memory import (
    DISTANCES_PART,
    MOST_MASKED,
    PART,
    SMALL_PART,
    matrix_part,
    scratch_bytes,
)
from burst_rt.kernels.decode import Partial, SeenColumns, fold_heads, lowest, parts_of_columns
from burst_rt.kernels.naive import NaiveKernel, UntiledKernel, attend_few_keys
from burst_rt.kernels.stand_in import stand_in_for_out
from burst_rt.planning.masks import Piece, Shape
from burst_rt.planning.problem import TileShape

__all__ = ["CpuKernel"]

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

# Maximum mean of the smaller side of a tile's pieces for which they count as small.
_SMALL_SIDE = 1536
# Rows of the largest triangle that the backward takes apart, where that gains more.
_LARGEST_BACKWARD = 1536
# Minimum number of keys: the float32 numbers of the longest vectors.
_FEWEST_KEYS = 16
# Maximum number of cells of a tile that is done in float64.
_HANDFUL = 16

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
        fresh = _begin(state, tile, qkv.q.shape[1])
        part, dtype = self.part_of(tile, qkv, forward=True), self.work_dtype(qkv.q.dtype)
        batched = qkv.q.shape[0] == 1 and part.edge > 0
        for heads, kv_heads in _some_heads(qkv, part):
            of_heads = _of_heads(qkv, heads, kv_heads)
            sums = state._replace(
                acc=_narrow(state.acc, 2, heads),
                m=_narrow(state.m, 1, heads),
                l=_narrow(state.l, 1, heads),
            )
            head_tile = _tile_of_heads(tile, heads, first=False, last=False)
            for _, calls in _parts(tile, part, batched):
                for call in calls:
                    call = call if fresh or not call.first else call._replace(first=False)
                    if tile.score_options.softcap is not None:
                        alone = head_tile._replace(pieces=(call.first_block(),))
                        _untiled.forward(of_heads, alone, sums)
                    elif call.shape is Shape.BAND and not part.strips:
                        forward_of_band(of_heads, tile.scale, call, sums, tile.progress)
                    else:
                        _forward_part(of_heads, head_tile, sums, call, dtype)
                    tile.progress()
        if tile.last:
            state.finish()

    def decode(
        self, qkv: QKV, seen: SeenColumns, scale: float, softcap: float | None, into: Partial
    ) -> None:
        """See `Kernel.decode`. Sequences that see the same columns are done together."""
        if softcap is not None:
            super().decode(qkv, seen, scale, softcap, into)
            return
        hulls = seen.hulls
        if len(set(hulls)) == 1:
            _decode(qkv, seen, hulls[0], scale, into)
            return
        for row, hull in enumerate(hulls):
            at = slice(row, row + 1)
            _decode(QKV(*(x[at] for x in qkv)), seen.row(row), hull, scale, into.rows(at))

    def backward(self, qkv: QKV, upstream: Upstream, tile: Tile, grads: Gradients) -> None:
        """See `Kernel.backward`."""
        if _is_handful(qkv):
            _naive.backward(qkv, upstream, tile, grads)
            return
        part, dtype = self.part_of(tile, qkv, forward=False), self.work_dtype(qkv.q.dtype)
        batched = qkv.q.shape[0] == 1 and part.edge > 0
        for heads, kv_heads in _some_heads(qkv, part):
            of_heads = _of_heads(qkv, heads, kv_heads)
            rows_in = Upstream(
                _narrow(upstream.dout, 2, heads),
                _narrow(upstream.lse, 1, heads),
                _narrow(upstream.delta, 1, heads),
            )
            sides = zip(grads, (heads, kv_heads, kv_heads), strict=True)
            sums = Gradients(*(None if x is None else _narrow(x, 2, at) for x, at in sides))
            head_tile = _tile_of_heads(tile, heads)
            for rows, calls in _parts(tile, part, batched):
                queries: _Queries | None = None
                for call in calls:
                    if tile.score_options.softcap is not None:
                        alone = head_tile._replace(pieces=(call.first_block(),))
                        _untiled.backward(of_heads, rows_in, alone, sums)
                    elif call.shape is Shape.BAND and not part.strips:
                        backward_of_band(of_heads, rows_in, tile.scale, call, sums, tile.progress)
                    else:
                        queries = queries or _Queries(of_heads.q, rows_in, rows, dtype)
                        _backward_part(queries, of_heads, head_tile, call, sums)
                    tile.progress()

    def part_of(self, tile: Tile, qkv: QKV, *, forward: bool) -> PartSize:
        """The most of a tile that one call of the fused kernel does."""
        part = self._size_of(tile, qkv)
        if any(piece.shape is Shape.BAND for piece in tile.pieces):
            part = narrow_in_strips(part, tile.pieces, forward=forward)
        return part if forward or not part.edge else part._replace(largest=_LARGEST_BACKWARD)

    def _size_of(self, tile: Tile, qkv: QKV) -> PartSize:
        if tile.score_options.softcap is not None:
            return matrix_part(qkv.q.shape[0] * (qkv.q.shape[2] // qkv.k.shape[2]))
        if tile.score_options.alibi_slopes is not None:
            return DISTANCES_PART
        if any(piece.shape is Shape.MASKED for piece in tile.pieces):
            heads = min(qkv.k.shape[2], SMALL_PART.kv_heads * torch.get_num_threads())
            apart = tile.mask.num_apart(qkv.q.shape[0], heads * (qkv.q.shape[2] // qkv.k.shape[2]))
            side = max(1, isqrt(MOST_MASKED // apart))
            part = SMALL_PART
            return part._replace(q_len=min(part.q_len, side), kv_len=min(part.kv_len, side))
        # Bands are taken in strips of a few rows anyway.
        sides = [
            (piece.q_stop - piece.q_start, piece.kv_stop - piece.kv_start)
            for piece in tile.pieces
            if piece.shape is not Shape.BAND
        ]
        if sum(map(min, sides)) > _SMALL_SIDE * len(sides):
            return PART
        # Where all pieces are smaller than a part, a call has more heads, and as many rows in all.
        banded = len(sides) < len(tile.pieces)
        longest = SMALL_PART.q_len if banded else max(map(max, sides), default=SMALL_PART.q_len)
        more = max(1, SMALL_PART.q_len // longest)
        return SMALL_PART._replace(kv_heads=SMALL_PART.kv_heads * more)

    def scratch_bytes(self, forward: bool, dtype: torch.dtype, tile: TileShape) -> int:
        """See `Kernel.scratch_bytes`."""
        wide = self.work_dtype(dtype) == sum_dtype(dtype)
        return scratch_bytes(forward, dtype, tile, wide=wide)


def _is_handful(qkv: QKV) -> bool:
    return qkv.q.shape[1] * qkv.k.shape[1] <= _HANDFUL


def _begin(state: State, tile: Tile, num_rows: int) -> bool:
    """Makes the state of a first tile one to which calls can add.

    Returns whether the first call for each row may be written where there is nothing yet.
    """
    fresh = tile.first and tile.score_options.sinks is None and tile.score_options.softcap is None
    if tile.first and not (fresh and _in_every_row(tile.pieces, num_rows)):
        state.start(tile.score_options.sinks)
    return fresh


def _in_every_row(pieces: tuple[Piece, ...], num_rows: int) -> bool:
    """Whether every row certainly has a part. A piece under the mask may turn out empty."""
    rows = 0  # that have
    for piece in sorted(pieces, key=itemgetter(0)):
        if piece.shape is Shape.MASKED or piece.q_start > rows:
            return False
        rows = max(rows, piece.q_stop)
    return rows == num_rows


def _parts(
    tile: Tile, part: PartSize, batched: bool
) -> Iterable[tuple[slice, Iterable[KernelCall]]]:
    """The tile in runs of rows of bounded size, each with its calls."""
    if any(piece.shape is Shape.MASKED for piece in tile.pieces):
        return parts_under_the_mask(tile, part, batched)
    return kernel_calls(tile.pieces, part, batched)


def _some_heads(qkv: QKV, part: PartSize) -> Iterator[tuple[slice, slice]]:
    """The heads of q, and of k and v, for each call."""
    num_kv_heads, step = qkv.k.shape[2], part.kv_heads * torch.get_num_threads()
    group = qkv.q.shape[2] // num_kv_heads
    for a in range(0, num_kv_heads, step):
        b = min(a + step, num_kv_heads)
        yield slice(a * group, b * group), slice(a, b)


def _of_heads(qkv: QKV, heads: slice, kv_heads: slice) -> QKV:
    return QKV(_narrow(qkv.q, 2, heads), _narrow(qkv.k, 2, kv_heads), _narrow(qkv.v, 2, kv_heads))


def _tile_of_heads(tile: Tile, heads: slice, **others: Any) -> Tile:
    """The tile for some of its query heads; others: fields that change too."""
    first_head, options = tile.first_head + heads.start, tile.score_options.of_heads(heads)
    return tile._replace(first_head=first_head, score_options=options, **others)


# A part is a function of its own, so that a part's memory is free before the next part takes its
# memory.
def _forward_part(qkv: QKV, tile: Tile, state: State, call: KernelCall, dtype: torch.dtype) -> None:
    causal, seen, mask = _hidden(qkv.q, tile, call, state.acc.dtype)
    q = _heads_first(_blocks(qkv.q, 1, call.rows, call), dtype)
    k, v = (_keys(x, call, dtype) for x in (qkv.k, qkv.v))
    head_dim = v.shape[3]
    q, k, v = _alike(q, k, v)
    out, lse = _attend(q, k, v, causal, mask, tile.scale)
    if seen is not None:
        lse = lse.masked_fill(~seen.any(-1), -torch.inf)
    sums = state._replace(
        acc=_blocks(state.acc, 1, call.rows, call),
        m=_blocks(state.m, 2, call.rows, call),
        l=_blocks(state.l, 2, call.rows, call),
    )
    out = out[..., :head_dim].transpose(1, 2)
    fold(out, lse, sums, slice(0, out.shape[1]), first=call.first)


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
        results: tuple[torch.Tensor, torch.Tensor] = _forward(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        )
        return results
    return attend_few_keys(q, k, v, causal, mask, scale)


def _hidden(
    q: torch.Tensor, tile: Tile, call: KernelCall, dtype: torch.dtype
) -> tuple[bool, torch.Tensor | None, torch.Tensor | None]:
    """Three arguments of the fused kernel that hide cells of a call: whether it hides them itself,
    as under a causal mask; the cells that are seen, if a row may see none; and the mask for its
    scores.

    The fused kernel knows lower triangles only. With ALiBi, which takes a mask anyway, these are
    in the mask, too.
    """
    rows, columns = call.rows, call.columns
    bias = tile.bias(rows, columns, dtype)
    if bias is None and call.shape is not Shape.MASKED:
        if call.shape in (Shape.UPPER, Shape.BAND):
            lengths = rows.stop - rows.start, columns.stop - columns.start
            return False, None, outside(call.shape, *lengths, dtype)
        return call.shape is Shape.LOWER, None, None
    seen = tile.visible(call.first_block(), rows, columns, q)
    if bias is None:
        assert seen is not None
        return False, seen, torch.where(seen, seen.new_zeros((), dtype=dtype), -torch.inf)
    if seen is not None:
        bias.masked_fill_(~seen, -torch.inf)
    return False, seen, bias


def _decode(
    qkv: QKV, seen: SeenColumns, hull: tuple[int, int], scale: float, into: Partial
) -> None:
    """Does `CpuKernel.decode` for sequences that see only columns within one hull."""
    (q, k, v), dtype = qkv, into.lse.dtype
    batch, heads, kv_heads = q.shape[0], q.shape[2], k.shape[2]
    sums, q = into.grouped(kv_heads), fold_heads(q, kv_heads, dtype)
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
        rows, keys, values = _alike(q, *(_heads_first(_narrow(x, 1, at), dtype) for x in (k, v)))
        hidden = seen.hidden(columns, q.device)
        mask = None
        if hidden is not None:
            # The rows of a kv head are the rows of its query heads, one after another.
            hidden = hidden.repeat(1, heads // kv_heads, 1).unsqueeze(1)
            mask = hidden.new_zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
        out, lse = _attend(rows, keys, values, False, mask, scale)
        if hidden is not None:
            lse = lse.masked_fill(hidden.all(-1), lowest(lse))
        out = out[..., : v.shape[3]]
        if columns.start == first:
            sums.out.copy_(out)
            sums.lse.copy_(lse)
        else:
            sums.fold(out, lse)


class _Queries:
    """Some rows of the query side, in the form that the fused backward takes.

    q, dout and out (O' of `stand_in.py`) are `[batch, heads, q, d]`, lse `[batch, heads, q]`.
    first: the rows' first row in the tile. extra: whether the rows have a channel more. It is
    needed where a row of dout is 0, or nearly, and the row's delta is not (a gradient of lse
    alone).
    """

    def __init__(
        self, q: torch.Tensor, upstream: Upstream, rows: slice, dtype: torch.dtype
    ) -> None:
        self.first = rows.start
        self.q, self.dout = _alike(
            *(_heads_first(_narrow(x, 1, rows), dtype) for x in (q, upstream.dout))
        )
        self.lse, delta = (_narrow(x, 2, rows) for x in (upstream.lse, upstream.delta))
        stand_in = stand_in_for_out(self.dout.to(delta.dtype), delta)
        self.extra = stand_in is None
        if stand_in is None:
            # The channel more is 1 in dout and delta in O', so that it carries delta whatever dout
            # is; in q, k and v it is 0. Three more are 0 everywhere (see `attend_few_keys`).
            stand_in = pad(delta.unsqueeze(-1), (self.q.shape[3], 3))
            self.q, self.dout = pad(self.q, (0, 4)), pad(pad(self.dout, (0, 1), value=1.0), (0, 3))
        self.out = stand_in.to(dtype)


def _backward_part(
    queries: _Queries, qkv: QKV, tile: Tile, call: KernelCall, sums: Gradients
) -> None:
    at_rows = slice(call.rows.start - queries.first, call.rows.stop - queries.first)
    dtype = queries.q.dtype
    k, v = _alike(*(_keys(x, call, dtype) for x in (qkv.k, qkv.v)))
    if queries.extra:
        k, v = pad(k, (0, 4)), pad(v, (0, 4))
    causal, _, mask = _hidden(qkv.q, tile, call, queries.lse.dtype)
    sides = (queries.dout, queries.q, queries.out, queries.lse)
    dout, q, out, lse = (_blocks(x, 2, at_rows, call) for x in sides)
    grads = _backward(dout, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=tile.scale)
    for total, at, grad in zip(sums, (call.rows, call.columns, call.columns), grads, strict=True):
        if total is None:
            continue
        grad = grad[..., : total.shape[3]].transpose(1, 2)
        if at is call.rows or not call.overlaps:
            _blocks(total, 1, at, call).add_(grad)
            continue
        for one, block in zip(call.block_by_block(), grad.split(1), strict=True):
            _narrow(total, 1, one.columns).add_(block)


def _narrow(x: torch.Tensor, dim: int, at: slice) -> torch.Tensor:
    """x[..., at, ...] by a cheaper call, and without a call where that is all of x."""
    length = at.stop - at.start
    return x if x.shape[dim] == length else x.narrow(dim, at.start, length)


def _blocks(x: torch.Tensor, dim: int, at: slice, call: KernelCall) -> torch.Tensor:
    """The tokens (a dimension of x) of a call's blocks: of one block as they are, of several blocks
    each as a batch row.

    at: the tokens of the first block.
    """
    if call.num_blocks == 1:
        return _narrow(x, dim, at)
    size, strides = list(x.shape), list(x.stride())
    size[0], size[dim] = call.num_blocks, at.stop - at.start
    strides[0] = call.step * strides[dim]
    return x.as_strided(size, strides, x.storage_offset() + at.start * strides[dim])


def _alike(*tensors: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with as many channels as the widest; channels of 0 are added."""
    widest = max(x.shape[3] for x in tensors)
    return (x if x.shape[3] == widest else pad(x, (0, widest - x.shape[3])) for x in tensors)


def _keys(x: torch.Tensor, call: KernelCall, dtype: torch.dtype) -> torch.Tensor:
    """A call's keys or values, heads first, in a type."""
    return _heads_first(_blocks(x, 1, call.columns, call), dtype)


def _heads_first(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[B, S, H, D] -> [B, H, S, D] in a type; a view where x has that type."""
    return x.to(dtype).transpose(1, 2)
