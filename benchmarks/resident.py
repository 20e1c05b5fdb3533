"""How much memory a call takes on the host, by this process's resident set."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

from burst_rt.errors import ConfigError

__all__ = ["peak_bytes"]

_M_MMAP_THRESHOLD = -3  # an option of mallopt, in glibc's malloc.h


def peak_bytes(fn: Callable[[], None]) -> int:
    """Number of bytes by which the resident set exceeds its size at the start, while `fn` runs.

    Needs Linux, whose high-water mark is reset and read.
    """
    libc = ctypes.CDLL(None)
    # Large blocks come from the system and go back to it at once, so that the resident set is what
    # is live, not what malloc keeps.
    libc.mallopt(_M_MMAP_THRESHOLD, 1 << 17)
    gc.collect()
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_kib("VmRSS")
    fn()
    return (_status_kib("VmHWM") - before) * 1024


def _status_kib(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise ConfigError(f"/proc/self/status has no {field}: the memory benchmark needs Linux")
