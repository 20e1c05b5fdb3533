"""The producer of a Hopper kernel whose warps have roles: it brings blocks, which consumers read.

The copy engine brings queries once, then keys and values, block after block of a line of work (see
`work.py`). Keys and values lie in STAGES buffers each. A pair of barriers (mbarrier of the PTX ISA)
guards a buffer: `full` ends a phase when the block has come, `empty` when both consumers have read
it. All roles walk the same blocks of the line in the same order and count them from 0, over all of
its runs, whole and cut. Block i lies in buffer i % STAGES and is number i // STAGES of those that
come there, whose lowest bit is the phase to wait for (`phase_of`). Nothing starts the count again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

__all__ = [
    "ROWS",
    "Buffers",
    "Line",
    "async_load",
    "buffers_of",
    "first_of",
    "next_of",
    "phase_of",
    "produce",
]

# Triton 3.8 gave the copy engine's load this name. In 3.9 the old one is there, and only raises.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

ROWS = gl.constexpr(64)  # rows of a consumer: four warps multiply 64 (wgmma of the PTX ISA)


class Buffers(NamedTuple):
    """Blocks of keys and of values in shared memory, and their barriers; each by stage."""

    # Values of the device, which have no types here, as below.
    k: Any
    v: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any


class Line(NamedTuple):
    """A line of work: see `line_of` of `work.py`."""

    p_runs: Any
    whole: Any  # number of its first run
    cut: Any  # number of its first cut run
    end: Any  # one after its last run


class _Place(NamedTuple):
    """A block of a line, and what comes after its run."""

    run: Any  # number of its run; `end` behind the last block
    block: Any  # number of the block of columns
    stop: Any  # one after the last block of its run
    next_block: Any  # the first block of the next run
    next_stop: Any


@gluon.jit
def first_of(line):
    """The place of a line's first block; of any block where the line has none."""
    p_run = line.p_runs + 2 * line.whole
    # The table has one run behind those of all lines, not two.
    more = line.whole < line.end
    return _Place(
        line.whole,
        gl.load(p_run),
        gl.load(p_run + 1),
        gl.load(p_run + 2, mask=more, other=0),
        gl.load(p_run + 3, mask=more, other=0),
    )


@gluon.jit
def next_of(line, place):
    """The place behind a block.

    The bounds of a run are loaded when the run before it begins, so that nothing waits for them.
    """
    over = place.block + 1 == place.stop
    run = gl.where(over, place.run + 1, place.run)
    block = gl.where(over, place.next_block, place.block + 1)
    stop = gl.where(over, place.next_stop, place.stop)
    p_next = line.p_runs + 2 * run + 2
    more = over & (run < line.end)
    next_block = gl.load(p_next, mask=more, other=place.next_block)
    next_stop = gl.load(p_next + 1, mask=more, other=place.next_stop)
    return _Place(run, block, stop, next_block, next_stop)


@gluon.jit
def phase_of(number, STAGES: gl.constexpr):
    """Which phase of its buffer's `full` barrier ends when block `number` has come: 0 or 1.

    A barrier begins in phase 0, and phases alternate. When block `number` has been read, the same
    phase of the buffer's `empty` barrier ends, and block number + STAGES may come.
    """
    return (number // STAGES) & 1


@gluon.jit
def buffers_of(HALF: gl.constexpr, k_desc, v_desc, STAGES: gl.constexpr):
    """Empty buffers for the blocks of two descriptors, of the type HALF."""
    k_block: gl.constexpr = k_desc.block_type.shape
    v_block: gl.constexpr = v_desc.block_type.shape
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    buffers = Buffers(
        gl.allocate_shared_memory(HALF, [STAGES, k_block[0], k_block[1]], k_desc.layout),
        gl.allocate_shared_memory(HALF, [STAGES, v_block[0], v_block[1]], v_desc.layout),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar),
    )
    for i in gl.static_range(STAGES):
        mbarrier.init(buffers.k_full.index(i), count=1)
        mbarrier.init(buffers.v_full.index(i), count=1)
        mbarrier.init(buffers.k_empty.index(i), count=2)  # both consumers
        mbarrier.init(buffers.v_empty.index(i), count=2)
    return buffers


@gluon.jit
def produce(q_desc, k_desc, v_desc, q_s, q_full, buffers, line, row, META: gl.constexpr):
    """The producer: brings the queries of both consumers, then the blocks of the line in order."""
    STAGES: gl.constexpr = buffers.k.shape[0]
    if line.whole < line.end:  # else no consumer waits for the queries
        for i in gl.static_range(2):
            mbarrier.expect(q_full.index(i), q_desc.block_type.nbytes)
            async_load(q_desc, [row + i * ROWS, 0], q_full.index(i), q_s.index(i))
    place = first_of(line)
    number = 0
    while place.run < line.end:
        stage = number % STAGES
        # The buffer is free when block number - STAGES has been read, which ends the phase before
        # this block's own. The first STAGES blocks wait for phase 1 of barriers in phase 0: PTX
        # takes the phase before the first for ended.
        free = phase_of(number, STAGES) ^ 1
        column = place.block * META.BLOCK_N
        mbarrier.wait(buffers.k_empty.index(stage), free)
        mbarrier.expect(buffers.k_full.index(stage), k_desc.block_type.nbytes)
        async_load(k_desc, [column, 0], buffers.k_full.index(stage), buffers.k.index(stage))
        mbarrier.wait(buffers.v_empty.index(stage), free)
        mbarrier.expect(buffers.v_full.index(stage), v_desc.block_type.nbytes)
        async_load(v_desc, [column, 0], buffers.v_full.index(stage), buffers.v.index(stage))
        place = next_of(line, place)
        number += 1
