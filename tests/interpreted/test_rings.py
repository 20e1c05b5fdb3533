"""The Triton kernels in whole calls over ranks that are threads: the tiles that rings really
make.
"""

from __future__ import annotations

import pytest
import torch
from spec import errors_of, reference
from tolerances import ERROR
from worlds import Case, attend_over_threads

import burst_rt
from burst_rt import Causal, Full, Mask
from burst_rt.errors import InputError

_CASES = {
    "causal zigzag, queries travel": Case(61, mask=Causal(), strategy="burst"),
    "causal zigzag, keys travel, grouped, bf16": Case(
        45, mask=Causal(), strategy="ring-kv", kv_heads=1, dtype=torch.bfloat16
    ),
    "causal striped, fewer queries": Case(
        23, kv_len=40, mask=Causal(), kind="striped", strategy="burst", heads=1
    ),
    "causal contiguous, more queries": Case(
        40, kv_len=23, mask=Causal(), kind="contiguous", strategy="ring-kv", heads=1
    ),
    "few queries travel past keys": Case(
        30, kv_len=120, batch=2, mask=Causal(), strategy="ring-q", kv_heads=1, dtype=torch.bfloat16
    ),
    "striped queries travel past keys": Case(
        45, batch=2, mask=Causal(), kind="striped", strategy="ring-q", head_dim=24
    ),
    "full, fp16": Case(37, mask=Full(), dtype=torch.float16, head_dim=24, heads=1),
    "fewer tokens than blocks": Case(3, mask=Causal(), heads=1),
    "all-to-all, grouped, bf16": Case(
        45, batch=2, mask=Causal(), strategy="all-to-all", heads=4, kv_heads=2, dtype=torch.bfloat16
    ),
    "slices of a kv head, bf16": Case(
        45, batch=2, mask=Causal(), strategy="sliced:2", heads=4, kv_heads=2, dtype=torch.bfloat16
    ),
    "all-to-all, some gradients": Case(
        37, mask=Causal(), strategy="all-to-all", needs_grad=(False, True, True)
    ),
}


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        ("causal zigzag, queries travel", 2),
        ("causal zigzag, queries travel", 3),
        ("causal zigzag, keys travel, grouped, bf16", 2),
        ("causal striped, fewer queries", 3),
        ("causal contiguous, more queries", 2),
        ("causal contiguous, more queries", 3),
        ("few queries travel past keys", 1),
        ("few queries travel past keys", 2),
        ("few queries travel past keys", 3),
        ("striped queries travel past keys", 3),
        ("full, fp16", 2),
        ("fewer tokens than blocks", 3),
        ("all-to-all, grouped, bf16", 1),
        ("all-to-all, grouped, bf16", 2),
        ("all-to-all, some gradients", 2),
        ("slices of a kv head, bf16", 2),
    ],
)
def test_rings_of_triton_tiles(name: str, world_size: int) -> None:
    case = _CASES[name]
    got = attend_over_threads(world_size, case, kernel="triton")
    truth = reference(*case.inputs(), mask=case.mask)
    assert got.lse.dtype == torch.float32
    for output, error in errors_of(got, truth).items():
        assert error < ERROR[torch.float32 if output == "lse" else case.dtype], output


def test_one_tile_needs_no_wider_gradients() -> None:
    """Where a rank has one tile and adds nothing up, in a world of one and after all-to-all."""

    def sums(ctx: burst_rt.Context, mask: Mask, strategy: str) -> int | None:
        layout = ctx.layout(40)
        q, k, v = (
            torch.zeros(
                (1, layout.shard_len, heads, 32),
                dtype=torch.bfloat16,
                device=ctx.device,
                requires_grad=True,
            )
            for heads in (4, 2, 2)
        )
        call = burst_rt.make_call(q, k, v, mask=mask, layout=layout, strategy=strategy)
        plan = call.backward_plan
        return plan.memory().sums if plan.writes_gradients else None

    def found(world_size: int, mask: Mask, strategy: str = "auto") -> int | None:
        ranks = burst_rt.run_local(world_size, lambda c: sums(c, mask, strategy), kernel="triton")
        (size,) = set(ranks)
        return size

    rows = 2 * 4  # lse and delta of a query of a head, in bytes
    assert found(1, Causal()) == 40 * 4 * rows
    # Of the group's tokens and half of the heads: rows, and gradients in 16 bits that go back.
    gathered = 40 * (2 * rows + 2 * 32 * (2 + 1 + 1))
    assert found(2, Causal(), "all-to-all") == 20 * 4 * rows + gathered
    assert found(2, Causal(), "burst") is None
    assert found(1, Mask.from_function(lambda batch, head, q, kv: q >= kv)) is None


def test_what_it_cannot_do_is_refused_by_name() -> None:
    for case, why in (
        (Case(8, head_dim=8), "head_dim of 16 to 256, got 8"),
        (Case(8, dtype=torch.float64), "got torch.float64"),
    ):
        with pytest.raises(InputError, match=f"kernel 'triton' was asked for, but .*{why}"):
            attend_over_threads(1, case, kernel="triton")
