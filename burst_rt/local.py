"""Ranks that are threads of one process: `run_local`, for small trials and notebooks."""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from burst_rt.arguments import check_kinds
from burst_rt.context import Context, init
from burst_rt.errors import PeerLost
from burst_rt.job.ending import error_line, exit_code_of
from burst_rt.runtime.connections import LocalRank, this_thread
from burst_rt.runtime.process import process
from burst_rt.transport import LocalWorld

__all__ = ["run_local"]

_T = TypeVar("_T")
_ENDING_S = 3.0  # that ranks have to end, once the caller is interrupted


@check_kinds
def run_local(world_size: int, fn: Callable[[Context], _T], **options: Any) -> list[_T]:
    """Runs `fn(ctx)` on `world_size` ranks, which are threads of this process. For small trials.

    Blocks until all ranks have ended. Returns the results in rank order. options: the arguments of
    `init`. If ranks fail, raises the error of the first rank that failed by itself. Where the
    caller is interrupted (Ctrl-C), the ranks' next calls raise, and ranks that make none within 3 s
    go on behind it.

    Threads share torch's random numbers. Dropout, and above all dropout that a checkpoint computes
    again, is a matter for ranks that are processes. Modes of the caller's thread (`torch.no_grad`,
    autocast, a default device) are not the ranks'.
    """
    world_size = operator.index(world_size)
    world = LocalWorld(world_size)
    results: list[Any] = [None] * world_size
    contexts: list[Context] = []
    # A join that is interrupted takes the thread for ended (Python 3.11).
    ended = [threading.Event() for _ in range(world_size)]
    failures: list[tuple[int, BaseException]] = []

    def rank_main(rank: int) -> None:
        # `init()` in this thread joins as this rank.
        this_thread.rank = LocalRank(world, rank)
        try:
            # torch runs all backwards of one GPU in one thread, in which ranks would wait for each
            # other for ever.
            with torch.autograd.set_multithreading_enabled(False), init(**options) as ctx:
                contexts.append(ctx)
                try:
                    results[rank] = fn(ctx)
                except BaseException as error:
                    process.close_here(exit_code_of(error), error_line(error))
                    raise
                process.close_here(0, "")
        except BaseException as error:  # noqa: BLE001  (handed to the caller's thread)
            failures.append((rank, error))
        finally:
            ended[rank].set()

    threads = [
        threading.Thread(target=rank_main, args=(rank,), name=f"burst_rt rank {rank}", daemon=True)
        for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    try:
        for event in ended:
            event.wait()
    except BaseException as error:
        for ctx in contexts:
            ctx.runtime.broken = ctx.runtime.broken or error
        until_s = time.monotonic() + _ENDING_S
        for event in ended:
            event.wait(max(0.0, until_s - time.monotonic()))
        raise
    for thread in threads:
        thread.join()
    if failures:
        first = next(
            (error for _, error in failures if not isinstance(error, PeerLost)), failures[0][1]
        )
        raise first
    return results
