"""One transformer layer on the ranks of a context, spread in one of several ways, to compare them.

The ways are tensor parallelism (Megatron-LM, arXiv 1909.08053), tensor parallelism with a split
sequence (arXiv 2205.05198), and a split sequence with `burst_attention`. `layers.py` describes the
layer, and says what each way sends and holds.

Collectives are task graphs of `collectives.py` on the context's runtime. The graphs are verified,
the ranks agree on each before anything is sent, and the context's deadlines hold. Every rank must
run the same layers, forward and backward, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from burst_rt.attention.api import burst_attention
from burst_rt.errors import InputError
from burst_rt.launch.plan.layers import HALVES, LayerShape, SpreadLayer
from burst_rt.rotary import rotate, rotations
from burst_rt.runtime import collectives
from burst_rt.runtime.collectives import even_parts
from burst_rt.runtime.pipeline import Pipeline, make_pipeline
from burst_rt.runtime.runtime import Runtime
from burst_rt.scheduler import Buffer, Graph, GraphBuilder

if TYPE_CHECKING:
    from burst_rt.attention.sharding import ContextLayout

__all__ = ["Collectives", "ParallelLayer", "whole_weights"]

_EPS, _THETA = 1e-5, 10_000.0


class Collectives:
    """Ring collectives of a context. All methods block, within the context's deadlines.

    The graphs of the last 64 sizes are kept. The methods raise what `Pipeline.run` raises:
    ContractMismatch where ranks call different collectives or bring different sizes.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._pipeline = lru_cache(maxsize=64)(self._build)

    def all_gather(self, x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """[batch, sum(lengths), width] from every rank's [batch, lengths[rank], width]. Blocks."""
        whole = x.new_empty(x.shape[0], sum(lengths), x.shape[2])
        # With one batch row the parts are views of `whole`.
        parts = [part.contiguous() for part in whole.split(list(lengths), 1)]
        parts[self.runtime.rank].copy_(x)
        self._run("all_gather", parts)
        return whole if x.shape[0] == 1 else torch.cat(parts, 1)

    def reduce_scatter(self, x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """This rank's [batch, lengths[rank], width] of a sum over the ranks. Blocks.

        Every rank brings a term x [batch, sum(lengths), width]; x's memory is overwritten.
        """
        parts: list[torch.Tensor] = [part.contiguous() for part in x.split(list(lengths), 1)]
        self._run("reduce_scatter", parts)
        return parts[self.runtime.rank]

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's contiguous tensor, in place; the same bits everywhere. Blocks."""
        self._run(
            "all_reduce", list(x.view(-1).split(even_parts(x.numel(), self.runtime.world_size)))
        )
        return x

    def _run(self, name: str, parts: list[torch.Tensor]) -> None:
        if self.runtime.world_size == 1:
            return
        pipeline = self._pipeline(name, tuple(part.nbytes for part in parts))
        # A part with one number or none counts as contiguous whatever its strides are. Flattened,
        # the part is contiguous for every reader.
        pipeline.run(buffers={"whole": [part.view(-1) for part in parts]}, ops={})

    def _build(self, name: str, sizes: tuple[int, ...]) -> Pipeline:
        collective: Callable[[GraphBuilder, Buffer], int] = getattr(collectives, name)

        def graph(rank: int) -> Graph:
            g = GraphBuilder(rank, self.runtime.world_size, self.runtime.machine.lanes)
            collective(g, g.buffer("whole", parts=len(sizes), size_bytes=sizes, initialised=True))
            return g.build()

        return make_pipeline(self.runtime, graph)


class _Spread:
    """Moves activations into and out of products with split weights.

    Without a split, activations stay as they are. Both methods block within the context's
    deadlines.
    """

    def __init__(self, layer: SpreadLayer, ring: Collectives) -> None:
        self.layer, self.ring = layer, ring
        self._lengths = [layer.layout.shard_len(rank) for rank in range(layer.layout.world_size)]

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """All tokens, gathered from the tokens that each rank holds."""
        return self.ring.all_gather(x, self._lengths) if self.layer.gathers else x

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, for the tokens that this rank holds; `x` is overwritten."""
        if self.layer.gathers:
            return self.ring.reduce_scatter(x, self._lengths)
        return self.ring.all_reduce(x) if self.layer.tensor_parallel else x


# In the next classes `ctx` is torch's; its attributes are what forward keeps for backward.
class _In(torch.autograd.Function):
    """`apply(x, weight, spread)`: x [batch, own tokens, dim] times the split rows of a weight.

    Megatron's f and the product after it. The gathered x is not kept: the backward gathers x again.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, spread: _Spread) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.spread = spread
        return spread.whole(x) @ weight.T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        with torch.autocast(dy.device.type, enabled=False):
            dx = ctx.spread.total(dy @ weight)
            return dx, _weight_gradient(dy, ctx.spread.whole(x)), None


class _Out(torch.autograd.Function):
    """`apply(y, weight, spread)`: y times the split columns of a weight, summed over the ranks.

    Megatron's g and the product before it.
    """

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, weight: torch.Tensor, spread: _Spread) -> torch.Tensor:
        ctx.save_for_backward(y, weight)
        ctx.spread = spread
        return spread.total(y @ weight.T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        y, weight = ctx.saved_tensors
        dx = ctx.spread.whole(dx.contiguous())
        with torch.autocast(dx.device.type, enabled=False):
            return dx @ weight, _weight_gradient(dx, y), None


class _Shared(torch.autograd.Function):
    """`apply(ring, *weights)`: the weights, unchanged; their gradients are summed over the ranks.

    All gradients travel together, in one message a hop.
    """

    @staticmethod
    def forward(ctx: Any, ring: Collectives, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.ring = ring
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        flat = ctx.ring.all_reduce(torch.cat([grad.reshape(-1) for grad in grads]))
        parts = flat.split([grad.numel() for grad in grads])
        return (None, *(part.view_as(grad) for part, grad in zip(parts, grads, strict=True)))


def _weight_gradient(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return dy.flatten(0, 1).T @ x.flatten(0, 1)


def whole_weights(
    shape: LayerShape, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Whole weights on the CPU. They are the same on every rank, so that no weight must be sent."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, sizes in shape.weights.items():
        noise = torch.randn(sizes, generator=generator, dtype=torch.float64)
        weights[name] = (noise / sizes[-1] ** 0.5 if len(sizes) > 1 else 1 + noise / 10).to(dtype)
    return weights


class ParallelLayer(nn.Module):
    """One causal transformer layer over the ranks of `layout`'s context: `layer(x)`.

    Collective, forward and backward; blocks within the context's deadlines. x is [batch, own
    tokens, dim] in the layout's order.

    strategy: "tensor-parallel" (x is the whole sequence on every rank, whatever the layout is),
    "tensor-parallel+sequence" (x is this rank's tokens; the layout is contiguous), or an attention
    strategy such as "ring-kv", "burst" or "all-to-all" (x is this rank's tokens).
    weights: as `whole_weights` returns them; a rank keeps its part, on the context's device.

    Gradients of weights that all ranks hold are summed over the ranks. So every weight has the
    gradient of the sum of the ranks' losses. With "tensor-parallel" the ranks' losses are the same,
    and every weight has the gradient of one of them.

    Raises InputError on every rank for heads, kv heads or a feed-forward width that the ranks
    cannot share, and for an x of another shape, dtype or device.
    """

    def __init__(
        self,
        layout: ContextLayout,
        shape: LayerShape,
        strategy: str,
        weights: dict[str, torch.Tensor],
    ) -> None:
        super().__init__()
        self.layout, self.runtime, self.shape = layout, layout.runtime, shape
        try:
            size = weights["qkv"].dtype.itemsize
            self.spec = SpreadLayer(
                shape, layout.seq_len, self.runtime.world_size, strategy, input_bytes=size,
                kind=layout.kind,
                ranks_per_node=self.runtime.machine.ranks_per_node,
            )  # fmt: skip
            if self.spec.gathers and layout.kind != "contiguous":
                raise InputError(
                    f"{strategy}: the layout must be contiguous, got {layout.kind}; make it with "
                    "ctx.layout(n, 'contiguous')"
                )
        except InputError as error:
            self.runtime.refuse("ParallelLayer", error)
        self.ring = Collectives(self.runtime)
        self.spread = _Spread(self.spec, self.ring)
        for name, whole in weights.items():
            self.register_parameter(
                name, nn.Parameter(self.own_part(name, whole).to(self.runtime.device))
            )
        positions = torch.cat([torch.arange(b.start, b.stop, b.step) for b in self._seen])
        rotation = (
            part.to(weights["qkv"].dtype).to(self.runtime.device)
            for part in rotations(positions, shape.head_dim, _THETA)
        )
        self.cos, self.sin = rotation

    def own_part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """A copy of this rank's part of a whole weight, or of a whole weight's gradient."""
        shape, share, rank = self.shape, self.spec.share, self.runtime.rank
        if share == 1 or whole.ndim == 1:
            return whole.clone()
        if name in ("out", "down"):
            return whole.chunk(share, 1)[rank].contiguous()
        q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        blocks = whole.split([q, kv, kv] if name == "qkv" else [shape.ffn_dim, shape.ffn_dim])
        return torch.cat([block.chunk(share)[rank] for block in blocks])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output, shaped like x. Collective; blocks within the context's deadlines."""
        self._check(x)
        # Autocast is off, so that everything is computed in the weights' dtype.
        with torch.autocast(x.device.type, enabled=False):
            return self._halves(x)

    def _halves(self, x: torch.Tensor) -> torch.Tensor:
        for half, inner in (("attention", self._attention), ("feed_forward", self._feed_forward)):
            weights: dict[str, torch.Tensor] = {
                name: self.get_parameter(name) for name in HALVES[half]
            }
            shared = self.spec.summed(half)
            if shared:
                same = _Shared.apply(self.ring, *(weights[name] for name in shared))  # type: ignore[no-untyped-call]
                weights.update(zip(shared, same, strict=True))
            norm, into, out = weights.values()
            wide = _In.apply(functional.rms_norm(x, norm.shape, norm, _EPS), into, self.spread)  # type: ignore[no-untyped-call]
            x = x + _Out.apply(inner(wide), out, self.spread)  # type: ignore[no-untyped-call]
        return x

    def _attention(self, qkv: torch.Tensor) -> torch.Tensor:
        shape, share = self.shape, self.spec.share
        heads, kv_heads = shape.num_heads // share, shape.num_kv_heads // share
        q, k, v = qkv.unflatten(-1, (heads + 2 * kv_heads, shape.head_dim)).split(
            [heads, kv_heads, kv_heads], 2
        )
        q, k = rotate(q, self.cos, self.sin), rotate(k, self.cos, self.sin)
        if self.spec.tensor_parallel:
            q, k, v = (each.transpose(1, 2) for each in (q, k, v))
            attended = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=heads != kv_heads
            )
            return attended.transpose(1, 2).flatten(2)
        out = burst_attention(q, k, v, causal=True, layout=self.layout, strategy=self.spec.strategy)
        return out.flatten(2)

    def _feed_forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        return functional.silu(gate) * up

    @property
    def _seen(self) -> tuple[range, ...]:
        """Positions of the tokens that go through attention's projections on this rank."""
        return (
            (range(self.layout.seq_len),)
            if self.spec.tensor_parallel
            else self.layout.map.runs[self.runtime.rank]
        )

    def _check(self, x: torch.Tensor) -> None:
        tokens = self.spec.layout.shard_len(self.runtime.rank % self.spec.layout.world_size)
        right = (
            isinstance(x, torch.Tensor) and x.ndim == 3 and x.shape[1:] == (tokens, self.shape.dim)
        )
        if not right or x.dtype != self.qkv.dtype or x.device != self.runtime.device:
            expected = (
                f"[batch, {tokens}, {self.shape.dim}], {self.qkv.dtype}, on {self.runtime.device}"
            )
            got = (
                f"{list(x.shape)}, {x.dtype}, on {x.device}"
                if isinstance(x, torch.Tensor)
                else type(x).__name__
            )
            error = InputError(
                f"ParallelLayer ({self.spec.strategy}): x: expected {expected}, got {got}; pass "
                "this rank's tokens"
            )
            self.runtime.refuse("ParallelLayer", error)
