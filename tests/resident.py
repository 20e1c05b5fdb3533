"""The peak of a call's memory: by how much this process's resident set grows. Needs Linux."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

__all__ = ["peak", "resident"]


def peak(run: Callable[[], object]) -> int:
    """The most bytes of memory, beyond those at the beginning."""
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")  # the peak begins anew
    before = _kib("VmRSS")
    run()
    return (_kib("VmHWM") - before) * 1024


def resident() -> int:
    """The bytes of this process in memory."""
    return _kib("VmRSS") * 1024


def _kib(name: str) -> int:
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith(name)).split()[1])
