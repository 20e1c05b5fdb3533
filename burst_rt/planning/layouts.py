"""Layouts: which rank owns which positions of the sequence.

Pure Python: planning and simulating need layouts too.

A layout gives runs to ranks. A run is a Python `range` of global positions; a rank's shard is its
runs, one after another. A rank has at least two runs, because a shard travels as two blocks of one
or more runs: one block's gradient sum can leave while the other is still being made. In a world of
one rank there is one run. Lengths that divide by nothing and sequences shorter than the world are
fine: some runs are empty then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

from burst_rt.errors import InputError

__all__ = ["KINDS", "Layout", "make_layout"]

RUNS_PER_RANK = 2
# Positions, and bytes of buffers, are 64-bit integers.
MOST_TOKENS = 1 << 48


@dataclass(frozen=True)
class Layout:
    """Which positions every rank owns. kind, seq_len and world_size determine the runs."""

    kind: str  # "contiguous", "zigzag", "striped", or a name that a strategy made up
    seq_len: int
    world_size: int
    # `runs[rank]`: the ranges of global positions that the rank owns, in local order.
    runs: tuple[tuple[range, ...], ...] = field(repr=False, compare=False)

    def shard_len(self, rank: int) -> int:
        """Number of tokens in a rank's shard."""
        return sum(map(len, self.runs[rank]))


def make_layout(kind: str, seq_len: int, world_size: int) -> Layout:
    """The layout of `kind` ("contiguous", "zigzag", "striped") for `seq_len` tokens.

    Raises InputError for another kind, or a length below 1 or above 2**48.
    """
    if not isinstance(kind, str) or kind not in KINDS:
        raise InputError(f"layout: kind must be one of {sorted(KINDS)}, got {kind!r}")
    if isinstance(seq_len, bool) or not isinstance(seq_len, int) or seq_len < 1:
        raise InputError(f"layout: seq_len must be an integer of at least 1 token, got {seq_len!r}")
    if seq_len > MOST_TOKENS:
        raise InputError(f"layout: seq_len must be at most 2**48 tokens, got {seq_len!r}")
    return _make(kind, seq_len, world_size)


@lru_cache(maxsize=256)
def _make(kind: str, seq_len: int, world_size: int) -> Layout:
    if world_size == 1:
        # Nothing travels, so one run is enough, and gives one tile.
        return Layout(kind, seq_len, 1, ((range(seq_len),),))
    return Layout(
        kind,
        seq_len,
        world_size,
        tuple(KINDS[kind](seq_len, world_size, rank) for rank in range(world_size)),
    )


def _cut(positions: range, num_parts: int) -> list[range]:
    """Cuts a range into consecutive ranges whose lengths differ by at most one."""
    ends = [len(positions) * i // num_parts for i in range(num_parts + 1)]
    return [positions[a:b] for a, b in pairwise(ends)]


def _contiguous(seq_len: int, world_size: int, rank: int) -> tuple[range, ...]:
    """Rank r has the r-th run of tokens."""
    return tuple(
        _cut(range(seq_len), RUNS_PER_RANK * world_size)[
            RUNS_PER_RANK * rank : RUNS_PER_RANK * (rank + 1)
        ]
    )


def _zigzag(seq_len: int, world_size: int, rank: int) -> tuple[range, ...]:
    """Rank r has the r-th of 2W runs from the front and the r-th from the back.

    Causal work is then equal on all ranks.
    """
    runs = _cut(range(seq_len), 2 * world_size)
    return (runs[rank], runs[2 * world_size - 1 - rank])


def _striped(seq_len: int, world_size: int, rank: int) -> tuple[range, ...]:
    """Rank r has every W-th token from the r-th on (Striped Attention, arXiv 2311.09431)."""
    return tuple(_cut(range(rank, seq_len, world_size), RUNS_PER_RANK))


KINDS: dict[str, Callable[[int, int, int], tuple[range, ...]]] = {
    "contiguous": _contiguous,
    "zigzag": _zigzag,
    "striped": _striped,
}
