"""Seeded mixes of documents, windows and prefixes, over worlds of all sizes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from burst_rt import Causal, Documents, Mask, Prefix, SlidingWindow

__all__ = ["Mix", "mix"]

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
