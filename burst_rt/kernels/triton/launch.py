"""What every launcher needs: a tile as the kernels' plain arguments, strides that are fit for them,
and how tensors are loaded.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from burst_rt.errors import InternalError
from burst_rt.kernels.triton.configs import Config
from burst_rt.kernels.triton.runs import Runs

__all__ = ["LOG2_E", "Problem", "loads_of", "strides"]

LOG2_E = 1.4426950408889634
# Within a block of at most 256 rows elements are addressed in 32 bits.
_MAX_TOKEN_STRIDE = 2**31 // 256 - 1


class Problem(NamedTuple):
    """A tile without its tensors. scale: of the scores; interpret: whether the kernels are run by
    Triton's interpreter.
    """

    q: Runs
    kv: Runs
    causal: bool
    scale: float
    interpret: bool

    @property
    def scale_log2(self) -> float:
        """The scale of scores in powers of two; never so small that float32 makes it 0, for 0 times
        the -inf of unseen cells is NaN.
        """
        return max(self.scale * LOG2_E, torch.finfo(torch.float32).tiny)


def strides(x: torch.Tensor) -> tuple[int, int, int]:
    """Batch, token and head stride of a BSHD tensor, in elements."""
    batch, token, head, channel = x.stride()
    if channel != 1 or token > _MAX_TOKEN_STRIDE:
        raise InternalError(
            "the triton kernel takes tensors whose last dimension is dense and whose tokens are "
            f"at most {_MAX_TOKEN_STRIDE} elements "
            f"apart, got strides {x.stride()}"
        )
    return batch, token, head


def loads_of(config: Config, *inputs: torch.Tensor) -> dict[str, bool]:
    """DESCRIBED and SPECIALIZE of a kernel that loads these BSHD tensors: as configured, if the
    copy engine can read all of them.
    """
    described = config.loads != "pointers" and all(map(_fits_descriptor, inputs))
    return {"DESCRIBED": described, "SPECIALIZE": described and config.loads == "specialized"}


def _fits_descriptor(x: torch.Tensor) -> bool:
    """CUDA Driver API, cuTensorMapEncodeTiled: addresses and strides are multiples of 16 bytes."""
    return not any(
        number % 16
        for number in (x.data_ptr(), *(stride * x.itemsize for stride in x.stride()[:3]))
    )
