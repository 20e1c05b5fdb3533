"""Attention's truth: the whole score matrix in float64, in one process."""

from __future__ import annotations

import torch

from burst_rt.conformance.cases import AttentionCase

__all__ = ["draw_tensors", "real_tokens", "seen_keys", "true_attention"]

Tensors = dict[str, torch.Tensor]


def draw_tensors(case: AttentionCase) -> Tensors:
    """q, k, v and dout of a case, and its sinks; float32, the same at every call.

    dout is 0 at padding.
    """
    draw = torch.Generator().manual_seed(case.length)
    shape = (case.batch, case.length)
    heads = {"q": case.heads, "k": case.kv_heads, "v": case.kv_heads, "dout": case.heads}
    tensors = {
        name: torch.randn(*shape, count, case.head_dim, generator=draw, device="cpu")
        for name, count in heads.items()
    }
    # Scores of some size, which a cap or a sink that is left out changes.
    tensors["q"] *= 2
    tensors["dout"] *= real_tokens(case)[..., None, None]
    if case.sinks:
        tensors["sinks"] = torch.randn(case.heads, generator=draw, device="cpu") + 1
    return tensors


def real_tokens(case: AttentionCase) -> torch.Tensor:
    """Bool `[batch, length]`: which tokens are no padding."""
    padding = torch.tensor(case.padding or (0,) * case.batch, device="cpu")
    return torch.arange(case.length, device="cpu") < case.length - padding[:, None]


def seen_keys(case: AttentionCase) -> torch.Tensor:
    """Bool `[batch, queries, keys]`: which keys a query sees."""
    place = torch.arange(case.length, device="cpu")
    before = place[:, None] - place
    seen = torch.ones(case.length, case.length, dtype=torch.bool, device="cpu")
    if case.causal:
        seen = (before >= 0) | (place < case.prefix)
    if case.window is not None:
        seen &= before < case.window
    if case.documents:
        number = torch.repeat_interleave(torch.tensor(case.documents, device="cpu"))
        seen &= number[:, None] == number
    return seen & real_tokens(case)[:, None, :]


def true_attention(case: AttentionCase, tensors: Tensors) -> Tensors:
    """out, and in training dq, dk, dv and dsinks, of tensors as `draw_tensors` gives them."""
    names = ("q", "k", "v", *(["sinks"] if case.sinks else []))
    leaves = {name: tensors[name].detach().double().requires_grad_() for name in names}
    group = case.heads // case.kv_heads
    k, v = (leaves[name].repeat_interleave(group, 2) for name in "kv")
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    scores = torch.einsum("bqhd,bkhd->bhqk", leaves["q"], k) * scale
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    scores = scores.masked_fill(~seen_keys(case)[:, None], -torch.inf)
    if case.sinks:
        sinks = leaves["sinks"][None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), -1)
    weights = torch.softmax(scores, -1)[..., : case.length]
    out = torch.einsum("bhqk,bkhd->bqhd", weights, v)
    if not case.train:
        return {"out": out.detach()}
    gradients = torch.autograd.grad((out * tensors["dout"].double()).sum(), list(leaves.values()))
    named = {f"d{name}": grad for name, grad in zip(names, gradients, strict=True)}
    return {"out": out.detach(), **named}
