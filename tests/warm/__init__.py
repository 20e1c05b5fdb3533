"""A Python that has imported torch already: most of what a rank costs is `import torch`.

`warm_python` gives the path of a program that tests start in place of Python. It hands its
arguments, environment, folder and standard streams over to a server of this test process, which
has imported the modules once and forks a process for each program (`server`). The program starts
(`hand_over`) waits for that process, passes signals on to it, and ends as it ends. So mpirun,
torchrun and `burst-rt run` start, kill and count ranks as ever, each rank is a process that has not
started MPI or a thread yet, and only the import is shared.

What a fresh Python would do otherwise is not run here, but by Python itself, in place of
`hand_over`: other arguments than those of a rank or of `burst-rt`, and an environment that could
change what an import does. Tests of how processes start, fail, are killed and leave take Python
itself.

Nothing stays: a server ends, and kills what it forked, when this process ends in any way, and a
forked process is killed when its server or its `hand_over` ends.
"""

from __future__ import annotations

import atexit
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeAlias

__all__ = ["Preloaded", "import_environment", "warm_python"]

# What a server has imported: torch and burst_rt; or also torch's compiler, transformers and TRL.
Preloaded: TypeAlias = Literal["torch", "models"]

_PRELOADS: dict[Preloaded, tuple[str, ...]] = {
    "torch": ("torch", "torch.distributed", "burst_rt.context", "burst_rt.local"),
    "models": (
        "torch", "torch.distributed", "burst_rt.context", "burst_rt.local", "torch._dynamo",
        "transformers", "transformers.trainer", "accelerate", "burst_rt.hf", "trl",
    ),
}  # fmt: skip
# Ranks of different hash seeds iterate over sets of strings in different orders, which shows what
# depends on that. All that is forked from one server has one seed, so there are two servers: for
# even ranks and for odd ones.
NUM_SEEDS = 2
# Servers of other environments that are kept; the oldest ends first.
_MAX_KEPT = 3
_ENDING_S = 10.0

# Variables of one job, one rank or one test, which no module reads while it is imported. Any other
# variable that differs asks for a server of its own.
_PREFIXES = (
    "BURST_RT_",
    "OMPI_",
    "PMIX_",
    "PMI_",
    "PRTE_",
    "OPAL_",
    "GLOO_",
    "HYD",
    "MPI_",
    "MPIR_",
)
_NAMES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
    *("PYTEST_CURRENT_TEST", "PYTEST_VERSION", "PWD", "OLDPWD", "SHLVL", "_", "PYTHON_EXEC"),
    *("COLUMNS", "LINES", "NO_COLOR"),
    "EMULATED_REFUSES",  # read when a kernel is asked (emulated/kernels.py)
    "MKL_CBWR",  # read by MKL's first product, which no import does (tests/mpi/test_warm.py)
}


def import_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that an import could read; burst_rt reads its own when it is called."""
    kept = {
        name: value
        for name, value in environment.items()
        if name not in _NAMES and not name.startswith((*_PREFIXES, "TORCHELASTIC_", "TORCH_NCCL_"))
    }
    # mpirun adds the folder of its own library, once and again.
    folders = [x for x in kept.pop("LD_LIBRARY_PATH", "").split(":") if x != f"{sys.prefix}/lib"]
    if any(folders):
        kept["LD_LIBRARY_PATH"] = ":".join(folders)
    # torch takes either; `burst-rt run` sets both to the same number, torchrun one.
    if kept.get("MKL_NUM_THREADS") == kept.get("OMP_NUM_THREADS"):
        kept.pop("MKL_NUM_THREADS", None)
    return kept


class _Servers:
    """The servers of one environment, one for each hash seed, and the program that hands over."""

    def __init__(self, preloaded: Preloaded, environment: Mapping[str, str]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="burst-rt-warm-"))
        self._processes = []
        for seed in range(NUM_SEEDS):
            with socket.socket(socket.AF_UNIX) as listener:
                # Listens before the server runs: who connects waits until it has imported all.
                listener.bind(str(self._folder / f"server-{seed}"))
                listener.listen(64)
                self._processes.append(
                    subprocess.Popen(
                        [
                            sys.executable, "-P", str(Path(__file__).with_name("server.py")),
                            str(listener.fileno()), str(self.python), *_PRELOADS[preloaded],
                        ],
                        env=import_environment(environment),
                        stdin=subprocess.PIPE,
                        pass_fds=[listener.fileno()],
                        start_new_session=True,
                    )
                )  # fmt: skip
        words = [sys.executable, "-ISE", str(Path(__file__).with_name("hand_over.py"))]
        words += [str(self._folder), sys.executable]
        self.python.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n', encoding="utf-8")
        self.python.chmod(0o700)

    @property
    def python(self) -> Path:
        return self._folder / "python"

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def serve(self) -> bool:
        """Whether all servers still run."""
        return all(process.poll() is None for process in self._processes)

    def close(self) -> None:
        """Ends the servers and what they forked; blocks for some milliseconds, 10 s at most."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(_ENDING_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


_servers: dict[tuple[Preloaded, frozenset[tuple[str, str]]], _Servers] = {}


def warm_python(preloaded: Preloaded, environment: Mapping[str, str]) -> Path:
    """The program to start in place of Python, in this environment; does not block.

    The same servers serve all calls with an environment of which imports see the same.
    """
    key = (preloaded, frozenset(import_environment(environment).items()))
    servers = _servers.pop(key, None)
    if servers is not None and not servers.serve():
        servers.close()
        servers = None
    if servers is None:
        while len(_servers) >= _MAX_KEPT:
            _servers.pop(next(iter(_servers))).close()
        servers = _Servers(preloaded, environment)
    _servers[key] = servers  # the last one used is the last to go
    return servers.python


@atexit.register
def _close_all() -> None:
    # A forked child of this process has the list, too, but not the processes.
    if _servers and _owner == os.getpid():
        while _servers:
            _servers.popitem()[1].close()


_owner = os.getpid()
