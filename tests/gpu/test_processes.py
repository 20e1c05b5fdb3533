"""Processes on GPUs that really send to each other: NCCL through torch and through CuPy, MPI with
device memory (Open MPI on UCX), and a process that is killed while the other waits for it.

Only where there is a GPU. Where there is one for each process, messages go over what joins them.
Where processes share one, it proves messages, streams, deadlines and aborts between processes, but
not NVLink and not several hosts: NCCL goes through its sockets then, and the processes take turns
on the GPU. That needs the right to have a host name of one's own, as root has.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import python_and_environment, run_job
from tolerances import ERROR

from burst_rt.errors import PeerLost

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

_RANK = Path(__file__).parent / "programs" / "ranks_of_a_gpu.py"
# Processes that share a GPU: NCCL must find the other "host" on the loopback, and have no finer
# wires.
_NCCL = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "4",
}
_DEADLINE_S = 110.0
_STALL_S = 30.0


def _wires(world_size: int) -> dict[str, str]:
    """The variables by which NCCL finds the other processes; skips the test where it cannot."""
    if torch.cuda.device_count() >= world_size:
        return {}
    renamed = "import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare(0x04000000) != 0)"
    if subprocess.run([sys.executable, "-c", renamed], check=False).returncode:
        pytest.skip("processes that share a GPU need the right to have host names of their own")
    return _NCCL


@contextmanager
def _through_a_store(
    transport: str, job: str, world_size: int = 2
) -> Iterator[list[subprocess.Popen[str]]]:
    """Ranks as torchrun starts them, but with nobody who would end one when another ends."""
    _, environment = python_and_environment(None)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    wires = _wires(world_size)
    environment |= wires | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": "1" if wires else str(world_size),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-P", str(_RANK), transport, job],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": "0" if wires else str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def _check(out: str, transport: str) -> None:
    told = _told(out)
    assert told["transport"].startswith(transport), told
    for name, error in told["found"].items():
        # lse is float32 in every case, and its error is far below that of 16 bits.
        assert error < ERROR[torch.bfloat16 if name.startswith("bf16") else torch.float32], told


def _told(out: str) -> dict[str, Any]:
    # UCX writes its remarks to the standard output.
    (line,) = (line for line in out.splitlines() if line.startswith("{"))
    told: dict[str, Any] = json.loads(line)
    return told


# Two of four ranks that are not neighbours connect in the first call that needs them.
@pytest.mark.parametrize(("transport", "world_size"), [("torch", 2), ("nccl", 2), ("torch", 4)])
def test_processes_that_meet_through_a_store(transport: str, world_size: int) -> None:
    with _through_a_store(transport, "spec", world_size) as ranks:
        said = [rank.communicate(timeout=_DEADLINE_S) for rank in ranks]
        failed = [rank.returncode for rank in ranks if rank.returncode]
    assert not failed, "\n".join(err for _, err in said)
    _check(said[0][0], transport)


def test_processes_of_an_mpi_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in _wires(2).items():
        monkeypatch.setenv(name, value)
    job = run_job(_RANK, 2, ["nccl", "spec"], timeout_s=_DEADLINE_S)
    assert job.exit_code == 0, job.text
    _check(job.out, "nccl")


@pytest.mark.skipif(find_spec("libucx") is None, reason="needs the package libucx-cu13")
def test_mpi_that_takes_device_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open MPI's wheel is built without CUDA; UCX takes device memory by itself."""
    spec = find_spec("libucx")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(next(iter(spec.submodule_search_locations))) / "lib"
    order = ("libucs", "libuct", "libucm", "libucp")
    monkeypatch.setenv("LD_PRELOAD", ":".join(str(folder / f"{name}.so.0") for name in order))
    monkeypatch.setenv("UCX_MODULE_DIR", str(folder / "ucx"))
    monkeypatch.setenv("UCX_TLS", "self,posix,cma,cuda_copy,cuda_ipc")
    monkeypatch.setenv("OMPI_MCA_pml", "ucx")
    for name in ("tls", "devices"):
        monkeypatch.setenv(f"OMPI_MCA_opal_common_ucx_{name}", "any")
    job = run_job(_RANK, 2, ["mpi", "spec"], timeout_s=_DEADLINE_S)
    assert job.exit_code == 0, job.text
    _check(job.out, "mpi")


@pytest.mark.parametrize("transport", ["torch", "nccl"])
def test_a_killed_process_ends_the_call_of_the_other(transport: str) -> None:
    with _through_a_store(transport, "lost") as (alive, lost):
        assert lost.wait(_DEADLINE_S) == -signal.SIGKILL
        out, err = alive.communicate(timeout=2 * _STALL_S)
    told = _told(out)["found"]
    assert told["error"] == PeerLost.__name__, f"{told}\n{err}"
    assert told["after_s"] < _STALL_S, told
