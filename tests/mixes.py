"""Seeded mixes of documents, windows and prefixes; whether the layout that is taken is fastest.

The mixes are over worlds of all sizes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from graphs import problem

from burst_rt import Causal, Documents, Mask, Prefix, SlidingWindow
from burst_rt.errors import InputError
from burst_rt.planning.choose import CANDIDATES
from burst_rt.planning.chooser import LAYOUTS, fastest_layout
from burst_rt.planning.layouts import KINDS, make_layout
from burst_rt.planning.machines import load_hardware
from burst_rt.planning.problem import Problem
from burst_rt.planning.ranking import forecast

__all__ = ["Mix", "check_fastest_layout", "mix", "packed_problem"]

_WORLDS = (2, 3, 4, 5, 8, 12, 16, 24, 32, 64)
_LENGTHS = (2000, 4096, 10007, 16384, 65536, 131072)


class Mix(NamedTuple):
    """One packed sequence over one world."""

    mask: Mask
    seq_len: int
    world_size: int


def mix(seed: int, *, longest: int = _LENGTHS[-1], largest: int = _WORLDS[-1]) -> Mix:
    """Document lengths are lognormal or Zipf; masks are causal, full, windows or prefixes.

    longest, largest: the longest sequence and the largest world that may be drawn.
    """
    rng = np.random.default_rng(seed)
    seq_len = int(rng.choice([length for length in _LENGTHS if length <= longest]))
    world_size = int(rng.choice([world for world in _WORLDS if world <= largest]))
    drawn = (
        rng.lognormal(6.5, 1.4, seq_len)
        if rng.random() < 0.5
        else 64.0 * np.minimum(rng.zipf(1.3, seq_len), 1 << 40)
    )
    bounds = np.minimum(np.cumsum(np.maximum(drawn, 1.0)), seq_len).astype(np.int64)
    lengths = np.diff(bounds, prepend=0)
    documents = Documents(rng.permutation(lengths[lengths > 0]))
    window = SlidingWindow(int(rng.integers(16, seq_len // 2)))
    prefix = Prefix(int(rng.integers(16, seq_len)))
    masks = [Causal() & documents, documents, window & documents, prefix & documents]
    masks += [window, prefix, Causal() & (window | documents)]
    return Mix(masks[rng.integers(len(masks))], seq_len, world_size)


def packed_problem(world_size: int, seq_len: int, mask: Mask, kv_heads: int = 2) -> Problem:
    """Attention in 16 bits, in the layout that `problem` takes."""
    return problem(
        seq_len, seq_len, world_size, mask=mask, heads=(8, kv_heads), head_dim=64, input_bytes=2
    )


def check_fastest_layout(drawn: Mix) -> None:
    """That the layout that is taken has the least forecast of all, on H100s, forward and backward,
    and that the forecasts are those of the strategies that calls take.
    """
    mask, seq_len, world_size = drawn
    given, hardware = packed_problem(world_size, seq_len, mask), load_hardware("h100-sxm")
    taken, seconds = fastest_layout(given, hardware, ranks_per_node=world_size)
    assert tuple(seconds) == LAYOUTS
    kind = taken.q_layout.kind
    assert taken.kv_layout is taken.q_layout
    assert seconds[kind] == min(seconds.values())
    for plain in KINDS:
        layout = make_layout(plain, seq_len, world_size)
        spread = replace(given, q_layout=layout, kv_layout=layout)
        best_s = sum(min(_forecasts(spread, forward=forward)) for forward in (True, False))
        # Strategies within 2 percent of each other count as equal.
        assert best_s <= seconds[plain] <= 1.02 * best_s


def _forecasts(given: Problem, *, forward: bool) -> list[float]:
    """What each strategy is forecast to take."""
    hardware, times = load_hardware("h100-sxm"), []
    for strategy in CANDIDATES:
        try:
            times.append(
                forecast(
                    given, strategy, hardware, forward=forward, ranks_per_node=given.world_size
                ).time_s
            )
        except InputError:
            continue  # too many ranks for the heads
    return times
