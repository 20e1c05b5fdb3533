"""`python -m benchmarks NAME ...`: the project's benchmarks, each in a module of its name."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import click

from burst_rt.errors import BurstError
from burst_rt.launch.measure.options import OUT

__all__ = ["cli"]

# Each command and its line of help. A command's module is imported when it is called: torch takes
# seconds to load.
_COMMANDS = {
    "anchors": "Published figures of other systems next to forecasts. Measures nothing.",
    "aot": "Registers, spills and instructions of the Triton kernels, on chips that are not here.",
    "attention": "Overhead and memory of calls; ring-attention-pytorch beside them.",
    "auto": 'What strategy="auto" costs beside the best strategy, and how far forecasts are off.',
    "documents": "Packed documents under layouts that cut them, and one that keeps them whole.",
    "engine": "Cost of the scheduler: building, verifying and running graphs.",
    "gpu": "On one NVIDIA GPU: tile kernels, calls under masks, four ranks against one kernel.",
    "gpu-check": "All that needs an NVIDIA GPU, tests and speed, within eight minutes.",
    "head": "A vocabulary's loss without its logits: time and memory; others' beside it.",
    "host": "The host's time in calls on a GPU, without one: Python's time, and counts.",
    "hub": "Memory of the hub's model when it watches 64 ranks for an hour.",
    "layer": "One transformer layer: a ring, all-to-all, tensor parallelism.",
    "masks": "Masks: measured, planned, and simulated on H100s.",
    "page": "Write BENCHMARKS.md and its plots from benchmarks/results.",
    "paper": "The BurstAttention paper's figures next to forecasts. Measures nothing.",
    "predict": "Forecasts against measurements, for every strategy.",
    "recurrence": "Delta rules over ranks: against threads, and against heads over ranks.",
    "prefill": "First tokens of large models next to published figures. Measures nothing.",
    "scaling": "One sequence over more ranks, and sequences that grow with the ranks.",
    "serve": "First tokens, chunks, and tokens by what is cached, over ranks.",
    "server": "burst-rt serve beside transformers' generate in one process.",
    "strategies": "All strategies against each other, and the planner's choice.",
    "telemetry": "Time of a step with and without telemetry.",
    "trees": "Answers that share a question, as a tree, packed, and one by one.",
    "transports": "MPI, a group of torch.distributed and threads, side by side.",
}
# What `all` runs: no GPU, no machine file but the one that `burst-rt calibrate` wrote.
_ALL = (
    "engine", "attention", "layer", "strategies", "predict", "scaling", "serve", "prefill", "paper",
    "anchors", "aot",
)  # fmt: skip
# Commands whose module has another name than they.
_PLACES = {"gpu-check": "gpu_check:command", "predict": "strategies:predict"}


class _Lazy(click.Group):
    """A group that imports a benchmark when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*_COMMANDS, *super().list_commands(ctx)])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return super().get_command(ctx, cmd_name)
        module, name = _PLACES.get(cmd_name, f"{cmd_name}:command").split(":")
        command = getattr(importlib.import_module(f"benchmarks.{module}"), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([("all", "All that need no GPU."), *_COMMANDS.items()])


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Benchmarks of the project: interleaved comparisons, medians, ratios within one run.

    `burst-rt bench` has the two that users need. BENCHMARKS.md holds results.
    """


@cli.command("all")
@click.pass_context
@OUT
def every(ctx: click.Context, out: Path | None) -> None:
    """Run all benchmarks that need no GPU, with their defaults (an hour or two)."""
    from burst_rt.launch.bench.cli import attention

    ctx.invoke(attention, out=out)
    for name in _ALL:
        command = cli.get_command(ctx, name)
        assert command is not None
        ctx.invoke(command, out=out)
    # The third part is one of `burst-rt bench attention`.
    masks = cli.get_command(ctx, "masks")
    assert masks is not None
    ctx.invoke(masks, parts=("tables", "simulated"), out=out)


if __name__ == "__main__":
    try:
        cli(prog_name="python -m benchmarks")
    except BurstError as error:
        print(f"benchmarks: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
