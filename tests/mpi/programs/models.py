"""Rank program: models of transformers over ranks, beside what one process makes of them.

`models.py TRUTHS RESULTS` reads what `small_models.truth` gives for every model and kind of batch,
and writes the largest differences.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from small_hybrids import HYBRIDS, make_hybrid
from small_models import fully_sharded, gradients, make_batch, make_model, seen
from torch.nn.parallel import DistributedDataParallel

import burst_rt
import burst_rt.hf

Differences = dict[str, float]
# A model with plain parameters, one with sinks and a softmax over experts, and a hybrid.
_WRAPPED = ("Llama", "GptOss", "Jamba")
# Ones with masks with arguments, with images, and with a balancing loss.
_COMPILED = ("Gemma3", "Gemma3Images", "Mixtral")
_LAYOUTS = ("contiguous", "zigzag", "striped", "balanced")


def main(ctx: burst_rt.Context, truths: dict[str, dict[str, Any]]) -> dict[str, Differences]:
    average = partial(burst_rt.average_gradients, group=ctx)
    found = {}
    for name, by_kind in truths.items():
        for kind, truth in by_kind.items():
            found[f"{name} {kind}"] = _differences(ctx, name, kind, truth, after=average)
    for layout in _LAYOUTS:
        for kind in ("plain", "packed"):
            truth = truths["Llama"][kind]
            case = f"Llama {kind} {layout}"
            found[case] = _differences(ctx, "Llama", kind, truth, layout=layout, after=average)
    if ctx.world_size > 1:
        dist.init_process_group("gloo")
        for name in _WRAPPED:
            truth = truths[name]["packed"]
            for wrap in (DistributedDataParallel, fully_sharded):
                case = f"{name} packed {wrap.__name__}"
                found[case] = _differences(ctx, name, "packed", truth, wrap=wrap)
        dist.destroy_process_group()
    if ctx.world_size == 2:
        compiled = partial(torch.compile, backend="aot_eager")
        for name in _COMPILED:
            found[f"{name} packed compiled"] = _differences(
                ctx, name, "packed", truths[name]["packed"], wrap=compiled, after=average
            )
    return found


def _differences(
    ctx: burst_rt.Context,
    name: str,
    kind: str,
    truth: dict[str, Any],
    *,
    layout: str = "auto",
    wrap: Callable[[Any], Any] = lambda model: model,
    after: Callable[[Any], None] = lambda parameters: None,
) -> Differences:
    model = (make_hybrid(name) if name in HYBRIDS else make_model(name)).to(ctx.device)
    batch = make_batch(name, kind)
    model.set_attn_implementation("burst_rt")
    model = wrap(burst_rt.hf.prepare(model, ctx))
    part = burst_rt.hf.shard(batch, ctx, layout)
    output = model(**part)
    # Before the backward, after which FSDP2 has sharded the head's weight, and the logits are gone.
    whole = part["burst_rt"].batch.layout.unshard(output.logits.detach()).cpu()
    output.loss.backward()
    # What embeds the batch, a vision tower say, learns as the model does.
    after([*model.parameters(), *(x for x in batch.values() if x.requires_grad)])
    meant = seen(batch)
    grads = gradients(model, batch)
    assert grads.keys() == truth["gradients"].keys()
    return {
        "loss": abs(output.loss.item() / truth["loss"] - 1),
        "logits": _difference(whole[meant], truth["logits"][meant]),
        "gradients": max(
            _difference(grads[name].cpu(), expected)
            for name, expected in truth["gradients"].items()
        ),
    }


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference over the largest value."""
    return float((found - expected).abs().max() / expected.abs().max())


if __name__ == "__main__":
    with burst_rt.init() as ctx:
        results = main(ctx, torch.load(sys.argv[1]))
        if ctx.rank == 0:
            with open(sys.argv[2], "w", encoding="utf-8") as file:
                json.dump(results, file)
