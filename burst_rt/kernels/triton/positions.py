"""What the kernels share on the device: positions of rows, and loads of a block of rows.

Positions come as the scalars of `Runs` (runs.py) and grow along a side, so what a causal row sees of a tile is its first columns; how many,
is counted with a few integer operations, once a row. A block's first and last row say which columns all of its rows see, which some, and
which none; among those that some see, a cell is seen if its column is before its row's count.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["POSITIONS", "add_rows", "count_through", "load_rows", "position_of"]

# Kernel arguments that differ from tile to tile; specialising on their values would compile kernels over and over.
POSITIONS = ["q_first", "q_split", "q_second", "q_step", "q_len", "kv_first", "kv_split", "kv_second", "kv_step", "kv_len"]


@triton.jit
def position_of(row, first, split, second, step):
    """Where a local row (or a block of rows) stands."""
    return tl.where(row < split, first + row * step, second + (row - split) * step)


@triton.jit
def count_through(position, first, split, second, step, length):
    """How many rows of a side stand at `position` or before it; they are its first ones, since positions grow.

    Worked example: of the runs (0, 4, 12, 1, 8), positions 0 1 2 3 12 13 14 15, six are at or before 13: min(14, 4) + min(2, 4).
    """
    # Never negative before the division, which on a GPU rounds towards zero.
    in_first = tl.minimum(tl.maximum(position - first + step, 0) // step, split)
    in_second = tl.minimum(tl.maximum(position - second + step, 0) // step, length - split)
    return in_first + in_second


@triton.jit
def load_rows(
    pointer,
    row,
    stride,
    length,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    EVEN: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Rows [row, row + BLOCK_R) of a matrix `[length, HEAD_DIM]` as a block `[BLOCK_R, BLOCK_D]`, 0 beyond its edges.

    EVEN: none of these rows is beyond. The block's corner is addressed in 64 bits, what is inside it in 32.
    """
    o_r = tl.arange(0, BLOCK_R)
    o_d = tl.arange(0, BLOCK_D)
    pointers = pointer + tl.cast(row, tl.int64) * stride + (o_r[:, None] * stride + o_d[None, :])
    if EVEN:
        block = tl.load(pointers) if HEAD_DIM == BLOCK_D else tl.load(pointers, mask=(o_d < HEAD_DIM)[None, :], other=0.0)
    elif HEAD_DIM == BLOCK_D:
        block = tl.load(pointers, mask=(row + o_r < length)[:, None], other=0.0)
    else:
        block = tl.load(pointers, mask=(row + o_r < length)[:, None] & (o_d < HEAD_DIM)[None, :], other=0.0)
    if INTERPRET:
        # The interpreter's 16-bit arithmetic is wrong.
        block = block.to(tl.float32)
    return block


@triton.jit
def _add_part(pointer, row, stride, length, part, column, HEAD_DIM: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr):
    o_r = tl.arange(0, BLOCK_R)
    o_c = column + tl.arange(0, BLOCK_C)
    pointers = pointer + tl.cast(row, tl.int64) * stride + (o_r[:, None] * stride + o_c[None, :])
    inside = (row + o_r < length)[:, None] & (o_c < HEAD_DIM)[None, :]
    tl.store(pointers, tl.load(pointers, mask=inside, other=0.0) + part, mask=inside)


@triton.jit
def add_rows(pointer, row, stride, length, block, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr):
    """Adds a block `[BLOCK_R, BLOCK_D]` to the rows [row, row + BLOCK_R) of a float32 matrix `[length, HEAD_DIM]`.

    One half of the columns after the other: what is loaded for all of them at once has no room in the registers beside two blocks of sums.
    """
    HALF: tl.constexpr = BLOCK_D // 2
    left, right = tl.split(tl.permute(tl.reshape(block, (BLOCK_R, 2, HALF)), (0, 2, 1)))
    _add_part(pointer, row, stride, length, left, 0, HEAD_DIM, HALF, BLOCK_R)
    _add_part(pointer, row, stride, length, right, HALF, HEAD_DIM, HALF, BLOCK_R)
