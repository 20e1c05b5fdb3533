"""The float64 spec of every recurrence: one token at a time, nothing clever.

Each function takes whole sequences, `begins` (bool `[batch, tokens]`, where documents begin) and a
state, and returns the result and the state after the last token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["SPECS"]

Tensor = torch.Tensor


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[2], 2)


def _cut(state: Tensor, begins: Tensor, t: int) -> Tensor:
    """The state before token t: 0 where a document begins."""
    begun = begins[:, t].view(-1, *(1 for _ in state.shape[1:]))
    return torch.where(begun, torch.zeros_like(state), state)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, begins: Tensor, state: Tensor,
    scale: float, use_qk_l2norm: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if use_qk_l2norm:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = _heads(q, v.shape[2]), _heads(k, v.shape[2])
    out = []
    for t in range(v.shape[1]):
        decay = g[:, t].exp()
        state = _cut(state, begins, t) * (
            decay[..., None] if decay.ndim == 3 else decay[..., None, None]
        )
        given = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        new = beta[:, t, :, None] * (v[:, t] - given)
        state = state + k[:, t, :, :, None] * new[:, :, None]
        out.append(scale * torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(out, 1), state


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, begins: Tensor, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    q, k, g = _heads(q, v.shape[2]), _heads(k, v.shape[2]), g.expand(v.shape[:3])
    out = []
    for t in range(v.shape[1]):
        state = _cut(state, begins, t) * g[:, t, :, None, None].exp()
        state = state + k[:, t, :, :, None] * v[:, t, :, None]
        out.append(scale * torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(out, 1), state


def state_space(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    *,
    begins: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    B, C, out = _heads(B, x.shape[2]), _heads(C, x.shape[2]), []
    for t in range(x.shape[1]):
        state = _cut(state, begins, t) * (dt[:, t] * A).exp()[..., None, None]
        state = state + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        out.append(torch.einsum("bhpn,bhn->bhp", state, C[:, t]) + D[:, None] * x[:, t])
    return torch.stack(out, 1), state


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    *,
    begins: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    out = []
    for t in range(x.shape[1]):
        state = _cut(state, begins, t) * (dt[:, t, :, None] * A).exp()
        state = state + (dt[:, t] * x[:, t])[..., None] * B[:, t, None]
        out.append(torch.einsum("bdn,bn->bd", state, C[:, t]) + D * x[:, t])
    return torch.stack(out, 1), state


def linear_recurrence(
    x: Tensor, log_a: Tensor, *, begins: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    out = []
    for t in range(x.shape[1]):
        state = _cut(state, begins, t) * log_a[:, t].exp() + x[:, t]
        out.append(state)
    return torch.stack(out, 1), state


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    begins: Tensor,
    state: Tensor,
    activation: str | None,
) -> tuple[Tensor, Tensor]:
    """The state is `[batch, channels, K - 1]`."""
    out = []
    for t in range(x.shape[1]):
        state = torch.cat([_cut(state, begins, t), x[:, t, :, None]], 2)
        out.append((state * weight).sum(2) + bias)
        state = state[:, :, 1:]
    found = torch.stack(out, 1)
    return (torch.nn.functional.silu(found) if activation else found), state


SPECS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    fn.__name__: fn
    for fn in (
        gated_delta_rule, linear_attention, state_space, selective_scan, linear_recurrence,
        causal_conv1d,
    )
}  # fmt: skip
