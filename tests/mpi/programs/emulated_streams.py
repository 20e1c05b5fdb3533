"""Calls of one plan from two streams in turn, with nothing else between them.

On emulated GPUs, whose books say where one call uses what another still reads.
"""

from collections.abc import Callable

import torch

import burst_rt
from burst_rt import recurrence

with burst_rt.init() as ctx:
    layout = ctx.layout(64, "contiguous")

    def drawn(*sizes: int) -> torch.Tensor:
        x = torch.rand(1, layout.shard_len, *sizes, device=ctx.device)
        return x.requires_grad_()

    q, k, v, g, beta = drawn(2, 16), drawn(2, 16), drawn(2, 16), drawn(2), drawn(2)
    weight = torch.rand(16, 4, device=ctx.device, requires_grad=True)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "attention": lambda: burst_rt.burst_attention(q, k, v, layout=layout, causal=True),
        "delta rule": lambda: recurrence.gated_delta_rule(q, k, v, -g, beta, layout=layout),
        "its state": lambda: recurrence.gated_delta_rule(
            q, k, v, -g, beta, layout=layout, return_state=True
        )[1],
        "scan": lambda: recurrence.linear_recurrence(q[:, :, 0], -k[:, :, 0], layout=layout),
        "convolution": lambda: recurrence.causal_conv1d(q[:, :, 0], weight, layout=layout),
    }
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(ctx.device) for _ in range(2)]
    for name, call in calls.items():
        kept = []
        for number in range(6):
            with torch.cuda.stream(streams[number % 2]):
                grads = torch.autograd.grad(call().sum(), [q, k], allow_unused=True)
                kept.append(grads)
        torch.cuda.synchronize()
        print(f"rank {ctx.rank}: {name} done", flush=True)
