"""A command with `-n` that starts itself on that many ranks. For: `burst-rt train` and `burst-rt eval`."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence

import click
from click.core import ParameterSource

from burst_rt.launch.run import launch

__all__ = ["chosen_options", "relaunch"]


def chosen_options(context: click.Context) -> dict[str, object]:
    """The options that stand on the command line, by parameter name, without the defaults."""
    return {name: value for name, value in context.params.items() if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}


def relaunch(context: click.Context, module: str, num_ranks: int, extra: Sequence[str] = ()) -> int:
    """Run `module` on `num_ranks` ranks with this command's options but `-n`, and `extra`; return the job's exit code. Blocks."""
    if sys.stdout.isatty():
        # A rank's stdout is mpirun's, which has no width.
        os.environ.setdefault("COLUMNS", str(shutil.get_terminal_size().columns))
    chosen = chosen_options(context)
    arguments: list[str] = []
    for parameter in context.command.params:
        if parameter.name not in chosen or parameter.name == "num_ranks":
            continue
        value = chosen[parameter.name]
        arguments += [parameter.opts[0]] if value is True else [parameter.opts[0], str(value)]
    return launch(["-m", module, *arguments, *extra], num_ranks=num_ranks)
