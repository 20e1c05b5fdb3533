"""The spec: attention in float64, score matrix and all.

Every other kernel is tested against `NaiveKernel`; "auto" never takes it. `UntiledKernel` is the
same in the type of the sums: what local attention costs without tiles in fast memory (the paper's
baseline).

Forward:  s = scale * q k^T;  p = exp(s - m);  acc = p v;  l = rowsum(p)
Backward: p = exp(s - lse);  dv = p^T dout;  ds = p * (dout v^T - delta);
          dq = scale * ds k;  dk = scale * ds^T q

With softcap c, s = c * t with t = tanh(scale * q k^T / c), and ds is multiplied by 1 - t^2.

Scores are rounded to the type of lse: p is relative to that lse, and so exactly 1 in a row that
sees a single key.

Worked example (one head, d = 1, scale 1): q = [1], k = [0, log 3], v = [4, 8]: scores 0 and log 3,
p = [1/4, 3/4], out = 7, lse = log 4.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from burst_rt.kernels.base import QKV, Gradients, Kernel, State, Tile, Upstream, Work, sum_dtype
from burst_rt.planning.masks import Piece
from burst_rt.planning.problem import TileShape

__all__ = [
    "NaiveKernel",
    "UntiledKernel",
    "attend_few_keys",
    "dense_scores",
    "per_group",
    "per_head",
]


class NaiveKernel(Kernel):
    """See `Kernel`. Takes every device and dtype. Memory grows with q_len x kv_len."""

    name = "naive"

    def work_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The type to compute in, for inputs of a type."""
        return torch.float64

    def refuses(self, work: Work) -> str | None:
        """Refuses nothing."""
        return None

    def forward(self, qkv: QKV, tile: Tile, state: State) -> None:
        """See `Kernel.forward`."""
        q, k, v = qkv
        work = self.work_dtype(q.dtype)
        if tile.first:
            state.start(tile.score_options.sinks)
        for piece in tile.pieces:
            s, _ = dense_scores(q, k, tile, piece, work, state.m.dtype)
            acc, m, l = state.at(piece.rows)  # noqa: E741
            m_new = torch.maximum(m.to(work), s.amax(-1))
            # exp(-inf - -inf) would be NaN: such a row has seen no key.
            safe = torch.where(m_new == -torch.inf, 0.0, m_new)
            p = s.sub_(safe[..., None]).exp_()
            old = torch.exp(m.to(work) - safe)
            pv = p @ per_head(v[:, piece.columns], q.shape[2], work)
            acc.copy_(acc.to(work) * old.transpose(1, 2)[..., None] + pv.transpose(1, 2))
            l.copy_(l.to(work) * old + p.sum(-1))
            m.copy_(m_new)
        if tile.last:
            state.finish()

    def backward(self, qkv: QKV, upstream: Upstream, tile: Tile, grads: Gradients) -> None:
        """See `Kernel.backward`."""
        q, k, v = qkv
        heads, kv_heads, work = q.shape[2], k.shape[2], self.work_dtype(q.dtype)
        for piece in tile.pieces:
            rows, columns = piece.rows, piece.columns
            lse, delta = (x[:, :, rows].to(work)[..., None] for x in (upstream.lse, upstream.delta))
            s, t = dense_scores(q, k, tile, piece, work, upstream.lse.dtype)
            p = s.sub_(lse).exp_()
            dout = per_head(upstream.dout[:, rows], heads, work)
            dp = _inner(dout, per_head(v[:, columns], heads, work))
            ds = dp.sub_(delta).mul_(p).mul_(tile.scale)
            if t is not None:
                ds.mul_(t.square_().neg_().add_(1.0))
            if grads.dq is not None:
                dq = (ds @ per_head(k[:, columns], heads, work)).transpose(1, 2)
                grads.dq[:, rows] += dq.to(grads.dq.dtype)
            if grads.dk is not None:
                dk = per_group(ds.mT @ per_head(q[:, rows], heads, work), kv_heads)
                grads.dk[:, columns] += dk.to(grads.dk.dtype)
            if grads.dv is not None:
                dv = per_group(p.mT @ dout, kv_heads)
                grads.dv[:, columns] += dv.to(grads.dv.dtype)

    def scratch_bytes(self, forward: bool, dtype: torch.dtype, tile: TileShape) -> int:
        """See `Kernel.scratch_bytes`: about six score matrices."""
        scores = tile.batch * tile.num_heads * tile.q_len * tile.kv_len
        return 6 * self.work_dtype(dtype).itemsize * scores


class UntiledKernel(NaiveKernel):
    """See `Kernel`. float32 for 16- and 32-bit inputs, float64 for float64."""

    name = "untiled"

    def work_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The type of the sums."""
        return sum_dtype(dtype)


def dense_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    tile: Tile,
    piece: Piece,
    work: torch.dtype,
    rounded: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A piece's scores `[B, H, q, kv]` in the type `work`, -inf where the mask hides a cell.

    The scores are rounded to the type `rounded` first. With a softcap, the second result is t of
    the module's text, else None.
    """
    some_q, some_k = q[:, piece.rows], k[:, piece.columns]
    heads = q.shape[2]
    s = _inner(per_head(some_q, heads, work), per_head(some_k, heads, work)).mul_(tile.scale)
    t, cap = None, tile.score_options.softcap
    if cap is not None:
        t = s.div_(cap).tanh_()
        s = t * cap
    bias = tile.bias(piece.rows, piece.columns, work)
    if bias is not None:
        s.add_(bias)
    s = s.to(rounded).to(work)
    seen = tile.visible(piece, piece.rows, piece.columns, q)
    if seen is not None:
        s.masked_fill_(~seen, -torch.inf)
    return s, t


def _inner(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a b^T` of each head, `[..., rows, d]` and `[..., columns, d]`."""
    if b.shape[-2] == 1:
        # torch takes another product for one matrix and a vector than for several, and results
        # are not to depend on how many heads a rank has.
        return (a * b).sum(-1, keepdim=True)
    return a @ b.mT


def per_head(x: torch.Tensor, num_heads: int, work: torch.dtype) -> torch.Tensor:
    """[B, S, H, D] -> [B, num_heads, S, D] in the type `work`.

    kv heads are repeated for every query head of their group.
    """
    return x.to(work).transpose(1, 2).repeat_interleave(num_heads // x.shape[2], dim=1)


def per_group(x: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """[B, H, S, D] -> [B, S, num_kv_heads, D], summed over each group."""
    grouped: torch.Tensor = x.unflatten(1, (num_kv_heads, -1))
    return grouped.sum(2).transpose(1, 2)


def attend_few_keys(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    mask: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of fewer keys than torch's fused CPU attention does well, as it gives them.

    q `[batch, heads, q, d]`; k and v the same with their own heads. mask: added to the scores.
    """
    work = sum_dtype(q.dtype)
    k, v = (x.to(work).repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = _inner(q.to(work), k).mul_(scale)
    if causal:
        s.masked_fill_(
            torch.ones(s.shape[2:], dtype=torch.bool, device=s.device).triu_(1), -torch.inf
        )
    if mask is not None:
        s.add_(mask)
    top, info = s.amax(-1, keepdim=True), torch.finfo(work)
    # exp(-inf - -inf) would be NaN: such a row sees no key.
    p = s.sub_(top.clamp_min(info.min)).exp_()
    # By one product the sum of p is rounded as the sums of p * v are. Where rows are no multiple of
    # 16 bytes, MKL may round a head's products by its place among the heads.
    head_dim = v.shape[3]
    products = p @ pad(v, (0, 4 - head_dim % 4), value=1.0)
    out, total = products[..., :head_dim], products[..., head_dim, None]
    lse = (top + total.log()).squeeze(-1)
    return (out / total.clamp_min(info.tiny)).to(q.dtype), lse
