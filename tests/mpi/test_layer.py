"""A layer over real MPI ranks, spread in every way: the results of the whole layer, and as many
bytes as its graphs say.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from jobs import python_and_environment, run_job
from layer_worlds import Outcome
from tolerances import ERROR

from benchmarks.layer import STRATEGIES


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_result_is_that_of_the_whole_layer(num_ranks: int, tmp_path: Path) -> None:
    path = tmp_path / "outcome.json"
    job = run_job(
        Path(__file__).parent / "programs" / "layer_world.py", num_ranks, [str(path)], warm="torch"
    )
    assert job.exit_code == 0, job.text
    found = json.loads(path.read_text(encoding="utf-8"))
    assert len(found) == 4
    for strategy, outcomes in found.items():
        assert len(outcomes) == num_ranks
        for outcome in (Outcome(*each) for each in outcomes):
            assert max(outcome.errors.values()) <= ERROR[torch.float64], (strategy, outcome.errors)
            assert outcome.sent == outcome.predicted
            assert min(outcome.sent) > 0


def test_the_benchmark_measures_every_strategy_and_says_which_cannot_be(tmp_path: Path) -> None:
    out = tmp_path / "layer.json"
    sizes = ["--dim", "32", "--heads", "4", "--kv-heads", "2", "--head-dim", "8", "--ffn-dim"]
    words = [
        "layer",
        "-n",
        "2",
        "--tokens",
        "40",
        "--tokens",
        "64",
        "--repeats",
        "1",
        "--out",
        str(out),
        *sizes,
    ]
    python, environment = python_and_environment("torch")
    command = [python, "-m", "benchmarks", *words]
    for ffn_dim, strategies in (("48", STRATEGIES), ("33", STRATEGIES[:2])):
        done = subprocess.run(
            [*command, ffn_dim],
            env=environment,
            cwd=Path(__file__).resolve().parents[2],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        results = json.loads(out.read_text(encoding="utf-8"))
        assert "cpu" in results.pop("machine")
        (rows,) = (
            rows for title, rows in results.items() if f"ffn_dim {ffn_dim}; 2 ranks" in title
        )
        assert [(row["tokens"], row["strategy"]) for row in rows] == [
            (n, strategy) for n in (40, 64) for strategy in strategies
        ]
        for row in rows:
            assert (
                min(
                    row["forward s"],
                    row["backward s"],
                    row["tokens/s"],
                    row["sent MiB"],
                    row["planned MiB"],
                )
                > 0
            )
            assert row["layer s"] == pytest.approx(row["forward s"] + row["backward s"])
        said = " ".join(done.stdout.split())
        for strategy in STRATEGIES:
            assert (f"left out: {strategy}: " in said) == (strategy not in strategies)
    assert (tmp_path / "layer.layer-2.png").read_bytes().startswith(b"\x89PNG")
