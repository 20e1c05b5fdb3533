"""Plain torch models, and DTensors, over the ranks of real jobs."""

from __future__ import annotations

from pathlib import Path

from jobs import run_job

_PROGRAMS = Path(__file__).with_name("programs")


def test_plain_models_over_mpi() -> None:
    job = run_job(_PROGRAMS / "plain_world.py", 3, warm="torch", timeout_s=240.0)
    assert job.exit_code == 0, job.text
    assert job.out.count("is fine") == 3, job.text


def test_dtensors() -> None:
    job = run_job(_PROGRAMS / "dtensors.py", 4, by="torchrun", warm="torch", timeout_s=240.0)
    assert job.exit_code == 0, job.text
    assert job.out.count("is fine") == 4, job.text
