"""The MPI transport on real jobs. What is checked stands in `programs/transport_checks.py`; one job a world size runs all of it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from burst_rt.launch.run import find_launcher, kill_job

_PROGRAM = Path(__file__).parent / "programs" / "transport_checks.py"
_JOB_DEADLINE_S = 120.0


def _run(num_ranks: int) -> tuple[int, str]:
    """Exit code and output of a job; one that does not end is killed and fails the test."""
    launcher = find_launcher()
    # mpi4py's runner ends the whole job when one rank fails.
    command = launcher.command([sys.executable, "-P", "-m", "mpi4py", str(_PROGRAM)], num_ranks)
    environment = launcher.environment(num_ranks, threads=1)
    mpirun = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0
    )
    try:
        out, _ = mpirun.communicate(timeout=_JOB_DEADLINE_S)
    except subprocess.TimeoutExpired:
        kill_job(mpirun)
        out, _ = mpirun.communicate()
        pytest.fail(f"the job did not end within {_JOB_DEADLINE_S:.0f} s\n{out}")
    return mpirun.returncode, out


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_all_checks_pass_on_every_rank(num_ranks: int) -> None:
    names = [node.name for node in ast.parse(_PROGRAM.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)]
    exit_code, out = _run(num_ranks)
    assert exit_code == 0, out
    assert out.split() == [name for name in names if name.startswith("check_")]
