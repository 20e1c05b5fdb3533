"""Rank program on emulated GPUs: says where the host waits for a GPU in calls that it has made
before: nowhere. Then a step of a cache cuts a prompt that is on the host.
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
    waits.clear()
    q.sum().item()
    assert len(waits) == 1, "no wait is noted"

    # Prompts may still be on the host.
    cache = burst_rt.KVCache(
        ctx, num_layers=1, batch=1, num_kv_heads=4, head_dim=16, capacity=64, dtype=q.dtype
    )
    prompt = torch.arange(60)[None]
    step = cache.step(60)
    assert torch.equal(step.cut(prompt), step.cut(prompt.to(ctx.device)).cpu())
    q, k, v = torch.zeros(3, 1, step.num_tokens, 4, 16, device=ctx.device)
    step.attend(0, q, k, v)
    step.commit()
