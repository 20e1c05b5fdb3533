"""A job that is started again: how often, on which hosts, and what a training does with fewer
ranks.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import burst_rt
from burst_rt.errors import ConfigError, InputError
from burst_rt.job import launched
from burst_rt.launch import hosts
from burst_rt.launch.hosts import Placement, place_again
from burst_rt.launch.mpirun import MpiLauncher
from burst_rt.launch.run import command
from burst_rt.launch.train import claim as claims
from burst_rt.launch.train.checkpoint import Manifest, resolve
from burst_rt.launch.train.claim import claim, look
from burst_rt.launch.train.config import RunOptions, TrainConfig
from burst_rt.launch.train.loop import train

_VARIABLES = ("BURST_RT_RESTARTS", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ((None, None, None), 0),
        ((None, "2", None), 2),
        ((None, None, "3"), 3),
        ((None, "2", "3"), 5),  # torchrun in a job of Slurm's
        (("4", "2", "3"), 4),  # burst-rt run has counted Slurm's
        (("0", None, "3"), 0),
    ],
)
def test_how_often_a_job_was_restarted(
    told: tuple[str | None, ...], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in zip(_VARIABLES, told, strict=True):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert launched.restarts() == expected
    assert burst_rt.run_local(1, lambda ctx: ctx.restarts) == [expected]


def _asked(**values: Any) -> TrainConfig:
    return TrainConfig(seq_len=64, **values)


@pytest.mark.parametrize(
    ("asked", "world_size", "context_parallel", "strategy"),
    [
        # What fits stays.
        (_asked(context_parallel=2, batch=2), 4, 2, "auto"),
        (_asked(context_parallel=2, batch=2), 2, 2, "auto"),
        (_asked(strategy="ring-kv"), 3, None, "ring-kv"),
        # Groups of two cannot be made of three ranks; three groups cannot share two sequences.
        (_asked(context_parallel=2, batch=2), 3, 3, "auto"),
        (_asked(context_parallel=4, batch=1), 2, 2, "auto"),
        (_asked(context_parallel=4, batch=6), 3, 3, "auto"),
        (_asked(context_parallel=2, batch=2), 1, 1, "auto"),
        # The next larger group comes first.
        (_asked(context_parallel=4, batch=4), 6, 6, "auto"),
        (_asked(context_parallel=4, batch=4), 12, 6, "auto"),
        (_asked(context_parallel=4, batch=6), 12, 4, "auto"),
        # A strategy of groups, and one that divides heads.
        (_asked(strategy="hybrid:2"), 3, None, "auto"),
        (_asked(strategy="hybrid:2"), 2, None, "hybrid:2"),
        (_asked(strategy="all-to-all", heads=4, kv_heads=4), 3, None, "auto"),
    ],
)
def test_the_mesh_of_fewer_ranks(
    asked: TrainConfig, world_size: int, context_parallel: int | None, strategy: str
) -> None:
    kept, config = resolve(asked, {}, None, world_size, elastic=True)
    assert kept == asked
    assert (config.context_parallel, config.strategy) == (context_parallel, strategy)
    config.validate(world_size)
    if config != asked:
        with pytest.raises(ConfigError, match=r"--context-parallel|--strategy|--batch"):
            resolve(asked, {}, None, world_size)


def test_what_no_mesh_can_run_is_refused() -> None:
    for asked, words in ((_asked(lr=-1.0), "--lr"), (_asked(layout="diagonal"), "--layout")):
        with pytest.raises(ConfigError, match=words):
            resolve(asked, {}, None, 3, elastic=True)


def test_only_an_elastic_run_may_have_no_step_left() -> None:
    done = Manifest(5, _asked(steps=5), "text")
    with pytest.raises(ConfigError, match="no step is left"):
        resolve(_asked(), {}, done, 1)
    assert resolve(_asked(), {}, done, 1, elastic=True)[1].steps == 5


_TINY = TrainConfig(seq_len=9, steps=3, layers=1, dim=8, heads=1, kv_heads=1, checkpoint_every=2)


def _train(folder: Path) -> Mapping[str, Any]:
    (folder / "text").write_text("some text " * 999)
    options = RunOptions(out=folder / "run", elastic=True, progress="none")
    config = replace(_TINY, data=str(folder / "text"))
    (summary,) = burst_rt.run_local(
        1, lambda world: train(world, config, options, {}), timeout_s=20
    )
    assert summary is not None
    return summary.figures


def test_an_elastic_run_begins_goes_on_and_ends_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    # A start that was killed before its first checkpoint.
    (run / "metrics.jsonl").write_text("{}\n")
    (run / "checkpoints" / ".writing-step-00000001").mkdir(parents=True)
    first = _train(tmp_path)
    assert (first["steps"], first["resumed_after"]) == (3, 0)
    again = _train(tmp_path)
    assert (again["steps"], again["resumed_after"]) == (3, 3)
    assert again["loss_last"] == first["loss_last"]


def test_an_elastic_run_needs_a_folder() -> None:
    with pytest.raises(ConfigError, match="--elastic needs --out"):
        RunOptions(elastic=True).validate()


_HOLD = """
import fcntl, os, sys, time
fcntl.flock(os.open(sys.argv[1], os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(float(sys.argv[2]))
"""


def test_a_restart_waits_for_the_ranks_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    command = [sys.executable, "-c", _HOLD, str(run / ".lock")]
    for held_s, patience_s in (("1", 60.0), ("60", 0.5)):
        monkeypatch.setattr(claims, "_PATIENCE_S", patience_s)
        with subprocess.Popen([*command, held_s], stdout=subprocess.PIPE, text=True) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            with pytest.raises(ConfigError, match="in use by a run that has not ended"):
                claim(run, resume=False)
            look(run, resume=False, elastic=True)
            try:
                if held_s == "1":
                    claim(run, resume=False, elastic=True).release()
                else:
                    with pytest.raises(ConfigError, match="in use by a run that has not ended"):
                        claim(run, resume=False, elastic=True)
            finally:
                holder.kill()


def _launcher(folder: Path, there: str) -> MpiLauncher:
    """An mpirun that reaches these hosts alone; one of them does not come back for minutes."""
    path = folder / "mpirun"
    path.write_text(
        '#!/bin/sh\nwhile [ "$1" != --host ]; do shift; done\n'
        '[ "$2" = silent ] && exec sleep 300\n'
        f'case " {there} " in *" $2 "*) exit 0;; esac; exit 1\n'
    )
    path.chmod(0o755)
    return MpiLauncher(path, "Open MPI", "5")


@pytest.mark.parametrize(
    ("mpi_args", "there", "expected"),
    [
        # All answer, or none, or no host is named: nothing changes.
        (["--host", "a:2,b:2"], "a b", Placement(4, ["--host", "a:2,b:2"])),
        (["--host", "a:2,b:2"], "", Placement(4, ["--host", "a:2,b:2"])),
        (["--tag"], "", Placement(4, ["--tag"])),
        (["--host"], "", Placement(4, ["--host"])),
        (
            ["--host", "a:2,b:2", "--tag"],
            "a",
            Placement(
                2, ["--tag", "--host", "a:2"],
                "no answer from b; the other hosts have slots for 2 of 4 ranks",
            ),
        ),
        (
            ["--host", "a slots=2 max_slots=8,b:2"],
            "a",
            Placement(
                2, ["--host", "a slots=2 max_slots=8"],
                "no answer from b; the other hosts have slots for 2 of 4 ranks",
            ),
        ),
        # A host may be named once for each slot, and there may be more slots than ranks.
        (
            ["-H", "a,a,b,c:9"],
            "a c",
            Placement(
                4, ["-H", "a,a,c:9"],
                "no answer from b; the other hosts have slots for 4 of 4 ranks",
            ),
        ),
    ],
)  # fmt: skip
def test_where_a_job_is_started_again(
    tmp_path: Path, mpi_args: list[str], there: str, expected: Placement
) -> None:
    assert place_again(_launcher(tmp_path, there), mpi_args, 4, tmp_path) == expected


@pytest.mark.parametrize("form", ["two words", "one word"])
def test_a_file_of_hosts(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_ANSWER_S", 2.0)
    path = tmp_path / "mine.txt"
    path.write_text("# ours\na slots=2 max_slots=4\nsilent slots = 2\n\nc:1  # spare\n")
    args = ["--hostfile", str(path)] if form == "two words" else [f"--hostfile={path}"]
    place = place_again(_launcher(tmp_path, "a c silent"), args, 4, tmp_path)
    assert (place.num_ranks, place.mpi_args) == (3, ["--hostfile", str(tmp_path / "hosts.txt")])
    assert (tmp_path / "hosts.txt").read_text() == "a slots=2 max_slots=4\nc:1\n"
    assert "no answer from silent;" in place.words


def test_a_file_of_hosts_that_is_gone_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the file of hosts cannot be read"):
        place_again(_launcher(tmp_path, ""), ["--hostfile", str(tmp_path / "no")], 4, tmp_path)


@pytest.mark.parametrize("options", [["--min-ranks", "1"], ["--min-ranks", "3", "--restarts", "1"]])
def test_fewer_ranks_need_restarts(options: list[str]) -> None:
    done = CliRunner().invoke(command, ["-n", "2", *options, "program.py"])
    assert done.exit_code == 2
    assert "--min-ranks: expected --restarts, and no more than -n" in done.output
