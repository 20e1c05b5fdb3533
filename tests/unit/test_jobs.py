"""Running jobs: found by their number or alone, gone when killed; the terminal's view of them."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading

import msgspec
import pytest
import torch
from click.testing import CliRunner

import burst_rt
from burst_rt.errors import ConfigError, PeerLost
from burst_rt.launch.main import cli
from burst_rt.telemetry.hub import jobs as jobs_module
from burst_rt.telemetry.hub.jobs import announce, find_job, running_jobs
from burst_rt.telemetry.hub.starting import start_hub


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of other tests are not found."""
    monkeypatch.setattr(jobs_module, "_NAME", f"tests-{secrets.token_hex(8)}-")


def test_a_job_is_found_and_only_its_user_may_read_it() -> None:
    with os.fdopen(announce("unix:/nowhere", "secret")) as file:
        assert os.fstat(file.fileno()).st_mode & 0o777 == 0o600
        assert os.fstat(file.fileno()).st_nlink == 0
        assert find_job(None) == find_job(os.getpid())
        assert find_job(None).secret == "secret"
        # Where its socket is not seen here, the job is in a container, say.
        assert find_job(None).address == f"unix:/proc/{os.getpid()}/root/nowhere"
    with pytest.raises(ConfigError, match="no job of this user runs here with telemetry"):
        find_job(None)


def _announce_elsewhere(address: str) -> tuple[subprocess.Popen[bytes], int]:
    """Another process that has announced a job; it ends with its standard input."""
    program = (
        "import sys; from burst_rt.telemetry.hub import jobs; jobs._NAME = sys.argv[1]\n"
        "file = jobs.announce(sys.argv[2], 'b'); print(flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, jobs_module._NAME, address],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == b"\n"
    return process, process.pid


def test_one_of_several_must_be_named_and_a_killed_hub_is_gone() -> None:
    with os.fdopen(announce("tcp:one:1", "a")):
        other, pid = _announce_elsewhere("tcp:two:2")
        with other:
            with pytest.raises(
                ConfigError, match=r"several jobs run here; choose one:\n  --attach \d+"
            ):
                find_job(None)
            assert (find_job(pid).address, find_job(pid).secret) == ("tcp:two:2", "b")
            assert [job.pid for job in running_jobs()] == [os.getpid(), pid]
            with pytest.raises(ConfigError, match="no job 999999999 runs here"):
                find_job(999_999_999)
            other.kill()
        assert find_job(None).pid == os.getpid()


def test_what_is_half_written_is_no_job() -> None:
    with os.fdopen(announce("tcp:one:1", "a"), "wb") as file:
        os.ftruncate(file.fileno(), 20)
        assert running_jobs() == []


def test_a_hub_can_be_looked_at_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    hub = start_hub(one_host=True, held=True)
    pid = str(hub._process.pid)
    # As after a login: the variables of its process say nothing here.
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nowhere")
    monkeypatch.setenv("TMPDIR", "/nowhere")
    try:
        shown = CliRunner().invoke(cli, ["top", "--once", "--attach", pid])
        assert shown.exit_code == 0, shown.output
        assert "0 ranks" in shown.output
    finally:
        hub.release()
    assert int(pid) not in [job.pid for job in running_jobs()]


def test_top_shows_ranks_links_and_events(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console
    from telemetry_feed import arrive, beat, call, counters

    from burst_rt.dashboard.links import LinkStates
    from burst_rt.launch.top import render
    from burst_rt.telemetry.messages import HubReport, PostMortemLines
    from burst_rt.telemetry.model.job_model import JobModel

    model = JobModel(1e9)
    for rank in range(2):
        for message in arrive(rank):
            model.apply(0.0, rank, message)
        for i in range(3):
            model.apply(1.0 + i, rank, counters(rank, 1.0 + i, 1 + i))
        model.apply(
            3.0, rank, call(rank, 1, 2.0, (0.0, 0.0, 0.5), (0.0, 0.0, 0.3), (0.5, 0.5, 0.9))
        )
        model.apply(3.0, rank, beat(rank, 3.0, number=4, doing="hop 1", since_s=2.5))
    model.apply(3.5, -1, HubReport(1, "lost", "its connection ended"))
    links = LinkStates()
    links.look(model.timeline(-5.0))
    Console(width=100).print(render(model.snapshot(), links.now(model.snapshot()), [3.0, 2.0]))
    shown = capsys.readouterr().out
    assert all(words in shown for words in ("● live", "✕ lost", "call 4, hop 1", "1 kB/s"))
    assert "1 → 0 silent" in shown
    assert "rank 1 lost: its connection ended" in shown
    told = PostMortemLines(heading=["first to stop: rank 1"], advice=["look [there]"], whole=[])
    model.apply(4.0, -1, told)
    Console(width=100).print(render(model.snapshot(), [], []))
    assert "first to stop: rank 1\nlook [there]\n" in capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 100
    assert "of a step" not in shown  # the job has none
    counts = msgspec.structs.replace(counters(0, 5.0, 4), steps=2, step_s=4.0, step_call_s=1.64)
    model.apply(5.0, 0, counts)
    Console(width=100).print(render(model.snapshot(), [], []))
    assert "attention is 41 % of a step" in capsys.readouterr().out


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_top_shows_whole_columns_at_any_width(
    capsys: pytest.CaptureFixture[str], width: int, gpu: bool
) -> None:
    from rich.console import Console
    from telemetry_feed import arrive, beat, gpu_sample

    from burst_rt.launch.top import render
    from burst_rt.telemetry.messages import HubReport, SourceSample
    from burst_rt.telemetry.model.job_model import JobModel

    model = JobModel(1e9)
    own = {
        "compute_percent": 85.0,
        "wait_percent": 8.0,
        "outside_percent": 7.0,
        "process_percent": 57.0,
        "rss_bytes": 6.3e8,
        "sent_bytes_per_s": 2.8e7,
    }
    for rank in range(12):
        for message in arrive(rank, 12, gpu=gpu):
            model.apply(0.0, rank, message)
        model.apply(3.0, rank, beat(rank, 3.0, number=932, doing="hop 11 q1 kv10", since_s=2.9))
        model.apply(
            3.0,
            rank,
            SourceSample(f"rank:{rank}", beat(rank, 3.0).sent_s, own | {"flops_per_s": 3.2e10}),
        )
        if gpu:
            model.apply(3.0, rank, gpu_sample(rank, 3.0, 690.0))
    model.apply(3.5, -1, HubReport(11, "lost", "its connection ended"))
    for rank in range(6):
        model.apply(4.0, -1, HubReport(rank, "lost", "its connection ended"))
    Console(width=width).print(render(model.snapshot(), [], []))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    header = lines[2].split()
    assert header[:2] == ["rank", "state"]
    assert header[-1] == "doing"
    assert ("power" in header) == (gpu and width >= 80)
    assert ("memory" in header) == (width >= 80)
    assert "computes" in header
    # Where there is room, a bar shows it, too.
    assert any("█" in line for line in lines) == (width >= 100)
    assert ("away" in header) == (width >= (100 if gpu else 80))
    assert ("flop/s" in header) == (width >= (120 if gpu else 100))
    assert ("calls" in header) == (width >= 120)
    for line in lines[3:15]:
        # Cut is only what a rank does, and that has room.
        assert "…" not in line[: lines[2].index("doing")]
        assert width < 80 or "hop 11 q1" in line or "ended" in line or "connection" in line
    # Who was lost first stands above the rest, though five more have ended since.
    assert lines[15].split()[:6] == ["3.5", "s", "first:", "rank", "11", "lost:"]


def test_an_interrupt_ends_ranks_that_are_threads() -> None:
    """Ctrl-C in a notebook: the threads went on for ever."""
    ended: list[int] = []
    main_thread = threading.get_ident()

    def main(ctx: burst_rt.Context) -> None:
        try:
            while True:
                ctx.all_reduce(torch.ones(1))
                if ctx.rank == 0 and not ended:
                    signal.pthread_kill(main_thread, signal.SIGALRM)
                    ended.append(-1)
        finally:
            ended.append(ctx.rank)

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            burst_rt.run_local(2, main)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert sorted(ended) == [-1, 0, 1]
    with burst_rt.init() as ctx:
        ctx.runtime.broken = KeyboardInterrupt()
        with pytest.raises(PeerLost, match=r"broke in an earlier call \(KeyboardInterrupt\(\)\)"):
            ctx.all_reduce(torch.ones(1))
