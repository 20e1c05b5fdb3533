"""The configuration of a kernel on a device: the one under trial, else measured, else the table's.

Here is also what else depends on the device alone, and what is done where Triton cannot compile a
kernel.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import version

import torch

from burst_rt.kernels.triton.configs import Config, arch_of, default_config, takes_producer
from burst_rt.kernels.triton.start import untried_triton
from burst_rt.kernels.triton.tables import CutOfTile
from burst_rt.kernels.triton.tuned import config_of, is_on_trial

__all__ = [
    "arch_or_none",
    "attempt",
    "config_for",
    "cuts_of",
    "may_have_producer",
    "one_pass_config",
    "processors",
    "under_interpreter",
    "why_no_producer",
]  # fmt: skip

_INTERPRETED_PROCESSORS = 4

# Why no call has a producer any more; empty until Triton cannot compile a kernel with one.
_no_producer: list[str] = []


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
    return config if may_have_producer("backward", device, head_dims, dtype) else None


def may_have_producer(
    kind: str,
    device: torch.device,
    head_dims: tuple[int, int],
    dtype: torch.dtype,
    *,
    width: int = 1,
    plain: bool = True,
) -> bool:
    """`takes_producer` on a device, where Triton has compiled all kernels that were tried."""
    arch = arch_or_none(device)
    return not _no_producer and takes_producer(
        kind, arch, head_dims, dtype.itemsize, width=width, plain=plain
    )


def why_no_producer() -> str | None:
    """Why calls that could have a producer have none; None where they have."""
    return _no_producer[0] if _no_producer else None


@contextmanager
def attempt(config: Config) -> Iterator[None]:
    """Inside, a kernel is started. Goes on behind the block where it has a producer and Triton
    cannot compile it; then no call has a producer any more, which is said once as a warning.

    Such kernels are written in Gluon, which changes between releases of Triton.
    """
    try:
        yield
    except Exception as error:
        if config.loads != "producer" or is_on_trial(config) or not _is_compilers(error):
            raise
        if not _no_producer:
            root: BaseException = error  # the last one says where, the first one what
            while root.__cause__ is not None:
                root = root.__cause__
            untried = untried_triton()
            _no_producer.append(
                f"triton {version('triton')} cannot compile the kernels with a producer "
                f"({type(root).__name__}: {root}); calls take those without, which are as exact "
                f"and may be slower{'' if untried is None else f'; {untried}'}"
            )
            warnings.warn(_no_producer[0], RuntimeWarning, stacklevel=2)


def _is_compilers(error: Exception) -> bool:
    """Whether a kernel was not compiled, rather than not started."""
    from triton.errors import TritonError

    gone = (ImportError, AttributeError, TritonError)
    return isinstance(error, gone) or "PassManager" in str(error)


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
