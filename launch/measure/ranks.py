"""Measuring on ranks: a job whose ranks call one function, with options that a command has read.

The options are declared once, by the command. They travel as JSON on the command line of the ranks,
so that a function gets the same keyword arguments on every rank.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

from burst_rt.launch.run import launch

__all__ = ["run_on_ranks"]


def run_on_ranks(
    function: Callable[..., None],
    num_ranks: int,
    options: Mapping[str, object],
    *,
    threads: int | None = None,
) -> None:
    """Calls `function(**options)` on every rank of a job, and blocks until the job has ended.

    function: one of a module's own, which ranks import by its name.
    options: what JSON can hold; a tuple arrives as a list, a path as its absolute text.
    threads: as for `launch`.

    A job that fails ends this process with the job's exit code.
    """
    words = json.dumps(options, default=lambda path: str(Path(path).absolute()))
    place = f"{function.__module__}:{function.__name__}"
    code = launch(["-m", __name__, place, words], num_ranks=num_ranks, threads=threads)
    if code:
        sys.exit(code)


if __name__ == "__main__":
    module, name = sys.argv[1].split(":")
    getattr(import_module(module), name)(**json.loads(sys.argv[2]))
