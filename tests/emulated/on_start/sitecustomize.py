"""Python runs this when it starts with this folder on PYTHONPATH: from then on torch has GPUs."""

import ctypes
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any


def _nothing(_: object) -> None:
    pass


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


def _triton(module: object) -> None:
    from emulated import triton

    triton.install(module)


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
        others = (each for each in sys.meta_path if each is not self)
        specs = (each.find_spec(name, path, target) for each in others)
        spec: Any = next((spec for spec in specs if spec is not None), None)
        if spec is None:
            return None
        plain = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            if name == "torch":
                # Before torch asks for CUDA for the first time.
                ctypes.CDLL(os.environ["EMULATED_LIBRARY"])
            plain(module)
            # Who only asks where a module is does not import it.
            _AFTER.pop(name, _nothing)(module)

        spec.loader.exec_module = exec_module
        found: ModuleSpec = spec
        return found


if "EMULATED_LIBRARY" in os.environ:
    if "EMULATED_TRITON" in os.environ:
        _AFTER["triton"] = _triton
    sys.path.insert(0, str(Path(__file__).parents[2]))
    sys.meta_path.insert(0, _Finder())
