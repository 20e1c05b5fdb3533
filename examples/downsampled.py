"""Causal attention to near keys one by one, and to far keys by the means of blocks, over ranks.

A query sees the last `window` keys, back to the beginning of a block of `stride` tokens. The blocks
before that are seen by the means of their keys and values; each counts as `stride` keys, in the
same softmax. With a stride of 1 that is exact attention.

The graph makes two ways at once easy. Near tokens come straight from the ranks that have them,
however many these are; the means, of as many blocks as a rank has, are all-gathered meanwhile. The
backward is the mirror: a reduce-scatter, and the rows' gradients sent home.

    burst-rt run -n 3 examples/downsampled.py
"""

from __future__ import annotations

from itertools import accumulate
from math import log
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

import burst_rt
from burst_rt.errors import InputError
from burst_rt.runtime.collectives import all_gather, even_parts, reduce_scatter
from burst_rt.scheduler import Graph, GraphBuilder, Op

CHUNK = 256  # queries at a time


class Downsampled:
    """q, k, v [own tokens, heads, head_dim]. Calls are collective; so are their backwards.

    row_bytes: of a token's k and v. tokens: of all ranks, a multiple of stride.
    """

    def __init__(
        self, ctx: burst_rt.Context, tokens: int, window: int, stride: int, row_bytes: int
    ) -> None:
        if tokens % stride:
            raise InputError(f"Downsampled: stride {stride} must divide {tokens} tokens; pad them")
        self.ctx, self.window, self.stride, self.row = ctx, window, stride, row_bytes
        self.blocks = even_parts(tokens // stride, ctx.world_size)
        self.shares = [blocks * stride for blocks in self.blocks]
        self.starts = [0, *accumulate(self.shares)]
        self.forward = ctx.pipeline(lambda rank: self.build(rank, backward=False))
        self.backward = ctx.pipeline(lambda rank: self.build(rank, backward=True))

    def first(self, position: int) -> int:
        """The first key that a query sees by itself."""
        return max(0, (position - self.window + 1) // self.stride * self.stride)

    def halo(self, rank: int) -> list[tuple[int, int, int]]:
        """Whose tokens a rank needs beside its own: (rank, from, to), in order."""
        low = self.first(self.starts[rank]) if self.shares[rank] else self.starts[rank]
        spans = [(s, max(low, self.starts[s]), self.starts[s + 1]) for s in range(rank)]
        return [span for span in spans if span[1] < span[2]]

    def build(self, rank: int, *, backward: bool) -> Graph:
        """The graph of one rank."""
        world, row, start = self.ctx.world_size, self.row, self.starts[rank]
        g = GraphBuilder(rank, world, self.ctx.lanes)
        sizes = [blocks * row for blocks in self.blocks]
        far = g.buffer("far", parts=world, size_bytes=sizes, initialised=backward)
        own = g.buffer("own", size_bytes=self.shares[rank] * row, initialised=True)
        mine = [(s, g.buffer(f"near {s}", size_bytes=(b - a) * row, initialised=backward))
                for s, a, b in self.halo(rank)]  # fmt: skip
        theirs = [(r, a - start, b - start) for r in range(rank + 1, world)
                  for s, a, b in self.halo(r) if s == rank]  # fmt: skip
        if not backward:
            sends = [(own, r, (b - a) * row, a * row) for r, a, b in theirs]
            if sends or mine:
                g.exchange("near", sends=sends, recvs=[(near, s) for s, near in mine], tag=0)
            g.compute("pool", Op("pool", (far[rank],)), reads=[own], writes=[far[rank]])
            all_gather(g, far, tag=1)
            return g.build()
        back = [g.buffer(f"from {r}", size_bytes=(b - a) * row) for r, a, b in theirs]
        if back or mine:
            recvs = [(part, r) for part, (r, _, _) in zip(back, theirs, strict=True)]
            g.exchange("near", sends=[(near, s) for s, near in mine], recvs=recvs, tag=0)
        reduce_scatter(g, far, tag=1)
        for part, (r, a, b) in zip(back, theirs, strict=True):
            op = Op("rows", (part, a, b))
            g.compute(f"rows of {r}", op, reads=[part], accumulates=[own])
        g.compute("unpool", Op("unpool", (far[rank],)), reads=[far[rank]], accumulates=[own])
        return g.build()

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        start = self.starts[self.ctx.rank]
        near, far = _Gather.apply(torch.cat([k, v], -1).flatten(1), self)
        near, far = (x.unflatten(1, (q.shape[1], -1)) for x in (near, far))
        outs = [v[:0]]
        for i in range(0, len(q), CHUNK):
            low, rows = self.first(start + i), q[i : i + CHUNK]
            end, offset = start + i + len(rows), start + len(q) - len(near)
            means = far[: self.first(end) // self.stride]
            keys = torch.cat([near[low - offset : end - offset], means])
            bias = self.bias(torch.arange(start + i, end), low, end).to(q.dtype)
            qkv = [x.transpose(0, 1) for x in (rows, *keys.split([k.shape[2], v.shape[2]], -1))]
            outs.append(scaled_dot_product_attention(*qkv, attn_mask=bias).transpose(0, 1))
        return torch.cat(outs)

    def bias(self, queries: torch.Tensor, low: int, end: int) -> torch.Tensor:
        """What is added to the scores with keys low to end, and then with the means."""
        first = ((queries - self.window + 1) // self.stride * self.stride).clamp(min=0)[:, None]
        keys, means = torch.arange(low, end), torch.arange(self.first(end) // self.stride)
        zero = torch.zeros((), dtype=torch.float64)  # the log in full precision
        near = torch.where((keys >= first) & (keys <= queries[:, None]), zero, -torch.inf)
        past = (means + 1) * self.stride <= first
        return torch.cat([near, torch.where(past, zero + log(self.stride), -torch.inf)], 1)


class _Gather(torch.autograd.Function):
    """`apply(x, of)`: this rank's and near tokens, and the means of all blocks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, of: Downsampled) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.of, spans = of, of.halo(of.ctx.rank)
        near = [x.new_empty(b - a, x.shape[1]) for _, a, b in spans]
        far = x.new_empty(sum(of.blocks), x.shape[1])
        buffers = {f"near {s}": part for (s, _, _), part in zip(spans, near, strict=True)}

        def pool(into: torch.Tensor) -> None:
            into.copy_(x.unflatten(0, (len(into), of.stride)).mean(1))

        buffers |= {"own": x, "far": far.split(of.blocks)}
        of.forward.run(buffers=buffers, ops={"pool": pool})
        return torch.cat([*near, x]), far

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_near: torch.Tensor, d_far: torch.Tensor) -> tuple[Any, None]:
        of, spans = ctx.of, ctx.of.halo(ctx.of.ctx.rank)
        *near, own = d_near.clone().split([*(b - a for _, a, b in spans), of.shares[of.ctx.rank]])
        buffers = {f"near {s}": part for (s, _, _), part in zip(spans, near, strict=True)}

        def rows(part: torch.Tensor, a: int, b: int) -> None:
            own[a:b] += part.view(own.dtype).view(b - a, -1)

        def unpool(total: torch.Tensor) -> None:
            own.unflatten(0, (len(total), of.stride)).add_(total[:, None] / of.stride)

        far = d_far.clone().split(of.blocks)
        ops = {"rows": rows, "unpool": unpool}
        of.backward.run(buffers={"own": own, "far": far, **buffers}, ops=ops)
        return own, None


def check(ctx: burst_rt.Context, tokens: int = 120) -> None:
    """Compares outputs and gradients with those of one process, also with exact attention."""
    noise = torch.Generator().manual_seed(0)
    for window, stride in ((20, 4), (50, 8), (5, 1)):
        shape = (4, tokens, 2, 8)
        *whole, dout = torch.randn(shape, generator=noise, dtype=torch.float64).unbind()
        of = Downsampled(ctx, tokens, window, stride, 32 * 8)
        mine = [x.split(of.shares)[ctx.rank].clone().requires_grad_() for x in whole]
        q, k, v = (x.requires_grad_() for x in whole)
        keys, values = (torch.cat([x, x.unflatten(0, (-1, stride)).mean(1)]) for x in (k, v))
        at, block = torch.arange(tokens)[:, None], torch.arange(tokens // stride)
        first = ((at - window + 1) // stride * stride).clamp(min=0)
        seen = torch.cat([(first <= at.T) & (at >= at.T), block * stride + stride <= first], 1)
        counts = torch.tensor([1.0] * tokens + [float(stride)] * len(block), dtype=torch.float64)
        scores = torch.einsum("qhd,khd->hqk", q, keys) / 8**0.5 + counts.log()
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        expected = torch.einsum("hqk,khd->qhd", weights, values)
        expected.backward(dout)
        out = of(*mine)
        out.backward(dout.split(of.shares)[ctx.rank])
        for got, ref in zip(
            [out, *(x.grad for x in mine)], [expected, *(x.grad for x in whole)], strict=True
        ):
            torch.testing.assert_close(got, ref.split(of.shares)[ctx.rank], rtol=1e-12, atol=1e-12)


if __name__ == "__main__":
    with burst_rt.init() as context:
        check(context)
        if context.rank == 0:
            print("outputs and gradients are right")
