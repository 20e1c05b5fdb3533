"""examples/titan.py and examples/automodel.py with the real libraries, by `make other-trainers`: no
tests of the project's own environment, which has neither. BURST_RT_TRAINERS is the folder with
them.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from jobs import Job, run_job

_PROGRAMS = Path(__file__).with_name("programs")


def _run(monkeypatch: pytest.MonkeyPatch, program: str, *args: str) -> Job:
    monkeypatch.setenv("PYTHONPATH", os.environ["BURST_RT_TRAINERS"])
    job = run_job(_PROGRAMS / program, 2, args, by="torchrun", timeout_s=300.0)
    assert job.exit_code == 0, job.text
    return job


@pytest.mark.parametrize("kind", ["zigzag", "balanced", "whole"])
def test_a_step_of_torchtitan(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    job = _run(monkeypatch, "titan_world.py", kind)
    assert job.out.count("is fine: titan: expected a mask that is causal") == 2, job.text


def test_a_step_of_automodel(monkeypatch: pytest.MonkeyPatch) -> None:
    job = _run(monkeypatch, "automodel_world.py")
    assert job.out.count("is fine: automodel: attention_mask") == 2, job.text
    assert job.out.count("got also ['qkv_format']") == 2, job.text
