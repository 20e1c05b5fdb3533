"""A step of `args[0]` tokens, of which rank 1 gives a layer two sequences in place of one."""

from __future__ import annotations

import sys

import torch

import burst_rt


def main() -> None:
    ctx = burst_rt.init()
    cache = burst_rt.KVCache(
        ctx, num_layers=1, batch=1, num_kv_heads=1, head_dim=8, capacity=64, dtype=torch.float32,
        block=4,
    )  # fmt: skip
    step = cache.step(int(sys.argv[1]))
    x = torch.ones(1 + ctx.rank, step.num_tokens, 1, 8)
    step.attend(0, x, x, x)


main()
