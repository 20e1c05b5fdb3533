"""The examples of sparse attention over real MPI ranks: the results of one process, and their
commands.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from example_checks import CHECKS, EXAMPLES
from jobs import run_command, run_job
from tolerances import ERROR


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_results_are_those_of_one_process(num_ranks: int, tmp_path: Path) -> None:
    job = run_job(
        Path(__file__).parent / "programs" / "examples.py", num_ranks, [str(tmp_path)], warm="torch"
    )
    assert job.exit_code == 0, job.text
    for rank in range(num_ranks):
        errors = json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8"))
        assert list(errors) == list(CHECKS)
        assert max(errors.values()) <= ERROR[torch.float64], errors


@pytest.mark.parametrize("name", ["linformer", "performer", "downsampled"])
def test_the_command_says_what_was_sent(name: str) -> None:
    job = run_command(["run", "-n", "3", str(EXAMPLES / f"{name}.py")], warm="torch")
    assert job.exit_code == 0, job.text
    assert "bytes of k and v, sent [" in job.out, job.text


def test_a_hybrid_trains_as_in_one_process() -> None:
    job = run_command(["run", "-n", "3", str(EXAMPLES / "hybrid.py")], warm="torch")
    assert job.exit_code == 0, job.text
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", job.out)]
    assert len(losses) == 10
    assert losses[-1] < 0.7 * losses[0]
    assert re.search(r"one process differs by \d\.\de-(0[5-9]|\d\d)|0\.0e\+00", job.out), job.text


def test_a_policy_trains_as_on_sequences_one_by_one() -> None:
    job = run_command(["run", "-n", "3", str(EXAMPLES / "grpo.py")], warm="models")
    assert job.exit_code == 0, job.text
    losses = [float(loss) for loss in re.findall(r"step \d+: loss (-[\d.]+)", job.out)]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)
    assert re.search(r"one by one differ by \d\.\de-(0[5-9]|\d\d)", job.out), job.text


def test_trl_trains_a_policy_as_without_trees(tmp_path: Path) -> None:
    job = run_job(EXAMPLES / "grpo_trl.py", 2, [str(tmp_path)], by="torchrun", warm="models")
    assert job.exit_code == 0, job.text
    found = re.search(r"losses (\[.*\]), of TRL alone (\[.*\])", job.out)
    assert found, job.text
    trees, alone = (json.loads(each) for each in found.groups())
    assert len(alone) == 4
    assert trees == pytest.approx(alone, rel=1e-5, abs=1e-6)
    assert re.search(r"weights differ by \d\.\de-(0[5-9]|\d\d)", job.out), job.text


def test_pictures_of_a_backward_over_ranks(tmp_path: Path) -> None:
    out = tmp_path / "pictures"
    job = run_command(["draw", "-n", "2", "--tokens", "300", "--out", str(out)], warm="torch")
    assert job.exit_code == 0, job.text
    pictures = [out / "ring.png", out / "timeline.png"]
    assert job.out.strip() == f"wrote {pictures[0]} and {pictures[1]}"
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
