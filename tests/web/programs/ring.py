"""Attention round a ring, again and again, until a file is there; rank 0 reports a loss. Arguments:
tokens, the file.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

import burst_rt
from burst_rt import telemetry

_AT_MOST_S = 120.0

# What watches the ranks has the cores first: on few of them ranks that never rest leave it little.
os.nice(5)
tokens, stop = int(sys.argv[1]), Path(sys.argv[2])
with burst_rt.init() as ctx:
    layout = ctx.layout(tokens)
    q, k, v = (
        torch.randn(1, layout.shard_len, heads, 64, requires_grad=True) for heads in (4, 2, 2)
    )
    ends_at_s, step, stopping = time.monotonic() + _AT_MOST_S, 0, torch.zeros(1)
    while not stopping:
        began_s = time.monotonic()
        with telemetry.step():
            with telemetry.span("forward"):
                out = burst_rt.burst_attention(q, k, v, causal=True, layout=layout)
            with telemetry.span("backward"):
                torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        step += 1
        if ctx.rank == 0:
            telemetry.report(
                step,
                loss=1.2 + 4.5 * 0.99**step,
                tokens_per_s=tokens / (time.monotonic() - began_s),
            )
        # All ranks must stop at the same step.
        stopping[0] = float(stop.exists() or time.monotonic() > ends_at_s)
        ctx.all_reduce(stopping)
