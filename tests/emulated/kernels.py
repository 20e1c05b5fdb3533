"""Tile kernels for emulated GPUs: torch's operators in the place of Triton's kernels."""

from __future__ import annotations

import os
from typing import Any

__all__ = ["install"]


def install(kernels: Any) -> None:
    """Puts them there; the vendors' kernels refuse."""

    if "EMULATED_TRITON" not in os.environ:
        untiled, triton = (type(kernels.KERNELS[name]) for name in ("untiled", "triton"))

        def refuses(kernel: Any, work: Any) -> Any:
            kind = triton if "EMULATED_REFUSES" in os.environ else untiled
            return kind.refuses(kernel, work)

        words = {"name": "triton", "refuses": refuses}
        kernels.KERNELS["triton"] = type("Emulated", (untiled,), words)()
    for name in ("cudnn", "flash", "flash-4"):
        type(kernels.KERNELS[name]).refuses = lambda *_: "GPUs are emulated"
