"""O', which fused backwards get in place of the output O: so O never has to travel.

A fused backward takes O and uses only delta = rowsum(dO * O). It is given O' = dO * delta / |dO|^2
instead: then rowsum(dO * O') = delta exactly. Where |dO|^2 is near overflow or underflow,
O' = u * delta / (amax * |u|^2) with u = dO / amax and amax the row's largest |dO|.
"""

from __future__ import annotations

import torch

__all__ = ["stand_in_for_out", "stand_ins_in_16_bits"]

# Between these, a norm's square is neither near overflow nor near underflow in float32, and so not
# in float64.
_TINY, _HUGE = 1e-15, 1e15
# The largest O', and the smallest dO of a replaced row: well inside the range of bfloat16.
_LARGEST, _SMALLEST = 2.0**100, 2.0**-126


def stand_in_for_out(dout: torch.Tensor, delta: torch.Tensor) -> torch.Tensor | None:
    """O' of the module's text, `[batch, heads, q, d]` like dout.

    None where a row of dout is 0, or nearly, and delta is not.
    """
    norm = torch.linalg.vector_norm(dout, dim=-1)
    least, most = torch.aminmax(norm)
    if least.item() > _TINY and most.item() < _HUGE:
        scaled: torch.Tensor = dout * (delta / norm.square_()).unsqueeze(-1)
        return scaled
    # A row below the smallest normal number is as good as 0: u would not be of length 1.
    amax = dout.abs().amax(-1)
    tiny = torch.finfo(dout.dtype).tiny
    u = dout / amax.clamp_min(tiny).unsqueeze(-1)
    amax.masked_fill_(amax < tiny, 0.0)
    weight = torch.where(delta == 0, 0.0, delta / amax / torch.linalg.vecdot(u, u))
    return u.mul_(weight.unsqueeze(-1)) if bool(torch.isfinite(weight).all()) else None


def stand_ins_in_16_bits(
    dout: torch.Tensor, delta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """dO and O' `[batch, q, heads, d]` in bfloat16, with rowsum(dO * O') = delta.

    O' = u * delta / (amax * |u|^2), with u = dO / amax and amax the row's largest |dO|. Where that
    is too large (a gradient of lse, and a dO that is 0 or next to it), the row of dO becomes a
    constant e, and the row of O' the constant delta / (d * e). With e = |delta| / (d * 2^100),
    neither the former dO nor this one has any digit in a sum with delta.
    """
    wide, delta = dout.float(), delta.transpose(1, 2).unsqueeze(-1)
    amax = wide.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    wide.div_(amax)
    size = amax * torch.linalg.vecdot(wide, wide).unsqueeze(-1)
    fits = delta.abs() <= _LARGEST * size
    e = (delta.abs() / (_LARGEST * dout.shape[3])).clamp_min(_SMALLEST).to(dout.dtype)
    weight = torch.where(fits & (delta != 0), delta / size, 0.0)
    out = torch.where(fits, wide.mul_(weight), delta / (e.float() * dout.shape[3])).to(dout.dtype)
    return torch.where(fits, dout, e), out
