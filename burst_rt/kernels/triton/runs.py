"""Positions as a kernel takes them: five integers for a side of a tile, instead of a table.

Host side, pure Python. `positions.py` reads the integers inside a kernel.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from burst_rt.errors import InternalError

__all__ = ["Runs", "runs_of"]


class Runs(NamedTuple):
    """Positions of one side of a tile, in at most two runs of one step, growing from row to row.

    Local row i stands at `first + i * step` where i < split, else at `second + (i - split) * step`.
    """

    first: int  # position of the first run's first row
    split: int  # rows in the first run
    second: int  # position of the second run's first row; 0 without a second run
    step: int
    length: int  # rows in both runs


def runs_of(positions: tuple[range, ...], length: int) -> Runs:
    """The runs of a side with `length` rows.

    Raises InternalError where positions do not form such runs; no layout makes such positions.

    Worked example, rank 0 of 2 in a zigzag of 16 tokens: (range(0, 4), range(12, 16)) gives Runs(0,
    4, 12, 1, 8). Contiguous: (range(0, 4), range(4, 8)) is a single run, Runs(0, 8, 0, 1, 8).
    """
    runs: list[range] = []
    for run in filter(len, positions):
        if runs and (joined := _joined(runs[-1], run)):
            runs[-1] = joined
        else:
            runs.append(run)
    steps = {run.step for run in runs if len(run) > 1} or {1}
    grows = all(a[-1] < b[0] for a, b in pairwise(runs))
    if (
        sum(map(len, runs)) != length
        or not 1 <= len(runs) <= 2
        or len(steps) > 1
        or min(steps) < 1
        or not grows
    ):
        raise InternalError(
            f"the triton kernel takes {length} positions in one or two growing runs of one step, "
            f"got {positions}"
        )
    second = runs[1][0] if len(runs) == 2 else 0
    return Runs(runs[0][0], len(runs[0]), second, steps.pop(), length)


def _joined(a: range, b: range) -> range | None:
    """Two runs as one run, where the second continues the first in its step; else None."""
    step = a.step if len(a) > 1 else b.step
    if b[0] - a[-1] != step or (len(b) > 1 and b.step != step):
        return None
    return range(a[0], b[-1] + step, step)
