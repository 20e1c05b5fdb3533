"""The examples of sparse attention against one process's plain torch: outputs and gradients."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

import burst_rt

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["linformer", "performer", "downsampled"])
def test_over_ranks(name: str, world: int) -> None:
    burst_rt.run_local(world, runpy.run_path(str(EXAMPLES / f"{name}.py"))["check"])
