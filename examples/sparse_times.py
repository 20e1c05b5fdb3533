"""Bytes sent and time of the sparse examples and of exact attention, forward and backward.

    burst-rt run -n 3 examples/sparse_times.py

Calls run in turn. A time is the slowest rank's time, and the median of these over the rounds. Bytes
are counted by the graphs and summed over all ranks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

import burst_rt

sys.path.insert(0, str(Path(__file__).parent))
from downsampled import Downsampled
from linformer import Linformer
from performer import Performer

HEADS, DIM, ROUNDS = 4, 64, 7


def measure(ctx: burst_rt.Context, tokens: int) -> None:
    """Prints one table row for each way."""
    torch.manual_seed(ctx.rank)
    layout = ctx.layout(tokens, kind="zigzag")
    width, own = 2 * HEADS * DIM, tokens // ctx.world_size
    q, k, v = (torch.randn(own, HEADS, DIM, requires_grad=True) for _ in range(3))
    e = torch.randn(own, 256, requires_grad=True)
    features = torch.randn(DIM, 128)
    linformer = Linformer(ctx, 256, width, q.dtype)
    down = Downsampled(ctx, tokens, 256, 16, width * 4)
    state = torch.empty(HEADS, 128, DIM + 1)
    full, causal = (Performer(ctx, tokens, state, each) for each in (False, True))
    qh, kh, vh = (x.transpose(0, 1) for x in (q, k, v))
    batch = [x[None] for x in (q, k, v)]
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "exact, full": lambda: burst_rt.burst_attention(*batch, layout=layout),
        "Linformer, 256 rows": lambda: linformer(q, k, v, e),
        "Performer, 128 features, full": lambda: full(qh, kh, vh, features),
        "exact, causal": lambda: burst_rt.burst_attention(*batch, causal=True, layout=layout),
        "Performer, 128 features, causal": lambda: causal(qh, kh, vh, features),
        "window 256, means of 16, causal": lambda: down(q, k, v),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    sent: dict[str, int] = {}
    ctx.stats()  # from here on, GPUs take times
    for round in range(ROUNDS + 1):  # the first warms up, and counts bytes
        for name, way in ways.items():
            ctx.all_reduce(torch.zeros(1))  # all begin together
            begin = time.perf_counter()
            out = way()
            forward = ctx.gather_last_run() if round == 0 else []
            out.sum().backward()
            spent = torch.zeros(ctx.world_size, dtype=torch.float64)
            spent[ctx.rank] = time.perf_counter() - begin
            if round:
                times[name].append(float(ctx.all_reduce(spent).max()))
            else:
                runs = forward + ctx.gather_last_run()
                sent[name] = sum(graph.wire_bytes for graph, _ in runs)
    if ctx.rank == 0:
        for name in ways:
            milliseconds = 1e3 * median(times[name])
            print(f"| {tokens:,} | {name} | {sent[name] / 1e6:.2f} | {milliseconds:.1f} |")


if __name__ == "__main__":
    with burst_rt.init(device="cpu") as context:
        measure(context, 3072)
