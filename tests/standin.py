"""The stand-in for NVML's library (nvml_standin.c), compiled where a test needs it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

__all__ = ["build_standin", "with_standin"]

_SOURCE = Path(__file__).parent / "nvml_standin.c"


def build_standin(folder: Path) -> Path:
    """Compiles the library into a folder and returns the folder."""
    command = [
        "cc",
        "-shared",
        "-fPIC",
        "-O1",
        "-o",
        str(folder / "libnvidia-ml.so.1"),
        str(_SOURCE),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def with_standin(folder: Path, **settings: str) -> dict[str, str]:
    """The environment of a process that finds the stand-in. settings: see nvml_standin.c."""
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH", "")]))
    return dict(os.environ) | settings | {"LD_LIBRARY_PATH": path}
