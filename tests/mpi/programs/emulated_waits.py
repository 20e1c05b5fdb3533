"""Rank program on emulated GPUs: says where the host waits for a GPU in calls that it has made
before: nowhere.
"""

from __future__ import annotations

import torch
from emulated.cuda import waits

import burst_rt
from burst_rt import Causal, Documents, SlidingWindow
from burst_rt.recurrence import gated_delta_rule

_MASKS = (None, Causal(), SlidingWindow(40, 0), Causal() & Documents([100, 60, 41]))
_STRATEGIES = ("burst", "ring-kv", "ring-q", "bidirectional", "direct", "all-to-all", "two-level:2")

with burst_rt.init() as ctx:
    layout = ctx.layout(201)

    def tokens(*dims: int) -> torch.Tensor:
        """Random numbers for this rank's tokens."""
        shape = (1, layout.shard_len, *dims)
        return torch.rand(shape, device=ctx.device, requires_grad=True)

    q, k, v, g, beta = tokens(4, 16), tokens(4, 16), tokens(4, 16), tokens(4), tokens(4)
    for again in range(2):
        waits.clear()
        for strategy in _STRATEGIES:
            for mask in _MASKS:
                out = burst_rt.burst_attention(q, k, v, mask=mask, layout=layout, strategy=strategy)
                out.sum().backward()
        gated_delta_rule(q, k, v, -g, beta, layout=layout).sum().backward()
        print(f"rank {ctx.rank}, turn {again}: {[*dict.fromkeys(waits)]}", flush=True)
    q.sum().item()
    assert len(waits) == 1, "no wait is noted"
