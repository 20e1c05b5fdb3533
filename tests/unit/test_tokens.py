"""Tokens as a job that serves tells them: which times count, what viewers get of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from rich.console import Console
from small_models import CACHE, make_model
from telemetry_feed import arrive

import burst_rt
import burst_rt.hf
from burst_rt import KVCache, run_local
from burst_rt.launch.top import render
from burst_rt.telemetry import TokenMeter
from burst_rt.telemetry.messages import JobReport
from burst_rt.telemetry.metrics import METRICS
from burst_rt.telemetry.model.job_model import JobModel


class _Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    clock = _Clock()
    monkeypatch.setattr("burst_rt.telemetry.rank.tokens.time", clock)
    return clock


_Reports = list[tuple[int, dict[str, float]]]


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> _Reports:
    heard: _Reports = []
    monkeypatch.setattr(
        "burst_rt.telemetry.rank.tokens.report", lambda step, **values: heard.append((step, values))
    )
    return heard


def test_idle_time_between_texts_is_of_no_token(clock: _Clock, reports: _Reports) -> None:
    meter = TokenMeter()
    assert meter.time_to_first_token_s is meter.mean_token_s is meter.tokens_per_s is None
    # Two texts: prompt, first token, two more tokens; and a pause.
    for first_s, token_s in ((4.0, 0.5), (2.0, 1.0)):
        meter.put(torch.tensor([[1, 2, 3]]))
        for took_s in (first_s, token_s, token_s):
            clock.now_s += took_s
            meter.put(torch.tensor([7]))
        assert meter.time_to_first_token_s == first_s
        assert meter.last_token_s == token_s
        meter.end()
        clock.now_s += 1000.0
    assert meter.mean_token_s == (0.5 + 0.5 + 1.0 + 1.0) / 4
    assert meter.tokens_per_s == 4 / 3.0
    assert reports[-1] == (
        6,
        {
            "time_to_first_token_s": 2.0,
            "time_per_token_s": 1.0,
            "mean_time_per_token_s": 0.75,
            "output_tokens_per_s": 4 / 3.0,
        },
    )
    assert set(reports[-1][1]) <= set(METRICS)


def test_tokens_of_several_sequences_and_several_at_once(clock: _Clock, reports: _Reports) -> None:
    meter = TokenMeter()
    meter.put(torch.zeros(4, 10, dtype=torch.int64))
    clock.now_s += 1.0
    meter.put(torch.zeros(4, dtype=torch.int64))
    clock.now_s += 0.5
    meter.put(torch.zeros(4, dtype=torch.int64))
    clock.now_s += 0.5
    meter.put(torch.zeros(4, 5, dtype=torch.int64))  # five tokens of each
    assert meter.last_token_s == 0.1
    assert meter.mean_token_s == pytest.approx(1.0 / 6)
    assert meter.tokens_per_s == 24.0
    # Of loops without tensors, too.
    meter.end()
    meter.put([1, 2, 3])
    clock.now_s += 3.0
    meter.put(4)
    clock.now_s += 1.0
    meter.put([5, 6])
    assert (meter.time_to_first_token_s, meter.last_token_s) == (3.0, 0.5)


def test_viewers_are_told_first_and_last_tokens_and_few_between(
    clock: _Clock, reports: _Reports
) -> None:
    meter = TokenMeter()
    meter.put([1])
    assert reports == []
    for _ in range(1001):
        clock.now_s += 0.001
        meter.put(2)
    # A second after the first token.
    assert 4 <= len(reports) <= 6
    meter.end()
    assert [step for step, _ in reports][::1000] == [1]
    assert reports[-1][0] == 1001


def test_a_cache_is_told_by_rank_0_alone(reports: _Reports) -> None:
    def serve(ctx: burst_rt.Context) -> None:
        cache = KVCache(
            ctx, num_layers=1, batch=2, num_kv_heads=1, head_dim=4, capacity=40,
            dtype=torch.float32,
        )  # fmt: skip
        meter = TokenMeter(cache)
        meter.put(torch.zeros(2, 5))
        step = cache.step(5)
        x = torch.zeros(2, 5, 1, 4)
        step.attend(0, x, x, x)
        step.commit()
        meter.put(torch.zeros(2))
        meter.end()

    run_local(2, serve)
    assert len(reports) == 2
    assert reports[-1][1]["cached_tokens"] == 10
    assert reports[-1][1]["cache_capacity_tokens"] == 80


class _Heard(transformers.generation.BaseStreamer):  # type: ignore[misc]  # it is Any to mypy
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def put(self, value: Any) -> None:
        self.calls.append(value.tolist())

    def end(self) -> None:
        self.calls.append("end")


def test_generate_of_transformers_takes_it_for_a_streamer(reports: _Reports) -> None:
    heard = _Heard()

    def serve(ctx: burst_rt.Context) -> None:
        model = make_model("Llama").eval()
        model.set_attn_implementation("burst_rt")
        cache = burst_rt.hf.Cache(model, ctx, capacity=30)
        tokens = model.generate(
            torch.tensor([[5, 6, 7]]), **{CACHE: cache}, do_sample=False, max_new_tokens=6,
            eos_token_id=None, use_cache=True, streamer=TokenMeter(cache, to=heard),
        )  # fmt: skip
        assert [[[5, 6, 7]], *tokens[0, 3:, None].tolist(), "end"] == heard.calls

    run_local(1, serve)
    steps, values = zip(*reports, strict=True)
    assert (steps[0], steps[-1]) == (1, 6)
    assert values[-1]["cached_tokens"] == 8
    assert values[-1]["cache_capacity_tokens"] == 30
    assert all(values[-1][name] > 0 for name in METRICS if "per_token" in name)


def test_top_says_it_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    model = JobModel(1e9)
    for message in arrive(0, 1):
        model.apply(0.0, 0, message)
    values = {"time_to_first_token_s": 1.234, "cached_tokens": 1000, "cache_capacity_tokens": 4000}
    model.apply(1.0, 0, JobReport(1.0, 1, values))
    Console(width=100).print(render(model.snapshot(), []))
    assert "first token 1.23 s  cache 1,000 of 4,000 tokens" in capsys.readouterr().out
    more = {
        "time_per_token_s": 0.0125, "mean_time_per_token_s": 0.01, "output_tokens_per_s": 100.0
    }  # fmt: skip
    model.apply(2.0, 0, JobReport(2.0, 2, more))
    Console(width=120).print(render(model.snapshot(), []))
    said = "first token 1.23 s  a token 12.5 ms (mean 10 ms)  100 tokens/s  cache 1,000 of 4,000"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ({"output_tokens_per_s": 30.0}, "first token 200 ms  30 tokens/s"),
        ({"time_per_token_s": 0.01}, "first token 200 ms  a token 10 ms"),
        ({"mean_time_per_token_s": 0.01}, "first token 200 ms  a token 10 ms in the mean"),
        ({"cached_tokens": 90.0}, "first token 200 ms  cache 90 tokens"),
    ],
)
def test_top_shows_what_a_program_reports_of_these_itself(
    values: dict[str, float], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = JobModel(1e9)
    for message in arrive(0):
        model.apply(0.0, 0, message)
    model.apply(1.0, 0, JobReport(1.0, 1, {"time_to_first_token_s": 0.2, **values}))
    Console(width=100).print(render(model.snapshot(), [], []))
    assert shown in capsys.readouterr().out
