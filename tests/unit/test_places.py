"""How many files name one shipped thing: as many as CONTRIBUTING.md says that a new one takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = ("burst_rt", "scheduler", "transport", "launch", "docs")
# By row of the table: the names of one thing that is shipped, and the files that name it.
# Benchmarks name what they measure, and an adapter of the conformance kit what it compares: no
# places that a new thing needs.
_SHIPPED = {
    "mask": (
        "Prefix",
        {
            "burst_rt/__init__.py",
            "burst_rt/planning/masks/__init__.py",
            "burst_rt/planning/masks/positions.py",
            "docs/api.md",
            "docs/errors.md",
            "docs/masks.md",
        },
    ),
    "layout": ("_striped", {"burst_rt/planning/layouts.py"}),
    "kernel": ("FlashKernel", {"burst_rt/kernels/__init__.py", "burst_rt/kernels/aten.py"}),
    "route round the ring": (
        "Straight",
        {"burst_rt/planning/strategies/routes.py", "burst_rt/planning/strategies/table.py"},
    ),
    "strategy with its own operations": (
        "RingNaive|ring_naive",
        {
            "burst_rt/attention/execute/__init__.py",
            "burst_rt/attention/execute/ring_naive.py",
            "burst_rt/planning/strategies/__init__.py",
            "burst_rt/planning/strategies/ring_naive.py",
            "burst_rt/planning/strategies/table.py",
        },
    ),
}


def _rows() -> dict[str, int]:
    """The table of CONTRIBUTING.md: the last number that each row says of its files."""
    text = (_ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text[text.index("| new | files to change | which |") :].partition("\n\n")[0]
    cells = (row.strip("| ").split(" | ") for row in table.splitlines()[2:])
    return {name.strip(): int(re.findall(r"\d+", files)[-1]) for name, files, *_ in cells}


def _files_that_name(names: str) -> set[str]:
    word = re.compile(rf"(?<![\w-])(?:{names})(?!\w)")
    paths = (
        path
        for folder in _FOLDERS
        for path in (_ROOT / folder).rglob("*")
        if path.suffix in (".py", ".md") and not {"bench", "conformance"}.intersection(path.parts)
    )
    named = (path for path in paths if word.search(path.read_text(encoding="utf-8")))
    return {path.relative_to(_ROOT).as_posix() for path in named}


@pytest.mark.parametrize("thing", _SHIPPED)
def test_a_new_thing_takes_as_many_files_as_the_page_says(thing: str) -> None:
    names, expected = _SHIPPED[thing]
    assert _files_that_name(names) == expected
    assert _rows()[thing] == len(expected)
