"""What mpirun is told (launch/mpirun.py)."""

from __future__ import annotations

import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from burst_rt.job.reports import JOB_DIR_VARIABLE
from burst_rt.launch.mpirun import MpiLauncher, num_usable_cores, one_host, rendezvous


def test_variables_that_hosts_must_have_alike_are_passed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_here = (
        "NCCL_SOCKET_IFNAME",
        "NCCL_DEBUG",
        "BURST_RT_HARDWARE",
        "TRITON_CACHE_DIR",
        "MASTER_ADDR",
    )
    for name in (*set_here, JOB_DIR_VARIABLE, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "here")
    launcher = MpiLauncher(Path("mpirun"), "Open MPI", "(Open MPI) 5.0.11")
    asked = ["--hostfile", "hosts.txt", "-x", "NCCL_DEBUG=INFO"]
    words = launcher.command(["python"], 16, asked, {"BURST_RT_RESTARTS": "0"})
    passed = [value for flag, value in pairwise(words) if flag == "-x"]
    assert len(passed) == len(set(passed))
    wanted = {
        "MASTER_ADDR",
        "NCCL_SOCKET_IFNAME",
        "BURST_RT_HARDWARE",
        "TRITON_CACHE_DIR",
        "OMP_NUM_THREADS",
    }
    assert {*wanted, "BURST_RT_RESTARTS", "NCCL_DEBUG=INFO"} <= set(passed)
    # The user's own word counts; the job's folder and this host's GPUs are not those of others.
    assert not {"NCCL_DEBUG", JOB_DIR_VARIABLE, "CUDA_VISIBLE_DEVICES"} & set(passed)


@pytest.mark.parametrize(
    ("environment", "one"),
    [
        ({}, True),
        ({"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "1", "SLURMD_NODENAME": "here"}, True),
        ({"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "here"}, True),
        # The shell of an allocation may be on a login node.
        ({"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n1"}, False),
        ({"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2", "SLURMD_NODENAME": "here"}, False),
        ({"PBS_JOBID": "1"}, False),
    ],
)
def test_a_batch_job_of_this_host_alone_is_one_host(
    environment: dict[str, str], one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "here.cluster")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert one_host([]) == one
    assert not one_host(["-H", "n1"])
    assert bool(rendezvous([])) == one


@pytest.mark.parametrize(
    "name",
    ["OMPI_MCA_orte_default_hostfile", "PRTE_MCA_prte_default_hostfile", "HYDRA_HOST_FILE",
     "I_MPI_HYDRA_HOST_FILE"],
)  # fmt: skip
def test_hosts_may_be_named_in_the_environment(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As in the launcher's pod of an MPIJob."""
    monkeypatch.setenv(name, "none")
    assert one_host([])
    monkeypatch.setenv(name, "/etc/mpi/hostfile")
    assert not one_host([])


def test_hardware_threads_and_what_control_groups_forbid_are_no_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    siblings = {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}  # four cores
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 4, 5, 6})
    read = Path.read_text

    def read_text(path: Path, *args: Any) -> str:
        found = re.fullmatch(r"/sys/.*/cpu(\d+)/topology/thread_siblings_list", str(path))
        return siblings[int(found[1])] if found else read(path, *args)

    monkeypatch.setattr(Path, "read_text", read_text)
    for allowed, cores in ((float("inf"), 3), (2.5, 2), (0.5, 1)):
        monkeypatch.setattr("burst_rt.launch.mpirun.allowed_cpus", lambda allowed=allowed: allowed)
        assert num_usable_cores() == cores


@pytest.mark.parametrize(
    ("args", "nodes", "threads"),
    [
        ([], "", 1),  # one host
        ([], "8", 7),
        (["--hostfile", "{}/hosts"], "", 14),
        (["--hostfile={}/hosts"], "", 14),
        (["-H", "a:8,b:8,a:8"], "", 7),
        (["--hostfile", "/nowhere"], "", 1),
        (["HYDRA_HOST_FILE"], "", 14),
    ],
)
def test_cores_are_shared_by_the_ranks_of_a_host(
    args: list[str], nodes: str, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "".join(f"node{i} slots=8\n" for i in range(16))
    (tmp_path / "hosts").write_text(f"# all\n{lines}\nnode0:8\n")
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    if nodes:
        monkeypatch.setenv("SLURM_JOB_ID", "1")
        monkeypatch.setenv("SLURM_JOB_NUM_NODES", nodes)
    ranks = 16 if "-H" in args else 64
    if "HYDRA_HOST_FILE" in args:
        args = []
        monkeypatch.setenv("HYDRA_HOST_FILE", str(tmp_path / "hosts"))
    monkeypatch.setattr("burst_rt.launch.mpirun.num_usable_cores", lambda: 56)
    launcher = MpiLauncher(Path("mpirun"), "Open MPI", "(Open MPI) 5.0.11")
    given = [arg.format(tmp_path) for arg in args]
    assert launcher.environment(ranks, None, tmp_path, given)["OMP_NUM_THREADS"] == str(threads)


def test_mpich_passes_all_on_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    words = MpiLauncher(Path("mpirun"), "MPICH", "HYDRA").command(["python"], 2)
    assert words == ["mpirun", "-n", "2", "python"]
