"""Recurrences of all kinds, along trees too, on all ranks of a job, over transport `args[1]`.

Rank 0 writes to the JSON file `args[0]`: {"errors": {kind: the worst}, "bytes": by rank, for a
short and for a long sequence, [planned, sent] of a delta rule's forward and backward}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from recurrences import (
    KINDS,
    attend,
    drawn,
    drawn_along_a_tree,
    errors,
    truth,
    truth_of_paths,
)

import burst_rt
from burst_rt import Context, recurrence

_SEEDS = (3, 11, 30)


def _bytes(ctx: Context, tokens: int) -> list[int]:
    """What explain says that this rank sends for a delta rule, and what it then sends."""
    layout = ctx.layout(tokens)
    q, k, v = (
        torch.randn(2, layout.shard_len, 2, 16, device=ctx.device).requires_grad_() for _ in "qkv"
    )
    g, beta = (torch.rand(2, layout.shard_len, 2, device=ctx.device) for _ in range(2))
    plans = recurrence.explain_recurrence(
        recurrence.gated_delta_rule, q, k, v, -g, beta, layout=layout
    )
    assert plans.backward is not None
    before = ctx.stats().bytes_sent
    out = recurrence.gated_delta_rule(q, k, v, -g, beta, layout=layout)
    assert isinstance(out, torch.Tensor)
    out.sum().backward()
    sent = ctx.stats().bytes_sent - before
    return [plans.forward.bytes_sent() + plans.backward.bytes_sent(), sent]


def main() -> None:
    """The rank."""
    path, transport = sys.argv[1:]
    with burst_rt.init(transport=transport) as ctx:
        worst = {}
        for kind in KINDS:
            cases = [drawn(seed, kind, ctx.world_size) for seed in _SEEDS]
            pairs = [(case, truth(case)) for case in cases]
            along = drawn_along_a_tree(_SEEDS[-1], kind, ctx.world_size)
            pairs.append((along, truth_of_paths(along)))
            worst[kind] = max(
                error for case, true in pairs for error in errors(attend(ctx, case), true).values()
            )
        told = ctx.all_gather([_bytes(ctx, tokens) for tokens in (64, 640)])
    if ctx.rank == 0:
        Path(path).write_text(json.dumps({"errors": worst, "bytes": told}), encoding="utf-8")


main()
