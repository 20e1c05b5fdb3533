"""The backward tile kernel for dq: FlashAttention-2 (arXiv 2307.08691), algorithm 2, first pass.

The pass recomputes the probabilities it needs from lse, and each program owns the rows that it adds
to or writes. Nothing is added atomically, so the bits are the same every time. `dkdv.py` has the
other pass.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from burst_rt.kernels.base import QKV, Upstream
from burst_rt.kernels.triton.blocks import load_block, put_rows, rows_of
from burst_rt.kernels.triton.configs import Config
from burst_rt.kernels.triton.launch import TileArguments, constants_of, strides
from burst_rt.kernels.triton.scores import ScoreArguments, places_of, subtract_slope, tanh
from burst_rt.kernels.triton.start import Launch, launch_of
from burst_rt.kernels.triton.work import (
    VARYING,
    line_of,
    load_bounds,
    of_batch_row,
    only_run_of,
    run_of,
    seen_of,
)

__all__ = ["dq_kernel", "launch_dq"]


class _Rows(NamedTuple):
    """A block of rows, and what it meets: the same for every run of columns."""

    # Values of the device, which have no types here.
    b_q: Any
    b_dout: Any
    b_lse: Any  # in powers of two
    b_delta: Any
    p_spans: Any
    o_m: Any  # numbers of the rows
    q_len: Any
    rows_k: Any
    rows_v: Any
    scale_log2: Any
    shaping: Any


@triton.jit
def _add_columns(b_dq, block, start, stop, META: tl.constexpr, MASKED: tl.constexpr):
    """dq of a block of rows from the columns [start, stop), not yet scaled.

    MASKED: a row sees only the columns of its spans.
    """
    EVEN: tl.constexpr = META.EVEN_N or not MASKED
    b_q, b_dout, b_lse, b_delta, p_spans, o_m, q_len, rows_k, rows_v, scale_log2, shaping = block
    bounds = load_bounds(p_spans, o_m, q_len, META.WIDTH, META.EVEN_M) if MASKED else ()
    if META.ALIBI:
        b_rows = places_of(shaping.p_rows, o_m, q_len)
        unit = 1.0  # argument of `sloped`
    else:
        b_rows, unit = o_m, scale_log2
    for column in tl.range(start, stop, META.BLOCK_N):
        b_k = load_block(rows_k, column, META.HEAD_DIM, META.BLOCK_D, META.BLOCK_N, EVEN, META)
        b_v = load_block(rows_v, column, META.V_HEAD_DIM, META.BLOCK_DV, META.BLOCK_N, EVEN, META)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        b_t = tanh(b_s * shaping.cap_scale) if META.SOFTCAP else b_s
        b_s = b_t
        if META.ALIBI:
            o_k = column + tl.arange(0, META.BLOCK_N)
            b_columns = places_of(shaping.p_columns, o_k, rows_k.length)
            b_s = subtract_slope(b_s, shaping.p_slopes, b_rows, b_columns, scale_log2, False)
        if MASKED:
            b_seen = seen_of(
                bounds, p_spans, o_m, column, q_len, META.WIDTH, META.BLOCK_N, META.EVEN_M, False
            )
            b_s = tl.where(b_seen, b_s, -float("inf"))
        b_p = tl.exp2(b_s * unit - b_lse[:, None])
        b_dp = tl.dot(b_dout, tl.trans(b_v), input_precision="ieee")
        b_ds = b_p * (b_dp - b_delta[:, None])
        if META.SOFTCAP:
            b_ds *= 1.0 - b_t * b_t
        b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision="ieee")
    return b_dq


@triton.jit
def _add_column_runs(p_runs, first, last, b_dq, block, META: tl.constexpr, MASKED: tl.constexpr):
    """`_add_columns` for the columns of the runs from `first` to `last`; SINGLE: one or none.

    Without a loop around the loop, ptxas finds registers for larger blocks.
    """
    if META.SINGLE:
        start, stop = only_run_of(p_runs, first, last, META.BLOCK_N)
        b_dq = _add_columns(b_dq, block, start, stop, META, MASKED)
    else:
        for i_r in range(first, last):
            start, stop = run_of(p_runs, i_r, META.BLOCK_N)
            b_dq = _add_columns(b_dq, block, start, stop, META, MASKED)
    return b_dq


@triton.jit(do_not_specialize=[*VARYING, "heads"])
def dq_kernel(
    p_q,
    p_k,
    p_v,
    p_dout,
    p_lse,
    p_delta,
    p_dq,
    p_spans,
    p_lines,
    p_runs,
    p_slopes,
    p_rows,
    p_columns,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_db,
    stride_dt,
    stride_dh,
    stride_sb,
    stride_st,
    stride_sh,
    heads,
    group,
    q_len,
    kv_len,
    by_row,
    scale,
    scale_log2,
    cap_scale,
    META: tl.constexpr,
):
    """One block of BLOCK_M queries of one head against all keys of the tile.

    With p_j = 2^(scale_log2 * q k_j - lse * log2(e)) where the query sees key j (else 0):

        dq <- dq + scale * sum_j p_j * (dout v_j - delta) k_j

    SOFTCAP, ALIBI: as for `forward_kernel`; with t = tanh(cap_scale * q k_j), p_j * (dout v_j -
    delta) is multiplied by 1 - t^2.

    ADDS: adds to dq `[batch, q_len, heads, HEAD_DIM]` (float32, strides sb, st, sh), and writes
    nothing where the block sees no key. Else dq holds nothing before, has any type, and is written
    everywhere. lse (+inf: a row without gradient) and delta `[batch, heads, q_len]` are dense.

    Worked example (d = 1, scale 1): q = [1], k = [0, log 3], v = [4, 8], dout = [1]: lse = log 4, p
    = [1/4, 3/4], out = delta = 7, so dq += 1/4 * (4 - 7) * 0 + 3/4 * (8 - 7) * log 3 = 3/4 log 3.

    Tables and grid: as for `forward_kernel`.
    """
    HEAD_DIM: tl.constexpr = META.HEAD_DIM
    BLOCK_D: tl.constexpr = META.BLOCK_D
    BLOCK_M: tl.constexpr = META.BLOCK_M
    BLOCK_N: tl.constexpr = META.BLOCK_N
    num_blocks = tl.cdiv(q_len, BLOCK_M)
    i_bh = tl.program_id(0) // num_blocks
    i_b = (i_bh // heads).to(tl.int64)
    i_h = (i_bh % heads).to(tl.int64)
    i_kv = i_h // group
    i_m, whole, cut, end = line_of(p_lines, tl.program_id(0) % num_blocks, num_blocks, i_b, by_row)
    if META.ADDS:  # noqa: SIM102  (the outer one is decided when the kernel is compiled)
        if whole == end:
            return
    row = i_m * BLOCK_M
    o_m = row + tl.arange(0, BLOCK_M)

    p_q += i_b * stride_qb + i_h * stride_qh
    rows_q = rows_of(p_q, stride_qt, q_len, HEAD_DIM, BLOCK_D, BLOCK_M, META.DESCRIBED)
    b_q = load_block(rows_q, row, HEAD_DIM, BLOCK_D, BLOCK_M, META.EVEN_M, META)
    p_dout += i_b * stride_db + i_h * stride_dh
    rows_dout = rows_of(
        p_dout, stride_dt, q_len, META.V_HEAD_DIM, META.BLOCK_DV, BLOCK_M, META.DESCRIBED
    )
    b_dout = load_block(rows_dout, row, META.V_HEAD_DIM, META.BLOCK_DV, BLOCK_M, META.EVEN_M, META)
    in_row = i_bh.to(tl.int64) * q_len + o_m
    # Times log2(e): lse in powers of two.
    b_lse = tl.load(p_lse + in_row, mask=o_m < q_len, other=float("inf")) * 1.4426950408889634
    b_delta = tl.load(p_delta + in_row, mask=o_m < q_len, other=0.0)
    p_k += i_b * stride_kb + i_kv * stride_kh
    rows_k = rows_of(p_k, stride_kt, kv_len, HEAD_DIM, BLOCK_D, BLOCK_N, META.DESCRIBED)
    p_v += i_b * stride_vb + i_kv * stride_vh
    rows_v = rows_of(
        p_v, stride_vt, kv_len, META.V_HEAD_DIM, META.BLOCK_DV, BLOCK_N, META.DESCRIBED
    )
    shaping = ScoreArguments(cap_scale, p_slopes + i_bh, p_rows, p_columns)

    b_dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    p_spans = of_batch_row(p_spans, i_b, by_row, q_len, kv_len, META.WIDTH, BLOCK_N)
    block = _Rows(
        b_q, b_dout, b_lse, b_delta, p_spans, o_m, q_len, rows_k, rows_v, scale_log2, shaping
    )
    b_dq = _add_column_runs(p_runs, whole, cut, b_dq, block, META, False)
    if META.MASKED:
        b_dq = _add_column_runs(p_runs, cut, end, b_dq, block, META, True)

    p_dq += i_b * stride_sb + i_h * stride_sh
    put_rows(
        p_dq,
        row,
        stride_st,
        q_len,
        b_dq * scale,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_M,
        META.ADDS,
    )


def launch_dq(
    qkv: QKV, upstream: Upstream, dq: torch.Tensor, arguments: TileArguments, config: Config
) -> Launch | None:
    """Starts `dq_kernel`, which adds to dq; where dq holds nothing yet, it writes dq.

    Returns what can be kept. Does not wait for the device.
    """
    (q, k, v), dout = qkv, upstream.dout
    batch, q_len, heads, _ = q.shape
    grid = (triton.cdiv(q_len, config.block_m) * batch * heads,)
    rest = (
        *arguments.tables, *arguments.places,
        *strides(q), *strides(k), *strides(v), *strides(dout), *strides(dq),
        heads, heads // k.shape[2],
        arguments.q_len, arguments.kv_len, arguments.lists.by_row, arguments.scale,
        arguments.scale_log2, arguments.cap_scale,
    )  # fmt: skip
    constants = constants_of(arguments, config, q, k, v, dout, ADDS=arguments.adds("q"))
    compiled = dq_kernel[grid](*qkv, *upstream[:3], dq, *rest, **constants)
    return launch_of(compiled, grid, (*rest, constants["META"]), arguments.tables[:2])
