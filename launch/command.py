"""Commands that run on ranks: with `-n` they start themselves on that many, or are one rank.

With `-n` a command first checks what can be seen without ranks, which take seconds to start, and
then launches itself. Without `-n` it is one rank of whatever started it (mpirun, srun, nothing).
Needs no torch: help and the launching process do without.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click
from click.core import ParameterSource

from burst_rt.errors import ConfigError
from burst_rt.launch.mpirun import one_host
from burst_rt.launch.restarts import ONCE, Restarts
from burst_rt.launch.run import launch
from burst_rt.launch.where import VARIABLES

__all__ = [
    "SHOWN", "before_ranks", "checkpoint_option", "chosen_options", "num_ranks_option", "relaunch",
]  # fmt: skip

# Options that only the launching process obeys.
_OF_LAUNCHER = ("num_ranks", "restarts", "restart_window")
_SHOW_CURSOR = "\x1b[?25h"
# Settings of the help of commands that start ranks.
SHOWN = {"show_default": True, "max_content_width": 120}
checkpoint_option = click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    help="Folder of a run (its newest checkpoint) or of one checkpoint.",
)
num_ranks_option = click.option(
    "-n",
    "num_ranks",
    type=click.IntRange(min=1),
    metavar="N",
    help="Start N ranks on this machine. Without -n this process is one rank.",
)


def chosen_options(context: click.Context) -> dict[str, object]:
    """The options that the command line gives, by parameter name, without the defaults."""
    return {
        name: value
        for name, value in context.params.items()
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }


@contextmanager
def before_ranks() -> Iterator[None]:
    """Surrounds the launching process's checks. --device is checked first, and what the file
    system refuses is a ConfigError, as on ranks.
    """
    try:
        _check_device(os.environ.get(VARIABLES["device"], "auto"))
        yield
    except OSError as error:
        raise ConfigError(
            f"{error}; make the file or folder accessible, then run again."
        ) from error


def relaunch(
    context: click.Context,
    rank: Sequence[str],
    num_ranks: int,
    extra: Sequence[str] = (),
    *,
    as_it_comes: bool = False,
    restarts: Restarts = ONCE,
) -> int:
    """Run this command on `num_ranks` ranks with its options but `-n`, and `extra`; return the
    job's exit code. Blocks.

    rank: the module that is one rank of this command, and words that go first.
    as_it_comes, restarts: see `launch`.
    """
    if sys.stdout.isatty():
        # A rank's stdout is a pipe of mpirun's, which has no width.
        os.environ.setdefault("COLUMNS", str(shutil.get_terminal_size().columns))
    chosen = chosen_options(context)
    arguments = []
    for parameter in context.command.params:
        if parameter.name not in chosen or parameter.name in _OF_LAUNCHER:
            continue
        value = chosen[parameter.name]
        if isinstance(value, bool):
            arguments += (parameter.opts if value else parameter.secondary_opts)[:1]
        else:
            arguments += [parameter.opts[0], str(value)]
    argv = ["-m", *rank, *arguments, *extra]
    code = launch(argv, num_ranks=num_ranks, as_it_comes=as_it_comes, restarts=restarts)
    if sys.stdout.isatty():
        # A rank that was killed has hidden the cursor for its progress bar.
        sys.stdout.write(_SHOW_CURSOR)
    return code


def _check_device(name: str) -> None:
    kind, _, index = name.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (
        index and not (kind == "cuda" and index.isdecimal())
    ):
        raise ConfigError(f"--device: expected auto, cpu, cuda or cuda:N, got {name}.")
    # Other hosts of an allocation may have GPUs that this host lacks.
    if kind == "cuda" and one_host(()):
        count = _num_gpus()
        if int(index or 0) >= count:
            found = "a GPU" if count == 1 else f"{count or 'no'} GPUs"
            raise ConfigError(
                f"--device: {name} was asked for, and the CUDA driver finds {found} here; use "
                "--device cpu, or see burst-rt doctor."
            )


def _num_gpus() -> int:
    """GPUs of this host that may be used. The driver is asked: torch takes seconds to load."""
    count = ctypes.c_int(0)
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    return (
        count.value
        if cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
        else 0
    )
