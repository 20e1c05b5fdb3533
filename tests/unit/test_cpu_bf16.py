"""torch's fused CPU attention in bfloat16: against the spec, when it may be taken, and that
measuring decides. On a CPU without such instructions it computes the same, slowly.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from spec import errors_of
from tolerances import ERROR
from worlds import Case, attend_over_threads

import burst_rt
from burst_rt import Causal, Context, Documents, Full, Mask, SlidingWindow
from burst_rt.kernels import KERNELS, Work, cpu, pick, speed
from burst_rt.kernels.cpu_calls import PartSize
from burst_rt.planning.problem import ScoreFlags

_CPU = torch.device("cpu")
_SQUARE = Work(_CPU, torch.bfloat16, 64, Causal(), tiles=(Causal().pieces(range(64), range(64)),))
_BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def native(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A CPU with the instructions, nothing measured yet, a cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(speed, "_known", {})
    monkeypatch.setattr("burst_rt.kernels.cpu_bf16.cpu_capabilities", lambda: {"avx512_bf16": True})


_MASKS = {
    "full": Full(), "causal": Causal(), "window": SlidingWindow(300),
    "documents": Causal() & Documents([701, 1, 400, 98]),
}  # fmt: skip


# Every mask in two worlds, in turns.
@pytest.mark.parametrize(
    ("mask", "world_size"),
    [
        pytest.param(
            mask, world, id=f"{name} {world}", marks=() if (at + world) % 3 else pytest.mark.long
        )
        for at, (name, mask) in enumerate(_MASKS.items())
        for world in (1, 2, 3)
    ],
)
def test_forward_and_backward_are_right(mask: Mask, world_size: int) -> None:
    case = Case(1200, heads=4, kv_heads=2, dtype=_BF16, mask=mask, head_dim=32, v_head_dim=24)
    result = attend_over_threads(world_size, case, kernel="cpu-bf16", partials="16bit")
    for field, error in errors_of(result, case.truth).items():
        # As with the vendors' kernels: partial results are rounded, too.
        limit = ERROR[torch.float32] if field == "lse" else 2 * ERROR[_BF16]
        assert error < limit, (field, error)


@pytest.mark.parametrize("causal", [False, True])
def test_what_a_single_call_may_do_is_not_taken_apart(
    causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However small the parts of the others are, out is rounded once, by the call itself."""
    for name in ("PART", "SMALL_PART"):
        monkeypatch.setattr(cpu, name, PartSize(32, 32, 4))
    shapes: list[tuple[int, ...]] = []
    fused = cpu._forward

    def listening(q: torch.Tensor, *rest: Any, **options: Any) -> Any:  # torch's own
        shapes.append(tuple(q.shape))
        return fused(q, *rest, **options)

    monkeypatch.setattr(cpu, "_forward", listening)
    case = Case(300, dtype=_BF16, mask=Causal() if causal else Full(), needs_grad=(False,) * 3)
    result = attend_over_threads(1, case, kernel="cpu-bf16")
    assert shapes == [(1, 2, 300, 16)]
    truth = case.truth
    for field, dtype in (("out", _BF16), ("lse", torch.float32)):
        assert errors_of(result, truth)[field] < ERROR[dtype]


def test_the_same_bits_every_time() -> None:
    case = Case(500, dtype=_BF16, mask=Causal(), heads=4)
    first, *others = (
        attend_over_threads(2, case, kernel="cpu-bf16", partials="16bit") for _ in range(3)
    )
    for other in others:
        for x, y in zip(first[:5], other[:5], strict=True):
            assert x is not None
            assert y is not None
            assert torch.equal(x, y)


def test_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = KERNELS["cpu-bf16"]
    assert kernel.refuses(_SQUARE) is None
    rounded = _SQUARE._replace(partials="16bit")
    for allowed in (rounded._replace(forward=False), rounded._replace(ring_size=2)):
        assert kernel.refuses(allowed) is None
    for work, why in (
        (_SQUARE._replace(device=torch.device("cuda")), "takes CPU tensors, got cuda"),
        (_SQUARE._replace(dtype=torch.float16), "takes bfloat16, got torch.float16"),
        (_SQUARE._replace(dtype=torch.int32), "got torch.int32"),
        (_SQUARE._replace(scores=ScoreFlags(softcap=True)), "has no softcap"),
        (_SQUARE._replace(scores=ScoreFlags(sinks=True)), "sinks are added up"),
        (_SQUARE._replace(ring_size=2), "several partial results are added up"),
        (_SQUARE._replace(forward=False), "adds up gradients in bfloat16"),
    ):
        reason = kernel.refuses(work)
        assert reason is not None
        assert reason.startswith("the cpu-bf16 kernel")
        assert why in reason
    monkeypatch.setattr("burst_rt.kernels.cpu_bf16.cpu_capabilities", dict)
    assert "a CPU that has instructions for bfloat16" in str(kernel.refuses(_SQUARE))


def test_measuring_decides_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    picked = pick(_SQUARE)
    assert picked.reason.startswith("the fastest of cpu")
    assert "for a tile of 1,024 x 1,024 (measured now)" in picked.reason
    assert all(f"{name} " in picked.reason for name in ("cpu", "cpu-bf16"))
    assert pick(_SQUARE) == picked._replace(
        reason=picked.reason.replace("measured now", "measured before in this process")
    )
    # With other threads other kernels may be faster.
    monkeypatch.setattr(speed, "seconds_of", lambda *_: {"cpu": 2.0, "cpu-bf16": 1.0})
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert pick(_SQUARE).kernel.name == "cpu-bf16"
    finally:
        torch.set_num_threads(threads)


def test_other_calls_pay_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "seconds_of", None)
    assert pick(_SQUARE._replace(dtype=torch.float32)) == (
        KERNELS["cpu"],
        "the only kernel here that can compute this call",
    )
    several = pick(_SQUARE._replace(ring_size=2))
    assert several.kernel.name == "cpu"
    assert several.reason.startswith(
        "the only kernel here that can compute this call; the cpu-bf16"
    )


def test_a_call_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "seconds_of", lambda *_: {"cpu": 2.0, "cpu-bf16": 1.0})

    def explained(ctx: Context) -> str:
        layout = ctx.layout(64)
        x = torch.zeros(1, layout.shard_len, 2, 16, dtype=_BF16, requires_grad=True)
        return str(burst_rt.explain(x, x, x, layout=layout, causal=True))

    forward, backward = burst_rt.run_local(1, explained)[0].split("backward:")
    assert "kernel cpu-bf16: the fastest of cpu-bf16 1000.000 ms, cpu 2000.000 ms" in forward
    assert "kernel cpu: the only kernel" in backward
    for words in burst_rt.run_local(2, explained, partials="16bit")[0].split("backward:"):
        assert "kernel cpu-bf16" in words
        assert "partials are 16-bit: each partial result is rounded to bfloat16" in words
