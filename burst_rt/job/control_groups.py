"""What the host, or the control groups of this process, allow it: memory and processors.

A container, or a job of Slurm, sees all memory and all processors of its host, and may use some of
them. Linux ends a process that uses more memory, and lets one wait that uses more processors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

__all__ = ["allowed_cpus", "free_host_bytes", "host_bytes"]

_ROOT = Path("/")
# Names of the files of a control group (its limit and its use), and the prefix of the names in
# `memory.stat` that count cached files, which the kernel gives up.
_V2 = ("memory.max", "memory.current", "")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def free_host_bytes(root: Path = _ROOT) -> int:
    """Bytes that can be taken without another process losing any.

    That is what the host has free, or what the control groups of this process still allow. root:
    where the host's files are.
    """
    free: int = psutil.virtual_memory().available
    left = [_left_in(group, *(_V2 if new else _V1)) for group, new in _groups("memory", root)]
    return min([free, *(bytes_left for bytes_left in left if bytes_left is not None)])


def host_bytes(root: Path = _ROOT) -> int:
    """Bytes of memory that the host has, or that the control groups of this process allow."""
    total: int = psutil.virtual_memory().total
    allowed = [total]
    for group, new in _groups("memory", root):
        with suppress(OSError, ValueError):  # ValueError: "max"
            allowed.append(int((group / (_V2 if new else _V1)[0]).read_text()))
    return min(allowed)


def allowed_cpus(root: Path = _ROOT) -> float:
    """The seconds of processors that the control groups of this process allow in a second;
    infinity where they set no limit.
    """
    allowed = [float("inf")]
    for group, new in _groups("cpu", root):
        with suppress(OSError, ValueError):
            if new:
                quota, period = (group / "cpu.max").read_text().split()
            else:
                names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
                quota, period = ((group / name).read_text() for name in names)
            if int(quota) > 0:  # -1: no limit, as "max" is
                allowed.append(int(quota) / int(period))
    return min(allowed)


def _groups(controller: str, root: Path) -> Iterator[tuple[Path, bool]]:
    """The folders of the control groups of this process that may limit this, from the innermost
    on, and whether they are of version 2.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        new = number == "0"
        if not new and controller not in controllers.split(","):
            continue
        mounted = root / "sys/fs/cgroup" if new else root / "sys/fs/cgroup" / controller
        group = Path(path.lstrip("/"))
        # A container sees its own group as the topmost one, whatever its path says.
        for each in (group, *group.parents):
            yield mounted / each, new


def _left_in(group: Path, limit: str, used: str, prefix: str) -> int | None:
    try:
        most = int((group / limit).read_text())  # ValueError: "max"
        taken = int((group / used).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
        return max(0, most - taken + cached)
    except (OSError, ValueError):
        return None
