"""Marks on a job's curves: one of each event, loss spikes and no other losses, bounded."""

from __future__ import annotations

import math
import random

import msgspec
import pytest
from telemetry_feed import arrive, hello, offset_s

from burst_rt.telemetry.messages import JobReport, PhaseEnded
from burst_rt.telemetry.model.job_model import JobModel
from burst_rt.telemetry.model.views import MarkView


def _model(restarts: int = 0) -> JobModel:
    model = JobModel(1e9)
    for rank in range(2):
        model.apply(
            0.0, rank, msgspec.structs.replace(hello(rank, 2), restarts=restarts * (rank == 0))
        )
        for message in arrive(rank)[1:]:
            model.apply(0.0, rank, message)
    return model


def _report(model: JobModel, step: int, **values: float) -> None:
    model.apply(float(step), 0, JobReport(step - offset_s(0), step, values))


def _marks(model: JobModel, since_s: float = 0.0) -> list[MarkView]:
    return model.series("job", (), since_s).marks


def _spikes(losses: list[float]) -> list[int]:
    model = _model()
    for step, loss in enumerate(losses, 1):
        _report(model, step, loss=loss)
    return [mark.step for mark in _marks(model) if mark.kind == "loss spike"]


def test_a_loss_spikes_once_however_long_it_stays_high() -> None:
    draw = random.Random(3)
    losses = [3.0 - 0.01 * i + draw.gauss(0, 0.02) for i in range(60)]
    assert _spikes(losses) == []
    losses[40:43] = [6.0, 5.5, 5.0]
    assert _spikes(losses) == [41]
    losses[55] = 4.0
    assert _spikes(losses) == [41, 56]


@pytest.mark.parametrize(
    "losses",
    [
        [9.0 * math.exp(-i / 4) for i in range(40)],  # falls fast
        [2.0] * 40 + [2.1] * 5,  # without noise, a twentieth is no spike
        [5.0, 1.0, 8.0, 1.0, 9.0, 2.0, 30.0],  # too few to know what is usual
        [-3.0 + 0.01 * (i % 2) for i in range(40)],  # below 0
    ],
)
def test_other_losses_are_no_spikes(losses: list[float]) -> None:
    assert _spikes(losses) == []


def test_what_is_not_finite_is_neither_a_spike_nor_usual() -> None:
    losses = [2.0] * 20 + [math.nan, math.inf] + [2.0] * 5 + [4.0]
    assert _spikes(losses) == [28]


def test_ranks_that_tell_of_one_evaluation_make_one_mark() -> None:
    model = _model()
    _report(model, 10, loss=3.0)
    for rank in range(2):
        ended_s = 12.0 - offset_s(rank)
        model.apply(12.0, rank, PhaseEnded("evaluation", -1, 0, ended_s - 1.5, ended_s))
        model.apply(12.5, rank, PhaseEnded("checkpoint", -1, 0, ended_s, ended_s + 0.5))
        model.apply(12.5, rank, PhaseEnded("forward", -1, 0, ended_s, ended_s + 0.5))
    model.apply(12.6, 0, JobReport(12.2 - offset_s(0), 10, {"heldout_loss": 3.25}))
    told = [(mark.kind, mark.step, mark.text) for mark in _marks(model)]
    assert told == [
        ("evaluation", 10, "evaluation in 1.5 s, held-out loss 3.25"),
        ("checkpoint", 10, "checkpoint in 0.5 s"),
    ]
    assert _marks(model)[0].at_s == pytest.approx(12.0)
    assert [mark.kind for mark in _marks(model, since_s=12.3)] == ["checkpoint"]
    # Others of later steps are others.
    _report(model, 20, loss=3.0, heldout_loss=3.0)
    assert [mark.step for mark in _marks(model)] == [10, 10, 20]


def test_a_rank_that_tells_late_tells_of_the_step_that_it_was() -> None:
    model = _model()
    for step in (10, 11, 12):
        _report(model, step, loss=3.0)
    for rank, took_s in ((1, 0.3), (0, 0.25)):
        ended_s = 10.4 - offset_s(rank)
        model.apply(12.5, rank, PhaseEnded("evaluation", -1, 0, ended_s - took_s, ended_s))
    assert [(mark.step, mark.text) for mark in _marks(model)] == [(10, "evaluation in 0.3 s")]
    # A job that has steps may report nothing.
    silent = _model()
    for step in (1, 2):
        ended_s = float(step) - offset_s(0)
        silent.apply(2.0, 0, PhaseEnded("", step, 0, ended_s - 1, ended_s))
    silent.apply(2.0, 0, PhaseEnded("checkpoint", -1, 0, 1.2 - offset_s(0), 1.3 - offset_s(0)))
    assert [mark.step for mark in silent.sources.marks.window(0.0, 9.0)] == [1]


def test_a_job_that_was_started_again_has_a_mark_at_its_first_step() -> None:
    model = _model(restarts=2)
    assert _marks(model) == []  # nothing has been reported
    _report(model, 41, loss=3.0)
    told = [(mark.kind, mark.step, mark.text) for mark in _marks(model)]
    assert told == [("restart", 41, "the job was started again: restart 2")]
    model.apply(50.0, 1, hello(1, 2))
    assert [mark.text for mark in _marks(model)][1:] == ["rank 1 has begun again"]


def test_marks_are_bounded_and_the_newest_stay() -> None:
    model = _model()
    for step in range(1000):
        _report(model, step, heldout_loss=1.0)
    marks = _marks(model)
    assert len(marks) == 400
    assert marks[-1].step == 999
