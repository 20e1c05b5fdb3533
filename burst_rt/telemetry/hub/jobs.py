"""The running jobs of this user on this host, whose hubs viewers find with `--attach`.

Each hub has one file, which only this user can read.

The files lie in $XDG_RUNTIME_DIR/burst-rt. Without such a folder, they lie in burst-rt-UID in the
folder for temporary files. A hub that was killed leaves its file, and the next look removes it.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import msgspec
import psutil

from burst_rt.errors import ConfigError
from burst_rt.telemetry.wire import readable

__all__ = ["RunningJob", "announce", "find_job", "running_jobs"]


class RunningJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job, as its hub's file tells it."""

    pid: int  # process id of the hub, by which people name the job
    started_s: float  # when the hub's process started, since the epoch
    address: str
    secret: str
    command: str  # command of the process that started the hub


def announce(address: str, secret: str) -> Path:
    """Writes this hub's file, and returns its path; the caller removes the file at the end. Raises
    OSError and ConfigError where the file cannot be written safely.
    """
    process = psutil.Process()
    parent = process.parent()
    command = readable(" ".join(parent.cmdline())[:500]) if parent is not None else ""
    folder = _folder()
    path, unfinished = folder / f"{process.pid}.json", folder / f"{process.pid}.new"
    job = RunningJob(
        pid=process.pid,
        started_s=process.create_time(),
        address=address,
        secret=secret,
        command=command,
    )
    with os.fdopen(
        os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb"
    ) as file:
        file.write(msgspec.json.encode(job))
    # A viewer removes files that it cannot read, so the file must not be seen half written.
    return unfinished.rename(path)


def running_jobs() -> list[RunningJob]:
    """All jobs of this user here, the newest last."""
    jobs = []
    for path in _folder().glob("*.json"):
        try:
            job = msgspec.json.decode(path.read_bytes(), type=RunningJob)
            if abs(psutil.Process(job.pid).create_time() - job.started_s) < 1.0:
                jobs.append(job)
                continue
        except (OSError, msgspec.DecodeError, psutil.Error):
            pass
        path.unlink(missing_ok=True)
    return sorted(jobs, key=lambda job: job.started_s)


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


def _folder() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    # Batch systems and sudo hand the variable on, though the folder may be missing or another
    # user's.
    usable = runtime and os.access(runtime, os.W_OK | os.X_OK)
    path = (
        Path(runtime) / "burst-rt"
        if runtime and usable
        else Path(tempfile.gettempdir()) / f"burst-rt-{os.getuid()}"
    )
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = path.lstat()
    except OSError as error:
        raise ConfigError(
            f"{path}, the folder in which --attach finds jobs, cannot be made: {error}"
        ) from error
    # Another user who owns the folder could read the secret, or name a hub of their own.
    if (
        about.st_uid != os.getuid()
        or stat.S_IMODE(about.st_mode) & 0o077
        or not stat.S_ISDIR(about.st_mode)
    ):
        raise ConfigError(
            f"{path} must be a folder of this user that nobody else can read; remove it, or set "
            "XDG_RUNTIME_DIR"
        )
    return path
