"""Records, and what is made of them: a replay, a trace, a summary."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from telemetry_feed import arrive, beat, call, gpu_sample

from burst_rt.errors import InputError
from burst_rt.launch.trace import command
from burst_rt.telemetry.job_model import JobModel
from burst_rt.telemetry.messages import Counters, FromRank, LaneCounters, PlanSummary, Presence
from burst_rt.telemetry.record import Record, Recorder, replay
from burst_rt.telemetry.summary import summarise


def _messages() -> list[tuple[float, int, FromRank | Presence]]:
    said: list[tuple[float, int, FromRank | Presence]] = [
        (0.0, rank, m) for rank in range(2) for m in arrive(rank, gpu=True)
    ]
    said.append((5.0, 0, gpu_sample(0, 5.0, 650.0)))
    # Rank 0 waits from 10.2 to 10.5 for a message that is on the wire from 10.1.
    said.append((11.0, 0, call(0, 7, 10.0, (0.0, 0.0, 0.5), (0.0, 0.0, 0.2), (0.2, 0.5, 0.6))))
    said.append((11.0, 1, call(1, 7, 10.1, (0.0, 0.0, 0.2), (0.0, 0.0, 0.3), (0.2, 0.3, 0.4))))
    # Rank 1 comes half a second late.
    said.append((13.0, 0, call(0, 8, 12.0, (0.0, 0.0, 0.7), (0.0, 0.0, 0.2), (0.2, 0.7, 0.8))))
    said.append((13.0, 1, call(1, 8, 12.5, (0.0, 0.0, 0.2), (0.0, 0.0, 0.1), (0.2, 0.2, 0.4))))
    said.append((14.0, 0, call(0, 9, 13.5, (0.0, 0.0, 0.1))))  # the other rank's part was dropped
    said.append((14.5, 1, beat(1, 14.5, number=10, doing="hop 0", since_s=14.0)))
    said.append((15.0, -1, Presence(1, "lost", "its connection ended")))
    return said


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "run.record"
    recorder = Recorder(path, 1e9, "0.1")
    for at_s, rank, message in _messages():
        if isinstance(message, Presence):
            recorder.add_message(at_s, rank, message)
        else:
            recorder.add(at_s, rank, msgspec.msgpack.encode(message))
    recorder.close()
    return path


def test_a_replay_is_the_state_that_was(path: Path) -> None:
    live = JobModel(1e9, record=str(path), replayed=True)
    for at_s, rank, message in _messages():
        live.advance(at_s)
        live.apply(at_s, rank, message)
    replayed = replay(Record(path))
    assert replayed.snapshot() == live.snapshot()
    assert replayed.timeline(0.0, 20.0) == live.timeline(0.0, 20.0)
    assert replay(Record(path), until_s=11.0).now_s == 11.0
    assert [s.call for s in replay(Record(path), until_s=11.0).timeline(0.0, 20.0).spans] == [7] * 6


def test_a_record_cut_short_is_read_as_far_as_it_goes(path: Path) -> None:
    whole = list(Record(path))
    path.write_bytes(path.read_bytes()[:-10])
    assert list(Record(path)) == whole[:-1]


def test_messages_are_arrays_whose_order_old_records_have() -> None:
    raw = ["counters", 1.0, 2, 3, 4.0, 5.0, 6.0, 7.0, 8.0, {"compute": [9, 10, 11]}, 12]
    counters = Counters(
        at_s=1.0,
        calls=2,
        traced_calls=3,
        compute_s=4.0,
        wait_s=5.0,
        total_s=6.0,
        transfer_s=7.0,
        overlap_s=8.0,
        lanes={"compute": LaneCounters(9, 10, 11)},
        dropped=12,
    )
    assert msgspec.convert(raw, Counters) == counters
    assert msgspec.msgpack.encode(counters) == msgspec.msgpack.encode(raw)
    # As a record has it from before plans had a problem, a strategy and candidates.
    task = ["hop 0", "network", "exchange", 0, 8, 0, False, [[1, 5, 8]], []]
    plan = msgspec.convert(["plan", 3, "0-1", "forward", [task], "ring", None], PlanSummary)
    assert (plan.number, plan.kind, plan.explain, plan.candidates) == (3, "forward", "ring", [])
    assert plan.tasks[0].sends == [(1, 5, 8)]


@pytest.mark.parametrize(
    "content",
    [b"", b"no record at all", b"burst_rt record\n", b"burst_rt record\n\xff\xff\xff\xff"],
)
def test_what_is_no_record_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(InputError, match="is not a record of a run"):
        Record(path)


def test_a_disk_that_is_full_ends_the_record_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "full"
    path.symlink_to("/dev/full")
    recorder = Recorder(path, 1e9, "0.1")
    for at_s, rank, message in _messages():
        recorder.add_message(at_s, rank, message)
    recorder.close()
    assert "the record" in caplog.text
    assert caplog.text.count("ends here") == 1


def test_a_trace_has_every_rank_on_one_clock_with_arrows(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    done = CliRunner().invoke(command, [str(path), "-o", str(out)])
    assert done.exit_code == 0, done.output
    # As JSON has it.
    events: list[dict[str, Any]] = json.loads(out.read_text())["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    tasks = [e for e in slices if e["name"] not in ("exposed", "skew")]
    assert Counter(e["pid"] for e in tasks) == {0: 7, 1: 6}
    tile = next(e for e in tasks if e["pid"] == 1 and e["name"] == "hop 1 q0 kv1")
    assert (tile["ts"], tile["dur"]) == (pytest.approx(10.4e6), pytest.approx(0.1e6, rel=1e-5))
    assert tile["args"] == {"call": "forward 7", "op": "forward", "bytes": 0, "flops": 10, "hop": 1}
    waits = [e for e in slices if e["name"] == "exposed" and e["pid"] == 0]
    assert waits[0]["args"] == {"task": "hop 0", "peer": 1}
    for start in (e for e in events if e["ph"] == "s"):
        (finish,) = (e for e in events if e["ph"] == "f" and e["id"] == start["id"])
        assert finish["ts"] >= start["ts"]
        for end in (start, finish):
            enclosing = [
                e
                for e in tasks
                if (e["pid"], e["tid"]) == (end["pid"], end["tid"])
                and e["ts"] <= end["ts"] <= e["ts"] + e["dur"]
            ]
            assert enclosing, end
            assert enclosing[0]["name"] == "hop 0"
    assert sum(e["ph"] == "s" for e in events) == 4
    assert [e["args"]["power_w"] for e in events if e["ph"] == "C" and e["name"] == "power_w"] == [
        650.0
    ]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names[0] == "rank 0 on host, cuda:0"
    assert "a GPU gpu:0" in names.values()
    assert any(e["ph"] == "i" and e["name"] == "lost" for e in events)


def test_slices_of_one_thread_never_overlap(path: Path, tmp_path: Path) -> None:
    recorder_path = tmp_path / "busy"
    recorder = Recorder(recorder_path, 1e9, "0.1")
    for rank in range(2):
        for message in arrive(rank):
            recorder.add_message(0.0, rank, message)
        for number in range(3):  # transfers that outlive the next call's
            recorder.add_message(
                1.0,
                rank,
                call(
                    rank,
                    number,
                    1.0 + 0.1 * number,
                    (0.0, 0.0, 0.5),
                    (0.0, 0.0, 0.05),
                    (0.05, 0.05, 0.1),
                ),
            )
    recorder.close()
    out = tmp_path / "trace.json"
    assert CliRunner().invoke(command, [str(recorder_path), "-o", str(out)]).exit_code == 0
    by_thread: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in json.loads(out.read_text())["traceEvents"]:
        if e["ph"] == "X":
            by_thread.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    assert len(by_thread) > 4
    for spans in by_thread.values():
        spans.sort()
        assert all(first[1] <= second[0] + 1e-3 for first, second in pairwise(spans))


def test_a_summary_names_the_longest_stalls_and_their_cause(path: Path) -> None:
    found = summarise(Record(path))
    assert found.incomplete == 1
    first = found.ranks[0]
    assert [first.calls, first.total_s, first.compute_s] == pytest.approx([2, 1.4, 0.6], rel=1e-5)
    # Call 7: 10.2 to 10.5. Call 8: rank 1 comes at 12.5, then 0.2 s on the wire.
    assert first.exposed_s == pytest.approx(0.5, rel=1e-5)
    assert first.skew_s == pytest.approx(0.3, rel=1e-5)
    assert first.late_s == pytest.approx(0.3, rel=1e-5)
    assert [first.transfer_s, first.hidden_s] == pytest.approx([1.2, 0.4])
    causes = [stall.cause for stall in found.stalls]
    assert "rank 1 entered the call 500.0 ms later" in causes
    assert "rank 1 had not reached 'hop 0'" in causes
    assert "'hop 0' from rank 1 was on the wire: 1,000 bytes in 500.0 ms" in causes
    assert [stall.duration_s for stall in found.stalls] == sorted(
        (stall.duration_s for stall in found.stalls), reverse=True
    )


def test_the_summary_command_prints_it(path: Path) -> None:
    done = CliRunner().invoke(command, ["summary", str(path)])
    assert done.exit_code == 0, done.output
    assert "longest stalls" in done.output
    assert "rank 1 entered the call 500.0 ms later" in done.output
    assert "left out: 1 calls" in done.output
    as_json = json.loads(CliRunner().invoke(command, ["summary", str(path), "--json"]).output)
    assert as_json["ranks"][0]["exposed_s"] == pytest.approx(0.5, rel=1e-5)
    assert len(as_json["stalls"]) == 3
