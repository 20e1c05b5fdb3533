"""Prints the peak memory of recurrences' calls: measured over planned, in this process.

Results count for what they take: poisoned, their memory is there from the beginning.
"""

from __future__ import annotations

from typing import Any

import torch
from resident import peak

import burst_rt
from burst_rt import recurrence

TOKENS, HEADS, WIDTH = 8192, 4, 64


def measure(
    ctx: burst_rt.Context, name: str, *inputs: torch.Tensor, tree: burst_rt.PrefixTree | None = None
) -> None:
    function = getattr(recurrence, name)
    options: dict[str, Any] = {"layout": ctx.layout(TOKENS), "documents": tree}
    given = [x.detach().requires_grad_() for x in inputs]
    planned = recurrence.explain_recurrence(function, *given, **options).memory
    torch.autograd.grad(function(*given, **options).sum(), given)  # warms up
    made: list[torch.Tensor] = []
    forward = peak(lambda: made.append(function(*given, **options)))
    dout = torch.randn_like(made[0])
    backward = peak(lambda: made.extend(torch.autograd.grad(made[0], given, dout)))
    results = made[0].nbytes, sum(x.nbytes for x in made[1:])
    for taken, size, plan in zip((forward, backward), results, planned, strict=True):
        print((taken - size) / plan)


torch.set_num_threads(1)
qkv = [torch.randn(1, TOKENS, HEADS, WIDTH) for _ in range(3)]
g, beta = -torch.rand(1, TOKENS, HEADS), torch.rand(1, TOKENS, HEADS)
with burst_rt.init(device="cpu") as ctx:
    measure(ctx, "gated_delta_rule", *qkv, g, beta)
    measure(ctx, "gated_delta_rule", *(x.bfloat16() for x in qkv), g, beta)
    measure(ctx, "causal_conv1d", qkv[0].flatten(2), torch.randn(HEADS * WIDTH, 4))
    # Wide states of short segments: those that are kept for the backward are a fifth of the memory.
    tree = burst_rt.PrefixTree([64] * 128, [-1, *[node // 2 for node in range(127)]])
    wide = [torch.randn(1, TOKENS, 1, 256) for _ in range(3)]
    measure(ctx, "gated_delta_rule", *wide, g[..., :1], beta[..., :1], tree=tree)
