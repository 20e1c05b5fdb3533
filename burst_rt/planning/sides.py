"""A side of a problem in parts: what one group of rows has of one run, evenly spaced positions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar

import numpy as np

from burst_rt.planning.layouts import Block
from burst_rt.planning.masks.spans import Positions

__all__ = ["ROWS_TOGETHER", "Flags", "Needed", "Rows", "Side", "num_rows", "union_of"]

# Some rows of a block: (first, one after the last) of each range, ascending and apart.
Rows: TypeAlias = tuple[tuple[int, int], ...]
# By owner, block and rank: the rows of the owner's block that the rank computes with.
Needed: TypeAlias = tuple[tuple[tuple[Rows, ...], ...], ...]

_T = TypeVar("_T")
Flags: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]

# Number of rows of a group. Kernels load blocks of rows, whose sizes divide this, and must find
# numbers in a whole block: what is hidden is multiplied by 0, and 0 times NaN is NaN.
ROWS_TOGETHER = 256


class Side:
    """All blocks of a side, in parts, which are numbered block by block in local order."""

    def __init__(self, blocks: Sequence[Sequence[Block]]) -> None:
        rows_together = ROWS_TOGETHER
        flat = [block for own in blocks for block in own]
        num_runs = [len(block) for block in flat]
        self.num_ranks, self.blocks_per_rank = len(blocks), len(blocks[0])
        self._disordered = [
            number for number, block in enumerate(flat) if not _ascend(list(filter(None, block)))
        ]
        # Runs.
        self.runs = [run for block in flat for run in block]
        numbers = [(run.start, run.step, len(run)) for run in self.runs]
        run_start, run_step, self.run_len = np.array(numbers, np.int64).T
        self.end = max((run[-1] + 1 for run in self.runs if run), default=0)
        block_of = np.repeat(np.arange(len(flat)), num_runs)
        self.run_rank = block_of // self.blocks_per_rank
        # Blocks.
        self.block_len = np.bincount(block_of, self.run_len, len(flat)).astype(np.int64)
        block_start = np.cumsum(self.block_len) - self.block_len
        # Where each run begins in its block.
        block_at = np.cumsum(self.run_len) - self.run_len - np.repeat(block_start, num_runs)
        # Groups are numbered so that one number is left out between two blocks.
        groups = -(-self.block_len // rows_together) + 1
        self._first_group = np.cumsum(groups) - groups
        self._num_groups = int(groups.sum())
        # Parts.
        first = block_at // rows_together
        last = (block_at + self.run_len - 1) // rows_together
        count = np.where(self.run_len > 0, last + 1 - first, 0)
        self.run_part = np.cumsum(count) - count  # the first part of each run
        self.part_run = np.repeat(np.arange(len(self.runs)), count)
        of_run, at = self.part_run, block_at[self.part_run]
        group = first[of_run] + np.arange(len(of_run)) - self.run_part[of_run]
        self._part_group = self._first_group[block_of[of_run]] + group
        row = np.maximum(group * rows_together - at, 0)  # counted from the start of the run
        self.part_len = np.minimum((group + 1) * rows_together - at, self.run_len[of_run]) - row
        self.part_step = run_step[of_run]
        self.part_start = run_start[of_run] + self.part_step * row

    def places(self, parts: slice | Positions) -> tuple[Positions, Positions]:
        """The part, counted among `parts`, and the position of each row of some parts."""
        start, step, length = (x[parts] for x in (self.part_start, self.part_step, self.part_len))
        part = np.repeat(np.arange(len(length)), length)
        place = np.arange(len(part))
        place *= np.repeat(step, length)
        place += np.repeat(start - step * (np.cumsum(length) - length), length)
        return part, place

    def of_runs(self, parts: Flags) -> Flags:
        """`[n, parts]` to `[n, runs]`: whether any part of a run is marked."""
        in_runs = np.zeros((len(parts), len(self.runs)), bool)
        there = np.flatnonzero(self.run_len)
        if len(there):
            in_runs[:, there] = np.logical_or.reduceat(parts, self.run_part[there], axis=1)
        return in_runs

    def rows(self, parts: Flags, *, whole: bool = False) -> Needed:
        """The rows of the groups of which any part is marked for a rank; parts: `[ranks, parts]`.

        whole: whether blocks are needed whole, or not at all.
        """
        table = np.zeros((self.num_ranks, self._num_groups), bool)
        if len(self._part_group):
            firsts = np.flatnonzero(np.diff(self._part_group, prepend=-1))
            table[:, self._part_group[firsts]] = np.logical_or.reduceat(parts, firsts, axis=1)
        last = np.append(self._first_group[1:], self._num_groups) - 1
        for number in range(len(last)) if whole else self._disordered:
            groups = slice(self._first_group[number], last[number])
            table[:, groups] = table[:, groups].any(1, keepdims=True)
        # The number after a block's last group is never marked, so a range ends in its block.
        edges = np.diff(table.ravel().view(np.int8), prepend=np.int8(0))
        rank, first = np.divmod(np.flatnonzero(edges > 0), self._num_groups)
        stop = np.flatnonzero(edges < 0) % self._num_groups
        block = np.searchsorted(self._first_group, first, side="right") - 1
        first, stop = ((x - self._first_group[block]) * ROWS_TOGETHER for x in (first, stop))
        stop = np.minimum(stop, self.block_len[block])
        place = block * self.num_ranks + rank
        in_order = np.argsort(place, kind="stable")
        pairs = list(zip(first[in_order].tolist(), stop[in_order].tolist(), strict=True))
        count = np.bincount(place, minlength=len(self.block_len) * self.num_ranks)
        ends = [0, *np.cumsum(count).tolist()]
        # Most blocks have the same rows for many ranks, and so the same tuple.
        known: dict[Rows, Rows] = {}
        found = [known.setdefault(x, x) for x in (tuple(pairs[a:b]) for a, b in pairwise(ends))]
        by_block = _in_tuples(found, self.num_ranks)
        return _in_tuples(by_block, self.blocks_per_rank)


def _in_tuples(all_of: Sequence[_T], size: int) -> tuple[tuple[_T, ...], ...]:
    return tuple(tuple(all_of[at : at + size]) for at in range(0, len(all_of), size))


def _ascend(runs: Sequence[range]) -> bool:
    return all(a[-1] < b[0] for a, b in pairwise(runs))


def union_of(row_ranges: Iterable[tuple[int, int]]) -> Rows:
    """The rows that are in any of the ranges."""
    rows: list[tuple[int, int]] = []
    for start, stop in sorted(row_ranges):
        if rows and start <= rows[-1][1]:
            rows[-1] = (rows[-1][0], max(stop, rows[-1][1]))
        else:
            rows.append((start, stop))
    return tuple(rows)


def num_rows(rows: Rows) -> int:
    """Number of rows in all ranges together."""
    return sum(stop - start for start, stop in rows)
