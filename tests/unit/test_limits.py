"""What limits a job: each rule by figures worked out by hand, and the model over recorded calls."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from telemetry_feed import Times, arrive, beat, call

from burst_rt.telemetry.messages import Agreed, Bye, Group
from burst_rt.telemetry.model import limits
from burst_rt.telemetry.model.account import GroupAccount, TimesOfRanks
from burst_rt.telemetry.model.job_model import JobModel
from burst_rt.telemetry.model.limits import Evidence, verdict_on
from burst_rt.telemetry.model.views import RankView, SourceView, Verdict
from burst_rt.telemetry.model.whole_calls import CallOfAll
from burst_rt.telemetry.read.record import Record, Recorder
from burst_rt.telemetry.read.summary import summarise
from burst_rt.telemetry.read.tape import replay


def _times(**seconds: Iterable[float]) -> TimesOfRanks:
    """Ten calls of three ranks, 10 s each in calls, of which they compute 9.6."""
    times = TimesOfRanks([0, 1, 2])
    times.num_calls = 10
    times.total_s += 10.0
    times.compute_s += 9.6
    for name, values in seconds.items():
        getattr(times, name)[:] = list(values)
    return times


def _rank(number: int, **about: Any) -> RankView:
    known: dict[str, Any] = {"host": "n1", "pid": 7, "device": "cpu", "source": f"rank:{number}"}
    return RankView(rank=number, status_since_s=0.0, heard_s=0.0, **(known | about))


def _source(name: str, **values: float) -> SourceView:
    about = {"cores": "2"} if name.startswith("host") else {}
    return SourceView(name=name, kind="", host="n1", about=about, metrics=[], values=values)


def _evidence(times: TimesOfRanks, *sources: SourceView, **about: Any) -> Evidence:
    ranks = [_rank(number, **about) for number in range(3)]
    return Evidence([times], ranks, {source.name: source for source in sources})


def _full(cpu: float, got: float) -> list[SourceView]:
    ranks = [_source(f"rank:{i}", compute_percent=90.0, process_percent=got) for i in range(3)]
    return [_source("host:n1", cpu_percent=cpu), *ranks]


_LATE = _times(awaited_s=[0, 8, 0], beyond_s=[-2, 4, -2], most_s=[0, 0.7, 0], late_s=[4, 0, 4])
_SAVING = _times(
    total_s=[1] * 3, compute_s=[0.6] * 3, awaited_s=[0, 0.8, 0], beyond_s=[-0.2, 0.4, -0.2],
    late_s=[0.4, 0, 0.4],
)  # fmt: skip
_WIRE = _times(exposed_s=[3, 1, 2])
_SKEW = _times(skew_s=[2, 0, 2], compute_s=[7.5, 9.5, 7.5])


@pytest.mark.parametrize(
    ("evidence", "kind", "rank", "share", "text"),
    [
        (_evidence(_LATE), "late rank", 1, 0.4, "400.0 ms more than the others, who wait 40 %"),
        (_evidence(_WIRE), "transfers", -1, 0.2, "wait 20 % of .* rank 0 most, 30 %"),
        (_evidence(_SKEW), "uneven ranks", 1, 4 / 30, "rank 1 computes 1.16 times as long"),
        (_evidence(_times(skew_s=[1, 2, 1])), "uneven ranks", -1, 4 / 30, "each other, in turns"),
        (
            _evidence(_times(), *_full(98.0, 30.0)), "full host", -1, 0.6,
            "host n1 is full: 3 ranks on 2 cores, each gets 30 % of one",
        ),
        (
            _evidence(_SKEW, _source("gpu1", throttle_bits=0x44), gpu="gpu1", device="cuda"),
            "throttled GPU", 1, 4 / 30, r"rank 1 is held back \(hardware thermal slowdown\)",
        ),
        (_evidence(_times(compute_s=[4, 5, 3])), "overhead", -1, 0.6, "spend 60 % .* neither"),
        (
            _evidence(_LATE)._replace(spans={0: {"a": 0.1}, 1: {"a": 0.9, "b": 0.5}, 2: {}}),
            "late rank", 1, 0.4, r"more than the others \(most of it in its span 'a'\), who wait",
        ),
        (
            _evidence(_LATE)._replace(spans={rank: {"a": 0.8} for rank in range(3)}),
            "late rank", 1, 0.4, "more than the others, who wait",
        ),
        (
            _evidence(_SAVING)._replace(spans={1: {"data": 0.1, "checkpoint": 0.3}}),
            "checkpoint", 1, 0.4, "checkpoints take 40.0 ms a call of rank 1, for which",
        ),
        (
            _evidence(_times())._replace(spans={0: {"data": 0.2}, 1: {"data": 0.3}}),
            "input pipeline", 1, 0.3, "the input pipeline takes 30 % of the time of rank 1",
        ),
        (_evidence(_times(between_s=[40, 40, 40])), "outside", -1, 0.8, "80 % of the time is out"),
        (_evidence(_times()), "nothing", -1, 0.0, "ranks compute 96 % of their time in calls"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)  # fmt: skip
def test_each_rule(evidence: Evidence, kind: str, rank: int, share: float, text: str) -> None:
    verdict = verdict_on(evidence)
    assert (verdict.kind, verdict.rank) == (kind, rank)
    assert verdict.share == pytest.approx(share)
    assert re.search(text, verdict.text), verdict.text
    assert bool(verdict.advice) == (kind != "nothing")


@pytest.mark.parametrize(
    "evidence",
    [
        _evidence(_times(exposed_s=[0.4, 0.4, 0.4])),  # less than 5 percent
        _evidence(_times(), *_full(80.0, 30.0)),  # a core is free
        _evidence(_times(), *_full(98.0, 89.0)),
        _evidence(_times(), *_full(98.0, 30.0), device="cuda"),
        _evidence(_times(awaited_s=[0, 8, 0], late_s=[4, 0, 4])),  # ranks come late in turns
        _evidence(_SKEW, _source("gpu1", throttle_bits=0x4), gpu="gpu1")._replace(
            groups=[_times()]
        ),  # a power cap that costs nothing
    ],
)
def test_what_costs_little_is_no_verdict(evidence: Evidence) -> None:
    assert verdict_on(evidence).kind == "nothing"


def test_the_dearest_is_told() -> None:
    both = _times(exposed_s=[3, 3, 3], awaited_s=[0, 4, 0], beyond_s=[-1, 2, -1], late_s=[2, 0, 2])
    assert verdict_on(_evidence(both)).kind == "transfers"
    both.awaited_s, both.beyond_s = 2 * both.awaited_s, 2 * both.beyond_s
    assert verdict_on(_evidence(both)).kind == "late rank"


def _tiles(first_s: float, met_s: float) -> Times:
    """When the own first tile is done, and the last rank's."""
    came_s = met_s + 0.01
    return ((first_s, first_s, came_s), (0.0, 0.0, first_s), (came_s, came_s, met_s + 0.2))


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The record of a minute. Before each of the first 80 calls rank 1 sleeps 0.1 s, and the others
    wait for it behind their first tiles. Then nobody sleeps.
    """
    path = tmp_path_factory.mktemp("limits") / "late"
    recorder = Recorder(path, 1e9, "0.1")
    for rank in range(3):
        for message in arrive(rank, 3):
            recorder.add_message(0.0, rank, message)
    for number in range(100):
        at_s, sleeps = 1.0 + 0.6 * number, number < 80
        for rank in range(3):
            first = sleeps and rank != 1
            tiles = _tiles(0.3, 0.4 if first else 0.3)
            entered_s = at_s + 0.1 * (sleeps and rank == 1)
            ended = call(rank, number, entered_s, *tiles, group="0-2")
            recorder.add_message(at_s + 0.6, rank, ended)
    recorder.close()
    return path


def _verdict(path: Path, until_s: float | None = None) -> Verdict:
    verdict = replay(Record(path), until_s).snapshot().job.verdict
    assert verdict is not None
    return verdict


def test_the_model_says_what_the_summary_says(late: Path) -> None:
    verdict = _verdict(late, 45.0)
    assert (verdict.kind, verdict.rank) == ("late rank", 1)
    latecomer = summarise(Record(late)).latecomer
    assert latecomer is not None
    assert latecomer.rank == 1
    # The summary's last fifth has no latecomer.
    assert verdict.share == pytest.approx(latecomer.waited_share / 0.82, abs=0.02)
    assert verdict.since_s < 5.0


def test_a_verdict_is_about_the_last_ten_seconds(late: Path) -> None:
    verdict = _verdict(late, 60.5)
    assert verdict.kind == "nothing"
    assert 49.0 < verdict.since_s < 60.0


def test_after_the_end_it_is_what_limited_the_job_for_the_longest_time(
    late: Path, tmp_path: Path
) -> None:
    path = tmp_path / "ended"
    path.write_bytes(late.read_bytes())
    model = replay(Record(path))
    for rank in range(3):
        model.apply(62.0, rank, Bye(62.0, 0, ""))
    verdict = model.snapshot().job.verdict
    assert verdict is not None
    assert (verdict.kind, verdict.rank) == ("late rank", 1)


def test_of_more_calls_than_there_is_time_for_some_are_left_out(
    late: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_into: list[int] = []

    class Counted(GroupAccount):
        def add(self, call: CallOfAll, idles: Any) -> TimesOfRanks:
            looked_into.append(call.number)
            return super().add(call, idles)

    monkeypatch.setattr(limits, "GroupAccount", Counted)
    verdicts = [_verdict(late, 45.0)]
    all_of_them = len(looked_into)
    looked_into.clear()
    monkeypatch.setattr(limits, "_SPANS_A_SECOND", 5)
    verdicts.append(_verdict(late, 45.0))
    assert all_of_them / 4 < len(looked_into) < all_of_them * 3 / 4
    assert {(verdict.kind, verdict.rank) for verdict in verdicts} == {("late rank", 1)}


def test_nothing_limits_a_job_that_has_not_called_for_a_while(tmp_path: Path) -> None:
    model = JobModel(1e9)
    for rank in range(2):
        for message in arrive(rank):
            model.apply(0.0, rank, message)
    wire = ((0.0, 0.0, 0.5), (0.0, 0.0, 0.2), (0.2, 0.5, 0.6))
    for number in range(5):
        for rank in range(2):
            model.apply(0.7 * number, rank, call(rank, number, 0.7 * number, *wire))
    verdict = model.snapshot().job.verdict
    assert verdict is not None
    assert verdict.kind == "transfers"
    for rank in range(2):
        model.apply(4.0, rank, beat(rank, 4.0, number=5, doing="hop 1", since_s=3.5))
    model.advance(30.0)
    assert model.snapshot().job.verdict is not None, "a call may take minutes"
    for rank in range(2):
        model.apply(30.0, rank, beat(rank, 30.0))
    model.advance(31.0)
    assert model.snapshot().job.verdict is None


def test_contexts_that_come_and_go_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_MAX_NUMBERS", 256)
    monkeypatch.setattr("burst_rt.telemetry.model.plans._MAX_GROUPS", 1024)
    model = JobModel(1e9)
    for rank in range(2):
        for message in arrive(rank):
            model.apply(0.0, rank, message)
    for number in range(2000):
        for rank in range(2):
            model.apply(1.0, rank, Group(f"#{number}", [0, 1], "mpi", ""))
            model.apply(1.0, rank, Agreed(f"#{number}", 0, 1.0, 1.1))
    assert len(model._limits._accounts) == 64
    assert len(model.plans.groups) == 1024
    assert "#1999" in model.plans.groups
