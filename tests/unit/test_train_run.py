"""A training run as a person or a viewer sees it: progress, the table at its end, what telemetry
hears. In this process, on one rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import burst_rt
from burst_rt.launch.train import loop
from burst_rt.launch.train.checkpoint import Checkpoint
from burst_rt.launch.train.cli import train_command
from burst_rt.launch.train.config import RunOptions, TrainConfig
from burst_rt.launch.train.loop import train
from burst_rt.launch.train.report import Report, StepRecord


def _train(
    tmp_path: Path, steps: int, *, resume: bool = False, elastic: bool = False
) -> Mapping[str, Any]:
    (tmp_path / "text").write_text("some text " * 999)
    config = TrainConfig(
        data=str(tmp_path / "text"),
        seq_len=9,
        steps=steps,
        layers=1,
        dim=8,
        heads=1,
        kv_heads=1,
        eval_every=2,
    )
    options = RunOptions(out=tmp_path / "run", resume=resume, elastic=elastic, progress="lines")
    (summary,) = burst_rt.run_local(
        1, lambda world: train(world, config, options, {"steps": steps}), timeout_s=20
    )
    assert summary is not None
    return summary.figures


def test_a_resumed_run_tells_the_whole_from_what_was_done_now(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = _train(tmp_path, 2)
    table = capsys.readouterr().out
    assert "left out" not in table
    assert (first["resumed_after"], "since" in table) == (0, False)

    # As if the machine of the first part had been another one.
    path = tmp_path / "run" / "metrics.jsonl"
    records = [
        json.loads(line) | {"tokens_per_s": 1e12, "bytes_sent": 10**9, "wait_fraction": 0.9}
        for line in path.read_text().splitlines()
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    second = _train(tmp_path, 5, resume=True)
    assert (second["steps"], second["resumed_after"]) == (5, 2)
    assert second["loss_first"] == first["loss_first"]
    assert (second["bytes_sent"], second["wait_fraction"]) == (0, 0.0)
    assert second["tokens_per_s"] < 1e9
    table = capsys.readouterr().out
    assert "5, 3 of them now" in table
    for row in ("speed", "communication", "time"):
        assert f"{row} since step 2" in table


def test_a_resumed_run_lets_go_of_the_files_that_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a process has mapped cannot be deleted from NFS."""
    _train(tmp_path, 2)
    (began_with,) = (tmp_path / "run" / "checkpoints").iterdir()
    maps: list[str] = []
    save = loop.Trainer.checkpoint

    def watched(trainer: loop.Trainer, step: int) -> Checkpoint:
        maps.append(Path("/proc/self/maps").read_text(encoding="utf-8"))
        return save(trainer, step)

    monkeypatch.setattr(loop.Trainer, "checkpoint", watched)
    _train(tmp_path, 4, resume=True)
    assert str(began_with) in maps[0], "where it is read"
    assert str(began_with) not in maps[-1], "where the next one is written"


def test_the_time_that_is_left_is_told_in_hours_and_days(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    record = StepRecord(
        step=10,
        loss=1.0,
        lr=0.1,
        grad_norm=1.0,
        step_s=0.1,
        tokens_per_s=1.0,
        wait_fraction=0.0,
        bytes_sent=1,
    )
    report = Report("lines", steps=20, done=0)
    now_s = 4000.4
    report.show(record)
    now_s = 960392.0
    report.show(record)
    report.stop()
    assert [line.partition("eta ")[2] for line in capsys.readouterr().out.splitlines()] == [
        "1:06:40",
        "11 days, 2:46:32",
    ]


def test_telemetry_hears_the_held_out_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[int, dict[str, float]]] = []
    monkeypatch.setattr(
        "burst_rt.telemetry.report", lambda step, **values: heard.append((step, values))
    )
    _train(tmp_path, 3)
    records = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    told = [(step, values["heldout_loss"]) for step, values in heard if "heldout_loss" in values]
    assert told == [(record["step"], record["heldout_loss"]) for record in records[1:]]


def test_help_names_strategies_with_a_number() -> None:
    help_text = " ".join(CliRunner().invoke(train_command, ["--help"]).output.split())
    help_text = help_text.replace("- ", "-")  # names that a line ends in
    assert "hybrid:N and two-level:N form groups of N ranks" in help_text
    assert "sliced:N exchanges heads in N slices" in help_text


def test_a_run_that_is_over_and_was_not_measured_at_its_end_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its last record was lost in a power cut; and a script starts it again."""
    _train(tmp_path, 3)
    path = tmp_path / "run" / "metrics.jsonl"
    *lines, last = path.read_text().splitlines()
    record = json.loads(last) | {"heldout_loss": None}
    path.write_text("\n".join([*lines, json.dumps(record)]) + "\n")
    _train(tmp_path, 3, elastic=True)
    assert "not measured after the last step" in capsys.readouterr().out


def test_text_that_is_left_out_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("some text " * 999)
    (tmp_path / "text" / "b.txt").write_bytes(b"caf\xe9 " * 99)
    config = TrainConfig(
        data=str(tmp_path / "text"), seq_len=8, steps=1, layers=1, dim=8, heads=1, kv_heads=1
    )
    options = RunOptions(out=tmp_path / "run", progress="lines")
    burst_rt.run_local(2, lambda world: train(world, config, options, {}), timeout_s=20)
    said = f"left out: 1 file that is not UTF-8 text, such as {tmp_path}/text/b.txt\n"
    assert capsys.readouterr().out.count(said) == 1
