"""Layouts: which rank owns which positions of the sequence.

This module does not import torch: planning and simulating need layouts too.

A layout gives runs to ranks. A run is a Python `range` of global positions; a rank's shard is its
runs, one after another. A rank has at least two runs, because a shard travels as two blocks of one
or more runs: one block's gradient sum can leave while the other is still being made. In a world of
one rank there is one run. Lengths that divide by nothing and sequences shorter than the world are
fine: some runs are empty then.

A balanced layout depends on a mask, and so does one of whole documents; `planning/balance.py` and
`planning/whole.py` deal their positions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

from burst_rt.errors import InputError
from burst_rt.planning.balance import cut_runs, deal, even_bounds, load_of
from burst_rt.planning.caches import kept_results
from burst_rt.planning.masks import Mask
from burst_rt.planning.whole import deal_whole

__all__ = [
    "BALANCED", "FOLLOWING", "KINDS", "WHOLE", "Block", "Layout", "blocks_of",
    "make_layout", "mask_for_layout", "one_range", "stretches",
]  # fmt: skip

# Runs of positions of one shard that travel together, in order.
Block = tuple[range, ...]

BALANCED, WHOLE = "balanced", "whole"
# The kinds that follow a mask.
FOLLOWING = (BALANCED, WHOLE)

RUNS_PER_RANK = 2
# Shards whose lengths differ by this share of the longest take the same time.
_SAME_SHARDS = 1e-3
# What the busiest rank of a layout of whole documents may have above its share, where no machine
# says how much pays.
TOLERANCE = 0.05
# Maximum number of tokens: positions, and bytes of buffers, are 64-bit integers.
MOST_TOKENS = 1 << 48


@dataclass(frozen=True)
class Layout:
    """The positions that every rank owns. Everything else together determines the runs."""

    # "contiguous", "zigzag", "striped", "balanced", "whole", or a name that a strategy made up.
    kind: str
    seq_len: int
    world_size: int
    # `runs[rank]`: the ranges of global positions that the rank owns, in local order.
    runs: tuple[tuple[range, ...], ...] = field(repr=False, compare=False)
    # Identifies the runs if a mask decided on them.
    digest: str = ""

    def __str__(self) -> str:
        """Everything that determines the runs but the number of ranks; ranks compare it."""
        return f"{self.kind} {self.seq_len}{self.digest and f', runs {self.digest}'}"

    def shard_len(self, rank: int) -> int:
        """Number of tokens in a rank's shard."""
        return sum(map(len, self.runs[rank]))

    @cached_property
    def has_even_shards(self) -> bool:
        """Whether shards have as many tokens, or nearly: what a rank does takes the same time."""
        lengths = [self.shard_len(rank) for rank in range(self.world_size)]
        return max(lengths) - min(lengths) <= max(lengths) * _SAME_SHARDS


def make_layout(
    kind: str,
    seq_len: int,
    world_size: int,
    mask: Mask | None = None,
    token_cells: float = 0.0,
    tolerance: float = TOLERANCE,
) -> Layout:
    """The layout of `kind` for `seq_len` tokens.

    kind: "contiguous", "zigzag", "striped", or, for a mask of as many queries as keys, "balanced"
    or "whole". token_cells, tolerance: for "whole", see `whole.deal_whole`. Raises InputError for
    another kind, a length below 1 or above 2**48 (where a mask is followed: 2**26), and a mask that
    is missing, is not for this length, or is given with another kind.
    """
    if not isinstance(kind, str) or kind not in (*FOLLOWING, *KINDS):
        raise InputError(
            f"layout: kind must be one of {[*FOLLOWING, *sorted(KINDS)]} or, for a context, "
            f"'auto', got {kind!r}"
        )
    if isinstance(seq_len, bool) or not isinstance(seq_len, int) or seq_len < 1:
        raise InputError(f"layout: seq_len must be an integer of at least 1 token, got {seq_len!r}")
    if seq_len > MOST_TOKENS:
        raise InputError(f"layout: seq_len must be at most 2**48 tokens, got {seq_len!r}")
    if kind in FOLLOWING:
        mask = mask_for_layout(kind, mask, seq_len)
        how = (token_cells, tolerance) if kind == WHOLE else (0.0, 0.0)
        return _following(kind, mask, seq_len, world_size, *how)
    if mask is not None:
        raise InputError(
            f"layout: kind {kind!r} does not depend on a mask; give mask with kind "
            "'balanced', 'whole' or 'auto' only"
        )
    return _make(kind, seq_len, world_size)


def mask_for_layout(kind: str, mask: Mask | None, seq_len: int) -> Mask:
    """The mask that a layout of this kind follows. Raises InputError where it cannot."""
    if not isinstance(mask, Mask):
        given = "none" if mask is None else type(mask).__name__
        raise InputError(
            f"layout: kind {kind!r} needs mask, the burst_rt.Mask that calls will have (Causal() "
            f"for causal=True), got {given}"
        )
    misfit = mask.refuses(seq_len, seq_len, mask.batch)
    if misfit is not None:
        raise InputError(f"layout: mask does not fit seq_len {seq_len}: {misfit}")
    return mask


def blocks_of(runs: Block, count: int) -> tuple[Block, ...]:
    """A shard's runs as one or two blocks. Two are cut as near the middle of the shard as runs
    allow.
    """
    if count == 1:
        return (runs,)
    ends = list(accumulate(map(len, runs)))
    cut = min(range(len(runs)), key=lambda run: abs(2 * ends[run] - ends[-1])) + 1
    return runs[:cut], runs[cut:]


def stretches(runs: Block) -> list[Block]:
    """The runs, those together that follow each other without a gap; see `one_range`."""
    together: list[list[range]] = []
    for run in runs:
        last = together[-1][-1] if together else range(0)
        if together and run.step == last.step and run.start == last.stop:
            together[-1].append(run)
        else:
            together.append([run])
    return list(map(tuple, together))


def one_range(runs: Block) -> range:
    """The positions of runs that follow each other without a gap."""
    return range(runs[0].start, runs[-1].stop, runs[0].step)


@kept_results(64, lambda _, mask, *others: mask)
def _following(
    kind: str, mask: Mask, seq_len: int, world_size: int, token_cells: float, tolerance: float
) -> Layout:
    load = load_of(mask, seq_len, seq_len)
    if kind == WHOLE:
        dealt = deal_whole(load, world_size, token_cells, tolerance)
    else:
        dealt = deal(load, even_bounds(seq_len, world_size))
    if world_size > 1:
        dealt = tuple(map(_halved, dealt))
    digest = hashlib.sha256(repr(dealt).encode()).hexdigest()[:16]
    return Layout(kind, seq_len, world_size, dealt, digest)


def _halved(runs: tuple[range, ...]) -> tuple[range, ...]:
    """The same positions, with a run that ends at half of them, so that both blocks are as long."""
    tokens = sum(map(len, runs))
    halves = cut_runs(runs, (0, tokens // 2)), cut_runs(runs, (tokens // 2, tokens))
    return tuple(run for half in halves for run in half or [range(0)])


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
    lengths = list(map(len, _cut(range(seq_len), world_size)))
    num_tokens, front = lengths[rank], sum(length // 2 for length in lengths[:rank])
    behind = sum(lengths[:rank]) - front  # tokens of the ranks before, from the back
    half = num_tokens // 2
    return (
        range(front, front + half),
        range(seq_len - behind - (num_tokens - half), seq_len - behind),
    )


def _striped(seq_len: int, world_size: int, rank: int) -> tuple[range, ...]:
    """Rank r has every W-th token from the r-th on (Striped Attention, arXiv 2311.09431)."""
    return tuple(_cut(range(rank, seq_len, world_size), RUNS_PER_RANK))


KINDS: dict[str, Callable[[int, int, int], tuple[range, ...]]] = {
    "contiguous": _contiguous,
    "zigzag": _zigzag,
    "striped": _striped,
}
