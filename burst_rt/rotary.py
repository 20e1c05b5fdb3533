"""Rotary positions (RoFormer, arXiv 2104.09864), for tokens at any global positions.

The tokens are a whole sequence's, or a rank's part of one.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rotate", "rotations"]


def rotations(positions_S: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine [tokens, head_dim / 2], fp64, of the angles position / theta^(2 i /
    head_dim).
    """
    # The angle is formed in fp64: at a position of a million, fp32 would be off by hundredths of a
    # radian.
    exponents_F = (
        torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions_S.device) / head_dim
    )
    angles_SF = positions_S.to(torch.float64)[:, None] * theta**-exponents_F
    return angles_SF.cos(), angles_SF.sin()


def rotate(x_BSHE: Tensor, cos_SF: Tensor, sin_SF: Tensor) -> Tensor:
    """Turn the pairs (i, i + head_dim / 2) of each head by the token's angles; the dtype stays."""
    a_BSHF, b_BSHF = x_BSHE.chunk(2, dim=-1)
    cos, sin = cos_SF[None, :, None, :], sin_SF[None, :, None, :]
    return torch.cat((a_BSHF * cos - b_BSHF * sin, b_BSHF * cos + a_BSHF * sin), dim=-1).to(
        x_BSHE.dtype
    )
