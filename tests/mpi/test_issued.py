"""A rank that fails after its call was issued ends the job, though nobody is in a call; with
doubles of the device and of NCCL."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jobs import Launcher, run_job

_PROGRAM = Path(__file__).parent / "programs" / "issued_leave.py"
_DEADLINE_S = 6.0
_WHY = (
    r"rank 0: call \d+ \(Pipeline\.run\) was issued and has not ended, at 'hop 1': "
    r"rank 1 failed \(exit code 74\) with .*, and cannot take part in this call"
)


@pytest.mark.parametrize("by", ["burst-rt run", "mpirun"])
def test_a_peer_whose_program_goes_on(tmp_path: Path, by: Launcher) -> None:
    job = run_job(_PROGRAM, 2, ["goes on"], by=by, cwd=tmp_path, timeout_s=50)
    left_s = job.ended_at_s - float((tmp_path / "left_at").read_text(encoding="utf-8"))
    assert left_s < _DEADLINE_S, job.text
    assert job.exit_code == 74, job.text
    assert "the device has ended" not in job.out, job.text
    if by == "mpirun":
        # What mpirun says of the abort comes between, and may leave a space or a 0 before it.
        assert re.search(rf"^[ \0]?burst-rt: DeviceError: {_WHY}", job.err, re.MULTILINE), job.text
    else:
        last_but_one, last = job.err.rstrip("\n").split("\n")[-2:]
        assert re.match(rf"burst_rt\.errors\.DeviceError: {_WHY}", last_but_one), job.text
        assert re.fullmatch(
            r"burst-rt: rank 0 failed after \d+\.\d s with .*DeviceError: .* \(exit code 74\).*",
            last,
        ), job.text


def test_a_peer_that_dies_of_its_error_is_the_one_that_is_named(tmp_path: Path) -> None:
    job = run_job(_PROGRAM, 2, ["dies"], cwd=tmp_path, timeout_s=50)
    assert job.exit_code == 74, job.text
    last = job.err.rstrip("\n").split("\n")[-1]
    assert re.fullmatch(
        r"burst-rt: rank 1 failed after \d+\.\d s with .* \(exit code 74\).*", last
    ), job.text
    assert "the leaver's own error" in job.err, job.text
