"""Tile kernels and the registry that picks one.

`naive` is the float64 spec, and `untiled` is the same computation in the type of the sums; both are
taken only when asked for by name. `cpu` is torch's fused CPU attention, `cpu-bf16` the same in
bfloat16. `triton` is the project's own kernels for NVIDIA GPUs. `cudnn` and `flash` are the
vendors' kernels, through torch, and `flash-4` is FlashAttention-4, from its package. Where several
kernels can do the work, the one measured fastest on this machine is taken.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from burst_rt.errors import InputError
from burst_rt.kernels.aten import CudnnKernel, FlashKernel
from burst_rt.kernels.base import (
    DTYPES,
    PARTIALS,
    QKV,
    Gradients,
    Kept,
    Kernel,
    Results,
    ScoreOptions,
    State,
    Tile,
    Upstream,
    Work,
    sum_dtype,
)
from burst_rt.kernels.conditions import told_to_repeat
from burst_rt.kernels.cpu import CpuKernel
from burst_rt.kernels.cpu_bf16 import CpuBf16Kernel
from burst_rt.kernels.flash4 import Flash4Kernel
from burst_rt.kernels.naive import NaiveKernel, UntiledKernel
from burst_rt.kernels.speed import fastest_kernel
from burst_rt.kernels.triton import TritonKernel

__all__ = [
    "DTYPES", "KERNELS", "PARTIALS", "QKV", "Gradients", "Kept", "Kernel", "KernelChoice",
    "Results", "ScoreOptions", "State", "Tile", "Upstream", "Work", "pick", "pick_decode",
    "sum_dtype", "told_to_repeat",
]  # fmt: skip

KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        CpuKernel(),
        CpuBf16Kernel(),
        NaiveKernel(),
        UntiledKernel(),
        TritonKernel(),
        CudnnKernel(),
        FlashKernel(),
        Flash4Kernel(),
    )
}

# The kernels that "auto" chooses from; the project's own kernel comes first.
_ON_GPU = ("triton", "cudnn", "flash", "flash-4")
_ON_CPU, _ON_CPU_BF16 = ("cpu",), ("cpu", "cpu-bf16")


class KernelChoice(NamedTuple):
    """A kernel and the reason why it was taken."""

    kernel: Kernel
    reason: str


def pick(work: Work, name: str = "auto") -> KernelChoice:
    """The kernel for some work; `name` insists on one kernel.

    "auto" takes the fastest of the kernels that can do the work and, unless `work` says otherwise,
    give the same bits every time.
    Blocks while several kernels are timed, by this rank or another one; that happens once for a
    chip. Raises InputError where no kernel fits.
    """
    if name != "auto":
        if name not in KERNELS:
            raise InputError(f"kernel must be 'auto' or one of {sorted(KERNELS)}, got {name!r}")
        reason = KERNELS[name].refuses(work)
        if reason:
            raise InputError(f"kernel {name!r} was asked for, but {reason}")
        return _picked(KERNELS[name], "asked for by name", work)
    able: list[Kernel] = []
    refusals: list[str] = []
    on_cpu = _ON_CPU_BF16 if work.dtype == torch.bfloat16 else _ON_CPU
    for candidate in _ON_GPU if work.device.type == "cuda" else on_cpu:
        kernel = KERNELS[candidate]
        reason = kernel.refuses(work)
        if reason is None and work.deterministic and not kernel.repeatable(work.forward):
            reason = (
                f"the {candidate} kernel's sums differ in the last bits from run to run; "
                f"init(deterministic=False) or kernel={candidate!r} allows that"
            )
        if reason is None:
            able.append(kernel)
        else:
            refusals.append(reason)
    if not able:
        raise InputError(
            f"no tile kernel for {work.dtype} on {work.device}: {'; '.join(refusals)}. "
            'init(kernel="untiled") takes it, slowly: it makes whole matrices of scores'
        )
    if len(able) == 1:
        return _picked(
            able[0], "; ".join(("the only kernel here that can compute this call", *refusals)), work
        )
    taken = fastest_kernel(work, able)
    return _picked(taken.kernel, "; ".join((taken.reason, *refusals)), work)


def pick_decode(work: Work, name: str = "auto") -> KernelChoice:
    """The kernel for a decode; `name` insists on one kernel. Does not block.

    Every kernel has a decode, in the type of the sums; where "auto" finds no kernel that has one of
    its own, torch's operators do it. Raises InputError where the named kernel does not fit.
    """
    if name != "auto":
        return pick(work, name)
    kernel = KERNELS["triton" if work.device.type == "cuda" else "cpu"]
    reason = kernel.refuses(work)
    if reason is None:
        return KernelChoice(kernel, "the decode of its own here")
    return KernelChoice(KERNELS["untiled"], f"torch's own operators; {reason}")


def _picked(kernel: Kernel, reason: str, work: Work) -> KernelChoice:
    return KernelChoice(kernel, "; ".join((reason, *kernel.remarks(work))))
