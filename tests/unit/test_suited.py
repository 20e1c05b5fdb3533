"""Which layout suits a problem: forecast no slower than a plain one; else even, with few bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from graphs import Window, problem
from mixes import mix

from burst_rt import Causal, Documents, Full, Mask, SlidingWindow
from burst_rt.errors import InputError
from burst_rt.planning.forecast import CANDIDATES, forecast
from burst_rt.planning.layouts import KINDS, make_layout
from burst_rt.planning.machines import load_hardware
from burst_rt.planning.problem import Problem
from burst_rt.planning.suited import LAYOUTS, fastest_layout
from burst_rt.scheduler.simulator import Rate

_H100 = load_hardware("h100-sxm")


def _problem(world_size: int, seq_len: int, mask: Mask, kv_heads: int = 2) -> Problem:
    return problem(
        seq_len, seq_len, world_size, mask=mask, heads=(8, kv_heads), head_dim=64, input_bytes=2
    )


def _best_s(given: Problem, forward: bool) -> float:
    """The least time that any strategy is forecast to take."""
    times = []
    for strategy in CANDIDATES:
        try:
            times.append(forecast(given, strategy, _H100, forward=forward).time_s)
        except InputError:
            continue  # too many ranks for the heads
    return min(times)


@pytest.mark.parametrize("seed", range(8))
def test_the_fastest_layout_is_no_slower_than_a_plain_one(seed: int) -> None:
    mask, seq_len, world_size = mix(seed, longest=16384, largest=8)
    given = _problem(world_size, seq_len, mask)
    taken, seconds = fastest_layout(given, _H100, ranks_per_node=world_size)
    assert tuple(seconds) == LAYOUTS
    kind = taken.q_layout.kind
    assert taken.kv_layout is taken.q_layout
    assert seconds[kind] == min(seconds.values())
    for plain in KINDS:
        layout = make_layout(plain, seq_len, world_size)
        spread = replace(given, q_layout=layout, kv_layout=layout)
        best_s = _best_s(spread, True) + _best_s(spread, False)
        # Of strategies within 2 percent the one that sends least is taken.
        assert best_s <= seconds[plain] <= 1.02 * best_s


def test_where_heads_are_spread_no_layout_is_better() -> None:
    mask = Causal() & Documents([200] * 40 + [8576] + [100] * 80)
    # Arithmetic takes so long that transfers are hidden.
    tiles, free = Rate(launch_s=0.0, flops_per_s=1e10), Rate(launch_s=0.0)
    rates = {"forward": tiles, "backward": tiles, "default": free}
    slow = replace(_H100, device=replace(_H100.device, rates=rates))
    # Four ranks cannot share two kv heads.
    spread, ring = (
        fastest_layout(_problem(4, 24576, mask, kv_heads), slow, ranks_per_node=4)[1]
        for kv_heads in (4, 2)
    )
    assert max(spread.values()) < 1.01 * min(spread.values())
    assert max(ring.values()) > 1.3 * min(ring.values())


def test_without_a_machine_the_layout_is_even_and_sends_little() -> None:
    def kind(mask: Mask) -> str:
        taken, seconds = fastest_layout(_problem(4, 4096, mask, 8), None, ranks_per_node=1)
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
