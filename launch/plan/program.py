"""The program that a plan is about: how it is started, its mesh, and what each axis shards.

The meshes are those of docs/beside.md, whose every line a test runs.
"""

from __future__ import annotations

from collections.abc import Iterator

from burst_rt.launch.plan.model import ModelForecast
from burst_rt.launch.plan.models import sizes_of
from burst_rt.launch.plan.question import Question
from burst_rt.launch.plan.shards import Shard
from burst_rt.planning.layouts import FOLLOWING
from burst_rt.scheduler.simulator import Hardware

__all__ = ["how_to_run"]

# Larger nodes are several hosts that one NVLink joins.
_MOST_OF_A_HOST = 16
_AXES = {"pipeline": "pp", "data": "dp", "context": "cp", "tensor": "tp"}
_SHARDS: dict[Shard, str] = {
    "none": "model = DistributedDataParallel(model, process_group=everyone.get_group())",
    "zero1": "# gradients averaged over everyone; the optimizer in ZeroRedundancyOptimizer",
    "zero2": "# gradients averaged over everyone, each rank keeping its part of them and of states",
    "fsdp": "for part in (*layers, model): fully_shard(part, mesh=everyone)",
}
_RECOMPUTED = {
    "attention kept": "burst_rt.checkpoint(layer, hidden)",
    "computed again": "torch.utils.checkpoint.checkpoint(layer, hidden, use_reentrant=False)",
}
_OPTIMIZERS = {
    "adamw": "torch.optim.AdamW(model.parameters())  # of float32 weights; compute in bfloat16",
    "adamw-bf16": "torch.optim.AdamW(model.parameters())  # of bfloat16 weights",
    "adamw-8bit": "bitsandbytes.optim.AdamW8bit(model.parameters())",
    "sgd": "torch.optim.SGD(model.parameters())",
}


def how_to_run(
    question: Question, best: ModelForecast, world_size: int, hardware: Hardware
) -> tuple[str, ...]:
    """Lines of a program that does what is forecast, after how it is started."""
    per_node = min(world_size, hardware.node.ranks)
    nodes, others = divmod(world_size, per_node)
    meeting = " --rdzv-backend c10d --rdzv-endpoint FIRST_HOST:29500" * (nodes > 1)
    start = f"torchrun --nnodes {nodes} --nproc-per-node {per_node}{meeting} train.py"
    if per_node > _MOST_OF_A_HOST or others:  # torchrun starts as many on each host
        start = f"torchrun train.py on every host, {world_size} processes in all"
    elif nodes > 1:
        start += " on every host"
    lines = _lines(question, best, world_size)
    return (f"To run it: {start}, where train.py has", *(f"    {line}" for line in lines))


def _lines(question: Question, best: ModelForecast, world_size: int) -> Iterator[str]:
    mesh = question.mesh(world_size)
    axes = {
        short: size
        for (name, short), size in zip(_AXES.items(), mesh, strict=True)
        if size > 1 or name in ("data", "context")
    }
    names = ", ".join(f'"{name}"' for name in axes)
    sizes = ", ".join(map(str, axes.values()))
    yield (
        f'mesh = torch.distributed.init_device_mesh("cuda", ({sizes}), mesh_dim_names=({names}))'
    )
    training = best.activations is not None
    if mesh.pipeline > 1:
        layers = -(-question.model.num_layers // mesh.pipeline)
        yield f'index = mesh.get_local_rank("pp")  # of a stage of {layers} layers'
    if mesh.tensor > 1:
        yield 'for layer in layers: parallelize_module(layer, mesh["tp"], plan)'
    if training:
        yield 'everyone = mesh["dp", "cp"]._flatten("dp_cp")'
        yield _SHARDS[question.shard]
        yield f"optimizer = {_OPTIMIZERS[question.optimizer]}"
    mask = ", mask=mask" if best.layout in FOLLOWING else ""
    windows = any(
        layer.attention is not None and layer.attention.window is not None
        for layer in map(sizes_of, (layer for _, layer in question.model.layers))
    )
    causal = question.mask == "causal" and not windows
    shown = "causal=True)" if causal else "mask=mask)" + "  # each layer's own" * windows
    yield 'ctx = burst_rt.init(group=mesh["cp"])'
    yield f'layout = ctx.layout({question.seq_len}, "{best.layout}"{mask})'
    yield (f'burst_rt.burst_attention(q, k, v, layout=layout, strategy="{best.strategy}", {shown}')
    if best.activations in _RECOMPUTED:
        yield f"hidden = {_RECOMPUTED[best.activations]}  # in place of layer(hidden)"
    if mesh.pipeline > 1:
        yield (
            f"stage = PipelineStage(model, index, {mesh.pipeline}, ctx.device, "
            'group=mesh.get_group("pp"))'
        )
        yield (
            f"schedule = Schedule1F1B(stage, n_microbatches={question.micro_batches}, "
            "loss_fn=mean_loss)"
        )
