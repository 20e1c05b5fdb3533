"""The backward tile kernel for dk and dv: FlashAttention-2 (arXiv 2307.08691), algorithm 2.

Like the pass of `dq.py` it recomputes the probabilities it needs from lse, and each program owns
the columns that it adds to or writes. Nothing is added atomically, so the bits are the same every
time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from burst_rt.kernels.base import QKV, Gradients, Upstream
from burst_rt.kernels.triton.blocks import (
    heads_of,
    load_block,
    load_of_head,
    put_rows,
    rows_of,
    zeros_for_sums,
)
from burst_rt.kernels.triton.configs import Config
from burst_rt.kernels.triton.launch import TileArguments, both_of, constants_of, strides
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

__all__ = ["dkdv_kernel", "launch_dkdv"]


class _Sizes(NamedTuple):
    """Numbers by which a block of columns finds rows."""

    # Values of the device, which have no types here.
    column: Any  # the block's first
    group: Any  # query heads of the kv head
    stride_qh: Any
    stride_dh: Any
    q_len: Any
    kv_len: Any


class _Columns(NamedTuple):
    """A block of columns, and what it meets: the same for every run of rows."""

    # Values of the device, which have no types here.
    b_k: Any
    b_v: Any
    heads_q: Any
    heads_dout: Any
    p_lse: Any
    p_delta: Any
    p_spans: Any
    sizes: Any
    scale_log2: Any
    shaping: Any


@triton.jit
def _add_rows(b_dk, b_dv, block, start, stop, META: tl.constexpr, MASKED: tl.constexpr):
    """dk (not yet scaled) and dv of a block of columns from the rows [start, stop) of each head.

    MASKED: a row sees only the columns of its spans.
    """
    b_k, b_v, heads_q, heads_dout, p_lse, p_delta, p_spans, sizes, scale_log2, shaping = block
    column, group, stride_qh, stride_dh, q_len, kv_len = sizes
    # One loop over the row blocks of all query heads of the group, so that the loads of the next
    # head run ahead like the loads of the next block. Head and row follow from the loop's counter:
    # what is carried from block to block would keep loads from running ahead.
    num_blocks = (stop - start) // META.BLOCK_M
    if META.ALIBI:
        b_columns = places_of(shaping.p_columns, column + tl.arange(0, META.BLOCK_N), kv_len)
        unit = 1.0  # argument of `sloped`
    else:
        b_columns, unit = column, scale_log2
    for i in tl.range(group * num_blocks):
        i_g = i // num_blocks
        row = start + i % num_blocks * META.BLOCK_M
        o_m = row + tl.arange(0, META.BLOCK_M)
        in_row = i_g * q_len + o_m
        b_q = load_of_head(
            heads_q,
            i_g,
            row,
            stride_qh,
            META.HEAD_DIM,
            META.BLOCK_D,
            META.BLOCK_M,
            META.EVEN_M,
            META,
        )
        b_dout = load_of_head(
            heads_dout,
            i_g,
            row,
            stride_dh,
            META.V_HEAD_DIM,
            META.BLOCK_DV,
            META.BLOCK_M,
            META.EVEN_M,
            META,
        )
        # Rows beyond the end add nothing, because their lse is +inf.
        b_lse = (
            tl.load(p_lse + in_row)
            if META.EVEN_M
            else tl.load(p_lse + in_row, mask=o_m < q_len, other=float("inf"))
        )
        b_s = tl.dot(b_k, tl.trans(b_q), input_precision="ieee")
        b_t = tanh(b_s * shaping.cap_scale) if META.SOFTCAP else b_s
        b_s = b_t
        if META.ALIBI:
            b_rows = places_of(shaping.p_rows, o_m, q_len)
            b_s = subtract_slope(b_s, shaping.p_slopes + i_g, b_rows, b_columns, scale_log2, True)
        if MASKED:
            bounds = load_bounds(p_spans, o_m, q_len, META.WIDTH, META.EVEN_M)
            b_seen = seen_of(
                bounds, p_spans, o_m, column, q_len, META.WIDTH, META.BLOCK_N, META.EVEN_M, True
            )
            b_s = tl.where(b_seen, b_s, -float("inf"))
        b_p = tl.exp2(b_s * unit - (b_lse * 1.4426950408889634)[None, :])
        if META.NEED_DV:
            b_dv = tl.dot(b_p.to(b_dout.dtype), b_dout, b_dv, input_precision="ieee")
        if META.NEED_DK:
            b_delta = (
                tl.load(p_delta + in_row)
                if META.EVEN_M
                else tl.load(p_delta + in_row, mask=o_m < q_len, other=0.0)
            )
            b_dp = tl.dot(b_v, tl.trans(b_dout), input_precision="ieee")
            b_ds = b_p * (b_dp - b_delta[None, :])
            if META.SOFTCAP:
                b_ds *= 1.0 - b_t * b_t
            b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision="ieee")
    return b_dk, b_dv


@triton.jit
def _add_row_runs(p_runs, first, last, b_dk, b_dv, block, META: tl.constexpr, MASKED: tl.constexpr):
    """`_add_rows` for the rows of the runs from `first` to `last`; SINGLE: one or none.

    Without a loop around the loop, ptxas finds registers for larger blocks.
    """
    if META.SINGLE:
        start, stop = only_run_of(p_runs, first, last, META.BLOCK_M)
        b_dk, b_dv = _add_rows(b_dk, b_dv, block, start, stop, META, MASKED)
    else:
        for i_r in range(first, last):
            start, stop = run_of(p_runs, i_r, META.BLOCK_M)
            b_dk, b_dv = _add_rows(b_dk, b_dv, block, start, stop, META, MASKED)
    return b_dk, b_dv


@triton.jit(do_not_specialize=[*VARYING, "kv_heads"])
def dkdv_kernel(
    p_q,
    p_k,
    p_v,
    p_dout,
    p_lse,
    p_delta,
    p_dk,
    p_dv,
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
    stride_xb,
    stride_xt,
    stride_xh,
    stride_yb,
    stride_yt,
    stride_yh,
    kv_heads,
    group,
    q_len,
    kv_len,
    by_row,
    scale,
    scale_log2,
    cap_scale,
    META: tl.constexpr,
):
    """One block of BLOCK_N keys of one kv head against all queries of the tile.

    The queries are the ones of every head of the kv head's group. With
    p_i = 2^(scale_log2 * q_i k - lse_i * log2(e)) where query i sees the key (else 0):

        dv <- dv + sum_i p_i dout_i;    dk <- dk + scale * sum_i p_i * (dout_i v - delta_i) q_i

    SOFTCAP, ALIBI: as for `dq_kernel`. ADDS: adds to dk if NEED_DK, `[batch, kv_len, kv_heads,
    HEAD_DIM]` (float32, strides x), and to dv if NEED_DV, which has V_HEAD_DIM (strides y), and
    writes nothing where no query sees the block. Else dk and dv are written, as for `dq_kernel`.
    lse (+inf: a row without gradient) and delta `[batch, group * kv_heads, q_len]` are dense.

    Worked example (d = 1, scale 1), with the tensors of `dq_kernel`: p = [1/4, 3/4], delta = 7: dv
    += [1/4, 3/4] and dk += [1/4 * (4 - 7), 3/4 * (8 - 7)].

    p_spans, p_lines, p_runs: what the rows see, and the list of work by columns. MASKED, WIDTH: as
    for `forward_kernel`.

    Grid: one dimension, the key blocks of a head one after another, in the order of the list: those
    that have most to do come first.
    """
    HEAD_DIM: tl.constexpr = META.HEAD_DIM
    BLOCK_D: tl.constexpr = META.BLOCK_D
    V_HEAD_DIM: tl.constexpr = META.V_HEAD_DIM
    BLOCK_DV: tl.constexpr = META.BLOCK_DV
    BLOCK_M: tl.constexpr = META.BLOCK_M
    BLOCK_N: tl.constexpr = META.BLOCK_N
    num_blocks = tl.cdiv(kv_len, BLOCK_N)
    i_bh = tl.program_id(0) // num_blocks
    i_b = (i_bh // kv_heads).to(tl.int64)
    i_kv = (i_bh % kv_heads).to(tl.int64)
    i_n, whole, cut, end = line_of(p_lines, tl.program_id(0) % num_blocks, num_blocks, i_b, by_row)
    if META.ADDS:  # noqa: SIM102  (the outer one is decided when the kernel is compiled)
        if whole == end:
            return
    column = i_n * BLOCK_N

    p_k += i_b * stride_kb + i_kv * stride_kh
    rows_k = rows_of(p_k, stride_kt, kv_len, HEAD_DIM, BLOCK_D, BLOCK_N, META.DESCRIBED)
    b_k = load_block(rows_k, column, HEAD_DIM, BLOCK_D, BLOCK_N, META.EVEN_N, META)
    p_v += i_b * stride_vb + i_kv * stride_vh
    rows_v = rows_of(p_v, stride_vt, kv_len, V_HEAD_DIM, BLOCK_DV, BLOCK_N, META.DESCRIBED)
    b_v = load_block(rows_v, column, V_HEAD_DIM, BLOCK_DV, BLOCK_N, META.EVEN_N, META)
    b_dk = zeros_for_sums(p_dk, whole < 0, BLOCK_N, BLOCK_D)
    b_dv = zeros_for_sums(p_dv, whole < 0, BLOCK_N, BLOCK_DV)
    p_q += i_b * stride_qb + i_kv * group * stride_qh
    p_dout += i_b * stride_db + i_kv * group * stride_dh
    heads_q = heads_of(
        p_q,
        stride_qh,
        stride_qt,
        group,
        q_len,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_M,
        META.DESCRIBED,
    )
    heads_dout = heads_of(
        p_dout,
        stride_dh,
        stride_dt,
        group,
        q_len,
        V_HEAD_DIM,
        BLOCK_DV,
        BLOCK_M,
        META.DESCRIBED,
    )
    p_lse += (i_b * kv_heads + i_kv) * group * q_len
    p_delta += (i_b * kv_heads + i_kv) * group * q_len
    shaping = ScoreArguments(cap_scale, p_slopes + i_bh * group, p_rows, p_columns)
    p_spans = of_batch_row(p_spans, i_b, by_row, q_len, kv_len, META.WIDTH, BLOCK_N)
    sizes = _Sizes(column, group, stride_qh, stride_dh, q_len, kv_len)
    block = _Columns(
        b_k, b_v, heads_q, heads_dout, p_lse, p_delta, p_spans, sizes, scale_log2, shaping
    )
    b_dk, b_dv = _add_row_runs(p_runs, whole, cut, b_dk, b_dv, block, META, False)
    if META.MASKED:
        b_dk, b_dv = _add_row_runs(p_runs, cut, end, b_dk, b_dv, block, META, True)

    if META.NEED_DK:
        p_dk += i_b * stride_xb + i_kv * stride_xh
        put_rows(
            p_dk,
            column,
            stride_xt,
            kv_len,
            b_dk * scale,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_N,
            META.ADDS,
        )
    if META.NEED_DV:
        p_dv += i_b * stride_yb + i_kv * stride_yh
        put_rows(
            p_dv,
            column,
            stride_yt,
            kv_len,
            b_dv,
            V_HEAD_DIM,
            BLOCK_DV,
            BLOCK_N,
            META.ADDS,
        )


def launch_dkdv(
    qkv: QKV, upstream: Upstream, grads: Gradients, arguments: TileArguments, config: Config
) -> Launch | None:
    """Starts `dkdv_kernel`, which adds to dk and dv; where they hold nothing yet, it writes them.

    One of dk and dv may be None. Returns what can be kept. Does not wait for the device.
    """
    (q, k, v), dout = qkv, upstream.dout
    batch, kv_len, kv_heads, _ = k.shape
    grid = (triton.cdiv(kv_len, config.block_n) * batch * kv_heads,)
    dk, dv = both_of(grads)
    rest = (
        *arguments.tables, *arguments.places,
        *strides(q), *strides(k), *strides(v), *strides(dout), *strides(dk),
        *strides(dv), kv_heads, q.shape[2] // kv_heads,
        arguments.q_len, arguments.kv_len, arguments.lists.by_row, arguments.scale,
        arguments.scale_log2, arguments.cap_scale,
    )  # fmt: skip
    constants = constants_of(
        arguments, config, q, k, v, dout, ADDS=arguments.adds("kv"),
        NEED_DK=grads.dk is not None, NEED_DV=grads.dv is not None,
    )  # fmt: skip
    compiled = dkdv_kernel[grid](*qkv, *upstream[:3], dk, dv, *rest, **constants)
    return launch_of(compiled, grid, (*rest, constants["META"]), arguments.tables[:2])
