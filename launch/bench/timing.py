"""How benchmarks of several ranks take times, and show how far along they are."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import torch
from rich.console import Console
from rich.progress import Progress

import burst_rt
from burst_rt.launch.where import TERMINAL_VARIABLE

__all__ = ["TIMES_OVER", "have_memory", "keep_freed_memory", "progress", "slowest_s"]

# How many times over the memory that whole matrices of scores are planned to take must be there:
# temporaries are as large as they are.
TIMES_OVER = 4
# Of mallopt, in glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


def keep_freed_memory() -> None:
    """From here on this process keeps what it frees, as a GPU's caching allocator does. Where the C
    library is not glibc, nothing changes.

    Else whole matrices of scores come from the system anew in every tile, and its page faults take
    two thirds of the tile's time, more or less of it from one minute to the next.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, -1)


def have_memory(ctx: burst_rt.Context, size_bytes: int) -> None:
    """Takes so much of the host's memory at once, where ranks compute there, and lets it go: with
    `keep_freed_memory` what is allocated from here on is taken from it, not page by page from the
    system whenever freed pieces do not fit. At most half of a rank's share of what is free.
    Collective.
    """
    share = psutil.virtual_memory().available // (2 * ctx.runtime.machine.ranks_per_node)
    ctx.all_reduce(torch.zeros(1))  # all have looked
    if ctx.device.type == "cpu":
        torch.empty(min(size_bytes, share), dtype=torch.uint8).fill_(0)


def slowest_s(ctx: burst_rt.Context, fn: Callable[[], object] | None) -> float:
    """Runs `fn` on every rank that has one, from a common start; the longest time. Collective."""
    took = torch.zeros(ctx.world_size, dtype=torch.float64)
    ctx.all_reduce(took)
    start = time.perf_counter()
    if fn is not None:
        fn()
        if ctx.device.type == "cuda":
            torch.cuda.synchronize(ctx.device)
    took[ctx.rank] = time.perf_counter() - start
    return float(ctx.all_reduce(took).max())


@contextmanager
def progress(shown: bool, total: int) -> Iterator[Callable[[str], None]]:
    """Yields what to call at the beginning of each of `total` steps. A bar on rank 0's terminal, or
    nothing.
    """
    on_terminal = shown and TERMINAL_VARIABLE in os.environ
    console = (
        Console(stderr=True, force_terminal=True, width=100)
        if on_terminal
        else Console(stderr=True)
    )
    with Progress(console=console, transient=True, disable=not on_terminal) as bar:
        task = bar.add_task("", total=total)

        def step(what: str) -> None:
            bar.update(task, description=what, advance=1)

        yield step
