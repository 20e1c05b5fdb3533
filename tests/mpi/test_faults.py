"""A sample of `tests/faults.py`: what must hold when ranks and launchers die, stop or are slow, in
a few drawn cases.
"""

from __future__ import annotations

import random

import pytest
from covering import first_of
from faults import Case, draw, parse, perform

_SEED = 6
_COUNT, _FEW = 60, 36


def _cases(count: int) -> list[Case]:
    chance = random.Random(_SEED)
    return [draw(chance) for _ in range(count)]


# What has gone wrong once, and losses while a model serves.
_KEPT = [
    "run 2 rank 1 os-exit-0 sum",
    "run 3 rank 1 sigstop sum",
    "run 3 rank 1 sigkill decode",
    "run 2 rank 0 raise layer",
    "run 4 rank 1 late layer",
    "run 3 rank 1 suspend tile",
    "mpirun 2 rank 1 suspend starting",
    "torchrun 2 rank 1 suspend started",
]


@pytest.mark.parametrize("case", [*first_of(_cases(_COUNT), _FEW), *map(parse, _KEPT)], ids=str)
def test_a_drawn_case(case: Case) -> None:
    outcome = perform(case)
    assert outcome.problems == [], outcome.text


def test_every_case_can_be_repeated_from_its_name() -> None:
    cases = _cases(2000)
    assert [parse(str(case)) for case in cases] == cases
    launchers = {"run", "telemetry", "mpirun", "torchrun", "agents", "checkpoint"}
    assert {case.launcher for case in cases} == launchers
