"""Block sizes measured on this machine, which come before those of `configs.py`: `burst-rt bench
tune` writes them, later jobs read them.

They are kept for a chip (by name), a kernel, a head size and an input type, and for the versions of
triton and of this package.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import version
from typing import get_args

import torch

from burst_rt.kernels.triton.configs import ARCHES, Config, Loads, choose, padded
from burst_rt.remembered import recall, remember

__all__ = ["TUNED", "candidates", "keep", "trying", "tuned"]

# The kernels it is worth it for.
TUNED = ("forward", "dq", "dkdv")

# The name of what is remembered.
_KIND = "triton-blocks"
_MOST_CANDIDATES = 24
_MOST_SPECIALIZED = 8

# What a trial insists on, by kernel.
_trial: dict[str, Config] = {}


def tuned(kind: str, device: torch.device, head_dim: int, dtype: torch.dtype) -> Config | None:
    """The configuration measured for a kernel on this chip (or the one under trial), None where
    there is none.
    """
    return _trial.get(kind) or _recalled(kind, device, head_dim, dtype)


def keep(
    kind: str, device: torch.device, head_dim: int, dtype: torch.dtype, config: Config
) -> bool:
    """Remembers a configuration for this chip. False where the cache folder cannot be written."""
    kept = remember(_KIND, _key(kind, device, head_dim, dtype), list(config))
    _recalled.cache_clear()
    return kept


@contextmanager
def trying(kind: str, config: Config) -> Iterator[None]:
    """Inside, the kernel is started with this configuration, by all threads."""
    _trial[kind] = config
    try:
        yield
    finally:
        del _trial[kind]


def candidates(kind: str, arch: int, head_dim: int, input_bytes: int) -> list[Config]:
    """What to measure: the table's own first, then what may fit the chip's shared memory and
    registers, the largest blocks first.

    An estimate that is meant to let too many through: what does not fit after all fails to compile
    or to start, and is passed over. Those with specialised warps come last.
    """
    own = choose(kind, arch, head_dim, input_bytes)
    width = padded(head_dim)
    found, specialized = [], []
    for m in (128, 64, 32):
        for n in (128, 64, 32):
            for warps in (4, 8):
                for stages in (3, 2, 1):
                    # The side that is gone through is loaded `stages` deep, two tensors of it; of
                    # the other, one or two are kept.
                    walked, kept = (m, n) if kind == "dkdv" else (n, m)
                    shared = (
                        width
                        * input_bytes
                        * (2 * walked * stages + kept * (1 if kind == "forward" else 2))
                    )
                    # float32 sums beside the scores, in registers of 32 threads a warp; 255 a
                    # thread is the most there is.
                    sums = kept * width * (2 if kind == "dkdv" else 1) + m * n * (
                        1 if kind == "forward" else 2
                    )
                    if shared > ARCHES[arch] or (input_bytes == 4 and m * n > 64 * 32):
                        continue
                    if sums / (32 * warps) <= 224:
                        found += [
                            Config(m, n, warps, stages, loads) for loads in _loads(arch, stages)
                        ]
                    if _may_specialize(kind, arch, m, warps) and input_bytes == 2 and stages > 1:
                        specialized.append(Config(m, n, warps, stages, "specialized"))
    found.sort(
        key=lambda config: (
            -config.block_m * config.block_n,
            config.loads == "pointers",
            -config.num_stages,
        )
    )
    specialized.sort(key=lambda config: (-config.block_m * config.block_n, -config.num_stages))
    return [own, *(config for config in found if config != own)][:_MOST_CANDIDATES] + specialized[
        :_MOST_SPECIALIZED
    ]


def _loads(arch: int, stages: int) -> tuple[Loads, ...]:
    """The copy engine came with Hopper."""
    return ("descriptors", "pointers") if arch >= 90 and stages > 1 else ("pointers",)


def _may_specialize(kind: str, arch: int, block_m: int, warps: int) -> bool:
    """What Triton (3.7) compiles. On Hopper: the forward, and its warps come twice, each four with
    half of the rows.
    """
    return arch == 100 or (arch == 90 and kind == "forward" and warps == 4 and block_m == 128)


@lru_cache
def _recalled(kind: str, device: torch.device, head_dim: int, dtype: torch.dtype) -> Config | None:
    if kind not in TUNED or device.type != "cuda" or not torch.cuda.is_available():
        return None
    found = recall(_KIND, _key(kind, device, head_dim, dtype))
    if not isinstance(found, list) or len(found) != len(Config._fields):
        return None
    *numbers, loads = found
    return (
        Config(*found)
        if loads in get_args(Loads) and all(isinstance(x, int) and x > 0 for x in numbers)
        else None
    )


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
