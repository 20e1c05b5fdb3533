"""Hopper's own kernels, whose warps have roles, against the float64 spec: on the stand-in for a
Hopper GPU, and the stand-in itself against kernels that are broken on purpose.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import gluon_standin
import hopper
import pytest
import torch
from gluon_standin import HopperError
from hopper import BACKWARD, BASE, FORWARD, assert_right, launches_of
from worlds import Case

from burst_rt import Causal, First, SlidingWindow
from burst_rt.kernels.triton import chosen
from burst_rt.kernels.triton.tuned import candidates
from burst_rt.launch.bench import one_pass, tune
from burst_rt.launch.bench.tune import Trial, faster_if_right

_PACKAGE = "burst_rt.kernels.triton"
attend = partial(hopper.attend, device="cpu")


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    _load(monkeypatch)
    monkeypatch.setattr(chosen, "arch_or_none", lambda device: 90)


def _load(
    monkeypatch: pytest.MonkeyPatch, broken: dict[str, tuple[str, str]] | None = None
) -> None:
    modules = gluon_standin.load(broken)
    for name in ("forward_hopper", "backward_hopper"):
        monkeypatch.setitem(sys.modules, f"{_PACKAGE}.{name}", modules[name])


@pytest.fixture
def launches() -> Iterator[list[int]]:
    with launches_of("backward") as seen:
        yield seen


@pytest.mark.parametrize("name", FORWARD)
def test_a_tile(name: str) -> None:
    case = FORWARD[name].but(needs_grad=(False,) * 3)
    with launches_of("forward") as seen:
        assert_right(attend(1, case), case)
    assert seen == [case.q_len]


@pytest.mark.parametrize("name", BACKWARD)
def test_gradients_in_one_pass(name: str, launches: list[int]) -> None:
    case = BACKWARD[name]
    assert_right(attend(1, case, backward=True), case)
    assert launches == [case.q_len]


@pytest.mark.parametrize(
    ("kind", "strategy"), [("zigzag", "ring-kv"), ("striped", "burst"), ("contiguous", "direct")]
)
def test_rings(kind: str, strategy: str, launches: list[int]) -> None:
    """Several tiles add to the same sums, or are the first to write them."""
    case = BASE.but(q_len=400, heads=2, kv_heads=1, kind=kind, strategy=strategy)
    assert_right(attend(2, case, backward=True), case)
    assert len(launches) >= 2


def test_the_same_bits_in_any_order_of_programs(launches: list[int]) -> None:
    case = BASE.but(q_len=500, heads=1, mask=None)
    first, *others = (attend(1, case, backward=True) for _ in range(3))
    for other in others:
        for field in ("out", "lse", "dq", "dk", "dv"):
            assert torch.equal(getattr(first, field), getattr(other, field)), field
    assert len(launches) == 3


def test_it_is_taken_only_if_it_gives_what_two_passes_give(
    monkeypatch: pytest.MonkeyPatch, launches: list[int]
) -> None:
    """For grouped heads, documents of each row, and sums that hold something or nothing yet."""
    device, dtype = torch.device("cpu"), torch.bfloat16
    kept: dict[str, list[torch.Tensor]] = {}
    sums_of = one_pass.sums_of

    def sums(*args: Any) -> list[torch.Tensor]:
        *_, config, new_sums = args
        if config.loads == "producer":
            return sums_of(*args)
        if new_sums not in kept:  # the interpreter is slow
            kept[new_sums] = sums_of(*args)
        return kept[new_sums]

    monkeypatch.setattr(tune, "sums_of", sums)
    monkeypatch.setattr(one_pass, "_TOKENS", 150)
    trials = [Trial(config, 1.0) for config in candidates("backward", 90, 128, 2)]
    assert faster_if_right(device, dtype, [*trials], trials[1]) == trials[1]
    assert len(launches) == 3
    for module, old, new in (
        ("turns", "store(b_delta)", "store(b_lse)"),
        ("backward_hopper", "_put(b_dv, dv", "_put(b_dv / 0.0 * 0.0, dv"),  # NaN
        ("turns", "in_head = head.to(gl.int64) * rows.q_len + o_m", "in_head = o_m"),
        ("backward_hopper", "        dq.zero_()\n", "        pass\n"),
    ):
        _load(monkeypatch, {module: (old, new)})
        tried = [*trials]
        assert faster_if_right(device, dtype, tried, trials[1]) == trials[0]
        assert tried[1].seconds is None
        assert tried[1].why.startswith("wrong: differs by ")


@pytest.mark.parametrize(
    "case",
    [
        BASE.but(q_len=100, softcap=20.0),
        BASE.but(q_len=300, mask=Causal() & (First(40) | SlidingWindow(60))),  # two spans a row
        BASE.but(q_len=100, needs_grad=(True, False, True)),
        BASE.but(q_len=100, head_dim=64),
    ],
    ids=["softcap", "two spans", "some gradients", "64 channels"],
)
def test_what_takes_two_passes(case: Case, launches: list[int]) -> None:
    assert_right(attend(1, case, backward=True), case)
    assert not launches


# What is taken out of a kernel's source, or changed in it, and what the stand-in says. None: it may
# say nothing, but results are wrong; NaN mostly, as what is read has not come.
_BROKEN = [
    ("forward_hopper", "mbarrier.wait(q_full, 0)", "pass", None),
    ("forward_hopper", "mbarrier.arrive(buffers.k_empty.index(k_stage), count=1)", "pass", "wait"),
    ("forward_hopper", "b_s = warpgroup_mma_wait(1", "b_s = warpgroup_mma_wait(2", "under way"),
    ("producer", "free = phase_of(number, STAGES) ^ 1", "free = phase_of(number, STAGES)", "wait"),
    ("producer", "return (number // STAGES) & 1", "return number & 1", None),
    ("backward_hopper", "fence_async_shared()\n        dq_later", "dq_later", "fence"),
    ("backward_hopper", "mbarrier.wait(kv_full, 0)", "pass", None),
    ("turns", "phase_of(number, STAGES) ^ 1", "1", None),
    ("backward_hopper", "mbarrier.wait(handed.empty, (number & 1) ^ 1)", "pass", None),
    ("turns", "mbarrier.arrive(full, count=1)", "pass", "wait"),
    ("backward_hopper", "b_dv, b_dq = warpgroup_mma_wait(1", "b_dv, b_dq = warpgroup_mma_wait(2",
     "under way"),
    ("turns", "turn = gl.load(p_lasts + block) - i_n", "turn = 0", "does not end"),
    ("turns", "b_dq, mask=inside,", "b_dq,", "outside"),
]  # fmt: skip


@pytest.mark.parametrize(("module", "old", "new", "said"), _BROKEN)
def test_a_broken_kernel_is_noticed(
    module: str, old: str, new: str, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = BASE.but(q_len=600, heads=1)
    assert_right(attend(1, case, backward=True), case)
    _load(monkeypatch, {module: (old, new)})
    if said in (None, "does not end"):  # a program that fails leaves others waiting for their turns
        monkeypatch.setattr(gluon_standin, "_DEADLINE_S", 3.0)
    with pytest.raises(HopperError if said else AssertionError, match=said):
        assert_right(attend(1, case, backward=module in ("backward_hopper", "turns")), case)
