"""What a user sees of an error that the program does not catch, on real jobs of two ranks: once,
with the program's frames and one of burst_rt's, in the name of one rank, and to its end.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jobs import Job, Launcher, run_job

from burst_rt.errors import InputError

_LAUNCHERS: list[Launcher] = ["burst-rt run", "mpirun", "torchrun"]
_ADVICE = "cut the model's inputs with burst_rt.shard_batch or layout.shard"
_SOURCE = """
import torch
import burst_rt
def attend(x):
    return burst_rt.burst_attention(x, x, x, causal=True, layout=layout)
ctx = burst_rt.init()
layout = ctx.layout(1000)
attend(torch.randn(1, layout.shard_len + {more}, 4, 32, device=ctx.device))
"""


def _run(folder: Path, source: str, by: Launcher) -> Job:
    (folder / "program.py").write_text(source, encoding="utf-8")
    return run_job(folder / "program.py", 2, by=by, cwd=folder, timeout_s=90)


def _frames(job: Job) -> list[str]:
    """The files of the first traceback, without torchrun's own."""
    trace = job.err.partition("Traceback (most recent call last):\n")[2]
    lines = trace.split("burst_rt.errors.")[0].splitlines()
    return [Path(found[1]).name for line in lines if (found := re.match(r'  File "(.+?)"', line))]


@pytest.mark.parametrize("by", _LAUNCHERS)
def test_a_mistake_on_one_rank_is_printed_once_by_that_rank(tmp_path: Path, by: Launcher) -> None:
    job = _run(tmp_path, _SOURCE.format(more="ctx.rank"), by)
    own = re.findall(r"^burst_rt\.errors\.InputError: rank 1: .*", job.err, re.MULTILINE)
    assert len(own) == 1, job.text
    assert own[0].endswith(_ADVICE), job.text
    assert _frames(job) == ["program.py", "program.py", "api.py"], job.text
    assert job.err.count("in attend") == 1, job.text
    sentence = job.err.find("burst-rt: rank 1: burst_rt.errors.InputError: burst_attention: q must")
    assert 0 <= sentence < job.err.index("Traceback"), job.text
    other = re.findall(r"^burst-rt: rank 0: .*", job.err, re.MULTILINE)
    assert len(other) <= 1, job.text
    for line in other:
        assert line.startswith("burst-rt: rank 0: rank 1's burst_rt.errors.InputError: "), job.text
        assert _ADVICE in line, job.text
    if by == "burst-rt run":
        last = job.err.rstrip("\n").split("\n")[-1]
        assert re.fullmatch(
            r"burst-rt: rank 1 failed after \d+\.\d s with burst_rt\.errors\.InputError: "
            rf"burst_attention: q must be .*; {_ADVICE} \(exit code 64\)",
            last,
        ), job.text
    if by != "torchrun":
        assert job.exit_code == InputError.exit_code, job.text


@pytest.mark.parametrize("by", _LAUNCHERS)
def test_the_same_mistake_on_every_rank_is_printed_once(tmp_path: Path, by: Launcher) -> None:
    job = _run(tmp_path, _SOURCE.format(more="1"), by)
    assert job.err.count("in attend") == 1, job.text
    assert _frames(job) == ["program.py", "program.py", "api.py"], job.text


def test_a_developer_may_see_all_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BURST_RT_TRACEBACK", "full")
    job = _run(tmp_path, _SOURCE.format(more="ctx.rank"), "mpirun")
    assert "refusing.py" in job.err, job.text


def test_what_a_rank_failed_with_names_no_second_rank(tmp_path: Path) -> None:
    """Rank 0 goes on after the error, and hears how rank 1 ended."""
    source = """
import time
import torch
import burst_rt
ctx = burst_rt.init()
layout = ctx.layout(1000)
x = torch.randn(1, layout.shard_len, 4, 32, device=ctx.device)
try:
    burst_rt.burst_attention(x[:, ctx.rank :], x, x, layout=layout)
except burst_rt.errors.InputError as error:
    if ctx.rank == 1:
        raise
burst_rt.burst_attention(x, x, x, layout=layout)
"""
    job = _run(tmp_path, source, "mpirun")
    lost = re.findall(r"^burst-rt: rank 0: burst_rt\.errors\.PeerLost: .*", job.err, re.MULTILINE)
    assert len(lost) == 1, job.text
    assert "rank 1 failed (exit code 64) with InputError: burst_attention: q must be" in lost[0]
    assert lost[0].endswith(f"program.py:{source.splitlines().index(source.splitlines()[-1]) + 1})")
