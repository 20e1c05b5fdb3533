"""Python runs this when it starts with this folder on PYTHONPATH: from then on torch has GPUs."""

import ctypes
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def _torch(_: object) -> None:
    from emulated import collectives, cuda, tensors

    cuda.install()
    tensors.install()
    collectives.install()


def _nccl(module: object) -> None:
    from emulated import nccl

    nccl.install(module)


def _torch_nccl(module: object) -> None:
    from emulated import nccl

    nccl.install_group(module)


def _kernels(module: object) -> None:
    from emulated import kernels

    kernels.install(module)


_AFTER = {
    "torch": _torch,
    "cupy_backends.cuda.libs.nccl": _nccl,
    "burst_rt.kernels": _kernels,
    "burst_rt.transport.torch_nccl": _torch_nccl,
}


class _Finder(MetaPathFinder):
    """Has work done once a module is there."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name not in _AFTER:
            return None
        after = _AFTER.pop(name)
        spec: Any = find_spec(name)
        plain = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            if name == "torch":
                # Before torch asks for CUDA for the first time.
                ctypes.CDLL(os.environ["EMULATED_LIBRARY"])
            plain(module)
            after(module)

        spec.loader.exec_module = exec_module
        found: ModuleSpec = spec
        return found


if "EMULATED_LIBRARY" in os.environ:
    sys.path.insert(0, str(Path(__file__).parents[2]))
    sys.meta_path.insert(0, _Finder())
