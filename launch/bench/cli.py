"""`burst-rt bench`: attention on this machine's ranks against torch, and the GPU's block sizes.

Each benchmark prints tables and, with --out, writes JSON with a description of the machine. The
project's other benchmarks are in the source tree: `python -m benchmarks`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from burst_rt.launch.where import machine_options

__all__ = ["command"]

# What is measured from the source tree. Old scripts and notes still call it here.
_ELSEWHERE = (
    "all", "aot", "engine", "gpu", "hub", "layer", "masks", "paper", "predict", "scaling", "serve",
    "strategies", "telemetry", "transports",
)  # fmt: skip
_PARTS_ELSEWHERE = ("overhead", "memory", "outside")
_OUT = click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Add the results to this JSON file.",
)


def _where(words: str) -> str:
    command = f"python -m benchmarks {words}"
    return f"it is not in the installed package; in the source tree, run `{command}`"


class _Group(click.Group):
    """A group that says where the benchmarks of the source tree are."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _ELSEWHERE:
            ctx.fail(f"{cmd_name}: {_where(cmd_name)}")
        return super().get_command(ctx, cmd_name)


class _Part(click.Choice[str]):
    """A part of the attention benchmark."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        # click gives `value` the type Any.
        if value in _PARTS_ELSEWHERE:
            self.fail(f"{value}: {_where(f'attention --part {value}')}", param, ctx)
        return super().convert(value, param, ctx)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Benchmarks of this machine: interleaved comparisons, medians, ratios within one run.
    BENCHMARKS.md holds results.
    """


@command.command()
@click.option(
    "--head-dim",
    "head_dims",
    multiple=True,
    type=click.IntRange(16, 256),
    default=(64, 128),
    show_default=True,
    help="Width of a head; may be repeated.",
)
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "fp16", "fp32"]),
    default="bf16",
    show_default=True,
    help="Type of the inputs.",
)
@click.option(
    "--repeats",
    default=10,
    show_default=True,
    type=click.IntRange(1),
    help="Runs of each configuration; medians are compared.",
)
@click.option(
    "--limit-s",
    default=600.0,
    show_default=True,
    help="Start no measurement after so many seconds.",
)
@_OUT
def tune(
    head_dims: tuple[int, ...], dtype: str, repeats: int, limit_s: float, out: Path | None
) -> None:
    """Find the Triton kernels' fastest block sizes on this GPU; later jobs on this machine use
    them.
    """
    from burst_rt.launch.bench.tune import main

    main(head_dims, dtype, repeats, limit_s, out)


@command.command()
@click.option(
    "-n",
    "--num-ranks",
    default=2,
    show_default=True,
    type=click.IntRange(1),
    help="Ranks, one thread each. The other side is one process with as many threads.",
)
@click.option(
    "--part",
    "parts",
    multiple=True,
    type=_Part(["speed", "bf16", "masks", "exposed", "error"]),
    help="Only this part; may be repeated. [default: all]",
)
@machine_options
@click.option(
    "--repeats",
    default=5,
    show_default=True,
    type=click.IntRange(1),
    help="Runs of each side; medians are reported.",
)
@click.option(
    "--max-tokens",
    default=65536,
    show_default=True,
    type=click.IntRange(1),
    help="Leave out sequences of more tokens.",
)
@_OUT
def attention(num_ranks: int, **options: object) -> None:
    """Attention over MPI ranks against torch's fused attention in one process: speed, masks,
    exposed communication, accuracy.
    """
    from burst_rt.launch.bench.attention import measure_attention
    from burst_rt.launch.measure.ranks import run_on_ranks

    run_on_ranks(measure_attention, num_ranks, options, threads=1)
