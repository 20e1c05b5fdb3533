"""Jobs on several hosts, under a real mpirun and a real torchrun: the hosts are namespaces of this
machine (`hosts.py`). `make test-all` has more of them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import pytest
from hosts import Hosts, Running, hosts

import burst_rt
from burst_rt.launch.train.config import RunOptions, TrainConfig
from burst_rt.launch.train.loop import train
from burst_rt.planning.machines import parse_hardware
from burst_rt.telemetry.read.record import Record
from burst_rt.telemetry.read.tape import replay

_TROUBLE = str(Path(__file__).parent / "programs" / "host_trouble.py")
_SURVEY = str(Path(__file__).parent / "programs" / "host_survey.py")
# On a busy machine four ranks take long to start.
_START_S = 120.0
# From a call's deadline to the end of the rank's process.
_LEAVING_S = 5.0  # for ranks to end
# For launchers, and what they leave: these take seconds of their own on a machine with other work.
_LAUNCHER_S = 30.0
_STALL_S, _TIMEOUT_S = 2.0, 4.0  # of the program
_CONFIG = TrainConfig(
    seq_len=251, batch=2, layers=2, dim=32, heads=4, kv_heads=2, steps=4, warmup=2,
    eval_sequences=2, data=argparse.__file__,
)  # fmt: skip
By = Literal["mpirun", "torchrun"]


def _train_command(out: str) -> list[str]:
    """The command that trains as `_CONFIG` says."""
    chosen = {
        name: value
        for name, value in vars(_CONFIG).items()
        if value != getattr(TrainConfig(), name)
    }
    options = [
        word
        for name, value in chosen.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    return ["-m", "burst_rt.launch.train", *options, "--out", out, "--progress", "none"]


def _losses(run: Path) -> list[float]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Those of four ranks on one host."""
    run = tmp_path_factory.mktemp("run")
    options = RunOptions(out=run, progress="none")
    burst_rt.run_local(4, lambda world: train(world, _CONFIG, options, {}), timeout_s=60)
    return _losses(run)


@pytest.mark.parametrize("by", ["mpirun", "torchrun"])
def test_training_and_its_telemetry(tmp_path: Path, losses: list[float], by: By) -> None:
    with hosts(2, tmp_path, "400mbit") as here:
        settings = {"BURST_RT_RECORD": str(tmp_path / "record")}
        for job in _start(here, by, _train_command("run"), settings):
            assert job.wait(_START_S) == 0, job.text
        here.wait_until_empty(_LAUNCHER_S)
    assert _losses(tmp_path / "run") == pytest.approx(losses, rel=1e-4)
    shown = replay(Record(tmp_path / "record")).snapshot()
    assert [rank.host for rank in shown.ranks] == ["node1", "node1", "node2", "node2"]
    assert {(rank.status, rank.exit_code) for rank in shown.ranks} == {("left", 0)}
    assert all(rank.calls for rank in shown.ranks)


def _start(
    here: Hosts, by: By, program: list[str], settings: dict[str, str] | None = None
) -> list[Running]:
    """Starts a program of Python's on two ranks of each host."""
    if by == "mpirun":
        return [here.mpirun([sys.executable, "-P", *program], settings)]
    return here.torchrun(program, settings)


@pytest.mark.parametrize("by", ["mpirun", "torchrun"])
def test_a_job_measures_the_network_between_its_hosts(tmp_path: Path, by: By) -> None:
    # Two ranks share 25 MB/s, one card. What they get varies where others use the machine.
    figures = []
    with hosts(2, tmp_path, "200mbit") as here:
        for attempt in range(3):
            cache = str(tmp_path / str(attempt))
            settings = {"BURST_RT_HARDWARE": "", "XDG_CACHE_HOME": cache}
            jobs = _start(here, by, [_SURVEY], settings)
            assert [job.wait(_START_S) for job in jobs] == [0] * len(jobs), jobs[0].text
            said = "".join(job.out for job in jobs)
            machine = parse_hardware(said[said.index("name =") :], "said")
            assert machine.node.ranks == 2
            assert machine.nics is not None
            count, rate = machine.nics.count, machine.nics.link.bytes_per_s
            figures.append((count, rate, machine.node.link.bytes_per_s))
            if count == 1 and 12e6 < rate < min(38e6, figures[-1][2] / 2):
                return
    raise AssertionError(f"cards, bytes per second of one, and of a link in a host: {figures}")


class _End(NamedTuple):
    """How a rank ended."""

    after_s: float
    error: str
    text: str


def _wait_for_calls(folder: Path, jobs: list[Running]) -> None:
    """Blocks until all four ranks of the program are in mid-call."""
    deadline_s = time.monotonic() + _START_S
    while len(list(folder.glob("begun-*"))) < 4:
        ended = [job for job in jobs if job.process.poll() is not None and job.wait(_LAUNCHER_S)]
        assert not ended, ended[0].text
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    time.sleep(0.3)


def _ends(folder: Path, since_s: float) -> dict[int, _End]:
    """How ranks ended, by rank, as far as they lived to note it."""
    found = {}
    for path in folder.glob("ended-*"):
        at_s, error, text = path.read_text(encoding="utf-8").split(" ", 2)
        rank = int(path.name.removeprefix("ended-"))
        found[rank] = _End(float(at_s) - since_s, error, text)
    return found


_CALLS = """
import torch, burst_rt
with burst_rt.init(survey=False) as ctx:
    layout = ctx.layout(2048)
    q = torch.randn(1, layout.shard_len, 8, 64)
    for _ in range(8):
        burst_rt.burst_attention(q, q, q, layout=layout)
"""


def test_a_slow_link_is_what_limits_a_job(tmp_path: Path) -> None:
    """A call's keys and values take a third of a second, its tiles a tenth of that."""
    with hosts(2, tmp_path, "100mbit") as here:
        settings = {"BURST_RT_RECORD": str(tmp_path / "record")}
        job = here.mpirun([sys.executable, "-c", _CALLS], settings, slots=1)
        assert job.wait(_START_S) == 0, job.text
    verdict = replay(Record(tmp_path / "record")).snapshot().job.verdict
    assert verdict is not None
    assert verdict.kind == "transfers", verdict
    assert verdict.share > 0.3


@pytest.mark.parametrize("by", ["mpirun", "torchrun"])
def test_a_link_that_is_cut_in_mid_call(tmp_path: Path, by: By) -> None:
    with hosts(2, tmp_path, "100mbit") as here:
        jobs = _start(here, by, [_TROUBLE])
        _wait_for_calls(tmp_path, jobs)
        here.do("cut 2")
        cut_s = time.time()
        # Open MPI's own processes wait for the link.
        within_s = max(_STALL_S, _TIMEOUT_S) + _LEAVING_S
        here.wait_until_empty(within_s, but=("mpirun", "prte", "ssh") if by == "mpirun" else ())
        if by == "torchrun":
            assert [job.wait(_LAUNCHER_S) for job in jobs] == [1, 1], jobs[0].text
    ends = _ends(tmp_path, cut_s)
    # Once a rank has failed, its host's other one may be ended before it finds out itself.
    assert {rank // 2 for rank in ends} == {0, 1}, ends
    for end in ends.values():
        assert end.error in ("Stalled", "PeerLost"), end
        assert end.after_s < _TIMEOUT_S + 1.0, end
        assert "stall_s" in end.text or "timeout_s" in end.text or end.error == "PeerLost", end


def test_a_host_that_is_lost_under_torchrun_and_a_dashboard(tmp_path: Path) -> None:
    record = tmp_path / "record"
    with hosts(2, tmp_path, "100mbit") as here:
        settings = {"BURST_RT_RECORD": str(record), "BURST_RT_METRICS_PORT": "9470"}
        jobs = here.torchrun([_TROUBLE], settings)
        _wait_for_calls(tmp_path, jobs)
        fetch = (
            "import urllib.request as u;"
            "print(u.urlopen('http://127.0.0.1:9470/metrics').read().decode())"
        )
        page = here.start("node1", [sys.executable, "-I", "-c", fetch])
        assert page.wait(_LAUNCHER_S) == 0, page.text
        here.do("kill_host 2")
        lost_s = time.time()
        # The first host is told, the second is gone.
        assert jobs[0].wait(_LAUNCHER_S) == 1, jobs[0].text
        here.wait_until_empty(_LAUNCHER_S)
    for rank in range(4):
        labels = f'host="node{rank // 2 + 1}",rank="{rank}",status="live"'
        assert f"burst_rt_rank_status{{{labels}}} 1.0" in page.out, page.out
    # torchrun ends the second rank of a host once the first has failed.
    ends = _ends(tmp_path, lost_s)
    assert set(ends) <= {0, 1}, ends
    assert {end.error for end in ends.values()} == {"PeerLost"}, ends
    assert min(end.after_s for end in ends.values()) < _LEAVING_S, ends
    _assert_that_node2_was_lost(record)


def _assert_that_node2_was_lost(record: Path) -> None:
    shown = replay(Record(record)).snapshot()
    first, *_ = [event.rank for event in shown.events if event.kind == "lost"]
    assert shown.ranks[first].host == "node2", shown.events
    # One of the two was seen to be lost after the other.
    assert {shown.ranks[rank].status for rank in (2, 3)} <= {"lost", "ended"}, shown.events


def test_a_host_that_is_lost_under_mpirun_and_a_hub_elsewhere(tmp_path: Path) -> None:
    """`burst-rt run` has its hub on its own host, here one without ranks."""
    record = tmp_path / "record"
    with hosts(2, tmp_path, "100mbit") as here:
        command = [sys.executable, "-P", "-m", "burst_rt.launch.main", "run", "-n", "4"]
        command += ["--record", str(record), "--mpi-arg=--hostfile"]
        job = here.start("login", [*command, f"--mpi-arg={here.hostfile()}", _TROUBLE])
        _wait_for_calls(tmp_path, [job])
        here.do("kill_host 2")
        assert job.wait(_LAUNCHER_S) != 0, job.text
        here.wait_until_empty(_LAUNCHER_S)
    err = job.err.replace("\0", "")  # Open MPI's abort leaves a NUL byte in the output
    assert re.search("^burst-rt: .*rank [23] lost: its connection closed", err, re.M), job.text
    _assert_that_node2_was_lost(record)


def test_a_job_goes_on_without_a_host_that_is_lost(tmp_path: Path) -> None:
    """Two ranks of four are gone with their host; the training goes on with the others."""
    steps = 60
    run = tmp_path / "run"
    with hosts(2, tmp_path, "100mbit") as here:
        command = [sys.executable, "-P", "-m", "burst_rt.launch.main", "run", "-n", "4"]
        command += ["--restarts", "2", "--min-ranks", "2", "--mpi-arg=--hostfile"]
        command += [f"--mpi-arg={here.hostfile()}", *_train_command("run"), "--elastic"]
        command += ["--steps", str(steps), "--checkpoint-every", "5", "--context-parallel", "4"]
        job = here.start("login", command)
        deadline_s = time.monotonic() + _START_S
        while not run.exists() or not (run / "checkpoints" / "step-00000010").exists():
            assert job.process.poll() is None, (job.wait(_LAUNCHER_S), job.text)
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        here.do("kill_host 2")
        assert job.wait(_START_S) == 0, job.text
        here.wait_until_empty(_LAUNCHER_S)
    assert "burst-rt: no answer from node2; the other hosts have slots for 2 of 4 ranks" in job.err
    options = RunOptions(out=tmp_path / "one", progress="none")
    config = replace(_CONFIG, steps=steps)
    burst_rt.run_local(1, lambda world: train(world, config, options, {}), timeout_s=60)
    assert _losses(run) == pytest.approx(_losses(tmp_path / "one"), rel=1e-4)
    records = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in records] == list(range(1, steps + 1))
