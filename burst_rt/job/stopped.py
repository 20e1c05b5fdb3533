"""A rank that stays stopped for longer than any other rank waits for it is killed.

Nothing of a stopped process (SIGSTOP) runs, and mpirun, srun and torchrun wait for it without end:
after its last call nobody else notices. So a small process watches each rank. It counts only the
seconds in which it runs itself and the rank's launcher is not stopped, and thus leaves a suspended
job alone. Standard library only: the watching process runs this file.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from contextlib import suppress

__all__ = ["end_if_stopped"]

_PERIOD_S = 1.0
# Beyond what the other ranks wait: those that still wait for the rank are to name it first.
_MARGIN_S = 10.0

_watcher = 0  # a process id
_limit_s = 0.0


def end_if_stopped(waited_s: float, rank: int) -> None:
    """Has this process killed once it has been stopped for `waited_s` + 10 s. Does not block.

    The longest time of several calls counts. Does nothing on a kernel without pidfd (before Linux
    5.3), and where no process can be started.
    """
    global _watcher, _limit_s
    limit_s = waited_s + _MARGIN_S
    if not hasattr(os, "pidfd_open") or limit_s <= _limit_s:
        return
    if _watcher:
        os.kill(_watcher, signal.SIGKILL)
        os.waitpid(_watcher, 0)
    _watcher, _limit_s = 0, limit_s
    # -I -S: starts in 10 ms. The watcher is in the rank's process group, so that a signal to the
    # group stops both. Without the launcher's variables nobody takes it for a rank.
    needed = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    numbers = [str(os.getpid()), str(os.getppid()), str(limit_s), str(rank)]
    no_input = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
    no_output = (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)
    with suppress(OSError):
        _watcher = os.posix_spawn(
            sys.executable, [sys.executable, "-I", "-S", __file__, *numbers], needed,
            file_actions=[no_input, no_output],
        )  # fmt: skip


def _watch(rank_pid: int, launcher_pid: int, limit_s: float, rank: str) -> None:
    """Blocks until the rank has ended, or kills it."""
    try:
        process = os.pidfd_open(rank_pid)
    except OSError:
        return
    stopped_s = 0.0
    while not select.select([process], [], [], _PERIOD_S)[0]:
        alone = _is_stopped(rank_pid) and not _is_stopped(launcher_pid)
        stopped_s = stopped_s + _PERIOD_S if alone else 0.0
        if stopped_s >= limit_s:
            print(
                f"burst-rt: rank {rank}: process {rank_pid} has been stopped by a signal (SIGSTOP, "
                f"say) for {limit_s:g} s, longer than other ranks wait for it, and is killed; "
                "SIGCONT would have let it go on",
                file=sys.stderr,
                flush=True,
            )
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
            return


def _is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a process; False for one that a debugger holds."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read()
    except OSError:
        return False
    # The name, in brackets, may hold anything.
    return fields.rpartition(")")[2].split()[0] == "T"


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Sockets of the rank's libraries: peers see by them that the rank has ended.
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if int(name) > 2:
                os.close(int(name))
    _watch(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4])
