"""Positions of rows on the device.

Positions come as the scalars of `Runs` (`runs.py`) and grow along a side. So the columns of a tile
that a causal row sees are the tile's first columns, and a few integer operations count them, once a
row. A block's first and last row tell how many columns all of its rows see, how many only some see,
and how many none. Among the columns that some rows see, a cell is seen if its column is before its
row's count.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["POSITIONS", "count_through", "position_of"]

# Kernel arguments that differ from tile to tile. Specialising on their values would compile kernels
# over and over.
POSITIONS = [
    "q_first",
    "q_split",
    "q_second",
    "q_step",
    "q_len",
    "kv_first",
    "kv_split",
    "kv_second",
    "kv_step",
    "kv_len",
]


@triton.jit
def position_of(row, first, split, second, step):
    """The position of a local row (or of each row of a block)."""
    return tl.where(row < split, first + row * step, second + (row - split) * step)


@triton.jit
def count_through(position, first, split, second, step, length):
    """How many rows of a side stand at `position` or before it.

    They are the side's first rows, because positions grow.

    Worked example: of the runs (0, 4, 12, 1, 8), positions 0 1 2 3 12 13 14 15, six are at or
    before 13: min(14, 4) + min(2, 4).
    """
    # The numerator is never negative: division on a GPU rounds towards zero.
    in_first = tl.minimum(tl.maximum(position - first + step, 0) // step, split)
    in_second = tl.minimum(tl.maximum(position - second + step, 0) // step, length - split)
    return in_first + in_second
