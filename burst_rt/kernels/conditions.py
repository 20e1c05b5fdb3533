"""Conditions under which kernels may be taken: the CPU, the GPU, and what torch must repeat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["cpu_capabilities", "told_to_repeat", "too_old"]


def too_old(name: str, device: torch.device) -> str | None:
    """Why a kernel cannot run on a GPU that is too old for it, or None."""
    capability = torch.cuda.get_device_capability(device)
    return (
        None
        if capability >= (8, 0)
        else f"the {name} kernel takes GPUs of compute capability 8.0 or newer, got {capability}"
    )


def told_to_repeat() -> bool:
    """Whether torch.use_deterministic_algorithms(True) is in force, not as a warning only."""
    return (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )


def cpu_capabilities() -> Mapping[str, Any]:  # flags, numbers, names
    """The capabilities of this CPU as torch tells them; nothing before torch 2.12."""
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return capabilities
