"""`Context.all_gather`, `together` and `first` on ranks that are threads."""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import burst_rt
from burst_rt import Context
from burst_rt.drivers import Watch
from burst_rt.errors import (
    BurstError,
    ConfigError,
    ContractMismatch,
    DeviceError,
    InputError,
    Stalled,
)
from burst_rt.runtime.connections import LocalRank
from burst_rt.runtime.objects import bytes_of
from burst_rt.transport import LocalWorld

_VALUES: list[object] = [
    None,
    True,
    -(2**63),
    2**64 - 1,
    0.1,
    -math.inf,
    "text, äöü \0",
    b"",
    b"\x00\xff" * 999,
    [],
    {"a": [1, {"b": None}], "c": b"\x80", 3: 4.0},
]


def _outcomes(world_size: int, action: Callable[[Context], object]) -> list[Any]:
    """What `action` gives or raises on each rank, after which every rank still works with the
    others.
    """

    def run(ctx: Context) -> object:
        try:
            outcome = action(ctx)
        except BurstError as error:
            outcome = error
        assert ctx.all_reduce(torch.ones(1)).item() == world_size
        return outcome

    return burst_rt.run_local(world_size, run, timeout_s=20)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_every_rank_has_the_values_of_all_in_rank_order(world_size: int) -> None:
    def gather(ctx: Context) -> object:
        return [ctx.all_gather([ctx.rank, value]) for value in _VALUES]

    expected = [[[rank, value] for rank in range(world_size)] for value in _VALUES]
    assert _outcomes(world_size, gather) == [expected] * world_size


def test_values_of_ranks_may_differ_in_type_and_length() -> None:
    values = ["", list(range(10_000)), None]
    assert _outcomes(3, lambda ctx: ctx.all_gather(values[ctx.rank])) == [values] * 3


def test_a_tuple_arrives_as_a_list_on_every_rank() -> None:
    assert _outcomes(2, lambda ctx: ctx.all_gather((1, (2,)))) == [[[1, [2]]] * 2] * 2


_OWN_LIST: list[object] = []
_OWN_LIST.append(_OWN_LIST)


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (torch.zeros(1), "torch.Tensor"),
        (np.float64(1), "numpy.float64"),
        ([1, {"a": {2}}], "builtins.set"),
        ({(1, 2): 3}, "a key of tuple"),
        (2**64, "no such form"),
        ("\udcff", "no such form"),
        (_OWN_LIST, "no such form"),
    ],
    ids=str,
)
@pytest.mark.parametrize("odd", [0, 2])
def test_what_is_no_plain_data_is_refused_on_every_rank(value: object, got: str, odd: int) -> None:
    outcomes = _outcomes(3, lambda ctx: ctx.all_gather(value if ctx.rank == odd else 0))
    for outcome in outcomes:
        assert type(outcome) is InputError
        assert str(outcome).startswith(f"rank {odd}: all_gather: expected plain data")
        assert got in str(outcome)


def test_what_succeeds_everywhere_gives_each_rank_its_own_result() -> None:
    shared = object()
    assert _outcomes(3, lambda ctx: ctx.together(lambda: (ctx.rank, shared))) == [
        (rank, shared) for rank in range(3)
    ]


class _Special(ConfigError):
    """A program's own error, which other ranks may not know."""


@pytest.mark.parametrize("failing", [{0}, {1}, {2}, {1, 2}, {0, 1, 2}])
@pytest.mark.parametrize(
    ("kind", "raised", "words"),
    [
        (ConfigError, ConfigError, "no disk on rank {}"),
        (Stalled, Stalled, "no disk on rank {}"),
        (_Special, ConfigError, "no disk on rank {}"),
        (OSError, DeviceError, "no disk on rank {}; look at the disk"),
        (
            partial(OSError, errno.ENOSPC),
            DeviceError,
            "[Errno 28] no disk on rank {}; look at the disk and at the network to it",
        ),
        (
            partial(OSError, errno.ENOENT),
            ConfigError,
            "[Errno 2] no disk on rank {}; make the file or folder accessible",
        ),
        (KeyError, InputError, "together: fn raised KeyError: 'no disk on rank {}'"),
    ],
)
def test_a_failure_on_any_rank_is_the_same_error_on_all(
    failing: set[int], kind: Callable[[str], Exception], raised: type[BurstError], words: str
) -> None:
    def act(ctx: Context) -> object:
        def fail() -> None:
            if ctx.rank in failing:
                raise kind(f"no disk on rank {ctx.rank}")

        return ctx.together(fail)

    outcomes = _outcomes(3, act)
    lowest = min(failing)
    assert [type(outcome) for outcome in outcomes] == [raised] * 3
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert str(outcomes[0]).startswith(f"rank {lowest}: {words.format(lowest)}")
    assert [outcome.peer for outcome in outcomes] == [lowest] * 3


def test_the_failing_rank_keeps_the_cause() -> None:
    def fail(ctx: Context) -> object:
        return ctx.together(lambda: {0: "known"}[ctx.rank])

    outcomes = _outcomes(2, fail)
    assert outcomes[0].__cause__ is None
    assert isinstance(outcomes[1].__cause__, KeyError)


def test_fn_may_be_collective_in_together() -> None:
    def act(ctx: Context) -> object:
        return ctx.together(lambda: ctx.all_gather(ctx.rank))

    assert _outcomes(3, act) == [[0, 1, 2]] * 3


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("swallowed", [False, True])
def test_a_rank_that_fails_before_a_call_of_fn_meets_the_others_at_the_end(
    nested: bool, swallowed: bool
) -> None:
    def act(ctx: Context) -> object:
        def fn() -> object:
            if ctx.rank == 1:
                raise ConfigError("no disk")
            try:
                return ctx.together(lambda: ctx.rank) if nested else ctx.all_gather(1)
            except ConfigError:
                if not swallowed:
                    raise
                return None

        with pytest.raises(ConfigError) as caught:
            ctx.together(fn)
        return str(caught.value), caught.value.peer, ctx.all_gather(ctx.rank)

    started_s = time.monotonic()
    assert _outcomes(3, act) == [("rank 1: no disk", 1, [0, 1, 2])] * 3
    assert time.monotonic() - started_s < 15


@pytest.mark.parametrize("swallowed", [False, True])
def test_after_a_collective_call_inside_first_the_context_is_usable(swallowed: bool) -> None:
    def act(ctx: Context) -> object:
        def fn() -> object:
            try:
                return ctx.all_gather(1)
            except ContractMismatch:
                if not swallowed:
                    raise
                return None

        with pytest.raises(ContractMismatch, match="call: "):
            ctx.first(fn)
        return ctx.all_gather(ctx.rank)

    assert _outcomes(2, act) == [[0, 1]] * 2


def test_rank_0_alone_runs_first_and_every_rank_gets_its_result() -> None:
    ran = []

    def act(ctx: Context) -> object:
        return ctx.first(lambda: ran.append(ctx.rank) or {"rank": ctx.rank})  # type: ignore[func-returns-value]

    assert _outcomes(3, act) == [{"rank": 0}] * 3
    assert ran == [0]


@pytest.mark.parametrize(
    ("fn", "raised", "words"),
    [
        (lambda: open("/nowhere/at/all"), ConfigError, "No such file"),  # noqa: SIM115
        (lambda: 1 / 0, InputError, "first: fn raised ZeroDivisionError: division by zero"),
        (lambda: torch.zeros(1), InputError, "first: expected plain data"),
    ],
)
def test_an_error_of_first_is_every_ranks(
    fn: Callable[[], object], raised: type[BurstError], words: str
) -> None:
    outcomes = _outcomes(3, lambda ctx: ctx.first(fn))
    assert [type(outcome) for outcome in outcomes] == [raised] * 3
    for outcome in outcomes:
        assert str(outcome).startswith("rank 0: ")
        assert words in str(outcome)


def test_a_collective_call_inside_first_is_refused_at_once() -> None:
    started_s = time.monotonic()
    outcomes = _outcomes(2, lambda ctx: ctx.first(lambda: ctx.all_gather(1)))
    assert [type(outcome) for outcome in outcomes] == [ContractMismatch] * 2
    assert time.monotonic() - started_s < 15


def test_another_call_instead_is_a_mismatch() -> None:
    def act(ctx: Context) -> object:
        return ctx.all_gather(1) if ctx.rank else ctx.first(lambda: 1)

    outcomes = _outcomes(2, act)
    assert [type(outcome) for outcome in outcomes] == [ContractMismatch] * 2
    assert "call: " in str(outcomes[0])


@pytest.mark.parametrize("talk", ["all_gather", "together", "first"])
def test_nobody_waits_beyond_the_deadline(talk: str) -> None:
    calls: dict[str, Callable[[Context], object]] = {
        "all_gather": lambda ctx: ctx.all_gather(1),
        "together": lambda ctx: ctx.together(lambda: 1),
        "first": lambda ctx: ctx.first(lambda: 1),
    }

    def run(ctx: Context) -> object:
        if ctx.rank == 0:
            time.sleep(2)
            return None
        with pytest.raises(Stalled, match="timeout_s"):
            calls[talk](ctx)
        return None

    burst_rt.run_local(2, run, timeout_s=0.5)


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(6.0).view(2, 3).T,
        torch.arange(6, dtype=torch.int64)[::2],
        torch.tensor(1.5, dtype=torch.bfloat16, requires_grad=True),
        torch.zeros(0, 3),
    ],
)
def test_bytes_of_a_tensor_are_its_values_in_order(x: torch.Tensor) -> None:
    flat = x.detach().contiguous().flatten()
    assert bytes(bytes_of(x)) == bytes(flat.view(torch.uint8).numpy().data)


def test_an_error_in_a_context_of_one_rank_is_that_ranks_alone() -> None:
    """The others made an unrelated call, and got the error there."""

    def run(ctx: Context) -> list[int]:
        alone = burst_rt.init(comm=LocalRank(LocalWorld(1), 0))
        began_s = time.monotonic()
        if ctx.rank:
            with pytest.raises(InputError, match="labels"):
                burst_rt.cross_entropy(torch.zeros(1, 5), torch.tensor([99]), group=alone)
            assert time.monotonic() - began_s < 1.0
        else:
            time.sleep(1.5)
        return ctx.all_gather(ctx.rank)

    assert burst_rt.run_local(2, run, timeout_s=20) == [[0, 1], [0, 1]]


def test_a_rank_that_asked_in_the_call_before_is_told_of_the_next() -> None:
    """One that cannot make its next call asks while the other still waits in the call before it."""
    world = LocalWorld(2)
    asking, asked = Watch(world.control(0)), Watch(world.control(1))
    asking.say_refuses(meant=True)
    asked.look()
    for number in (7, 8, 9):
        asked.say_entered(number, waited_s=0.0, timeout_s=600.0)
    asking.look()
    assert asking.entered == {1: 8}, "and no longer, as questions are rare"
