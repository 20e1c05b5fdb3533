"""Block sizes measured on this machine, which go before `configs.py`; candidates for measuring.

`burst-rt bench tune` writes them, and later jobs read them. They are kept for a chip (by name), a
kernel, a head size and an input type, and for the versions of triton and of this package.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import version
from itertools import product
from typing import get_args

import torch

from burst_rt.kernels.triton.configs import (
    ARCHES,
    Config,
    Loads,
    block_width,
    default_config,
    takes_producer,
)
from burst_rt.planning.needs import ROWS_TOGETHER
from burst_rt.remembered import recall, remember

__all__ = ["TUNED", "candidates", "config_of", "is_on_trial", "keep", "trial_of"]

# The kernels whose blocks are worth tuning.
TUNED = ("forward", "dq", "dkdv")

# The configurations' name in `remembered`.
_KIND = "triton-blocks"
_MOST_CANDIDATES = 32

# The configurations under trial, by kernel.
_trial: dict[str, Config] = {}


def config_of(kind: str, device: torch.device, head_dim: int, dtype: torch.dtype) -> Config | None:
    """The configuration under trial, or else the one measured for a kernel on this chip.

    None where there is neither.
    """
    return _trial.get(kind) or _recalled(kind, device, head_dim, dtype)


def keep(
    kind: str, device: torch.device, head_dim: int, dtype: torch.dtype, config: Config
) -> bool:
    """Remembers a configuration for this chip.

    Returns False where the cache folder cannot be written.
    """
    kept = remember(_KIND, _key(kind, device, head_dim, dtype), list(config))
    _recalled.cache_clear()
    return kept


@contextmanager
def trial_of(kind: str, config: Config) -> Iterator[None]:
    """Inside, all threads start the kernel with this configuration."""
    _trial[kind] = config
    try:
        yield
    finally:
        del _trial[kind]


def is_on_trial(config: Config) -> bool:
    """Whether `trial_of` tries this configuration now."""
    return config in _trial.values()


def candidates(kind: str, arch: int, head_dim: int, input_bytes: int) -> list[Config]:
    """The configurations to measure.

    The table's own comes first. Then come those that may fit the chip's shared memory and
    registers, the largest blocks first. The estimate is generous: a configuration that does not fit
    after all fails to compile or to start, and is skipped. "backward": in two passes, with what was
    found for them, and in one; none where all calls take two.
    """
    producer = takes_producer(kind, arch, (head_dim, head_dim), input_bytes)
    if kind == "backward":
        return (
            [default_config(kind, arch, head_dim, input_bytes, producer=x) for x in (False, True)]
            if producer
            else []
        )
    default = default_config(kind, arch, head_dim, input_bytes, producer=producer)
    fitting = [
        Config(m, n, warps, stages, loads)
        for m, n, warps, stages in product((128, 64, 32), (128, 64, 32), (4, 8), (3, 2, 1))
        if _may_fit(kind, arch, block_width(head_dim), input_bytes, (m, n, warps, stages))
        for loads in _loads(arch, stages)
    ]
    if producer:
        # Two warpgroups of 64 rows each; the copy engine fills one buffer while another is read.
        fitting += [
            Config(128, n, 8, stages, "producer") for n, stages in product((128, 64), (3, 2))
        ]
    fitting.sort(
        key=lambda config: (
            -config.block_m * config.block_n,
            config.loads == "pointers",
            -config.num_stages,
        )
    )
    return [default, *(config for config in fitting if config != default)][:_MOST_CANDIDATES]


def _may_fit(
    kind: str, arch: int, width: int, input_bytes: int, sizes: tuple[int, int, int, int]
) -> bool:
    """Whether blocks of `width` columns may fit. sizes: block_m, block_n, warps, stages."""
    m, n, warps, stages = sizes
    # Two tensors of the side that the loop walks are loaded `stages` deep; one or two tensors of
    # the other side are kept.
    walked, kept = (m, n) if kind == "dkdv" else (n, m)
    num_kept = 1 if kind == "forward" else 2
    shared = width * input_bytes * (2 * walked * stages + kept * num_kept)
    if shared > ARCHES[arch] or (input_bytes == 4 and m * n > 64 * 32):
        return False
    # On Hopper four warps multiply 64 rows of the side that is kept (wgmma of the PTX ISA); with
    # fewer rows the warps do each other's work again.
    if arch == 90 and input_bytes == 2 and kept < 16 * warps:
        return False
    # float32 sums and scores lie in the registers of 32 threads a warp; a thread has at most 255
    # registers.
    sums = kept * width * (2 if kind == "dkdv" else 1) + m * n * num_kept
    return sums / (32 * warps) <= 224


def _loads(arch: int, stages: int) -> tuple[Loads, ...]:
    """The ways to load. The copy engine came with Hopper."""
    return ("descriptors", "pointers") if arch >= 90 and stages > 1 else ("pointers",)


@lru_cache
def _recalled(kind: str, device: torch.device, head_dim: int, dtype: torch.dtype) -> Config | None:
    if kind not in (*TUNED, "backward") or device.type != "cuda" or not torch.cuda.is_available():
        return None
    found = recall(_KIND, _key(kind, device, head_dim, dtype), _is_config)
    return None if found is None else Config(*found)


def _is_config(found: object) -> bool:
    if not isinstance(found, list) or len(found) != len(Config._fields):
        return False
    *numbers, loads = found
    known = loads in get_args(Loads) and all(isinstance(x, int) and x > 0 for x in numbers)
    return known and not any(ROWS_TOGETHER % x for x in numbers[:2])


def _key(kind: str, device: torch.device, head_dim: int, dtype: torch.dtype) -> dict[str, str]:
    from burst_rt.version import __version__

    return {
        "chip": torch.cuda.get_device_name(device),
        "kernel": kind,
        "head_dim": str(head_dim),
        "dtype": str(dtype),
        "triton": version("triton"),
        "burst_rt": __version__,
    }
