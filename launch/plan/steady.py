"""The shorter rings that tell about a layer on many ranks; see `burst_rt.planning.steady`.

Under a window, documents, or a recurrence hops differ, and all of them are simulated. So they are
where ranks wait much.
"""

from __future__ import annotations

from math import gcd, lcm

from burst_rt.launch.plan.layer_sizes import Spread
from burst_rt.planning.steady import Steady, has_like_hops
from burst_rt.planning.strategies import check_name
from burst_rt.scheduler.simulator import Hardware

__all__ = ["MOST_IDLE", "SIMULATED_UP_TO", "steady_of"]

# The most ranks that are simulated: twice as many take four times as long.
SIMULATED_UP_TO = 256
# The strategies whose hops are alike. `direct` is bounded in this way where its ranks are too many
# to be simulated: what it sends to other nodes grows faster than the nodes.
_RINGS = ("ring-kv", "burst", "bidirectional", "two-level", "hybrid", "direct")
# A step is whole nodes with at least so many simulated ranks. Worlds of fewer than `_STEPS` steps
# are simulated as they are; those of up to `_FEW` by as short rings as will do.
_STEP, _STEPS, _FEW = 8, 8, 12
# With fewer tokens a rank, or a larger share of idle time, all hops are simulated, unless there are
# more than SIMULATED_UP_TO ranks.
_FEW_TOKENS = 8192
MOST_IDLE = 0.08


def steady_of(layer: Spread, hardware: Hardware) -> Steady | None:
    """The shorter rings that tell about a layer's; None where all of its hops are to be simulated.

    Both have steps of two nodes between them, as a ring of an odd number of nodes that goes both
    ways differs a little from one of an even number.
    """
    if layer.tensor_parallel or not _hops_are_alike(layer):
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


def _hops_are_alike(layer: Spread) -> bool:
    """Whether all tiles of attention take the same time, whatever the hop and the rank."""
    sizes = layer.sizes
    return (
        has_like_hops(layer.mask, layer.layout)
        and sizes.attention is not None
        and sizes.recurrence is None
        and layer.num_spread % layer.ranks_per_node == 0
    )
