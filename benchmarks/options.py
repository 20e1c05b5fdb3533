"""Options of several benchmarks; `launch.measure.options` has those that the package shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

__all__ = ["TOKENS", "WORLDS", "heads_option", "parts_option", "size_option"]

_F = TypeVar("_F", bound=Callable[..., Any])

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


def heads_option(default: int) -> Callable[[_F], _F]:
    """`--heads`."""
    return size_option("--heads", default, "Query heads")


def size_option(name: str, default: int, what: str) -> Callable[[_F], _F]:
    """A number of at least 1. what: its line of help, without the full stop."""
    return click.option(
        name, default=default, show_default=True, type=click.IntRange(1), help=f"{what}."
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
