"""What one direction of a layer takes: simulated, or at least, for answers that cannot win.

A device is busy for the time of its own tasks, and a card or a link for the bytes that pass it. The
longest of these is a bound of a simulated run, in which tasks also wait for each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

from burst_rt.launch.plan.layers import SpreadLayer
from burst_rt.launch.plan.steady import MOST_IDLE, SIMULATED_UP_TO
from burst_rt.scheduler import COMPUTE, Graph
from burst_rt.scheduler.simulator import Hardware
from burst_rt.scheduler.simulator.network import Network, Resource

__all__ = ["Known", "LayerPass", "Taken", "bound_of"]


class Taken(NamedTuple):
    """Seconds, the longest idle seconds, and the most bytes that a rank sends; at least so much
    where it was not simulated.
    """

    time_s: float
    idle_s: float
    sent_bytes: int
    simulated: bool


# What passes take that have been simulated on one machine.
Known: TypeAlias = dict[Hashable, Taken]


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

    def simulated(self, hardware: Hardware, known: Known) -> Taken:
        """What it takes, simulated: all ranks, or those of shorter rings that tell as much."""
        if self.layer.steady is not None:
            told = self._extended(lambda shorter: shorter.simulated(hardware, known))
            too_many = self.layer.num_spread > SIMULATED_UP_TO
            if told.idle_s <= MOST_IDLE * told.time_s or too_many:
                return told
            whole = replace(self, layer=replace(self.layer, steady=None))
            return whole.simulated(hardware, known)
        taken = known.get(self._alike)
        if taken is None:
            run = self.layer.simulated(
                hardware, forward=self.forward, attention=self.attention, again=self.again
            )
            idle_s = max(rank.idle_s for rank in run.ranks)
            sent_bytes = max(rank.sent_bytes for rank in run.ranks)
            taken = known[self._alike] = Taken(run.end_s, idle_s, sent_bytes, True)
        return taken

    def raised(self, bound: Taken, hardware: Hardware, known: Known) -> Taken:
        """A higher bound, where shorter rings tell: each node adds to the shortest one, which is
        simulated, what it adds to bounds.
        """
        if self.layer.steady is None:
            return bound
        shortest = replace(self, layer=self.layer.shorter[0])
        simulated = shortest.simulated(hardware, known)
        more_s = max(0.0, simulated.time_s - bound_of(shortest, hardware).time_s)
        return bound._replace(time_s=bound.time_s + more_s, idle_s=bound.idle_s + more_s)

    def bounded(self, hardware: Hardware) -> Taken:
        """At least what it takes."""
        if self.layer.steady is not None:
            return self._extended(lambda shorter: shorter.bounded(hardware))
        return bound_of(self, hardware)

    def _extended(self, taken: Callable[[LayerPass], Taken]) -> Taken:
        """What the pass takes, as shorter rings tell. taken: what a shorter one takes."""
        layer = self.layer
        assert layer.steady is not None
        few, more = (taken(replace(self, layer=each)) for each in layer.shorter)
        time_s, idle_s, sent_bytes = (
            layer.steady.extended(*both, layer.world_size)
            for both in zip(few[:3], more[:3], strict=True)
        )
        return Taken(time_s, max(0.0, idle_s), round(sent_bytes), more.simulated)

    @cached_property
    def _alike(self) -> Hashable:
        """Equal for passes that do the same: strategies may have a direction in common."""
        layer, tiles = self.layer, None
        if self.attention and layer.sizes.attention is not None:
            choice = layer.choice(forward=self.forward)
            tiles = choice.program, choice.kernel
        if not layer.tensor_parallel:  # whose ranks hold other weights
            layer = replace(layer, strategy="ring-kv")
        return layer, tiles, self.forward, self.again


def bound_of(run: LayerPass, hardware: Hardware) -> Taken:
    """At least what it takes, by the first and the last rank of a node in the middle."""
    layer = run.layer
    world, per_node = layer.num_spread * layer.copies, hardware.node.ranks
    first = world // 2 // per_node * per_node
    ranks = {first, min(first + per_node, world) - 1}
    kernel = None if layer.sizes.attention is None else layer.choice(forward=run.forward).kernel
    network, passing = Network(hardware, world), Counter[Resource]()
    busy_s, sent_bytes = 0.0, 0
    for rank in ranks:
        base = rank - rank % layer.num_spread
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
