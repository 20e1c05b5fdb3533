"""One transformer layer spread over ranks, and the whole layer in float64 to compare with.

`reference` shares no code with the package: rotary positions by complex numbers, attention with its
matrix of scores, gradients by torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import source_tree  # noqa: F401  (makes `benchmarks` importable)
import torch
from spec import relative_error

from benchmarks.tensor_parallel import ParallelLayer, whole_weights
from burst_rt import Context
from burst_rt.launch.plan.layers import TENSOR_PARALLEL, LayerShape

__all__ = ["LayerCase", "Outcome", "reference", "spread"]

# The heads and the feed-forward's width divide by 1, 2, 3 and 4 ranks.
_SHAPE = LayerShape(dim=20, num_heads=24, num_kv_heads=12, head_dim=8, ffn_dim=36)


@dataclass(frozen=True)
class LayerCase:
    """A layer, how it is spread, and its input."""

    strategy: str
    seq_len: int = 37
    batch: int = 2
    shape: LayerShape = _SHAPE
    dtype: torch.dtype = torch.float64

    def weights(self) -> dict[str, torch.Tensor]:
        return whole_weights(self.shape, seed=1, dtype=self.dtype)

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """x and the gradient of the output, both whole: `[batch, seq_len, dim]` of `dtype`."""
        generator = torch.Generator().manual_seed(2)
        x, dy = torch.randn(
            2, self.batch, self.seq_len, self.shape.dim, generator=generator, dtype=torch.float64
        ).to(self.dtype)
        return x, dy


class Outcome(NamedTuple):
    """What one rank measures."""

    errors: dict[str, float]  # relative errors by the name of the result
    sent: tuple[int, int]  # bytes sent, forward and backward
    predicted: tuple[int, int]  # bytes that the graphs say are sent, forward and backward


def spread(ctx: Context, case: LayerCase) -> Outcome:
    """Runs forward and backward on the ranks. Collective: blocks for the other ranks."""
    layout = ctx.layout(
        case.seq_len, "contiguous" if case.strategy in TENSOR_PARALLEL else "zigzag"
    )
    weights = {name: each.to(ctx.device) for name, each in case.weights().items()}
    layer = ParallelLayer(layout, case.shape, case.strategy, weights)
    is_whole = case.strategy == TENSOR_PARALLEL[0]
    whole = [each.to(ctx.device) for each in case.inputs()]
    x, dy = (each.clone() if is_whole else layout.shard(each) for each in whole)
    x.requires_grad_()
    start = ctx.runtime.transport.bytes_sent
    y = layer(x)
    forward = ctx.runtime.transport.bytes_sent
    y.backward(dy)
    end = ctx.runtime.transport.bytes_sent
    assert x.grad is not None
    truth = reference(case)
    found = {
        name: (each if is_whole else layout.unshard(each)).cpu()
        for name, each in (("y", y.detach()), ("x", x.grad))
    }
    errors = {name: relative_error(each, truth[name]) for name, each in found.items()}
    for name, weight in layer.named_parameters():
        assert weight.grad is not None
        errors[name] = relative_error(weight.grad.cpu(), layer.own_part(name, truth[name]))
    spec = replace(layer.spec, batch=case.batch)
    predicted = (spec.sent_bytes(ctx.rank, forward=True), spec.sent_bytes(ctx.rank, forward=False))
    return Outcome(errors, (forward - start, end - forward), predicted)


def reference(case: LayerCase) -> dict[str, torch.Tensor]:
    """The whole output "y" and the whole gradients of "x" and of every weight, by name; float64."""
    shape = case.shape
    x, dy = (each.double() for each in case.inputs())
    weights = {name: weight.double().requires_grad_() for name, weight in case.weights().items()}
    x.requires_grad_()

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    def turned(x: torch.Tensor) -> torch.Tensor:
        half = shape.head_dim // 2
        speed = 10_000.0 ** -(torch.arange(half, dtype=torch.float64) / half)
        angles = torch.outer(torch.arange(case.seq_len, dtype=torch.float64), speed)
        z = (
            torch.complex(x[..., :half], x[..., half:])
            * torch.polar(torch.ones_like(angles), angles)[:, None]
        )
        return torch.cat((z.real, z.imag), -1)

    qkv = (norm(x, weights["attention_norm"]) @ weights["qkv"].T).unflatten(
        -1, (-1, shape.head_dim)
    )
    q, k, v = qkv.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], 2)
    k, v = (
        each.repeat_interleave(shape.num_heads // shape.num_kv_heads, 2) for each in (turned(k), v)
    )
    scores = torch.einsum("bqhd,bkhd->bhqk", turned(q), k) / shape.head_dim**0.5
    scores = scores.masked_fill(torch.ones(case.seq_len, case.seq_len).triu(1).bool(), -torch.inf)
    h = x + torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2) @ weights["out"].T
    gate, up = (norm(h, weights["feed_forward_norm"]) @ weights["gate_up"].T).chunk(2, -1)
    y = h + (gate * torch.sigmoid(gate) * up) @ weights["down"].T
    names = ["x", *weights]
    grads = torch.autograd.grad(y, [x, *weights.values()], dy)
    return {"y": y.detach(), **dict(zip(names, grads, strict=True))}
