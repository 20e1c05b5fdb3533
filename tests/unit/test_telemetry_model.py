"""The model that all viewers ask: what it makes of messages, and that it stays bounded."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np
import pytest
from telemetry_feed import arrive, beat, call, counters, gpu_sample, offset_s

from burst_rt.telemetry.messages import (
    Bye,
    EndedCall,
    FromRank,
    HubReport,
    JobReport,
    Note,
    PhaseEnded,
    PlanSummary,
    Severity,
    SourceSample,
)
from burst_rt.telemetry.metrics import METRICS, plausible, throttle_reasons
from burst_rt.telemetry.model.history import FULL_S, SourceHistory
from burst_rt.telemetry.model.job_model import JobModel
from burst_rt.telemetry.model.timeline import RecentCalls
from burst_rt.telemetry.model.views import Snapshot, TimelineView


def _job(world_size: int = 2, *, gpu: bool = False) -> JobModel:
    model = JobModel(1e9)
    for rank in range(world_size):
        _feed(model, rank, arrive(rank, world_size, gpu=gpu))
    return model


def _feed(model: JobModel, rank: int, messages: Iterable[FromRank], at_s: float = 0.0) -> None:
    for message in messages:
        model.apply(at_s, rank, message)


# By hand: rank 0's message is on the wire from 0 to 0.3, rank 1's from 0.1 (when rank 1 posts) to
# 0.5.
_TIMES_0 = ((0.0, 0.0, 0.5), (0.0, 0.0, 0.2), (0.2, 0.5, 0.6))
_TIMES_1 = ((0.0, 0.0, 0.2), (0.0, 0.0, 0.3), (0.2, 0.3, 0.4))


def test_a_call_of_all_ranks_tells_who_waited_for_whom() -> None:
    model = _job()
    model.apply(1.0, 0, call(0, 7, 10.0, *_TIMES_0))
    view = model.timeline(0.0, 20.0)
    # the other rank's part may still come
    assert (view.num_spans, view.complete, view.waits) == (
        3,
        0,
        [],
    )
    model.apply(1.0, 1, call(1, 7, 10.1, *_TIMES_1))
    view = model.timeline(0.0, 20.0)
    assert (view.num_spans, view.complete, view.left_out) == (6, 1, 0)
    part = next(c for c in view.calls if c.rank == 1)
    first = next(s for s in part.spans if s.task == 2)
    assert (first.name, first.lane, first.hop, part.call, part.kind) == (
        "hop 1 q0 kv1",
        "compute",
        1,
        7,
        "forward",
    )
    assert first.started_s == pytest.approx(10.4)
    # Rank 0 has nothing to do from 0.2 to 0.5 while rank 1's message, posted at 0.1, is on the
    # wire. Rank 1 never waits.
    (wait,) = view.waits
    assert (wait.rank, wait.cause, wait.peer, wait.task) == (0, "exposed", 1, "hop 0")
    assert [wait.started_s, wait.ended_s] == pytest.approx([10.2, 10.5])
    assert [
        (f.sender, f.receiver, f.size_bytes) for f in sorted(view.flows, key=lambda f: f.sender)
    ] == [(0, 1, 1000), (1, 0, 1000)]


def test_a_late_peer_is_skew() -> None:
    model = _job()
    model.apply(1.0, 0, call(0, 7, 10.0, (0.0, 0.0, 0.5), (0.0, 0.0, 0.1), (0.1, 0.5, 0.6)))
    model.apply(1.0, 1, call(1, 7, 10.4, (0.0, 0.0, 0.1), (0.0, 0.0, 0.1), (0.1, 0.1, 0.2)))
    waits = [w for w in model.timeline(0.0, 20.0).waits if w.rank == 0]
    assert [w.cause for w in waits] == ["skew", "exposed"]
    assert [w.ended_s - w.started_s for w in waits] == [
        pytest.approx(0.3, abs=1e-5),
        pytest.approx(0.1, abs=1e-5),
    ]


def test_a_timeline_is_cut_to_its_limit_and_says_so() -> None:
    model = _job()
    for number in range(10):
        model.apply(1.0, 0, call(0, number, 10.0 + number, *_TIMES_0))
    view = model.timeline(0.0, 30.0, ranks=[0], limit=6)
    assert [call.call for call in view.calls] == [8, 9]
    assert (view.num_spans, view.left_out) == (6, 24)
    assert model.timeline(12.0, 13.2, ranks=[0]).calls[0].call == 2


def test_counts_become_rates() -> None:
    model = _job()
    model.apply(1.0, 0, counters(0, 1.0, 2))
    model.apply(3.0, 0, counters(0, 3.0, 4))
    (rank,) = (r for r in model.snapshot().ranks if r.rank == 0)
    assert (rank.calls, rank.lanes["network"].size_bytes) == (4, 4000)
    assert rank.overlap == pytest.approx(0.75)
    values = model.series("rank:0").values
    assert {name: column[-1] for name, column in values.items()} == {
        "flops_per_s": 20.0, "sent_bytes_per_s": 1000.0, "calls_per_s": 1.0,
        "compute_percent": 50.0,
        "wait_percent": pytest.approx(10.0), "overlap_percent": pytest.approx(75.0),
        "outside_percent": pytest.approx(0.0),
    }  # fmt: skip


def test_time_outside_of_calls_is_a_rate() -> None:
    model = _job()
    for hub_s, calls in ((1.0, 2), (3.0, 4), (7.0, 5), (9.5, 5)):
        model.apply(hub_s, 0, counters(0, hub_s, calls))
    # Every call takes a second: two of the first two seconds, one of the next four, none at last.
    shares = model.series("rank:0").values["outside_percent"]
    assert shares == pytest.approx([0.0, 75.0, 100.0])


def test_a_lost_rank_is_named_with_what_it_did() -> None:
    model = _job()
    _feed(model, 1, [beat(1, 4.0, number=3, doing="hop 2", since_s=3.0, hop=2)], at_s=4.0)
    model.advance(4.5)
    model.apply(4.5, -1, HubReport(1, "lost", "its connection closed unexpectedly"))
    rank = model.snapshot().ranks[1]
    assert (rank.status, rank.call, rank.doing, rank.hop) == ("lost", 3, "hop 2", 2)
    assert rank.doing_since_s == pytest.approx(3.0)
    event = model.snapshot().events[-1]
    assert event.severity is Severity.ERROR
    known = "last heard 0.5 s before, in call 3, hop 2, for 1.0 s"
    assert event.line == f"4.500 s rank 1 lost: its connection closed unexpectedly; {known}"
    assert rank.ending == event.text
    lost = model.first_lost
    assert lost is not None
    assert (lost.rank, lost.call, lost.task, lost.hop, lost.activity) == (1, 3, "hop 2", 2, known)
    assert [lost.at_s - 1e9, lost.age_s] == pytest.approx([4.5, 0.5])


def test_what_is_not_known_of_a_lost_rank_is_not_said() -> None:
    """Calls of milliseconds, and a rank that tells where it is twice a second: it may have been
    anywhere since.
    """
    model = _job()
    _feed(model, 1, [beat(1, 4.0), call(1, 7, 4.0, *_TIMES_1)], at_s=4.0)
    model.apply(4.4, -1, HubReport(1, "lost", "it ended"))
    assert model.snapshot().events[-1].text == "it ended; last heard 0.4 s before, after call 7"
    assert model.first_lost is not None
    assert (model.first_lost.call, model.first_lost.last_call, model.first_lost.hop) == (-1, 7, -1)
    # The call that it was in has ended since.
    model = _job()
    _feed(model, 1, [beat(1, 4.0, number=7, doing="hop 1", since_s=4.0)], at_s=4.0)
    _feed(model, 1, [call(1, 7, 4.0, *_TIMES_1)], at_s=4.2)
    model.apply(4.4, -1, HubReport(1, "lost", "it ended"))
    assert model.snapshot().events[-1].text == "it ended; last heard 0.2 s before, after call 7"
    # It had said nothing but who it is.
    model = JobModel(1e9)
    model.apply(0.0, 0, arrive(0)[0])
    model.apply(1.0, -1, HubReport(0, "lost", "it ended"))
    assert model.snapshot().events[-1].text == "it ended"


def test_ranks_that_end_after_a_lost_one_are_not_blamed() -> None:
    model = _job(4)
    # it heard of it before the hub did
    model.apply(1.0, 0, Bye(1.0, 75, "PeerLost: rank 2 is gone"))
    model.apply(1.1, -1, HubReport(2, "lost", "it ended"))
    model.apply(1.2, 1, Bye(1.2, 75, "PeerLost: rank 2 is gone"))
    model.apply(1.3, -1, HubReport(3, "lost", "it ended"))
    shown = model.snapshot()
    assert [rank.status for rank in shown.ranks] == ["ended", "ended", "lost", "ended"]
    assert [event.rank for event in shown.events if event.severity is Severity.ERROR] == [0, 2]
    assert shown.events[-1].line.startswith("1.300 s rank 3 ended: after rank 2; it ended")
    assert model.first_lost is not None
    assert model.first_lost.rank == 2
    # One that says why it fails is the cause too.
    model = _job()
    model.apply(1.0, 1, Bye(1.0, 1, "KeyError: 'x'"))
    model.apply(1.1, -1, HubReport(0, "lost", "it ended"))
    assert [rank.status for rank in model.snapshot().ranks] == ["ended", "left"]
    assert model.first_lost is not None
    assert (model.first_lost.rank, model.first_lost.exit_code, model.first_lost.reason) == (
        1,
        1,
        "KeyError: 'x'",
    )


def test_a_rank_that_comes_back_is_the_cause_of_nothing() -> None:
    model = _job()
    model.apply(1.0, -1, HubReport(1, "lost", "it ended"))
    _feed(model, 1, arrive(1), at_s=2.0)
    assert model.first_lost is None
    assert model.snapshot().ranks[1].status == "live"


def test_a_silent_rank_is_noticed_and_comes_back() -> None:
    model = _job()
    model.advance(1.9)
    assert {r.status for r in model.snapshot().ranks} == {"live"}
    model.advance(2.1)
    assert {r.status for r in model.snapshot().ranks} == {"silent"}
    _feed(model, 0, [beat(0, 2.2)], at_s=2.2)
    assert [r.status for r in model.snapshot().ranks] == ["live", "silent"]
    assert [e.kind for e in model.snapshot().events[-3:]] == ["silent", "silent", "back"]


def test_a_rank_that_says_goodbye_is_not_lost() -> None:
    model = _job()
    model.apply(5.0, 0, Bye(5.0, 0))
    model.apply(5.0, 1, Bye(5.0, 1, "KeyError: 'x'"))
    model.apply(5.1, -1, HubReport(0, "lost", "its connection ended"))
    model.advance(60.0)
    assert [(r.status, r.exit_code, r.call) for r in model.snapshot().ranks] == [
        ("left", 0, -1),
        ("left", 1, -1),
    ]
    assert [r.ending for r in model.snapshot().ranks] == ["", "exit code 1: KeyError: 'x'"]
    assert model.snapshot().events[-1].text == "exit code 1: KeyError: 'x'"


def test_reports_notes_and_sources_are_shown() -> None:
    model = _job(gpu=True)
    model.apply(1.0, 0, gpu_sample(0, 1.0, 700.0))
    model.apply(1.0, 0, JobReport(1.0 - offset_s(0), 12, {"loss": 2.5, "tokens_per_s": 1e4}))
    model.apply(1.1, 0, JobReport(1.1 - offset_s(0), 13, {"loss": float("nan")}))
    model.apply(1.2, 1, Note(1.2, Severity.ERROR, "xid", "gpu:1: XID 79"))
    model.apply(1.1, 0, JobReport(1.1 - offset_s(0), 13, {"loss": float("nan")}))
    shown = model.snapshot()
    # Not the last loss there was; and it is said, once.
    assert (shown.progress.step, shown.progress.values) == (13, {"tokens_per_s": 1e4})
    assert [e.text for e in shown.events if e.kind == "not finite"] == [
        "the job reports loss = nan at step 13"
    ]
    sources = {source.name: source for source in shown.sources}
    assert sources["gpu:0"].values["power_w"] == 700.0
    assert sources["gpu:0"].ranks == [0]
    assert sources["job"].kind == "job"
    assert [(e.rank, e.kind, e.text) for e in shown.events][-1] == (1, "xid", "gpu:1: XID 79")
    assert model.events_after(shown.events[-2].number) == shown.events[-1:]
    assert model.events_after(shown.events[-1].number) == []
    assert shown.plans[0].explain == "ring-kv, zigzag"


def test_views_go_through_json() -> None:
    model = _job()
    model.apply(1.0, 0, call(0, 7, 10.0, *_TIMES_0))
    model.apply(1.0, 1, call(1, 7, 10.1, *_TIMES_1))
    for view, kind in ((model.snapshot(), Snapshot), (model.timeline(0.0, 20.0), TimelineView)):
        assert msgspec.json.decode(msgspec.json.encode(view), type=kind) == view


def test_messages_of_unknown_ranks_and_plans_do_no_harm() -> None:
    model = _job()
    model.apply(1.0, 9, beat(1, 1.0))
    model.apply(1.0, 0, SourceSample("gpu:none", 1.0, {"power_w": 1.0}))
    model.apply(1.0, 0, msgspec.structs.replace(call(0, 1, 1.0, *_TIMES_0), plan=99))
    model.apply(1.0, 0, msgspec.structs.replace(call(0, 2, 1.0, *_TIMES_0), spans=b"seven"))
    model.apply(1.0, -1, HubReport(17, "lost", "who was that"))
    assert model.timeline(0.0, 9.0).calls == []
    assert model.series("nobody").times == []


def test_a_history_is_exact_for_ten_minutes_and_thinned_after() -> None:
    history = SourceHistory(rows_per_s=5.0)
    for i in range(5 * 3600):
        history.add(i / 5, {"x": float(i)} | ({"late": 1.0} if i > 17_000 else {}))
    times, values = history.window(3600 - FULL_S, 3600, max_rows=5000)
    assert len(times) == 3000
    assert np.array_equal(values["x"], np.arange(15_000, 18_000, dtype=np.float32))
    assert np.isnan(values["late"][0])
    assert values["late"][-1] == 1.0
    # Before that a mean of 5 s: 25 rows.
    times, values = history.window(0.0, 2900.0, ["x"], max_rows=10_000)
    assert len(times) == 580
    assert values["x"][100] == pytest.approx(25 * 100 + 12)
    assert np.all(np.diff(times) > 0)
    times, _ = history.window(0.0, 3600.0, ["x"], max_rows=500)
    assert len(times) <= 500


def test_a_history_of_days_takes_no_more() -> None:
    history = SourceHistory(rows_per_s=0.1)
    sizes = []
    for i in range(0, 40_000, 10):
        history.add(float(i * 6), {"x": 1.0})
        sizes.append(history.size_bytes)
    assert sizes[-1] == sizes[len(sizes) // 2]
    times, _ = history.window(0.0, 1e9)
    assert times[0] > 0  # the first day is gone


def _past(number: int, started_s: float, num_bytes: int) -> EndedCall:
    """A call of half a second."""
    return EndedCall(
        group="g", number=number, plan=0, started_s=started_s, ended_s=started_s + 0.5,
        compute_s=0.0, wait_s=0.0, spans=bytes(num_bytes),
    )  # fmt: skip


def test_recent_calls_are_bounded_by_time_and_by_size() -> None:
    recent = RecentCalls(10_000)
    for i in range(200):
        recent.add(_past(i, float(i), 160))
    assert recent.size_bytes <= 10_000
    kept = [c.number for c in recent.newest_first(0.0, 1e9)]
    assert kept[0] == 199
    assert recent.get("g", 199) is not None
    assert recent.get("g", kept[-1] - 1) is None
    recent.add(_past(500, 1000.0, 0))
    assert [c.number for c in recent.newest_first(0.0, 1e9)] == [500]
    recent.add(_past(501, 1002.0, 20_000))  # more than there is room for
    assert (list(recent.newest_first(0.0, 1e9)), recent.size_bytes) == ([], 0)


def test_the_model_of_64_ranks_stays_within_its_bound() -> None:
    """A quarter of an hour of four ranks at full rate; it grows with ranks, not with time.
    `python -m benchmarks hub` does the hour.
    """
    model = _job(4, gpu=True)
    sizes = []
    for i in range(5 * 900):
        at_s = i / 5
        for rank in range(4):
            model.apply(at_s, rank, gpu_sample(rank, at_s, 500.0))
            model.apply(at_s, rank, counters(rank, at_s, i))
            model.apply(at_s, rank, call(rank, i, at_s, *_TIMES_0, group="0-3"))
        if i % 300 == 0:
            sizes.append(sum(s.history.size_bytes for s in model.sources.values()))
    assert sizes[-1] < 1.1 * sizes[-4]
    # The rest of the 100 MB is for spans (16 MB), plans and Python's own.
    assert 16 * sizes[-1] < 60e6


def test_metrics_have_ranges_and_reasons_have_words() -> None:
    assert plausible("power_w", 700.0)
    assert not plausible("power_w", -1.0)
    assert not plausible("sm_percent", 101.0)
    assert not plausible("whatever", float("nan"))
    assert plausible("whatever", -5.0)
    assert throttle_reasons(0x4 | 0x40) == ["power cap", "hardware thermal slowdown"]
    assert all(metric.low < metric.high and metric.label for metric in METRICS.values())


def test_rates_are_steady_where_calls_are_longer_than_the_time_between_counts() -> None:
    model = _job()
    for i in range(50):
        # a call a second, counted five times a second
        model.apply(i / 5, 0, counters(0, i / 5, i // 5))
    rates = model.series("rank:0", ["calls_per_s"], since_s=4.0).values["calls_per_s"]
    assert all(rate == pytest.approx(1.0) for rate in rates)


def test_rates_of_calls_that_take_long() -> None:
    """Ten calls of 10 s, 95 % of it in tiles, counted five times a second; then nothing any
    more.
    """
    model = _job()
    for i in range(500):
        number = i // 50
        model.apply(i / 5, 0, beat(0, i / 5, number=number, doing="hop 0", since_s=10.0 * number))
        model.apply(
            i / 5, 0, msgspec.structs.replace(counters(0, i / 5, number), compute_s=9.5 * number)
        )
    rates = model.series("rank:0", ["compute_percent", "calls_per_s"], since_s=12.0).values
    assert {round(x) for x in rates["compute_percent"] if x is not None} == {95}
    assert model.snapshot().sources[0].values["calls_per_s"] == pytest.approx(0.1)
    for i in range(500, 530):
        model.apply(i / 5, 0, beat(0, i / 5))
        model.apply(i / 5, 0, msgspec.structs.replace(counters(0, i / 5, 9), compute_s=9.5 * 9))
    assert model.snapshot().sources[0].values["compute_percent"] == 0.0


def test_figures_that_no_longer_come_are_not_shown() -> None:
    model = _job(gpu=True)
    model.apply(1.0, 0, gpu_sample(0, 1.0, 690.0))
    for at_s, there in ((5.9, True), (6.1, False)):
        model.apply(at_s, 0, beat(0, at_s))
        source = next(s for s in model.snapshot().sources if s.name == "gpu:0")
        assert ("power_w" in source.values) == there
    assert model.series("gpu:0", ["power_w"], since_s=0.0).values["power_w"] == [690.0]


def test_a_hub_that_stood_still_blames_nobody() -> None:
    model = _job()
    for rank in (0, 1):
        model.apply(1.0, rank, beat(rank, 1.0))
    model.excuse(8.5, 7.0)
    model.advance(8.5)
    assert [rank.status for rank in model.snapshot().ranks] == ["live", "live"]
    model.advance(60.0)
    silent = [event for event in model.snapshot().events if event.kind == "silent"]
    assert [(event.rank, event.at_s) for event in silent] == [(0, 10.0), (1, 10.0)]


def test_plans_that_run_are_kept_and_others_give_way() -> None:
    model = _job()
    plan = next(message for message in arrive(0) if isinstance(message, PlanSummary))
    for number in range(300):
        model.apply(1.0 + number / 100, 0, msgspec.structs.replace(plan, number=number))
        model.apply(
            1.0 + number / 100,
            0,
            msgspec.structs.replace(call(0, number, 1.0 + number / 100, *_TIMES_0), plan=0),
        )
    shown = model.timeline(0.0, 60.0)
    assert shown.left_out == 0
    assert shown.num_spans
    assert len(model.plans.ranks[0].packed) == 256


def test_steps_and_spans_are_kept_for_a_minute_and_their_number_is_bounded() -> None:
    model = _job()
    for second in range(100):
        at_s = second - offset_s(0)
        model.apply(second + 1.0, 0, PhaseEnded("", second, 0, at_s, at_s + 1.0))
    shown = model.timeline(0.0, 200.0)
    assert [phase.step for phase in shown.phases] == list(range(39, 100))
    assert shown.phases[-1].started_s == pytest.approx(99.0)
    assert shown.phases_left_out == 0
    window = model.timeline(50.5, 52.5, ranks=[0], limit=2)
    assert [phase.step for phase in window.phases] == [51, 52]
    assert window.phases_left_out == 1
    assert model.timeline(50.5, 52.5, ranks=[1]).phases == []
    for _ in range(70_000):
        model.apply(101.0, 1, PhaseEnded("tiny", 0, 1, -100.0, -100.0))
    shown = model.timeline(0.0, 200.0, limit=100_000)
    assert sum(phase.rank == 1 for phase in shown.phases) == 65_536 // 2
    _feed(model, 0, arrive(0), at_s=102.0)  # another process
    assert all(phase.rank == 1 for phase in model.timeline(0.0, 200.0).phases)


def test_attentions_part_of_steps_is_of_all_ranks() -> None:
    model = _job()
    assert model.snapshot().job.step_share is None
    for rank, (step_s, step_call_s) in enumerate(((4.0, 1.0), (6.0, 3.0))):
        counts = msgspec.structs.replace(
            counters(rank, 1.0, 2), steps=2, step_s=step_s, step_call_s=step_call_s
        )
        model.apply(1.0, rank, counts)
    assert model.snapshot().job.step_share == pytest.approx(0.4)


def test_a_thinned_window_has_what_came_in_turns() -> None:
    history = SourceHistory()
    for i in range(1001):
        history.add(i / 10, {"even": float(i)} if i % 2 == 0 else {"odd": float(i)})
    times, values = history.window(0.0, 1e9, max_rows=251)
    assert (len(times), times[0], times[-1]) == (251, pytest.approx(0.3), 100.0)
    assert (values["even"][0], values["odd"][0]) == (1.0, 2.0)
    assert not np.isnan(values["even"]).any()
    assert np.isnan(values["odd"]).sum() == 1  # the last row alone


def test_the_values_that_find_room_are_kept() -> None:
    model = _job()
    for step in range(2):
        values = {f"v{i}": 1.0 for i in range(40 + 20 * step)}
        model.apply(1.0 + step, 0, JobReport(1.0, step, values))
    model.apply(3.0, 0, JobReport(3.0, 2, {f"w{i}": 1.0 for i in range(20)}))
    names = model.series("job").values
    assert len(names) == 65
    assert {"v59", "w3", "step"} <= names.keys()


def test_plans_push_no_event_out_of_sight() -> None:
    model = _job()
    plan = next(message for message in arrive(0) if isinstance(message, PlanSummary))
    for number in range(10, 300):
        model.apply(1.0, 0, msgspec.structs.replace(plan, number=number))
    assert [event.kind for event in model.snapshot().events].count("plan") == 1


def test_spans_beside_the_ranks_own_thread_cost_it_nothing() -> None:
    model = _job()
    model.apply(10.0, 0, PhaseEnded("checkpoint", 1, 0, -100.0, -92.0, aside=True))
    for depth in (1, 0):
        model.apply(10.0, 0, PhaseEnded("data", 1, depth, -100.0, -96.0))
    shares = model.phases.shares(0.0, 10.0)[0]
    assert shares == {"data": pytest.approx(0.4)}
