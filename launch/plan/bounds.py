"""What one direction of a layer takes: simulated, or at least, for answers that cannot win.

A device is busy for the time of its own tasks, and a card or a link for the bytes that pass it. The
longest of these is a bound of a simulated run, in which tasks also wait for each other.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from burst_rt.launch.plan.layers import SpreadLayer
from burst_rt.scheduler import COMPUTE, Graph
from burst_rt.scheduler.simulator import Hardware
from burst_rt.scheduler.simulator.network import Network, Resource

__all__ = ["LayerPass", "Taken", "bound_of"]


class Taken(NamedTuple):
    """Seconds, the longest idle seconds, and the most bytes that a rank sends; at least so much
    where it was not simulated.
    """

    time_s: float
    idle_s: float
    sent_bytes: int
    simulated: bool


@dataclass(frozen=True)
class LayerPass:
    """One direction of a layer; the fields are as for `SpreadLayer.graph`."""

    layer: SpreadLayer
    forward: bool
    attention: bool = True
    again: bool = False

    def graph(self, rank: int) -> Graph:
        """The graph of a rank."""
        return self.layer.graph(
            rank, forward=self.forward, attention=self.attention, again=self.again
        )

    def simulated(self, hardware: Hardware) -> Taken:
        """What it takes, simulated."""
        run = self.layer.simulated(
            hardware, forward=self.forward, attention=self.attention, again=self.again
        )
        idle_s = max(rank.idle_s for rank in run.ranks)
        return Taken(run.end_s, idle_s, max(rank.sent_bytes for rank in run.ranks), True)


def bound_of(run: LayerPass, hardware: Hardware) -> Taken:
    """At least what it takes, by the first and the last rank of a node in the middle."""
    layer = run.layer
    world, per_node = layer.world_size * layer.copies, hardware.node.ranks
    first = world // 2 // per_node * per_node
    ranks = {first, min(first + per_node, world) - 1}
    kernel = None if layer.sizes.attention is None else layer.choice(forward=run.forward).kernel
    network, passing = Network(hardware, world), Counter[Resource]()
    busy_s, sent_bytes = 0.0, 0
    for rank in ranks:
        base = rank - rank % layer.world_size
        graph = run.graph(rank - base)
        tasks = [task for task in graph.tasks if task.lane == COMPUTE.name]
        busy_s = max(busy_s, sum(hardware.device.seconds(task, kernel) for task in tasks))
        sent_bytes = max(sent_bytes, graph.wire_bytes)
        for task in graph.tasks:
            for to, messages in ((True, task.sends), (False, task.recvs)):
                for message in messages:
                    peer = (message.peer + base) % world
                    if to or peer not in ranks:  # else its sender has counted it
                        ends = (rank, peer) if to else (peer, rank)
                        _, resources = network.between(*ends, staged=False)
                        passing.update(dict.fromkeys(resources, message.size_bytes))
    wire_s = max((size / resource.per_s for resource, size in passing.items()), default=0.0)
    time_s = max(busy_s, wire_s)
    return Taken(time_s, time_s - busy_s, sent_bytes, False)
