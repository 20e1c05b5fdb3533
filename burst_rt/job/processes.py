"""Processes by descriptors (pidfd, Linux 5.3), which tell of an end at once, and of no other one.

Pythons that are built to run on old systems, those of conda and of uv before 2026, have neither
`os.pidfd_open` nor `signal.pidfd_send_signal`, whatever the kernel has. There the system calls are
made by ctypes. Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import signal

__all__ = ["open_process", "signal_process"]

# One number on all architectures, as of all calls since 2019.
_PIDFD_SEND_SIGNAL, _PIDFD_OPEN = 424, 434


def open_process(pid: int) -> int:
    """A descriptor of a process, which can be read once it has ended. Does not block.

    Raises ProcessLookupError where there is none of this number, and OSError on older kernels.
    """
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _call(_PIDFD_OPEN, pid, 0)


def signal_process(descriptor: int, number: int) -> None:
    """Sends a signal to the process of a descriptor. Does not block.

    Raises ProcessLookupError where it has ended.
    """
    if hasattr(signal, "pidfd_send_signal"):
        signal.pidfd_send_signal(descriptor, number)
    else:
        _call(_PIDFD_SEND_SIGNAL, descriptor, number, None, 0)


def _call(*numbers: int | None) -> int:
    answer: int = ctypes.CDLL(None, use_errno=True).syscall(*numbers)
    if answer < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return answer
