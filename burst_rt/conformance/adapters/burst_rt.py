"""burst_rt's adapter: `burst_attention`, and models by `burst_rt.hf`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import burst_rt
import burst_rt.hf
from burst_rt.conformance.cases import AttentionCase, ModelCase
from burst_rt.conformance.models import gradients
from burst_rt.conformance.spread import attend_spread

Tensors = dict[str, torch.Tensor]


def attention(case: AttentionCase, tensors: Tensors) -> Tensors:
    """A zigzag layout and the strategy of "auto"."""
    mask: burst_rt.Mask = burst_rt.Causal() if case.causal else burst_rt.Full()
    if case.prefix:
        mask = burst_rt.Prefix(case.prefix)
    if case.window:
        mask &= burst_rt.SlidingWindow(case.window - 1)
    if case.documents:
        mask &= burst_rt.Documents(case.documents)
    if case.padding:
        ids = [[0] * (case.length - count) + [-1] * count for count in case.padding]
        mask &= burst_rt.Documents(ids=ids)
    with burst_rt.init(group=dist.group.WORLD, device="cpu") as ctx:
        layout = ctx.layout(case.length)
        return attend_spread(
            tensors,
            layout.positions(),
            lambda q, k, v, sinks: burst_rt.burst_attention(
                q, k, v, layout=layout, mask=mask, sinks=sinks, softcap=case.softcap,
                scale=case.scale,
            ),
        )  # fmt: skip


def model(case: ModelCase, model: Any, batch: Tensors) -> Tensors:
    """As docs/transformers.md has it."""
    model.set_attn_implementation("burst_rt")
    with burst_rt.init(group=dist.group.WORLD, device="cpu") as ctx:
        burst_rt.hf.prepare(model, ctx)
        layout = ctx.layout(batch["input_ids"].shape[1])
        out = model(**burst_rt.hf.shard(batch, ctx, layout))
        results = {"logits": layout.unshard(out.logits.detach()), "loss": out.loss}
        if case.train:
            out.loss.backward()
            burst_rt.average_gradients(model.parameters(), group=ctx)
            results |= gradients(model)
        return results
