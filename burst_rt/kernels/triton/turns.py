"""The producer and the adder of Hopper's backward in one pass (`backward_hopper.py`).

Both walk the blocks of queries that see a program's keys, head after head, as the consumers do, and
count them from 0. What barriers count is as in `producer.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from burst_rt.kernels.triton.producer import async_load, phase_of

__all__ = [
    "ADDERS", "HandedBlock", "Queries", "QueryBuffers", "Walk", "add_in_turn", "next_of_walk",
    "produce_queries",
]  # fmt: skip

ADDERS = gl.constexpr(2)  # warps of the adder
_SOME_ROWS = gl.constexpr(8)  # rows that the adder has in registers


class Walk(NamedTuple):
    """The blocks of queries that see a block of keys: the same for each head of the group."""

    # Values of the device, which have no types here, as below. See `OrderedWork.lines`.
    first: Any
    whole: Any
    cut: Any
    end: Any
    heads: Any  # query heads of the kv head; 0 where no query sees the keys


class Queries(NamedTuple):
    """What is known of the queries of the group's first head, in memory."""

    p_lse: Any
    p_delta: Any
    p_spans: Any
    q_len: Any


class QueryBuffers(NamedTuple):
    """Blocks of queries in shared memory, by stage, and their barriers."""

    q: Any
    dout: Any
    lse: Any  # in powers of two
    delta: Any
    start: Any  # where spans begin, and end
    stop: Any
    full: Any
    empty: Any


class HandedBlock(NamedTuple):
    """A block of dq, not yet scaled, that consumers hand to the adder, and its barriers."""

    dq: Any
    full: Any
    empty: Any


@gluon.jit
def next_of_walk(line, head, block):
    """The head and the number of the block of queries that comes behind one."""
    over = block + 1 == line.end
    return gl.where(over, head + 1, head), gl.where(over, line.first, block + 1)


@gluon.jit
def _into(x, desc):
    """A buffer as the copy engine sees it: with the head as an axis of its own."""
    return x.reshape(desc.block_type.shape)


@gluon.jit
def produce_queries(q_desc, dout_desc, rows, blocks, line, META: gl.constexpr):
    """The producer: brings the blocks of queries of each head, in order."""
    STAGES: gl.constexpr = blocks.q.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([META.BLOCK_M // 32], [32], [1], [0])
    head, block, number = line.first * 0, line.first, 0
    while head < line.heads:
        stage = number % STAGES
        full = blocks.full.index(stage)
        row = block * META.BLOCK_M
        o_m = row + gl.arange(0, META.BLOCK_M, layout)
        inside = o_m < rows.q_len
        in_head = head.to(gl.int64) * rows.q_len + o_m
        # Rows beyond the end add nothing, because their lse is +inf.
        b_lse = gl.load(rows.p_lse + in_head, mask=inside, other=float("inf"))
        b_delta = gl.load(rows.p_delta + in_head, mask=inside, other=0.0)
        mbarrier.wait(blocks.empty.index(stage), phase_of(number, STAGES) ^ 1)
        mbarrier.expect(full, q_desc.block_type.nbytes + dout_desc.block_type.nbytes)
        async_load(q_desc, [head, row, 0], full, _into(blocks.q.index(stage), q_desc))
        async_load(dout_desc, [head, row, 0], full, _into(blocks.dout.index(stage), dout_desc))
        blocks.lse.index(stage).store(b_lse * 1.4426950408889634)
        blocks.delta.index(stage).store(b_delta)
        if META.MASKED:
            p_start = rows.p_spans + o_m
            blocks.start.index(stage).store(gl.load(p_start, mask=inside, other=0))
            blocks.stop.index(stage).store(gl.load(p_start + rows.q_len, mask=inside, other=0))
        mbarrier.arrive(full, count=1)  # for what the copy engine does not count
        head, block = next_of_walk(line, head, block)
        number += 1


@gluon.jit
def add_in_turn(
    handed, p_dq, stride_t, stride_h, p_counts, p_lasts, i_n, line, q_len, scale,
    META: gl.constexpr,
):  # fmt: skip
    """The adder: adds blocks of dq to the sums in memory, each at the program's turn.

    p_dq, p_counts: of the group's first head; the counts of a head follow those of the one before.
    Sums that float32 has no normal number for are 0 (atom.add of the PTX ISA).
    """
    BLOCK_M: gl.constexpr = META.BLOCK_M
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [1, ADDERS], [1, 0])
    o_r = gl.arange(0, _SOME_ROWS, gl.SliceLayout(1, layout))
    o_d = gl.arange(0, META.HEAD_DIM, gl.SliceLayout(0, layout))
    in_rows = gl.expand_dims(o_r * stride_t, 1) + gl.expand_dims(o_d, 0)
    blocks_of_head = gl.cdiv(q_len, META.BLOCK_M)
    head, block, number = line.first * 0, line.first, 0
    while head < line.heads:
        p_count = p_counts + head.to(gl.int64) * blocks_of_head + block
        turn = gl.load(p_lasts + block) - i_n
        row = block * META.BLOCK_M
        p_rows = p_dq + head.to(gl.int64) * stride_h + row.to(gl.int64) * stride_t
        mbarrier.wait(handed.full, number & 1)
        count = gl.atomic_add(p_count, 0, sem="acquire", scope="gpu")
        while count != turn:
            count = gl.atomic_add(p_count, 0, sem="acquire", scope="gpu")
        for at in gl.static_range(0, BLOCK_M, _SOME_ROWS):
            b_dq = handed.dq.slice(at, _SOME_ROWS).load(layout) * scale
            inside = gl.expand_dims(row + at + o_r < q_len, 1)
            gl.atomic_add(
                p_rows + at * stride_t + in_rows, b_dq, mask=inside, sem="relaxed", scope="gpu"
            )
        # Its own barrier lets all warps of the adder come before the count goes up.
        mbarrier.arrive(handed.empty, count=1)
        gl.atomic_add(p_count, 1, sem="release", scope="gpu")
        head, block = next_of_walk(line, head, block)
        number += 1
