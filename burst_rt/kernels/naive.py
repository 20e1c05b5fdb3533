"""The spec: attention in float64, score matrix and all. Every other kernel is tested against this one; it is never chosen by itself.

Forward:  s = scale * q k^T;  p = exp(s - m);  acc = p v;  l = rowsum(p)
Backward: p = exp(s - lse);  dv = p^T dout;  ds = p * (dout v^T - delta);  dq = scale * ds k;  dk = scale * ds^T q

Scores are rounded to the type that lse is kept in: p is relative to that lse, and so exactly 1 in a row that sees a single key.

Worked example (one head, d = 1, scale 1): q = [1], k = [0, log 3], v = [4, 8]: scores 0 and log 3, p = [1/4, 3/4], out = 7, lse = log 4.
"""

from __future__ import annotations

import torch

from burst_rt.attention.masks import Mask, Piece
from burst_rt.kernels.base import State, Tile, delta_rows

__all__ = ["NaiveKernel"]


class NaiveKernel:
    """See `Kernel`. Takes every device and dtype; memory grows with q_len x kv_len."""

    name = "naive"

    def refuses(self, device: torch.device, dtype: torch.dtype, head_dim: int, mask: Mask) -> str | None:
        """Nothing is refused."""
        return None

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, state: State) -> None:
        """See `Kernel.forward`."""
        if tile.first:
            state.start()
        for piece in tile.pieces:
            rows, columns = slice(piece.q_start, piece.q_stop), slice(piece.kv_start, piece.kv_stop)
            s = _scores(q, k, tile, piece, state.m.dtype)
            acc, m, l = state.acc[:, rows], state.m[:, :, rows], state.l[:, :, rows]  # noqa: E741
            m_new = torch.maximum(m.double(), s.amax(-1))
            safe = torch.where(m_new == -torch.inf, 0.0, m_new)  # exp(-inf - -inf) would be NaN: such a row has seen nothing
            p = torch.exp(s - safe[..., None])
            old = torch.exp(m.double() - safe)
            pv = p @ _heads(v[:, columns], q.shape[2])
            acc.copy_(acc.double() * old.transpose(1, 2)[..., None] + pv.transpose(1, 2))
            l.copy_(l.double() * old + p.sum(-1))
            m.copy_(m_new)
        if tile.last:
            state.finish()

    def delta(self, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None, rows: torch.Tensor) -> None:
        """See `Kernel.delta`."""
        delta_rows(dout, out, lse, dlse, rows)

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
        heads, kv_heads = q.shape[2], k.shape[2]
        for piece in tile.pieces:
            rows, columns = slice(piece.q_start, piece.q_stop), slice(piece.kv_start, piece.kv_stop)
            p = torch.exp(_scores(q, k, tile, piece, lse.dtype) - lse[:, :, rows].double()[..., None])
            do = _heads(dout[:, rows], heads)
            ds = p * (do @ _heads(v[:, columns], heads).mT - delta[:, :, rows].double()[..., None]) * tile.scale
            if dq is not None:
                dq[:, rows] += (ds @ _heads(k[:, columns], heads)).transpose(1, 2).to(dq.dtype)
            if dk is not None:
                dk[:, columns] += _group(ds.mT @ _heads(q[:, rows], heads), kv_heads).to(dk.dtype)
            if dv is not None:
                dv[:, columns] += _group(p.mT @ do, kv_heads).to(dv.dtype)

    def scratch_bytes(
        self, forward: bool, batch: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, q_len: int, kv_len: int
    ) -> int:
        """About six score matrices in float64."""
        return 48 * batch * num_heads * q_len * kv_len


def _scores(q: torch.Tensor, k: torch.Tensor, tile: Tile, piece: Piece, rounded: torch.dtype) -> torch.Tensor:
    rows, columns = slice(piece.q_start, piece.q_stop), slice(piece.kv_start, piece.kv_stop)
    s: torch.Tensor = _heads(q[:, rows], q.shape[2]) @ _heads(k[:, columns], q.shape[2]).mT * tile.scale
    s = s.to(rounded).double()
    seen = tile.visible(piece, rows, columns, q.device)
    if seen is not None:
        s = s.masked_fill(~seen, -torch.inf)
    return s


def _heads(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[B, S, H, D] -> float64 [B, num_heads, S, D], kv heads repeated for their group."""
    return x.double().transpose(1, 2).repeat_interleave(num_heads // x.shape[2], dim=1)


def _group(x: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """[B, H, S, D] -> [B, S, num_kv_heads, D], summed over each group."""
    grouped: torch.Tensor = x.unflatten(1, (num_kv_heads, -1))
    return grouped.sum(2).transpose(1, 2)
