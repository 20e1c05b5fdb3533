"""Performer (arXiv 2009.14794), a linear attention (arXiv 2006.16236), over ranks; full and causal.

With the weights phi(q) phi(k)^T, keys and values are needed only as the sum of phi(k)^T [v, 1].
Full attention adds up the ranks' sums by an all-reduce. Causal attention uses a scan from rank to
rank: a rank adds the sum of the earlier ranks to its own. The backward scans in reverse.

The graph puts the wait to use. A rank computes its own tokens chunk by chunk, and each chunk is a
task. Whenever the running sum arrives, the rank adds to it and passes it on between two chunks.

    burst-rt run -n 3 examples/performer.py
"""

import torch
from torch import Tensor

from burst_rt import Context, Pipeline, differentiable, init
from burst_rt.runtime.collectives import all_reduce, even_parts, scan
from burst_rt.scheduler import Graph, GraphBuilder, Op


class Performer:
    """q, k [heads, own tokens, dim], v [heads, own tokens, v_dim]; features [dim, num_features].

    Calls are collective; so are their backwards. tokens: of all ranks. state: a tensor like the
    sums, [heads, num_features, v_dim + 1].
    """

    chunk = 64  # tokens at a time

    def __init__(self, ctx: Context, tokens: int, state: Tensor, causal: bool) -> None:
        self.ctx, self.state, self.causal = ctx, state, causal
        self.shares = even_parts(tokens, ctx.world_size)
        parts = even_parts(state.numel(), 1 if causal else ctx.world_size)
        self.sizes = [part * state.itemsize for part in parts]
        self.forward = ctx.pipeline(lambda rank: self.build(rank, backward=False))
        self.backward = ctx.pipeline(lambda rank: self.build(rank, backward=True))
        self.weighted = differentiable(self.attend, self.attend_back)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, features: Tensor) -> Tensor:
        ones = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        both: Tensor = self.weighted(phi(q, features), phi(k, features), ones)
        return both[..., :-1] / both[..., -1:]

    def build(self, rank: int, *, backward: bool) -> Graph:
        """The graph of one rank. In the backward the sum goes from later ranks to earlier ones."""
        g = GraphBuilder(rank, self.ctx.world_size, self.ctx.lanes)
        out = g.buffer("out", initialised=True)
        total = g.buffer("total", parts=len(self.sizes), size_bytes=self.sizes, initialised=True)
        if self.causal:
            own = g.buffer("own", size_bytes=self.sizes, initialised=True)
            scan(g, own, total, reverse=backward)
            for start in range(0, self.shares[rank], self.chunk):
                g.compute(f"tokens from {start}", Op("chunk", (start,)), accumulates=[out])
        else:
            all_reduce(g, total)
        g.compute("rest", Op("rest"), reads=[total], accumulates=[out])
        return g.build()

    def run(self, pipeline: Pipeline, *rows: tuple[Tensor, ...]) -> None:
        """Adds (x y^T) z, over all ranks' y and z, to out, for each row (x, y, z, out, total).

        total: the sum of y^T z of earlier ranks, or (full) of all. The graph brings the last row's;
        the others are views of it, or kept from the forward.
        """
        *_, (_, y, z, _, total) = rows
        own = torch.empty_like(total) if self.causal else total
        torch.bmm(y.mT, z, out=own)
        running = [torch.zeros_like(total) for *_, total in rows]

        def chunk(start: int) -> None:
            at = slice(start, start + self.chunk)
            for (*inputs, out, _), state in zip(rows, running, strict=True):
                x, y, z = (each[:, at] for each in inputs)
                out[:, at] += (x @ y.mT).tril() @ z + x @ state
                state += y.mT @ z

        def rest() -> None:
            for x, _, _, out, total in rows:
                out += x @ total

        buffers = {"own": own, "total": total.view(-1)} if self.causal else {"total": own.view(-1)}
        pipeline.run(buffers=buffers, ops={"chunk": chunk, "rest": rest})

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """(q k^T) v over all ranks' keys, causal or not, and what the backward needs."""
        out, total = torch.zeros_like(v), torch.zeros_like(self.state)
        self.run(self.forward, (q, k, v, out, total))
        return out, (q, k, v, total)

    def attend_back(self, kept: tuple[Tensor, ...], g: Tensor) -> tuple[Tensor, ...]:
        """The gradients of q, k and v."""
        q, k, v, before = kept
        dq, dk, dv, after = (torch.zeros_like(x) for x in kept)
        fq, fk, fv, fg = (x.flip(1) for x in (q, k, v, g))  # later tokens first
        rows = [(g, v, k, dq, before.mT), (fv, fg, fq, dk, after.mT), (fk, fq, fg, dv, after)]
        self.run(self.backward, *rows)
        return dq, dk.flip(1), dv.flip(1)


def phi(x: Tensor, features: Tensor) -> Tensor:
    """The positive random features of softmax attention."""
    x = x * x.shape[-1] ** -0.25
    return (x @ features - x.square().sum(-1, keepdim=True) / 2).exp().div(features.shape[1] ** 0.5)


def main(tokens: int = 3_000, heads: int = 4, dim: int = 64, num_features: int = 128) -> None:
    """Attends over random tokens, and says what that sent."""
    with init(device="cpu") as ctx:
        attend = Performer(ctx, tokens, torch.empty(heads, num_features, dim + 1), causal=True)
        q, k, v = torch.randn(3, heads, attend.shares[ctx.rank], dim).requires_grad_()
        out = attend(q, k, v, torch.randn(dim, num_features))
        out.square().mean().backward()
        if ctx.rank == 0:
            sent = [of.graph.wire_bytes for of in (attend.forward, attend.backward)]
            print(f"out {tuple(out.shape)}, {k.nbytes + v.nbytes} bytes of k and v, sent {sent}")


if __name__ == "__main__":
    main()
