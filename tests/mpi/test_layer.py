"""A layer over real MPI ranks, spread in every way: the results of the whole layer, and as many bytes as its graphs say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from jobs import run_job
from layer_worlds import Outcome
from tolerances import ERROR

from burst_rt.layers import TENSOR_PARALLEL


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_result_is_that_of_the_whole_layer(num_ranks: int, tmp_path: Path) -> None:
    path = tmp_path / "outcome.json"
    job = run_job(Path(__file__).parent / "programs" / "layer_world.py", num_ranks, [str(path)])
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
    out, plot = tmp_path / "layer.json", tmp_path / "layer.png"
    sizes = ["--dim", "32", "--heads", "4", "--kv-heads", "2", "--head-dim", "8", "--ffn-dim", "33"]
    files = ["--out", str(out), "--plot", str(plot)]
    words = ["bench", "layer", "-n", "2", "--tokens", "40", "--tokens", "64", "--repeats", "1", *files, *sizes]
    command = [sys.executable, "-P", "-m", "burst_rt.launch.main", *words]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(out.read_text(encoding="utf-8"))
    assert "cpu" in results.pop("machine")
    ((title, rows),) = results.items()
    assert "2 ranks" in title
    assert [(row["tokens"], row["strategy"]) for row in rows[:4]] == [(40, name) for name in ("burst", "all-to-all", *TENSOR_PARALLEL)]
    assert len(rows) == 8
    for row in rows:
        if row["strategy"] in TENSOR_PARALLEL:
            assert row["layer s"] is None
            # Once for each length, by one rank.
            assert done.stderr.count(f"left out: {row['strategy']}: the 2 ranks share ffn_dim") == 2
        else:
            assert min(row["forward s"], row["backward s"], row["tokens/s"], row["sent MiB"]) > 0
            assert row["layer s"] == pytest.approx(row["forward s"] + row["backward s"])
    assert plot.read_bytes().startswith(b"\x89PNG")
