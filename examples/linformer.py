"""Linformer (arXiv 2006.04768) over ranks: keys and values projected along the sequence to k rows.

Each rank projects its own tokens. An all-reduce sums the projections over the ranks, and attention
is then local. The number of bytes sent does not grow with the sequence.

The graph makes overlap easy. The projection has one task for each part of the all-reduce. The part
that is sent first is projected first, and travels while the next part is projected. In the backward
each part's gradient is spread over the tokens while other parts still travel. No code asks for this
order: it follows from what each task reads and writes.

    burst-rt run -n 3 examples/linformer.py
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import burst_rt
from burst_rt.runtime.collectives import all_reduce, even_parts
from burst_rt.scheduler import Graph, GraphBuilder, Op


class Linformer:
    """Attention to `rows` projected keys: q, k [tokens, heads, head_dim], v as k, of this rank.

    width: heads x (k's head_dim + v's). Calls are collective; so are their backwards.
    """

    def __init__(self, ctx: burst_rt.Context, rows: int, width: int, dtype: torch.dtype) -> None:
        self.ctx, self.rows = ctx, even_parts(rows, ctx.world_size)
        self.sizes = [part * width * dtype.itemsize for part in self.rows]
        self.forward = ctx.pipeline(lambda rank: self.build(rank, backward=False))
        self.backward = ctx.pipeline(lambda rank: self.build(rank, backward=True))
        self.projected = burst_rt.differentiable(self.sum_up, self.spread_out)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, projection: Tensor) -> Tensor:
        """projection [tokens, rows]: this rank's rows of the matrix for keys and values."""
        x = torch.cat([k, v], -1)
        rows = self.projected(x.flatten(1), projection).unflatten(1, x.shape[1:])
        qkv = (q, *rows.split([k.shape[-1], v.shape[-1]], -1))
        return scaled_dot_product_attention(*(x.transpose(0, 1) for x in qkv)).transpose(0, 1)

    def build(self, rank: int, *, backward: bool) -> Graph:
        """The graph of one rank: project, then all-reduce; backward: all-reduce, then spread."""
        world = self.ctx.world_size
        g = GraphBuilder(rank, world, self.ctx.lanes)
        sums = g.buffer("sums", parts=world, size_bytes=self.sizes, initialised=backward)
        if not backward:
            for part in range(world):
                op = Op("project", (sums[part], part))
                g.compute(f"project {part}", op, writes=[sums[part]])
        all_reduce(g, sums)
        if backward:
            grads = g.buffer("grads", initialised=True)
            for part in range(world):
                op = Op("spread", (sums[part], part))
                g.compute(f"spread {part}", op, reads=[sums[part]], accumulates=[grads])
        return g.build()

    def sum_up(self, x: Tensor, projection: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The sum over the ranks of projection^T x, and what the backward needs."""
        sums, columns = x.new_empty(sum(self.rows), x.shape[1]), projection.split(self.rows, 1)

        def project(into: Tensor, part: int) -> None:
            torch.mm(columns[part].T, x, out=into)

        self.forward.run(buffers={"sums": sums}, ops={"project": project})
        return sums, (x, projection)

    def spread_out(self, kept: tuple[Tensor, ...], d_sums: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of x and projection."""
        x, projection = kept
        dx, d_projection = torch.zeros_like(x), torch.empty_like(projection)
        columns, d_columns = (each.split(self.rows, 1) for each in (projection, d_projection))

        def spread(total: Tensor, part: int) -> None:
            dx.addmm_(columns[part], total)
            d_columns[part].copy_(x @ total.T)

        self.backward.run(buffers={"sums": d_sums}, ops={"spread": spread})
        return dx, d_projection


def main(tokens: int = 3_000, heads: int = 4, dim: int = 64, rows: int = 64) -> None:
    """Attends over random tokens, and says what that sent."""
    with burst_rt.init(device="cpu") as ctx:
        own = even_parts(tokens, ctx.world_size)[ctx.rank]
        q, k, v = torch.randn(3, own, heads, dim).requires_grad_()
        projection = torch.randn(own, rows, requires_grad=True)
        attend = Linformer(ctx, rows, heads * 2 * dim, q.dtype)
        out = attend(q, k, v, projection)
        out.square().mean().backward()
        if ctx.rank == 0:
            sent = [of.graph.wire_bytes for of in (attend.forward, attend.backward)]
            print(f"out {tuple(out.shape)}, {k.nbytes + v.nbytes} bytes of k and v, sent {sent}")


if __name__ == "__main__":
    main()
