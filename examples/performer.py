"""Performer (arXiv 2009.14794), a linear attention (arXiv 2006.16236), over ranks; full and causal.

With phi(q) phi(k)^T for weights, keys and values are needed only as their sums of phi(k)^T [v, 1].
Full: the ranks' sums come together by an all-reduce. Causal: a running sum goes from rank to rank,
and each rank adds to its own tokens' part what the ranks before it bring. The backward is the same
graph in the other direction.

The graph makes the wait useful. A rank's own tokens are done chunk by chunk; each chunk is a task,
and the running sum is received, added to and passed on between chunks, whenever it comes.

    burst-rt run -n 3 examples/performer.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

import burst_rt
from burst_rt.runtime.collectives import all_reduce, even_parts
from burst_rt.runtime.pipeline import Pipeline
from burst_rt.scheduler import Graph, GraphBuilder, Op

CHUNK = 64


class Performer:
    """q, k [heads, own tokens, dim], v [heads, own tokens, v_dim]; features [dim, num_features].

    Calls are collective; so are their backwards. `state_size`: heads x num_features x (v_dim + 1).
    """

    def __init__(
        self, ctx: burst_rt.Context, tokens: int, state_size: int, dtype: torch.dtype, causal: bool
    ) -> None:
        self.ctx, self.causal = ctx, causal
        self.shares = even_parts(tokens, ctx.world_size)
        self.parts = [state_size] if causal else even_parts(state_size, ctx.world_size)
        self.sizes = [part * dtype.itemsize for part in self.parts]
        self.forward, self.backward = (
            ctx.pipeline(lambda rank, step=step: self.build(rank, step)) for step in (1, -1)
        )

    def build(self, rank: int, step: int) -> Graph:
        """The graph of one rank. step: 1 where the sum goes to later ranks, -1 to earlier ones."""
        g = GraphBuilder(rank, self.ctx.world_size, self.ctx.lanes)
        own = g.buffer("own", parts=len(self.sizes), size_bytes=self.sizes)
        out = g.buffer("out", initialised=True)
        g.compute("sum", Op("sum"), writes=[own])
        total = own
        if self.causal:
            before, after = rank - step, rank + step
            total = g.buffer("before", size_bytes=self.sizes[0], initialised=True)
            if 0 <= before < self.ctx.world_size:
                g.exchange("receive", recvs=[(total, before)], tag=0)
                g.compute("add", Op("add", (own, total)), reads=[total], accumulates=[own])
            if 0 <= after < self.ctx.world_size:
                g.exchange("pass on", sends=[(own, after)], tag=0)
            for chunk in range(-(-self.shares[rank] // CHUNK)):
                g.compute(f"chunk {chunk}", Op("chunk", (chunk,)), accumulates=[out])
        else:
            all_reduce(g, own)
        g.compute("rest", Op("rest"), reads=[total], accumulates=[out])
        return g.build()

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, features: torch.Tensor
    ) -> torch.Tensor:
        ones = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        both = _Weighted.apply(phi(q, features), phi(k, features), ones, self)
        return both[..., :-1] / both[..., -1:]

    def run(
        self, pipeline: Pipeline, a: torch.Tensor, b: torch.Tensor, rows: Sequence[Any], rest: Any
    ) -> torch.Tensor:
        """Runs a graph whose state is a^T b; returns the state that the rest was made with.

        rows: (x, y, z, out), for which chunks add tril(x y^T) z to out. rest(state): adds the rest.
        """
        own = a.new_empty(a.shape[0], a.shape[2], b.shape[2])
        total = torch.zeros_like(own) if self.causal else own
        running = [y.mT[:, :, :0] @ z[:, :0] for _, y, z, _ in rows]

        def chunk(number: int) -> None:
            at = slice(number * CHUNK, (number + 1) * CHUNK)
            for (*inputs, out), state in zip(rows, running, strict=True):
                x, y, z = (each[:, at] for each in inputs)
                out[:, at] += (x @ y.mT).tril() @ z + x @ state
                state += y.mT @ z

        ops = {"sum": lambda: own.copy_(a.mT @ b), "chunk": chunk, "rest": lambda: rest(total)}
        buffers = {"own": own.view(-1).split(self.parts), "before": total}
        pipeline.run(buffers=buffers, ops=ops)
        return total


class _Weighted(torch.autograd.Function):
    """`apply(q, k, v, of)`: (q k^T) v over all ranks' keys, causal or not."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, of: Any) -> Any:
        out = q.new_zeros(*q.shape[:2], v.shape[2])
        state = of.run(of.forward, k, v, [(q, k, v, out)], lambda state: out.add_(q @ state))
        ctx.save_for_backward(q, k, v, state)
        ctx.of = of
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, before = ctx.saved_tensors
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        fq, fk, fv, fg = (x.flip(1) for x in (q, k, v, g))  # later tokens first

        def rest(state: torch.Tensor) -> None:
            dq.add_(g @ before.mT)
            dk.add_(fv @ state.mT)
            dv.add_(fk @ state)

        rows = [(g, v, k, dq), (fv, fg, fq, dk), (fk, fq, fg, dv)]
        ctx.of.run(ctx.of.backward, q, g, rows, rest)
        return dq, dk.flip(1), dv.flip(1), None


def phi(x: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """The positive random features of softmax attention."""
    x = x * x.shape[-1] ** -0.25
    return (x @ features - x.square().sum(-1, keepdim=True) / 2).exp() / features.shape[1] ** 0.5


def check(ctx: burst_rt.Context, tokens: int = 259) -> None:
    """Compares outputs and gradients with those of one process."""
    noise = torch.Generator().manual_seed(0)
    for causal in (False, True):
        sizes = ((2, tokens, 8),) * 4 + ((8, 12),)
        *whole, dout, w = (torch.randn(s, generator=noise, dtype=torch.float64) for s in sizes)
        of = Performer(ctx, tokens, 2 * 12 * 9, torch.float64, causal)
        mine = [x.split(of.shares, 1)[ctx.rank].clone().requires_grad_() for x in whole]
        q, k, v = (x.requires_grad_() for x in whole)
        weights = phi(q, w) @ phi(k, w).mT
        weights = weights.tril() if causal else weights
        expected = weights @ v / weights.sum(-1, keepdim=True)
        expected.backward(dout)
        out = of(*mine, w)
        out.backward(dout.split(of.shares, 1)[ctx.rank])
        for got, ref in zip(
            [out, *(x.grad for x in mine)], [expected, *(x.grad for x in whole)], strict=True
        ):
            ref = ref.split(of.shares, 1)[ctx.rank]
            torch.testing.assert_close(got, ref, rtol=1e-10, atol=1e-10)


if __name__ == "__main__":
    with burst_rt.init() as context:
        check(context)
        if context.rank == 0:
            print("outputs and gradients are right")
