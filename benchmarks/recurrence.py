"""`python -m benchmarks recurrence`: a gated delta rule over ranks.

"speed": 2 ranks of one thread against one process of two threads, which runs the same kernel; jobs
in turn. "heads": within a job, against the all-to-all way, where every rank does some heads of the
whole sequence (Ulysses, arXiv 2309.14509): q, k, v, g and beta go to the heads, the results come
back, and the gradients go the other way.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch

import burst_rt
from benchmarks.options import TOKENS, parts_option
from burst_rt import Context, recurrence
from burst_rt.launch.measure.options import OUT, REPEATS
from burst_rt.launch.measure.ranks import run_on_ranks
from burst_rt.launch.measure.report import Cell, median, publish

__all__ = ["command", "steps"]

_HEADS, _WIDTH = 8, 128
_STEPS = 3  # timed in a job, after one that is not


@click.command()
@parts_option("speed", "heads")
@TOKENS
@REPEATS
@OUT
def command(
    parts: tuple[str, ...], tokens: tuple[int, ...], repeats: int, out: Path | None
) -> None:
    """A gated delta rule, forward + backward, float32, 8 heads of 128, over ranks.

    `--part heads` is for ranks of a job: burst-rt run -n 2 -m benchmarks recurrence --part heads
    """
    lengths = tokens or (16384, 65536)
    if "heads" in parts:
        _heads(lengths, repeats, out)
        return
    rows: list[dict[str, Cell]] = []
    for length in lengths:
        took: dict[int, list[float]] = {1: [], 2: []}
        for _ in range(repeats):
            for num_ranks in took:
                took[num_ranks].append(_job(num_ranks, length))
        ratios = [one / two for one, two in zip(took[1], took[2], strict=True)]
        rows.append(
            {
                "tokens": length, "1 process, 2 threads s": median(took[1]),
                "2 ranks, 1 thread s": median(took[2]), "speed": median(ratios),
            }
        )  # fmt: skip
    publish("recurrences: ranks against threads", rows, out, f"medians of {repeats} pairs of jobs")


def _job(num_ranks: int, tokens: int) -> float:
    """Seconds of a step in a job of its own."""
    with tempfile.TemporaryDirectory(prefix="burst-rt-") as folder:
        path = Path(folder) / "steps.json"
        run_on_ranks(steps, num_ranks, {"tokens": tokens, "out": path}, threads=2 // num_ranks)
        seconds: float = json.loads(path.read_text())
        return seconds


def steps(tokens: int, out: str) -> None:
    """Writes the median seconds of a step on the ranks of this job. Collective; blocks for it."""
    with burst_rt.init(device="cpu") as ctx:
        step = _over_ranks(ctx, tokens)
        times = [_timed(ctx, step) for _ in range(_STEPS + 1)]
    if ctx.rank == 0:
        Path(out).write_text(json.dumps(median(times[1:])))


def _heads(lengths: tuple[int, ...], repeats: int, out: Path | None) -> None:
    rows: list[dict[str, Cell]] = []
    with burst_rt.init(device="cpu") as ctx:
        for length in lengths:
            sides = {"over ranks": _over_ranks(ctx, length), "over heads": _over_heads(ctx, length)}
            took: dict[str, list[float]] = {name: [] for name in sides}
            for _ in range(repeats + 1):
                for name, step in sides.items():
                    took[name].append(_timed(ctx, step))
            seconds = {name: median(times[1:]) for name, times in took.items()}
            rows.append(
                {
                    "tokens": length, "ranks": ctx.world_size,
                    **{f"{name} s": s for name, s in seconds.items()},
                    "times as fast": seconds["over heads"] / seconds["over ranks"],
                }
            )  # fmt: skip
        if ctx.rank == 0:
            publish("recurrences: ranks against heads", rows, out, f"medians of {repeats}, in turn")


def _timed(ctx: Context, step: Callable[[], object]) -> float:
    """Seconds that a step takes on the slowest rank."""
    ctx.all_gather(None)
    begun_s = time.perf_counter()
    step()
    slowest_s: float = max(ctx.all_gather(time.perf_counter() - begun_s))
    return slowest_s


def _inputs(tokens: int, rank: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    q, k, v, dout = (torch.randn(1, tokens, _HEADS, _WIDTH, generator=generator) for _ in range(4))
    g, beta = (torch.rand(1, tokens, _HEADS, generator=generator) for _ in range(2))
    return [x.requires_grad_() for x in (q, k, v, -0.1 * g, beta)], dout


def _over_ranks(ctx: Context, length: int) -> Callable[[], object]:
    layout = ctx.layout(length)
    inputs, dout = _inputs(layout.shard_len, ctx.rank)

    def step() -> object:
        out = recurrence.gated_delta_rule(*inputs, layout=layout, use_qk_l2norm=True)
        return torch.autograd.grad(out, inputs, dout)

    return step


def _over_heads(ctx: Context, length: int) -> Callable[[], object]:
    """The same over heads: each rank has `length / ranks` tokens before and after."""
    from mpi4py import MPI

    alone = burst_rt.init(device="cpu", comm=MPI.COMM_SELF)
    layout = alone.layout(length)
    inputs, dout = _inputs(length // ctx.world_size, ctx.rank)

    def step() -> object:
        spread = [
            _ToHeads.apply(x, ctx.world_size)  # type: ignore[no-untyped-call]
            for x in inputs
        ]
        out = recurrence.gated_delta_rule(*spread, layout=layout, use_qk_l2norm=True)
        back = _ToTokens.apply(out, ctx.world_size)  # type: ignore[no-untyped-call]
        return torch.autograd.grad(back, inputs, dout)

    return step


def _exchanged(x: torch.Tensor) -> torch.Tensor:
    """`[ranks, ...]`: what goes to each rank; returns what came from each."""
    from mpi4py import MPI

    got = torch.empty_like(x)
    MPI.COMM_WORLD.Alltoall(x.numpy(), got.numpy())
    return got


def _to_heads(x: torch.Tensor, world_size: int) -> torch.Tensor:
    """`[1, tokens, heads, ...]` of some tokens, as those of all tokens and some heads."""
    parts = torch.stack(x.chunk(world_size, 2)).contiguous()
    return torch.cat(list(_exchanged(parts)), 1)


def _to_tokens(x: torch.Tensor, world_size: int) -> torch.Tensor:
    parts = torch.stack(x.chunk(world_size, 1)).contiguous()
    return torch.cat(list(_exchanged(parts)), 2)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, world_size: int) -> torch.Tensor:
        ctx.world_size = world_size
        return _to_heads(x, world_size)

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _to_tokens(dx, ctx.world_size), None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, world_size: int) -> torch.Tensor:
        ctx.world_size = world_size
        return _to_tokens(x, world_size)

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _to_heads(dx, ctx.world_size), None
