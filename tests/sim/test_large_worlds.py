"""Many ranks: the time a closed formula gives, and what simulating them may cost."""

from __future__ import annotations

import time
import tracemalloc

import pytest
from sim.large_worlds import one_tile_a_hop, rotated

from burst_rt.planning.machines import load_hardware
from burst_rt.scheduler import Cost, Schedule
from burst_rt.scheduler.simulator import simulate

# 1,024 ranks are to take less than a minute and 4 GiB; a task a quarter of that leaves room for a
# slow or busy machine.
_MAX_SECONDS_A_TASK = 4 * 60.0 / 2_100_000
_MAX_BYTES_A_TASK = 4 * 2**30 / 2_100_000


# The whole tile, and one so small that the transfers decide.
@pytest.mark.parametrize("flops", [10**13, 10**9])
@pytest.mark.parametrize("nccl", [False, True])
@pytest.mark.parametrize("machine", ["a100-pcie", "h100-sxm"])
def test_a_ring_takes_what_its_slowest_link_or_its_tiles_take(
    machine: str, nccl: bool, flops: int
) -> None:
    world_size = 64
    hardware = load_hardware(machine)
    schedule = Schedule.of(one_tile_a_hop(world_size, nccl=nccl, tile=Cost(flops)))
    assert hardware.nics is not None
    card, node = hardware.nics.link, hardware.node
    size = next(task for task in schedule.graph.tasks if task.sends).cost.size_bytes
    # Of a node's messages of one hop one leaves by a card. On PCIe all of a node meet in its root:
    # those between its ranks, the one that leaves and the one that comes.
    ways = [card.bytes_per_s * card.efficiency, node.link.bytes_per_s * node.link.efficiency]
    if node.switch is not None:
        ways.append(node.switch.bytes_per_s * node.switch.efficiency / (node.ranks + 1))
    transfer_s = max(node.link.latency_s, card.latency_s) + size / min(ways)
    tile_s = max(
        hardware.device.seconds(task)
        for task in schedule.graph.tasks
        if task.op and task.op.name == "forward"
    )
    run = simulate(rotated(schedule), hardware)
    # The first exchange waits for the agreement: six rounds.
    first_s = 6 * card.latency_s + transfer_s
    hops_s = max((world_size - 1) * tile_s, first_s + (world_size - 2) * max(tile_s, transfer_s))
    assert run.end_s == pytest.approx(hops_s + tile_s, rel=1e-9)


def test_what_a_task_costs() -> None:
    schedule = Schedule.of(one_tile_a_hop(128, nccl=False))
    hardware = load_hardware("h100-sxm")
    num_tasks = 128 * len(schedule.graph.tasks)
    start_s = time.process_time()
    simulate(rotated(schedule), hardware)
    assert time.process_time() - start_s < num_tasks * _MAX_SECONDS_A_TASK
    tracemalloc.start()
    simulate(rotated(schedule), hardware)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < num_tasks * _MAX_BYTES_A_TASK
