"""Serving over MPI: the program that docs/serving.md shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import run_job
from warm import Preloaded

from burst_rt.errors import ContractMismatch, InputError, Stalled

_TESTS = Path(__file__).parents[1]
_PROGRAMS = _TESTS / "mpi" / "programs"
_PAGE = _TESTS.parent / "docs" / "serving.md"


@pytest.mark.parametrize(("num_ranks", "length"), [(1, 300), (2, 700), (3, 500), (4, 7)])
def test_the_program_of_the_page_has_the_tokens_of_one_process(num_ranks: int, length: int) -> None:
    # One job shows that the program imports what it needs.
    warm: Preloaded | None = "torch" if num_ranks > 1 else None
    job = run_job(_PROGRAMS / "serving.py", num_ranks, [str(_PAGE), str(length)], warm=warm)
    assert job.exit_code == 0, job.text
    assert job.out.strip() == "the same tokens", job.text


@pytest.mark.parametrize("tokens", [1, 40])
def test_a_layer_that_one_rank_calls_wrong_ends_the_job_with_that_error(tokens: int) -> None:
    job = run_job(_PROGRAMS / "cache_layer.py", 2, [str(tokens)], warm="torch")
    assert job.exit_code in {ContractMismatch.exit_code, InputError.exit_code}, job.text
    assert "InputError: Step.attend: " in job.text


def test_caches_of_two_contexts_end_at_the_deadline_with_nothing_sent(tmp_path: Path) -> None:
    job = run_job(_PROGRAMS / "cache_contexts.py", 2, [str(tmp_path)], warm="torch")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"], job.text
    assert job.exit_code == Stalled.exit_code, job.text
