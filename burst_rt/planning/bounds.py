"""What a run takes at least, without a simulation: for answers that cannot win.

A device is busy for the time of its own tasks, and a card or a link for the bytes that pass it. The
longest of these is a bound of a simulated run, in which tasks also wait for each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from burst_rt.scheduler import COMPUTE, Graph
from burst_rt.scheduler.simulator import Hardware
from burst_rt.scheduler.simulator.network import Network, Resource

__all__ = ["Least", "bound_of"]


class Least(NamedTuple):
    """At least so many seconds; of these, so many of computing; at least so many bytes sent."""

    time_s: float
    busy_s: float
    sent_bytes: int


def bound_of(
    graph: Callable[[int], Graph],
    hardware: Hardware,
    num_ranks: int,
    *,
    copies: int = 1,
    kernel: str | None = None,
) -> Least:
    """A bound by the first and the last rank of a node in the middle.

    graph: of each of `num_ranks` ranks. copies: so many worlds of them run beside each other.
    kernel: the one that belongs to the program, if one does.
    """
    world, per_node = num_ranks * copies, hardware.node.ranks
    first = world // 2 // per_node * per_node
    ranks = {first, min(first + per_node, world) - 1}
    network, passing = Network(hardware, world), Counter[Resource]()
    busy_s, sent_bytes = 0.0, 0
    for rank in ranks:
        base = rank - rank % num_ranks
        of_rank = graph(rank - base)
        tasks = [task for task in of_rank.tasks if task.lane == COMPUTE.name]
        busy_s = max(busy_s, sum(hardware.device.seconds(task, kernel) for task in tasks))
        sent_bytes = max(sent_bytes, of_rank.wire_bytes)
        for task in of_rank.tasks:
            for to, messages in ((True, task.sends), (False, task.recvs)):
                for message in messages:
                    peer = (message.peer + base) % world
                    if to or peer not in ranks:  # else its sender has counted it
                        ends = (rank, peer) if to else (peer, rank)
                        _, resources = network.between(*ends, staged=False)
                        passing.update(dict.fromkeys(resources, message.size_bytes))
    wire_s = max((size / resource.per_s for resource, size in passing.items()), default=0.0)
    return Least(max(busy_s, wire_s), busy_s, sent_bytes)
