"""A run's folder, held by one live run at a time. For: rank 0, and the launching process, which
looks before it starts ranks.

The holder has `flock` on the folder's `.lock`, which the kernel takes back however the process
ends. Over NFS it keeps hosts apart where the server locks. Where the file system cannot lock
(Lustre without `-o flock`), a warning says so and the run goes on. One that locks within each host
only (Lustre with `-o localflock`) does not tell, and runs of two hosts are not kept apart there.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from itertools import count
from pathlib import Path

from burst_rt.errors import ConfigError
from burst_rt.launch.train.checkpoint import has_checkpoints

__all__ = ["Claim", "claim", "look"]

_log = logging.getLogger("burst_rt.train")

_LOCK = ".lock"
_CANNOT_LOCK = frozenset({errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK})
_LONGEST_NAME = 300


@dataclass
class Claim:
    """The folder `path`, this process's until `release` or its end."""

    path: Path
    _descriptor: int = field(repr=False)

    def release(self) -> None:
        os.close(self._descriptor)


def claim(out: Path | None, *, resume: bool) -> Claim:
    """Take a run's folder, made where need be (None: runs/train-TIME); one that holds a run already
    is taken only to `resume` it.

    Never waits. Raises ConfigError when another run has it, or when it is not what `resume` says;
    OSError as the file system says it.
    """
    path = (
        _new_folder(Path("runs", f"train-{datetime.now():%Y%m%d-%H%M%S}")) if out is None else out
    )
    if resume:
        _check(path, resume=True)
    path.mkdir(parents=True, exist_ok=True)
    with ExitStack() as undone:
        descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        undone.callback(os.close, descriptor)
        _lock(path, descriptor, fcntl.LOCK_EX)
        # Only now: until here another run could have begun in it, or gone on.
        _check(path, resume=resume)
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        undone.pop_all()
    return Claim(path, descriptor)


def look(out: Path, *, resume: bool) -> None:
    """Raise what `claim` would raise by now, changing nothing."""
    place = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not place.is_dir():
        raise ConfigError(f"--out: {place} is not a folder; name a new one, or a run's.")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(
            f"--out: {place} may not be written to by this user; choose another folder."
        )
    if (out / _LOCK).exists():
        descriptor = os.open(out / _LOCK, os.O_RDONLY)
        try:
            # Shared: two that look do not see each other.
            _lock(out, descriptor, fcntl.LOCK_SH)
        finally:
            os.close(descriptor)
    _check(out, resume=resume)


def _lock(path: Path, descriptor: int, kind: int) -> None:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = (
            os.pread(descriptor, _LONGEST_NAME, 0).decode(errors="replace").strip()
            or "another process"
        )
        raise ConfigError(
            f"--out: {path} is in use by a run that has not ended ({holder}); wait for it or stop "
            "it, or choose another folder."
        ) from error
    except OSError as error:
        if error.errno not in _CANNOT_LOCK:
            raise
        if kind == fcntl.LOCK_EX:
            _log.warning(
                "burst-rt: %s cannot be locked (%s): see to it that no second run writes there",
                path,
                error.strerror,
            )


def _check(path: Path, *, resume: bool) -> None:
    if resume and not has_checkpoints(path):
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
    """That folder, made now, or one named after it: another run may have begun in the same
    second.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for number in count(2):
        try:
            path.mkdir()
        except FileExistsError:
            path = path.with_name(f"{path.name.partition('_')[0]}_{number}")
        else:
            break
    return path
