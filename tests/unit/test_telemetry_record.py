"""Records, and what is made of them: a replay, a trace, a summary."""

from __future__ import annotations

import json
import random
from collections import Counter
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from click import Command
from click.testing import CliRunner
from telemetry_feed import (
    Times,
    arrive,
    beat,
    call,
    counters,
    gpu_sample,
    offset_s,
    record_calls,
)

from burst_rt.errors import ConfigError, InputError
from burst_rt.launch import dashboard, top
from burst_rt.launch.trace import command
from burst_rt.telemetry.messages import (
    Agreed,
    Counters,
    FromRank,
    Hello,
    HubReport,
    JobReport,
    LaneCounters,
    PhaseEnded,
    PlanSummary,
)
from burst_rt.telemetry.model.job_model import JobModel
from burst_rt.telemetry.read.chrome import write_trace
from burst_rt.telemetry.read.record import Record, Recorder
from burst_rt.telemetry.read.summary import RecordSummary, summarise
from burst_rt.telemetry.read.tape import replay
from burst_rt.telemetry.wire import frame


def _messages() -> list[tuple[float, int, FromRank | HubReport]]:
    said: list[tuple[float, int, FromRank | HubReport]] = [
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
    said.append((15.0, -1, HubReport(1, "lost", "its connection ended")))
    return said


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "run.record"
    recorder = Recorder(path, 1e9, "0.1")
    for at_s, rank, message in _messages():
        if isinstance(message, HubReport):
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
    cut = replay(Record(path), until_s=11.0).timeline(0.0, 20.0)
    assert [(call.call, len(call.spans)) for call in cut.calls] == [(7, 3), (7, 3)]


@pytest.mark.parametrize("shown", [top.command, dashboard.command])
@pytest.mark.parametrize("until", ["nan", "-1", "soon"])
def test_until_takes_seconds_alone(path: Path, shown: Command, until: str) -> None:
    done = CliRunner().invoke(shown, ["--replay", str(path), "--until", until])
    assert done.exit_code == 2
    assert "Invalid value for '--until': " in done.output


def _frames(content: bytes) -> list[tuple[int, int]]:
    """Where each frame begins and ends."""
    at, frames = content.index(b"\n") + 1, []
    while at < len(content):
        end = at + 8 + int.from_bytes(content[at : at + 4], "little")
        frames.append((at, end))
        at = end
    return frames


def _read(path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> tuple[int, str]:
    """How many entries are read of the content, and what is said of the rest."""
    path.write_bytes(content)
    caplog.clear()
    try:
        return len(list(Record(path))), "".join(caplog.messages)
    except InputError as error:
        return 0, str(error)


def test_a_record_cut_anywhere_is_read_as_far_as_it_goes_and_says_so(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = path.read_bytes()
    frames = _frames(content)
    assert _read(path, content, caplog) == (len(frames) - 2, "")  # without header and end mark
    for number, (begin, end) in enumerate(frames[1:], start=1):
        no_end = f"{path} has no end mark after byte {begin}: "
        num_read, said = _read(path, content[:begin], caplog)
        assert num_read == number - 1
        assert said.startswith(no_end)
        for cut in range(begin + 1, end):
            num_read, said = _read(path, content[:cut], caplog)
            assert num_read == number - 1
            assert said.startswith(f"{path} is damaged from byte {begin} on")


def test_no_flipped_bit_of_a_record_goes_unseen(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = path.read_bytes()
    for number, (begin, end) in enumerate(_frames(content)[1:], start=1):
        of_payload = random.Random(number).sample(range(begin + 8, end), min(4, end - begin - 8))
        for at in (*range(begin, begin + 8), *of_payload):
            for bit in range(8):
                flipped = bytearray(content)
                flipped[at] ^= 1 << bit
                num_read, said = _read(path, bytes(flipped), caplog)
                assert num_read == number - 1, (at, bit)
                assert said.startswith(f"{path} is damaged from byte {begin} on"), (at, bit)


def test_no_missing_or_doubled_frame_goes_unseen(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = path.read_bytes()
    frames = _frames(content)
    for number, (begin, end) in enumerate(frames[1:-1], start=1):
        for odd, at in (
            (content[:begin] + content[end:], begin),
            (content[:end] + content[begin:], end),
        ):
            num_read, said = _read(path, odd, caplog)
            assert num_read == number - (at == begin)
            assert said.startswith(f"{path} is damaged from byte {at} on")


def test_records_from_before_checksums_are_read(path: Path) -> None:
    whole, content = list(Record(path)), path.read_bytes()
    plain = [frame(content[begin + 8 : end]) for begin, end in _frames(content)[:-1]]
    path.write_bytes(b"".join([b"burst_rt record\n", *plain]))
    assert list(Record(path)) == whole


_BYE = msgspec.msgpack.encode((1.0, 0, ("bye", 1.0, 1, "text")))


@pytest.mark.parametrize(
    "what",
    [
        pytest.param(bytes(4096), id="zeros"),
        pytest.param(b"\xff" * 100, id="length"),
        pytest.param(frame(_BYE), id="a frame of an old record"),
    ],
)
def test_a_damaged_record_is_read_up_to_the_damage(
    path: Path, tmp_path: Path, what: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    whole, size = list(Record(path)), _frames(path.read_bytes())[-2][1]
    shown = CliRunner().invoke(command, ["summary", str(path)]).output
    path.write_bytes(path.read_bytes() + what)
    assert list(Record(path)) == whole
    assert replay(Record(path)).snapshot().ranks
    caplog.clear()
    assert CliRunner().invoke(command, ["summary", str(path)]).output == shown
    done = CliRunner().invoke(command, [str(path), "-o", str(tmp_path / "trace.json")])
    assert done.exit_code == 0, done.output
    told = f"{path} is damaged from byte {size} on; what comes after that is left out"
    assert caplog.messages == [told, told]  # once a command, though a trace reads it thrice


def test_flipped_bytes_never_fail_otherwise_than_as_damage(path: Path, tmp_path: Path) -> None:
    content, rng = path.read_bytes(), random.Random(0)
    for _ in range(300):
        damaged, at = bytearray(content), rng.randrange(len(content))
        damaged[at] ^= rng.randrange(1, 256)
        path.write_bytes(damaged)
        with suppress(InputError):
            replay(Record(path)).snapshot()
            summarise(Record(path))
            write_trace(Record(path), tmp_path / "trace.json")


def test_a_record_damaged_from_its_start_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "start.record"
    Recorder(path, 1e9, "0.1").close()
    size = _frames(path.read_bytes())[0][1]
    path.write_bytes(path.read_bytes() + bytes(100))
    with pytest.raises(InputError, match=rf"start.record is damaged from byte {size} on, and"):
        list(Record(path))
    path.write_bytes(b"burst_rt record 2\n\xff\xff\xff\xff")
    with pytest.raises(InputError, match=r"start.record is not a record of a run: it is damaged"):
        Record(path)


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
    # What was appended since has defaults.
    assert msgspec.msgpack.encode(counters) == msgspec.msgpack.encode([*raw, 0, 0.0, 0.0])
    # As a record has it from before plans had a problem, a strategy and candidates.
    task = ["hop 0", "network", "exchange", 0, 8, 0, False, [[1, 5, 8]], []]
    plan = msgspec.convert(["plan", 3, "0-1", "forward", [task], "ring", None], PlanSummary)
    assert (plan.number, plan.kind, plan.explain, plan.candidates) == (3, "forward", "ring", [])
    assert plan.tasks[0].sends == [(1, 5, 8)]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no record at all",
        b"burst_rt record\n",
        b"burst_rt record 2\n",
        b"burst_rt record\n\xff\xff\xff\xff",
    ],
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


def test_a_record_that_is_there_is_kept(path: Path) -> None:
    assert sorted(path.parent.iterdir()) == [path]
    (path.parent / "run.record.8x").touch()
    (path.parent / "12").touch()
    attempts = [path.read_bytes()]
    for number in (1, 2, 3):
        recorder = Recorder(path, 1e9 + number, "0.1")
        assert recorder.kept == path.with_name(f"run.record.{number}")
        recorder.close()
        attempts.append(path.read_bytes())
    kept = [path.with_name(f"run.record.{number}") for number in (1, 2, 3)]
    assert [file.read_bytes() for file in (*kept, path)] == attempts
    path.write_bytes(b"")  # nothing to lose, as mktemp makes it
    recorder = Recorder(path, 1e9, "0.1")
    recorder.close()
    assert recorder.kept is None


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


def test_steps_and_spans_are_in_a_record_and_its_trace(path: Path, tmp_path: Path) -> None:
    recorder_path, offset = tmp_path / "steps.record", offset_s(1)
    recorder = Recorder(recorder_path, 1e9, "0.1")
    said = [
        *arrive(1),
        PhaseEnded("load", 3, 1, 10.0 - offset, 10.1 - offset),
        PhaseEnded("inner", 3, 2, 10.3 - offset, 10.4 - offset),
        PhaseEnded("outer", 3, 1, 10.2 - offset, 10.5 - offset),
        PhaseEnded("", 3, 0, 10.0 - offset, 10.6 - offset),
        PhaseEnded("elsewhere", 3, 0, 10.5 - offset, 10.7 - offset),  # of another thread
        PhaseEnded("save", -1, 0, 10.8 - offset, 10.9 - offset),
    ]
    for message in said:
        recorder.add_message(11.0, 1, message)
    recorder.close()
    shown = replay(Record(recorder_path)).timeline(0.0, 20.0).phases
    names = ["load", "inner", "outer", "", "elsewhere", "save"]
    assert [phase.name for phase in shown] == names
    assert [shown[0].started_s, shown[-1].ended_s] == pytest.approx([10.0, 10.9])
    write_trace(Record(recorder_path), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = {event["name"]: event for event in events if event["ph"] == "X"}
    assert list(slices) == ["load", "inner", "outer", "step 3", "elsewhere", "save"]
    assert slices["step 3"]["ts"] == pytest.approx(10.0e6)
    assert slices["step 3"]["dur"] == pytest.approx(0.6e6)
    assert (slices["inner"]["args"], slices["save"]["args"]) == ({"step": 3}, {})
    assert [slices[n]["cat"] for n in ("step 3", "save")] == ["step", "span"]
    row = {name: event["tid"] - slices["step 3"]["tid"] for name, event in slices.items()}
    assert row == {"step 3": 0, "load": 1, "outer": 1, "inner": 2, "elsewhere": 1, "save": 0}
    lanes = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    assert lanes[1, slices["step 3"]["tid"]] == "steps"


def test_a_message_of_a_newer_version_is_passed_over(path: Path) -> None:
    recorder = Recorder(path, 1e9, "9.9")
    recorder.add_message(0.0, 0, arrive(0)[0])
    recorder.add(1.0, 0, msgspec.msgpack.encode(["of the future", 1.0]))
    recorder.add_message(2.0, 0, JobReport(2.0, 4, {"loss": 1.0}))
    recorder.close()
    assert [type(entry.message) for entry in Record(path)] == [Hello, JobReport]


def test_a_record_leaves_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that is full would end the training that is watched, in its next checkpoint."""
    free = iter([5 << 30, 1 << 29])
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=next(free)))
    recorder = Recorder(tmp_path / "record", 0.0, "test")
    for _ in range(50):
        recorder.add(0.0, 0, bytes(1 << 20))
        recorder.flush()
    recorder.close()
    assert "ends here: [Errno 28] less than 1 GiB is free there" in caplog.text
    assert 16 << 20 < (tmp_path / "record").stat().st_size < 40 << 20


@pytest.mark.parametrize(
    ("out", "why"),
    [("/dev/full", "No space left on device"), ("/proc/none/x", "No such file or directory")],
)
def test_a_trace_that_cannot_be_written_is_told(path: Path, out: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot write the trace to {out}: {why}"):
        write_trace(Record(path), Path(out))


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
    assert [first.skew_s, first.late_s] == pytest.approx([0.0, 0.3], abs=1e-5)
    assert first.between_s == pytest.approx(1.4, rel=1e-5)  # from 10.6 to 12.0
    assert [first.transfer_s, first.hidden_s] == pytest.approx([1.2, 0.4])
    causes = [stall.cause for stall in found.stalls]
    late = "rank 1 had not reached 'hop 0', having entered the call 500.0 ms later"
    moved = "1,000 bytes from rank 1, 1,000 bytes to rank 1"
    assert sorted(causes) == [
        f"'hop 0' was on the wire for 200.0 ms: {moved}",
        f"'hop 0' was on the wire for 400.0 ms: {moved}",
        late,
    ]
    assert [stall.duration_s for stall in found.stalls] == sorted(
        (stall.duration_s for stall in found.stalls), reverse=True
    )


def test_the_summary_command_prints_it(path: Path) -> None:
    done = CliRunner().invoke(command, ["summary", str(path)])
    assert done.exit_code == 0, done.output
    assert "longest stalls" in done.output
    assert "having entered the call 500.0 ms later" in done.output
    assert "left out: 1 calls" in done.output
    as_json = json.loads(CliRunner().invoke(command, ["summary", str(path), "--json"]).output)
    assert as_json["ranks"][0]["exposed_s"] == pytest.approx(0.5, rel=1e-5)
    assert len(as_json["stalls"]) == 3


def _three_ranks(
    path: Path, calls: list[dict[int, tuple[float, Times]]], *, agree: bool = False
) -> RecordSummary:
    record_calls(path, 3, calls, agree=agree)
    return summarise(Record(path))


# The ranks exchange once their first tiles are done, in 0.01 s; the last tile takes 0.19 s.
def _times(first_s: float, met_s: float) -> Times:
    """first_s: when the own first tile is done. met_s: when the last rank's is."""
    came_s = met_s + 0.01
    return ((first_s, first_s, came_s), (0.0, 0.0, first_s), (came_s, came_s, met_s + 0.2))


def test_a_rank_that_comes_late_is_waited_for_behind_the_first_tile(tmp_path: Path) -> None:
    # Before every call rank 1 sleeps 0.1 s. The others have a tile to compute then; when it is
    # done, they wait 0.1 s for rank 1, which is in its own.
    calls = []
    for number in range(10):
        at_s = 1.0 + 0.6 * number
        early, late = _times(0.3, 0.4), _times(0.3, 0.3)
        calls.append({0: (at_s, early), 1: (at_s + 0.1, late), 2: (at_s, early)})
    found = _three_ranks(tmp_path / "late", calls)
    for rank, late_s in ((0, 1.0), (1, 0.0), (2, 1.0)):
        summary = found.ranks[rank]
        shares = [summary.late_s, summary.skew_s, summary.exposed_s]
        assert shares == pytest.approx([late_s, 0.0, 0.1], abs=1e-4)
    assert [rank.between_s for rank in found.ranks] == pytest.approx([0.0, 0.9, 0.0], abs=1e-4)
    latecomer = found.latecomer
    assert latecomer is not None
    assert latecomer.rank == 1
    figures = [latecomer.beyond_s, latecomer.most_s, latecomer.waited_s, latecomer.waited_share]
    assert figures == pytest.approx([0.1, 0.1, 2.0, 1 / 6], abs=1e-4)
    said = CliRunner().invoke(command, ["summary", str(tmp_path / "late")]).output
    assert (
        "rank 1 comes late: between calls it spends 100.0 ms more than the others (at most 100.0 "
        "ms). They waited 2.000 s for it: 16.7 % of their time in calls"
    ) in said
    cause = "rank 1 was still in 'hop 0 q0 kv0' and had not reached 'hop 0'"
    assert f"{cause}, having entered the call 100.0 ms later\n" in said


def test_a_rank_that_computes_longer_is_no_latecomer(tmp_path: Path) -> None:
    # Rank 1 enters on time, but its first tile takes 0.1 s longer.
    calls = []
    for number in range(10):
        at_s = 1.0 + 0.6 * number
        quick, slow = _times(0.3, 0.4), _times(0.4, 0.4)
        calls.append({0: (at_s, quick), 1: (at_s, slow), 2: (at_s, quick)})
    found = _three_ranks(tmp_path / "slow", calls)
    first = found.ranks[0]
    assert [first.late_s, first.skew_s] == pytest.approx([0.0, 1.0], abs=1e-4)
    assert found.latecomer is None
    said = CliRunner().invoke(command, ["summary", str(tmp_path / "slow")]).output
    assert "comes late" not in said
    assert "rank 1 was still in 'hop 0 q0 kv0' and had not reached 'hop 0'\n" in said


def test_lateness_from_computing_longer_in_the_call_before_is_skew(tmp_path: Path) -> None:
    # In every call rank 1's last tile takes 0.1 s longer, and so it enters the next call later. It
    # is outside of calls no longer than the others.
    calls = []
    for number in range(10):
        at_s = 1.0 + 0.6 * number
        behind_s = 0.1 if number else 0.0
        early, late = _times(0.3, 0.3 + behind_s), _times(0.3, 0.3)
        late = (*late[:2], (0.31, 0.31, 0.6))
        calls.append({0: (at_s, early), 1: (at_s + behind_s, late), 2: (at_s, early)})
    found = _three_ranks(tmp_path / "behind", calls)
    first = found.ranks[0]
    assert [first.late_s, first.skew_s] == pytest.approx([0.0, 0.9], abs=1e-4)


def test_lateness_that_nobody_waited_for_yet_is_due_in_a_later_call(tmp_path: Path) -> None:
    # Rank 1 sleeps once, before the second call, in which nobody needs it: all tiles are their own.
    # In the third call the others wait for it.
    own = ((0.0, 0.0, 0.1), (0.0, 0.0, 0.3), (0.3, 0.3, 0.5))
    early, late = _times(0.3, 0.4), _times(0.3, 0.3)
    found = _three_ranks(
        tmp_path / "once",
        [
            {0: (1.0, own), 1: (1.0, own), 2: (1.0, own)},
            {0: (1.6, own), 1: (1.7, own), 2: (1.6, own)},
            {0: (2.2, early), 1: (2.3, late), 2: (2.2, early)},
        ],
    )
    first = found.ranks[0]
    assert [first.late_s, first.skew_s] == pytest.approx([0.1, 0.0], abs=1e-4)


def test_lateness_that_was_waited_for_is_due_no_more(tmp_path: Path) -> None:
    # Rank 1 sleeps once, before the second call, and is waited for there. Its last tile then takes
    # 0.1 s longer, and so it enters the third call later.
    own = ((0.0, 0.0, 0.1), (0.0, 0.0, 0.3), (0.3, 0.3, 0.5))
    early, late = _times(0.3, 0.4), _times(0.3, 0.3)
    slow = (*late[:2], (0.31, 0.31, 0.6))
    found = _three_ranks(
        tmp_path / "waited",
        [
            {0: (1.0, own), 1: (1.0, own), 2: (1.0, own)},
            {0: (1.6, early), 1: (1.7, slow), 2: (1.6, early)},
            {0: (2.3, early), 1: (2.4, late), 2: (2.3, early)},
        ],
    )
    first = found.ranks[0]
    assert [first.late_s, first.skew_s] == pytest.approx([0.1, 0.1], abs=1e-4)


def test_a_rank_that_comes_late_is_waited_for_at_the_agreement(tmp_path: Path) -> None:
    # Before every call rank 1 sleeps 0.5 s: longer than the others' first tiles take.
    early: Times = ((0.5, 0.5, 0.5), (0.0, 0.0, 0.3), (0.5, 0.5, 1.0), (0.0, 0.0, 0.5))
    late: Times = ((0.0, 0.0, 0.0), (0.0, 0.0, 0.3), (0.3, 0.3, 0.5), (0.0, 0.0, 0.0))
    calls = []
    for number in range(10):
        at_s = 1.0 + number
        calls.append({0: (at_s, early), 1: (at_s + 0.5, late), 2: (at_s, early)})
    found = _three_ranks(tmp_path / "agreement", calls, agree=True)
    first = found.ranks[0]
    assert [first.late_s, first.skew_s] == pytest.approx([2.0, 0.0], abs=1e-4)
    assert {stall.cause for stall in found.stalls} == {"rank 1 entered the call 500.0 ms later"}
    drawn = replay(Record(tmp_path / "agreement")).timeline(0.0, limit=1000).waits
    entries = [wait for wait in drawn if wait.cause == "late entry"]
    assert {(wait.rank, wait.peer) for wait in entries} == {(0, 1), (2, 1)}
    for wait in entries:
        # The first tile ends 0.3 s after the call's start, and rank 1 enters 0.5 s after it.
        times = [wait.started_s - wait.call - 1.0, wait.ended_s - wait.call - 1.0]
        assert times == pytest.approx([0.3, 0.5], abs=1e-4)
    assert found.latecomer is not None
    assert found.latecomer.rank == 1


def test_waits_in_a_call_that_only_agrees_are_late_entry(tmp_path: Path) -> None:
    # Rank 1 comes to every step 0.5 s late. The calls after it begin together.
    path = tmp_path / "steps"
    recorder = Recorder(path, 1e9, "0.1")
    for rank in range(2):
        for message in arrive(rank):
            recorder.add_message(0.0, rank, message)
        for step in range(10):
            at_s = 1.0 + step - offset_s(rank)
            entered_s = at_s + 0.5 * (rank == 1)
            recorder.add_message(60.0, rank, Agreed("0-1", 2 * step, entered_s, at_s + 0.5))
            own = call(rank, 2 * step + 1, 1.5 + step, *_times(0.3, 0.3))
            recorder.add_message(60.0, rank, own)
    recorder.close()
    found = summarise(Record(path))
    first = found.ranks[0]
    assert first.calls == 10
    assert [first.late_s, first.skew_s] == pytest.approx([5.0, 0.0], abs=1e-4)
    assert first.total_s == pytest.approx(10.0)  # steps and calls
    assert found.latecomer is not None
    assert found.latecomer.rank == 1
    said = CliRunner().invoke(command, ["summary", str(path)]).output
    assert "rank 0, agreement call 0 at 1.000 s: rank 1 entered the call 500.0 ms later" in said
    out = tmp_path / "trace.json"
    assert CliRunner().invoke(command, [str(path), "-o", str(out)]).exit_code == 0
    assert replay(Record(path)).snapshot().ranks[0].status == "live"


def test_ranks_that_come_late_in_turns_are_no_latecomers(tmp_path: Path) -> None:
    calls = []
    for number in range(12):
        at_s = 1.0 + 0.6 * number
        early, late = _times(0.3, 0.4), _times(0.3, 0.3)
        ranks = dict.fromkeys(range(3), (at_s, early)) | {number % 3: (at_s + 0.1, late)}
        calls.append(ranks)
    found = _three_ranks(tmp_path / "turns", calls)
    # Each of the three waits for the others in eight of the twelve calls.
    assert [rank.late_s for rank in found.ranks] == pytest.approx([0.8] * 3, abs=1e-4)
    assert [rank.skew_s for rank in found.ranks] == pytest.approx([0.0] * 3, abs=1e-4)
    assert found.latecomer is None


def test_each_lane_of_a_pipeline_has_a_thread_in_the_trace(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "own.record", 1e9, "0.1")
    for message in arrive(0, 1):
        if isinstance(message, PlanSummary):
            lanes = ("prepare", "finish", "finish")
            tasks = [
                msgspec.structs.replace(task, lane=lane, sends=[], recvs=[])
                for task, lane in zip(message.tasks, lanes, strict=True)
            ]
            message = msgspec.structs.replace(message, tasks=tasks)
        recorder.add_message(0.0, 0, message)
    times = ((0.0, 0.0, 0.5), (0.0, 0.4, 0.6), (0.0, 0.6, 0.9))
    recorder.add_message(1.0, 0, call(0, 0, 1.0, *times, group="0-0"))
    recorder.close()
    record = Record(tmp_path / "own.record")
    write_trace(record, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    rows = [names[e["tid"]] for e in events if e["ph"] == "X"]
    assert rows == ["prepare", "finish", "finish"]
    # All of them compute: from 0 to 0.9 s, of which two do at once for 0.1 s.
    assert summarise(record).ranks[0].compute_s == pytest.approx(0.9, abs=1e-4)


def test_a_summary_says_what_the_record_lacks(tmp_path: Path) -> None:
    path = tmp_path / "dropped.record"
    recorder = Recorder(path, 1e9, "0.1")
    for rank in range(2):
        recorder.add_message(0.0, rank, arrive(rank)[0])
        for dropped in (3, 700):
            told = msgspec.structs.replace(counters(rank, 1.0, 5), dropped=dropped)
            recorder.add_message(1.0, rank, told)
    recorder.close()
    assert summarise(Record(path)).dropped == 1400
    printed = CliRunner().invoke(command, ["summary", str(path)]).output
    assert "not in the record: 1,400 messages that found no room" in printed
