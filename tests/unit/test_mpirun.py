"""What mpirun is told (launch/mpirun.py)."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from burst_rt.job.reports import JOB_DIR_VARIABLE
from burst_rt.launch.mpirun import MpiLauncher


def test_variables_that_hosts_must_have_alike_are_passed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_here = ("NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "BURST_RT_HARDWARE", "TRITON_CACHE_DIR")
    for name in (*set_here, JOB_DIR_VARIABLE, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "here")
    launcher = MpiLauncher(Path("mpirun"), "Open MPI", "(Open MPI) 5.0.11")
    asked = ["--hostfile", "hosts.txt", "-x", "NCCL_DEBUG=INFO"]
    words = launcher.command(["python"], 16, asked, {"BURST_RT_RESTARTS": "0"})
    passed = [value for flag, value in pairwise(words) if flag == "-x"]
    assert len(passed) == len(set(passed))
    wanted = {"NCCL_SOCKET_IFNAME", "BURST_RT_HARDWARE", "TRITON_CACHE_DIR", "OMP_NUM_THREADS"}
    assert {*wanted, "BURST_RT_RESTARTS", "NCCL_DEBUG=INFO"} <= set(passed)
    # The user's own word counts; the job's folder and this host's GPUs are not those of others.
    assert not {"NCCL_DEBUG", JOB_DIR_VARIABLE, "CUDA_VISIBLE_DEVICES"} & set(passed)


def test_mpich_passes_all_on_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    words = MpiLauncher(Path("mpirun"), "MPICH", "HYDRA").command(["python"], 2)
    assert words == ["mpirun", "-n", "2", "python"]
