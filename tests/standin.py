"""Stand-ins for libraries of a GPU's driver, compiled where a test needs them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

__all__ = ["build_cuda_standin", "build_standin", "emulated_gpus", "with_standin"]

_FOLDER = Path(__file__).parent


def build_standin(folder: Path) -> Path:
    """Compiles NVML's into a folder and returns the folder."""
    return _compiled("nvml_standin.c", folder / "libnvidia-ml.so.1")


def build_cuda_standin(folder: Path) -> Path:
    """Compiles CUDA's into a folder and returns the folder. CUDA's headers are Triton's."""
    import triton

    headers = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    return _compiled("cuda_standin.c", folder / "libcuda.so.1", f"-I{headers}")


def _compiled(source: str, library: Path, *options: str, by: str = "cc") -> Path:
    command = [by, "-shared", "-fPIC", "-O1", str(_FOLDER / source), *options, "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return library.parent


def emulated_gpus(folder: Path, count: int) -> dict[str, str]:
    """Variables of the environment by which torch has GPUs in Pythons that start with them; see
    `emulated`. The library is compiled into a folder.
    """
    import torch

    of_torch = Path(torch.__file__).parent
    libraries = of_torch / "lib"
    library = _compiled(
        "emulated/gpu.cpp", folder / "libemulated.so", "-std=c++20", f"-I{of_torch / 'include'}",
        f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lc10", "-ltorch_cpu", by="c++",
    ) / "libemulated.so"  # fmt: skip
    on_path = [str(_FOLDER / "emulated" / "on_start"), os.environ.get("PYTHONPATH", "")]
    return {
        "EMULATED_GPUS": str(count),
        "EMULATED_LIBRARY": str(library),
        "PYTHONPATH": os.pathsep.join(filter(None, on_path)),
    }


def with_standin(folder: Path, **settings: str) -> dict[str, str]:
    """The environment of a process that finds a stand-in. settings: see nvml_standin.c."""
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH", "")]))
    return dict(os.environ) | settings | {"LD_LIBRARY_PATH": path}
