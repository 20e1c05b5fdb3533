"""What `python -m benchmarks masks` measures of planning, on short sequences."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import tables


def test_every_mask_and_layout_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "tables.json"
    tables.measure(1, out, shrink=64)
    found = json.loads(out.read_text())
    found.pop("machine")
    steps, own, tile = found.values()
    assert [row["ranks"] for row in steps] == [2, 8, 64]
    for row in steps:
        assert 0 < row["plans, the CPU's tables in them, ms"] < row["and Triton's tables, ms"]
    asked = [(name, kind) for name in tables._MASKS for kind in ("zigzag", "balanced", "striped")]
    assert [(row["mask"], row["layout"]) for row in own] == asked
    assert [row["mask"] for row in tile] == list(tables._MASKS)
    numbers = [x for row in (*steps, *own, *tile) for x in row.values() if isinstance(x, float)]
    assert len(numbers) == 4 * len(steps) + 6 * len(own) + 4 * len(tile)
    assert all(x >= 0 for x in numbers)


def test_masks_are_fresh_and_the_same_again_by_their_seed() -> None:
    for make in tables._MASKS.values():
        assert make(4096, 1) == make(4096, 1) != make(4096, 2)
