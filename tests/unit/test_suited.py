"""Which layout suits a problem: forecast no slower than a plain one; else even, with few bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from covering import first_of
from graphs import Window
from mixes import check_fastest_layout, mix, packed_problem

from burst_rt import Causal, Documents, Full, Mask, SlidingWindow
from burst_rt.planning.choose import fastest_layout
from burst_rt.planning.machines import load_hardware
from burst_rt.scheduler.simulator import Rate

_H100 = load_hardware("h100-sxm")


@pytest.mark.parametrize("seed", first_of(range(8), 4))
def test_the_fastest_layout_is_no_slower_than_a_plain_one(seed: int) -> None:
    """`make test-all` tries 200 mixes."""
    check_fastest_layout(mix(seed, longest=16384, largest=8))


def test_where_heads_are_spread_no_layout_is_better() -> None:
    mask = Causal() & Documents([200] * 40 + [8576] + [100] * 80)
    # Arithmetic takes so long that transfers are hidden.
    tiles, free = Rate(launch_s=0.0, flops_per_s=1e10), Rate(launch_s=0.0)
    rates = {"forward": tiles, "backward": tiles, "default": free}
    slow = replace(_H100, device=replace(_H100.device, rates=rates))
    # Four ranks cannot share two kv heads.
    spread, ring = (
        fastest_layout(packed_problem(4, 24576, mask, kv_heads), slow, ranks_per_node=4)[1]
        for kv_heads in (4, 2)
    )
    assert max(spread.values()) < 1.01 * min(spread.values())
    assert max(ring.values()) > 1.3 * min(ring.values())


def test_without_a_machine_the_layout_is_even_and_sends_little() -> None:
    def kind(mask: Mask) -> str:
        taken, seconds = fastest_layout(packed_problem(4, 4096, mask, 8), None, ranks_per_node=1)
        assert seconds == {}
        return taken.q_layout.kind

    assert kind(Full()) == "zigzag"
    assert kind(Causal()) == "zigzag"
    # All are even, and contiguous shards need few of their neighbours' rows.
    assert kind(SlidingWindow(128)) == "contiguous"
    assert kind(Causal() & Documents([1024] * 4)) == "contiguous"
    assert kind(Causal() & Documents([64] * 32 + [2048])) == "balanced"
    # Its cells are not known, and count as even.
    assert kind(Window()) == "contiguous"
