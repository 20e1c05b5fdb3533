"""What every launcher needs: a tile as the kernels' plain arguments, and strides that are fit for them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from burst_rt.errors import InternalError
from burst_rt.kernels.triton.runs import Runs

__all__ = ["LOG2_E", "Problem", "strides"]

LOG2_E = 1.4426950408889634
# Within a block of at most 256 rows elements are addressed in 32 bits.
_MAX_TOKEN_STRIDE = 2**31 // 256 - 1


class Problem(NamedTuple):
    """A tile without its tensors. scale: of the scores; interpret: whether the kernels are run by Triton's interpreter."""

    q: Runs
    kv: Runs
    causal: bool
    scale: float
    interpret: bool

    @property
    def scale_log2(self) -> float:
        """The scale of scores in powers of two; never so small that float32 makes it 0, for 0 times the -inf of unseen cells is NaN."""
        return max(self.scale * LOG2_E, torch.finfo(torch.float32).tiny)


def strides(x: torch.Tensor) -> tuple[int, int, int]:
    """Batch, token and head stride of a BSHD tensor, in elements."""
    batch, token, head, channel = x.stride()
    if channel != 1 or token > _MAX_TOKEN_STRIDE:
        raise InternalError(
            f"the triton kernel takes tensors whose last dimension is dense and whose tokens are at most {_MAX_TOKEN_STRIDE} elements "
            f"apart, got strides {x.stride()}"
        )
    return batch, token, head
