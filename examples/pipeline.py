"""A custom pipeline on the task graph: a ring of matrix products that hide the transfers.

Each rank r holds a shard X_r of the rows of a matrix, and a weight W_r. The rank computes Y_r = sum
over ranks s of X_s @ W_r[s] while the shards go round the ring. In each hop a rank multiplies the
shard that it holds, sends the shard on, and receives the next shard, all at the same time. The code
below implements neither double buffering nor waiting. The edges of the graph follow from its two
slots and from what each task reads and writes.

    burst-rt run -n 4 examples/pipeline.py
    mpirun -n 4 python examples/pipeline.py
    python examples/pipeline.py                       (one rank)

The example checks the result against a plain product and draws the timeline to pipeline.png.
"""

from pathlib import Path

import torch

import burst_rt
from burst_rt.launch.draw import draw_timeline
from burst_rt.scheduler import Cost, Graph, GraphBuilder, Lane, Op

ROWS, WIDTH = 512, 1024  # the size of one shard
SIZE_BYTES = ROWS * WIDTH * 4


def build(rank: int, world_size: int, lanes: tuple[Lane, ...]) -> Graph:
    """The graph of one rank. Pure: every rank can build and verify the graphs of all ranks."""
    g = GraphBuilder(rank, world_size, lanes)
    own = g.buffer("own", size_bytes=SIZE_BYTES, initialised=True)
    slots = [g.buffer("slot0", size_bytes=SIZE_BYTES), g.buffer("slot1", size_bytes=SIZE_BYTES)]
    result = g.buffer("result", initialised=True)
    here = own
    for hop in range(world_size):
        coming = slots[hop % 2]
        if hop + 1 < world_size:
            after, before = (rank + 1) % world_size, (rank - 1) % world_size
            g.exchange(
                f"hop {hop}", sends=[(here, after)], recvs=[(coming, before)], tag=hop, hop=hop
            )
        owner = (rank - hop) % world_size
        cost = Cost(flops=2 * ROWS * WIDTH * WIDTH)
        g.compute(
            f"hop {hop} product",
            Op("multiply", (here, owner, result)),
            reads=[here],
            accumulates=[result],
            cost=cost,
            hop=hop,
        )
        here = coming
    return g.build()


def main() -> None:
    """Builds, verifies and runs the pipeline, checks the result, and draws the timeline."""
    torch.set_num_threads(1)
    with burst_rt.init(device="cpu") as ctx:
        everyone = torch.Generator().manual_seed(0)
        shards = torch.randn(ctx.world_size, ROWS, WIDTH, generator=everyone)
        weights = torch.randn(
            ctx.world_size, WIDTH, WIDTH, generator=torch.Generator().manual_seed(1 + ctx.rank)
        )
        result = torch.zeros(ROWS, WIDTH)
        buffers = {"own": shards[ctx.rank], "result": result}
        buffers |= {f"slot{i}": torch.empty(ROWS, WIDTH) for i in range(2)}

        def multiply(here: torch.Tensor, owner: int, result: torch.Tensor) -> None:
            result.addmm_(here, weights[owner])

        pipeline = ctx.pipeline(lambda rank: build(rank, ctx.world_size, ctx.lanes))
        pipeline.run(buffers=buffers, ops={"multiply": multiply})  # warms the machine up
        result.zero_()
        trace = pipeline.run(buffers=buffers, ops={"multiply": multiply})
        torch.testing.assert_close(
            result, sum(shards[s] @ weights[s] for s in range(ctx.world_size)), rtol=1e-4, atol=1e-3
        )
        if ctx.rank == 0:
            draw_timeline(
                [trace],
                Path("pipeline.png"),
                title=f"examples/pipeline.py, rank 0 of {ctx.world_size}",
            )
            print("the result is right; wrote pipeline.png")


if __name__ == "__main__":
    main()
