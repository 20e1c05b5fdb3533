"""What `auto` costs beside the best strategy, and how far its forecasts are off.

`python -m benchmarks auto` starts ranks on this host; under mpirun on several hosts each rank calls
it (`tests/auto_points.py` does so for drawn networks). Calls are drawn by a seed: masks, grouped
heads, lengths. All strategies and `auto` run in turn, each direction timed by itself. A regret is
the seconds of `auto` over those of the fastest, less 1.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import click
import torch

import burst_rt
from benchmarks.options import size_option
from burst_rt import Causal, Full, Mask, SlidingWindow, burst_attention
from burst_rt.errors import InputError
from burst_rt.job.launched import mpi_ranks
from burst_rt.launch.measure.options import OUT, RANKS, REPEATS
from burst_rt.launch.measure.ranks import run_on_ranks
from burst_rt.launch.measure.report import Cell, median, publish
from burst_rt.launch.measure.timing import progress_bar, slowest_s
from burst_rt.planning.choose import CANDIDATES

__all__ = ["command", "run_rank"]

_HEAD_DIM = 64
_DIRECTIONS = ("forward", "backward")


class _Point(NamedTuple):
    """A call."""

    mask: Mask
    layout: str
    heads: int
    kv_heads: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.mask!r}, {self.heads}/{self.kv_heads} heads, {self.tokens:,}"


def _draw(numbers: random.Random) -> _Point:
    tokens = numbers.choice((1024, 2048, 4096, 8192))
    mask = numbers.choice((Full(), Causal(), Causal(), SlidingWindow(tokens // 8)))
    heads = numbers.choice((4, 8))
    layout = "contiguous" if isinstance(mask, (Full, SlidingWindow)) else "zigzag"
    return _Point(mask, layout, heads, numbers.choice((heads, heads // 2, heads // 4)), tokens)


class _Side:
    """A call with one strategy."""

    def __init__(self, ctx: burst_rt.Context, point: _Point, strategy: str) -> None:
        self._ctx, self._point, self._strategy = ctx, point, strategy
        self._layout = ctx.layout(point.tokens, point.layout)

        def numbers(heads: int) -> torch.Tensor:
            shape = (1, self._layout.shard_len, heads, _HEAD_DIM)
            return torch.randn(shape, device=ctx.device, requires_grad=True)

        self._qkv = [numbers(heads) for heads in (point.heads, point.kv_heads, point.kv_heads)]
        plans = burst_rt.explain(
            *self._qkv, mask=point.mask, layout=self._layout, strategy=strategy
        )
        assert plans.backward is not None
        self.plans = dict(zip(_DIRECTIONS, (plans.forward, plans.backward), strict=True))
        self.times: dict[str, list[float]] = {direction: [] for direction in _DIRECTIONS}

    def run(self, *, kept: bool) -> None:
        """Times both directions. Blocks for the other ranks."""
        outs = []

        def forward() -> None:
            outs.append(
                burst_attention(
                    *self._qkv, mask=self._point.mask, layout=self._layout, strategy=self._strategy
                )
            )

        took = [slowest_s(self._ctx, forward)]
        (out,) = outs
        took.append(slowest_s(self._ctx, lambda: torch.autograd.grad(out.sum(), self._qkv)))
        if kept:
            for direction, seconds in zip(_DIRECTIONS, took, strict=True):
                self.times[direction].append(seconds)


def _sides(ctx: burst_rt.Context, point: _Point) -> dict[str, _Side]:
    sides = {"auto": _Side(ctx, point, "auto")}
    for strategy in CANDIDATES:
        try:
            sides[strategy] = _Side(ctx, point, strategy)
        except InputError:
            continue  # not for these heads or ranks
    return sides


def _row(point: _Point, sides: Mapping[str, _Side]) -> dict[str, Cell]:
    row: dict[str, Cell] = {"call": str(point)}
    for direction in _DIRECTIONS:
        seconds = {name: median(side.times[direction]) for name, side in sides.items()}
        taken = sides["auto"].plans[direction]
        best = min(seconds, key=seconds.__getitem__)
        forecast = (taken.choice.seconds or {}).get(taken.choice.strategy)
        row |= {
            f"{direction} takes": taken.choice.strategy,
            f"{direction} best": best,
            f"{direction} regret %": 100 * (seconds["auto"] / seconds[best] - 1),
            f"{direction} forecast %": forecast and 100 * (forecast / seconds["auto"] - 1),
        }
    return row


def run_rank(points: int, seed: int, repeats: int, out: str | None) -> None:
    """Measures on all ranks; rank 0 prints and writes. Blocks for the other ranks."""
    numbers = random.Random(seed)
    rows = []
    with burst_rt.init(timeout_s=600, stall_s=300) as ctx:
        with progress_bar(ctx.rank == 0, points) as step:
            for number in range(points):
                point = _draw(numbers)
                step(f"{number}: {point}")
                sides = _sides(ctx, point)
                for repeat in range(repeats + 1):
                    for side in sides.values():
                        side.run(kept=repeat > 0)
                rows.append(_row(point, sides))
        if ctx.rank == 0:
            regrets = sorted(
                value
                for row in rows
                for name, value in row.items()
                if name.endswith("regret %") and isinstance(value, float)
            )
            publish(
                f"{points} calls drawn from seed {seed}; {ctx.world_size} ranks, "
                f"{ctx.runtime.machine.ranks_per_node} on a host",
                rows,
                out,
                f"regret: median {median(regrets):.1f} %, 90th percentile "
                f"{regrets[int(0.9 * (len(regrets) - 1))]:.1f} %; medians of {repeats} in turn",
            )


@click.command()
@RANKS
@size_option("--points", 10, "Calls that are drawn")
@click.option("--seed", default=0, show_default=True, help="What calls are drawn from.")
@REPEATS
@OUT
def command(num_ranks: int, points: int, seed: int, repeats: int, out: Path | None) -> None:
    """Regret of `auto`, and errors of its forecasts."""
    if mpi_ranks() > 1:  # which somebody started
        run_rank(points, seed, repeats, str(out) if out else None)
        return
    options = {"points": points, "seed": seed, "repeats": repeats, "out": out}
    run_on_ranks(run_rank, num_ranks, options, threads=1)
