"""A rank that leaves ends the job: however it leaves, whatever the others are doing, however the job was started, in under 5 s."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jobs import Job, run_job

from burst_rt.errors import PeerLost, Stalled

_PROGRAMS = Path(__file__).parent / "programs"
# From the moment the rank leaves to the end of the job; starting the job takes as long as the machine is busy.
_DEADLINE_S = 5.0

# (ranks, who leaves, how, when); see programs/attention_leave.py.
_UNDER_RUN = [
    (2, 0, "exception", "before"),
    (4, 2, "exception", "wait"),
    (4, 3, "exception", "inside"),
    (2, 1, "exit-0", "before"),
    (4, 0, "exit-0", "wait"),
    (4, 1, "exit-3", "wait"),
    (2, 0, "exit-3", "inside"),
    (2, 1, "os-exit-0", "wait"),
    (2, 0, "os-exit-3", "before"),
    (4, 2, "sigkill", "inside"),
]
_UNDER_MPIRUN = [
    (4, 0, "exception", "before"),
    (2, 1, "exception", "wait"),
    (2, 0, "exception", "inside"),
    (4, 3, "exit-0", "before"),
    (2, 1, "exit-0", "inside"),
    (4, 1, "exit-3", "wait"),
    (2, 0, "os-exit-3", "wait"),
    (2, 1, "sigkill", "wait"),
]
# What the launcher's last line must say of the rank that left.
_LAST_LINE = {
    "exception": r"burst-rt: rank {rank} failed after \d+\.\d s \(exit code 1\)",
    "exit-0": r"burst-rt: rank {rank} left with exit code 0 after \d+\.\d s while others were in a call",
    "exit-3": r"burst-rt: rank {rank} failed after \d+\.\d s \(exit code 3\)",
    # A process that ends without a word: what is known is its exit code, or the signal, from mpirun.
    "os-exit-0": r"burst-rt: .*exit code is [1-9]\d*.*",
    "os-exit-3": r"burst-rt: .*exit code is 3.*",
    "sigkill": r"burst-rt: .*exit code is (137|9).*",
}


def _ended_in_time(job: Job, folder: Path) -> None:
    assert (folder / "left_at").exists(), f"the job ended before the rank left: {job.text}"
    assert job.ended_at_s - float((folder / "left_at").read_text(encoding="utf-8")) < _DEADLINE_S, job.text


def _leave(folder: Path, num_ranks: int, leaver: int, how: str, when: str, *, bare: bool) -> Job:
    job = run_job(_PROGRAMS / "attention_leave.py", num_ranks, [how, when, str(leaver)], bare=bare, cwd=folder, timeout_s=60)
    _ended_in_time(job, folder)
    assert job.exit_code != 0, job.text
    assert "the call went through" not in job.out, job.text
    return job


@pytest.mark.parametrize(("num_ranks", "leaver", "how", "when"), _UNDER_RUN)
def test_under_burst_rt_run(tmp_path: Path, num_ranks: int, leaver: int, how: str, when: str) -> None:
    job = _leave(tmp_path, num_ranks, leaver, how, when, bare=False)
    lines = job.err.rstrip("\n").split("\n")
    assert re.fullmatch(_LAST_LINE[how].format(rank=leaver), lines[-1]), job.text
    if how == "exception":
        # That rank's traceback, whole, and no other.
        assert lines[-2] == "RuntimeError: the leaver's own error", job.text
        assert job.err.count("Traceback (most recent call last)") == 1, job.text
        assert job.exit_code == 1, job.text
    if how.endswith("3"):
        assert job.exit_code == 3, job.text


@pytest.mark.parametrize(("num_ranks", "leaver", "how", "when"), _UNDER_MPIRUN)
def test_under_mpirun(tmp_path: Path, num_ranks: int, leaver: int, how: str, when: str) -> None:
    job = _leave(tmp_path, num_ranks, leaver, how, when, bare=True)
    if how == "exception":
        assert "RuntimeError: the leaver's own error" in job.err, job.text
    elif how.startswith("exit") and when != "inside":
        assert f"rank {leaver} closed its context or ended normally, and cannot take part in this call" in job.err, job.text


def test_an_exception_outside_any_call_ends_the_job_too(tmp_path: Path) -> None:
    """The others compute, and would find out only in their next call."""
    source = """
import pathlib, time
import burst_rt
with burst_rt.init() as ctx:
    if ctx.rank == 1:
        pathlib.Path("left_at").write_text(str(time.time()))
        raise KeyError("only rank 1")
    time.sleep(40)
"""
    (tmp_path / "program.py").write_text(source, encoding="utf-8")
    job = run_job(tmp_path / "program.py", 2, bare=True, cwd=tmp_path, timeout_s=60)
    _ended_in_time(job, tmp_path)
    assert job.exit_code == 1, job.text
    assert "KeyError: 'only rank 1'" in job.err


def test_contexts_that_the_program_has_let_go_of_count(tmp_path: Path) -> None:
    """One dropped unclosed is said farewell for; a broken one ends the job all the same."""
    source = """
import gc, pathlib, time
import torch
import burst_rt
def part():
    ctx = burst_rt.init()
    if ctx.rank == 0:
        try:
            x = torch.zeros(1, 4, 1, 16)
            burst_rt.burst_attention(x, x, x, layout=ctx.layout(8))
        except burst_rt.errors.PeerLost:
            pathlib.Path("told").touch()
    else:
        pathlib.Path("left_at").write_text(str(time.time()))
part()
gc.collect()
"""
    (tmp_path / "program.py").write_text(source, encoding="utf-8")
    job = run_job(tmp_path / "program.py", 2, bare=True, cwd=tmp_path, timeout_s=60)
    assert (tmp_path / "told").exists(), job.text
    _ended_in_time(job, tmp_path)
    assert job.exit_code == PeerLost.exit_code, job.text


def test_a_rank_that_never_comes_ends_the_job_after_timeout_s(tmp_path: Path) -> None:
    source = """
import time
import torch
import burst_rt
ctx = burst_rt.init(timeout_s=3.0)
x = torch.zeros(1, 4, 1, 16)
if ctx.rank == 1:
    time.sleep(40)
burst_rt.burst_attention(x, x, x, layout=ctx.layout(8))
"""
    (tmp_path / "program.py").write_text(source, encoding="utf-8")
    job = run_job(tmp_path / "program.py", 2, cwd=tmp_path, timeout_s=30)
    assert job.exit_code == Stalled.exit_code, job.text
    assert re.search(r"Stalled: rank 0: waited 3\.\d s for the other ranks to enter the call \(timeout_s\)", job.err), job.text
    assert "burst-rt: rank 0 failed after" in job.err.rstrip("\n").split("\n")[-1], job.text
