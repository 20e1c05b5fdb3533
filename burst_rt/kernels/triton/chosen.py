"""The configuration of a kernel on a device: the one under trial, else measured, else the table's.

Here is also what else depends on the device alone.
"""

from __future__ import annotations

import os
from functools import lru_cache

import torch

from burst_rt.kernels.triton.configs import Config, arch_of, default_config, takes_producer
from burst_rt.kernels.triton.tables import CutOfTile
from burst_rt.kernels.triton.tuned import config_of

__all__ = [
    "arch_or_none",
    "config_for",
    "cuts_of",
    "one_pass_config",
    "processors",
    "under_interpreter",
]  # fmt: skip

_INTERPRETED_PROCESSORS = 4


def under_interpreter() -> bool:
    """Whether Triton's interpreter runs the kernels."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def config_for(kind: str, *inputs: torch.Tensor) -> Config:
    """The configuration for the widest of these tensors."""
    return _of_head_dim(kind, inputs[0].device, max(x.shape[3] for x in inputs), inputs[0].dtype)


def _of_head_dim(kind: str, device: torch.device, head_dim: int, dtype: torch.dtype) -> Config:
    arch = arch_or_none(device)
    return config_of(kind, device, head_dim, dtype) or default_config(
        kind, arch, head_dim, dtype.itemsize
    )


def cuts_of(
    kind: str, device: torch.device, head_dim: int, dtype: torch.dtype, producer: bool
) -> tuple[CutOfTile, Config, Config]:
    """A kernel's cut of a tile, its configuration, and the configuration of calls that
    `takes_more`. producer: whether the call can have one.
    """
    arch = arch_or_none(device)
    measured = config_of(kind, device, head_dim, dtype)
    if measured is not None and measured.loads == "producer" and not producer:
        measured = None
    if measured is not None:
        producer = measured.loads == "producer"
    default, other = (
        default_config(kind, arch, head_dim, dtype.itemsize, several=several, producer=producer)
        for several in (False, True)
    )
    config = measured or default
    several = config if other == default else other._replace(loads=config.loads)
    return CutOfTile(config.blocks, kind == "dkdv", several.blocks), config, several


def one_pass_config(
    device: torch.device, head_dims: tuple[int, int], dtype: torch.dtype
) -> Config | None:
    """The configuration of the backward in one pass; None: calls have it in two passes.

    Nobody has it by default: `burst-rt bench tune` finds out whether it is right and faster.
    """
    config = config_of("backward", device, max(head_dims), dtype)
    if config is None or config.loads != "producer":
        return None
    return (
        config
        if takes_producer("backward", arch_or_none(device), head_dims, dtype.itemsize)
        else None
    )


def arch_or_none(device: torch.device) -> int | None:
    """The key of `ARCHES` for a device; None for a CPU, and so for the interpreter."""
    return None if device.type == "cpu" else _arch(device)


@lru_cache
def _arch(device: torch.device) -> int:
    return arch_of(torch.cuda.get_device_capability(device))


@lru_cache
def processors(device: torch.device) -> int:
    """Number of multiprocessors of a device; a few for the interpreter."""
    if device.type == "cpu":
        return _INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
