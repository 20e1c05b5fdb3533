"""Rank `args[2]` leaves (`args[0]`: how) while the others are in, or enter, a call (`args[1]`:
when). Notes the time in ./left_at.

when: "before" the others enter the call; while they "wait" in it for this rank to enter; "inside",
from this rank's own first tile.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

import burst_rt
from burst_rt.kernels import KERNELS

how, when, leaver = sys.argv[1], sys.argv[2], int(sys.argv[3])


def fail() -> NoReturn:
    raise RuntimeError("the leaver's own error")


def killed() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


WAYS: dict[str, Callable[[], NoReturn]] = {
    "exception": fail,
    "exit-0": lambda: sys.exit(0),
    "exit-3": lambda: sys.exit(3),
    "os-exit-0": lambda: os._exit(0),
    "os-exit-3": lambda: os._exit(3),
    "sigkill": killed,
}


def leave(*_: object) -> NoReturn:
    Path("left_at").write_text(str(time.time()), encoding="utf-8")
    WAYS[how]()


def call() -> None:
    shape = 1, layout.shard_len, 2, 16
    q = torch.randn(shape, device=ctx.device, requires_grad=True)
    out = burst_rt.burst_attention(q, q, q, causal=True, layout=layout)
    out.sum().backward()
    assert q.grad is not None
    q.grad.sum().item()  # a call on a GPU returns before it ends there


alive = Path("alive").open("wb")  # noqa: SIM115 - closed by the kernel, however this rank ends
ctx = burst_rt.init()
layout = ctx.layout(64 * ctx.world_size)
call()
if ctx.rank == leaver:
    if when == "wait":
        time.sleep(0.5)
    if when == "inside":
        kernel: Any = type(KERNELS["cpu" if ctx.device.type == "cpu" else "triton"])
        kernel.forward = leave
        call()
    leave()
if when == "before":
    time.sleep(0.5)
call()
print("the call went through")
