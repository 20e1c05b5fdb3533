"""The MPI transport on real jobs. What is checked stands in `programs/transport_checks.py`; one job
a world size runs all of it.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from jobs import run_job

_PROGRAM = Path(__file__).parent / "programs" / "transport_checks.py"


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_all_checks_pass_on_every_rank(num_ranks: int) -> None:
    functions = [
        node.name
        for node in ast.parse(_PROGRAM.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    ]
    job = run_job(_PROGRAM, num_ranks)
    assert job.exit_code == 0, job.text
    assert job.out.split() == [name for name in functions if name.startswith("check_")]
