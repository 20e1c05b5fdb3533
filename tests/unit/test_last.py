"""What a dashboard hands its pages before it goes (dashboard/last.py)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from telemetry_feed import Load, arrive, gpu_sample, offset_s

from burst_rt.dashboard.last import last_answers
from burst_rt.telemetry.messages import SourceSample
from burst_rt.telemetry.model.job_model import JobModel
from burst_rt.telemetry.read.viewer import ModelViewer

_LASTS_S = 7200


def _handed(model: JobModel) -> dict[str, Any]:
    last: dict[str, Any] = msgspec.json.decode(last_answers(ModelViewer(model), model.snapshot()))
    return last


def test_the_newer_a_part_of_a_history_is_the_finer_it_is() -> None:
    model = JobModel(1e9)
    for message in arrive(0, 1):
        model.apply(0.0, 0, message)
    for second in range(_LASTS_S + 1):
        values = {"process_percent": float(second)}
        if second >= _LASTS_S - 30:
            values["rss_bytes"] = 1e9  # measured only in the end
        sample = SourceSample("rank:0", second - offset_s(0), values)
        model.apply(float(second), 0, sample)
    (view,) = _handed(model)["series"]
    times, values = view["times"], view["values"]["process_percent"]
    for column in (times, values):
        assert column == sorted(column)
        assert len(column) == len(set(column))
    for range_s, least in ((60, 60), (600, 200), (3600, 350), (_LASTS_S, 500)):
        assert sum(at_s >= _LASTS_S - range_s for at_s in times) >= least
    assert times[0] < 1000
    assert (times[-1], values[-1]) == (_LASTS_S, _LASTS_S)
    # Rows of the last minute are single samples, older ones are means of their neighbours.
    assert values[-60:] == times[-60:]
    assert [row for row in view["values"]["rss_bytes"] if row] == [1e9] * 31
    assert len(view["values"]["rss_bytes"]) == len(times)


@pytest.mark.parametrize("num_ranks", [1, 64])
def test_its_size_is_bounded(num_ranks: int) -> None:
    model, load = JobModel(1e9), Load(num_ranks, 20_000.0)
    for rank in range(num_ranks):
        for message in arrive(rank, num_ranks, gpu=True):
            model.apply(0.0, rank, message)
    load.begin(model)
    for second in range(1, 301):
        for rank in range(num_ranks):
            # The heartbeats of `load` say that all clocks are one.
            sample = gpu_sample(rank, float(second), 300.0)
            at_s = float(second)
            model.apply(at_s, rank, msgspec.structs.replace(sample, at_s=at_s))
    load.calls = int(297 / load.period_s)
    load.advance(model, 300.0)
    last = _handed(model)
    num_spans = sum(len(call["spans"]) for call in last["timeline"]["calls"])
    num_values = sum(len(c) for view in last["series"] for c in view["values"].values())
    assert 15_000 < num_spans <= 20_000
    assert 5_000 < num_values <= 200_000 * 1.01
    assert len(last["plans"]) == num_ranks
    assert len(msgspec.json.encode(last)) < 8e6
