"""Decode on a GPU: few queries, many keys split over programs, and the splits' states folded.

A decode has few rows, so blocks of rows alone would leave most of a chip idle. `decode_kernel`
splits the keys (FlashDecoding, https://pytorch.org/blog/flash-decoding/), and each split writes the
running state that its keys make; `combine_kernel` makes out and lse of the states of a row. Scores
are in powers of two inside; lse comes out as a natural logarithm (`kernels/decode.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from burst_rt.kernels.base import QKV
from burst_rt.kernels.decode import Partial, SeenColumns, lowest
from burst_rt.kernels.triton.blocks import load_rows
from burst_rt.kernels.triton.configs import Config, block_width
from burst_rt.kernels.triton.launch import LOG2_E, options_of, strides
from burst_rt.kernels.triton.scores import tanh
from burst_rt.kernels.triton.tables import table_of_decode
from burst_rt.kernels.triton.work import load_bounds, of_batch_row, seen_of

__all__ = ["combine_kernel", "decode_kernel", "launch_decode"]

# Number of programs that a multiprocessor gets, if there are enough keys.
_PROGRAMS = 2
# Maximum number of splits: their states are folded one after another.
_MOST_SPLITS = 64


@triton.jit(do_not_specialize=["heads", "group", "q_len", "num_splits", "by_row"])
def decode_kernel(
    p_q,
    p_k,
    p_v,
    p_acc,
    p_m,
    p_l,
    p_seen,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    heads,
    group,
    q_len,
    num_splits,
    by_row,
    scale_log2,
    cap_scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
    SOFTCAP: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """One split of the keys against BLOCK_M rows of one kv head: acc, m and l of the split.

    A row is a query of one of the `group` query heads that share the kv head. With s = scale_log2 *
    q k^T (if SOFTCAP scale_log2 * tanh(cap_scale * q k^T); unseen cells -inf) over the columns of
    the split: m = max_j s_j, l = sum_j 2^(s_j - m), acc = sum_j 2^(s_j - m) v_j. A split without
    columns has m = -inf, l = 0, acc = 0.

    p_seen, int32: for each batch row (by_row: 1; else for all, 0) the first and one after the last
    column that is seen, then the rows' spans as WIDTH says (`work.py`). The columns between first
    and last are dealt evenly to the splits, and no other column is read. acc `[splits, batch,
    heads, q_len, V_HEAD_DIM]`, m and l `[splits, batch, heads, q_len]` are dense.

    Worked example (d = 1, scale_log2 1, two splits): q = [1], k = [0, 1], v = [4, 8]: the first
    split has m = 0, l = 1, acc = 4, the second m = 1, l = 1, acc = 8. Together m = 1, l = 1/2 + 1,
    acc = 2 + 8.

    Grid: blocks of rows x kv heads x batch rows, splits.
    """
    rows = group * q_len
    num_blocks = tl.cdiv(rows, BLOCK_M)
    i_bk = tl.program_id(0) // num_blocks
    i_b = (i_bk // (heads // group)).to(tl.int64)
    i_kv = (i_bk % (heads // group)).to(tl.int64)
    o_r = tl.program_id(0) % num_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    inside = o_r < rows
    o_t = o_r % q_len

    p_q += i_b * stride_qb + i_kv * group * stride_qh
    in_q = (o_r // q_len).to(tl.int64) * stride_qh + o_t.to(tl.int64) * stride_qt
    b_q = tl.load(
        p_q + in_q[:, None] + o_d[None, :],
        mask=inside[:, None] & (o_d < HEAD_DIM)[None, :],
        other=0.0,
    )
    if INTERPRET:
        # The interpreter's 16-bit arithmetic is wrong.
        b_q = b_q.to(tl.float32)
    p_k += i_b * stride_kb + i_kv * stride_kh
    p_v += i_b * stride_vb + i_kv * stride_vh

    batch = tl.num_programs(0) // (num_blocks * (heads // group))
    p_spans = p_seen + 2 * (1 + (batch - 1) * by_row)
    p_spans = of_batch_row(p_spans, i_b, by_row, q_len, 0, WIDTH, BLOCK_N)
    p_seen += i_b * by_row * 2
    first = tl.load(p_seen)
    last = tl.load(p_seen + 1)
    bounds = load_bounds(p_spans, o_t, q_len, WIDTH, True)
    share = tl.cdiv(tl.cdiv(last - first, num_splits), BLOCK_N) * BLOCK_N
    start = first + tl.program_id(1) * share
    stop = tl.minimum(start + share, last)

    b_acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    b_m = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    b_l = tl.zeros((BLOCK_M,), tl.float32)
    for column in range(start, stop, BLOCK_N):
        b_k = load_rows(p_k, column, stride_kt, stop, HEAD_DIM, BLOCK_D, BLOCK_N, False, INTERPRET)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        if SOFTCAP:
            b_s = tanh(b_s * cap_scale)
        b_seen = seen_of(bounds, p_spans, o_t, column, q_len, WIDTH, BLOCK_N, True, False)
        b_seen &= (column + tl.arange(0, BLOCK_N) < stop)[None, :]
        b_s = tl.where(b_seen, b_s * scale_log2, -float("inf"))
        b_m_new = tl.maximum(b_m, tl.max(b_s, 1))
        # exp2(-inf - -inf) would be NaN: such a row has seen no key yet.
        b_safe = tl.where(b_m_new == -float("inf"), 0.0, b_m_new)
        b_p = tl.exp2(b_s - b_safe[:, None])
        b_old = tl.exp2(b_m - b_safe)
        b_l = b_l * b_old + tl.sum(b_p, 1)
        b_v = load_rows(
            p_v, column, stride_vt, stop, V_HEAD_DIM, BLOCK_DV, BLOCK_N, False, INTERPRET
        )
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_old[:, None], input_precision="ieee")
        b_m = b_m_new

    before = (tl.program_id(1).to(tl.int64) * batch + i_b) * heads * q_len + i_kv * rows
    in_row = before + o_r
    o_v = tl.arange(0, BLOCK_DV)
    tl.store(
        p_acc + in_row[:, None] * V_HEAD_DIM + o_v[None, :],
        b_acc,
        mask=inside[:, None] & (o_v < V_HEAD_DIM)[None, :],
    )
    tl.store(p_m + in_row, b_m, mask=inside)
    tl.store(p_l + in_row, b_l, mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_splits", "lowest"])
def combine_kernel(
    p_acc,
    p_m,
    p_l,
    p_out,
    p_lse,
    num_rows,
    num_splits,
    lowest,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """One row: out and lse of the states that `decode_kernel` wrote for each split.

    The states are folded in the order of the splits, so the same bits come out every time. With
    the folded state: out = acc / l, lse = (m + log2(l)) * log(2); 0 and lowest where l = 0.

    Worked example: two splits with m = 0 and 1, l = 1 and 1, acc = 4 and 8: m = 1, l = 1/2 + 1, acc
    = 2 + 8; out = 20 / 3, lse = log(3).
    """
    row = tl.program_id(0).to(tl.int64)
    o_v = tl.arange(0, BLOCK_DV)
    b_acc = tl.zeros((BLOCK_DV,), tl.float32)
    m = -float("inf")
    l = 0.0  # noqa: E741
    for split in range(num_splits):
        at = tl.cast(split, tl.int64) * num_rows + row
        m_split = tl.load(p_m + at)
        m_new = tl.maximum(m, m_split)
        safe = tl.where(m_new == -float("inf"), 0.0, m_new)
        old = tl.exp2(m - safe)
        new = tl.exp2(m_split - safe)
        b_part = tl.load(p_acc + at * V_HEAD_DIM + o_v, mask=o_v < V_HEAD_DIM, other=0.0)
        b_acc = b_acc * old + b_part * new
        l = l * old + tl.load(p_l + at) * new  # noqa: E741
        m = m_new
    # A row that has seen no key has acc = 0.
    some = tl.where(l == 0.0, 1.0, l)
    tl.store(p_out + row * V_HEAD_DIM + o_v, b_acc / some, mask=o_v < V_HEAD_DIM)
    # Times log(2).
    lse = (m + tl.log2(some)) * 0.6931471805599453
    tl.store(p_lse + row, tl.where(l == 0.0, lowest, lse))


def launch_decode(
    qkv: QKV,
    seen: SeenColumns,
    scale: float,
    softcap: float | None,
    into: Partial,
    config: Config,
    num_processors: int,
    interpret: bool,
) -> None:
    """Starts the two kernels, which write `into`. Does not wait for the device.

    num_processors: multiprocessors of the device.
    """
    (q, k, v), device = qkv, qkv.q.device
    (batch, q_len, heads, head_dim), kv_heads, v_head_dim = q.shape, k.shape[2], v.shape[3]
    group, num_rows = heads // kv_heads, batch * heads * q_len
    table = table_of_decode(seen, device)
    if table.longest == 0:
        into.start()
        return
    blocks = triton.cdiv(group * q_len, config.block_m) * kv_heads * batch
    num_splits = min(
        -(-_PROGRAMS * num_processors // blocks), -(-table.longest // config.block_n), _MOST_SPLITS
    )
    acc = torch.empty((num_splits, num_rows, v_head_dim), dtype=torch.float32, device=device)
    m, l = torch.empty((2, num_splits, num_rows), dtype=torch.float32, device=device)  # noqa: E741
    factor, cap_scale = (scale, 0.0) if softcap is None else (softcap, scale / softcap)
    decode_kernel[blocks, num_splits](
        q, k, v, acc, m, l, table.seen,
        *strides(q), *strides(k), *strides(v), heads, group, q_len, num_splits,
        table.by_row,
        factor * LOG2_E, cap_scale,
        HEAD_DIM=head_dim, BLOCK_D=block_width(head_dim),
        V_HEAD_DIM=v_head_dim, BLOCK_DV=block_width(v_head_dim),
        BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        WIDTH=table.width, SOFTCAP=softcap is not None, INTERPRET=interpret,
        **options_of(config.num_warps, num_stages=config.num_stages),
    )  # fmt: skip
    combine_kernel[(num_rows,)](
        acc, m, l, *into, num_rows, num_splits, lowest(into.lse),
        V_HEAD_DIM=v_head_dim, BLOCK_DV=block_width(v_head_dim), **options_of(1),
    )  # fmt: skip
