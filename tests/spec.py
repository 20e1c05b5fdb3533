"""What attention is: float64, with the whole score matrix, and gradients by torch's autograd.

All tests compare with this spec. The spec shares no code with the package: neither kernels, nor the
cutting into blocks, nor the backward's formula. From the package it takes only `Mask.allows`, which
the tests of masks compare with plain loops.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from burst_rt import Causal, Full, Mask

__all__ = ["Attention", "errors_of", "reference", "relative_error", "seen", "single_process"]


class Attention(NamedTuple):
    """Whole results of a call. A gradient that was not asked for is None."""

    out: torch.Tensor  # [B, Sq, H, D]
    lse: torch.Tensor  # [B, H, Sq]
    dq: torch.Tensor | None  # [B, Sq, H, D]
    dk: torch.Tensor | None  # [B, Skv, Hkv, D]
    dv: torch.Tensor | None  # [B, Skv, Hkv, D]; D of v and out may be another than that of q and k
    dsinks: torch.Tensor | None = None  # [H]


def seen(mask: Mask, q_len: int, kv_len: int) -> torch.Tensor:
    """Bool `[Sq, Skv]`: whether a query sees a key. The last query stands at the last key."""
    q = torch.arange(q_len) + kv_len - q_len
    visible: torch.Tensor = mask.allows(q[:, None], torch.arange(kv_len)[None, :])
    return visible


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None = None,
    *,
    mask: Mask | torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> Attention:
    """Attention of BSHD tensors of any floating type, computed in float64.

    mask: a mask, or the cells that are seen: bool `[Sq, Skv]` or `[B, Sq, Skv]`. alibi_slopes:
    `[H]` or `[B, H]`. sinks: `[H]`, one more column of scores. The gradients are those of
    sum(out * dout) + sum(lse * dlse).
    """
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(group, 2)) * (
        1 / math.sqrt(q.shape[3]) if scale is None else scale
    )
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        (q_len, kv_len), slopes = _lengths(q, k), alibi_slopes.double()
        distance = (torch.arange(q_len)[:, None] + kv_len - q_len - torch.arange(kv_len)).abs()
        scores = scores - slopes[..., None, None] * distance
    visible = mask if isinstance(mask, torch.Tensor) else seen(mask or Full(), *_lengths(q, k))
    if visible.ndim == 3:
        visible = visible[:, None]
    inputs = [q, k, v]
    if sinks is not None:
        # One more key: its score is the sink, its value is 0, and every query sees it.
        sinks = sinks.detach().double().requires_grad_()
        inputs.append(sinks)
        column = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), -1)
        visible = torch.cat((visible, torch.ones_like(visible[..., :1])), -1)
        v = torch.cat((v, torch.zeros_like(v[:, :1])), 1)
    blind = ~visible.any(-1)
    top = (
        scores.detach()
        .masked_fill(~visible, -torch.inf)
        .amax(-1, keepdim=True)
        .masked_fill(blind[..., None], 0.0)
    )
    # Masked scores are taken out before exp: their exp could overflow, and its gradient would be
    # inf * 0.
    weights = torch.exp((scores - top).masked_fill(~visible, 0.0)) * visible
    total = weights.sum(-1).masked_fill(blind, 1.0)
    out = torch.einsum("bhqk,bkhd->bqhd", weights / total[..., None], v.repeat_interleave(group, 2))
    lse = (top[..., 0] + torch.log(total)).masked_fill(blind, -torch.inf)
    loss = (out * dout.double()).sum()
    if dlse is not None:
        loss = loss + (lse.masked_fill(blind, 0.0) * dlse.double()).sum()
    return Attention(out.detach(), lse.detach(), *torch.autograd.grad(loss, inputs))


def _lengths(q: torch.Tensor, k: torch.Tensor) -> tuple[int, int]:
    return q.shape[1], k.shape[1]


def single_process(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    *,
    mask: Mask | None = None,
) -> Attention:
    """The same by torch's own attention on this CPU, in the inputs' type.

    Its errors say how accurate an implementation can be expected to be.
    """
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    q_, k_, v_ = (x.transpose(1, 2) for x in (q, k, v))
    attend = torch.nn.functional.scaled_dot_product_attention
    aligned = isinstance(mask, Causal) and q.shape[1] == k.shape[1]
    visible = None if mask is None or aligned else seen(mask, q.shape[1], k.shape[1])
    out = attend(q_, k_, v_, attn_mask=visible, is_causal=aligned, enable_gqa=True).transpose(1, 2)
    additive = (
        None
        if visible is None
        else torch.zeros(visible.shape, dtype=q.dtype).masked_fill(~visible, -torch.inf)
    )
    with torch.no_grad():
        _, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_, k_, v_, 0.0, aligned, attn_mask=additive
        )
    if visible is not None:
        lse = lse.masked_fill(~visible.any(-1), -torch.inf)
    return Attention(out.detach(), lse, *torch.autograd.grad((out * dout).sum(), (q, k, v)))


def relative_error(x: torch.Tensor, truth: torch.Tensor) -> float:
    """The Frobenius norm of the difference over the Frobenius norm of the truth.

    inf where the two do not have the same infinities; nan where x has a nan.
    """
    assert x.shape == truth.shape, f"shape {tuple(x.shape)}, expected {tuple(truth.shape)}"
    x, truth = x.detach().double(), truth.detach().double()
    infinite = truth.isinf()
    if not torch.equal(x.masked_fill(~infinite, 0.0), truth.masked_fill(~infinite, 0.0)):
        return math.inf
    x, truth = x.masked_fill(infinite, 0.0), truth.masked_fill(infinite, 0.0)
    size = float(torch.linalg.vector_norm(truth))
    return float(torch.linalg.vector_norm(x - truth)) / (size or 1.0)


def errors_of(result: Attention, truth: Attention) -> dict[str, float]:
    """The relative error of every result there is."""
    return {
        name: relative_error(x, getattr(truth, name))
        for name, x in result._asdict().items()
        if x is not None
    }
