"""Rank program: a batch under Automodel's own ContextParallelSharder, by examples/automodel.py,
against one process.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import torch
import torch.distributed as dist
from nemo_automodel.components.distributed.context_parallel.sharder import ContextParallelSharder
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import burst_rt

_EXAMPLES = Path(__file__).parents[3] / "examples"
_TOKENS = 21


def main() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    model = runpy.run_path(str(_EXAMPLES / "accelerated.py"))["Model"]
    torch.manual_seed(0)
    model, alone = (model().double() for _ in range(2))
    alone.load_state_dict(model.state_dict())
    ids = torch.randint(64, (2, _TOKENS), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, -4:] = 0
    labels = functional.pad(ids[:, 1:], (0, 1), value=-100).masked_fill(mask == 0, -100)
    right = alone(ids, torch.arange(_TOKENS)).transpose(1, 2)
    functional.cross_entropy(right, labels).backward()
    count = (labels != -100).sum()

    with burst_rt.init(group=mesh["cp"]) as ctx:
        runpy.run_path(str(_EXAMPLES / "automodel.py"))["give_to"](model, ctx)
        batch = {"input_ids": ids, "labels": labels, "attention_mask": mask}
        sharder = ContextParallelSharder(model, mesh, dict(batch), padding_token_id=3)
        context, part = sharder.shard(dict(batch))
        assert part["input_ids"].shape == (2, 12), "24 tokens with their padding"
        with context():
            scores = model(part["input_ids"], part["position_ids"]).transpose(1, 2)
            loss = functional.cross_entropy(scores, part["labels"], reduction="sum") / count
            loss.backward()
        whole = sharder.gather_token_tensor(scores.detach(), seq_dim=2, trim=True)
        real = mask[:, None].bool()
        torch.testing.assert_close(whole * real, right.detach() * real)
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            dist.all_reduce(mine.grad)
            torch.testing.assert_close(mine.grad, theirs.grad)
        for wrong in (batch | {"attention_mask": mask.flip(1)}, batch | {"qkv_format": "thd"}):
            try:
                sharder.shard(wrong)
            except ValueError as error:
                print(f"rank {ctx.rank} is fine: {error}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
