"""The gradient of sinks: a sum over all queries, and so over all ranks.

A rank's share is the sum over its own queries, one number a head. It is complete once lse and delta
are. Every rank gets every share, by the all-gather of Bruck et al. (IEEE TPDS 8, 1997), in
ceil(log2 W) exchanges of a few numbers beside the tiles. Every rank adds the shares up in the order
of the ranks, and so has the same bits.
"""

from __future__ import annotations

from burst_rt.planning.operations import SumSinks
from burst_rt.planning.problem import Problem
from burst_rt.planning.roles import Role
from burst_rt.scheduler import Buffer, Cost, GraphBuilder, Part

__all__ = ["own_share", "share_bytes_sent", "sum_shares"]


def own_share(g: GraphBuilder, problem: Problem) -> list[Part]:
    """The part that the deltas of a rank's queries add to; none where no gradient is needed."""
    if not problem.sink_bytes:
        return []
    return list(g.buffer(Role.DSINKS, size_bytes=problem.sink_bytes, initialised=True).parts)


def sum_shares(g: GraphBuilder, problem: Problem, agreed: Buffer, tag: int) -> None:
    """Adds the exchanges and the sum, once all deltas have been added. One tag is enough."""
    size, rank, world = problem.sink_bytes, g.rank, g.world_size
    if not size or world == 1:
        return
    shares = list(g.buffer(f"{Role.DSINKS} of others", parts=world, size_bytes=size).parts)
    shares[rank] = g.buffers[Role.DSINKS][0]
    step = 1
    while step < world:
        # A rank has the shares of the `step` ranks from itself on.
        count = min(step, world - step)
        low, high = (rank - step) % world, rank + step
        g.exchange(
            f"sinks {step}",
            sends=[(shares[(rank + i) % world], low) for i in range(count)],
            recvs=[(shares[(high + i) % world], high % world) for i in range(count)],
            tag=tag,
            reads=[agreed],
        )
        step *= 2
    others = [share for share in shares if share is not shares[rank]]
    op = SumSinks(tuple(share.id for share in shares))
    cost = Cost(0, world * size)
    g.compute("sum sinks", op, reads=others, accumulates=[shares[rank]], cost=cost)


def share_bytes_sent(problem: Problem) -> int:
    """Bytes that all ranks together send in a backward."""
    return problem.world_size * (problem.world_size - 1) * problem.sink_bytes
