"""Attends for `args[1]` seconds; halfway, rank 2 or the telemetry hub is killed (`args[0]`: "rank",
"hub", or "nobody"), which is noted in ./ended_at. Says at the end whether its results are right.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import torch
from spec import reference

import burst_rt
from burst_rt import Causal
from burst_rt.telemetry.hub.starting import HUB_MODULE

victim, last_s = sys.argv[1], float(sys.argv[2])


def kill_if_due(rank: int) -> None:
    if (victim, rank) not in (("rank", 2), ("hub", 0)) or Path("ended_at").exists():
        return
    Path("ended_at").write_text(str(time.time()), encoding="utf-8")
    if victim == "rank":
        os.kill(os.getpid(), signal.SIGKILL)
    # Under a bare mpirun the first rank has started it.
    (hub,) = [p for p in psutil.Process().children() if HUB_MODULE in p.cmdline()]
    hub.kill()


with burst_rt.init() as ctx:
    layout = ctx.layout(96)
    torch.manual_seed(0)
    full = torch.randn(1, 96, 2, 16, dtype=torch.float64)
    x = layout.shard(full).to(ctx.device)
    burst_rt.burst_attention(x, x, x, causal=True, layout=layout)  # the first one loads modules
    began_s = time.perf_counter()
    elapsed_s = torch.zeros(1, dtype=torch.float64)
    num_calls, out = 0, x
    while elapsed_s.item() < last_s * ctx.world_size:
        attended = burst_rt.burst_attention(x, x, x, causal=True, layout=layout)
        out = attended
        num_calls += 1
        # The ranks' clocks differ, and all must make the same calls.
        elapsed_s[0] = time.perf_counter() - began_s
        ctx.all_reduce(elapsed_s)
        if elapsed_s.item() > last_s * ctx.world_size / 2:
            kill_if_due(ctx.rank)
    whole = layout.unshard(out).cpu()
    error = float(
        (whole - reference(full, full, full, torch.zeros_like(full), mask=Causal()).out).abs().max()
    )
    if ctx.rank == 0:
        print(f"{num_calls} calls, {'right' if error < 1e-12 else 'wrong'}", flush=True)
