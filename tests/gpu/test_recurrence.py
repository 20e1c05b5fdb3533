"""Recurrences on a GPU, ranks as threads, against the float64 spec. Only where there is a GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from recurrences import KINDS, attend, drawn, errors, truth

import burst_rt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_drawn_calls_against_the_spec(kind: str) -> None:
    for seed, world_size in ((3, 1), (12, 2), (29, 4)):
        case = drawn(seed, kind, world_size)
        call = partial(attend, case=case)
        runs = [burst_rt.run_local(world_size, call, device="cuda", timeout_s=60) for _ in range(2)]
        wrong = {name: e for name, e in errors(runs[0][0], truth(case)).items() if not e < 1e-5}
        assert not wrong, (case.about, wrong)
        for name, x in runs[0][0].items():
            assert all(torch.equal(x, rank[name]) for run in runs for rank in run), name
