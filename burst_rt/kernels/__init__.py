"""Tile kernels and the registry that picks one.

`naive` is the float64 spec and `untiled` the same without its width: taken only when asked for by name. `cpu` is torch's fused CPU
attention; `triton` the project's own kernels for NVIDIA GPUs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from burst_rt.attention.masks import Mask
from burst_rt.errors import InputError
from burst_rt.kernels.base import Kernel, State, Tile, sum_dtype
from burst_rt.kernels.cpu import CpuKernel
from burst_rt.kernels.naive import NaiveKernel, UntiledKernel
from burst_rt.kernels.triton import TritonKernel

__all__ = ["KERNELS", "Kernel", "Picked", "State", "Tile", "pick", "sum_dtype"]

KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in (CpuKernel(), NaiveKernel(), UntiledKernel(), TritonKernel())}


class Picked(NamedTuple):
    """A kernel and why it was taken."""

    kernel: Kernel
    reason: str


def pick(device: torch.device, dtype: torch.dtype, head_dim: int, mask: Mask, name: str = "auto") -> Picked:
    """The kernel for a device, input dtype, head_dim and mask; `name` insists on one. Raises InputError where none fits."""
    if name != "auto":
        if name not in KERNELS:
            raise InputError(f"kernel must be 'auto' or one of {sorted(KERNELS)}, got {name!r}")
        reason = KERNELS[name].refuses(device, dtype, head_dim, mask)
        if reason:
            raise InputError(f"kernel {name!r} was asked for, but {reason}")
        return Picked(KERNELS[name], "asked for by name")
    own = "triton" if device.type == "cuda" else "cpu"
    reason = KERNELS[own].refuses(device, dtype, head_dim, mask)
    if reason:
        raise InputError(f"no tile kernel for {dtype} on {device}: {reason}")
    return Picked(KERNELS[own], "the fused kernel of this device")
