"""A plain torch model, trained and evaluated with accelerate over data x context.

On GPUs, with FSDP2 and a context axis from accelerate's configuration file (docs/plain.md has it):

    accelerate launch --config_file fsdp2.yaml examples/accelerated.py

On CPUs accelerate has neither, so the model is under DDP, and the axes are this program's:

    accelerate launch --multi_gpu --num_processes 4 examples/accelerated.py
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.utils.data import DataLoader

import burst_rt

CONTEXT, TOKENS, VOCABULARY, DIM = 2, 75, 64, 64


class Model(nn.Module):
    """Knows nothing of ranks: it gets tokens, and their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, DIM), nn.Embedding(TOKENS, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(positions)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


class Block(nn.Module):
    """A causal layer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.out(y.transpose(1, 2).flatten(-2))
        return x + out


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    """Texts with a pattern to learn, and the labels of all but their last token."""
    starts = torch.randint(VOCABULARY, (count, 1), generator=torch.Generator().manual_seed(0))
    tokens = (starts + 3 * torch.arange(TOKENS)) % VOCABULARY
    labels = functional.pad(tokens[:, 1:], (0, 1), value=-100)
    return [{"tokens": t, "labels": y} for t, y in zip(tokens, labels, strict=True)]


def main() -> dict[str, Any]:
    """The losses of the steps, and the loss of each row of an evaluation, on every rank."""
    # Without `cpu=True` accelerate takes each process of a machine without GPUs for the only one.
    cpu = not torch.cuda.is_available()
    accelerator = Accelerator(cpu=cpu, gradient_accumulation_steps=2)
    mesh = accelerator.torch_device_mesh
    if mesh is None:
        shape = (accelerator.num_processes // CONTEXT, CONTEXT)
        names = ("dp_replicate", "cp")
        mesh = init_device_mesh(accelerator.device.type, shape, mesh_dim_names=names)
        accelerator.state.device_mesh = mesh  # by it `prepare` gives a context's ranks equal rows
    with burst_rt.init(group=mesh["cp"]) as ctx:
        torch.manual_seed(0)
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loaders: list[Any] = [DataLoader(rows(n), batch_size=2) for n in (16, 7)]  # type: ignore[arg-type]
        model, optimizer, training, evaluation = accelerator.prepare(model, optimizer, *loaders)
        layout = ctx.layout(TOKENS)

        def logits_and_labels(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            tokens, labels = (layout.shard(batch[name]) for name in ("tokens", "labels"))
            return model(tokens, layout.positions()), labels

        losses = []
        for _ in range(3):
            for batch in training:
                with accelerator.accumulate(model), burst_rt.over_ranks(ctx, layout):
                    # The mean over all labelled tokens of all processes.
                    loss = burst_rt.cross_entropy(*logits_and_labels(batch))
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss.item())

        of_rows: list[float] = []
        for batch in evaluation:
            with torch.no_grad(), burst_rt.over_ranks(ctx, layout):
                logits, labels = logits_and_labels(batch)
                mine = functional.cross_entropy(logits.mT, labels, reduction="none").sum(1)
            sums = burst_rt.sum_over_ranks(mine, group=ctx) / (TOKENS - 1)
            # Each row once: the other ranks of a context have the same ones.
            given = sums.tolist() if ctx.rank == 0 else []
            of_rows += accelerator.gather_for_metrics(given, use_gather_object=True)
        return {"losses": losses, "of_rows": of_rows, "mesh": str(mesh)}


if __name__ == "__main__":
    results = main()
    if torch.distributed.get_rank() == 0:
        print(json.dumps(results))
        if len(sys.argv) > 1:
            with open(sys.argv[1], "w", encoding="utf-8") as file:
                json.dump(results, file)
    torch.distributed.destroy_process_group()
