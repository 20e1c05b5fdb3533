"""The guide's pictures are made of a real job, by the program that `make docs` runs."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
from dashboards import installed
from PIL import Image

_DOCS = Path(__file__).resolve().parents[2] / "docs"
_NAMES = ("dashboard", "verdict", "steps", "history")


def test_pictures_are_of_a_job_and_the_guide_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed("chromium-headless-shell", "chromium", package="chromium-headless-shell")
    made = runpy.run_path(str(_DOCS / "pictures.py"))
    main = made["main"]
    short = made["_TRAINING"].replace("--steps 80", "--steps 16")
    monkeypatch.setitem(main.__globals__, "_TRAINING", short)
    main(tmp_path)
    guide = "".join(path.read_text(encoding="utf-8") for path in _DOCS.glob("*.md"))
    for name in _NAMES:
        picture = np.asarray(Image.open(tmp_path / f"{name}.png").convert("L"))
        assert picture.shape[1] > 1000, name
        # Not a blank page, nor one that only has a frame.
        assert (picture < 128).mean() > 0.003, name
        assert f"]({name}.png)" in guide
        assert (_DOCS / f"{name}.png").is_file()
