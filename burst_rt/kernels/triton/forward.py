"""The forward tile kernel: folds a tile into the running state of its queries.

It also starts and finishes that state. Online softmax (Milakov & Gimelshein 2018) with the tiling
of FlashAttention-2 (arXiv 2307.08691), in powers of two: the state's m is the largest score so far
times log2(e).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from burst_rt.kernels.base import QKV, State
from burst_rt.kernels.triton.blocks import load_block, rows_of
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

__all__ = ["forward_kernel", "launch_forward"]


class _Block(NamedTuple):
    """A block of rows, and what it meets: the same for every run of columns."""

    # Values of the device, which have no types here.
    b_q: Any
    p_spans: Any
    o_m: Any  # numbers of the rows
    q_len: Any
    rows_k: Any
    rows_v: Any
    scale_log2: Any
    shaping: Any


@triton.jit
def _fold(b_acc, b_m, b_l, block, start, stop, META: tl.constexpr, MASKED: tl.constexpr):
    """Folds the columns [start, stop) into a block of rows.

    MASKED: a row sees only the columns of its spans.
    """
    EVEN: tl.constexpr = META.EVEN_N or not MASKED
    b_q, p_spans, o_m, q_len, rows_k, rows_v, scale_log2, shaping = block
    bounds = load_bounds(p_spans, o_m, q_len, META.WIDTH, META.EVEN_M) if MASKED else ()
    if META.ALIBI:
        b_rows = places_of(shaping.p_rows, o_m, q_len)
        unit = 1.0  # argument of `sloped`
    else:
        b_rows, unit = o_m, scale_log2
    for column in tl.range(start, stop, META.BLOCK_N):
        b_k = load_block(rows_k, column, META.HEAD_DIM, META.BLOCK_D, META.BLOCK_N, EVEN, META)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        if META.SOFTCAP:
            b_s = tanh(b_s * shaping.cap_scale)
        if META.ALIBI:
            o_k = column + tl.arange(0, META.BLOCK_N)
            b_columns = places_of(shaping.p_columns, o_k, rows_k.length)
            b_s = subtract_slope(b_s, shaping.p_slopes, b_rows, b_columns, scale_log2, False)
        if MASKED:
            b_seen = seen_of(
                bounds, p_spans, o_m, column, q_len, META.WIDTH, META.BLOCK_N, META.EVEN_M, False
            )
            b_s = tl.where(b_seen, b_s, -float("inf"))
        b_m_new = tl.maximum(b_m, tl.max(b_s, 1) * unit)
        b_safe = b_m_new
        if MASKED:
            # exp2(-inf - -inf) would be NaN: such a row has seen no key yet.
            b_safe = tl.where(b_m_new == -float("inf"), 0.0, b_m_new)
        b_p = tl.exp2(b_s * unit - b_safe[:, None])
        b_old = tl.exp2(b_m - b_safe)
        b_l = b_l * b_old + tl.sum(b_p, 1)
        b_acc = b_acc * b_old[:, None]
        b_v = load_block(rows_v, column, META.V_HEAD_DIM, META.BLOCK_DV, META.BLOCK_N, EVEN, META)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision="ieee")
        b_m = b_m_new
    return b_acc, b_m, b_l


@triton.jit
def _fold_runs(
    p_runs, first, last, b_acc, b_m, b_l, block, META: tl.constexpr, MASKED: tl.constexpr
):
    """`_fold` for the columns of the runs from `first` to `last`; SINGLE: one or none.

    Without a loop around the loop, ptxas finds registers for larger blocks.
    """
    if META.SINGLE:
        start, stop = only_run_of(p_runs, first, last, META.BLOCK_N)
        b_acc, b_m, b_l = _fold(b_acc, b_m, b_l, block, start, stop, META, MASKED)
    else:
        for i_r in range(first, last):
            start, stop = run_of(p_runs, i_r, META.BLOCK_N)
            b_acc, b_m, b_l = _fold(b_acc, b_m, b_l, block, start, stop, META, MASKED)
    return b_acc, b_m, b_l


@triton.jit(do_not_specialize=[*VARYING, "heads"])
def forward_kernel(
    p_q,
    p_k,
    p_v,
    p_acc,
    p_m,
    p_l,
    p_out,
    p_lse,
    p_sinks,
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
    stride_ab,
    stride_at,
    heads,
    group,
    q_len,
    kv_len,
    by_row,
    scale_log2,
    cap_scale,
    META: tl.constexpr,
):
    """One block of BLOCK_M queries of one head against all keys of the tile.

    With s = scale_log2 * q k^T (unseen cells -inf) and m' = max(m, max_j s_j):

        acc <- acc * 2^(m - m') + sum_j 2^(s_j - m') v_j
        l <- l * 2^(m - m') + sum_j 2^(s_j - m')
        m <- m'

    If SOFTCAP, s = scale_log2 * tanh(cap_scale * q k^T). If ALIBI, slope * log2(e) times the
    distance of the positions is taken from s (p_slopes `[batch, heads]`).

    Reads (acc, m, l) unless FIRST, where a row begins with nothing, if SINKS with its head's sink
    (p_sinks `[heads]`): m = sink * log2(e), l = 1. Writes them unless LAST. If LAST it writes out =
    acc / l (0 where l = 0) in p_out's type and lse = (m + log2 l) * log(2) (-inf where l = 0). acc,
    out `[batch, q_len, heads, V_HEAD_DIM]` have the same strides and dense tokens, m, l, lse
    `[batch, heads, q_len]` are dense; out may be acc. DESCRIBED: loads go through tensor
    descriptors.

    Worked example (d = 1, scale 1): q = [1], k = [0, log 3], v = [4, 8] as first and last tile: s =
    [0, log2 3], m = log2 3, l = 1/3 + 1, acc = 4/3 + 8, so out = 7 and lse = (log2 3 + log2 4/3) *
    log 2 = log 4.

    p_spans, p_lines, p_runs: what the rows see, and the list of work by rows (`work.py`); where
    there are cut runs, MASKED. WIDTH: spans a row. SINGLE: no line has more than one run of a kind,
    and the loops are not nested, which takes fewer registers.

    Grid: one dimension (which has no limit of 65,535). The row blocks of a head come one after
    another, so that they find the head's keys in the cache, in the order of the list: those that
    have most to do come first.
    """
    BLOCK_M: tl.constexpr = META.BLOCK_M
    BLOCK_DV: tl.constexpr = META.BLOCK_DV
    V_HEAD_DIM: tl.constexpr = META.V_HEAD_DIM
    EVEN_M: tl.constexpr = META.EVEN_M
    num_blocks = tl.cdiv(q_len, BLOCK_M)
    i_bh = tl.program_id(0) // num_blocks
    i_b = (i_bh // heads).to(tl.int64)
    i_h = (i_bh % heads).to(tl.int64)
    i_kv = i_h // group
    i_m, whole, cut, end = line_of(p_lines, tl.program_id(0) % num_blocks, num_blocks, i_b, by_row)
    # The outer condition is decided when the kernel is compiled.
    if not (META.FIRST or META.LAST):  # noqa: SIM102
        if whole == end:
            return
    row = i_m * BLOCK_M
    o_m = row + tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_DV)

    # Places in acc and out (in_rows); in m, l and lse (in_row).
    in_rows = (
        i_b * stride_ab
        + row.to(tl.int64) * stride_at
        + i_h * V_HEAD_DIM
        + (tl.arange(0, BLOCK_M)[:, None] * stride_at + o_d[None, :])
    )
    in_row = i_bh.to(tl.int64) * q_len + o_m
    inside = (
        (o_d < V_HEAD_DIM)[None, :]
        if EVEN_M
        else (o_m < q_len)[:, None] & (o_d < V_HEAD_DIM)[None, :]
    )

    if META.FIRST:
        b_acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
        if META.SINKS:
            b_m = tl.zeros((BLOCK_M,), tl.float32) + tl.load(p_sinks + i_h) * 1.4426950408889634
            b_l = tl.full((BLOCK_M,), 1.0, tl.float32)
        else:
            b_m = tl.full((BLOCK_M,), -float("inf"), tl.float32)
            b_l = tl.zeros((BLOCK_M,), tl.float32)
    else:
        b_acc = tl.load(p_acc + in_rows, mask=inside, other=0.0)
        b_m = tl.load(p_m + in_row, mask=o_m < q_len, other=-float("inf"))
        b_l = tl.load(p_l + in_row, mask=o_m < q_len, other=0.0)

    p_q += i_b * stride_qb + i_h * stride_qh
    rows_q = rows_of(p_q, stride_qt, q_len, META.HEAD_DIM, META.BLOCK_D, BLOCK_M, META.DESCRIBED)
    b_q = load_block(rows_q, row, META.HEAD_DIM, META.BLOCK_D, BLOCK_M, EVEN_M, META)
    p_k += i_b * stride_kb + i_kv * stride_kh
    rows_k = rows_of(
        p_k, stride_kt, kv_len, META.HEAD_DIM, META.BLOCK_D, META.BLOCK_N, META.DESCRIBED
    )
    p_v += i_b * stride_vb + i_kv * stride_vh
    rows_v = rows_of(p_v, stride_vt, kv_len, V_HEAD_DIM, BLOCK_DV, META.BLOCK_N, META.DESCRIBED)
    shaping = ScoreArguments(cap_scale, p_slopes + i_bh, p_rows, p_columns)
    p_spans = of_batch_row(p_spans, i_b, by_row, q_len, kv_len, META.WIDTH, META.BLOCK_N)
    block = _Block(b_q, p_spans, o_m, q_len, rows_k, rows_v, scale_log2, shaping)
    b_acc, b_m, b_l = _fold_runs(p_runs, whole, cut, b_acc, b_m, b_l, block, META, False)
    if META.MASKED:
        b_acc, b_m, b_l = _fold_runs(p_runs, cut, end, b_acc, b_m, b_l, block, META, True)

    if META.LAST:
        b_norm = tl.where(b_l == 0.0, 1.0, b_l)
        tl.store(p_out + in_rows, (b_acc / b_norm[:, None]).to(p_out.dtype.element_ty), mask=inside)
        # Times log(2). m is -inf in a row that saw no key.
        tl.store(p_lse + in_row, (b_m + tl.log2(b_norm)) * 0.6931471805599453, mask=o_m < q_len)
    else:
        tl.store(p_acc + in_rows, b_acc, mask=inside)
        tl.store(p_m + in_row, b_m, mask=o_m < q_len)
        tl.store(p_l + in_row, b_l, mask=o_m < q_len)


def launch_forward(
    qkv: QKV, state: State, arguments: TileArguments, config: Config
) -> Launch | None:
    """Starts `forward_kernel` on a tile, and returns what can be kept. Does not wait."""
    q, k, v = qkv
    batch, q_len, heads, _ = q.shape
    grid = (triton.cdiv(q_len, config.block_m) * batch * heads,)
    sinks = arguments.score_options.sinks
    rest = (
        *arguments.tables, *arguments.places,
        *strides(q), *strides(k), *strides(v), *strides(state.acc)[:2],
        heads, heads // k.shape[2],
        arguments.q_len, arguments.kv_len, arguments.lists.by_row, arguments.scale_log2,
        arguments.cap_scale,
    )  # fmt: skip
    constants = constants_of(
        arguments, config, *qkv,
        FIRST=arguments.first, LAST=arguments.last, SINKS=sinks is not None,
    )  # fmt: skip
    compiled = forward_kernel[grid](
        *qkv, *state, state.m if sinks is None else sinks, *rest, **constants
    )
    return launch_of(compiled, grid, (*rest, constants["META"]), arguments.tables[:2])
