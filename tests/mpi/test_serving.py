"""Serving over MPI: the program that docs/serving.md shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import run_job

_TESTS = Path(__file__).parents[1]
_PROGRAM = _TESTS / "mpi" / "programs" / "serving.py"
_PAGE = _TESTS.parent / "docs" / "serving.md"


@pytest.mark.parametrize(("num_ranks", "length"), [(1, 300), (2, 700), (3, 500), (4, 7)])
def test_the_program_of_the_page_has_the_tokens_of_one_process(num_ranks: int, length: int) -> None:
    job = run_job(_PROGRAM, num_ranks, [str(_PAGE), str(length)])
    assert job.exit_code == 0, job.text
    assert job.out.strip() == "the same tokens", job.text
