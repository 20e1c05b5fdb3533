"""The way of a call stays short, and ARCHITECTURE.md shows it as it is."""

from __future__ import annotations

from pathlib import Path

from walk import walk

_ARCHITECTURE = Path(__file__).resolve().parents[2] / "ARCHITECTURE.md"


def test_the_walk_is_short_and_is_the_one_that_is_shown() -> None:
    found = walk()
    assert len(found.frames) - 1 <= 8, f"frames above the kernel:\n{found}"
    assert len(found.files) <= 16, f"files with a line executed:\n{found}"
    shown = _ARCHITECTURE.read_text(encoding="utf-8")
    assert [line for line in str(found).splitlines() if line not in shown] == []
