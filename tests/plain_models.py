"""Plain torch models, which know nothing of ranks, and one step of them over ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn import functional

import burst_rt
from burst_rt import Context, ContextLayout, Mask

__all__ = ["DIM", "Decoder", "Forward", "StepResult", "encoder", "inputs", "over_ranks", "plain"]

DIM = 16
# How a model is called with its tokens.
Forward: TypeAlias = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Decoder(nn.Module):
    """Two causal layers, whose four query heads share two key heads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (4, -1)).transpose(1, 2)
        k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.kv(x).chunk(2, -1))
        out = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=0.4, enable_gqa=True
        )
        y: torch.Tensor = self.out(out.transpose(1, 2).flatten(-2))
        return x + y


def encoder() -> nn.Module:
    """torch's own layers; in eval mode without gradients they have a fast path."""
    layer = nn.TransformerEncoderLayer(DIM, 2, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def inputs(tokens: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(2, tokens, DIM, generator=torch.Generator().manual_seed(1)).to(dtype)


class StepResult(NamedTuple):
    """What a step of a model has computed. grads: of its parameters, from this rank's tokens."""

    out: torch.Tensor
    grads: list[torch.Tensor]


def plain(model: nn.Module, x: torch.Tensor, call: Forward) -> StepResult:
    """One process, and the loss (out**2).sum()."""
    model.zero_grad()
    out = call(model, x)
    out.square().sum().backward()
    return StepResult(out.detach(), _grads(model))


def over_ranks(
    ctx: Context,
    layout: ContextLayout,
    model: nn.Module,
    x: torch.Tensor,
    call: Forward,
    mask: Mask | None = None,
) -> StepResult:
    """The same over ranks: whole tensors, and gradients of all tokens."""
    mine = copy.deepcopy(model)
    mine.zero_grad()
    with burst_rt.over_ranks(ctx, layout, mask=mask):
        out = call(mine, layout.shard(x))
        out.square().sum().backward()
    grads = [ctx.all_reduce(grad) for grad in _grads(mine)]
    return StepResult(layout.unshard(out.detach()), grads)


def _grads(model: nn.Module) -> list[torch.Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def errors_between(a: StepResult, b: StepResult) -> Sequence[float]:
    """Relative errors of out and of all gradients together."""
    pairs = [(a.out, b.out), *((_flat(a), _flat(b)),)]
    return [((x - y).norm() / y.norm()).item() for x, y in pairs]


def _flat(step: StepResult) -> torch.Tensor:
    return torch.cat([grad.flatten() for grad in step.grads])
