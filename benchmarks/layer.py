"""One layer by rings, all-to-all, tensor parallelism: `python -m benchmarks layer`.

One transformer layer, forward and backward, is spread over the ranks in every way: a ring,
all-to-all, tensor parallelism without and with a split sequence (the BurstAttention paper's
baselines). The strategies run in turn in one job, so that the machine's noise hits them alike. A
time is the slowest rank's, from a common start. Gradients of weights that all ranks hold are summed
over the ranks in every backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
import torch

import burst_rt
from benchmarks.options import size_option
from benchmarks.plots import draw_lines
from benchmarks.tensor_parallel import ParallelLayer, whole_weights
from burst_rt.errors import InputError
from burst_rt.launch.measure.options import OUT, RANKS, REPEATS
from burst_rt.launch.measure.ranks import run_on_ranks
from burst_rt.launch.measure.report import Cell, median, publish
from burst_rt.launch.measure.timing import progress_bar, slowest_s
from burst_rt.launch.plan.layers import TENSOR_PARALLEL, LayerShape, SpreadLayer
from burst_rt.launch.where import machine_options

__all__ = ["STRATEGIES", "allowed", "command"]

_F = TypeVar("_F", bound=Callable[..., Any])

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


def run_rank(shape: dict[str, int], tokens: list[int], repeats: int, out: str | None) -> None:
    """Measures on all ranks; rank 0 prints, writes and draws. Blocks for the other ranks."""
    layer = LayerShape(**shape)
    with burst_rt.init(timeout_s=1200, stall_s=300) as ctx:
        strategies, left_out = allowed(layer, ctx.world_size)
        with progress_bar(ctx.rank == 0, len(tokens) * len(strategies) * (repeats + 1)) as step:
            rows = [
                row
                for length in tokens
                for row in measure(ctx, layer, length, strategies, repeats, step)
            ]
        if ctx.rank:
            return
        sizes = ", ".join(f"{name} {value:,}" for name, value in shape.items())
        title = f"one layer, forward + backward, causal: {sizes}; {ctx.world_size} ranks"
        notes = [
            f"medians of {repeats}, interleaved; bytes and planned memory of rank 0",
            *(f"left out: {why}" for why in left_out),
        ]
        publish(title, rows, out, ". ".join(notes))
        if out:
            draw_lines(
                Path(out).with_suffix(f".layer-{ctx.world_size}.png"),
                [{"tokens": n, **_speeds(rows, n)} for n in tokens],
                "tokens",
                strategies,
                ylabel="tokens/s, forward + backward",
                title=f"one layer, {ctx.world_size} ranks",
            )


@click.command()
@RANKS
@click.option(
    "--tokens",
    multiple=True,
    type=click.IntRange(min=1),
    default=(1024, 2048, 4096),
    show_default=True,
    help="Tokens of the whole sequence; may be repeated.",
)
@size_option("--dim", 512, "Width of the residual stream")
@size_option("--heads", 8, "Query heads")
@size_option("--kv-heads", 8, "Key and value heads")
@size_option("--head-dim", 64, "Width of a head")
@size_option("--ffn-dim", 1408, "Width of the feed-forward")
@machine_options
@REPEATS
@OUT
def command(
    num_ranks: int, tokens: tuple[int, ...], repeats: int, out: Path | None, **sizes: int
) -> None:
    """One transformer layer over MPI ranks: a ring, all-to-all, and tensor parallelism without and
    with a split sequence.
    """
    names = {"heads": "num_heads", "kv_heads": "num_kv_heads"}
    shape = {names.get(name, name): size for name, size in sizes.items()}
    LayerShape(**shape)  # raises here, not on every rank
    options = {"shape": shape, "tokens": tokens, "repeats": repeats, "out": out}
    run_on_ranks(run_rank, num_ranks, options, threads=1)
