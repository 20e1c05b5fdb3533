"""What happens to scores inside kernels beside scaling: softcap and ALiBi.

Each is a constant of the compiled kernel: a call without them compiles and loads nothing of this.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

__all__ = ["ScoreArguments", "places_of", "subtract_slope", "tanh"]


class ScoreArguments(NamedTuple):
    """The arguments of kernels for softcap and ALiBi. Where one is not asked for, it is not
    read.
    """

    # Values of the device, which have no types here.
    cap_scale: Any  # scale / softcap
    p_slopes: Any  # float32, of the head, or of the heads of a group
    p_rows: Any  # int32, the positions of the rows
    p_columns: Any  # int32, the positions of the columns


@triton.jit
def tanh(x):
    """The hyperbolic tangent of float32 numbers to some 2 roundoffs, after `tanhf` of Cephes.

    Near 0, where 1 - 2 / (e^2x + 1) would lose its digits, it is a polynomial.
    """
    z = tl.minimum(x * x, 0.390625)
    near = -5.70498872745e-3 * z + 2.06390887954e-2
    near = near * z - 5.37397155531e-2
    near = near * z + 1.33314422036e-1
    near = near * z - 3.33332819422e-1
    near = near * z * x + x
    size = tl.abs(x)
    # Beyond 20 it is 1. NaN stays NaN.
    far = 1.0 - 2.0 / (tl.exp2(tl.where(size > 20.0, 20.0, size) * 2.8853900817779268) + 1.0)
    return tl.where(size < 0.625, near, tl.where(x < 0.0, -far, far))


@triton.jit
def places_of(pointer, o_r, length):
    """The positions of some rows or columns; 0 beyond the end."""
    return tl.load(pointer + o_r, mask=o_r < length, other=0)


@triton.jit
def subtract_slope(b_s, p_slope, b_rows, b_columns, scale_log2, ROWS_LAST: tl.constexpr):
    """Scores in powers of two: b_s * scale_log2 less the slope times the distance.

    b_rows, b_columns: positions. b_s is `[rows, columns]`, or with ROWS_LAST `[columns, rows]`.
    """
    if ROWS_LAST:
        b_distance = tl.abs(b_rows[None, :] - b_columns[:, None])
    else:
        b_distance = tl.abs(b_rows[:, None] - b_columns[None, :])
    # Times log2(e).
    slope = tl.load(p_slope) * 1.4426950408889634
    return b_s * scale_log2 - slope * b_distance.to(tl.float32)
