"""Blocks of rows on the device: loaded by pointers or tensor descriptors, added to, written.

Blocks are loaded by pointers, or by the chip's copy engine through tensor descriptors that are made
on the device. Descriptors take memory on the device while the kernel runs (`kernel.py` gives it),
and inputs that fit them (`uses_descriptors` of `launch.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

__all__ = [
    "Rows", "heads_of", "load_block", "load_of_head", "load_rows", "put_rows", "rows_of",
    "zeros_for_sums",
]  # fmt: skip


@triton.jit
def load_rows(
    pointer,
    row,
    stride,
    length,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    EVEN: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Rows [row, row + BLOCK_R) of a matrix `[length, HEAD_DIM]` as a block `[BLOCK_R, BLOCK_D]`.

    The block is 0 beyond the matrix's edges. EVEN: none of these rows is beyond the edge. The
    block's corner is addressed in 64 bits, elements inside the block in 32.
    """
    o_r = tl.arange(0, BLOCK_R)
    o_d = tl.arange(0, BLOCK_D)
    pointers = pointer + tl.cast(row, tl.int64) * stride + (o_r[:, None] * stride + o_d[None, :])
    if EVEN:
        block = (
            tl.load(pointers)
            if HEAD_DIM == BLOCK_D
            else tl.load(pointers, mask=(o_d < HEAD_DIM)[None, :], other=0.0)
        )
    elif HEAD_DIM == BLOCK_D:
        block = tl.load(pointers, mask=(row + o_r < length)[:, None], other=0.0)
    else:
        block = tl.load(
            pointers, mask=(row + o_r < length)[:, None] & (o_d < HEAD_DIM)[None, :], other=0.0
        )
    if INTERPRET:
        # The interpreter's 16-bit arithmetic is wrong.
        block = block.to(tl.float32)
    return block


class Rows(NamedTuple):
    """A matrix `[length, HEAD_DIM]` that blocks are loaded from.

    In a kernel that loops over heads there is a matrix for each head.
    """

    # Values of the device, which have no types here.
    source: Any  # a pointer or a descriptor
    stride: Any  # elements from row to row
    length: Any  # in rows


@triton.jit
def rows_of(
    pointer,
    stride,
    length,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """The rows of a matrix `[length, HEAD_DIM]`, for `load_block`.

    If DESCRIBED their source is a descriptor, made here, else the pointer.
    """
    if DESCRIBED:
        source = tl.make_tensor_descriptor(
            pointer, shape=[length, HEAD_DIM], strides=[stride, 1], block_shape=[BLOCK_R, BLOCK_D]
        )
    else:
        source = pointer
    return Rows(source, stride, length)


@triton.jit
def load_block(
    rows,
    row,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    EVEN: tl.constexpr,
    META: tl.constexpr,
):
    """Rows [row, row + BLOCK_R) of `rows_of` as a block `[BLOCK_R, BLOCK_D]`.

    The block is 0 beyond the matrix's edges. EVEN: none of these rows is beyond the edge. Through a
    descriptor the chip's copy engine loads, and handles the edges by itself.
    """
    if META.DESCRIBED:
        block = rows.source.load([row, 0])
        if META.INTERPRET:
            block = block.to(tl.float32)
    else:
        block = load_rows(
            rows.source, row, rows.stride, rows.length, HEAD_DIM, BLOCK_D, BLOCK_R, EVEN,
            META.INTERPRET,
        )  # fmt: skip
    return block


@triton.jit
def heads_of(
    pointer,
    stride_h,
    stride,
    heads,
    length,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """`rows_of` for matrices `[heads, length, HEAD_DIM]`.

    Only for kernels that loop over heads: Triton's Hopper compiler cannot share out among warps
    what is loaded as three dimensions.
    """
    if DESCRIBED:
        source = tl.make_tensor_descriptor(
            pointer,
            shape=[heads, length, HEAD_DIM],
            strides=[stride_h, stride, 1],
            block_shape=[1, BLOCK_R, BLOCK_D],
        )
    else:
        source = pointer
    return Rows(source, stride, length)


@triton.jit
def load_of_head(
    rows,
    head,
    row,
    stride_h,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    EVEN: tl.constexpr,
    META: tl.constexpr,
):
    """`load_block` from one head of the matrices of `heads_of`."""
    if META.DESCRIBED:
        block = tl.reshape(rows.source.load([head, row, 0]), (BLOCK_R, BLOCK_D))
        if META.INTERPRET:
            block = block.to(tl.float32)
    else:
        source = rows.source + tl.cast(head, tl.int64) * stride_h
        block = load_rows(
            source, row, rows.stride, rows.length, HEAD_DIM, BLOCK_D, BLOCK_R, EVEN,
            META.INTERPRET,
        )  # fmt: skip
    return block


@triton.jit
def zeros_for_sums(pointer, never, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """A block of zeros `[ROWS, CHANNELS]` that sums of products start from.

    never: false, which the compiler must not know. pointer: any. The zeros, float32, are what loads
    give that do not happen. ptxas (of CUDA 12.8 for sm_90) takes turns with wgmma, one product
    after another (its remark C7515), where sums start from constants.
    """
    pointers = pointer + tl.zeros((ROWS, CHANNELS), tl.int32)
    inside = tl.full((ROWS, CHANNELS), 1, tl.int1) & never
    return tl.load(pointers, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _put_part(
    pointer,
    row,
    stride,
    length,
    part,
    column,
    HEAD_DIM: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ADDS: tl.constexpr,
):
    o_r = tl.arange(0, BLOCK_R)
    o_c = column + tl.arange(0, BLOCK_C)
    pointers = pointer + tl.cast(row, tl.int64) * stride + (o_r[:, None] * stride + o_c[None, :])
    inside = (row + o_r < length)[:, None] & (o_c < HEAD_DIM)[None, :]
    if ADDS:
        part += tl.load(pointers, mask=inside, other=0.0)
    tl.store(pointers, part.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def put_rows(
    pointer,
    row,
    stride,
    length,
    block,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ADDS: tl.constexpr,
):
    """Adds a block `[BLOCK_R, BLOCK_D]` to rows of a matrix `[length, HEAD_DIM]`, or writes them.

    ADDS: the block is added, and the matrix is float32. The rows are [row, row + BLOCK_R). One half
    of the columns comes after the other: all columns at once would not fit in the registers along
    with two blocks of sums.
    """
    HALF: tl.constexpr = BLOCK_D // 2
    left, right = tl.split(tl.permute(tl.reshape(block, (BLOCK_R, 2, HALF)), (0, 2, 1)))
    _put_part(pointer, row, stride, length, left, 0, HEAD_DIM, HALF, BLOCK_R, ADDS)
    _put_part(pointer, row, stride, length, right, HALF, HEAD_DIM, HALF, BLOCK_R, ADDS)
