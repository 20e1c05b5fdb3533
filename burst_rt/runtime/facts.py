"""What one rank brings to the choice of a transport: its host, its GPU, its NCCL and its MPI."""

from __future__ import annotations

import os
import socket
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from burst_rt.errors import ConfigError
from burst_rt.job import launched
from burst_rt.runtime.nvlink import nvlink_domain
from burst_rt.transport import Meeting
from burst_rt.transport.probe import last_answer

__all__ = ["Facts", "cupy_nccl", "facts_of", "resolve_device"]


@dataclass(frozen=True)
class Facts:
    """The facts that one rank brings to the choice of a transport."""

    host: str
    gpu: str  # the GPU's UUID; "" on a CPU
    nccl: int  # NCCL's version (22907 for 2.29.7); 0 without CuPy's NCCL
    multi_rank: bool  # whether NCCL is told to take several ranks on one GPU
    meeting: Meeting  # how the ranks have met
    torch_nccl: int = 0  # the version of torch's own NCCL
    # Whether a probe has shown that this MPI takes device memory; None: nobody has probed.
    device_mpi: bool | None = None
    # The GPU's NVLink domain, if it joins several hosts and NCCL is not told to leave it unused.
    domain: str = ""


def facts_of(device: torch.device, meeting: Meeting) -> Facts:
    """This rank's facts. The first to touch the device: raises torch's RuntimeError if it fails."""
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    nccl = cupy_nccl() if gpu else None
    version = int(nccl.get_version()) if nccl else 0
    return Facts(
        host=socket.gethostname(),
        gpu=gpu,
        nccl=version,
        multi_rank=os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1",
        meeting=meeting,
        torch_nccl=_torch_nccl() if gpu else 0,
        device_mpi=_device_mpi(device) if gpu else None,
        domain="" if not gpu or os.environ.get("NCCL_MNNVL_ENABLE") == "0" else nvlink_domain(gpu),
    )


def resolve_device(name: str) -> torch.device:
    """The device that a name denotes on this rank. Raises ConfigError for a missing device."""
    kind, _, index = name.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (index and not (kind == "cuda" and index.isdigit())):
        raise ConfigError(f"init: device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got {name!r}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cpu" or (kind == "auto" and not count):
        return torch.device("cpu")
    if not count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise ConfigError(
            f"init: device {name!r} was asked for, but torch {torch.__version__} sees no CUDA "
            f"device (torch.version.cuda is {torch.version.cuda}; CUDA_VISIBLE_DEVICES is "
            f"{'not set' if visible is None else f'{visible!r}'}). "
            "Use device='cpu', or see `burst-rt doctor`"
        )
    if index and int(index) >= count:
        raise ConfigError(
            f"init: device {name!r} was asked for, but torch sees only the CUDA devices cuda:0 to "
            f"cuda:{count - 1}; choose one of them"
        )
    local_rank = launched.local_rank()
    if not index and local_rank is None and count > 1 and launched.mpi_ranks() > 1:
        raise ConfigError(
            f"init: device {name!r}: there are {count} GPUs, and the launcher does not say which "
            "rank of its host this is; expected a variable such as LOCAL_RANK; set LOCAL_RANK for "
            "each rank, or give device='cuda:N'"
        )
    return torch.device("cuda", int(index) if index else (local_rank or 0) % count)


def _device_mpi(device: torch.device) -> bool | None:
    mpi = sys.modules.get("mpi4py.MPI")
    return (
        None
        if mpi is None
        else last_answer(mpi.Get_library_version().strip(), torch.cuda.get_device_name(device))
    )


def _torch_nccl() -> int:
    from burst_rt.transport.torch_nccl import version

    return version()


def cupy_nccl() -> Any:  # CuPy has no types
    """CuPy's NCCL module; None without one."""
    try:
        with warnings.catch_warnings():
            # CuPy warns of libraries that it does not find, and of versions of other packages. Here
            # it matters only whether NCCL is there.
            warnings.simplefilter("ignore")
            from cupy.cuda import nccl
    except ImportError:
        return None
    # CuPy puts a stub in NCCL's place where the library is missing.
    return nccl if getattr(nccl, "available", False) else None
