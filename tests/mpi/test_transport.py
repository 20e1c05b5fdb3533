"""The transports between processes, on real jobs. What is checked stands in the programs; one job
a world size and transport runs all of a program.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from jobs import Launcher, run_job

_HERE = Path(__file__).parent
_PROGRAMS = _HERE / "programs"


def _check(program: str, num_ranks: int, by: Launcher, *args: str) -> None:
    """Runs a program of checks, and asserts that all of them have passed."""
    expected = [
        node.name
        for path in (_HERE.parent / "transport_checks.py", _PROGRAMS / program)
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
    ]
    job = run_job(_PROGRAMS / program, num_ranks, args, by=by, warm="torch")
    assert job.exit_code == 0, job.text
    assert job.out.split() == expected


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_all_checks_pass_over_mpi(num_ranks: int) -> None:
    _check("mpi_checks.py", num_ranks, "burst-rt run")


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_all_checks_pass_over_unix_sockets(num_ranks: int) -> None:
    _check("group_checks.py", num_ranks, "torchrun")


def test_all_checks_pass_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    _check("group_checks.py", 4, "torchrun", "a host each")
