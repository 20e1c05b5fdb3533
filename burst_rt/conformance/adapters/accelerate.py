"""accelerate's adapter: `ParallelismConfig(cp_size=...)` with FSDP2, as transformers' Trainer does.

accelerate 1.15 refuses a ParallelismConfig on CPUs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental._attention import context_parallel_unshard

from burst_rt.conformance.cases import ModelCase
from burst_rt.conformance.models import gradients

DEVICE = "cuda"

Tensors = dict[str, torch.Tensor]


def model(case: ModelCase, model: Any, batch: Tensors) -> Tensors:
    """The buffers that Trainer cuts: ids, labels, shifted labels, positions and the mask."""
    if not model.supports_context_parallel:
        raise ValueError(f"{type(model).__name__}.supports_context_parallel is False")
    world = dist.get_world_size()
    model.set_attn_implementation("sdpa")
    accelerator = Accelerator(
        parallelism_config=ParallelismConfig(cp_size=world),
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap"
        ),
    )
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    labels = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    batch = batch | {"shift_labels": labels}
    ids = batch["input_ids"]
    batch.setdefault(
        "position_ids", torch.arange(ids.shape[1], device=ids.device).repeat(len(ids), 1)
    )
    labelled = (labels != -100).sum()
    buffers = list(batch.values())
    with accelerator.maybe_context_parallel(
        buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=set(buffers)
    ):
        # Trainer multiplies by the number of processes: their gradients are averaged.
        out = model(**batch, use_cache=False, num_items_in_batch=labelled)
        loss = out.loss * world
        if case.train:
            accelerator.backward(loss)
    (logits,) = context_parallel_unshard(
        accelerator.torch_device_mesh["cp"], [out.logits.detach()], [1]
    )
    results = {"logits": logits, "loss": accelerator.reduce(loss.detach(), "mean")}
    if case.train:
        results |= {
            name: x.full_tensor() if isinstance(x, DTensor) else x
            for name, x in gradients(model).items()
        }
    return results
