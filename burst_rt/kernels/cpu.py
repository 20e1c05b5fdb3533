"""Tiles on a CPU by torch's fused CPU attention, called in parts of bounded size.

16-bit inputs are cast to float32 part by part, so that sums are float32 whatever the input, and because on a CPU without native bfloat16
torch's own 16-bit backward is several times slower.

The fused backward wants the output O, of which it uses only rowsum(dO * O). It is given O' = u * delta / (amax * |u|^2) with u = dO / amax
and amax the row's largest |dO|: then rowsum(dO * O') = delta exactly, so O never has to travel. The scaling by amax keeps |u|^2 away from
overflow and underflow.

Two habits of the fused kernel are worked around here: it crashes on empty tensors (never called with one), and a row that sees no key gets
lse 0 instead of -inf.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import pad

from burst_rt.kernels.base import State, Tile, sum_dtype

__all__ = ["CpuKernel"]

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

# Rows of queries and of keys in one call of the fused kernel. Large enough that adding up the parts costs about one percent.
_Q_PART = 1024
_KV_PART = 4096
# Under a triangle the fused kernel also computes cells it then masks; narrow triangles with full rectangles beside them waste less.
_DIAGONAL_PART = 512


class CpuKernel:
    """See `Kernel`. float64, float32, bfloat16, float16; any head_dim."""

    name = "cpu"

    def refuses(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Only CPU tensors of a floating type."""
        if device.type != "cpu":
            return f"the cpu kernel takes CPU tensors, got {device}"
        if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            return f"the cpu kernel takes float64, float32, bfloat16 and float16, got {dtype}"
        return None

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, state: State) -> None:
        """See `Kernel.forward`."""
        for rows, columns in _parts(tile):
            for cut in columns:
                _forward_part(q, k, v, tile, state, rows, cut)
                tile.progress()

    def backward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        dout: torch.Tensor,
        lse: torch.Tensor,
        delta: torch.Tensor,
        tile: Tile,
        dq: torch.Tensor | None,
        dk: torch.Tensor | None,
        dv: torch.Tensor | None,
    ) -> None:
        """See `Kernel.backward`."""
        for rows, columns in _parts(tile):
            a, b = rows
            queries = _Queries(q[:, a:b], dout[:, a:b], lse[:, :, a:b], delta[:, :, a:b])
            for cut in columns:
                _backward_part(queries, k, v, tile, rows, cut, None if dq is None else dq[:, a:b], dk, dv)
                tile.progress()

    def scratch_bytes(
        self, forward: bool, batch: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, q_len: int, kv_len: int
    ) -> int:
        """Bounded by the parts' sizes: casts of the inputs, the fused kernel's results and its own buffers."""
        size = sum_dtype(dtype).itemsize
        q_part = batch * min(q_len, _Q_PART) * num_heads * head_dim * size
        kv_part = batch * min(kv_len, _KV_PART) * num_kv_heads * head_dim * size
        cast = sum_dtype(dtype) != dtype
        if forward:
            return q_part * (2 + cast) + kv_part * 2 * cast
        return q_part * (5 + 2 * cast) + kv_part * (2 + 2 * cast)


def _parts(tile: Tile) -> Iterator[tuple[tuple[int, int], list[tuple[int, int, bool]]]]:
    """Cuts a piece into ((q_start, q_stop), [(kv_start, kv_stop, diagonal), ...]) of bounded size, leaving out what a triangle hides."""
    piece = tile.piece
    step = _DIAGONAL_PART if piece.diagonal else _Q_PART
    for a in range(piece.q_start, piece.q_stop, step):
        b = min(a + step, piece.q_stop)
        full_stop = min(piece.kv_start + a - piece.q_start, piece.kv_stop) if piece.diagonal else piece.kv_stop
        columns = [(c, min(c + _KV_PART, full_stop), False) for c in range(piece.kv_start, full_stop, _KV_PART)]
        if full_stop < piece.kv_stop:
            columns.append((full_stop, min(full_stop + b - a, piece.kv_stop), True))
        yield (a, b), columns


# One function a part, so that a part's memory is free before the next part takes its own.
def _forward_part(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, state: State, rows: tuple[int, int], cut: tuple[int, int, bool]
) -> None:
    (a, b), (c, d, diagonal) = rows, cut
    wide = state.acc.dtype
    seen = tile.visible(a, b, c, d, q.device) if tile.piece.masked else None
    q_part, k_part, v_part = _wide(q[:, a:b], wide), _wide(k[:, c:d], wide), _wide(v[:, c:d], wide)
    out, lse = _forward(q_part, k_part, v_part, 0.0, diagonal, attn_mask=_additive(seen, wide), scale=tile.scale)
    if seen is not None:
        lse = lse.masked_fill(~seen.any(-1), -torch.inf)
    _fold(out.transpose(1, 2), lse, state.acc[:, a:b], state.m[:, :, a:b], state.l[:, :, a:b])


class _Queries:
    """Some rows of the query side, as the fused backward wants them: q, dout, O' `[batch, heads, q, d]`; lse `[batch, heads, q]`.

    extra: one channel more was needed, because a row of dout is 0, or nearly, and its delta is not (a gradient of lse alone).
    """

    def __init__(self, q: torch.Tensor, dout: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor) -> None:
        wide = sum_dtype(q.dtype)
        self.q, self.dout = _wide(q, wide), _wide(dout, wide)
        self.lse = lse
        stand_in = _stand_in(self.dout, delta)
        self.extra = stand_in is None
        if stand_in is None:
            # The channel more, 1 in dout and delta in O', carries delta past any dout; in q, k and v it is 0.
            stand_in = pad(delta.unsqueeze(-1), (q.shape[3], 0))
            self.q, self.dout = pad(self.q, (0, 1)), pad(self.dout, (0, 1), value=1.0)
        self.out = stand_in


def _backward_part(
    queries: _Queries,
    k: torch.Tensor,
    v: torch.Tensor,
    tile: Tile,
    rows: tuple[int, int],
    cut: tuple[int, int, bool],
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
) -> None:
    c, d, diagonal = cut
    wide = queries.q.dtype
    k_part, v_part = _wide(k[:, c:d], wide), _wide(v[:, c:d], wide)
    if queries.extra:
        k_part, v_part = pad(k_part, (0, 1)), pad(v_part, (0, 1))
    mask = _additive(tile.visible(*rows, c, d, k.device), wide) if tile.piece.masked else None
    grads = _backward(
        queries.dout, queries.q, k_part, v_part, queries.out, queries.lse, 0.0, diagonal, attn_mask=mask, scale=tile.scale
    )  # fmt: skip
    for total, grad in zip((dq, None if dk is None else dk[:, c:d], None if dv is None else dv[:, c:d]), grads, strict=True):
        if total is not None:
            total += (grad[..., : k.shape[3]] if queries.extra else grad).transpose(1, 2)


def _fold(out: torch.Tensor, lse: torch.Tensor, acc: torch.Tensor, m: torch.Tensor, l: torch.Tensor) -> None:  # noqa: E741
    """Folds a normalised part (out, lse) into the running state with weight exp(lse - m)."""
    m_new = torch.maximum(m, lse)
    safe = torch.where(m_new == -torch.inf, 0.0, m_new)  # exp(-inf - -inf) would be NaN: such a row has seen nothing
    old, new = torch.exp(m - safe), torch.exp(lse - safe)
    acc.mul_(_rows(old)).addcmul_(out, _rows(new))
    l.mul_(old).add_(new)
    m.copy_(m_new)


def _stand_in(dout: torch.Tensor, delta: torch.Tensor) -> torch.Tensor | None:
    """O' of the module's text, `[batch, heads, q, d]` like dout; None where a row of dout is 0, or nearly, and delta is not."""
    amax = torch.linalg.vector_norm(dout, torch.inf, dim=-1)
    u = dout / amax.clamp_min(torch.finfo(dout.dtype).tiny).unsqueeze(-1)
    weight = torch.where(delta == 0, 0.0, delta / amax / torch.linalg.vecdot(u, u))
    return u.mul_(weight.unsqueeze(-1)) if bool(torch.isfinite(weight).all()) else None


def _additive(seen: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    if seen is None:
        return None
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


def _wide(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[B, S, H, D] -> [B, H, S, D] in the sums' type; a view where that is x's own."""
    return x.to(dtype).transpose(1, 2)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[B, H, S] -> [B, S, H, 1]."""
    return x.transpose(1, 2).unsqueeze(-1)
