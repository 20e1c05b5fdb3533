"""What one direction of a layer takes: simulated, or at least, for answers that cannot win."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

from burst_rt.launch.plan.layers import SpreadLayer
from burst_rt.launch.plan.steady import MOST_IDLE, SIMULATED_UP_TO
from burst_rt.planning.bounds import bound_of
from burst_rt.scheduler import Graph
from burst_rt.scheduler.simulator import Hardware

__all__ = ["Known", "LayerPass", "Taken"]


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
        more_s = max(0.0, simulated.time_s - _bound_of(shortest, hardware).time_s)
        return bound._replace(time_s=bound.time_s + more_s, idle_s=bound.idle_s + more_s)

    def bounded(self, hardware: Hardware) -> Taken:
        """At least what it takes."""
        if self.layer.steady is not None:
            return self._extended(lambda shorter: shorter.bounded(hardware))
        return _bound_of(self, hardware)

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


def _bound_of(run: LayerPass, hardware: Hardware) -> Taken:
    layer = run.layer
    kernel = None if layer.sizes.attention is None else layer.choice(forward=run.forward).kernel
    time_s, busy_s, sent_bytes = bound_of(
        run.graph, hardware, layer.num_spread, copies=layer.copies, kernel=kernel
    )
    return Taken(time_s, time_s - busy_s, sent_bytes, False)
