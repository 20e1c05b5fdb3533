"""The forward kernel with a producer on a Hopper GPU: tiles and rings against the float64 spec.

Triton's interpreter cannot run it, so nothing else shows what it computes. The most telling come
first. Most of the time is compiling: 2 s a kernel.
"""

from __future__ import annotations

import pytest
import torch
from spec import Attention, errors_of, relative_error
from tolerances import ERROR
from worlds import Case, attend_over_threads

from burst_rt import BlockSparse, Causal, Documents, First, SlidingWindow
from burst_rt.kernels.triton.configs import default_config
from burst_rt.kernels.triton.tuned import trial_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a CUDA device of compute capability 9.0",
    ),
]

_BF16 = Case(
    1000, heads=2, head_dim=128, dtype=torch.bfloat16, mask=Causal(), needs_grad=(False,) * 3
)


def _blocks() -> BlockSparse:
    """Up to four blocks of 64 keys a row, apart from each other: runs of one block."""
    seen = torch.zeros(16, 16, dtype=torch.bool)
    for row in range(16):
        for column in (0, 3 * row, 5 * row + 7, row):
            seen[row, column % 16] = True
    return BlockSparse(seen, 64)


_CASES = {
    "causal": _BF16,
    "full, whole blocks": _BF16.but(q_len=512, mask=None),
    "window, grouped heads": _BF16.but(
        q_len=700, heads=4, kv_heads=2, batch=2, mask=SlidingWindow(200)
    ),
    "first and window": _BF16.but(mask=Causal() & (First(70) | SlidingWindow(100))),
    "blocks": _BF16.but(mask=_blocks()),
    "documents of each row": _BF16.but(
        batch=2, mask=Causal() & Documents([[300, 700], [128, 500, 372]])
    ),
    "sinks": _BF16.but(q_len=300, sinks=True),
    "float16, full, ragged": _BF16.but(q_len=333, kv_len=457, dtype=torch.float16, mask=None),
    "three tokens": _BF16.but(q_len=3),
}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Inside, calls ask for the kernel; the number of queries of each tile that it gets."""
    from burst_rt.kernels.triton import forward_hopper as module

    real, seen = module.launch_forward_hopper, list[int]()

    def launch(*args: object) -> None:
        seen.append(args[2].q_len)  # type: ignore[attr-defined]  # TileArguments
        real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "launch_forward_hopper", launch)
    return seen


def _attend(world_size: int, case: Case, producer: bool = True) -> Attention:
    config = default_config("forward", 90, case.head_dim, 2, producer=producer)
    with trial_of("forward", config):
        return attend_over_threads(world_size, case, device="cuda", kernel="triton", timeout_s=60)


def _assert_right(found: Attention, case: Case) -> None:
    for field, error in errors_of(found, case.truth).items():
        assert error < ERROR[torch.float32 if field == "lse" else case.dtype], (field, error)


@pytest.mark.parametrize("name", _CASES)
def test_a_tile_against_the_spec(name: str, launches: list[int]) -> None:
    case = _CASES[name]
    _assert_right(_attend(1, case), case)
    assert launches == [case.q_len]


@pytest.mark.parametrize("kind", ["zigzag", "striped", "contiguous"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_rings_against_the_spec(world_size: int, kind: str, launches: list[int]) -> None:
    """Several tiles a row: the state is read and written."""
    case = _BF16.but(heads=4, kv_heads=2, kind=kind, strategy="ring-kv")
    _assert_right(_attend(world_size, case), case)
    assert len(launches) >= world_size


def test_a_ring_under_a_window(launches: list[int]) -> None:
    """Lines with nothing to do, with several runs, and both, in tiles of a ring."""
    case = _BF16.but(mask=SlidingWindow(150), strategy="burst")
    _assert_right(_attend(4, case), case)
    assert launches


def test_the_same_bits_every_time(launches: list[int]) -> None:
    first, *others = (_attend(2, _BF16) for _ in range(4))
    for other in others:
        assert torch.equal(first.out, other.out)
        assert torch.equal(first.lse, other.lse)
    assert launches


@pytest.mark.parametrize("name", ["causal", "window, grouped heads"])
def test_as_the_other_kernel_does(name: str, launches: list[int]) -> None:
    case = _CASES[name]
    found, right = _attend(1, case), _attend(1, case, producer=False)
    assert len(launches) == 1
    assert relative_error(found.out, right.out) < ERROR[case.dtype]
    assert relative_error(found.lse, right.lse) < ERROR[torch.float32]


def test_other_calls_go_to_the_other_kernel(launches: list[int]) -> None:
    case = _BF16.but(q_len=200, softcap=20.0)
    _assert_right(_attend(1, case), case)
    assert not launches
