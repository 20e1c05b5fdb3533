"""Prints the list of modules, each with the first line of its docstring; `make docs` shows it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

__all__ = ["modules", "page"]

_ROOT = Path(__file__).resolve().parents[1]
# Folders of the tree, in the order of the walk, and what of each is listed.
_FOLDERS = {
    "scheduler": "**/*.py",
    "transport": "**/*.py",
    "burst_rt": "**/*.py",
    "launch": "**/*.py",
    "examples": "**/*.py",
    "benchmarks": "*.py",
    "tests": "*.py",
}


def modules() -> Iterator[tuple[Path, str]]:
    """Every module as (path from the root, first line of its docstring), folder by folder."""
    for folder, pattern in _FOLDERS.items():
        paths = (_ROOT / folder).glob(pattern)
        for path in sorted(paths, key=lambda path: (path.parent, path.name)):
            docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            yield path.relative_to(_ROOT), docstring.partition("\n")[0]


def page() -> str:
    """The list in Markdown: a table for each folder."""
    lines: list[str] = []
    for folder, rows in groupby(modules(), key=lambda each: each[0].parent):
        lines += [f"## {folder}/", "", "| module | what it is |", "|---|---|"]
        lines += [f"| `{path.name}` | {first} |" for path, first in rows]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(page())
