"""Traces of several hosts on one clock (runtime/reductions.py)."""

from __future__ import annotations

import threading

import pytest
import torch

import burst_rt
from burst_rt import Context
from burst_rt.runtime import reductions
from burst_rt.runtime.reductions import _Clock

# Rank 1's host began to count three days later than that of ranks 0 and 2, whose clock is one,
# however late each has looked.
_CLOCKS = {0: _Clock("a", 5.0), 1: _Clock("b", 259_205.0), 2: _Clock("a", 5.001)}


def test_traces_of_hosts_are_on_the_clock_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        reductions, "_clock", lambda: _CLOCKS[int(threading.current_thread().name[-1])]
    )

    def attend(ctx: Context) -> tuple[list[float], list[list[float]]]:
        layout = ctx.layout(24)
        x = torch.ones(1, layout.shard_len, 1, 8)
        burst_rt.burst_attention(x, x, x, layout=layout)
        gathered = ctx.gather_last_run()
        assert ctx.runtime.last_run is not None
        _, driver = ctx.runtime.last_run
        assert driver is not None
        own = [span.started_s for span in driver.trace]
        return own, [[span.started_s for span in trace] for _, trace in gathered]

    results = burst_rt.run_local(3, attend)
    for _, gathered in results:
        for rank, by_s in enumerate((0.0, 259_200.0, 0.0)):
            own = results[rank][0]
            assert gathered[rank] == pytest.approx([at_s + by_s for at_s in own], abs=1e-6)
