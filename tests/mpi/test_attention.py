"""Attention over real MPI ranks: correct in every world, bytes as predicted, repeatable; compiled;
several contexts in one job.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from jobs import Launcher, run_job
from tolerances import ERROR, RATIO

from burst_rt.errors import PeerLost

_PROGRAMS = Path(__file__).parent / "programs"
_WORLDS = (1, 2, 3, 4, 5)
_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@cache
def _outcome(num_ranks: int, transport: str) -> dict[str, Any]:  # JSON
    """What the ranks found out, one job a world and transport."""
    by: Launcher = "torchrun" if transport == "torch" else "burst-rt run"
    with TemporaryDirectory() as folder:
        path = Path(folder) / "outcome.json"
        job = run_job(
            _PROGRAMS / "attention_world.py", num_ranks, [str(path), transport], by=by, warm="torch"
        )
        assert job.exit_code == 0, job.text
        outcome: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return outcome


# Staged over host memory: what a GPU without an MPI that takes its memory does.
_JOBS = [
    *((n, "mpi") for n in _WORLDS),
    *((n, "torch") for n in (1, 2, 4)),
    (2, "staged"),
    (3, "staged"),
]


@pytest.mark.parametrize(("num_ranks", "transport"), _JOBS)
def test_errors_are_those_of_one_process(num_ranks: int, transport: str) -> None:
    errors = _outcome(num_ranks, transport)["errors"]
    assert len(errors) == 18
    for case, fields in errors.items():
        for field, (error, own) in fields.items():
            wide = torch.float64 if case == "fp64" else torch.float32
            limit = (
                RATIO * own
                if own
                else ERROR[wide if field == "lse" else _TYPES.get(case, torch.float32)]
            )
            assert error <= limit, (case, field, error, own)


def test_errors_do_not_grow_with_the_world() -> None:
    for case in ("full", "causal"):
        for field in ("out", "lse", "dq", "dk", "dv"):
            by_world = [_outcome(n, "mpi")["errors"][case][field][0] for n in _WORLDS]
            assert max(by_world) <= RATIO * by_world[0], (case, field, by_world)


@pytest.mark.parametrize(("num_ranks", "transport"), _JOBS)
def test_what_is_sent_is_what_the_plan_says(num_ranks: int, transport: str) -> None:
    counted = _outcome(num_ranks, transport)["bytes"]
    assert len(counted) == 18
    for case, (predicted, sent) in counted.items():
        assert sent == predicted, case
        assert (sent > 0) == (num_ranks > 1 and case != "one token"), case
    if num_ranks > 1:
        # Full mask, 1,000 tokens, 2 heads of 64, fp32; g = 1: KV forward 2s E, Q backward (2s + a +
        # 2a / d) E, over W - 1 hops.
        e = 1000 * 2 * 64
        assert counted["full"][1] == (num_ranks - 1) * (
            2 * 4 * e + (2 * 4 + 4) * e + 2 * 4 * e // 64
        )


@pytest.mark.parametrize(("num_ranks", "transport"), _JOBS)
def test_the_same_bits_in_twenty_runs(num_ranks: int, transport: str) -> None:
    assert _outcome(num_ranks, transport)["repeats"] is True


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_same_bits_over_mpi_and_over_a_group(num_ranks: int) -> None:
    over_mpi, over_group = (_outcome(num_ranks, each)["digests"] for each in ("mpi", "torch"))
    assert len(over_mpi) == 13  # the cases with a named strategy
    assert over_group == over_mpi


@pytest.mark.parametrize(("num_ranks", "by"), [(2, "torchrun"), (3, "burst-rt run")])
def test_compiled_over_ranks(num_ranks: int, by: Launcher) -> None:
    job = run_job(_PROGRAMS / "attention_compiled.py", num_ranks, by=by, warm="models")
    assert job.exit_code == 0, job.text


def test_several_contexts_in_one_job(tmp_path: Path) -> None:
    job = run_job(
        _PROGRAMS / "attention_contexts.py", 4, [str(tmp_path)], by="mpirun", warm="torch"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "3"], job.text
    # The rank that was left alone in a pair has a broken context, which ends the job when it exits.
    assert job.exit_code == PeerLost.exit_code, job.text


def test_several_contexts_under_torchrun(tmp_path: Path) -> None:
    job = run_job(_PROGRAMS / "attention_axes.py", 4, [str(tmp_path)], by="torchrun", warm="torch")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "3"], job.text
    assert re.search(rf"rank +: 3 .*\n +exitcode +: {PeerLost.exit_code}", job.err), job.text
