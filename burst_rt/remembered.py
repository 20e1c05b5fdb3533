"""Measurements of a machine, kept for later jobs: one small JSON file for each key.

The files lie in the user's cache folder. Each has a checksum: a damaged file, and one that somebody
has edited, is set aside with a warning, and its contents are measured again.

A key says everything that the answer depends on (chip, versions, type, head size). A folder that
cannot be written is not an error: the next job measures again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from burst_rt.regular import NOT_REGULAR, open_regular

__all__ = ["alone", "cache_folder", "forget", "recall", "remember"]

_log = logging.getLogger("burst_rt")
_POLL_S = 0.05


def cache_folder() -> Path:
    """The folder where this user's jobs find earlier measurements. The folder need not exist."""
    root = os.environ.get("XDG_CACHE_HOME") or Path(
        os.environ.get("HOME") or tempfile.gettempdir(), ".cache"
    )
    return Path(root) / "burst_rt"


def recall(
    kind: str, key: Mapping[str, str], is_answer: Callable[[Any], bool]
) -> Any:  # the key given to `remember`
    """The answer that was remembered for the key, or None. Does not block.

    is_answer: whether this can be what was given to `remember`. Where it is not, the file is
    damaged.
    """
    path = _path(kind, key)
    try:
        with open(open_regular(path, os.O_RDONLY), encoding="utf-8") as file:
            found = json.load(file)
        answer = found["answer"]
        if found["checksum"] == _checksum(dict(key), answer) and is_answer(answer):
            return answer
    except OSError as error:
        if error.errno not in NOT_REGULAR:
            return None  # a file that is not there, or that cannot be opened now
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    _set_aside(path)
    return None


def remember(kind: str, key: Mapping[str, str], answer: Any) -> bool:  # anything JSON can hold
    """Writes the answer down; False where the folder cannot be written. Does not block.

    The file is replaced in one step: a reader sees the old answer or the new one.
    """
    path = _path(kind, key)
    fresh = path.with_suffix(f".{os.getpid()}")
    entry = {"key": dict(key), "answer": answer, "checksum": _checksum(dict(key), answer)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps(entry, indent=1) + "\n", encoding="utf-8")
        fresh.replace(path)
    except OSError:
        return False
    return True


def forget(kind: str) -> None:
    """Removes all answers of this kind, as far as they can be removed."""
    for path in cache_folder().glob(f"{kind}-*.json"):
        try:
            path.unlink()
        except OSError:
            continue


@contextmanager
def alone(kind: str, key: Mapping[str, str], timeout_s: float) -> Iterator[None]:
    """Inside, no other process or thread of this host is inside for the same key.

    Blocks at most `timeout_s`. After `timeout_s`, or where no file can be locked, the caller goes
    on all the same. So the first job measures, and the other jobs read its answer.
    """
    path = _path(kind, key).with_suffix(".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = open_regular(path, os.O_WRONLY | os.O_CREAT)
    except OSError:
        yield
        return
    with open(descriptor, "w") as file:
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_POLL_S)
            except OSError:  # a file system without locks
                break
        yield


def _set_aside(path: Path) -> None:
    aside = path.with_suffix(".damaged")
    with suppress(OSError):  # another rank has set it aside, or it may not be changed
        path.replace(aside)
        _log.warning(
            "burst-rt: what %s remembers is damaged: it is now %s, and is measured anew",
            path,
            aside,
        )


def _checksum(key: dict[str, str], answer: Any) -> int:
    return zlib.crc32(json.dumps([key, answer], sort_keys=True).encode())


def _path(kind: str, key: Mapping[str, str]) -> Path:
    # The name says that the file has a checksum: older files had none.
    known = ["checksum", *sorted(key.items())]
    name = hashlib.blake2b(repr(known).encode(), digest_size=8).hexdigest()
    return cache_folder() / f"{kind}-{name}.json"
