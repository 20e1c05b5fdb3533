"""A training that is started again with other ranks goes on step for step, whoever starts it.

Losses are compared with those of one process: on another number of ranks they are equal up to
rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import psutil
import pytest
from launchers import mpirun

import burst_rt
from burst_rt.errors import ConfigError
from burst_rt.launch.mpirun import find_launcher, kill_job
from burst_rt.launch.train.config import RunOptions, TrainConfig, option_name
from burst_rt.launch.train.loop import train

_WAIT_S = 120.0
_STEPS = 160
_CONFIG = TrainConfig(
    seq_len=251, batch=2, layers=2, dim=32, heads=4, kv_heads=2, steps=_STEPS, warmup=5,
    eval_every=0, eval_sequences=2, checkpoint_every=10, context_parallel=2, data=argparse.__file__,
)  # fmt: skip
_OPTIONS = [
    word
    for entry in fields(TrainConfig)
    if getattr(_CONFIG, entry.name) != entry.default
    for word in (option_name(entry.name), str(getattr(_CONFIG, entry.name)))
]
_TRAIN = ["-m", "burst_rt.launch.train", *_OPTIONS, "--elastic", "--out", "run"]


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Those of one process, by step."""
    options = RunOptions(out=tmp_path_factory.mktemp("one") / "run", progress="none", elastic=True)
    burst_rt.run_local(1, lambda world: train(world, _CONFIG, options, {}), timeout_s=60)
    assert options.out is not None
    return _losses(options.out)


def _losses(run: Path) -> list[float]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record["loss"] for record in records]


@contextmanager
def _running(
    command: list[str], folder: Path, settings: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A command in a session of its own; what is left of it is killed at the end of the block."""
    process = subprocess.Popen(
        command, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"} | (settings or {}),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            kill_job(process)
        if process.stdout is not None and not process.stdout.closed:
            process.communicate()


def _wait_for_steps(folder: Path, num_steps: int, process: subprocess.Popen[str]) -> None:
    path = folder / "run" / "metrics.jsonl"
    deadline_s = time.monotonic() + _WAIT_S
    while not path.exists() or path.read_bytes().count(b"\n") < num_steps:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def _ranks(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The ranks below a launcher: those of its processes that train and have no children."""
    found = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if {"burst_rt.launch.train", "train"} & {*child.cmdline()} and not child.children()
    ]
    assert found
    return found


def _end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=_WAIT_S)
    return process.returncode, out, err


def test_a_run_goes_on_with_fewer_ranks_and_then_with_all(
    tmp_path: Path, losses: list[float]
) -> None:
    command = [sys.executable, "-P", "-m", "burst_rt.launch.main", "train", *_TRAIN[2:]]
    told = {}
    for num_ranks, until in ((4, 25), (3, 60), (4, None)):
        with _running([*command, "-n", str(num_ranks)], tmp_path) as process:
            if until is not None:
                _wait_for_steps(tmp_path, until, process)
                _ranks(process)[-1].kill()
            code, out, err = _end(process)
        assert code == (0 if until is None else mpirun().killed), err
        told[until] = out
        if until is not None:
            assert f"resume with: burst-rt train -n {num_ranks} --elastic --out run" in err
    assert "training: " in told[25]
    assert "ranks: 4 (2 data x 2 context)" in told[25]
    assert re.search("resuming after step (20|30):", told[60])
    assert "ranks: 3 (1 data x 3 context)" in told[60]
    assert "--context-parallel 3 in place of 2\n" in told[60]
    assert "ranks: 4 (2 data x 2 context)" in told[None]
    assert " in place of " not in told[25] + told[None]
    assert _losses(tmp_path / "run") == pytest.approx(losses, rel=1e-4)


def test_torchrun_goes_on_with_the_agent_that_is_left(tmp_path: Path, losses: list[float]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def agent(has_store: bool) -> list[str]:
        # Torch's 15 s and 30 s would make the test long. Within 3 s an agent on a machine with much
        # other work gives no sign, or starts that much later.
        conf = f"is_host={has_store},keep_alive_interval=2,keep_alive_max_attempt=4"
        return [
            sys.executable, "-P", "-m", "torch.distributed.run", "--nnodes=1:2",
            "--nproc-per-node=2", "--max-restarts=3", "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{port}",
            f"--rdzv-conf={conf},last_call_timeout=6", *_TRAIN,
        ]  # fmt: skip

    with _running(agent(True), tmp_path) as first, _running(agent(False), tmp_path) as second:
        _wait_for_steps(tmp_path, 25, first)
        second.kill()
        code, out, err = _end(first)
    assert code == 0, (out, err)
    assert "ranks: 4 (2 data x 2 context)" in out
    assert "resuming after step" in out
    assert "ranks: 2 (1 data x 2 context)" in out
    assert _losses(tmp_path / "run") == pytest.approx(losses, rel=1e-4)


_SRUN = """#!/bin/bash
# Starts ranks as the job script's srun would, by mpirun.
while [[ $1 == --* ]]; do shift; done
unset SLURM_JOB_ID
exec {mpirun} --oversubscribe --allow-run-as-root -n $NUM_RANKS "$@"
"""


@pytest.mark.long
def test_the_job_script_for_slurm_requeues_what_failed_and_nothing_else(
    tmp_path: Path, losses: list[float]
) -> None:
    launcher = find_launcher()
    if launcher.family != "Open MPI":
        pytest.skip("the stand-in for srun is Open MPI's mpirun")
    page = (Path(__file__).parents[2] / "docs" / "hosts.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```\n(#!/bin/bash\n.*?)```", page, re.DOTALL)
    assert "--elastic --out runs/hosts" in script
    script = script.replace("runs/hosts", f"run {' '.join(_OPTIONS)} $MORE")
    (tmp_path / "job.sh").write_text(script, encoding="utf-8")
    (tmp_path / "srun").write_text(_SRUN.format(mpirun=launcher.path), encoding="utf-8")
    (tmp_path / "scontrol").write_text('#!/bin/bash\necho "$@" >>asked\n', encoding="utf-8")
    for name in ("srun", "scontrol"):
        (tmp_path / name).chmod(0o755)

    def start(
        num_ranks: int, restarts: int, *more: str, do: Callable[[subprocess.Popen[str]], None]
    ) -> tuple[int, str]:
        """The exit code of the job script, and what it asked of Slurm."""
        settings = {
            "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "NUM_RANKS": str(num_ranks), "MORE": " ".join(more), "SLURM_JOB_ID": "17",
            "SLURM_RESTART_COUNT": str(restarts),
        }  # fmt: skip
        (tmp_path / "asked").write_text("", encoding="utf-8")
        with _running(["bash", "job.sh"], tmp_path, settings) as process:
            do(process)
            code, *_ = _end(process)
        return code, (tmp_path / "asked").read_text(encoding="utf-8")

    def lose_a_rank(process: subprocess.Popen[str]) -> None:
        steps = tmp_path / "run" / "metrics.jsonl"
        done = steps.read_bytes().count(b"\n") if steps.exists() else 0
        _wait_for_steps(tmp_path, done + 20, process)
        _ranks(process)[-1].kill()

    def nothing(process: subprocess.Popen[str]) -> None:
        pass

    assert start(4, 0, "--lr", "-1", do=nothing) == (ConfigError.exit_code, "")
    code, asked = start(4, 0, do=lose_a_rank)
    assert code != 0
    assert asked == "requeue 17\n"
    # The last of three restarts fails too.
    code, asked = start(3, 3, do=lose_a_rank)
    assert (code != 0, asked) == (True, "")
    assert start(3, 1, do=nothing) == (0, "")
    assert _losses(tmp_path / "run") == pytest.approx(losses, rel=1e-4)
