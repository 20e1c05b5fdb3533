"""The ranks' side of `burst-rt bench layer`: a layer by rings, all-to-all, tensor parallelism.

Start it through that command.

One transformer layer, forward and backward, is spread over the ranks in every way: a ring,
all-to-all, tensor parallelism without and with a split sequence (the BurstAttention paper's
baselines). The strategies run in turn in one job, so that the machine's noise hits them alike. A
time is the slowest rank's, from a common start. Gradients of weights that all ranks hold are summed
over the ranks in every backward.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

import burst_rt
from burst_rt.baselines.layers import TENSOR_PARALLEL, LayerShape, SpreadLayer
from burst_rt.baselines.tensor_parallel import ParallelLayer, whole_weights
from burst_rt.errors import InputError
from burst_rt.launch.bench.plots import draw_lines
from burst_rt.launch.bench.report import Cell, median, publish
from burst_rt.launch.bench.timing import progress, slowest_s

__all__ = ["STRATEGIES", "allowed", "main"]

STRATEGIES = ("burst", "all-to-all", *TENSOR_PARALLEL)
_MIB = 2**20


class _Side:
    """One strategy on one sequence: the layer, its input, its times and its bytes sent."""

    def __init__(
        self,
        ctx: burst_rt.Context,
        shape: LayerShape,
        tokens: int,
        strategy: str,
        weights: dict[str, torch.Tensor],
    ) -> None:
        layout = ctx.layout(tokens, "contiguous" if strategy in TENSOR_PARALLEL else "zigzag")
        self.ctx, self.strategy = ctx, strategy
        self.layer = ParallelLayer(layout, shape, strategy, weights)
        rows = self.layer.spec.own_rows(ctx.rank)
        self.x = torch.randn(
            1, rows, shape.dim, dtype=weights["qkv"].dtype, device=ctx.device, requires_grad=True
        )
        self.dy = torch.randn_like(self.x)
        self.times: list[tuple[float, float]] = []

    def run(self) -> None:
        """Runs and times both directions once. Blocks for the other ranks."""
        before = self.ctx.runtime.transport.bytes_sent
        made: list[torch.Tensor] = []
        forward_s = slowest_s(self.ctx, lambda: made.append(self.layer(self.x)))
        backward_s = slowest_s(
            self.ctx,
            lambda: torch.autograd.grad(made[0], (self.x, *self.layer.parameters()), self.dy),
        )
        self.times.append((forward_s, backward_s))
        self.sent = self.ctx.runtime.transport.bytes_sent - before

    def row(self, tokens: int) -> dict[str, Cell]:
        """The medians of all runs but the first, which made the plans."""
        forward_s = median([forward for forward, _ in self.times[1:]])
        backward_s = median([backward for _, backward in self.times[1:]])
        layer_s = median([forward + backward for forward, backward in self.times[1:]])
        memory = self.layer.spec.memory(self.ctx.rank)
        return {
            "tokens": tokens, "strategy": self.strategy, "forward s": forward_s,
            "backward s": backward_s, "layer s": layer_s, "tokens/s": tokens / layer_s,
            "sent MiB": self.sent / _MIB, "weights MiB": memory.weights / _MIB,
            "planned MiB": memory.total / _MIB,
        }  # fmt: skip


def measure(
    ctx: burst_rt.Context,
    shape: LayerShape,
    tokens: int,
    strategies: Sequence[str],
    repeats: int,
    step: Callable[[str], None],
) -> list[dict[str, Cell]]:
    """Measures each strategy on one sequence, a row each. Blocks for the other ranks."""
    weights = whole_weights(
        shape, dtype=torch.bfloat16 if ctx.device.type == "cuda" else torch.float32
    )
    sides = [_Side(ctx, shape, tokens, strategy, weights) for strategy in strategies]
    for _ in range(repeats + 1):
        for side in sides:
            step(f"{tokens:,} tokens, {side.strategy}")
            side.run()
    return [side.row(tokens) for side in sides]


def allowed(shape: LayerShape, world_size: int) -> tuple[list[str], list[str]]:
    """The strategies by which this number of ranks can share the layer, and why the others cannot.

    Both lists are the same on every rank.
    """
    can, cannot = [], []
    for strategy in STRATEGIES:
        try:
            SpreadLayer(shape, world_size, world_size, strategy).program(forward=True)
        except InputError as error:
            cannot.append(error.message)
        else:
            can.append(strategy)
    return can, cannot


def _speeds(rows: Sequence[Mapping[str, Cell]], tokens: int) -> dict[str, Cell]:
    """Tokens a second of each strategy, at one length."""
    return {str(row["strategy"]): row["tokens/s"] for row in rows if row["tokens"] == tokens}


def main(argv: Sequence[str] | None = None) -> None:
    """Measures on all ranks; rank 0 prints, writes and draws. Blocks for the other ranks."""
    parser = argparse.ArgumentParser(prog="burst_rt.launch.bench.layer")
    parser.add_argument("--shape", type=json.loads, required=True)
    parser.add_argument("--tokens", type=int, nargs="+", required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    shape = LayerShape(**options.shape)
    with burst_rt.init(timeout_s=1200, stall_s=300) as ctx:
        strategies, left_out = allowed(shape, ctx.world_size)
        with progress(
            ctx.rank == 0, len(options.tokens) * len(strategies) * (options.repeats + 1)
        ) as step:
            rows = [
                row
                for tokens in options.tokens
                for row in measure(ctx, shape, tokens, strategies, options.repeats, step)
            ]
        if ctx.rank:
            return
        sizes = ", ".join(f"{name} {value:,}" for name, value in options.shape.items())
        title = f"one layer, forward + backward, causal: {sizes}; {ctx.world_size} ranks"
        notes = [
            f"medians of {options.repeats}, interleaved; bytes and planned memory of rank 0",
            *(f"left out: {why}" for why in left_out),
        ]
        publish(title, rows, options.out, ". ".join(notes))
        if options.out:
            speeds = [{"tokens": n, **_speeds(rows, n)} for n in options.tokens]
            png = options.out.with_suffix(f".layer-{ctx.world_size}.png")
            draw_lines(
                png,
                speeds,
                "tokens",
                strategies,
                ylabel="tokens/s, forward + backward",
                title=f"one layer, {ctx.world_size} ranks",
            )


if __name__ == "__main__":
    main()
