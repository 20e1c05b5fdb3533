"""The ranks' side of `burst-rt bench layer`; start it through that command.

One transformer layer, forward and backward, spread over the ranks in every way: a ring, all-to-all, tensor parallelism without and with a
split sequence (the BurstAttention paper's baselines). The strategies run in turn in one job, so that the machine's noise hits them alike; a
time is that of the slowest rank, from a common start. Gradients of weights that all ranks hold are summed over the ranks in every backward.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from burst_rt.errors import InputError
from burst_rt.launch.bench.attention import Bench, Rows
from burst_rt.launch.bench.report import Cell, median, publish
from burst_rt.layers import TENSOR_PARALLEL, LayerShape, SpreadLayer
from burst_rt.tensor_parallel import ParallelLayer, whole_weights

__all__ = ["STRATEGIES", "draw", "main"]

STRATEGIES = ("burst", "all-to-all", *TENSOR_PARALLEL)
_MIB = 2**20


class _Side:
    """One strategy on one sequence: the layer, its input, and what it took."""

    def __init__(self, bench: Bench, shape: LayerShape, tokens: int, strategy: str, weights: dict[str, torch.Tensor]) -> None:
        layout = bench.ctx.layout(tokens, "contiguous" if strategy in TENSOR_PARALLEL else "zigzag")
        self.ctx, self.strategy = bench.ctx, strategy
        self.layer = ParallelLayer(layout, shape, strategy, weights)
        rows = self.layer.spec.own_rows(self.ctx.rank)
        self.x = torch.randn(1, rows, shape.dim, dtype=weights["qkv"].dtype, device=self.ctx.device, requires_grad=True)
        self.dy = torch.randn_like(self.x)
        self.y: torch.Tensor | None = None
        self.times: dict[str, list[float]] = {"forward": [], "backward": []}

    def run(self, bench: Bench) -> None:
        """Both directions once, timed."""
        before = self.ctx.transport.bytes_sent
        self.times["forward"].append(bench.slowest_s(self._forward))
        self.times["backward"].append(bench.slowest_s(self._backward))
        self.sent = self.ctx.transport.bytes_sent - before

    def _forward(self) -> None:
        self.y = self.layer(self.x)
        self._wait()

    def _backward(self) -> None:
        assert self.y is not None
        torch.autograd.grad(self.y, (self.x, *self.layer.parameters()), self.dy)
        self.y = None
        self._wait()

    def _wait(self) -> None:
        if self.ctx.device.type == "cuda":
            torch.cuda.synchronize(self.ctx.device)


def measure(bench: Bench, shape: LayerShape, tokens: int, progress: Progress) -> Rows:
    """All strategies on one sequence; those that this world does not allow without figures. The ring is always allowed."""
    dtype = torch.bfloat16 if bench.ctx.device.type == "cuda" else torch.float32
    sides: list[_Side] = []
    refused: dict[str, str] = {}
    weights = whole_weights(shape, dtype=dtype)
    for strategy in STRATEGIES:
        try:
            # Whether it is allowed is known without a layer, and on every rank.
            SpreadLayer(shape, tokens, bench.ctx.world_size, strategy).program(forward=True)
        except InputError as error:
            refused[strategy] = error.message
        else:
            sides.append(_Side(bench, shape, tokens, strategy, weights))
    task = progress.add_task(f"{tokens:,} tokens", total=(bench.repeats + 1) * len(sides))
    for _ in range(bench.repeats + 1):
        for side in sides:
            side.run(bench)
            progress.advance(task)
    rows = [_row(side, tokens) for side in sides]
    none = dict.fromkeys(list(rows[0])[2:])
    for strategy, why in refused.items():
        if bench.ctx.rank == 0:
            progress.console.print(f"left out: {why}", soft_wrap=True, markup=False, highlight=False)
        rows.append({"tokens": tokens, "strategy": strategy, **none})
    return rows


def _row(side: _Side, tokens: int) -> dict[str, Cell]:
    # The first run made the plans.
    forward, backward = (times[1:] for times in side.times.values())
    layer_s = median([a + b for a, b in zip(forward, backward, strict=True)])
    memory = side.layer.spec.memory(side.ctx.rank)
    return {
        "tokens": tokens, "strategy": side.strategy, "forward s": median(forward), "backward s": median(backward), "layer s": layer_s,
        "tokens/s": tokens / layer_s, "sent MiB": side.sent / _MIB, "weights MiB": memory.weights / _MIB,
        "planned MiB": memory.total / _MIB,
    }  # fmt: skip


def draw(rows: Rows, path: Path, title: str) -> None:
    """Tokens a second over the length of the sequence, a line a strategy, as PNG or whatever `path` ends in."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for strategy in STRATEGIES:
        points = [(row["tokens"], row["tokens/s"]) for row in rows if row["strategy"] == strategy and row.get("tokens/s") is not None]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", label=strategy)
    axes.set_xscale("log", base=2)
    lengths = sorted({int(row["tokens"] or 0) for row in rows})
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of the whole sequence")
    axes.set_ylabel("tokens/s, forward + backward")
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(axis="y", color="#e6e6e6")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, and on rank 0 prints, writes and draws."""
    parser = argparse.ArgumentParser(prog="burst_rt.launch.bench.layer")
    parser.add_argument("--shape", type=json.loads, required=True)
    parser.add_argument("--tokens", type=int, action="append", required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--bar", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args(argv)
    shape = LayerShape(**options.shape)
    bench = Bench(options.repeats, max(options.tokens))
    rows: Rows = []
    shown = options.bar and bench.ctx.rank == 0
    with Progress(console=Console(stderr=True, force_terminal=shown), transient=True, disable=not shown) as progress:
        for tokens in options.tokens:
            rows += measure(bench, shape, tokens, progress)
    if bench.ctx.rank == 0:
        sizes = ", ".join(f"{name} {value:,}" for name, value in options.shape.items())
        title = f"one layer, forward + backward, causal: {sizes}; {bench.ctx.world_size} ranks"
        publish(title, rows, options.out, f"medians of {options.repeats}, interleaved; bytes and planned memory of rank 0")
        if options.plot:
            draw(rows, options.plot, f"One layer over {bench.ctx.world_size} ranks, dim {shape.dim:,}")
    bench.ctx.close()


if __name__ == "__main__":
    main()
