"""The backward tile kernel for Hopper: dq, dk and dv in one pass, by five products a block.

It does what `dq.py` and `dkdv.py` do in two passes and seven products, for fewer calls (`_one_pass`
of `kernel.py`), in Gluon. As in `dkdv.py` a program owns a block of keys, and walks the queries
that see it; it adds what it finds for dq to sums in memory. A program has eleven warps:

    consumers   eight: products, probabilities, and the sums of dk and dv
    producer    one: brings queries and dout by the copy engine, block after block, and lse, delta
                and spans by itself
    adder       two: add a block's dq to the sums in memory when it is the program's turn

Turns. Programs add to a block of dq one after another, in an order that depends on the mask alone,
so that the bits are the same every time (as the ordered backward of FlashAttention-3 does; arXiv
2407.08608 has the roles). A program takes a number when it begins, and does the block of keys of
that number; they are in descending order. A count for each block of queries says how many programs
have added to it. `ordered_work` sees to it that the blocks of keys that see a block of queries have
no gap between them, so block n's turn has come at the count `last - n`. Nobody waits for a program
that has a higher number, and so may not have begun. All walk queries upwards. Under a causal mask
each comes to a block of queries some blocks later than the program before it, and hardly waits.

Consumers begin the scores of the block that follows before they are done with a block: while they
hand over its dq, those products run, and its own for dk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from burst_rt.kernels.base import QKV, Gradients, Upstream
from burst_rt.kernels.triton import work
from burst_rt.kernels.triton.configs import Config
from burst_rt.kernels.triton.launch import Meta, TileArguments, meta_of, options_of, strides
from burst_rt.kernels.triton.producer import async_load, phase_of
from burst_rt.kernels.triton.turns import (
    ADDERS,
    HandedBlock,
    Queries,
    QueryBuffers,
    Walk,
    add_in_turn,
    next_of_walk,
    produce_queries,
)

__all__ = ["NUM_WARPS", "backward_hopper_kernel", "launch_backward_hopper", "meta_of_backward"]

# Warps of the consumers. Those of the other roles come on top.
NUM_WARPS = 8

# Registers of a thread of the other roles. Consumers share the rest: 232 each.
_OTHERS_REGISTERS = gl.constexpr(40)


class _Sums(NamedTuple):
    """Sums of a gradient in memory, as the kernel's own arguments, which take no registers."""

    p_sums: Any
    stride_b: Any
    stride_t: Any
    stride_h: Any


@gluon.jit
def _put(b_x, sums, i_b, i_h, row, length, META: gl.constexpr):
    """Adds a block to its sums; where these hold nothing yet, writes it."""
    layout: gl.constexpr = b_x.type.layout
    p_sums = sums.p_sums + i_b * sums.stride_b + i_h * sums.stride_h
    p_sums += row.to(gl.int64) * sums.stride_t
    o_r = gl.arange(0, META.BLOCK_N, gl.SliceLayout(1, layout))
    o_d = gl.arange(0, META.HEAD_DIM, gl.SliceLayout(0, layout))
    at = p_sums + gl.expand_dims(o_r * sums.stride_t, 1) + gl.expand_dims(o_d, 0)
    inside = gl.expand_dims(row + o_r < length, 1)
    if META.ADDS:
        b_x += gl.load(at, mask=inside, other=0.0)
    gl.store(at, b_x, mask=inside)


@gluon.jit
def _consume(
    k_all, v_all, kv_full, ds_all, blocks, handed, dk, dv, i_bh, kv_heads, line, column, kv_len,
    scale, scale_log2, META: gl.constexpr,
):  # fmt: skip
    """The consumers: dk and dv of a block of keys, and the parts of dq, which they hand over."""
    STAGES: gl.constexpr = blocks.q.shape[0]
    half: gl.constexpr = k_all.dtype
    # Scores and what becomes of them are [keys, queries].
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, META.BLOCK_M, 16]
    )
    kv_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, META.HEAD_DIM, 16]
    )
    q_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, META.HEAD_DIM // 2, 16]
    )
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=kv_layout, k_width=2)
    row_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    no_s = gl.full([META.BLOCK_N, META.BLOCK_M], 0.0, gl.float32, s_layout)
    no_dq = gl.full([META.BLOCK_M, META.HEAD_DIM], 0.0, gl.float32, q_layout)
    b_dk = gl.full([META.BLOCK_N, META.HEAD_DIM], 0.0, gl.float32, kv_layout)
    b_dv = gl.full([META.BLOCK_N, META.HEAD_DIM], 0.0, gl.float32, kv_layout)
    o_n = gl.expand_dims(gl.arange(0, META.BLOCK_N, gl.SliceLayout(1, s_layout)), 1)
    mbarrier.wait(kv_full, 0)
    mbarrier.wait(blocks.full.index(0), 0, pred=line.heads > 0)
    b_s = warpgroup_mma(
        k_all.index(0), blocks.q.index(0).permute((1, 0)), no_s, use_acc=False, is_async=True
    )
    b_s = warpgroup_mma_wait(0, deps=[b_s])
    head, block, number = line.first * 0, line.first, 0
    while head < line.heads:
        stage = number % STAGES
        # Always 0, which the compiler does not know. Else it would make the descriptors of these
        # products before the loop, and spill them.
        only = number >> 30
        k_s, v_s, ds_s = k_all.index(only), v_all.index(only), ds_all.index(only)
        q_s, dout_s = blocks.q.index(stage), blocks.dout.index(stage)
        dp_later = warpgroup_mma(v_s, dout_s.permute((1, 0)), no_s, use_acc=False, is_async=True)
        if META.MASKED:  # noqa: SIM102  (decided when the kernel is compiled)
            if (block < line.whole) | (block >= line.cut):
                # Columns are counted from the block's first, so that they are constants.
                b_start = blocks.start.index(stage).load(row_layout) - column
                b_s = gl.where(o_n < gl.expand_dims(b_start, 0), -float("inf"), b_s)
                b_stop = blocks.stop.index(stage).load(row_layout) - column
                b_s = gl.where(o_n >= gl.expand_dims(b_stop, 0), -float("inf"), b_s)
        b_lse = blocks.lse.index(stage).load(row_layout)
        b_p = gl.exp2(b_s * scale_log2 - gl.expand_dims(b_lse, 0))
        b_half = gl.convert_layout(b_p.to(half), p_layout)
        dv_later = warpgroup_mma(b_half, dout_s, b_dv, is_async=True)
        b_dp, b_p = warpgroup_mma_wait(1, deps=[dp_later, b_p])
        b_delta = blocks.delta.index(stage).load(row_layout)
        ds_s.store((b_p * (b_dp - gl.expand_dims(b_delta, 0))).to(half))
        fence_async_shared()
        dq_later = warpgroup_mma(ds_s.permute((1, 0)), k_s, no_dq, use_acc=False, is_async=True)
        # From shared memory, as for dq. From registers ptxas finds too few to let what follows run
        # beside it, and lets products take turns.
        dk_later = warpgroup_mma(ds_s, q_s, b_dk, is_async=True)
        b_dv, b_dq = warpgroup_mma_wait(1, deps=[dv_later, dq_later])
        mbarrier.wait(handed.empty, (number & 1) ^ 1)
        handed.dq.store(b_dq)
        mbarrier.arrive(handed.full, count=1)
        head, block = next_of_walk(line, head, block)
        number += 1
        # Behind the last block these are scores of what lies there, which nobody reads.
        following = number % STAGES
        mbarrier.wait(
            blocks.full.index(following), phase_of(number, STAGES), pred=head < line.heads
        )
        s_later = warpgroup_mma(
            k_s, blocks.q.index(following).permute((1, 0)), no_s, use_acc=False, is_async=True
        )
        b_dk = warpgroup_mma_wait(1, deps=[dk_later])
        mbarrier.arrive(blocks.empty.index(stage), count=1)
        b_s = warpgroup_mma_wait(0, deps=[s_later])
    # Places are found as late as possible, for they would stay in registers all along.
    i_b, i_kv = (i_bh // kv_heads).to(gl.int64), (i_bh % kv_heads).to(gl.int64)
    _put(b_dk * scale, dk, i_b, i_kv, column, kv_len, META)
    _put(b_dv, dv, i_b, i_kv, column, kv_len, META)


@gluon.jit(do_not_specialize=[*work.VARYING, "kv_heads"])
def backward_hopper_kernel(
    p_q,
    p_k,
    p_v,
    p_dout,
    p_lse,
    p_delta,
    p_dq,
    p_dk,
    p_dv,
    p_counts,
    p_spans,
    p_lines,
    p_lasts,
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
    META: gl.constexpr,
    STAGES: gl.constexpr,
):
    """`dq_kernel` and `dkdv_kernel` in one, for q, k, v of 16 bits with HEAD_DIM 128.

    Their formulas and arguments are the same. dq, dk and dv (strides s, x, y) are sums of float32.
    Adds to dq, and to dk and dv if ADDS, else writes these two.

    p_counts: int32, zeros before it, and garbage after: how many programs have begun, then the
    counts `[batch, query heads, blocks of queries]`. p_lines, p_lasts: see `OrderedWork`. p_spans:
    of one span a row. STAGES: buffers for blocks of queries; 2 or more.

    Grid: one dimension, a program for each block of keys of each kv head. They are done kv head by
    kv head, the last block first.
    """
    gl.static_assert(STAGES >= 2)  # products read one block while the next one must have come
    num_blocks = gl.cdiv(kv_len, META.BLOCK_N)
    # CUDA does not promise that programs begin in the order of their ids.
    number = gl.atomic_add(p_counts, 1, sem="relaxed", scope="gpu")
    i_bh = number // num_blocks
    i_b = (i_bh // kv_heads).to(gl.int64)
    i_kv = (i_bh % kv_heads).to(gl.int64)
    i_n = num_blocks - 1 - number % num_blocks
    p_line = p_lines + (i_b * by_row * num_blocks + i_n) * 4
    first, end = gl.load(p_line), gl.load(p_line + 3)
    if META.ADDS:  # noqa: SIM102  (decided when the kernel is compiled)
        if first == end:
            return
    heads = gl.where(first < end, group, 0)
    line = Walk(first, gl.load(p_line + 1), gl.load(p_line + 2), end, heads)
    column = i_n * META.BLOCK_N
    i_h = i_kv * group
    half: gl.constexpr = p_q.dtype.element_ty
    q_block: gl.constexpr = [META.BLOCK_M, META.HEAD_DIM]
    head_block: gl.constexpr = [1, META.BLOCK_M, META.HEAD_DIM]
    kv_block: gl.constexpr = [META.BLOCK_N, META.HEAD_DIM]
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(q_block, half)
    head_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(head_block, half)
    kv_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(kv_block, half)
    q_desc = tma.make_tensor_descriptor(
        p_q + i_b * stride_qb + i_h * stride_qh, [group, q_len, META.HEAD_DIM],
        [stride_qh, stride_qt, 1], head_block, head_layout,
    )  # fmt: skip
    dout_desc = tma.make_tensor_descriptor(
        p_dout + i_b * stride_db + i_h * stride_dh, [group, q_len, META.HEAD_DIM],
        [stride_dh, stride_dt, 1], head_block, head_layout,
    )  # fmt: skip
    k_desc = tma.make_tensor_descriptor(
        p_k + i_b * stride_kb + i_kv * stride_kh, [kv_len, META.HEAD_DIM], [stride_kt, 1],
        kv_block, kv_layout,
    )  # fmt: skip
    v_desc = tma.make_tensor_descriptor(
        p_v + i_b * stride_vb + i_kv * stride_vh, [kv_len, META.HEAD_DIM], [stride_vt, 1],
        kv_block, kv_layout,
    )  # fmt: skip

    bar: gl.constexpr = mbarrier.MBarrierLayout()
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(
        [META.BLOCK_N, META.BLOCK_M], half
    )
    dq_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(q_block, gl.float32)
    k_s = gl.allocate_shared_memory(half, [1, META.BLOCK_N, META.HEAD_DIM], kv_layout)
    v_s = gl.allocate_shared_memory(half, [1, META.BLOCK_N, META.HEAD_DIM], kv_layout)
    ds_s = gl.allocate_shared_memory(half, [1, META.BLOCK_N, META.BLOCK_M], ds_layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], bar)
    blocks = QueryBuffers(
        gl.allocate_shared_memory(half, [STAGES, META.BLOCK_M, META.HEAD_DIM], q_layout),
        gl.allocate_shared_memory(half, [STAGES, META.BLOCK_M, META.HEAD_DIM], q_layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, META.BLOCK_M], flat),
        gl.allocate_shared_memory(gl.float32, [STAGES, META.BLOCK_M], flat),
        gl.allocate_shared_memory(gl.int32, [STAGES, META.BLOCK_M], flat),
        gl.allocate_shared_memory(gl.int32, [STAGES, META.BLOCK_M], flat),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar),
    )
    handed = HandedBlock(
        gl.allocate_shared_memory(gl.float32, q_block, dq_layout),
        gl.allocate_shared_memory(gl.int64, [1], bar),
        gl.allocate_shared_memory(gl.int64, [1], bar),
    )
    mbarrier.init(kv_full, count=1)
    mbarrier.init(handed.full, count=1)
    mbarrier.init(handed.empty, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(blocks.full.index(i), count=2)  # the copy engine, and the producer itself
        mbarrier.init(blocks.empty.index(i), count=1)
    fence_async_shared()
    mbarrier.expect(kv_full, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
    async_load(k_desc, [column, 0], kv_full, k_s.index(0))
    async_load(v_desc, [column, 0], kv_full, v_s.index(0))

    in_head = i_b * kv_heads * group + i_h  # number of the first head, over all batch rows
    blocks_of_head = gl.cdiv(q_len, META.BLOCK_M)
    rows = Queries(
        p_lse + in_head * q_len, p_delta + in_head * q_len, p_spans + i_b * by_row * 2 * q_len,
        q_len,
    )  # fmt: skip
    p_dq += i_b * stride_sb + i_h * stride_sh
    dk = _Sums(p_dk, stride_xb, stride_xt, stride_xh)
    dv = _Sums(p_dv, stride_yb, stride_yt, stride_yh)
    p_counts += 1 + in_head * blocks_of_head
    p_lasts += i_b * by_row * blocks_of_head
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    k_s, v_s, kv_full, ds_s, blocks, handed, dk, dv, i_bh, kv_heads, line, column,
                    kv_len, scale, scale_log2, META,
                ),
            ),
            (produce_queries, (q_desc, dout_desc, rows, blocks, line, META)),
            (
                add_in_turn,
                (
                    handed, p_dq, stride_st, stride_sh, p_counts, p_lasts, i_n, line, q_len, scale,
                    META,
                ),
            ),
        ],
        [1, ADDERS],
        [_OTHERS_REGISTERS, _OTHERS_REGISTERS],
    )  # fmt: skip


def meta_of_backward(meta: Meta) -> Meta:
    """The same constants, without those that make no other kernel."""
    return meta._replace(WIDTH=1, SINGLE=False, EVEN_M=False, EVEN_N=False, DESCRIBED=True)


def launch_backward_hopper(
    qkv: QKV, upstream: Upstream, grads: Gradients, arguments: TileArguments, config: Config
) -> None:
    """Starts `backward_hopper_kernel`, which adds to dq, dk and dv, sums of float32.

    Where sums hold nothing yet, dk and dv are written, and dq becomes zeros before. arguments: its
    lists are those of `ordered_lists`. Does not wait for the device.
    """
    (q, k, v), (dq, dk, dv), dout = qkv, grads, upstream.dout
    assert dq is not None
    assert dk is not None
    assert dv is not None
    batch, q_len, heads, _ = q.shape
    kv_heads = k.shape[2]
    if not arguments.adds("q"):
        dq.zero_()
    blocks = triton.cdiv(q_len, config.block_m)
    counts = torch.zeros(1 + batch * heads * blocks, dtype=torch.int32, device=q.device)
    meta = meta_of_backward(meta_of(arguments, config, *qkv, ADDS=arguments.adds("kv")))
    backward_hopper_kernel[(triton.cdiv(k.shape[1], config.block_n) * batch * kv_heads,)](
        *qkv, *upstream[:3], dq, dk, dv, counts, *arguments.tables,
        *strides(q), *strides(k), *strides(v), *strides(dout), *strides(dq), *strides(dk),
        *strides(dv),
        kv_heads, heads // kv_heads, arguments.q_len, arguments.kv_len, arguments.lists.by_row,
        arguments.scale, arguments.scale_log2,
        META=meta, STAGES=config.num_stages, **options_of(NUM_WARPS),
    )  # fmt: skip
