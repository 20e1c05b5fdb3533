"""The running jobs of this user on this host, whose hubs viewers find with `--attach`.

Each hub holds a deleted file open, and viewers look for it among the open files of this user's
processes in /proc, where only this user and root can read it. It is found whatever the viewer's
environment is: a login on a compute node has other temporary folders than a batch job, and those
are cleaned, or go when their user logs out. The file goes with its hub, however that ends.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil

from burst_rt.errors import ConfigError
from burst_rt.job.folders import SHARED_MEMORY
from burst_rt.telemetry.wire import readable

__all__ = ["RunningJob", "announce", "find_job", "running_jobs"]

_NAME = "burst-rt-hub-of-"


class RunningJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job, as its hub's file tells it."""

    pid: int  # process id of the hub, by which people name the job
    started_s: float  # when the hub said so, since the epoch
    address: str
    secret: str
    command: str  # command of the process that started the hub


def announce(address: str, secret: str) -> int:
    """Lets viewers find this process's hub until the returned file descriptor is closed.

    Does not block. Raises OSError where there is no room for the file.
    """
    command = ""
    with suppress(psutil.Error):
        parent = psutil.Process().parent()
        command = readable(" ".join(parent.cmdline())[:500]) if parent is not None else ""
    job = RunningJob(
        pid=os.getpid(),
        started_s=time.time(),
        address=address,
        secret=secret,
        command=command,
    )
    # On NFS a deleted file that is open gets another name.
    folder = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
    descriptor, path = tempfile.mkstemp(prefix=_NAME, dir=folder)
    os.unlink(path)
    os.write(descriptor, msgspec.json.encode(job))
    return descriptor


def running_jobs() -> list[RunningJob]:
    """All jobs of this user here, the newest last. Does not block."""
    jobs: list[RunningJob] = []
    for process in Path("/proc").iterdir():
        # A process may end meanwhile, or not let itself be looked at.
        with suppress(OSError):
            if process.name.isdecimal() and process.stat().st_uid == os.getuid():
                for file in (process / "fd").iterdir():
                    jobs += _announced_in(file, process)
    return sorted(jobs, key=lambda job: job.started_s)


def _announced_in(file: Path, process: Path) -> Iterator[RunningJob]:
    # It may be closed, or half written, at this moment.
    with suppress(OSError, msgspec.DecodeError):
        if f"/{_NAME}" in os.readlink(file):
            job = msgspec.json.decode(file.read_bytes(), type=RunningJob)
            # In a container the hub has another number for itself, and other files.
            address, path = job.address, job.address.removeprefix("unix:")
            if path != address and not os.access(path, os.W_OK):
                address = f"unix:{process}/root{path}"
            yield msgspec.structs.replace(job, pid=int(process.name), address=address)


def find_job(pid: int | None) -> RunningJob:
    """The job whose hub has this number; without one, the only job that runs. Raises ConfigError if
    there are none, or several to choose from.
    """
    jobs = running_jobs()
    chosen = [job for job in jobs if pid is None or job.pid == pid]
    if len(chosen) == 1:
        return chosen[0]
    if not jobs:
        raise ConfigError(
            "no job of this user runs here with telemetry; start one with `burst-rt run "
            "--telemetry` or --dashboard"
        )
    choices = "".join(f"\n  --attach {job.pid}   {job.command}" for job in jobs)
    raise ConfigError(
        f"{'several jobs run here' if pid is None else f'no job {pid} runs here'}; choose "
        f"one:{choices}"
    )
