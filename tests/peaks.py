"""Prints the peak memory of recurrences' calls, measured over planned; each has a process.

Results count for what they take: poisoned, their memory is there from the beginning.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from resident import peak, resident

import burst_rt
from burst_rt import recurrence

TOKENS, HEADS, WIDTH = 4096, 4, 64


def measure(name: str, *inputs: torch.Tensor, tree: burst_rt.PrefixTree | None = None) -> None:
    """Forks: what one call leaves in the C library's heap is not to count for the next."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    torch.set_num_threads(1)
    with burst_rt.init(device="cpu") as ctx:
        function = getattr(recurrence, name)
        options: dict[str, Any] = {"layout": ctx.layout(TOKENS), "documents": tree}
        given = [x.requires_grad_() for x in inputs]
        planned = recurrence.explain_recurrence(function, *given, **options).memory
        # Warms up.
        few = [x[:, :256].detach() if x.shape[:2] == (1, TOKENS) else x.detach() for x in given]
        few = [x.requires_grad_() for x in few]
        torch.autograd.grad(function(*few, layout=ctx.layout(256)).sum(), few)
        made: list[torch.Tensor] = []
        before = resident()
        forward = peak(lambda: made.append(function(*given, **options)))
        kept = resident() - before - made[0].nbytes  # until the backward
        dout = torch.randn_like(made[0])
        backward = peak(lambda: made.extend(torch.autograd.grad(made[0], given, dout))) + kept
    results = made[0].nbytes, sum(x.nbytes for x in made[1:])
    names = ("forward", "backward")
    for way, taken, size, plan in zip(names, (forward, backward), results, planned, strict=True):
        print(name, way, inputs[0].dtype, (taken - size) / plan)
    sys.stdout.flush()
    os._exit(0)


def random(*sizes: int) -> torch.Tensor:
    return torch.randn(1, TOKENS, *sizes)


qkv = [random(HEADS, WIDTH) for _ in range(3)]
g, beta = -torch.rand(1, TOKENS, HEADS), torch.rand(1, TOKENS, HEADS)
measure("gated_delta_rule", *qkv, g, beta)
measure("gated_delta_rule", *(x.bfloat16() for x in qkv), g, beta)
measure("causal_conv1d", qkv[0].flatten(2), torch.randn(HEADS * WIDTH, 4))
measure("linear_attention", *qkv, g)
x, dt = random(512), torch.rand(1, TOKENS, 512)
measure("linear_recurrence", x, -dt)
measure("linear_recurrence", x.bfloat16(), -dt)
b, c = random(16), random(16)
few = x[..., :64].clone(), dt[..., :64].clone()
measure("selective_scan", *few, -torch.rand(64, 16), b, c, torch.rand(64))
for dtype in (torch.float32, torch.bfloat16):
    heads, b, c = (y.to(dtype) for y in (random(16, 32), random(1, 32), random(1, 32)))
    measure("state_space", heads, dt[..., :16].clone(), -torch.rand(16), b, c, torch.rand(16))
# Wide states of short segments: those that are kept for the backward are a fifth of the memory.
tree = burst_rt.PrefixTree([64] * 64, [-1, *[node // 2 for node in range(63)]])
wide = [random(1, 256) for _ in range(3)]
measure("gated_delta_rule", *wide, g[..., :1].clone(), beta[..., :1].clone(), tree=tree)
