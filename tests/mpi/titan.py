"""examples/titan.py with the real torchtitan, by `make other-trainers`: no test of the project's
own environment, which does not have it. BURST_RT_TITAN is the folder with torchtitan.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from jobs import run_job

_PROGRAM = Path(__file__).with_name("programs") / "titan_world.py"


@pytest.mark.parametrize("kind", ["zigzag", "balanced", "whole"])
def test_a_step_is_that_of_one_process(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv("PYTHONPATH", os.environ["BURST_RT_TITAN"])
    job = run_job(_PROGRAM, 2, [kind], by="torchrun", timeout_s=300.0)
    assert job.exit_code == 0, job.text
    assert job.out.count("is fine: titan: expected a mask that is causal") == 2, job.text
