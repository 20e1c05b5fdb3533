"""The default device is for the program's own tensors: whatever it is, calls do the same."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch

import burst_rt
from burst_rt.context import Context
from burst_rt.recurrence import gated_delta_rule


def _calls(ctx: Context) -> list[torch.Tensor]:
    """Training of a packed batch, a recurrence, and a step of serving."""
    draw = torch.Generator().manual_seed(ctx.rank)
    cpu = torch.device("cpu")
    ids = torch.arange(48, device=cpu)[None]
    starts = torch.cat([torch.arange(n, device=cpu) for n in (30, 18)])[None]
    batch = burst_rt.shard_batch({"input_ids": ids, "position_ids": starts, "labels": ids}, ctx)
    plain = burst_rt.shard_batch({"input_ids": ids}, ctx)
    shape = 1, batch.layout.shard_len, 2, 16
    q = torch.randn(shape, generator=draw, device=cpu, requires_grad=True)
    out = burst_rt.burst_attention(
        q, q, q, mask=batch.mask, layout=batch.layout, softcap=20.0,
        sinks=torch.ones(2, device=cpu), alibi_slopes=torch.ones(2, device=cpu),
    )  # fmt: skip
    (dq,) = torch.autograd.grad(out.square().sum(), [q])
    gate = -torch.rand(shape[:3], generator=draw, device=cpu)
    states = gated_delta_rule(q, q, q, gate, gate.exp(), layout=batch.layout)
    cache = burst_rt.KVCache(
        ctx, num_layers=1, batch=2, num_kv_heads=2, head_dim=16, capacity=64, dtype=torch.float32
    )
    step = cache.step(40)
    new = torch.randn(2, step.num_tokens, 2, 16, generator=draw, device=cpu)
    served = step.attend(0, new, new, new)
    step.commit()
    return [batch.position_ids, plain.position_ids, out, dq, states[0], served]


def test_the_default_device_is_the_programs_own_affair() -> None:
    def run(ctx: Context, device: str | None) -> list[torch.Tensor]:
        with torch.device(device) if device else nullcontext():
            return [x.detach() for x in _calls(ctx)]

    expected, found = (
        burst_rt.run_local(2, partial(run, device=device)) for device in (None, "meta")
    )
    for same in zip(expected, found, strict=True):
        for one, other in zip(*same, strict=True):
            assert other.device.type == "cpu"
            assert torch.equal(one, other)
