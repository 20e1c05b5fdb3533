"""Options that several benchmarks share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

__all__ = [
    "HEAD_DIMS",
    "MAX_TOKENS",
    "OUT",
    "RANKS",
    "REPEATS",
    "TOKENS",
    "WORLDS",
    "heads_option",
    "parts_option",
]

_F = TypeVar("_F", bound=Callable[..., Any])

OUT = click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
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
WORLDS = click.option(
    "-n",
    "--num-ranks",
    "worlds",
    multiple=True,
    type=click.IntRange(1),
    help="Number of ranks; may be repeated.",
)
TOKENS = click.option(
    "--tokens",
    multiple=True,
    type=click.IntRange(64),
    help="Tokens of the whole sequence; may be repeated.",
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


def heads_option(default: int) -> Callable[[_F], _F]:
    """`--heads`."""
    return click.option(
        "--heads", default=default, show_default=True, type=click.IntRange(1), help="Query heads."
    )


def parts_option(*parts: str) -> Callable[[_F], _F]:
    """`--part`, which may be repeated; without it all parts run."""
    return click.option(
        "--part",
        "parts",
        multiple=True,
        type=click.Choice(parts),
        help="Only this part; may be repeated. [default: all]",
    )
