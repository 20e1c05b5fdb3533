"""Trains a small hybrid model on packed text, over ranks and on one of them, and compares.

Two kinds of layers alternate: a gated delta rule behind a short convolution, and softmax attention.
Both take the same layout and the same documents; nothing is converted between them.

    burst-rt run -n 4 examples/hybrid.py
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from burst_rt import (
    Causal,
    Context,
    ShardedBatch,
    average_gradients,
    burst_attention,
    cross_entropy,
    init,
    recurrence,
    run_local,
    shard_batch,
)

DIM, HEADS = 32, 2


class Delta(nn.Module):
    """A gated delta rule; q, k and v go through a convolution over 4 tokens first."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.gates = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, 2 * HEADS)
        self.taps, self.out = nn.Parameter(torch.randn(3 * DIM, 4) / 2), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, part: ShardedBatch) -> Tensor:
        assert part.position_ids is not None
        where: Any = {"layout": part.layout, "documents": part.position_ids == 0}
        qkv = recurrence.causal_conv1d(self.qkv(x), self.taps, None, "silu", **where)
        q, k, v = qkv.unflatten(-1, (3, HEADS, -1)).unbind(2)
        decays, strengths = self.gates(x).chunk(2, -1)
        mixed: Tensor = recurrence.gated_delta_rule(
            q, k, v, logsigmoid(decays), strengths.sigmoid(), use_qk_l2norm=True, **where
        )
        y: Tensor = x + self.out(mixed.flatten(2))
        return y


class Softmax(nn.Module):
    """Causal softmax attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, part: ShardedBatch) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        out: Tensor = burst_attention(q, k, v, layout=part.layout, mask=Causal() & part.mask)
        y: Tensor = x + self.out(out.flatten(2))
        return y


def train(ctx: Context, batch: dict[str, Tensor], steps: int) -> list[float]:
    """The losses of a model that is trained on the batch over the ranks of ctx."""
    torch.manual_seed(0)  # the same weights on every rank
    token, scores = nn.Embedding(256, DIM), nn.Linear(DIM, 256)
    layers = nn.ModuleList([Delta(), Softmax(), Delta()])
    model = nn.ModuleList([token, layers, scores]).to(ctx.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(steps):
        part = shard_batch(batch, ctx)
        assert part.shift_labels is not None
        x = token(part.input_ids)
        for layer in layers:
            x = layer(x, part)
        loss = cross_entropy(scores(x), part.shift_labels, group=ctx)
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model.parameters(), group=ctx)
        optimizer.step()
        losses.append(loss.item())
    return losses


def packed(text: bytes, lengths: list[int]) -> dict[str, Tensor]:
    """One row with several documents."""
    tokens = torch.tensor(list(text[: sum(lengths)]))
    position_ids = torch.cat([torch.arange(length) for length in lengths])
    labels = tokens.masked_fill(position_ids == 0, -100)
    return {
        "input_ids": tokens[None], "labels": labels[None], "position_ids": position_ids[None]
    }  # fmt: skip


def main() -> None:
    """The whole comparison, on every rank."""
    batch = packed(Path(__file__).read_bytes(), [700, 41, 1200, 1])
    with init() as ctx:
        losses = train(ctx, batch, steps=10)
        for step, loss in enumerate(losses):
            if ctx.rank == 0:
                print(f"step {step}: loss {loss:.6f}")
        alone = ctx.first(lambda: run_local(1, lambda one: train(one, batch, steps=10))[0])
        worst = max(abs(a - b) for a, b in zip(losses, alone, strict=True))
        if ctx.rank == 0:
            print(f"one process differs by {worst:.1e} at most")
    assert worst < 1e-4


if __name__ == "__main__":
    main()
