"""Options of commands that measure: those of `burst-rt bench` and of the project's benchmarks."""

from __future__ import annotations

import json
from pathlib import Path

import click

__all__ = ["DTYPE", "HEAD_DIMS", "MAX_TOKENS", "OUT", "RANKS", "REPEATS"]


def _check_out(_: click.Context, __: click.Parameter, out: Path | None) -> Path | None:
    """Says now, and not after minutes of measuring, that a file has something else in it."""
    try:
        if out is not None and out.exists() and not isinstance(json.loads(out.read_text()), dict):
            raise ValueError("no object")
    except (OSError, ValueError) as error:
        raise click.BadParameter(
            f"{out}: expected a file of results in JSON, got another ({error}); choose another name"
        ) from error
    return out


OUT = click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=_check_out,
    help="Add the results to this JSON file.",
)
RANKS = click.option(
    "-n",
    "--num-ranks",
    default=2,
    show_default=True,
    type=click.IntRange(1),
    help="Ranks, one thread each.",
)
REPEATS = click.option(
    "--repeats",
    default=5,
    show_default=True,
    type=click.IntRange(1),
    help="Runs of each side; medians are reported.",
)
MAX_TOKENS = click.option(
    "--max-tokens",
    default=65536,
    show_default=True,
    type=click.IntRange(1),
    help="Leave out sequences of more tokens.",
)
HEAD_DIMS = click.option(
    "--head-dim",
    "head_dims",
    multiple=True,
    type=click.IntRange(16, 256),
    default=(64, 128),
    show_default=True,
    help="Width of a head; may be repeated.",
)
DTYPE = click.option(
    "--dtype",
    type=click.Choice(["bf16", "fp16", "fp32"]),
    default="bf16",
    show_default=True,
    help="Type of the inputs.",
)
