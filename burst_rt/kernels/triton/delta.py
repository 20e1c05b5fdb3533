"""The delta kernel: computes, once a call, what the backward needs of each query."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from burst_rt.kernels.base import Results
from burst_rt.kernels.triton.blocks import load_rows
from burst_rt.kernels.triton.configs import Config, block_width
from burst_rt.kernels.triton.launch import options_of, strides
from burst_rt.kernels.triton.start import Launch, launch_of

__all__ = ["delta_kernel", "launch_delta"]


@triton.jit(do_not_specialize=["q_len", "heads"])
def delta_kernel(
    p_dout,
    p_out,
    p_lse,
    p_dlse,
    p_top,
    p_delta,
    stride_db,
    stride_dt,
    stride_dh,
    stride_ob,
    stride_ot,
    stride_oh,
    stride_lb,
    stride_lh,
    stride_lt,
    stride_gb,
    stride_gh,
    stride_gt,
    heads,
    q_len,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """BLOCK_M queries of one head: top = lse, delta = rowsum(dout * out) - dlse.

    Where lse is -inf, top is +inf and delta is 0: a row that saw no key has no gradient, whatever
    dlse holds for it, NaN too. dout, out `[batch, q_len, heads, HEAD_DIM]` and lse, dlse `[batch,
    heads, q_len]` may be strided; top and delta (shaped like lse) are dense.

    Worked example: dout = [1, 2], out = [3, 4], lse = 5, dlse = 6: top = 5, delta = 1 * 3 + 2 * 4 -
    6 = 5.
    """
    num_blocks = tl.cdiv(q_len, BLOCK_M)
    row = tl.program_id(0) % num_blocks * BLOCK_M
    i_bh = tl.program_id(0) // num_blocks
    i_b = (i_bh // heads).to(tl.int64)
    i_h = (i_bh % heads).to(tl.int64)
    o_m = row + tl.arange(0, BLOCK_M)
    inside = o_m < q_len

    p_dout += i_b * stride_db + i_h * stride_dh
    b_dout = load_rows(p_dout, row, stride_dt, q_len, HEAD_DIM, BLOCK_D, BLOCK_M, False, INTERPRET)
    p_out += i_b * stride_ob + i_h * stride_oh
    b_out = load_rows(p_out, row, stride_ot, q_len, HEAD_DIM, BLOCK_D, BLOCK_M, False, INTERPRET)
    b_delta = tl.sum(b_dout.to(tl.float32) * b_out.to(tl.float32), 1)
    b_lse = tl.load(
        p_lse + i_b * stride_lb + i_h * stride_lh + o_m.to(tl.int64) * stride_lt,
        mask=inside,
        other=0.0,
    )
    if HAS_DLSE:
        b_delta -= tl.load(
            p_dlse + i_b * stride_gb + i_h * stride_gh + o_m.to(tl.int64) * stride_gt,
            mask=inside,
            other=0.0,
        )
    b_blind = b_lse == -float("inf")
    in_row = i_bh.to(tl.int64) * q_len + o_m
    tl.store(p_top + in_row, tl.where(b_blind, float("inf"), b_lse), mask=inside)
    tl.store(p_delta + in_row, tl.where(b_blind, 0.0, b_delta), mask=inside)


def launch_delta(
    results: Results, rows: tuple[torch.Tensor, torch.Tensor], config: Config, interpret: bool
) -> Launch | None:
    """Starts `delta_kernel`, which writes `rows`, each `[batch, heads, q_len]`.

    Returns what can be kept. Does not wait for the device.
    """
    out, lse, dout, dlse = results
    batch, q_len, heads, head_dim = dout.shape
    grid = (triton.cdiv(q_len, config.block_m) * batch * heads,)
    dlse_or_lse = lse if dlse is None else dlse
    rest = (
        *strides(dout), *strides(out), *lse.stride(), *dlse_or_lse.stride(), heads, q_len,
        head_dim, block_width(head_dim), config.block_m, dlse is not None, interpret,
    )  # fmt: skip
    compiled = delta_kernel[grid](
        dout, out, lse, dlse_or_lse, *rows, *rest,
        **options_of(config.num_warps, num_stages=config.num_stages),
    )  # fmt: skip
    return launch_of(compiled, grid, rest)
