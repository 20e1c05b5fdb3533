"""Work lists and spans inside kernels: which blocks to do, and which of their cells are seen.

`planning/worklist.py` makes the tables, which are copied to the device. A program does one line of
its list: first its whole runs, whose cells are all seen, then its cut runs, whose cells are
compared with the spans of their rows. No other block is loaded.

WIDTH says how the rows' spans are given. 1, 2 or 4: number of spans of each row, as vectors.
COMPRESSED: each row has a list of its own; see `worklist._compressed`. CELLS, where a mask has no
spans: all blocks are cut, and cells replace the spans, int8 `[columns, rows]`, not 0 where a cell
is seen, with columns up to the end of the last block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from burst_rt.kernels.triton.configs import CELLS, COMPRESSED

__all__ = [
    "VARYING",
    "line_of",
    "load_bounds",
    "of_batch_row",
    "only_run_of",
    "run_of",
    "seen_of",
]  # fmt: skip

_COMPRESSED = tl.constexpr(COMPRESSED)
_CELLS = tl.constexpr(CELLS)
# Names of kernel arguments that differ from tile to tile. Specialising on their values would
# compile kernels over and over.
VARYING = ["q_len", "kv_len", "by_row"]


@triton.jit
def line_of(p_lines, number, num_lines, i_b, by_row):
    """A line of the list: its block, its first whole run, its first cut run, one after its last.

    by_row: 1 where each batch row has lines of its own, else 0.
    """
    p_lines += (i_b * by_row * num_lines + number) * 4
    return tl.load(p_lines), tl.load(p_lines + 1), tl.load(p_lines + 2), tl.load(p_lines + 3)


@triton.jit
def run_of(p_runs, number, BLOCK: tl.constexpr):
    """The begin and end of a run of blocks, in rows or columns of the tile."""
    first = tl.load(p_runs + number * 2)
    last = tl.load(p_runs + number * 2 + 1)
    return first * BLOCK, last * BLOCK


@triton.jit
def only_run_of(p_runs, number, end, BLOCK: tl.constexpr):
    """`run_of` for the runs from `number` to `end`, which are one or none; none is empty."""
    start, stop = run_of(p_runs, number, BLOCK)
    return start, tl.where(number < end, stop, start)


@triton.jit
def of_batch_row(p_spans, i_b, by_row, q_len, kv_len, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr):
    """The place where the spans, or the cells, of a batch row begin. by_row: as for `line_of`."""
    if WIDTH == _CELLS:
        p_spans += i_b * by_row * tl.cdiv(kv_len, BLOCK_N) * BLOCK_N * q_len
    elif WIDTH == _COMPRESSED:
        p_spans += i_b * by_row * 2 * q_len
    else:
        p_spans += i_b * by_row * 2 * WIDTH * q_len
    return p_spans


@triton.jit
def _cells(p_cells, o_m, o_n, num_rows, EVEN_M: tl.constexpr, ROWS_LAST: tl.constexpr):
    """The cells of the rows `o_m` and the columns `o_n`, as `seen_of` returns them."""
    if ROWS_LAST:
        p_cells += o_n[:, None] * num_rows + o_m[None, :]
        b_inside = (o_m < num_rows)[None, :]
    else:
        p_cells += o_n[None, :] * num_rows + o_m[:, None]
        b_inside = (o_m < num_rows)[:, None]
    return (tl.load(p_cells) if EVEN_M else tl.load(p_cells, mask=b_inside, other=0)) != 0


@triton.jit
def _bounds(p_spans, o_m, num_rows, WIDTH: tl.constexpr, EVEN_M: tl.constexpr):
    """The starts and the stops of one span of the rows."""
    p_stops = p_spans + tl.cast(num_rows, tl.int64) * WIDTH
    if EVEN_M:
        b_start = tl.load(p_spans + o_m)
        b_stop = tl.load(p_stops + o_m)
    else:
        b_start = tl.load(p_spans + o_m, mask=o_m < num_rows, other=0)
        b_stop = tl.load(p_stops + o_m, mask=o_m < num_rows, other=0)
    return b_start, b_stop


@triton.jit
def load_bounds(p_spans, o_m, num_rows, WIDTH: tl.constexpr, EVEN_M: tl.constexpr):
    """The bounds of the spans of the rows `o_m`, which `seen_of` needs, to be kept in registers.

    Empty if WIDTH is not a number of spans. p_spans: int32 `[2, WIDTH, num_rows]`, starts and
    stops. Rows beyond the end see nothing; EVEN_M: there are none.
    """
    kept = ()
    for number in tl.static_range(WIDTH):
        kept = kept + _bounds(p_spans + number * num_rows, o_m, num_rows, WIDTH, EVEN_M)
    return kept


@triton.jit
def _within(b_start, b_stop, o_n, ROWS_LAST: tl.constexpr):
    """The columns among `o_n` that are in one span of each row, as `seen_of` returns them."""
    if ROWS_LAST:
        b_seen = (b_start[None, :] <= o_n[:, None]) & (o_n[:, None] < b_stop[None, :])
    else:
        b_seen = (b_start[:, None] <= o_n[None, :]) & (o_n[None, :] < b_stop[:, None])
    return b_seen


@triton.jit
def _in_list(
    p_spans,
    o_m,
    column,
    num_rows,
    BLOCK_N: tl.constexpr,
    EVEN_M: tl.constexpr,
    ROWS_LAST: tl.constexpr,
):
    """`seen_of` for rows that have lists of spans."""
    if EVEN_M:
        b_next = tl.load(p_spans + 2 * o_m)
        b_last = tl.load(p_spans + 2 * o_m + 1)
    else:
        b_next = tl.load(p_spans + 2 * o_m, mask=o_m < num_rows, other=0)
        b_last = tl.load(p_spans + 2 * o_m + 1, mask=o_m < num_rows, other=0)
    # By halving: the first span of each row that ends behind the block's first column.
    b_end = b_last
    longest = tl.max(b_last - b_next, 0)
    while longest > 0:
        b_middle = (b_next + b_end) // 2
        b_open = b_next < b_end
        b_before = tl.load(p_spans + 2 * b_middle + 1, mask=b_open, other=0) <= column
        b_next = tl.where(b_open & b_before, b_middle + 1, b_next)
        b_end = tl.where(b_open & ~b_before, b_middle, b_end)
        longest //= 2
    o_n = column + tl.arange(0, BLOCK_N)
    b_none = tl.zeros_like(b_next)
    b_seen = _within(b_none, b_none, o_n, ROWS_LAST)
    # Then from span to span, while one of a row begins within the block.
    beyond = column + BLOCK_N
    b_start = tl.load(p_spans + 2 * b_next, mask=b_next < b_last, other=beyond)
    while tl.min(b_start, 0) < beyond:
        b_stop = tl.load(p_spans + 2 * b_next + 1, mask=b_next < b_last, other=0)
        b_seen |= _within(b_start, b_stop, o_n, ROWS_LAST)
        b_next = tl.minimum(b_next + 1, b_last)
        b_start = tl.load(p_spans + 2 * b_next, mask=b_next < b_last, other=beyond)
    return b_seen


@triton.jit
def seen_of(
    bounds,
    p_spans,
    o_m,
    column,
    num_rows,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN_M: tl.constexpr,
    ROWS_LAST: tl.constexpr,
):
    """Which cells of the rows `o_m`, whose bounds are given, and the block's columns are seen.

    column: the first of BLOCK_N. Booleans `[rows, columns]`, or with ROWS_LAST `[columns, rows]`.

    Worked example: spans [0, 2) and [5, 6) of one row, WIDTH 2: of the columns 0 to 7 it sees 0, 1
    and 5.
    """
    o_n = column + tl.arange(0, BLOCK_N)
    if WIDTH == _CELLS:
        b_seen = _cells(p_spans, o_m, o_n, num_rows, EVEN_M, ROWS_LAST)
    elif WIDTH == _COMPRESSED:
        b_seen = _in_list(p_spans, o_m, column, num_rows, BLOCK_N, EVEN_M, ROWS_LAST)
    else:
        b_seen = _within(bounds[0], bounds[1], o_n, ROWS_LAST)
        for number in tl.static_range(1, WIDTH):
            b_seen |= _within(bounds[2 * number], bounds[2 * number + 1], o_n, ROWS_LAST)
    return b_seen
