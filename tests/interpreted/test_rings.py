"""The Triton kernels in whole calls over ranks that are threads: the tiles that rings really
make.
"""

from __future__ import annotations

import pytest
import torch
from spec import errors_of, reference
from tolerances import ERROR
from worlds import Case, attend_over_threads

from burst_rt import Causal, Full
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
    ],
)
def test_rings_of_triton_tiles(name: str, world_size: int) -> None:
    case = _CASES[name]
    got = attend_over_threads(world_size, case, kernel="triton")
    truth = reference(*case.inputs(), mask=case.mask)
    assert got.lse.dtype == torch.float32
    for output, error in errors_of(got, truth).items():
        assert error < ERROR[torch.float32 if output == "lse" else case.dtype], output


def test_what_it_cannot_do_is_refused_by_name() -> None:
    for case, why in (
        (Case(8, head_dim=8), "head_dim of 16 to 256, got 8"),
        (Case(8, dtype=torch.float64), "got torch.float64"),
    ):
        with pytest.raises(InputError, match=f"kernel 'triton' was asked for, but .*{why}"):
            attend_over_threads(1, case, kernel="triton")
