"""A machine without an MPI: `burst-rt run` and `burst-rt train -n` start ranks by torchrun, with
the same last words and exit codes. Its Python lacks what conda's lacks.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

_PROGRAM = """
import os
import sys
import torch
import burst_rt

with burst_rt.init(device="cpu") as ctx:
    layout = ctx.layout(101)
    q = torch.randn(1, layout.shard_len, 2, 16)
    burst_rt.burst_attention(q, q, q, causal=True, layout=layout)
    assert "mpi4py.MPI" not in sys.modules
    print(f"rank {ctx.rank} of {ctx.world_size}, {ctx.why_transport}")
    if sys.argv[1:] == ["fail"] and ctx.rank == 1:
        raise KeyError("mine")
    if sys.argv[1:] == ["exit"] and ctx.rank == 1:
        os._exit(1)
    ctx.all_gather(1)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with the packages of this one, beside which there is no mpirun.

    It has no calls for descriptors of processes, as if it had been built for an old system.
    """
    folder = tmp_path_factory.mktemp("without") / "venv"
    venv.create(folder, symlinks=True)
    found = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    for call in ("os.pidfd_open", "signal.pidfd_send_signal"):  # the file may be read twice
        module, name = call.split(".")
        found += f"import {module}; vars({module}).pop('{name}', None)\n"
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "all_else.pth").write_text(found, encoding="utf-8")
    return folder / "bin" / "python"


def _run(python: Path, *words: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    names = {name: text for name, text in os.environ.items() if not name.startswith("OMPI_")}
    environment = names | {
        "PATH": str(python.parent), "MPI4PY_LIBMPI": "/none/lib/libmpi.so", "OMP_NUM_THREADS": "1",
        "PET_NNODES": "2",  # a trainer's pod in Kubernetes, of jobs of its own
    }  # fmt: skip
    command = [str(python), "-P", "-m", "burst_rt.launch.main", *words]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def test_torchrun_starts_the_ranks(python: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM, encoding="utf-8")
    done = _run(python, "run", "-n", "2", str(program))
    assert done.returncode == 0, done.stderr
    assert sorted(line.partition(",")[0] for line in done.stdout.splitlines()) == [
        "rank 0 of 2", "rank 1 of 2",
    ]  # fmt: skip
    assert done.stderr.startswith("burst-rt: there is no mpirun here: torchrun starts the ranks")


def test_the_last_words_are_those_of_the_rank_that_failed(python: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM, encoding="utf-8")
    done = _run(python, "run", "-n", "2", str(program), "fail")
    assert done.returncode == 1, done.stderr
    *_, last = done.stderr.splitlines()
    assert last.startswith("burst-rt: rank 1 failed after "), done.stderr
    assert last.endswith("with KeyError: 'mine' (exit code 1)")


def test_a_rank_without_a_report_is_told_by_torchrun_s_exit_code(
    python: Path, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM, encoding="utf-8")
    done = _run(python, "run", "-n", "2", str(program), "exit")
    assert done.returncode == 1, done.stderr
    *_, last = done.stderr.splitlines()
    assert last.startswith("burst-rt: rank 1 ended without a report (torchrun's exit code is 1) af")


def test_a_training(python: Path, tmp_path: Path) -> None:
    words = ("--steps", "2", "--seq-len", "256", "--out", str(tmp_path / "out"))
    done = _run(python, "train", "-n", "2", *words)
    assert done.returncode == 0, done.stderr
    assert "there is no mpirun here" in done.stderr


def test_what_is_for_an_mpirun_is_refused(python: Path) -> None:
    done = _run(python, "run", "-n", "2", "--mpi-arg=--hostfile", __file__)
    assert done.returncode == 78
    assert "--mpi-arg: --hostfile is for an mpirun, and there is none" in done.stderr


def test_this_python_has_an_mpirun_of_its_own() -> None:
    assert Path(sys.executable).with_name("mpirun").exists(), "else the tests above show nothing"
