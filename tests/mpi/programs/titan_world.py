"""Rank program: a Llama of torchtitan over context-parallel ranks, by examples/titan.py, with
torchtitan's own FSDP2 and activation checkpointing, against one process.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from torchtitan import trainer
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models import llama3
from torchtitan.models.common.attention import get_sliding_window_mask_mod

_TOKENS, _LENGTHS = 52, ((20, 32), (41, 11))


def _model() -> Any:
    torch.manual_seed(0)
    model = llama3.model_registry("debugmodel").model.build()
    model.init_weights(buffer_device=torch.device("cpu"))
    return model


def _alone(tokens: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor) -> Any:
    """The loss and the model, whose attention is torch's, with a mask of documents."""
    model = _model()
    document = (positions == 0).cumsum(1)
    cells = (document[:, :, None] == document[:, None, :]).tril()[:, None]

    def attend(q: Any, k: Any, v: Any, **_: object) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=cells).transpose(1, 2)

    for layer in model.layers.values():
        layer.attention.inner_attention.forward = attend
    loss = functional.cross_entropy(model(tokens, positions).flatten(0, 1), labels.flatten())
    loss.backward()
    return loss, model


def main() -> None:
    parallel_dims.device_type = "cpu"  # torchtitan takes "cuda" where there is no GPU
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    text = torch.randint(2048, (2, _TOKENS + 1), generator=torch.Generator().manual_seed(1))
    batch = text[:, :-1], text[:, 1:]
    positions = torch.stack([torch.cat([*map(torch.arange, lengths)]) for lengths in _LENGTHS])
    expected, alone = _alone(*batch, positions)

    example = Path(__file__).parents[3] / "examples" / "titan.py"
    adapter = runpy.run_path(str(example))["install"](sys.argv[1])
    parallelism = ParallelismConfig(
        context_parallel_degree=world, data_parallel_shard_degree=1, spmd_backend="partial_dtensor"
    )
    dims = ParallelDims.from_config(parallelism, world)
    dims.build_mesh()
    model = llama3.parallelize_llama(
        _model(), parallel_dims=dims, training=TrainingConfig(mixed_precision_param="float32"),
        parallelism=parallelism, compile_config=CompileConfig(enable=False),
        ac_config=FullAC.Config(), dump_folder="",
    )  # fmt: skip
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # gloo has no sum that multiplies first, by torchtitan's factor of 1.
            module.set_force_sum_reduction_for_comms(True)
    prepare: Any = trainer.prepare_context_parallel_input
    others = dims.get_mesh("cp"), torch.device("cpu"), "headtail", None
    masks = alone.get_attention_masks(positions)
    given = {"positions": positions, "attention_masks": masks}
    tokens, labels, rest = prepare(*batch, dict(given), *others)
    scores = model(tokens, **rest)
    loss = functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum")
    loss = loss / batch[1].numel()
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total, expected.detach(), rtol=1e-5, atol=0.0)
    for mine, right in zip(model.parameters(), alone.parameters(), strict=True):
        error = (mine.grad.full_tensor() - right.grad).norm() / right.grad.norm()
        assert error < 1e-5, error
    assert adapter.ctx.stats().calls == 3 * 6, "six layers, computed again in the backward"

    masks.mask_mod = get_sliding_window_mask_mod(4)
    try:
        prepare(*batch, dict(given), *others)
    except ValueError as error:
        print(f"rank {dist.get_rank()} is fine: {error}")
    adapter.ctx.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
