"""Hopper's own kernels on a Hopper GPU: tiles and rings against the float64 spec.

The stand-in of tests/interpreted/test_hopper.py shows neither layouts, nor barriers between the
warps of a role, nor the order of memory. The most telling come first. Most of the time is
compiling: 2 s a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import hopper
import pytest
import torch
from hopper import BACKWARD, BASE, FORWARD, assert_right, launches_of
from spec import relative_error
from tolerances import ERROR

from burst_rt import SlidingWindow

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a CUDA device of compute capability 9.0",
    ),
]

attend = partial(hopper.attend, device="cuda")
_FORWARD_ONLY = (False,) * 3


@pytest.fixture
def launches() -> Iterator[list[int]]:
    with launches_of("forward") as seen:
        yield seen


@pytest.fixture
def launches_back() -> Iterator[list[int]]:
    with launches_of("backward") as seen:
        yield seen


@pytest.mark.parametrize("name", FORWARD)
def test_a_tile_against_the_spec(name: str, launches: list[int]) -> None:
    case = FORWARD[name].but(needs_grad=_FORWARD_ONLY)
    assert_right(attend(1, case), case)
    assert launches == [case.q_len]


@pytest.mark.parametrize("name", BACKWARD)
def test_gradients_in_one_pass_against_the_spec(name: str, launches_back: list[int]) -> None:
    case = BACKWARD[name]
    assert_right(attend(1, case, backward=True), case)
    assert launches_back == [case.q_len]


@pytest.mark.parametrize("kind", ["zigzag", "striped", "contiguous"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_rings_against_the_spec(
    world_size: int, kind: str, launches: list[int], launches_back: list[int]
) -> None:
    """Several tiles a row: states and sums are read and written."""
    case = BASE.but(q_len=1000, heads=4, kv_heads=2, kind=kind, strategy="ring-kv")
    assert_right(attend(world_size, case, backward=True), case)
    assert len(launches) >= world_size
    assert len(launches_back) >= world_size


def test_a_ring_under_a_window(launches: list[int]) -> None:
    """Lines with nothing to do, with several runs, and both, in tiles of a ring."""
    case = BASE.but(q_len=1000, mask=SlidingWindow(150), strategy="burst")
    assert_right(attend(4, case, backward=True), case)
    assert launches


def test_the_same_bits_every_time(launches: list[int], launches_back: list[int]) -> None:
    """With more programs than the GPU runs at once, so that they wait for each other."""
    case = BASE.but(q_len=6000, heads=8)
    first, *others = (attend(2, case, backward=True) for _ in range(4))
    for other in others:
        for field in ("out", "lse", "dq", "dk", "dv"):
            assert torch.equal(getattr(first, field), getattr(other, field)), field
    assert launches
    assert launches_back


@pytest.mark.parametrize("name", ["causal", "window, grouped heads"])
def test_as_the_other_kernels_do(name: str, launches: list[int], launches_back: list[int]) -> None:
    case = BACKWARD[name].but(q_len=1000)
    found, right = attend(1, case, backward=True), attend(1, case, forward=False)
    assert len(launches) == len(launches_back) == 1
    for field in ("out", "dq", "dk", "dv"):
        apart = relative_error(getattr(found, field), getattr(right, field))
        assert apart < ERROR[case.dtype], field
    assert relative_error(found.lse, right.lse) < ERROR[torch.float32]


def test_other_calls_go_to_the_other_kernels(launches: list[int], launches_back: list[int]) -> None:
    case = BASE.but(q_len=200, softcap=20.0)
    assert_right(attend(1, case, backward=True), case)
    assert not launches
    assert not launches_back
