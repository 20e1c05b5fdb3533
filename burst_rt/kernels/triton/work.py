"""Work lists and spans inside kernels: which blocks there are to do, and which of their cells are
seen.

The tables are those of `planning/worklist.py`, on the device. A program does one line of its list:
first its whole runs, whose cells are all seen, then its cut runs, whose cells are compared with the
spans of their rows. No other block is loaded.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["VARYING", "line_of", "run_of", "seen_of"]

# Kernel arguments that differ from tile to tile. Specialising on their values would compile kernels
# over and over.
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
    """Where a run of blocks begins and ends, in rows or columns of the tile."""
    first = tl.load(p_runs + number * 2)
    last = tl.load(p_runs + number * 2 + 1)
    return first * BLOCK, last * BLOCK


@triton.jit
def _within(p_bounds, o_m, o_n, num_rows, stop, EVEN_M: tl.constexpr, ROWS_LAST: tl.constexpr):
    """Which of the columns are in one span of the rows; stop: from a span's start to its stop."""
    if EVEN_M:
        b_start = tl.load(p_bounds + o_m)
        b_stop = tl.load(p_bounds + stop + o_m)
    else:
        b_start = tl.load(p_bounds + o_m, mask=o_m < num_rows, other=0)
        b_stop = tl.load(p_bounds + stop + o_m, mask=o_m < num_rows, other=0)
    if ROWS_LAST:
        b_seen = (b_start[None, :] <= o_n[:, None]) & (o_n[:, None] < b_stop[None, :])
    else:
        b_seen = (b_start[:, None] <= o_n[None, :]) & (o_n[None, :] < b_stop[:, None])
    return b_seen


@triton.jit
def seen_of(
    p_spans, o_m, o_n, num_rows, WIDTH: tl.constexpr, EVEN_M: tl.constexpr, ROWS_LAST: tl.constexpr
):
    """Which cells of the rows `o_m` and the columns `o_n` are seen.

    Booleans `[rows, columns]`, or with ROWS_LAST `[columns, rows]`. p_spans: int32 `[2, WIDTH,
    num_rows]`, the starts and stops of the rows' spans. Rows beyond the end see nothing; EVEN_M:
    there are none.

    Worked example: spans [0, 2) and [5, 6) of one row, WIDTH 2: of the columns 0 to 7 it sees 0, 1
    and 5.
    """
    stop = tl.cast(num_rows, tl.int64) * WIDTH
    b_seen = _within(p_spans, o_m, o_n, num_rows, stop, EVEN_M, ROWS_LAST)
    if WIDTH <= 4:
        for _ in tl.static_range(WIDTH - 1):
            p_spans += num_rows
            b_seen |= _within(p_spans, o_m, o_n, num_rows, stop, EVEN_M, ROWS_LAST)
    else:
        for _ in range(WIDTH - 1):
            p_spans += num_rows
            b_seen |= _within(p_spans, o_m, o_n, num_rows, stop, EVEN_M, ROWS_LAST)
    return b_seen
