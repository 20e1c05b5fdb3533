"""Trials of block sizes, with the kernels themselves: each is really used, checked, and may fail
without harm.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from burst_rt import Causal, Full
from burst_rt.kernels import KERNELS, Work
from burst_rt.kernels.speed import TileProblem
from burst_rt.kernels.triton.configs import Config
from burst_rt.kernels.triton.tuned import TUNED, config_of
from burst_rt.launch.bench.tune import (
    KernelRequest,
    Stuck,
    Trial,
    best_of,
    compile_beside,
    confirmed,
    trials_of,
)

_CONFIGS = [
    Config(32, 16, 4, 1),
    Config(16, 32, 4, 1),
    Config(24, 16, 4, 1),
    Config(16, 16, 4, 1),
    Config(32, 32, 4, 1),
]


class Clock:
    """Gives every configuration another time; says so when its time is up."""

    def __init__(self) -> None:
        self.seconds_left = [5.0, 4.0, 3.0, 3.0, 2.0, 2.0]
        self.used: list[Config | None] = []
        self.kind = ""

    def seconds(self, run: Callable[[], None]) -> float:
        run()
        self.used.append(config_of(self.kind, torch.device("cpu"), 256, torch.float32))
        return self.seconds_left.pop(0)

    def is_over(self) -> bool:
        return not self.seconds_left


@pytest.fixture(autouse=True)
def one_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is slow."""
    monkeypatch.setattr("burst_rt.kernels.speed._CHANNELS", 256)


@pytest.mark.parametrize("kind", TUNED)
def test_trials(kind: str) -> None:
    clock = Clock()
    clock.kind = kind
    works = [
        Work(torch.device("cpu"), torch.float32, 256, mask, kind == "forward")
        for mask in (Full(), Causal())
    ]
    problems = [TileProblem(work, tokens=40) for work in works]
    trials = trials_of(kind, problems, _CONFIGS, clock.seconds, clock.is_over)
    assert [trial.config for trial in trials] == _CONFIGS
    assert [trial.seconds for trial in trials] == [9.0, 6.0, None, 4.0, None]
    # Blocks are powers of two.
    assert "power" in trials[2].why
    assert trials[4].why == "not tried: no time was left"
    assert best_of(trials) == Trial(_CONFIGS[3], 4.0)
    assert clock.used == [
        config for config in (_CONFIGS[0], _CONFIGS[1], _CONFIGS[3]) for _ in works
    ]
    assert config_of(kind, torch.device("cpu"), 256, torch.float32) is None


def test_the_fastest_is_checked_in_a_ring_and_on_an_odd_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results, lengths = TileProblem.results, set()

    def broken(problem: TileProblem, *args: object) -> list[torch.Tensor]:
        found = results(problem, KERNELS["triton"])
        lengths.add(found[0].shape[1])
        if config_of("forward", torch.device("cpu"), 256, torch.float32) == _CONFIGS[1]:
            found[0][0, 3] += 1
        return found

    monkeypatch.setattr(TileProblem, "results", broken)
    work = Work(torch.device("cpu"), torch.float32, 256, Causal())
    slow, wrong, right = Trial(_CONFIGS[0], 3.0), Trial(_CONFIGS[1], 1.0), Trial(_CONFIGS[3], 2.0)
    trials = [slow, wrong, right]
    assert confirmed("forward", work, trials, tokens=13) == right
    assert lengths == {13}
    assert trials[::2] == [slow, right]
    assert trials[1].seconds is None
    assert trials[1].why.startswith("wrong: ")
    assert confirmed("forward", work, [slow, wrong], tokens=13) == slow
    # The next that ran takes the place of one that cannot be checked against.
    failing = Config(24, 16, 4, 1)  # not powers of two
    trials = [Trial(failing, 3.0), Trial(_CONFIGS[0], 2.5), right]
    assert confirmed("forward", work, trials, tokens=13) == right
    assert "power" in trials[0].why


def test_one_that_gets_stuck_when_it_is_checked_again_ends_the_search() -> None:
    def settle() -> None:
        if config_of("forward", torch.device("cpu"), 256, torch.float32) == _CONFIGS[1]:
            raise Stuck("does not end")

    work = Work(torch.device("cpu"), torch.float32, 256, Causal())
    trials = [Trial(_CONFIGS[0], 3.0), Trial(_CONFIGS[1], 1.0)]
    assert confirmed("forward", work, trials, tokens=13, settle=settle) is None
    assert trials == [Trial(_CONFIGS[0], 3.0), Trial(_CONFIGS[1], None, "does not end", stuck=True)]


def test_children_run_what_is_to_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(3))
    some = Config(128, 128, 4, 1)
    wanted = [KernelRequest(kind, "cpu", "fp32", 16, some) for kind in TUNED]
    assert compile_beside(wanted, 100) == [0, 0]


def test_one_that_does_not_end_is_the_last() -> None:
    def settle() -> None:
        if config_of("forward", torch.device("cpu"), 256, torch.float32) == _CONFIGS[1]:
            raise Stuck("does not end")

    works = [Work(torch.device("cpu"), torch.float32, 256, Full())]
    problems = [TileProblem(work, tokens=20) for work in works]
    trials = trials_of("forward", problems, _CONFIGS, lambda run: 1.0, lambda: False, settle=settle)
    assert trials == [Trial(_CONFIGS[0], 1.0), Trial(_CONFIGS[1], None, "does not end", stuck=True)]
    assert best_of(trials) == trials[0]


def test_a_configuration_with_wrong_results_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    results = TileProblem.results

    def broken(problem: TileProblem, *args: object) -> list[torch.Tensor]:
        found = results(problem, KERNELS["triton"])
        if config_of("forward", torch.device("cpu"), 256, torch.float32) == _CONFIGS[1]:
            found[0][0, 3] += 1
        return found

    monkeypatch.setattr(TileProblem, "results", broken)
    works = [Work(torch.device("cpu"), torch.float32, 256, Full())]
    problems = [TileProblem(work, tokens=20) for work in works]
    trials = trials_of("forward", problems, _CONFIGS[:2], lambda run: 1.0, lambda: False)
    assert trials[0].seconds == 1.0
    assert trials[1].seconds is None
    assert trials[1].why.startswith("wrong: ")
