"""Telemetry of real jobs: what it says when a rank is killed, and that nothing of its own, however
broken, hurts a run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from jobs import run_job
from standin import build_standin, with_standin

from burst_rt.launch.run import kill_job
from burst_rt.telemetry.messages import Bye
from burst_rt.telemetry.model.views import Snapshot
from burst_rt.telemetry.read.chrome import write_trace
from burst_rt.telemetry.read.record import Record
from burst_rt.telemetry.read.summary import summarise
from burst_rt.telemetry.read.tape import replay

_TESTS = Path(__file__).parents[1]
_PROGRAM = Path(__file__).parent / "programs" / "watched.py"
_DEADLINE_S = 60.0


def test_a_killed_rank_is_named_with_what_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.record"
    monkeypatch.setenv("BURST_RT_RECORD", str(path))
    job = run_job(_PROGRAM, 4, ["rank", "1"], cwd=tmp_path, timeout_s=_DEADLINE_S)
    assert job.exit_code != 0, job.text
    record = Record(path)
    shown = replay(record).snapshot()
    lost = [event for event in shown.events if event.kind == "lost"]
    assert lost[0].rank == 2, shown.events
    killed_at_s = float((tmp_path / "ended_at").read_text(encoding="utf-8"))
    assert record.header.began_at_s + lost[0].at_s - killed_at_s < 2.0
    # The run's last words say it too.
    assert f"burst-rt: {lost[0].line}" in job.err.splitlines(), job.text
    rank = shown.ranks[2]
    assert (rank.status, shown.job.world_size, len(shown.ranks)) == ("lost", 4, 4)
    assert rank.calls > 0
    assert rank.lanes["network"].size_bytes > 0
    assert shown.plans


def test_a_hub_that_is_killed_in_mid_run_hurts_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BURST_RT_TELEMETRY", "1")
    started_s = time.monotonic()
    job = run_job(
        _PROGRAM, 4, ["hub", "1"], by="mpirun", cwd=tmp_path, timeout_s=_DEADLINE_S, warm="torch"
    )
    assert job.exit_code == 0, job.text
    assert "right" in job.out, job.text
    assert (tmp_path / "ended_at").exists()
    assert time.monotonic() - started_s < _DEADLINE_S
    assert "Traceback" not in job.err, job.text


_LATE = """
import time, torch, burst_rt
with burst_rt.init() as ctx:
    layout = ctx.layout(TOKENS)
    shape = 1, layout.shard_len, 4, 64
    q, k, v = (torch.randn(shape, device=ctx.device) for _ in range(3))
    took_s = 0.0
    for _ in range(8):
        if ctx.rank == 1:
            # On a busy machine a call takes seconds, and the others less while this one sleeps.
            time.sleep(max(0.2, 2 * took_s))
        FIRST
        started_s = time.perf_counter()
        burst_rt.burst_attention(q, k, v, causal=True, layout=layout)
        took_s = time.perf_counter() - started_s
"""


# With 96 tokens the others are idle while rank 1 sleeps, with 4,608 they have tiles to compute. A
# reduction before the call is where the ranks meet.
@pytest.mark.parametrize(
    ("tokens", "first"), [(96, ""), (4_608, ""), (96, "ctx.all_reduce(torch.ones(1))")]
)
def test_a_rank_that_sleeps_before_calls_is_named_with_what_it_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: int, first: str
) -> None:
    path, program = tmp_path / "run.record", tmp_path / "late.py"
    source = _LATE.replace("TOKENS", str(tokens)).replace("FIRST", first)
    program.write_text(source, encoding="utf-8")
    monkeypatch.setenv("BURST_RT_RECORD", str(path))
    job = run_job(program, 3, cwd=tmp_path, timeout_s=_DEADLINE_S, warm="torch")
    assert job.exit_code == 0, job.text
    found = summarise(Record(path))
    assert found.latecomer is not None, found
    assert found.latecomer.rank == 1
    assert all(found.ranks[rank].late_s > found.ranks[1].late_s for rank in (0, 2))
    verdict = replay(Record(path)).snapshot().job.verdict
    assert verdict is not None
    # On a busy machine the lack of cores may cost more.
    assert verdict.kind == "full host" or (verdict.kind, verdict.rank) == ("late rank", 1), verdict


# The neighbours begin once the ranks have started, which would take long beside them. They end by
# themselves, should the job not end them.
_NEIGHBOURS = r"""
import os, subprocess, sys, torch, burst_rt
spinning = "import time\nends_s = time.monotonic() + 60\nwhile time.monotonic() < ends_s: pass"
with burst_rt.init() as ctx:
    beside = range(2 * os.cpu_count() if ctx.rank == 0 else 0)
    neighbours = [subprocess.Popen([sys.executable, "-c", spinning]) for _ in beside]
    try:
        layout = ctx.layout(6_144)
        q = torch.randn(1, layout.shard_len, 4, 64, device=ctx.device)
        for _ in range(10):
            burst_rt.burst_attention(q, q, q, causal=True, layout=layout)
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()
"""


def test_a_job_among_busy_neighbours_says_that_its_host_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, program = tmp_path / "run.record", tmp_path / "busy.py"
    program.write_text(_NEIGHBOURS, encoding="utf-8")
    monkeypatch.setenv("BURST_RT_RECORD", str(path))
    job = run_job(program, 2, cwd=tmp_path, timeout_s=2 * _DEADLINE_S, warm="torch")
    assert job.exit_code == 0, job.text
    verdict = replay(Record(path)).snapshot().job.verdict
    assert verdict is not None
    assert verdict.kind == "full host", verdict
    assert re.search(rf"2 ranks on {os.cpu_count()} cores, each gets \d+ % of one", verdict.text)


# What a program does before each of its calls, and what its record must say of it: the kind of the
# verdict, and the rank. On a busy machine something else may cost more, a lack of cores mostly.
_SLOW = {
    "reads": ("with span('data'): time.sleep(0.1)", "input pipeline", None),
    "one rank reads": (
        "with span('data'): time.sleep(0.3 * (ctx.rank == 1))", "input pipeline", 1
    ),
    "rank 0 saves": ("with span('checkpoint'): time.sleep(0.3 * (ctx.rank == 0))", "checkpoint", 0),
    "fresh masks": (
        "mask = burst_rt.Documents([512 - i, i + 1]) & burst_rt.Causal()", "planning", None
    ),
    "is stopped": ("if ctx.rank == 1: stop()", "late rank", 1),
}  # fmt: skip
_SLOW_PROGRAM = """
import os, signal, subprocess, time, torch, burst_rt
from burst_rt.telemetry import span

def stop():
    with subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -CONT {os.getpid()}"]):
        os.kill(os.getpid(), signal.SIGSTOP)

mask = burst_rt.Causal()
with burst_rt.init() as ctx:
    for i in range(15):
        BEFORE
        layout = ctx.layout(513)
        q = torch.randn(1, layout.shard_len, 2, 64, device=ctx.device)
        burst_rt.burst_attention(q, q, q, mask=mask, layout=layout)
"""


@pytest.mark.parametrize("slow", _SLOW)
def test_what_makes_a_job_slow_on_purpose_is_the_verdict(
    slow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, kind, rank = _SLOW[slow]
    program = tmp_path / "slow.py"
    program.write_text(_SLOW_PROGRAM.replace("BEFORE", before), encoding="utf-8")
    seen = []
    for attempt in range(3):
        path = tmp_path / f"{attempt}.record"
        monkeypatch.setenv("BURST_RT_RECORD", str(path))
        job = run_job(program, 2, cwd=tmp_path, timeout_s=_DEADLINE_S, warm="torch")
        assert job.exit_code == 0, job.text
        verdict = replay(Record(path)).snapshot().job.verdict
        assert verdict is not None
        if verdict.kind == "full host" or (verdict.kind == kind and rank in (None, verdict.rank)):
            return
        seen.append(verdict)
    raise AssertionError(seen)


_STEPS = """
import time, torch, burst_rt
from burst_rt.telemetry import span, step
with burst_rt.init() as ctx:
    layout = ctx.layout(512)
    shape = 1, layout.shard_len, 4, 64
    q, k, v = (torch.randn(shape, device=ctx.device, requires_grad=True) for _ in range(3))
    for _ in range(5):
        with step():
            with span("forward"):
                out = burst_rt.burst_attention(q, k, v, causal=True, layout=layout)
            with span("backward"):
                out.sum().backward()
            with span("optimizer"):
                time.sleep(0.05)
"""


def test_steps_and_spans_of_a_job_are_in_its_record_and_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, program = tmp_path / "run.record", tmp_path / "steps.py"
    program.write_text(_STEPS, encoding="utf-8")
    monkeypatch.setenv("BURST_RT_RECORD", str(path))
    job = run_job(program, 2, cwd=tmp_path, timeout_s=_DEADLINE_S, warm="torch")
    assert job.exit_code == 0, job.text
    model = replay(Record(path))
    shown, view = model.snapshot(), model.timeline(0.0)
    names = ["forward", "backward", "optimizer", ""]
    for rank in shown.ranks:
        own = [
            phase for phase in view.phases if phase.rank == rank.rank and phase.name != "planning"
        ]
        assert [(p.step, p.name) for p in own] == [(s, n) for s in range(1, 6) for n in names]
        calls = [call for call in view.calls if call.rank == rank.rank]
        # By one clock: each call lies in the span that made it.
        around = [phase for phase in own if phase.name in ("forward", "backward")]
        for call, phase in zip(calls, around, strict=True):
            assert call.kind == phase.name
            assert all(phase.started_s <= s.issued_s <= phase.ended_s for s in call.spans)
        assert (rank.steps, rank.dropped) == (5, 0)
        assert 0 < rank.step_call_s < rank.step_s - 5 * 0.05
    planned = [p for p in view.phases if p.name == "planning"]
    assert {(p.rank, p.step, p.depth) for p in planned} == {(0, 1, 2), (1, 1, 2)}
    assert shown.job.step_share is not None
    assert 0 < shown.job.step_share < 1
    out = tmp_path / "trace.json"
    write_trace(Record(path), out)
    slices = [e for e in json.loads(out.read_text())["traceEvents"] if e.get("ph") == "X"]
    steps = [(e["pid"], e["name"]) for e in slices if e["cat"] == "step"]
    assert sorted(steps) == [(rank, f"step {n}") for rank in (0, 1) for n in range(1, 6)]
    assert sum(e["cat"] == "span" and e["name"] == "optimizer" for e in slices) == 10


class _Run(NamedTuple):
    """A process that has ended."""

    exit_code: int
    out: str
    err: str
    took_s: float
    shown: Snapshot


# What goes wrong with NVML, as settings of the stand-in; "absent": there is no library.
_TROUBLES: dict[str, Mapping[str, str]] = {
    "none": {},
    "absent": {},
    "fails at a later call": {"STANDIN_FAIL_AFTER": "150"},
    "hangs for 30 s": {"STANDIN_HANG_AFTER": "150"},
    "garbage": {"STANDIN_GARBAGE": "1"},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, _Run]]:
    """A process for each trouble, all at once: most of their time is starting."""
    library = build_standin(tmp_path_factory.mktemp("nvml"))
    folders = {trouble: tmp_path_factory.mktemp("run") for trouble in _TROUBLES}
    started_s = time.monotonic()
    processes = {}
    for trouble, settings in _TROUBLES.items():
        nvml = folders[trouble] if trouble == "absent" else library
        if trouble == "absent":
            (nvml / "libnvidia-ml.so.1").write_text("no library", encoding="utf-8")
        environment = with_standin(
            nvml, BURST_RT_RECORD=str(folders[trouble] / "record"), OMP_NUM_THREADS="1", **settings
        )
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(_TESTS), environment.get("PYTHONPATH", "")]
        ).rstrip(os.pathsep)
        processes[trouble] = subprocess.Popen(
            [sys.executable, str(_PROGRAM), "nobody", "1.5"],
            cwd=folders[trouble],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    ended = {}
    try:
        for trouble, process in processes.items():
            out, err = process.communicate(timeout=_DEADLINE_S)
            took_s = time.monotonic() - started_s
            ended[trouble] = _Run(
                process.returncode, out, err, took_s, _shown(folders[trouble] / "record")
            )
        yield ended
    finally:
        for process in processes.values():
            if process.poll() is None:
                kill_job(process)
                process.wait()


def _shown(path: Path) -> Snapshot:
    """The end of a record, once the hub has written it."""
    deadline_s = time.monotonic() + 5.0
    while not any(isinstance(entry.message, Bye) for entry in Record(path)):
        assert time.monotonic() < deadline_s, "the hub does not end its record"
        time.sleep(0.05)
    return replay(Record(path)).snapshot()


@pytest.mark.parametrize("trouble", _TROUBLES)
def test_a_run_ends_right_whatever_nvml_does(runs: dict[str, _Run], trouble: str) -> None:
    run = runs[trouble]
    assert run.exit_code == 0, run.err
    assert "right" in run.out
    assert "Traceback" not in run.err
    assert run.took_s < 25.0  # not the 30 s that a driver hangs
    (rank,) = run.shown.ranks
    assert (rank.status, rank.exit_code) == ("left", 0)
    assert rank.calls > 10


def test_figures_of_gpus_come_through_or_an_event_says_why_not(runs: dict[str, _Run]) -> None:
    gpus = {
        trouble: {s.name: s for s in run.shown.sources if s.kind == "gpu"}
        for trouble, run in runs.items()
    }
    said = {
        trouble: [e.text for e in run.shown.events if e.kind == "nvml"]
        for trouble, run in runs.items()
    }
    assert gpus["none"]["gpu:0000-1"].values["power_w"] == 123.456
    assert said["none"] == []
    assert (gpus["absent"], said["absent"]) == ({}, [])
    assert any("GPU is lost" in text for text in said["fails at a later call"])
    assert gpus["garbage"]["gpu:0000-0"].values["sm_clock_mhz"] == 1980
    assert "power_w" not in gpus["garbage"]["gpu:0000-0"].values
    assert any("power_w" in text and "is impossible" in text for text in said["garbage"])
    # What came before the driver hung is there.
    assert gpus["hangs for 30 s"]["gpu:0000-0"].values["temperature_c"] == 55


def test_all_contexts_of_a_job_of_torchrun_have_one_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BURST_RT_RECORD", str(tmp_path / "run.record"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    program = Path(__file__).parent / "programs" / "meshed.py"
    job = run_job(program, 4, by="torchrun", cwd=tmp_path, timeout_s=_DEADLINE_S, warm="torch")
    assert job.exit_code == 0, job.text
    assert [path.name for path in tmp_path.glob("*.record*")] == ["run.record"]
    shown = replay(Record(tmp_path / "run.record")).snapshot()
    assert [(rank.rank, rank.calls, rank.status) for rank in shown.ranks] == [
        (rank, 3, "left") for rank in range(4)
    ]
