"""Long rings by two shorter ones: each further node takes as long as the node before.

Under a causal or a full mask and in an even layout, the tiles of all hops take the same time. A
ring then has a beginning, an end, and hops between them that are alike; so its time, its idle time
and its bytes grow in proportion to the nodes. Two shorter rings with shards as long say how much a
node adds. Under a window, documents, or a recurrence hops differ, and all of them are simulated. So
they are where ranks wait much: which messages tiles hide may then change from hop to hop, and what
shorter rings say is off by up to 2.5 %.
"""

from __future__ import annotations

from math import gcd, lcm
from typing import NamedTuple

from burst_rt.launch.plan.layer_sizes import Spread
from burst_rt.planning.masks import Causal, Full, Mask
from burst_rt.planning.strategies import check_name
from burst_rt.scheduler.simulator import Hardware

__all__ = ["MOST_IDLE", "SAME_SHARDS", "SIMULATED_UP_TO", "Steady", "steady_of"]

# The most ranks that are simulated: twice as many take four times as long.
SIMULATED_UP_TO = 256
# Shards whose lengths differ by this share of the longest take the same time.
SAME_SHARDS = 1e-3
# The strategies whose hops are alike. `direct` is bounded in this way where its ranks are too many
# to be simulated: what it sends to other nodes grows faster than the nodes.
_RINGS = ("ring-kv", "burst", "bidirectional", "two-level", "hybrid", "direct")
# The layouts in which ranks have as much to do, by the mask.
_EVEN: dict[type[Mask], tuple[str, ...]] = {
    Causal: ("zigzag", "striped"),
    Full: ("zigzag", "striped", "contiguous"),
}
# A step is whole nodes with at least so many simulated ranks. Worlds of fewer than `_STEPS` steps
# are simulated as they are; those of up to `_FEW` by as short rings as will do.
_STEP, _STEPS, _FEW = 8, 8, 12
# With fewer tokens a rank, or a larger share of idle time, all hops are simulated, unless there are
# more than SIMULATED_UP_TO ranks.
_FEW_TOKENS = 8192
MOST_IDLE = 0.08


class Steady(NamedTuple):
    """Two numbers of ranks that stand in for a larger one."""

    few: int
    more: int

    def extended(self, few: float, more: float, world_size: int) -> float:
        """What a world of `world_size` ranks takes, if these two take `few` and `more`."""
        return more + (more - few) * (world_size - self.more) / (self.more - self.few)


def steady_of(layer: Spread, hardware: Hardware) -> Steady | None:
    """The shorter rings that tell about a layer's; None where all of its hops are to be simulated.

    Both have steps of two nodes between them, as a ring of an odd number of nodes that goes both
    ways differs a little from one of an even number.
    """
    if layer.tensor_parallel or not _has_like_hops(layer):
        return None
    if layer.ranks_per_node == 1 < hardware.node.ranks:  # nodes are not equally large
        return None
    name, world = check_name(layer.strategy)[0], layer.world_size
    unit, simulated = _unit(layer, hardware)
    told_badly = name == "direct" or layer.layout.shard_len(0) < _FEW_TOKENS
    if name not in _RINGS or (told_badly and layer.num_spread <= SIMULATED_UP_TO):
        return None
    times = -(-_STEP // simulated)
    steps = world // (unit * times)
    if world % unit or steps < _STEPS:
        return None
    first = 2 if steps < _FEW and steps % 2 == 0 else 3
    few, more = first * times, (first + 2) * times
    if (few + more) * simulated > SIMULATED_UP_TO:
        return None
    return Steady(few * unit, more * unit)


def _unit(layer: Spread, hardware: Hardware) -> tuple[int, int]:
    """The least places that a shorter ring has more or fewer, and how many ranks of these are
    simulated.
    """
    world, node = layer.world_size, layer.groups_per_node
    name, size = check_name(layer.strategy)
    if name == "hybrid":
        assert layer.sizes.attention is not None
        size = size or gcd(node, layer.sizes.attention.num_kv_heads // layer.tensor)
        if layer.tensor == 1 and size == node < world and hardware.folded() is not None:
            return node, 1
    unit = lcm(1 if world == node else node, size or 1)
    return unit, unit * layer.tensor


def _has_like_hops(layer: Spread) -> bool:
    """Whether all tiles of attention take the same time, whatever the hop and the rank."""
    world, sizes, layout = layer.world_size, layer.sizes, layer.layout
    lengths = [layout.shard_len(rank) for rank in range(world)]
    return (
        layer.kind in _EVEN.get(type(layer.mask), ())
        and sizes.attention is not None
        and sizes.recurrence is None
        and max(lengths) - min(lengths) <= max(lengths) * SAME_SHARDS
        and layer.num_spread % layer.ranks_per_node == 0
    )
