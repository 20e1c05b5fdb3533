"""Calls for Hopper's own kernels, whose warps have roles: for a GPU, and for its stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from spec import Attention, errors_of
from tolerances import ERROR
from worlds import Case, attend_over_threads

from burst_rt import BlockSparse, Causal, Documents, First, SlidingWindow
from burst_rt.kernels.triton.configs import default_config
from burst_rt.kernels.triton.tuned import trial_of

__all__ = ["BACKWARD", "BASE", "FORWARD", "assert_right", "attend", "launches_of"]

BASE = Case(300, heads=2, head_dim=128, dtype=torch.bfloat16, mask=Causal())


def _blocks() -> BlockSparse:
    """Up to four blocks of 64 keys a row, apart from each other: runs of one block."""
    seen = torch.zeros(8, 8, dtype=torch.bool)
    for row in range(8):
        for column in (0, 3 * row, 5 * row + 7, row):
            seen[row, column % 8] = True
    return BlockSparse(seen, 64)


# Those that the backward in one pass takes: spans of one a row, and no gaps.
BACKWARD = {
    "causal": BASE,
    "full, whole blocks": BASE.but(q_len=256, mask=None),
    "window, grouped heads": BASE.but(
        q_len=400, heads=4, kv_heads=2, batch=2, mask=SlidingWindow(150)
    ),
    "documents of each row": BASE.but(
        q_len=400, batch=2, mask=Causal() & Documents([[100, 300], [128, 100, 172]])
    ),
    "float16, full, ragged": BASE.but(q_len=333, kv_len=457, dtype=torch.float16, mask=None),
    "keys that nobody sees": BASE.but(q_len=100, kv_len=300),
    "three tokens": BASE.but(q_len=3),
    "sinks": BASE.but(q_len=100, sinks=True),
}
FORWARD = BACKWARD | {
    "first and window": BASE.but(q_len=400, mask=Causal() & (First(70) | SlidingWindow(100))),
    "blocks": BASE.but(q_len=512, mask=_blocks()),
}


@contextmanager
def launches_of(kind: str) -> Iterator[list[int]]:
    """Inside, the number of queries of each tile that a Hopper kernel gets is noted.

    kind: "forward" or "backward".
    """
    module: Any = import_module(f"burst_rt.kernels.triton.{kind}_hopper")
    name = f"launch_{kind}_hopper"
    real, seen = getattr(module, name), list[int]()

    def launch(*args: Any) -> Any:
        seen.append(args[-2].q_len)  # TileArguments
        return real(*args)

    with mock.patch.object(module, name, launch):
        yield seen


def attend(
    world_size: int, case: Case, *, device: str, forward: bool = True, backward: bool = False
) -> Attention:
    """The results of a call over ranks that are threads.

    forward, backward: whether Hopper's kernels are asked for.
    """
    with ExitStack() as stack:
        for kind, producer in (("forward", forward), ("backward", backward)):
            config = default_config(kind, 90, case.head_dim, 2, producer=producer)
            stack.enter_context(trial_of(kind, config))
        return attend_over_threads(world_size, case, device=device, kernel="triton", timeout_s=100)


def assert_right(found: Attention, case: Case) -> None:
    """Compares results with the spec."""
    for field, error in errors_of(found, case.truth).items():
        bound = ERROR[torch.float32 if field == "lse" else case.dtype]
        assert error < bound, (field, error)
