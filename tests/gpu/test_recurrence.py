"""Recurrences on a GPU, ranks as threads, against the float64 spec. Only where there is a GPU."""

from __future__ import annotations

import re
from functools import partial
from importlib.util import find_spec

import fla_calls
import pytest
import torch
from recurrences import KINDS, attend, drawn, errors, truth

import burst_rt
from burst_rt import Context, recurrence

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


needs_fla = pytest.mark.skipif(find_spec("fla") is None, reason="needs fla-core")


@needs_fla
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("kind", fla_calls.KINDS[:3])
def test_roundings_of_fla_are_those_of_its_own_calls(kind: str, dtype: torch.dtype) -> None:
    for world_size in (1, 2, 4):
        cases = (fla_calls.fitting(seed, kind, world_size, dtype) for seed in range(100))
        case = next(x for x in cases if x.batch == 1 and x.documents and x.seq_len > 100)
        wrong = fla_calls.worse_than_its_own(case, dtype, "cuda")
        assert not wrong, (case.about, wrong)


@needs_fla
@pytest.mark.parametrize("by_channel", [False, True], ids=["by head", "by channel"])
def test_auto_compares_and_times_fla(by_channel: bool) -> None:
    def said(ctx: Context) -> str:
        q, k, v = torch.zeros(3, 1, 4096, 8, 128, dtype=torch.bfloat16, device=ctx.device)
        beta = torch.zeros(1, 4096, 8, device=ctx.device)
        g = torch.zeros_like(q, dtype=torch.float32) if by_channel else beta
        layout = ctx.layout(4096)
        return str(
            recurrence.explain_recurrence(
                recurrence.gated_delta_rule, q, k, v, g, beta, layout=layout
            )
        )

    (words,) = burst_rt.run_local(1, said, device="cuda")
    assert re.search(r"kernel (torch|fla): the fastest of .*fla \d+\.\d+ ms", words), words
