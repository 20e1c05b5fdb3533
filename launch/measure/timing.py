"""How ranks take times together, compare two sides, and show how far along they are."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import psutil
import torch
from rich.console import Console
from rich.progress import Progress

import burst_rt
from burst_rt.launch.measure.report import median
from burst_rt.launch.where import TERMINAL_VARIABLE
from burst_rt.scheduler import exposed

__all__ = [
    "TIMES_OVER",
    "Versus",
    "WorstIdle",
    "alone_s",
    "have_memory",
    "in_turn",
    "keep_freed_memory",
    "progress_bar",
    "slowest_s",
    "versus",
    "worst_idle",
]

# Factor of the memory that whole matrices of scores need over the planned memory: temporaries are
# as large as the matrices.
TIMES_OVER = 4
# Options of mallopt, in glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


def keep_freed_memory() -> None:
    """Makes this process keep the memory that it frees, as a GPU's caching allocator does.

    Otherwise whole matrices of scores come from the system again in every tile, and page faults
    take two thirds of the tile's time, more or less from one minute to the next. Where the C
    library is not glibc, nothing changes.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, -1)


def have_memory(ctx: burst_rt.Context, size_bytes: int) -> None:
    """Takes `size_bytes` of the host's memory at once, and frees them; blocks for the other ranks.

    With `keep_freed_memory`, what is allocated from here on comes from this memory, and not page by
    page from the system whenever freed pieces do not fit. Takes at most half of a rank's share of
    the free memory, and nothing where ranks do not compute on the host. Collective.
    """
    share = psutil.virtual_memory().available // (2 * ctx.runtime.machine.ranks_per_node)
    ctx.all_gather(None)  # every rank has read how much is free
    if ctx.device.type == "cpu":
        torch.empty(min(size_bytes, share), dtype=torch.uint8, device="cpu").fill_(0)


def slowest_s(ctx: burst_rt.Context, fn: Callable[[], object] | None) -> float:
    """Runs `fn` on every rank that has one, from a common start; the slowest rank's seconds.

    Collective: blocks until `fn` has ended on all ranks.
    """
    ctx.all_gather(None)
    start = time.perf_counter()
    if fn is not None:
        fn()
        if ctx.device.type == "cuda":
            torch.cuda.synchronize(ctx.device)
    return float(max(ctx.all_gather(time.perf_counter() - start)))


def alone_s(ctx: burst_rt.Context, fn: Callable[[], object], threads: int) -> float:
    """Seconds of `fn` on rank 0 with so many threads, while the other ranks sleep. Collective."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return slowest_s(ctx, fn if ctx.rank == 0 else None)
    finally:
        torch.set_num_threads(before)


def in_turn(sides: Sequence[Callable[[], float]], repeats: int) -> list[tuple[float, ...]]:
    """Seconds of several sides, round by round, so that the machine's noise hits all of them.

    sides: functions that measure themselves. A first round warms up and is left out.
    """
    rounds = [tuple(side() for side in sides) for _ in range(1 + repeats)]
    return rounds[1:]


class Versus(NamedTuple):
    """Two sides of a comparison: medians of their seconds, and the second's over the first's."""

    first_s: float
    second_s: float
    ratio: float
    paired: float  # the median of the ratios of neighbouring runs


def versus(first: Callable[[], float], second: Callable[[], float], repeats: int) -> Versus:
    """Compares two sides that measure themselves and run in turn."""
    pairs = in_turn([first, second], repeats)
    first_s, second_s = (median(seconds) for seconds in zip(*pairs, strict=True))
    paired = median([b / a for a, b in pairs])
    return Versus(first_s, second_s, second_s / first_s, paired)


class WorstIdle(NamedTuple):
    """The idle shares of one run's time and the time itself, each on the worst rank."""

    exposed: float
    skew: float
    total_s: float


def worst_idle(ctx: burst_rt.Context) -> WorstIdle:
    """Idle time of compute in the last run. Blocks for the other ranks."""
    ranks = ctx.gather_last_run()
    graphs, traces = zip(*ranks, strict=True)
    idle = exposed(graphs, traces)
    worst_exposed = max(rank.exposed_s / rank.total_s for rank in idle)
    worst_skew = max(rank.skew_s / rank.total_s for rank in idle)
    longest_s = max(rank.total_s for rank in idle)
    return WorstIdle(worst_exposed, worst_skew, longest_s)


@contextmanager
def progress_bar(shown: bool, total: int) -> Iterator[Callable[[str], None]]:
    """Yields a function to call at the beginning of each of `total` steps.

    Shows a bar where `shown` is true and the job has a terminal, else nothing.
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
