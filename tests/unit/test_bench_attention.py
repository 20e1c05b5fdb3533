"""`burst-rt bench attention` (launch/bench/attention.py): where its tensors are, and what its table
of errors compares.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tolerances import ERROR

import burst_rt
from burst_rt import SlidingWindow
from burst_rt.launch.bench.attention import Bench, CallShape, Rows


def _bench(ctx: Any) -> Bench:
    bench = Bench.__new__(Bench)
    bench.ctx, bench.repeats, bench.max_tokens = ctx, 1, 200
    return bench


# A stand-in for a GPU: a device that is not the one on which torch makes tensors by itself.
@pytest.mark.parametrize("side", [Bench.ours, Bench.torch_alone])
@pytest.mark.parametrize("mask", [None, SlidingWindow(3)])
def test_tensors_are_on_the_contexts_device(
    side: Callable[[Bench, CallShape], Callable[[], object]],
    mask: burst_rt.Mask | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def attend(*given: torch.Tensor, **options: Any) -> torch.Tensor:
        where = {x.device.type for x in (*given, options.get("attn_mask")) if x is not None}
        assert where == {"meta"}
        return given[0] + given[1] + given[2]

    monkeypatch.setattr(burst_rt, "burst_attention", attend)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    layout = SimpleNamespace(shard_len=16)
    ctx = SimpleNamespace(rank=0, device=torch.device("meta"), layout=lambda *_, **__: layout)
    side(_bench(ctx), CallShape(16, 2, mask=mask))()


@pytest.mark.parametrize("world_size", [1, 4])
def test_errors_are_those_of_this_jobs_messages(world_size: int) -> None:
    def measured(ctx: burst_rt.Context) -> tuple[Rows, int]:
        return _bench(ctx).error(), ctx.runtime.transport.bytes_sent

    (rows, sent), *_ = burst_rt.run_local(world_size, measured)
    assert bool(sent) == (world_size > 1)
    names = {str(row["strategy"]) for row in rows} - {"torch, one process"}
    assert ({"two-level:2", "all-to-all", "burst"} <= names) == (world_size > 1)
    assert len(rows) == 4 * (1 + len(names))
    for row in rows:
        tolerance = ERROR[getattr(torch, str(row["dtype"]))]
        assert all(0 < float(row[f"{x} x 1e7"]) * 1e-7 < tolerance for x in ("out", "dq", "dv"))  # type: ignore[arg-type]
        assert row["bits"] in (None, "the same")
