"""The way of a warm call from `burst_attention` to its kernel: `python tests/walk.py` prints it.

The walk says which functions stand above the kernel, and in which files a warm call executes lines.
Warm means that the plan is made and the arguments are known. The call runs on two ranks on the CPU,
without telemetry.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

import burst_rt
from burst_rt import Context

__all__ = ["Walk", "walk"]

# The folders of the package, wherever each is installed.
_ROOMS = {
    Path(module.__file__ or "").parent: name
    for name, module in (
        ("burst_rt", burst_rt),
        ("scheduler", __import__("burst_rt.scheduler", fromlist=["scheduler"])),
        ("transport", __import__("burst_rt.transport", fromlist=["transport"])),
    )
}
_FIRST, _KERNEL = "burst_attention", "CpuKernel.forward"


class Walk(NamedTuple):
    """The stack when the kernel was entered, and every file of the package that ran."""

    frames: list[tuple[str, str]]  # function and file, from `burst_attention` to the kernel
    files: list[str]

    def __str__(self) -> str:
        first = max(len(function) for function, _ in self.frames)
        way = [f"{function:<{first}}  {file}" for function, file in self.frames]
        beside = sorted(set(self.files) - {file for _, file in self.frames})
        return "\n".join([*way, "", *(f"beside the way: {file}" for file in beside)])


def walk() -> Walk:
    """Makes a call on two ranks that are threads, watches rank 0, and returns its walk."""
    return next(found for found in burst_rt.run_local(2, _rank) if found is not None)


def _rank(ctx: Context) -> Walk | None:
    layout = ctx.layout(64)
    q = torch.randn(1, layout.shard_len, 2, 16)

    def call() -> None:
        burst_rt.burst_attention(q, q, q, layout=layout, causal=True)

    for _ in range(3):
        call()
    if ctx.rank:
        call()
        return None
    frames: list[tuple[str, str]] = []
    files: set[str] = set()

    def watch(frame: FrameType, event: str, _: object) -> None:
        file = _file_of(frame)
        if event != "call" or file is None:
            return
        files.add(file)
        if frame.f_code.co_qualname == _KERNEL and not frames:
            frames.extend(_stack(frame))

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return Walk(frames, sorted(files))


def _stack(frame: FrameType) -> list[tuple[str, str]]:
    """The package's functions from `burst_attention` down to a frame, each with its file."""
    found: list[tuple[str, str]] = []
    here: FrameType | None = frame
    while here is not None and (not found or found[-1][0] != _FIRST):
        file = _file_of(here)
        if file is not None:
            found.append((here.f_code.co_qualname, file))
        here = here.f_back
    return found[::-1]


def _file_of(frame: FrameType) -> str | None:
    """A frame's file, as a path from the top of the tree; None for a file outside the package."""
    path = Path(frame.f_code.co_filename)
    for folder, name in _ROOMS.items():
        if path.is_relative_to(folder):
            return f"{name}/{path.relative_to(folder)}"
    return None


if __name__ == "__main__":
    print(walk())
