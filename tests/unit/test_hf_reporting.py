"""What a Trainer's callback tells telemetry, with a clock made by hand."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainerControl, TrainerState

from burst_rt.hf.reporting import JobReporter


def test_tokens_a_second_are_those_of_all_contexts_in_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = itertools.count(100.0)  # each look at the clock is a second later
    heard: list[tuple[int, dict[str, float]]] = []
    clock = SimpleNamespace(perf_counter=lambda: next(now_s))
    monkeypatch.setattr("burst_rt.hf.reporting.time", clock)
    monkeypatch.setattr(
        "burst_rt.telemetry.report", lambda step, **values: heard.append((step, values))
    )
    state, told = TrainerState(is_world_process_zero=True), JobReporter(2)
    batch: dict[str, Any] = {"input_ids": torch.zeros(3, 10)}
    embedded: dict[str, Any] = {"inputs_embeds": torch.zeros(2, 5, 8)}

    def say(name: str, **known: Any) -> None:
        getattr(told, name)(None, state, TrainerControl(), **known)

    def step(inputs: dict[str, Any]) -> None:
        say("on_step_begin")
        told.count(inputs)
        say("on_step_end")
        state.global_step += 1

    say("on_train_begin")
    step(batch)
    step(batch)
    say("on_log", logs={"loss": 2.0, "learning_rate": 0.1, "grad_norm": 3.0, "epoch": 1.0})
    say("on_log", logs={"eval_loss": 4.0, "eval_runtime": 1.0})
    say("on_evaluate")
    step(embedded)
    say("on_log", logs={"loss": 1.0})
    state.is_world_process_zero = False
    say("on_log", logs={"loss": 1.0})
    # 2 contexts with 60 tokens each in 2 s; the time after an evaluation begins with the step.
    assert heard == [
        (2, {"loss": 2.0, "learning_rate": 0.1, "grad_norm": 3.0, "tokens_per_s": 60.0}),
        (2, {"heldout_loss": 4.0}),
        (3, {"loss": 1.0, "tokens_per_s": 20.0}),
    ]
