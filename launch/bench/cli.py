"""`burst-rt bench`: attention on this machine's ranks against torch, and the GPU's block sizes.

Each benchmark prints tables and, with --out, writes JSON with a description of the machine. The
project's other benchmarks are in the source tree: `python -m benchmarks`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from burst_rt.launch.measure.options import DTYPE, HEAD_DIMS, MAX_TOKENS, OUT, RANKS, REPEATS
from burst_rt.launch.where import machine_options

__all__ = ["command"]

# What is measured from the source tree. Old scripts and notes still call it here.
_ELSEWHERE = (
    "all", "aot", "engine", "gpu", "hub", "layer", "masks", "paper", "predict", "scaling", "serve",
    "strategies", "telemetry", "transports",
)  # fmt: skip
_PARTS_ELSEWHERE = ("overhead", "memory", "outside")


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
    """Measure attention on this machine.

    The sides of a comparison take turns; medians and their ratios are reported. BENCHMARKS.md has
    results.
    """


@command.command()
@HEAD_DIMS
@DTYPE
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
@OUT
def tune(
    head_dims: tuple[int, ...], dtype: str, repeats: int, limit_s: float, out: Path | None
) -> None:
    """Find the fastest Triton block sizes on this GPU.

    Later jobs on this machine use them.
    """
    from burst_rt.launch.bench.tune import main

    main(head_dims, dtype, repeats, limit_s, out)


@command.command()
@RANKS
@click.option(
    "--part",
    "parts",
    multiple=True,
    type=_Part(["speed", "bf16", "masks", "exposed", "error"]),
    help="Only this part; may be repeated. [default: all]",
)
@machine_options
@REPEATS
@MAX_TOKENS
@OUT
def attention(num_ranks: int, **options: object) -> None:
    """Compare MPI ranks with torch's attention in one process.

    That process has as many threads as there are ranks. Parts: speed, masks, exposed communication,
    accuracy.
    """
    from burst_rt.launch.bench.attention import measure_attention
    from burst_rt.launch.measure.ranks import run_on_ranks

    run_on_ranks(measure_attention, num_ranks, options, threads=1)
