"""MPI, a group's sockets and threads compared: `python -m benchmarks transports`.

One job has a context over MPI and a context over a group of torch.distributed. The two run in turn.
Ranks that are threads run after them, in the first process, while the other processes sleep.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial

import click
import torch
import torch.distributed as dist

import burst_rt
from benchmarks.options import WORLDS
from burst_rt import Context
from burst_rt.launch.measure.options import OUT, REPEATS
from burst_rt.launch.measure.ranks import run_on_ranks
from burst_rt.launch.measure.report import Cell, median, publish
from burst_rt.launch.measure.timing import in_turn, progress_bar, slowest_s

__all__ = ["command"]

_HEADS, _HEAD_DIM = 4, 64
_MESSAGES = 20  # number in a row, for a figure of the transport alone
_AGREEMENTS = 200


def _attention(ctx: Context, tokens: int) -> Callable[[], object]:
    """Forward and backward under the causal mask."""
    layout = ctx.layout(tokens)
    generator = torch.Generator().manual_seed(ctx.rank)
    shape = (1, layout.shard_len, _HEADS, _HEAD_DIM)
    q, k, v, dout = (torch.randn(shape, generator=generator) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()

    def run() -> None:
        out = burst_rt.burst_attention(q, k, v, causal=True, layout=layout, strategy="burst")
        torch.autograd.grad(out, (q, k, v), dout)

    return run


def _exchanges(ctx: Context, size: int) -> Callable[[], object]:
    """Every rank sends `size` bytes to the next, several times in a row."""
    transport, source, target = ctx.runtime.machine.transport, bytearray(size), bytearray(size)
    assert transport is not None
    right, left = (ctx.rank + 1) % ctx.world_size, (ctx.rank - 1) % ctx.world_size

    def run() -> None:
        for _ in range(_MESSAGES):
            to_come = {
                transport.irecv(memoryview(target), left, 0),
                transport.isend(memoryview(source), right, 0),
            }
            while to_come:
                to_come -= {done.handle for done in transport.poll()}
                os.sched_yield()

    return run


def _agreements(ctx: Context) -> Callable[[], object]:
    def run() -> None:
        for _ in range(_AGREEMENTS):
            pending = ctx.runtime.control.allreduce_max([1, 2, 3, 4, 5])
            while not pending.test():
                os.sched_yield()

    return run


def _in_turn(
    sides: Sequence[Context], make: Callable[[Context], Callable[[], object]], repeats: int
) -> list[float]:
    """Median seconds of each side's slowest rank; the sides run in turn."""
    took = in_turn([partial(slowest_s, ctx, make(ctx)) for ctx in sides], repeats)
    return [median(seconds) for seconds in zip(*took, strict=True)]


def _threads_s(world: Context, tokens: int, repeats: int) -> float:
    """The same with ranks that are threads of the first process. Collective."""
    if world.rank:
        while world.all_reduce(torch.zeros(1)).item() == 0:
            time.sleep(0.05)
        return 0.0

    def program(ctx: Context) -> float:
        run = _attention(ctx, tokens)
        slowest_s(ctx, run)
        return median([slowest_s(ctx, run) for _ in range(repeats)])

    took = burst_rt.run_local(world.world_size, program)[0]
    world.all_reduce(torch.ones(1))
    return took


def measure(tokens: list[int], repeats: int, out: str | None) -> None:
    """Measures on all ranks; rank 0 prints and writes."""
    sides = [
        burst_rt.init(device="cpu", timeout_s=1200),
        burst_rt.init(device="cpu", group=_group(), timeout_s=1200),
    ]
    world = sides[0]
    calls: list[dict[str, Cell]] = []
    with progress_bar(world.rank == 0, len(tokens) + 1) as step:
        for length in tokens:
            step(f"{length:,} tokens")
            mpi_s, torch_s = _in_turn(sides, partial(_attention, tokens=length), repeats)
            threads_s = _threads_s(world, length, repeats)
            calls.append(
                {
                    "tokens": length,
                    "mpi s": mpi_s,
                    "torch s": torch_s,
                    "local s": threads_s,
                    "torch, of mpi's speed": mpi_s / torch_s,
                }
            )
        step("messages")
        alone: list[dict[str, Cell]] = []
        for size in (1 << 10, 1 << 16, 1 << 20, 1 << 24):
            mpi_s, torch_s = _in_turn(sides, partial(_exchanges, size=size), repeats)
            alone.append(
                {"message": f"{size:,} bytes to the next rank"}
                | {"mpi us": 1e6 * mpi_s / _MESSAGES, "torch us": 1e6 * torch_s / _MESSAGES}
            )
        mpi_s, torch_s = _in_turn(sides, _agreements, repeats)
        alone.append(
            {"message": "agreement of all ranks (5 numbers)"}
            | {"mpi us": 1e6 * mpi_s / _AGREEMENTS, "torch us": 1e6 * torch_s / _AGREEMENTS}
        )
    if world.rank == 0:
        about = f"medians of {repeats}, mpi and torch interleaved, {world.world_size} ranks x 1"
        title = f"transports: forward + backward, causal, {_HEADS} heads x {_HEAD_DIM}, float32"
        publish(title, calls, out, about + " thread")
        publish("transports alone", alone, out, about + " thread")
    for ctx in reversed(sides):
        ctx.close()


def _group() -> dist.ProcessGroup:
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    return group


@click.command()
@WORLDS
@click.option(
    "--tokens",
    multiple=True,
    type=click.IntRange(64),
    default=(2048, 4096, 8192, 16384),
    show_default=True,
    help="Tokens of the whole sequence; may be repeated.",
)
@REPEATS
@OUT
def command(worlds: tuple[int, ...], **options: object) -> None:
    """MPI, a group of torch.distributed and threads, side by side: calls, messages, agreements.

    Default: 2 ranks.
    """
    for num_ranks in worlds or (2,):
        run_on_ranks(measure, num_ranks, options, threads=1)
