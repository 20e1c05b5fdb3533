"""`Context.all_gather`, `together` and `first` on ranks that are processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import Launcher, run_job

_PROGRAM = Path(__file__).parent / "programs" / "objects.py"


@pytest.mark.parametrize(("num_ranks", "by"), [(3, "burst-rt run"), (2, "torchrun")])
def test_plain_data_errors_and_results_reach_every_rank(
    num_ranks: int, by: Launcher, tmp_path: Path
) -> None:
    job = run_job(_PROGRAM, num_ranks, [str(tmp_path)], by=by)
    assert job.exit_code == 0, job.text
    assert sorted(path.name for path in tmp_path.iterdir()) == list(map(str, range(num_ranks)))


def test_backwards_in_another_order_are_told_in_any_thread() -> None:
    """A trainer may run its steps in a thread of its own."""
    program = Path(__file__).parent / "programs" / "in_a_thread.py"
    job = run_job(program, 2, timeout_s=60.0, warm="torch")
    assert job.exit_code == 0, job.text
