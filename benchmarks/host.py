"""The host's time in calls on a GPU, without one: what Python takes, and what the GPU is asked for.

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

from benchmarks.options import size_option
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
@size_option("--repeats", 7, "Turns of each build")
@OUT
def command(cases: tuple[str, ...], before: Path | None, repeats: int, out: Path | None) -> None:
    """The host's time in calls on a GPU, without one: Python's time, and counts."""
    builds = {"before": before, "now": _ROOT} if before else {"now": _ROOT}
    times: list[dict[str, Cell]] = []
    with tempfile.TemporaryDirectory() as scratch:
        paths = {name: _importable(tree, Path(scratch, name)) for name, tree in builds.items()}
        for case in cases or _CASES:
            with _stubs(paths, case) as stubs:
                asked = {name: stub.answer() for name, stub in stubs.items()}
                readings = [_reading(stubs, turn) for turn in range(repeats)]
            times += [_times(case, index, readings) for index in range(len(_DIRECTIONS))]
            publish(f"what a call asks the GPU for: {case}", _counts(asked), out)
    publish("host time of a call on a GPU that is not there", times, out, "thread CPU time")


def _times(case: str, index: int, readings: list[dict[str, Any]]) -> dict[str, Cell]:
    """The row of one direction of a case."""
    row: dict[str, Cell] = {"case": case, "direction": _DIRECTIONS[index]}
    for name in sorted(readings[0]):
        row[f"{name} us"] = median([reading[name][index] for reading in readings]) * 1e6
    if len(readings[0]) > 1:
        ratios = [reading["now"][index] / reading["before"][index] for reading in readings]
        row["ratio"] = median(ratios)
    return row


def _counts(asked: dict[str, Any]) -> list[dict[str, Cell]]:
    """A row for each thing that is asked for. asked: of each build, what each call asks for."""
    columns = {
        f"{direction}, {name}": counts[index]
        for index, direction in enumerate((*_DIRECTIONS, "the worst of 140 forwards"))
        for name, counts in asked.items()
    }
    things = sorted({thing for counts in columns.values() for thing in counts})
    return [
        {"asked": thing, **{name: counts.get(thing, 0) for name, counts in columns.items()}}
        for thing in things
    ]


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

    def answer(self) -> Any:
        """The next line that the process prints."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise InputError("host: a build's process has ended early; its error is above")
        return json.loads(line)

    def seconds(self) -> Any:
        """Seconds of a forward and of a backward: medians."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.answer()


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
