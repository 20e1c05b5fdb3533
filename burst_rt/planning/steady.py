"""Long rings by two shorter ones: each further node takes as long as the node before.

Under a causal or a full mask and in an even layout, the tiles of all hops take the same time. A
ring then has a beginning, an end, and hops between them that are alike; so its time, its idle time
and its bytes grow in proportion to the nodes. Two shorter rings with shards as long say how much a
node adds. Under a window or documents hops differ. Where ranks wait much, which messages tiles hide
may change from hop to hop, and what shorter rings say is off by up to 3 %.
"""

from __future__ import annotations

from typing import NamedTuple

from burst_rt.planning.layouts import Layout
from burst_rt.planning.masks import Causal, Full, Mask

__all__ = ["Steady", "has_like_hops"]

# The layouts in which ranks have as much to do, by the mask.
_EVEN: dict[type[Mask], tuple[str, ...]] = {
    Causal: ("zigzag", "striped"),
    Full: ("zigzag", "striped", "contiguous"),
}


class Steady(NamedTuple):
    """Two numbers of ranks that stand in for a larger one."""

    few: int
    more: int

    def extended(self, few: float, more: float, world_size: int) -> float:
        """What a world of `world_size` ranks takes, if these two take `few` and `more`."""
        return more + (more - few) * (world_size - self.more) / (self.more - self.few)


def has_like_hops(mask: Mask, layout: Layout) -> bool:
    """Whether all tiles of self-attention take the same time, whatever the hop and the rank."""
    return layout.kind in _EVEN.get(type(mask), ()) and layout.has_even_shards
