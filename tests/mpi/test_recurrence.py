"""Recurrences over processes: exact in every world, over MPI and sockets, and what they send."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jobs import Launcher, run_job

_PROGRAM = Path(__file__).parent / "programs" / "recurrence_world.py"


@pytest.mark.parametrize(
    ("num_ranks", "transport"), [(1, "mpi"), (2, "mpi"), (4, "mpi"), (3, "torch"), (3, "staged")]
)
def test_recurrences_over_processes(num_ranks: int, transport: str, tmp_path: Path) -> None:
    by: Launcher = "torchrun" if transport == "torch" else "burst-rt run"
    path = tmp_path / "outcome.json"
    job = run_job(_PROGRAM, num_ranks, [str(path), transport], by=by, warm="torch")
    assert job.exit_code == 0, job.text
    outcome = json.loads(path.read_text(encoding="utf-8"))
    assert all(error < 1e-5 for error in outcome["errors"].values()), outcome["errors"]
    for short, long in outcome["bytes"]:
        planned, sent = short
        assert planned == sent
        assert long == short  # ten times the tokens, and not a byte more
        # At most what maps to all other ranks would be, in each direction.
        assert sent <= 2 * (num_ranks - 1) * 2 * 2 * 16 * (16 + 16) * 4
