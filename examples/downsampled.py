"""Causal attention over ranks, to near keys one by one and to far keys by the means of blocks.

A query sees the last `window` keys, back to the beginning of a block of `stride` tokens. It sees
each earlier block by the means of the block's keys and values. Such a mean counts as `stride` keys
in the same softmax. With a stride of 1 this is exact attention.

The graph makes it easy to run two transfers at once. Near tokens come straight from the ranks that
have them, however many these are. Meanwhile every rank's block means are all-gathered. The
backward mirrors the forward line by line.

    burst-rt run -n 3 examples/downsampled.py
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from burst_rt import Context, differentiable, errors, init
from burst_rt.runtime import collectives
from burst_rt.scheduler import Graph, GraphBuilder


class Downsampled:
    """q, k, v [own tokens, heads, head_dim]. Calls are collective; so are their backwards.

    row_bytes: of a token's k and v. tokens: of all ranks, a multiple of stride.
    """

    chunk = 256  # queries at a time

    def __init__(self, ctx: Context, tokens: int, window: int, stride: int, row_bytes: int) -> None:
        if tokens % stride:
            raise errors.InputError(f"stride {stride} must divide {tokens} tokens; pad them")
        self.ctx, self.window, self.stride, self.row_bytes = ctx, window, stride, row_bytes
        self.blocks = collectives.even_parts(tokens // stride, ctx.world_size)
        self.shares = [blocks * stride for blocks in self.blocks]
        # From where to where each rank sees tokens one by one. The last of them are its own.
        stops = torch.tensor(self.shares).cumsum(0)
        starts = self.first(stops - torch.tensor(self.shares))
        self.near = list(zip(starts.tolist(), stops.tolist(), strict=True))
        self.forward = ctx.pipeline(lambda rank: self.build(rank, backward=False))
        self.backward = ctx.pipeline(lambda rank: self.build(rank, backward=True))
        self.gathered = differentiable(self.gather, self.send_home)

    def first(self, queries: Tensor) -> Tensor:
        """The first key that each query sees by itself."""
        return ((queries - self.window + 1) // self.stride * self.stride).clamp(min=0)

    def build(self, rank: int, *, backward: bool) -> Graph:
        """The graph of one rank."""
        g = GraphBuilder(rank, self.ctx.world_size, self.ctx.lanes)
        sizes = [blocks * self.row_bytes for blocks in self.blocks]
        far = g.buffer("far", parts=len(sizes), size_bytes=sizes, initialised=backward)
        if not backward:
            near = collectives.gather_ranges(g, "near", self.shares, self.near, self.row_bytes)
            g.compute("pool", "pool", reads=[near[rank]], writes=[far[rank]])
            collectives.all_gather(g, far, tag=1)
        else:
            near = collectives.reduce_ranges(g, "near", self.shares, self.near, self.row_bytes)
            collectives.reduce_scatter(g, far, tag=1)
            g.compute("unpool", "unpool", reads=[far[rank]], accumulates=[near[rank]])
        return g.build()

    def gather(self, x: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[()]]:
        """Near tokens, the last of which are this rank's own, and the means of all blocks."""
        start, stop = self.near[self.ctx.rank]
        near = torch.cat([x.new_empty(stop - start - len(x), x.shape[1]), x])
        far = x.new_empty(sum(self.blocks), x.shape[1])

        def pool(own: Tensor, means: Tensor) -> None:
            means.copy_(own.unflatten(0, (len(means), self.stride)).mean(1))

        self.forward.run(buffers={"near": near, "far": far}, ops={"pool": pool})
        return (near, far), ()

    def send_home(self, _: tuple[()], d_near: Tensor, d_far: Tensor) -> Tensor:
        """The gradient of this rank's own tokens."""

        def unpool(d_means: Tensor, d_own: Tensor) -> None:
            d_own.unflatten(0, (len(d_means), self.stride)).add_(d_means[:, None] / self.stride)

        self.backward.run(buffers={"near": d_near, "far": d_far}, ops={"unpool": unpool})
        return d_near[len(d_near) - self.shares[self.ctx.rank] :]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        near, far = self.gathered(torch.cat([k, v], -1).flatten(1))
        near, far = (x.unflatten(1, (q.shape[1], -1)) for x in (near, far))
        (start, stop), outs = self.near[self.ctx.rank], [near[:0, :, k.shape[2] :]]
        for i in range(0, len(q), self.chunk):
            rows = q[i : i + self.chunk]
            queries = torch.arange(i, i + len(rows))[:, None] + stop - len(q)
            first = self.first(queries)
            tokens = torch.arange(int(first[0]), int(queries[-1]) + 1)
            blocks = torch.arange(int(first[-1]) // self.stride)
            seen = [(first <= tokens) & (tokens <= queries), (blocks + 1) * self.stride <= first]
            keys = torch.cat([near[first[0] - start :][: len(tokens)], far[: len(blocks)]])
            counts = torch.tensor([1.0] * len(tokens) + [float(self.stride)] * len(blocks)).double()
            bias = counts.log().where(torch.cat(seen, 1), -torch.inf).to(q)
            qkv = (rows, *keys.split([k.shape[2], v.shape[2]], -1))
            query, key, value = (x.transpose(0, 1) for x in qkv)
            outs.append(scaled_dot_product_attention(query, key, value, bias).transpose(0, 1))
        return torch.cat(outs)


def main(tokens: int = 4_096, heads: int = 4, dim: int = 64) -> None:
    """Attends over random tokens, and says what that sent."""
    with init(device="cpu") as ctx:
        attend = Downsampled(ctx, tokens, 256, 16, heads * 2 * dim * 4)
        q, k, v = torch.randn(3, attend.shares[ctx.rank], heads, dim).requires_grad_()
        out = attend(q, k, v)
        out.square().mean().backward()
        if ctx.rank == 0:
            sent = [of.graph.wire_bytes for of in (attend.forward, attend.backward)]
            print(f"out {tuple(out.shape)}, {k.nbytes + v.nbytes} bytes of k and v, sent {sent}")


if __name__ == "__main__":
    main()
