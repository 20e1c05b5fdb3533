"""A step of training out of its layers: micro-batches, the stages of a pipeline, the optimizer.

Micro-batches go through all layers one after another, and their gradients add up. A pipeline gives
each of its stages equally many layers; its micro-batches follow 1F1B (arXiv 2104.04473): a stage
starts as many forwards as stages follow it, then takes a backward for each forward. Between stages
travel the rows of a rank, to the rank with the same place in the next stage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from burst_rt.scheduler.simulator import Hardware
from burst_rt.scheduler.simulator.network import Network

__all__ = ["Total", "handover_seconds", "of_step", "pipeline_seconds"]


class Total(NamedTuple):
    """What one rank takes for one micro-batch, in one direction: seconds, idle seconds, bytes."""

    time_s: float
    idle_s: float
    sent_bytes: float


def of_step(
    forward: Total,
    backward: Total,
    summing: Total,
    micro_batches: int,
    stages: int,
    handover: tuple[float, int],
) -> Total:
    """A step of the busiest rank. Local.

    summing: the backward of the last micro-batch, which also sums the gradients; `backward` is that
    of each other one. handover: seconds and bytes of one between two stages.
    """
    handover_s, handover_bytes = handover
    others = micro_batches - 1
    busy_s = micro_batches * forward.time_s + others * backward.time_s + summing.time_s
    end_s = busy_s
    if stages > 1:
        usual = backward if others else summing
        end_s = pipeline_seconds(forward.time_s, usual.time_s, handover_s, stages, micro_batches)
        end_s += summing.time_s - usual.time_s
    idle_s = micro_batches * forward.idle_s + others * backward.idle_s + summing.idle_s
    sent = micro_batches * forward.sent_bytes + others * backward.sent_bytes + summing.sent_bytes
    # A stage in the middle sends activations on and gradients back; of two stages each does one.
    ways = min(stages - 1, 2)
    return Total(end_s, idle_s + end_s - busy_s, sent + ways * micro_batches * handover_bytes)


def pipeline_seconds(
    forward_s: float, backward_s: float, handover_s: float, stages: int, micro_batches: int
) -> float:
    """Seconds until the last of `stages` equal stages has ended, under 1F1B."""
    ended: dict[tuple[int, int, bool], float] = {}  # by stage, micro-batch and direction
    left = [deque(_order(stage, stages, micro_batches)) for stage in range(stages)]
    free_s = [0.0] * stages
    while any(left):
        for stage, tasks in enumerate(left):
            while tasks:
                number, forward = tasks[0]
                before = stage - 1 if forward else stage + 1
                ready_s: float | None = 0.0
                if 0 <= before < stages:
                    came_s = ended.get((before, number, forward))
                    ready_s = None if came_s is None else came_s + handover_s
                if ready_s is None:
                    break
                tasks.popleft()
                took_s = forward_s if forward else backward_s
                free_s[stage] = max(free_s[stage], ready_s) + took_s
                ended[stage, number, forward] = free_s[stage]
    return max(free_s)


def _order(stage: int, stages: int, micro_batches: int) -> Iterator[tuple[int, bool]]:
    """The micro-batches of a stage in turn, and whether each goes forward."""
    ahead = min(stages - 1 - stage, micro_batches)
    yield from ((number, True) for number in range(ahead))
    for number in range(micro_batches):
        if number + ahead < micro_batches:
            yield number + ahead, True
        yield number, False


def handover_seconds(hardware: Hardware, world_size: int, stages: int, size_bytes: int) -> float:
    """Seconds that all ranks of a stage need to hand `size_bytes` each to the next stage."""
    if stages == 1:
        return 0.0
    network, per_stage = Network(hardware, world_size), world_size // stages
    passing: dict[object, int] = {}
    slowest_s, latency_s = 0.0, 0.0
    for rank in range(per_stage):
        latency_s, resources = network.between(rank, rank + per_stage, staged=False)
        for resource in resources:
            passing[resource] = passing.get(resource, 0) + size_bytes
            slowest_s = max(slowest_s, passing[resource] / resource.per_s)
    return latency_s + slowest_s
