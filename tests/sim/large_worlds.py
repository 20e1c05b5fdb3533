"""Rings of many ranks that all do the same: rank 0's schedule, rotated. As a program it says what
simulating them costs.

python tests/sim/large_worlds.py 1024 [machine]
"""

from __future__ import annotations

import resource
import sys
import time

from burst_rt.planning.machines import load_hardware
from burst_rt.scheduler import HOST_LANES, NCCL_LANES, Cost, Graph, GraphBuilder, Op, Schedule
from burst_rt.scheduler.simulator import Rotated, simulate

__all__ = ["main", "one_tile_a_hop", "rotated"]

# A shard of 8,192 tokens of 8 key heads and 32 query heads of 128, 16 bits: K and V, and the
# arithmetic of a tile.
_SHARD_BYTES = 2 * 8192 * 8 * 128 * 2
_TILE = Cost(flops=4 * 8192 * 8192 * 32 * 128, size_bytes=_SHARD_BYTES)


def one_tile_a_hop(world_size: int, *, nccl: bool, tile: Cost = _TILE) -> Graph:
    """Rank 0's forward graph of a ring with the full mask: an agreement, and for every hop a tile
    under a transfer.
    """
    g = GraphBuilder(0, world_size, NCCL_LANES if nccl else HOST_LANES)
    agreed, q = g.buffer("agreed"), g.buffer("q", initialised=True)
    own = g.buffer("kv", size_bytes=_SHARD_BYTES, initialised=True)
    slots = [g.buffer(f"kv{i}", size_bytes=_SHARD_BYTES) for i in range(2)]
    state = g.buffer("state", initialised=True)
    g.compute("agree", Op("agree"), writes=[agreed], lane="control")
    for hop in range(world_size):
        here = slots[hop % 2] if hop else own
        if hop + 1 < world_size:
            sends, recvs = [(here, 1)], [(slots[(hop + 1) % 2], world_size - 1)]
            g.exchange(f"hop {hop}", sends=sends, recvs=recvs, tag=hop, reads=[agreed])
        g.compute(
            f"tile {hop}", Op("forward", (hop,)), reads=[here, q], accumulates=[state], cost=tile
        )
    return g.build()


def rotated(schedule: Schedule) -> list[Rotated]:
    """The schedule on every rank of its world."""
    return [Rotated(schedule, rank) for rank in range(schedule.graph.world_size)]


def main(world_size: int, machine: str) -> None:
    """Simulates the ring on both kinds of lanes; prints what it took and what it found."""
    for nccl in (False, True):
        start, cpu = time.perf_counter(), time.process_time()
        schedule = Schedule.of(one_tile_a_hop(world_size, nccl=nccl))
        run = simulate(rotated(schedule), load_hardware(machine))
        took_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu
        num_tasks = world_size * len(schedule.graph.tasks)
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        lanes = "NCCL" if nccl else "host"
        print(f"{world_size:,} ranks of {machine}, {lanes} lanes: {num_tasks:,} tasks")
        print(
            f"  simulated in {took_s:.1f} s, {cpu_s:.1f} s of CPU, {cpu_s / num_tasks * 1e6:.1f} "
            f"us each; peak {peak_mib:,.0f} MiB"
        )
        print(
            f"  the run takes {run.end_s * 1e3:.2f} ms, of which rank 0 computes "
            f"{run.ranks[0].busy_s * 1e3:.2f}"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "h100-sxm")
