"""Prints what reaches the CUDA driver: `[kernel, kept, pointers, parameters, stream]` a launch.

For a process that finds the stand-in of libcuda (cuda_standin.c). Triton's launcher is the real
one; it compiles, loads and launches kernels for an H100. pointers: those that the package gives.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
from triton.runtime import driver

from benchmarks.gpu_stub import Case, StubGpu, stub_context, stub_triton
from burst_rt.kernels.triton import kernel, start

cuda = ctypes.CDLL("libcuda.so.1")
num_params = ctypes.c_int.in_dll(cuda, "num_params")
params_seen = (ctypes.c_ulonglong * 64).in_dll(cuda, "params_seen")
stream_seen = ctypes.c_ulonglong.in_dll(cuda, "stream_seen")
launches: list[list[Any]] = []


def types_of(signature: Any) -> Iterator[str]:
    for each in signature:
        if isinstance(each, tuple):
            yield from types_of(each)
        elif each != "constexpr":
            yield each


class Launcher(CudaLauncher):  # type: ignore[misc]
    def __init__(self, source: Any, metadata: Any) -> None:
        super().__init__(source, metadata)
        self._name, self._types = metadata.name, list(types_of(source.signature.values()))

    def __call__(self, *arguments: Any) -> None:
        num_params.value = len(self._types) + 2  # and two kinds of scratch memory
        super().__call__(*arguments)
        # A parameter of 32 bits has no more.
        params = [
            value if kind.startswith("*") else value % 2**32
            for kind, value in zip(self._types, params_seen, strict=False)
        ]
        launches.append([self._name, False, [], params, stream_seen.value])


def restart(kept: Any, kind: str, pointers: Any, strides: Any) -> bool:
    again = start.restart(kept, kind, pointers, strides)
    if again:
        launches[-1][1:3] = True, list(pointers)
    return again


def keep_launch(kept: Any, kind: str, pointers: Any, strides: Any, launch: Any) -> None:
    start.keep_launch(kept, kind, pointers, strides, launch)
    launches[-1][2] = list(pointers)


torch.set_num_threads(1)
gpu = StubGpu()
with (
    stub_triton(Counter()),
    mock.patch.object(kernel, "restart", restart),
    mock.patch.object(kernel, "keep_launch", keep_launch),
    mock.patch.object(start, "_scratch", lambda size, *_: torch.empty(size, dtype=torch.int8)),
):
    stub, properties = driver.active, driver.active.utils.get_device_properties
    stub.launcher_cls = Launcher
    stub.utils = SimpleNamespace(**vars(CudaUtils()) | {"get_device_properties": properties})
    ctx = stub_context(gpu, int(sys.argv[1]))
    ctx.attention.poison = False
    case = Case(ctx.world_size, heads=2, tokens=256, head_dim=int(sys.argv[2]))
    calls = case.calls(ctx)
    for call in calls * 2:
        call()
print(json.dumps(launches), flush=True)
os._exit(0)  # watchdogs of the stub have nothing to end
