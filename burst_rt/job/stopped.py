"""A rank that stays stopped for longer than any other rank waits for it is killed.

Nothing of a stopped process (SIGSTOP) runs, and mpirun, srun and torchrun wait for it without end:
after its last call nobody else notices. So a small process watches each rank. It counts the seconds
in which it runs itself, but the rank has not run at all, and nobody has stopped the rank's
launcher: a suspended job is left alone. Slurm, where it finds a job's processes by their parents
(ProctrackType=proctrack/linuxproc), stops neither the watcher nor a step's launcher, so it is asked
first. Standard library only: the watcher runs this file.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys
from contextlib import suppress

__all__ = ["end_if_stopped"]

_PERIOD_S = 1.0
# Beyond what the other ranks wait: those that still wait for the rank are to name it first.
_MARGIN_S = 10.0
# The watcher's descriptors: of the pipe by which it is told how long it waits, and of the rank.
_PIPE, _RANK = 3, 4
# In the background of a shell that ends at once, so that it is no child of the rank: a program may
# wait for its children until there are none.
_START = '"$@" &'
# For how long Slurm may think about an answer.
_ANSWER_S = 30.0

_told: tuple[int, int] | None = None  # the process that has a watcher, and its end of the pipe


def end_if_stopped(waited_s: float, rank: int) -> None:
    """Has this process killed once it has been stopped for `waited_s` + 10 s.

    Waits a few milliseconds for a shell, in the first call. The longest time of several calls
    counts. Does nothing on a kernel without pidfd (before Linux 5.3), where no process can be
    started, and in the first process of a container, which its own processes cannot kill.
    """
    global _told
    if os.getpid() == 1:
        return
    from burst_rt.job.processes import open_process  # the watcher has no package

    limit_s = str(waited_s + _MARGIN_S)
    with suppress(OSError):
        if _told is not None and _told[0] == os.getpid():
            os.write(_told[1], f"{limit_s}\n".encode())
            return
        process = open_process(os.getpid())
        reads, writes = os.pipe()
        os.set_blocking(writes, False)
        # Beyond what the others are made, which would close it.
        held = fcntl.fcntl(process, fcntl.F_DUPFD_CLOEXEC, _RANK + 1)
        try:
            _start((reads, held), os.environ.get("SLURM_JOB_ID", ""), limit_s, str(rank))
            _told = os.getpid(), writes
        finally:
            for descriptor in (process, held, reads):
                os.close(descriptor)


def _start(descriptors: tuple[int, int], job: str, *told: str) -> None:
    """Starts the watcher, in the rank's process group: a signal that stops the group stops both."""
    # -I -S: it starts in 10 ms.
    ids = [str(os.getpid()), str(os.getppid())]
    program = [sys.executable, "-I", "-S", __file__, *ids, *told, job]
    # Without the launcher's variables nobody takes it for a rank.
    names = ["LD_LIBRARY_PATH", *(("PATH", "SLURM_CONF") if job else ())]
    needed = {name: os.environ[name] for name in names if name in os.environ}
    shell = os.posix_spawn(
        "/bin/sh", ["sh", "-c", _START, "sh", *program], needed,
        file_actions=[
            (os.POSIX_SPAWN_DUP2, descriptors[0], _PIPE),
            (os.POSIX_SPAWN_DUP2, descriptors[1], _RANK),
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
        ],
    )  # fmt: skip
    with suppress(ChildProcessError):  # a program that ignores SIGCHLD
        os.waitpid(shell, 0)


def _watch(rank_pid: int, launcher_pid: int, limit_s: float, rank: str, job: str) -> None:
    """Blocks until the rank has ended or runs another program, or kills it.

    job: Slurm's number of the job; "" without Slurm.
    """
    stopped_s, switches = 0.0, -1
    while True:
        ready, _, _ = select.select([_RANK, _PIPE], [], [], _PERIOD_S)
        if _RANK in ready:
            return
        if _PIPE in ready:
            limits = os.read(_PIPE, 4096).split()
            if not limits:
                return
            limit_s = max(limit_s, *map(float, limits))
            continue
        before, switches = switches, _switches_if_stopped(rank_pid)
        alone = 0 <= switches == before and _switches_if_stopped(launcher_pid) < 0
        stopped_s = stopped_s + _PERIOD_S if alone else 0.0
        if stopped_s >= limit_s and _may_be_suspended(job):
            stopped_s = 0.0
        if stopped_s >= limit_s:
            with suppress(OSError):
                os.kill(rank_pid, signal.SIGKILL)  # it has not ended, so the number is its own
                print(
                    f"burst-rt: rank {rank}: process {rank_pid} had been stopped by a signal "
                    f"(SIGSTOP, say) for {limit_s:g} s, longer than other ranks wait for it, and "
                    "was killed; SIGCONT would have let it go on",
                    file=sys.stderr,
                    flush=True,
                )
            return


def _may_be_suspended(job: str) -> bool:
    """Whether Slurm has suspended the job, or gives no answer. Blocks at most half a minute.

    False where there is no Slurm to ask.
    """
    if not job:
        return False
    import subprocess  # takes as long as the rest of the watcher's start

    ask = ["squeue", "--noheader", "--format=%T", f"--jobs={job}"]
    try:
        answer = subprocess.run(
            ask, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, timeout=_ANSWER_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return True
    except OSError:
        return False
    return answer.returncode != 0 or b"SUSPENDED" in answer.stdout


def _switches_if_stopped(pid: int) -> int:
    """How often a process has been switched to, if a signal has stopped it; -1 for one that is not
    stopped, or that a debugger holds.
    """
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            said = dict(line.split(":", 1) for line in file if ":" in line)
    except OSError:
        return -1
    if said["State"].split()[0] != "T":
        return -1
    return int(said["voluntary_ctxt_switches"]) + int(said["nonvoluntary_ctxt_switches"])


if __name__ == "__main__":
    # Signals that the group gets are the rank's, which may handle them and go on.
    for name in ("HUP", "INT", "QUIT", "TERM", "USR1", "USR2", "ALRM"):
        signal.signal(signal.Signals[f"SIG{name}"], signal.SIG_IGN)
    # Sockets of the rank's libraries: peers see by them that the rank has ended.
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if int(number) > _RANK:
                os.close(int(number))
    _watch(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), *sys.argv[4:])
