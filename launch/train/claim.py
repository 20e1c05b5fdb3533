"""The lock that gives a run's folder to one live run at a time.

It is `flock` on the folder's `.lock`, which the kernel takes back however the process ends. Over
NFS it keeps hosts apart if the server locks. Where the file system cannot lock (Lustre without
`-o flock`), a warning says so and the run goes on. A file system that locks within each host only
(Lustre with `-o localflock`) does not tell, so there runs of two hosts are not kept apart.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from itertools import count
from pathlib import Path

from burst_rt.errors import ConfigError
from burst_rt.launch.train.checkpoint import checkpoints_of
from burst_rt.regular import NOT_REGULAR, open_regular

__all__ = ["LOCK_NAME", "Claim", "claim", "look"]

_log = logging.getLogger("burst_rt.train")
LOCK_NAME = ".lock"
# Seconds that a lock may outlive its process: a server of NFS gives a dead host's locks back after
# 90 s, and torchrun's ranks may take 30 s to end.
_PATIENCE_S = 120.0
_PAUSE_S = 0.2
# Maximum number of bytes that are read of the holder's name.
_LONGEST_NAME = 300


@dataclass
class Claim:
    """The folder `path`, which this process holds until `release`, or until the process ends."""

    path: Path
    _descriptor: int = field(repr=False)

    def release(self) -> None:
        os.close(self._descriptor)


def claim(out: Path | None, *, resume: bool, elastic: bool = False) -> Claim:
    """Take a run's folder, and make it where need be (None: a new runs/train-TIME). A folder that
    holds a run already is taken only to `resume` that run.

    elastic: the job may be a restart. The folder is taken whatever it holds; ranks of the start
    before may still have it, so this blocks for up to 2 minutes until it is free.

    Otherwise never waits. Raises ConfigError when another run has the folder, or when it does not
    fit `resume`; OSError as the file system says it.
    """
    path = (
        _new_folder(Path("runs", f"train-{datetime.now():%Y%m%d-%H%M%S}")) if out is None else out
    )
    if resume and not elastic:
        _check_holds(path, resume=True)
    path.mkdir(parents=True, exist_ok=True)
    with ExitStack() as undone:
        descriptor = _open_lock(path, os.O_RDWR | os.O_CREAT)
        undone.callback(os.close, descriptor)
        _lock(path, descriptor, fcntl.LOCK_EX, _PATIENCE_S if elastic else 0.0)
        # Checked under the lock: until here another run could have begun in the folder, or gone on.
        if not elastic:
            _check_holds(path, resume=resume)
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        undone.pop_all()
    return Claim(path, descriptor)


def look(out: Path, *, resume: bool, elastic: bool = False) -> None:
    """Raise what `claim` would raise now, and change nothing. Never waits."""
    place = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not place.is_dir():
        raise ConfigError(
            f"--out: {place} is not a folder; name a new folder, or the folder of a run."
        )
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"--out: this user may not write to {place}; choose another folder.")
    if os.path.lexists(out / LOCK_NAME):
        descriptor = _open_lock(out, os.O_RDONLY)
        try:
            # A shared lock: two processes that look do not disturb each other. With `elastic` a run
            # that is ending is waited for, later.
            if not elastic:
                _lock(out, descriptor, fcntl.LOCK_SH)
        finally:
            os.close(descriptor)
    if not elastic:
        _check_holds(out, resume=resume)


def _open_lock(path: Path, flags: int) -> int:
    try:
        return open_regular(path / LOCK_NAME, flags)
    except OSError as error:
        if error.errno not in NOT_REGULAR:
            raise
        raise ConfigError(
            f"--out: expected {path / LOCK_NAME} to be a file, by which a run holds its folder, "
            "and it is something else; remove it, or choose another folder."
        ) from error


def _lock(path: Path, descriptor: int, kind: int, within_s: float = 0.0) -> None:
    deadline_s = time.monotonic() + within_s
    try:
        while True:
            try:
                fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline_s:
                    raise
                time.sleep(_PAUSE_S)
    except BlockingIOError as error:
        holder = (
            os.pread(descriptor, _LONGEST_NAME, 0).decode(errors="replace").strip()
            or "another process"
        )
        raise ConfigError(
            f"--out: {path} is in use by a run that has not ended ({holder}); wait for it or stop "
            "it, or choose another folder."
        ) from error
    except OSError as error:  # a file system without locks, whatever it answers
        if kind == fcntl.LOCK_EX:
            _log.warning(
                "burst-rt: %s cannot be locked (%s): make sure that no second run writes there",
                path,
                error.strerror,
            )


def _check_holds(path: Path, *, resume: bool) -> None:
    """Raise ConfigError unless the folder holds checkpoints to resume, or no run where a new one is
    to begin.
    """
    if resume and not checkpoints_of(path):
        raise ConfigError(
            f"--resume: expected a complete checkpoint in {path}/checkpoints/step-N, found none. "
            "Train with --out first."
        )
    if not resume and any((path / name).exists() for name in ("metrics.jsonl", "checkpoints")):
        raise ConfigError(
            f"--out: {path} already holds a run; add --resume to continue it, or choose another "
            "folder."
        )


def _new_folder(path: Path) -> Path:
    """Make that folder, or one named after it: another run may have begun in the same second."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for number in count(2):
        try:
            path.mkdir()
        except FileExistsError:
            path = path.with_name(f"{path.name.partition('_')[0]}_{number}")
        else:
            break
    return path
