"""What changed from one record to another, by records whose every time is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from telemetry_feed import arrive, call, offset_s, record_calls

from burst_rt.launch import dashboard
from burst_rt.launch.trace import command
from burst_rt.telemetry.messages import JobReport, PhaseEnded
from burst_rt.telemetry.read.compare import Difference, RecordComparison, compare_records
from burst_rt.telemetry.read.record import Record, Recorder

# A call: rank 0 sends until 0.2, then both work on what came. `late_s` longer on rank 1.
_CALL = ((0.0, 0.0, 0.2), (0.0, 0.0, 0.2), (0.2, 0.2, 0.4))


def _slow(late_s: float) -> tuple[tuple[float, float, float], ...]:
    return (*_CALL[:2], (0.2, 0.2, 0.4 + late_s))


def _record(path: Path, late_s: list[float], *, after_s: float = 0.0) -> Record:
    """Calls of two ranks, one a second, in which rank 1's last tile takes so much longer."""
    calls = [
        {0: (1.0 + i + after_s, _CALL), 1: (1.0 + i + after_s, _slow(late))}
        for i, late in enumerate(late_s)
    ]
    record_calls(path, 2, calls)
    return Record(path)


def _by_name(comparison: RecordComparison) -> dict[str, Difference]:
    return {one.name: one for one in comparison.differences}


def test_the_same_calls_are_compared_and_what_changed_is_named(tmp_path: Path) -> None:
    before = _record(tmp_path / "a", [0.0] * 5)
    after = _record(tmp_path / "b", [0.1, 0.1, 0.5, 0.1, 0.1, 9.0, 9.0], after_s=20.0)
    found = compare_records(before, after)
    # The calls that only the longer run has say nothing.
    assert (found.num_calls, found.num_steps) == (5, 0)
    differences = _by_name(found)
    took = differences["forward call"]
    assert [took.before, took.after] == pytest.approx([0.4, 0.5], abs=1e-5)
    assert took.change == "+25.0 %"
    assert differences["forward: a rank computes"].after == pytest.approx(0.45, abs=1e-5)
    assert differences["forward: bytes sent"].change == "+0.0 %"
    uneven = differences["forward: slowest rank computes / mean"]
    assert uneven.after == pytest.approx(0.5 / 0.45, abs=1e-4)
    assert not [name for name in differences if "strategy" in name or "problem" in name]
    most = found.calls[0]
    assert (most.number, most.kind, most.group) == (2, "forward", "0-1")
    assert most.started_s == pytest.approx((3.0, 23.0), abs=1e-5)
    assert most.took_s == pytest.approx((0.4, 0.9), abs=1e-5)
    assert most.change == "rank 1 computes 500.00 ms longer"
    assert [same.number for same in found.calls[1:]] == [0, 1, 3, 4]


def test_a_record_is_like_itself_and_unlike_one_without_its_calls(tmp_path: Path) -> None:
    record = _record(tmp_path / "a", [0.1, 0.2])
    found = compare_records(record, record)
    assert {one.change for one in found.differences} <= {"", "+0.0 %"}
    assert [same.took_s[1] - same.took_s[0] for same in found.calls] == [0.0, 0.0]
    record_calls(tmp_path / "b", 2, [])
    empty = compare_records(record, Record(tmp_path / "b"))
    assert (empty.num_calls, empty.calls, empty.differences) == (0, [], [])


def _steps(path: Path, spans: dict[int, dict[str, float]], loss: float) -> Record:
    """Steps, each as long as its spans on rank 0, and half as long on rank 1."""
    recorder = Recorder(path, 1e9, "0.1")
    for rank in range(2):
        for message in arrive(rank):
            recorder.add_message(0.0, rank, message)
        at_s = 10.0 - offset_s(rank)
        for step, parts in spans.items():
            began_s = at_s
            for name, took_s in parts.items():
                took_s /= rank + 1
                recorder.add_message(
                    20.0, rank, PhaseEnded(name, step, 1, at_s, at_s := at_s + took_s)
                )
            recorder.add_message(20.0, rank, PhaseEnded("", step, 0, began_s, at_s))
    for step in spans:
        values = {"loss": loss / step, "tokens_per_s": 1e3 * step}
        recorder.add_message(20.0, 0, JobReport(0.0, step, values))
    recorder.add_message(20.0, 0, call(0, 1, 10.0, *_CALL))  # that rank 1 has no part of
    recorder.close()
    return Record(path)


def test_steps_are_those_of_the_slowest_rank_with_their_spans(tmp_path: Path) -> None:
    before = _steps(tmp_path / "a", {n: {"forward": 1.0, "optimizer": 0.5} for n in (1, 2, 3)}, 6.0)
    after = _steps(
        tmp_path / "b",
        {n: {"forward": 1.0 + 0.25 * n, "optimizer": 0.4} for n in (2, 3, 4)},
        9.0,
    )
    found = compare_records(before, after)
    assert (found.num_steps, found.num_calls) == (2, 0)
    differences = _by_name(found)
    assert {name: (one.before, one.after) for name, one in differences.items()} == {
        "step": (pytest.approx(1.5), pytest.approx(2.025)),
        "forward": (pytest.approx(1.0), pytest.approx(1.625)),
        "optimizer": (pytest.approx(0.5), pytest.approx(0.4)),
        "loss at step 3": (2.0, 3.0),
        "tokens_per_s": (2500.0, 2500.0),
    }
    assert found.steps[0].step == 3
    assert found.steps[0].change == "forward takes 750.00 ms longer"
    assert found.steps[0].started_s[0] == pytest.approx(13.0)


def test_the_terminal_has_the_same_table(tmp_path: Path) -> None:
    before = _steps(tmp_path / "a", {1: {"forward": 1.0}}, 6.0)
    after = _steps(tmp_path / "b", {1: {"forward": 0.5}}, 6.0)
    names = [str(before.path), str(after.path)]
    done = CliRunner().invoke(command, ["compare", *names])
    assert done.exit_code == 0, done.output
    rows = [" ".join(line.split()) for line in done.output.splitlines() if "forward" in line]
    assert rows[0] == "│ forward │ 1,000.00 ms │ 500.00 ms │ -50.0 % │"
    assert "   -500.00 ms  step 1: forward takes 500.00 ms less" in done.output
    as_json = CliRunner().invoke(command, ["compare", "--json", *names])
    assert json.loads(as_json.output)["names"] == names
    missing = CliRunner().invoke(command, ["compare", names[0], str(tmp_path / "none")])
    assert missing.exit_code == 2


def test_a_record_beside_none_is_refused(tmp_path: Path) -> None:
    record = _record(tmp_path / "a", [0.1])
    beside = ["--beside", str(record.path)]
    for options in (beside, [*beside, "--replay", str(record.path), "--until", "1"]):
        done = CliRunner().invoke(dashboard.command, options)
        assert done.exit_code == 2
        assert "--beside works only with --replay, and without --until" in done.output


def test_reports_of_any_step_are_compared(tmp_path: Path) -> None:
    """Long runs, and those that count tokens."""
    for name, loss in (("a", 2.0), ("b", 3.0)):
        recorder = Recorder(tmp_path / name, 1e9, "0.1")
        recorder.add_message(0.0, 0, arrive(0)[0])
        for step in (150_000, 10**12):
            recorder.add_message(1.0, 0, JobReport(1.0, step, {"loss": loss}))
        recorder.close()
    found = compare_records(*(Record(tmp_path / name) for name in "ab"))
    assert _by_name(found)[f"loss at step {10**12}"].after == 3.0
