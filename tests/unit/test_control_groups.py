"""What a host has free for this process: control groups of both versions, as files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from burst_rt.job.control_groups import allowed_cpus, free_host_bytes, host_bytes
from burst_rt.telemetry.rank import host


def _write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_without_control_groups_it_is_what_the_host_has(tmp_path: Path) -> None:
    total = psutil.virtual_memory().total
    assert 0 < free_host_bytes(tmp_path) <= total
    assert 0 < free_host_bytes() <= total


@pytest.mark.parametrize("at", ["job/step", "job", "."])
def test_the_second_version_counts_every_group_above(at: str, tmp_path: Path) -> None:
    files = {
        "memory.max": "9000\n",
        "memory.current": "5000\n",
        "memory.stat": "inactive_file 5\nactive_file 2\n",
    }
    _write(tmp_path, {"proc/self/cgroup": "0::/job/step\n"})
    _write(tmp_path, {f"sys/fs/cgroup/job/{name}": text for name, text in files.items()})
    _write(tmp_path, {"sys/fs/cgroup/job/memory.max": "max\n"})
    _write(tmp_path, {f"sys/fs/cgroup/{at}/{name}": text for name, text in files.items()})
    assert free_host_bytes(tmp_path) == 4007


@pytest.mark.parametrize("at", ["job/step", "job", "."])
def test_what_control_groups_allow(at: str, tmp_path: Path) -> None:
    assert host_bytes(tmp_path) == psutil.virtual_memory().total
    assert allowed_cpus(tmp_path) == float("inf")
    _write(tmp_path, {"proc/self/cgroup": "0::/job/step\n"})
    _write(tmp_path, {"sys/fs/cgroup/job/cpu.max": "max 100000\n"})
    assert allowed_cpus(tmp_path) == float("inf")
    _write(tmp_path, {f"sys/fs/cgroup/{at}/cpu.max": "250000 100000\n"})
    _write(tmp_path, {f"sys/fs/cgroup/{at}/memory.max": "9000\n"})
    assert (host_bytes(tmp_path), allowed_cpus(tmp_path)) == (9000, 2.5)


def test_what_control_groups_of_the_first_version_allow(tmp_path: Path) -> None:
    _write(tmp_path, {
        "proc/self/cgroup": "4:memory:/job\n3:cpuacct,cpu:/job\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "9000",
        "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    })  # fmt: skip
    assert (host_bytes(tmp_path), allowed_cpus(tmp_path)) == (9000, 3.0)


def test_the_first_version(tmp_path: Path) -> None:
    _write(tmp_path, {
        "proc/self/cgroup": "4:memory:/job\n3:cpuset,cpu:/\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "9000",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "9500",
        "sys/fs/cgroup/memory/job/memory.stat": "cache 3\ntotal_inactive_file 600\n",
    })  # fmt: skip
    assert free_host_bytes(tmp_path) == 100


def test_what_leaves_the_host_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bond counts what its two cards have counted."""
    sizes = {"lo": 9000, "bond0": 30, "eth0": 10, "eth1": 20}
    counted = {name: SimpleNamespace(bytes_sent=n, bytes_recv=n) for name, n in sizes.items()}
    monkeypatch.setattr(psutil, "net_io_counters", lambda **_: dict(counted))
    assert host._network(tmp_path) == (60, 60)
    for name in ("eth0", "eth1"):
        (tmp_path / name / "device").mkdir(parents=True)
    assert host._network(tmp_path) == (30, 30)
