"""axolotl-ringmaster's adapter: models by its context manager, attention by its ring.

On CPUs the ring computes blocks by Ringmaster's "math", which its own tests register by hand, as
here: the block that it takes by itself calls an operator that CPUs lack.
"""

from __future__ import annotations

from typing import Any

import ringmaster
import torch
import torch.distributed as dist
from ringmaster.strategies.ring import make_ring_attention
from transformers import AttentionInterface

from burst_rt.conformance.cases import ModelCase
from burst_rt.conformance.spread import mean_gradients

Tensors = dict[str, torch.Tensor]


def model(case: ModelCase, model: Any, batch: Tensors) -> Tensors:
    """`Backend.RING` with gathered keys."""
    return ringmaster_model(case, model, batch, ringmaster.Backend.RING)


def ringmaster_model(
    case: ModelCase, model: Any, batch: Tensors, backend: ringmaster.Backend
) -> Tensors:
    """As its README has it: setup, recurrent layers wired, hooks that cut and gather.

    In training the loss is divided by `num_items_in_batch`, as Trainer does, and gradients are
    averaged, as FSDP2 does.
    """
    runtime = ringmaster.setup(
        ringmaster.RingmasterConfig(size=dist.get_world_size(), backend=backend),
        num_kv_heads=model.config.num_key_value_heads, device_type="cpu", inner_attn="sdpa",
    )  # fmt: skip
    if backend == ringmaster.Backend.RING:
        AttentionInterface.register(
            runtime.attn_implementation,
            make_ring_attention("math", "math", ringmaster.RotateMethod.ALLGATHER),
        )
    model.set_attn_implementation(runtime.attn_implementation)
    ringmaster.wire_recurrent_layers(model)
    if case.train:
        labelled = (batch["labels"][:, 1:] != -100).sum()
        batch = batch | {"num_items_in_batch": labelled}
    with ringmaster.ContextParallelContextManager(
        [model], runtime.cp_group, gather_outputs=True, load_balance=runtime.shard_load_balance
    ):
        out = model(**batch, use_cache=False)
    results = {"logits": out.logits, "loss": out.loss.detach().clone()}
    if case.train:
        out.loss.backward()
        dist.all_reduce(results["loss"])
        results["loss"] /= dist.get_world_size()
        results |= mean_gradients(model)
    return results
