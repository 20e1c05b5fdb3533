"""How much memory the host, or its control groups, still have for this process.

Linux hands out more memory than there is, and ends a process that uses it. So a cache asks
before it takes much.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

__all__ = ["free_host_bytes"]

# Names of the files of a control group (its limit and its use), and the prefix of the names in
# `memory.stat` that count cached files, which the kernel gives up.
_V2 = ("memory.max", "memory.current", "")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def free_host_bytes(root: Path = Path("/")) -> int:
    """Bytes that can be taken without another process losing any.

    That is what the host has free, or what the control groups of this process (a container, a job
    of Slurm) still allow. root: where the host's files are.
    """
    free: int = psutil.virtual_memory().available
    return min([free, *_left_in_groups(root)])


def _left_in_groups(root: Path) -> Iterator[int]:
    """The bytes that each control group of this process still allows, as far as that can be
    read.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            mounted, names = root / "sys/fs/cgroup", _V2
        elif "memory" in controllers.split(","):
            mounted, names = root / "sys/fs/cgroup/memory", _V1
        else:
            continue
        group = Path(path.lstrip("/"))
        # A container sees its own group as the topmost one, whatever its path says.
        for each in (group, *group.parents):
            left = _left_in(mounted / each, *names)
            if left is not None:
                yield left


def _left_in(group: Path, limit: str, used: str, prefix: str) -> int | None:
    try:
        most = int((group / limit).read_text())  # ValueError: "max"
        taken = int((group / used).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
        return max(0, most - taken + cached)
    except (OSError, ValueError):
        return None
