"""Linformer (arXiv 2006.04768) over ranks: keys and values projected along the sequence to k rows.

Each rank projects its own tokens. The sums over the ranks come together by an all-reduce, and
attention is then local. What is sent does not grow with the sequence.

The graph makes overlap easy. The projection is one task for each part of the all-reduce, so the
first part travels while the next is projected. In the backward each part's gradient is spread over
the tokens while the other parts still travel. No line of the code says so.

    burst-rt run -n 3 examples/linformer.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

import burst_rt
from burst_rt.runtime.collectives import all_reduce, even_parts
from burst_rt.scheduler import Graph, GraphBuilder, Op


class Linformer:
    """Attention to `rows` projected keys: q, k [tokens, heads, head_dim], v as k, of this rank.

    width: heads x (k's head_dim + v's). Calls are collective; so are their backwards.
    """

    def __init__(self, ctx: burst_rt.Context, rows: int, width: int, dtype: torch.dtype) -> None:
        self.ctx, self.rows, self.width = ctx, even_parts(rows, ctx.world_size), width
        self.sizes = [part * width * dtype.itemsize for part in self.rows]
        self.forward = ctx.pipeline(lambda rank: self.build(rank, backward=False))
        self.backward = ctx.pipeline(lambda rank: self.build(rank, backward=True))

    def build(self, rank: int, *, backward: bool) -> Graph:
        """The graph of one rank: project, then all-reduce; backward: all-reduce, then spread."""
        world = self.ctx.world_size
        g = GraphBuilder(rank, world, self.ctx.lanes)
        sums = g.buffer("sums", parts=world, size_bytes=self.sizes, initialised=backward)
        order = [(rank - 1 - hop) % world for hop in range(world)]  # in which parts are sent
        if not backward:
            for part in order:
                op = Op("project", (sums[part], part))
                g.compute(f"project {part}", op, writes=[sums[part]])
        all_reduce(g, sums)
        if backward:
            grads = g.buffer("grads", initialised=True)
            for part in order:
                op = Op("spread", (sums[part], part))
                g.compute(f"spread {part}", op, reads=[sums[part]], accumulates=[grads])
        return g.build()

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, projection: torch.Tensor
    ) -> torch.Tensor:
        """projection [tokens, rows]: this rank's rows of the matrix for keys and values."""
        x = torch.cat([k, v], -1)
        projected = _Project.apply(x.flatten(1), projection, self).unflatten(1, x.shape[1:])
        return local(q, *projected.split([k.shape[-1], v.shape[-1]], -1))


class _Project(torch.autograd.Function):
    """`apply(x, e, of)`: the sum over the ranks of e^T x."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, e: torch.Tensor, of: Linformer) -> torch.Tensor:
        ctx.save_for_backward(x, e)
        ctx.of = of
        sums, columns = x.new_empty(sum(of.rows), of.width), e.split(of.rows, 1)

        def project(into: torch.Tensor, part: int) -> None:
            torch.mm(columns[part].T, x, out=into)

        of.forward.run(buffers={"sums": sums.split(of.rows)}, ops={"project": project})
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x, e), of = ctx.saved_tensors, ctx.of
        dx, de, columns = torch.zeros_like(x), torch.zeros_like(e), e.split(of.rows, 1)

        def spread(total: torch.Tensor, part: int) -> None:
            dx.addmm_(columns[part], total)
            de.split(of.rows, 1)[part].copy_(x @ total.T)

        sums = grad.clone(memory_format=torch.contiguous_format).split(of.rows)
        of.backward.run(buffers={"sums": sums}, ops={"spread": spread})
        return dx, de, None


def local(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention in one process, heads second."""
    out: torch.Tensor = scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)))
    return out.transpose(0, 1)


def check(ctx: burst_rt.Context, tokens: int = 103, rows: int = 14) -> None:
    """Compares outputs and gradients with those of one process."""
    noise = torch.Generator().manual_seed(0)
    sizes = ((tokens, 2, 8),) * 3 + ((tokens, rows), (tokens, 2, 8))
    *whole, dout = (torch.randn(s, generator=noise, dtype=torch.float64) for s in sizes)
    shares = even_parts(tokens, ctx.world_size)
    mine = [x.split(shares)[ctx.rank].clone().requires_grad_() for x in whole]
    q, k, v, e = (x.requires_grad_() for x in whole)
    expected = local(q, *(torch.einsum("tr,thd->rhd", e, x) for x in (k, v)))
    expected.backward(dout)
    out = Linformer(ctx, rows, 2 * 16, torch.float64)(*mine)
    out.backward(dout.split(shares)[ctx.rank])
    for got, of in zip(
        [out, *(x.grad for x in mine)], [expected, *(x.grad for x in whole)], strict=True
    ):
        torch.testing.assert_close(got, of.split(shares)[ctx.rank], rtol=1e-12, atol=1e-12)


if __name__ == "__main__":
    with burst_rt.init() as context:
        check(context)
        if context.rank == 0:
            print("outputs and gradients are right")
