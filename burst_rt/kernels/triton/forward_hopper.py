"""The forward tile kernel for Hopper, in which one warpgroup loads and two multiply.

It does what `forward.py` does, for fewer calls (`takes_producer` of `configs.py`), in Gluon,
Triton's lower language, whose programs say which warps do what. A program has three warpgroups, of
four warps each, as in FlashAttention-3 (arXiv 2407.08608, sections 3.1 and 3.2):

    producer    tells the copy engine to bring queries, then keys and values, block after block
    consumers   two, with 64 rows each: products and softmax

A consumer starts the product of block i's scores, then that of block i - 1's probabilities and
values, and does block i's softmax while the second one runs.
How blocks come, and what the barriers count, is in `producer.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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

from burst_rt.kernels.base import QKV, State
from burst_rt.kernels.triton import work
from burst_rt.kernels.triton.configs import Config
from burst_rt.kernels.triton.launch import Meta, TileArguments, meta_of, options_of, strides
from burst_rt.kernels.triton.producer import (
    ROWS,
    Line,
    buffers_of,
    first_of,
    next_of,
    phase_of,
    produce,
)
from burst_rt.kernels.triton.start import Launch, launch_of

__all__ = ["NUM_WARPS", "forward_hopper_kernel", "launch_forward_hopper", "meta_of_hopper"]

# Warps of the first consumer. Those of the other roles come on top.
NUM_WARPS = 4

# On scalars it is the same in both languages.
_line_of = gluon.jit(work.line_of.fn)

_FAR = gl.constexpr(2**31 - 1)  # a column behind all others
# Registers of a thread: of the three warpgroups, the producer's gives most of its own to the
# others. 240 + 240 + 24 are the 504 that a kernel of three has.
_CONSUMER_REGISTERS = gl.constexpr(240)
_PRODUCER_REGISTERS = gl.constexpr(24)


class _Head(NamedTuple):
    """A head's state and results, as the kernel's own arguments, which take no registers."""

    # Values of the device, which have no types here.
    p_acc: Any
    p_m: Any
    p_l: Any
    p_out: Any
    p_lse: Any
    p_sinks: Any
    stride_ab: Any
    stride_at: Any
    heads: Any
    q_len: Any
    i_bh: Any  # number of the head, counted over all batch rows
    p_spans: Any  # where the batch row's begin
    width: Any  # spans of a row


@gluon.jit
def _load_bounds(head, o_m, number):
    """The starts and stops of a span of the rows `o_m`.

    Those of missing spans, and of rows beyond the end, lie behind all columns.
    """
    p_starts = head.p_spans + number * head.q_len
    p_stops = p_starts + head.q_len.to(gl.int64) * head.width
    b_start = gl.load(p_starts + o_m, mask=o_m < head.q_len, other=0)
    b_stop = gl.load(p_stops + o_m, mask=o_m < head.q_len, other=0)
    b_filled = b_start < b_stop
    return gl.where(b_filled, b_start, _FAR), gl.where(b_filled, b_stop, _FAR)


@gluon.jit
def _hide(b_s, bounds, head, o_m, column, META: gl.constexpr):
    """The scores of a block, -inf where a row does not see a column. bounds: of the first spans.

    Columns are counted from the block's first, so that they are constants of 32 bits. The spans of
    a row are in order. What lies between two of them is hidden at once, in a loop on the device:
    the bounds, and booleans of the cells, of several spans would not fit in the registers.
    """
    o_n = gl.expand_dims(gl.arange(0, META.BLOCK_N, gl.SliceLayout(0, b_s.type.layout)), 0)
    b_start, b_stop = bounds
    b_s = gl.where(o_n < gl.expand_dims(b_start - column, 1), -float("inf"), b_s)
    if META.WIDTH > 1:
        for number in range(1, head.width):
            b_start, b_next_stop = _load_bounds(head, o_m, number)
            b_behind = o_n >= gl.expand_dims(b_stop - column, 1)
            b_before = o_n < gl.expand_dims(b_start - column, 1)
            b_s = gl.where(b_behind & b_before, -float("inf"), b_s)
            b_stop = b_next_stop
    return gl.where(o_n >= gl.expand_dims(b_stop - column, 1), -float("inf"), b_s)


@gluon.jit
def _softmax(b_s, b_m, b_l, scale_log2, META: gl.constexpr):
    """Probabilities of a block, the new m and l, and the factor of what was summed before."""
    b_m_new = gl.maximum(b_m, gl.max(b_s, 1) * scale_log2)
    b_safe = b_m_new
    if META.MASKED:
        # exp2(-inf - -inf) would be NaN: such a row has seen no key yet.
        b_safe = gl.where(b_m_new == -float("inf"), 0.0, b_m_new)
    b_p = gl.exp2(b_s * scale_log2 - gl.expand_dims(b_safe, 1))
    b_old = gl.exp2(b_m - b_safe)
    return b_p, b_m_new, b_l * b_old + gl.sum(b_p, 1), b_old


@gluon.jit
def _by_rows(b_row, b_acc):
    """A number for each row, as a column that fits the sums `[rows, channels]`."""
    return gl.expand_dims(gl.convert_layout(b_row, gl.SliceLayout(1, b_acc.type.layout)), 1)


@gluon.jit
def _fold(
    b_acc, b_m, b_l, q_s, q_full, buffers, line, head, row, scale_log2, META: gl.constexpr
):  # fmt: skip
    """Folds all blocks of a line, of which there is one at least, into a consumer's rows.

    b_acc: zeros.
    """
    STAGES: gl.constexpr = buffers.k.shape[0]
    s_layout: gl.constexpr = b_m.type.layout.parent
    p_layout: gl.constexpr = gl.DotOperandLayout(
        operand_index=0, parent=b_acc.type.layout, k_width=2
    )
    half: gl.constexpr = q_s.dtype
    o_m = row + gl.arange(0, ROWS, b_m.type.layout)
    bounds = _load_bounds(head, o_m, 0) if META.MASKED else ()
    zeros = gl.full([ROWS, META.BLOCK_N], 0.0, gl.float32, s_layout)
    place = first_of(line)
    mbarrier.wait(q_full, 0)
    mbarrier.wait(buffers.k_full.index(0), 0)
    b_s = warpgroup_mma(
        q_s, buffers.k.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    b_s = warpgroup_mma_wait(0, deps=[b_s])
    mbarrier.arrive(buffers.k_empty.index(0), count=1)
    if META.MASKED:  # noqa: SIM102  (decided when the kernel is compiled)
        if place.run >= line.cut:
            b_s = _hide(b_s, bounds, head, o_m, place.block * META.BLOCK_N, META)
    b_p, b_m, b_l, _ = _softmax(b_s, b_m, b_l, scale_log2, META)  # the sums are 0
    b_half = gl.convert_layout(b_p.to(half), p_layout)
    place = next_of(line, place)
    # Here and in the loop: blocks whose scores are done; their values are read one block later.
    number = 1
    mbarrier.wait(
        buffers.k_full.index(number % STAGES), phase_of(number, STAGES), pred=place.run < line.end
    )
    while place.run < line.end:
        k_stage, v_stage = number % STAGES, (number - 1) % STAGES
        b_s_later = warpgroup_mma(
            q_s, buffers.k.index(k_stage).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        mbarrier.wait(buffers.v_full.index(v_stage), phase_of(number - 1, STAGES))
        b_acc_later = warpgroup_mma(b_half, buffers.v.index(v_stage), b_acc, is_async=True)
        b_s = warpgroup_mma_wait(1, deps=[b_s_later])  # the scores; the other product goes on
        mbarrier.arrive(buffers.k_empty.index(k_stage), count=1)
        if META.MASKED:  # noqa: SIM102
            if place.run >= line.cut:
                b_s = _hide(b_s, bounds, head, o_m, place.block * META.BLOCK_N, META)
        b_p, b_m, b_l, b_old = _softmax(b_s, b_m, b_l, scale_log2, META)
        b_next = gl.convert_layout(b_p.to(half), p_layout)
        place = next_of(line, place)
        # The keys of the next block, if there is one. The wait also keeps ptxas from moving the
        # softmax behind the wait below. The producer brings them without what this consumer gives
        # back below, the buffer of values number - 1: keys number + 1 come behind values number,
        # which need the buffer of values number - STAGES. If STAGES is 2 or more, that was given
        # back an iteration ago; if it were 1, both would wait for ever.
        mbarrier.wait(
            buffers.k_full.index((number + 1) % STAGES),
            phase_of(number + 1, STAGES),
            pred=place.run < line.end,
        )
        b_acc, b_half, b_m, b_l, b_old = warpgroup_mma_wait(
            0, deps=[b_acc_later, b_next, b_m, b_l, b_old]
        )
        mbarrier.arrive(buffers.v_empty.index(v_stage), count=1)
        b_acc = b_acc * _by_rows(b_old, b_acc)
        number += 1
    v_stage = (number - 1) % STAGES
    mbarrier.wait(buffers.v_full.index(v_stage), phase_of(number - 1, STAGES))
    b_acc = warpgroup_mma(b_half, buffers.v.index(v_stage), b_acc, is_async=True)
    # No block comes after this one, so nobody waits for its buffer.
    return warpgroup_mma_wait(0, deps=[b_acc]), b_m, b_l


@gluon.jit
def _consume(q_s, q_full, buffers, line, head, row, scale_log2, META: gl.constexpr):
    """A consumer: folds the line into its 64 rows, whose state it reads and writes."""
    V_HEAD_DIM: gl.constexpr = META.V_HEAD_DIM
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, META.BLOCK_N, 16]
    )
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, V_HEAD_DIM, 16]
    )
    m_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_m = row + gl.arange(0, ROWS, m_layout)
    # Places in m, l and lse.
    in_row = head.i_bh.to(gl.int64) * head.q_len + o_m

    if META.FIRST:
        if META.SINKS:
            b_m = gl.full([ROWS], 0.0, gl.float32, m_layout) + (
                gl.load(head.p_sinks + head.i_bh % head.heads) * 1.4426950408889634
            )
            b_l = gl.full([ROWS], 1.0, gl.float32, m_layout)
        else:
            b_m = gl.full([ROWS], -float("inf"), gl.float32, m_layout)
            b_l = gl.full([ROWS], 0.0, gl.float32, m_layout)
    else:
        b_m = gl.load(head.p_m + in_row, mask=o_m < head.q_len, other=-float("inf"))
        b_l = gl.load(head.p_l + in_row, mask=o_m < head.q_len, other=0.0)
    b_m_before = b_m
    b_acc = gl.full([ROWS, V_HEAD_DIM], 0.0, gl.float32, acc_layout)

    if line.whole < line.end:
        b_acc, b_m, b_l = _fold(
            b_acc, b_m, b_l, q_s, q_full, buffers, line, head, row, scale_log2, META
        )

    # Places in acc and out: as late as possible, for they would stay in registers all along.
    i_b, i_h = (head.i_bh // head.heads).to(gl.int64), (head.i_bh % head.heads).to(gl.int64)
    corner = i_b * head.stride_ab + row.to(gl.int64) * head.stride_at + i_h * V_HEAD_DIM
    o_r = gl.arange(0, ROWS, gl.SliceLayout(1, acc_layout))
    o_d = gl.arange(0, V_HEAD_DIM, gl.SliceLayout(0, acc_layout))
    in_rows = corner + gl.expand_dims(o_r * head.stride_at, 1)
    o_d = gl.expand_dims(o_d, 0)
    inside = gl.expand_dims(row + o_r < head.q_len, 1)
    if not META.FIRST:
        # The sums so far are added at the end for the same reason.
        b_old = gl.exp2(b_m_before - gl.where(b_m == -float("inf"), 0.0, b_m))
        b_before = gl.load(head.p_acc + in_rows + o_d, mask=inside, other=0.0)
        b_acc = b_acc + b_before * _by_rows(b_old, b_acc)
    if META.LAST:
        b_norm = gl.where(b_l == 0.0, 1.0, b_l)
        b_out = (b_acc / _by_rows(b_norm, b_acc)).to(head.p_out.dtype.element_ty)
        gl.store(head.p_out + in_rows + o_d, b_out, mask=inside)
        # Times log(2). m is -inf in a row that saw no key.
        b_lse = (b_m + gl.log2(b_norm)) * 0.6931471805599453
        gl.store(head.p_lse + in_row, b_lse, mask=o_m < head.q_len)
    else:
        gl.store(head.p_acc + in_rows + o_d, b_acc, mask=inside)
        gl.store(head.p_m + in_row, b_m, mask=o_m < head.q_len)
        gl.store(head.p_l + in_row, b_l, mask=o_m < head.q_len)


@gluon.jit(do_not_specialize=[*work.VARYING, "heads", "width"])
def forward_hopper_kernel(
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
    width,
    scale_log2,
    META: gl.constexpr,
    STAGES: gl.constexpr,
):
    """`forward_kernel` for q, k, v of 16 bits, with HEAD_DIM and V_HEAD_DIM 128.

    Its formula, arguments, what it reads and writes, and its grid are the same; BLOCK_M is 128.
    width: spans a row; WIDTH: 1, or 2 for any other width. STAGES: buffers for blocks of keys, and
    for blocks of values; 2 or more.
    """
    gl.static_assert(META.BLOCK_M == 2 * ROWS)
    gl.static_assert(STAGES >= 2)  # see `_fold`
    num_blocks = gl.cdiv(q_len, META.BLOCK_M)
    i_bh = gl.program_id(0) // num_blocks
    i_b = (i_bh // heads).to(gl.int64)
    i_h = (i_bh % heads).to(gl.int64)
    i_kv = i_h // group
    i_m, whole, cut, end = _line_of(p_lines, gl.program_id(0) % num_blocks, num_blocks, i_b, by_row)
    # The outer condition is decided when the kernel is compiled.
    if not (META.FIRST or META.LAST):  # noqa: SIM102
        if whole == end:
            return
    row = i_m * META.BLOCK_M
    half: gl.constexpr = p_q.dtype.element_ty
    q_block: gl.constexpr = [ROWS, META.HEAD_DIM]
    k_block: gl.constexpr = [META.BLOCK_N, META.HEAD_DIM]
    v_block: gl.constexpr = [META.BLOCK_N, META.V_HEAD_DIM]
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(q_block, half)
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(k_block, half)
    v_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(v_block, half)
    q_desc = tma.make_tensor_descriptor(
        p_q + i_b * stride_qb + i_h * stride_qh, [q_len, META.HEAD_DIM], [stride_qt, 1],
        q_block, q_layout,
    )  # fmt: skip
    k_desc = tma.make_tensor_descriptor(
        p_k + i_b * stride_kb + i_kv * stride_kh, [kv_len, META.HEAD_DIM], [stride_kt, 1],
        k_block, k_layout,
    )  # fmt: skip
    v_desc = tma.make_tensor_descriptor(
        p_v + i_b * stride_vb + i_kv * stride_vh, [kv_len, META.V_HEAD_DIM], [stride_vt, 1],
        v_block, v_layout,
    )  # fmt: skip

    q_s = gl.allocate_shared_memory(half, [2, ROWS, META.HEAD_DIM], q_layout)
    buffers = buffers_of(half, k_desc, v_desc, STAGES)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
    fence_async_shared()

    line = Line(p_runs, whole, cut, end)
    p_spans += i_b * by_row * 2 * width * q_len
    head = _Head(
        p_acc, p_m, p_l, p_out, p_lse, p_sinks, stride_ab, stride_at, heads, q_len, i_bh, p_spans,
        width,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (
                _consume,
                (q_s.index(0), q_full.index(0), buffers, line, head, row, scale_log2, META),
            ),
            (
                _consume,
                (q_s.index(1), q_full.index(1), buffers, line, head, row + ROWS, scale_log2, META),
            ),
            (produce, (q_desc, k_desc, v_desc, q_s, q_full, buffers, line, row, META)),
        ],
        [4, 4],
        [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS],
    )  # fmt: skip


def meta_of_hopper(meta: Meta) -> Meta:
    """The same constants, without those that make no other kernel: WIDTH is 1, or 2 for more."""
    return meta._replace(
        WIDTH=min(meta.WIDTH, 2), SINGLE=False, EVEN_M=False, EVEN_N=False, DESCRIBED=True
    )


def launch_forward_hopper(
    qkv: QKV, state: State, arguments: TileArguments, config: Config
) -> Launch | None:
    """Starts `forward_hopper_kernel` on a tile, and returns what can be kept. Does not wait."""
    q, k, v = qkv
    batch, q_len, heads, _ = q.shape
    grid = (triton.cdiv(q_len, config.block_m) * batch * heads,)
    sinks = arguments.score_options.sinks
    meta = meta_of_hopper(
        meta_of(
            arguments, config, *qkv,
            FIRST=arguments.first, LAST=arguments.last, SINKS=sinks is not None,
        )
    )  # fmt: skip
    rest = (
        *arguments.tables,
        *strides(q), *strides(k), *strides(v), *strides(state.acc)[:2],
        heads, heads // k.shape[2],
        arguments.q_len, arguments.kv_len, arguments.lists.by_row, arguments.spans.width,
        arguments.scale_log2,
    )  # fmt: skip
    compiled = forward_hopper_kernel[grid](
        *qkv, *state, state.m if sinks is None else sinks, *rest,
        META=meta, STAGES=config.num_stages, **options_of(NUM_WARPS),
    )  # fmt: skip
    return launch_of(compiled, grid, (*rest, meta, config.num_stages), arguments.tables[:2])
