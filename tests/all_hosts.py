"""More jobs on several hosts, by `make test-all`: Slurm, torchrun, networks to be named."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import time
from pathlib import Path

import pytest
from dashboards import installed
from hosts import Hosts, hosts
from slurm import Slurm, slurm

from burst_rt.launch.run import kill_job
from burst_rt.launch.train.checkpoint import find_checkpoint
from burst_rt.launch.train.config import MACHINE_FILE
from burst_rt.telemetry.read.record import Record
from burst_rt.telemetry.read.tape import replay

_WAIT_S = 120.0
_TRAIN = [
    sys.executable, "-P", "-m", "burst_rt.launch.train", "--seq-len", "251", "--layers", "2",
    "--dim", "32", "--heads", "4", "--kv-heads", "2", "--data", json.__file__,
]  # fmt: skip
# A job's script: what Slurm runs again when it has put the job back into the queue.
_SCRIPT = """#!/bin/bash
srun --kill-on-bad-exit=1 --mpi=pmix {train} --elastic --out run
"""

_HELLO = """
import socket
import torch
import burst_rt
with burst_rt.init(device="cpu") as ctx:
    total = ctx.all_reduce(torch.ones(1))
    print(f"rank {ctx.rank} of {int(total)} on {socket.gethostname()}\\n", end="", flush=True)
"""

_STOPPED = """
import os, signal
import burst_rt
from burst_rt.job import stopped
stopped._MARGIN_S = 1.0
with burst_rt.init(timeout_s=2.0, stall_s=1.0, survey=False) as ctx:
    rank = ctx.rank
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
print("well", flush=True)
"""

_SUSPENDED = """
from pathlib import Path
import torch
import burst_rt
from burst_rt.job import stopped
stopped._MARGIN_S = 1.0
with burst_rt.init(timeout_s=3.0, stall_s=2.0, survey=False) as ctx:
    layout = ctx.layout(512 * ctx.world_size)
    q = torch.randn(1, layout.shard_len, 4, 32, requires_grad=True)
    for turn in range(1_000_000):
        burst_rt.burst_attention(q, q, q, causal=True, layout=layout).sum().backward()
        Path(f"turn-{ctx.rank}").write_text(str(turn))
        if Path("enough").exists() and ctx.all_reduce(torch.ones(1)).item():
            break
print("well", flush=True)
"""

# Waits until the page shows four live ranks, and prints what it shows.
_LOOK = """
import sys
from playwright.sync_api import expect, sync_playwright
with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=sys.argv[1], args=["--no-sandbox"])
    page = browser.new_page()
    page.goto(sys.argv[2])
    expect(page.get_by_text("node2").nth(1)).to_be_visible(timeout=30_000)
    print(page.inner_text("body"))
"""


def _steps(run: Path) -> int:
    """How many steps a run has done."""
    path = run / "metrics.jsonl"
    return len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0


def _wait_for_steps(run: Path, num_steps: int) -> None:
    deadline_s = time.monotonic() + _WAIT_S
    while _steps(run) < num_steps:
        assert time.monotonic() < deadline_s, [
            path.read_text(encoding="utf-8", errors="replace")
            for path in (*run.parent.glob("slurm-*.out"), *run.parent.glob("slurm/*.log"))
        ]
        time.sleep(0.1)


def _resumed_after(batch: Slurm, out: Path) -> int:
    """The step after which a job resumes that was put back into the queue."""
    deadline_s = time.monotonic() + _WAIT_S
    while True:
        said = out.read_text(encoding="utf-8")
        if resumed := re.search(r"resuming after step (\d+)", said):
            return int(resumed[1])
        assert time.monotonic() < deadline_s, (said, batch.ask("squeue"))
        # Slurm would let it wait for two minutes, in which what is left of the step before ends.
        waits = batch.ask("squeue", "--noheader", "--format=%t") == "PD"
        if waits and not any("slurmstepd:" in line for line in batch.here.processes()):
            batch.ask("scontrol", "update", "JobId=1", "StartTime=now")
        time.sleep(0.5)


def test_slurm_starts_requeues_and_kills(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "slurm-1.out"
    often = ["--steps", "1000000", "--checkpoint-every", "5", "--progress", "lines"]
    script = _SCRIPT.format(train=" ".join([*_TRAIN, *often]))
    (tmp_path / "job.sh").write_text(script, encoding="utf-8")
    with hosts(2, tmp_path) as here:
        batch = slurm(here)
        batch.ask("sbatch", "--ntasks=4", "--requeue", "--open-mode=append", "job.sh")
        _wait_for_steps(run, 6)
        # Put back into the queue, it stops with a checkpoint, and goes on from there.
        batch.ask("scontrol", "requeue", "1")
        resumed = _resumed_after(batch, out)
        stopped = re.search(r"stopped by SIGTERM after step (\d+)", out.read_text(encoding="utf-8"))
        assert stopped, out.read_text(encoding="utf-8")
        assert resumed == int(stopped[1])
        _wait_for_steps(run, int(stopped[1]) + 6)
        # A step that is killed is gone, and so is its job; the run can be resumed.
        deadline_s = time.monotonic() + _WAIT_S
        batch.ask("scancel", "--signal=KILL", "1.0")
        here.wait_until_empty(_WAIT_S, but=("slurm", "munged"))
        while batch.ask("squeue", "--noheader"):
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
    manifest = find_checkpoint(run)[1].manifest
    assert manifest.step >= int(stopped[1])


def test_a_rank_that_stays_stopped_under_srun_is_killed(tmp_path: Path) -> None:
    """The only rank of its host: no other process of the job could end it."""
    (tmp_path / "program.py").write_text(_STOPPED, encoding="utf-8")
    with hosts(2, tmp_path) as here:
        command = ["srun", "--nodes=2", "--ntasks=2", "--mpi=pmix", sys.executable, "program.py"]
        job = slurm(here).start(*command)
        assert job.wait(_WAIT_S) == 137, job.text
        here.wait_until_empty(_WAIT_S, but=("slurm", "munged"))
    assert re.search(
        r"rank 1: process \d+ had been stopped by a signal \(SIGSTOP, say\) for 4 s", job.text
    )
    assert job.text.count("well") == 1


def test_a_suspended_job_goes_on(tmp_path: Path) -> None:
    """Suspended for longer than its deadlines together, and than a stopped rank may live."""
    (tmp_path / "program.py").write_text(_SUSPENDED, encoding="utf-8")
    with hosts(2, tmp_path) as here:
        batch = slurm(here)
        command = ["srun", "--nodes=2", "--ntasks=4", "--mpi=pmix", sys.executable, "program.py"]
        job = batch.start(*command)
        _wait_for_turns(tmp_path, 20)
        batch.ask("scontrol", "suspend", "1")
        time.sleep(3.0)
        before = _turns(tmp_path)
        time.sleep(9.0)
        assert _turns(tmp_path) == before
        batch.ask("scontrol", "resume", "1")
        _wait_for_turns(tmp_path, max(before) + 20)
        (tmp_path / "enough").touch()
        assert job.wait(_WAIT_S) == 0, job.text
        here.wait_until_empty(_WAIT_S, but=("slurm", "munged"))
    assert job.text.count("well") == 4, job.text


def _turns(folder: Path) -> list[int]:
    """How many turns each of the four ranks has made."""
    paths = [folder / f"turn-{rank}" for rank in range(4)]
    return [int(path.read_text() or 0) if path.exists() else 0 for path in paths]


def _wait_for_turns(folder: Path, num: int) -> None:
    deadline_s = time.monotonic() + _WAIT_S
    while min(_turns(folder)) < num:
        assert time.monotonic() < deadline_s, _turns(folder)
        time.sleep(0.1)


def test_the_page_s_job_script_puts_a_failed_job_back(tmp_path: Path) -> None:
    *_, by_slurm = _commands(tmp_path)
    run, out = tmp_path / "runs" / "hosts", tmp_path / "slurm-1.out"
    often = "--steps 1000000 --checkpoint-every 5 --progress lines"
    (tmp_path / "job.sh").write_text(by_slurm.replace("--steps 3", often), encoding="utf-8")
    with hosts(2, tmp_path) as here:
        batch = slurm(here)
        batch.ask("sbatch", "job.sh")
        _wait_for_steps(run, 6)
        kill = ["pkill", "-KILL", "--newest", "--full", "bin/burst-rt train"]
        assert here.start("node2", kill).wait(_WAIT_S) == 0
        # The script puts the job back.
        assert _resumed_after(batch, out) >= 5
        batch.ask("scancel", "1")
        here.wait_until_empty(_WAIT_S, but=("slurm", "munged"))


def test_the_job_script_without_mpi(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "examples" / "slurm.sh"
    (tmp_path / "hello.py").write_text(_HELLO, encoding="utf-8")
    with hosts(2, tmp_path, "400mbit") as here:
        batch = slurm(here)
        batch.ask("sbatch", "--wait", "--nodes=2", str(script), "hello.py", within_s=_WAIT_S)
    said = (tmp_path / "slurm-1.out").read_text(encoding="utf-8")
    assert sorted(re.findall(r"rank \d of 4 on \w+", said)) == [
        f"rank {rank} of 4 on node{rank // 2 + 1}" for rank in range(4)
    ], said


def _commands(folder: Path) -> list[str]:
    """The blocks of docs/hosts.md, which train a smaller model here."""
    page = (Path(__file__).parents[1] / "docs" / "hosts.md").read_text(encoding="utf-8")
    smaller = " ".join([*_TRAIN[4:], "--steps", "3", "--out"])
    (folder / "runs").mkdir()
    return [
        block.replace("--out", smaller) for block in re.findall(r"```\n(.*?)```", page, re.DOTALL)
    ]


def test_the_page_can_be_followed_word_for_word(tmp_path: Path) -> None:
    by_mpirun, by_run, by_torchrun, by_slurm = _commands(tmp_path)
    run, record = tmp_path / "runs" / "hosts", tmp_path / "runs" / "hosts.record"

    def has_trained() -> None:
        assert _steps(run) == 3
        shutil.rmtree(run)

    with hosts(2, tmp_path, "400mbit") as here:
        for block in (by_mpirun, by_run):
            job = here.start("login", ["bash", "-e", "-c", block])
            assert job.wait(_WAIT_S) == 0, job.text
            has_trained()
        shown = replay(Record(record)).snapshot()
        assert [rank.host for rank in shown.ranks] == ["node1", "node1", "node2", "node2"]
        jobs = [
            here.start(f"node{i + 1}", ["bash", "-c", line])
            for i, line in enumerate(by_torchrun.splitlines())
        ]
        for job in jobs:
            assert job.wait(_WAIT_S) == 0, job.text
        has_trained()
        (tmp_path / "job.sh").write_text(by_slurm, encoding="utf-8")
        batch = slurm(here)
        batch.ask("sbatch", "--wait", "job.sh", within_s=_WAIT_S)
        has_trained()


def test_the_dashboard_shows_ranks_of_all_hosts(tmp_path: Path) -> None:
    """In a browser on the login node, of a job whose ranks are elsewhere."""
    browser = installed("chromium-headless-shell", "chromium", package="chromium-headless-shell")
    program = str(Path(__file__).parent / "mpi" / "programs" / "host_trouble.py")
    with hosts(2, tmp_path, "400mbit") as here:
        command = [sys.executable, "-P", "-m", "burst_rt.launch.main", "run", "-n", "4"]
        command += ["--dashboard", "--mpi-arg=--hostfile", f"--mpi-arg={here.hostfile()}", program]
        job = here.start("login", command)
        assert job.process.stderr is not None
        link = next(
            found[0] for line in job.process.stderr if (found := re.search(r"http://\S+", line))
        )
        deadline_s = time.monotonic() + _WAIT_S
        while len(list(tmp_path.glob("begun-*"))) < 4:
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        look = [sys.executable, "-P", "-c", _LOOK, browser, link]
        page = here.start("login", look)
        assert page.wait(_WAIT_S) == 0, page.text
        kill_job(job.process)
        here.wait_until_empty(_WAIT_S)
    for rank in range(4):
        place = f"rank {rank}\n● live\nnode{rank // 2 + 1} · cpu\n"
        assert place in page.out, page.text


@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
def test_torchrun_with_two_groups(tmp_path: Path, rendezvous: str) -> None:
    """Two groups of two ranks, a sequence each: gloo has to be told of the network."""
    options = ["--batch", "2", "--context-parallel", "2", "--steps", "3", "--out", "run"]
    with hosts(2, tmp_path, "400mbit") as here:
        how = ["--rdzv-backend=c10d", "--rdzv-endpoint=node1:29400"] if rendezvous == "c10d" else []
        jobs = here.torchrun([*_TRAIN[2:], *options], {"GLOO_SOCKET_IFNAME": "eth0"}, how)
        for job in jobs:
            assert job.wait(_WAIT_S) == 0, job.text
        here.wait_until_empty(10.0)
    assert "ranks: 4 (2 data x 2 context)" in jobs[0].out, jobs[0].text
    assert _steps(tmp_path / "run") == 3


def test_a_run_that_goes_on_over_another_network_gives_the_same_bits(tmp_path: Path) -> None:
    """The machine that its first ranks measured is part of the run."""
    often = ["--steps", "12", "--checkpoint-every", "4", "--batch", "1", "--progress", "lines"]
    wide = ["--seq-len", "2000", "--heads", "8", "--kv-heads", "8", "--data", argparse.__file__]
    program = [*_TRAIN, *often, *wide]
    settings = {"BURST_RT_HARDWARE": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def measured(run: str) -> str:
        return (tmp_path / run / MACHINE_FILE).read_text(encoding="utf-8")

    def losses(run: str) -> list[float]:
        lines = (tmp_path / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["loss"] for line in lines]

    def finish(here: Hosts, run: str, *options: str) -> None:
        job = here.mpirun([*program, "--out", run, *options], settings)
        assert job.wait(_WAIT_S) == 0, job.text

    with hosts(2, tmp_path, "2gbit") as here:
        job = here.mpirun([*program, "--out", "fast"], settings)
        _wait_for_steps(tmp_path / "fast", 6)
        kill_job(job.process)
        here.wait_until_empty(_WAIT_S)
        shutil.copytree(tmp_path / "fast", tmp_path / "slow")
        finish(here, "fast", "--resume")
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    with hosts(2, tmp_path, "20mbit") as here:
        finish(here, "slow", "--resume")
        finish(here, "new")
    assert len(losses("slow")) == 12
    assert losses("slow") == losses("fast"), "bit for bit"
    assert measured("slow") == measured("fast")
    # A run that begins there measures another machine.
    assert measured("new") != measured("fast")
