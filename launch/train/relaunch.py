"""A command with `-n` that starts itself on that many ranks, unless it can be seen without them
that it cannot run.

For: `burst-rt train` and `burst-rt eval`. Ranks take seconds to start and check everything again,
together.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click
from click.core import ParameterSource

from burst_rt.errors import ConfigError
from burst_rt.launch.run import launch, one_host
from burst_rt.launch.where import VARIABLES

_SHOW_CURSOR = "\x1b[?25h"

__all__ = ["before_ranks", "chosen_options", "relaunch"]


def chosen_options(context: click.Context) -> dict[str, object]:
    """The options that stand on the command line, by parameter name, without the defaults."""
    return {
        name: value
        for name, value in context.params.items()
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }


@contextmanager
def before_ranks() -> Iterator[None]:
    """For checks in the launching process: --device is checked first; what the file system refuses
    is a ConfigError, as on ranks.
    """
    try:
        _check_device(os.environ.get(VARIABLES["device"], "auto"))
        yield
    except OSError as error:
        raise ConfigError(
            f"{error}; make the file or folder accessible, then run again."
        ) from error


def relaunch(context: click.Context, module: str, num_ranks: int, extra: Sequence[str] = ()) -> int:
    """Run `module` on `num_ranks` ranks with this command's options but `-n`, and `extra`; return
    the job's exit code. Blocks.
    """
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
    code = launch(["-m", module, *arguments, *extra], num_ranks=num_ranks)
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
    # On hosts of an allocation there may be what is not here.
    if kind == "cuda" and one_host(()):
        count = _num_gpus()
        if int(index or 0) >= count:
            found = "a GPU" if count == 1 else f"{count or 'no'} GPUs"
            raise ConfigError(
                f"--device: {name} was asked for, and the CUDA driver finds {found} here; use "
                "--device cpu, or see burst-rt doctor."
            )


def _num_gpus() -> int:
    """GPUs of this host that may be used, asked of the driver itself: torch takes seconds to
    load.
    """
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
