"""The host's time in calls on a GPU, measured on a CPU: what Python takes, what the GPU is asked for.

A build runs in a process of its own (`gpu_stub.py`); two builds take turns. Counts carry over to a
GPU, times do not: of those the ratio of two builds says how much less Python there is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from burst_rt.errors import InputError
from burst_rt.launch.measure.options import OUT
from burst_rt.launch.measure.report import Cell, median, publish

__all__ = ["command"]

_ROOT = Path(__file__).resolve().parent.parent
_STUB = Path(__file__).with_name("gpu_stub.py")
# The cases of the stub, which is not imported here: it takes this process' Triton for itself.
_CASES = ("one", "ring of 2", "ring of 8", "ring of 64")
# Folders at the top that are packages of burst_rt.
_FOLDERS = ("scheduler", "transport", "launch", "examples")
_DIRECTIONS = ("forward", "backward")


@click.command()
@click.option(
    "--case", "cases", multiple=True, type=click.Choice(_CASES), help="Only this case. [all]"
)
@click.option(
    "--before", type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="The folder of another build, which takes turns with this one.",
)  # fmt: skip
@click.option("--repeats", default=7, show_default=True, type=click.IntRange(1))
@OUT
def command(cases: tuple[str, ...], before: Path | None, repeats: int, out: Path | None) -> None:
    """The host's time in calls on a GPU, without one: Python's time, and counts."""
    builds = {"before": before, "now": _ROOT} if before else {"now": _ROOT}
    times: list[dict[str, Cell]] = []
    counts: list[dict[str, Cell]] = []
    with tempfile.TemporaryDirectory() as scratch:
        paths = {name: _importable(tree, Path(scratch, name)) for name, tree in builds.items()}
        for case in cases or _CASES:
            with _stubs(paths, case) as stubs:
                asked = {name: json.loads(stub.readline()) for name, stub in stubs.items()}
                worst = {name: json.loads(stub.readline()) for name, stub in stubs.items()}
                readings = [_reading(stubs, turn) for turn in range(repeats)]
            for index, direction in enumerate(_DIRECTIONS):
                row: dict[str, Cell] = {"case": case, "direction": direction}
                for name in builds:
                    row[f"{name} us"] = median([r[name][index] for r in readings]) * 1e6
                if before:
                    row["ratio"] = median([r["now"][index] / r["before"][index] for r in readings])
                times.append(row)
                for name in builds:
                    counts.append({"call": f"{case}, {direction}, {name}", **asked[name][index]})
            for name, most in worst.items():
                counts.append({"call": f"{case}, worst of 140 forwards, {name}", "elapsed": most})
    publish("host time of a call on a GPU that is not there", times, out, "thread CPU time")
    names = sorted({name for row in counts for name in row} - {"call"})
    table = [{"call": row["call"], **{name: row.get(name, 0) for name in names}} for row in counts]
    publish("what a call asks the GPU for", table, out)


def _importable(tree: Path, folder: Path) -> Path:
    """A folder for PYTHONPATH in which `tree` is the package burst_rt, without a copy."""
    package = folder / "burst_rt"
    package.mkdir(parents=True)
    for path in (tree / "burst_rt").iterdir():
        (package / path.name).symlink_to(path.resolve())
    for name in _FOLDERS:
        (package / name).symlink_to((tree / name).resolve())
    return folder


class _Stub:
    """A process that runs the stub in one build."""

    def __init__(self, path: Path, case: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(_STUB), case], text=True, cwd=path,
            env={**os.environ, "PYTHONPATH": str(path), "BURST_RT_HARDWARE": "none"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def readline(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise InputError("host: a build's process has ended early; its error is above")
        return line

    def seconds(self) -> Any:
        """Seconds of a forward and of a backward: medians."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return json.loads(self.readline())


@contextmanager
def _stubs(paths: dict[str, Path], case: str) -> Iterator[dict[str, _Stub]]:
    stubs = {name: _Stub(path, case) for name, path in paths.items()}
    try:
        yield stubs
    finally:
        for stub in stubs.values():
            stub.process.communicate()


def _reading(stubs: dict[str, _Stub], turn: int) -> dict[str, Any]:
    """The seconds of each build, measured one after another; each turn begins with another."""
    names = list(stubs) if turn % 2 else list(stubs)[::-1]
    return {name: stubs[name].seconds() for name in names}
