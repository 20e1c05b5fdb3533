"""A record at any time of it: the same as a replay up to there, however one goes back and forth."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec
import pytest
from telemetry_feed import Load, record_load

from burst_rt.telemetry.messages import Recorded
from burst_rt.telemetry.model.job_model import JobModel
from burst_rt.telemetry.read.record import Record
from burst_rt.telemetry.read.tape import Tape, TapeViewer, replay

_LENGTH_S = 90.0


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    path = tmp_path_factory.mktemp("tape") / "job.record"
    record_load(path, Load(2, 60.0), _LENGTH_S)
    return Record(path)


def _seen(model: JobModel) -> bytes:
    """All that viewers see, but for the length and the number of messages that there have been."""
    snapshot = model.snapshot()
    snapshot.job.length_s, snapshot.revision = None, 0
    names = [source.name for source in snapshot.sources]
    series = [model.series(name, (), 0.0) for name in names]
    return msgspec.json.encode((snapshot, series, model.timeline(-60.0, limit=10_000)))


def test_any_moment_is_what_a_replay_up_to_there_has(record: Record) -> None:
    tape, draw = Tape(record), random.Random(5)
    assert tape.length_s == pytest.approx(_LENGTH_S)
    for _ in range(12):
        at_s = draw.uniform(0.0, _LENGTH_S)
        model = tape.at(at_s)
        assert model.now_s == at_s
        assert _seen(model) == _seen(replay(record, at_s)), at_s
        assert model.snapshot().job.length_s == tape.length_s


def test_times_beyond_the_ends_are_the_ends(record: Record) -> None:
    tape = Tape(record)
    assert tape.at(-5.0).now_s == 0.0
    for at_s in (_LENGTH_S, 1e9, float("inf"), float("nan")):
        assert _seen(tape.at(at_s)) == _seen(replay(record))
    cut = Tape(record, 30.0)
    assert cut.length_s == 30.0
    assert _seen(cut.at(80.0)) == _seen(replay(record, 30.0))


def test_going_on_reads_on_and_going_back_holds_few_models(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    tape, opened = Tape(record), list[int]()
    read = Record.__iter__

    def counted(self: Record) -> Iterator[Recorded]:
        opened.append(1)
        return read(self)

    monkeypatch.setattr(Record, "__iter__", counted)
    for i in range(50):
        tape.at(20.0 + i / 10)
    assert len(opened) == 1
    models = {id(tape.at(60.0 - i)) for i in range(30)}
    assert len(models) > 3  # those that are held no more
    assert len(tape._reels) == 3


def test_a_viewer_has_any_moment_and_the_end_unless_asked(record: Record) -> None:
    viewer = TapeViewer(Tape(record))
    assert viewer.snapshot().job.now_s == pytest.approx(_LENGTH_S)
    early = viewer.at(10.0)
    assert early.snapshot().progress.step < viewer.snapshot().progress.step
    assert all(
        call.spans[-1].started_s <= 10.0 for call in early.timeline(-60.0, None, (), 100).calls
    )
    assert max(viewer.series(["job"], ["loss"], -1e9, 1000)[0].times) > 89.0
