"""Strategies against each other and against forecasts: commands `strategies` and `predict`.

`scaling` measures by it, too. All strategies of one point run in turn, round after
round, so that the machine's noise hits them alike. A time is the slowest rank's, from a common
start.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

import click
import torch

import burst_rt
from benchmarks.options import TOKENS, WORLDS, heads_option
from benchmarks.plots import draw_scatter
from burst_rt.errors import ConfigError, InputError
from burst_rt.job.launched import DEVICE_VARIABLE
from burst_rt.launch.measure.options import OUT, REPEATS
from burst_rt.launch.measure.plots import draw_bars
from burst_rt.launch.measure.ranks import run_on_ranks
from burst_rt.launch.measure.report import Cell, median, publish
from burst_rt.launch.measure.timing import (
    TIMES_OVER,
    have_memory,
    keep_freed_memory,
    progress_bar,
    slowest_s,
)
from burst_rt.launch.where import machine_options
from burst_rt.planning.choose import CANDIDATES, choose
from burst_rt.planning.problem import Problem
from burst_rt.planning.ranking import fastest_strategy, forecast
from burst_rt.runtime.calibrated import HARDWARE_VARIABLE, calibrated_path, find_hardware
from burst_rt.runtime.facts import resolve_device
from burst_rt.scheduler.simulator import Hardware

__all__ = ["command", "measure", "predict"]

Rows: TypeAlias = list[dict[str, Cell]]

_HEAD_DIM = 64

# The paper's baselines are measured and forecast, but "auto" never takes them.
_BASELINES = ("ring-naive", "burst-untiled")


class Point(NamedTuple):
    """One shape of a call, in float32, batch 1."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool

    def __str__(self) -> str:
        return f"{self.tokens:,} {'causal' if self.causal else 'full'} {self.heads}/{self.kv_heads}"


class Bench:
    """One rank of the job. Every method that measures blocks for the other ranks."""

    def __init__(self, ctx: burst_rt.Context, repeats: int) -> None:
        self.ctx = ctx
        self.repeats = repeats
        self.left_out: list[str] = []
        torch.manual_seed(ctx.rank)

    def measure(
        self, point: Point, strategies: Sequence[str], step: Callable[[str], None]
    ) -> dict[str, tuple[float, float]]:
        """Median seconds of forward and backward of each strategy that this problem allows.

        Strategies whose graphs are the same here share their times, which differ by noise alone (in
        a node of two ranks, two-level is the plain ring). Blocks for the other ranks.
        """
        layout = self.ctx.layout(point.tokens)
        q, dout = (
            torch.randn(1, layout.shard_len, point.heads, point.head_dim, device=self.ctx.device)
            for _ in range(2)
        )
        k, v = (
            torch.randn(1, layout.shard_len, point.kv_heads, point.head_dim, device=self.ctx.device)
            for _ in range(2)
        )
        for x in (q, k, v):
            x.requires_grad_()
        work = {name: graphs for name in strategies if (graphs := self._graphs(point, name))}
        took: dict[Hashable, list[float]] = {}
        for repeat in range(self.repeats + 1):
            for name, graphs in work.items():
                step(f"{point}, {name}")
                kept: list[torch.Tensor] = []

                def forward(name: str = name, kept: list[torch.Tensor] = kept) -> None:
                    out = burst_rt.burst_attention(
                        q, k, v, causal=point.causal, layout=layout, strategy=name
                    )
                    kept.append(out)

                forward_s = slowest_s(self.ctx, forward)
                backward_s = slowest_s(
                    self.ctx, partial(torch.autograd.grad, kept[0], (q, k, v), dout)
                )
                for graph, seconds in zip(graphs, (forward_s, backward_s), strict=True):
                    if repeat:
                        took.setdefault(graph, []).append(seconds)
        return {
            name: (median(took[forward]), median(took[backward]))
            for name, (forward, backward) in work.items()
        }

    def _graphs(self, point: Point, strategy: str) -> tuple[Hashable, Hashable] | None:
        """Kernel and rank 0's tasks, of forward and of backward.

        None where the problem does not allow the strategy.
        """
        try:
            forward, backward = (
                choose(
                    self.problem(point),
                    strategy,
                    forward=forward,
                    ranks_per_node=self.ctx.runtime.machine.ranks_per_node,
                )
                for forward in (True, False)
            )
        except InputError:
            return None
        return (forward.kernel, forward.program.graph(0).tasks), (
            backward.kernel,
            backward.program.graph(0).tasks,
        )

    @property
    def hardware(self) -> Hardware:
        """The machine file this job plans with. Raises ConfigError where there is none."""
        found = self.ctx.runtime.machine.hardware
        if found is None:
            raise ConfigError(
                f"no machine file: {calibrated_path(self.ctx.device.type)} does not exist; run "
                f"`burst-rt calibrate` first, or set {HARDWARE_VARIABLE} to a machine file"
            )
        return found

    def problem(self, point: Point) -> Problem:
        """The call as the planner sees it."""
        layout = self.ctx.layout(point.tokens).map
        mask = burst_rt.Causal() if point.causal else burst_rt.Full()
        return Problem(
            q_layout=layout,
            kv_layout=layout,
            mask=mask,
            batch=1,
            num_heads=point.heads,
            num_kv_heads=point.kv_heads,
            head_dim=point.head_dim,
            input_bytes=4,
            sum_bytes=4,
            needs_grad=(True, True, True),
        )

    def predict(
        self, points: Sequence[Point], step: Callable[[str], None]
    ) -> Iterator[dict[str, Cell]]:
        """Rows of forecast and measured seconds: one for each point, strategy and direction."""
        per_node, hardware = self.ctx.runtime.machine.ranks_per_node, self.hardware
        takes = {
            (point, name): forecast(
                self.problem(point), name, hardware, forward=False, ranks_per_node=per_node
            ).memory_bytes
            * TIMES_OVER
            for point in points
            for name in _BASELINES
        }
        fits = [
            key for key, size_bytes in takes.items() if size_bytes <= hardware.device.memory_bytes
        ]
        self.left_out += [
            f"{name} at {point}" for point, name in takes if (point, name) not in fits
        ]
        have_memory(self.ctx, max((takes[key] for key in fits), default=0))
        for point in points:
            problem = self.problem(point)
            measured = self.measure(
                point, (*CANDIDATES, *(name for name in _BASELINES if (point, name) in fits)), step
            )
            for name, times in measured.items():
                for forward, seconds in zip((True, False), times, strict=True):
                    expected = forecast(
                        problem, name, hardware, forward=forward, ranks_per_node=per_node
                    ).time_s
                    yield {
                        "tokens": point.tokens, "mask": "causal" if point.causal else "full",
                        "strategy": name,
                        "direction": "forward" if forward else "backward", "measured s": seconds,
                        "forecast s": expected,
                        "error %": 100 * (expected / seconds - 1),
                    }  # fmt: skip

    def compare(
        self, points: Sequence[Point], step: Callable[[str], None]
    ) -> Iterator[dict[str, Cell]]:
        """Rows of all strategies' seconds side by side, one for each point.

        "slower %" is how much slower the planner's choice is than the fastest strategy measured.
        """
        for point in points:
            measured = self.measure(point, CANDIDATES, step)
            total = {name: sum(times) for name, times in measured.items()}
            # Each direction is planned by itself.
            taken = [self._taken(point, forward) for forward in (True, False)]
            chosen_s = sum(measured[name][direction] for direction, name in enumerate(taken))
            forward_s, backward_s = zip(*measured.values(), strict=True)
            best_s = min(forward_s) + min(backward_s)
            row: dict[str, Cell] = {
                "ranks": self.ctx.world_size,
                "tokens": point.tokens,
                "mask": "causal" if point.causal else "full",
            }
            row["heads"] = f"{point.heads}/{point.kv_heads}"
            yield (
                row
                | {name: total.get(name) for name in CANDIDATES}
                | {"auto takes": ", ".join(taken), "slower %": 100 * (chosen_s / best_s - 1)}
            )

    def time(
        self, points: Sequence[Point], step: Callable[[str], None]
    ) -> Iterator[dict[str, Cell]]:
        """Rows of the seconds that `auto` takes, forward + backward, one for each point."""
        for point in points:
            (times,) = self.measure(point, ("auto",), step).values()
            yield {
                "tokens": point.tokens,
                "mask": "causal" if point.causal else "full",
                "seconds": sum(times),
            }

    def _taken(self, point: Point, forward: bool) -> str:
        """The strategy that `auto` takes, by the name under which it is measured."""
        problem, per_node = self.problem(point), self.ctx.runtime.machine.ranks_per_node
        program = fastest_strategy(
            problem, self.hardware, forward=forward, ranks_per_node=per_node
        ).program
        for name in CANDIDATES:
            try:
                if (
                    choose(problem, name, forward=forward, ranks_per_node=per_node).program
                    == program
                ):
                    return name
            except InputError:
                continue
        raise burst_rt.errors.InternalError(
            f"bench strategies: {program} is none of the candidates"
        )


def measure(
    part: str, tokens: list[int], heads: int, groups: list[int], repeats: int, out: str | None
) -> None:
    """Runs one part on all ranks: predict, compare or time; rank 0 prints and writes."""
    keep_freed_memory()
    points = [
        Point(n, heads, heads // group, _HEAD_DIM, causal)
        for n in tokens
        for group in groups
        for causal in (False, True)
    ]
    with burst_rt.init(timeout_s=1200, stall_s=300) as ctx:
        bench = Bench(ctx, repeats)
        strategies = {
            "predict": (*CANDIDATES, *_BASELINES),
            "compare": CANDIDATES,
            "time": ("auto",),
        }[part]
        with progress_bar(ctx.rank == 0, len(points) * len(strategies) * (repeats + 1)) as step:
            rows = list(getattr(bench, part)(points, step))
        if ctx.rank:
            return
        if part == "predict":
            _publish_predictions(bench, rows, f"{heads} heads x {_HEAD_DIM}", out)
        elif part == "compare":
            _publish_comparison(bench, rows, out)
        elif out:
            Path(out).write_text(json.dumps(rows))


def _publish_predictions(bench: Bench, rows: Rows, shape: str, out: str | None) -> None:
    num_ranks = bench.ctx.world_size
    errors = sorted(abs(float(row["error %"] or 0)) for row in rows)
    note = (
        f"median error {median(errors):.1f} %, worst {errors[-1]:.1f} %; medians of "
        f"{bench.repeats}, interleaved"
    )
    if bench.left_out:
        note += f"; left out because memory is too small: {', '.join(bench.left_out)}"
    publish(f"forecast against measured, {num_ranks} ranks, {shape}", rows, out, note)
    if out:
        draw_scatter(
            Path(out).with_suffix(f".predict-{num_ranks}.png"),
            rows,
            "measured s",
            "forecast s",
            by="strategy",
            title=f"forecast and measured, {num_ranks} ranks",
        )


def _publish_comparison(bench: Bench, rows: Rows, out: str | None) -> None:
    num_ranks = bench.ctx.world_size
    within = sum(float(row["slower %"] or 0) <= 5 for row in rows) / len(rows)
    note = (
        f"auto within 5 % of the fastest at {100 * within:.0f} % of {len(rows)} points; "
        f"medians of {bench.repeats}, interleaved"
    )
    title = f"strategies, forward + backward in seconds, {num_ranks} ranks, heads x {_HEAD_DIM}"
    publish(title, rows, out, note)
    if out:
        draw_bars(
            Path(out).with_suffix(f".compare-{num_ranks}.png"),
            rows,
            CANDIDATES,
            label=lambda row: f"{row['tokens']:,} {row['mask']} {row['heads']}",
            title=f"strategies, {num_ranks} ranks, seconds",
        )


def _require_hardware() -> None:
    """Raises ConfigError where there is no machine file: ranks would, after they have measured."""
    device = resolve_device(os.environ.get(DEVICE_VARIABLE, "auto")).type
    if find_hardware(device) is None:
        raise ConfigError(
            f"no machine file: {calibrated_path(device)} does not exist, or {HARDWARE_VARIABLE} is "
            f"none; run `burst-rt calibrate` first, or set {HARDWARE_VARIABLE} to a machine file"
        )


@click.command()
@WORLDS
@TOKENS
@heads_option(8)
@click.option(
    "--group",
    "groups",
    multiple=True,
    type=click.IntRange(1),
    default=(1, 4),
    show_default=True,
    help="Query heads per key/value head; may be repeated.",
)
@machine_options
@REPEATS
@OUT
def command(
    worlds: tuple[int, ...],
    tokens: tuple[int, ...],
    heads: int,
    groups: tuple[int, ...],
    **options: object,
) -> None:
    """All strategies against each other, full and causal, and how close the planner's choice comes
    to the fastest.

    Default: 2 and 4 ranks, 2K to 8K tokens.
    """
    for group in groups:
        if heads % group:
            raise InputError(f"strategies: --group must divide --heads, got {group} and {heads}")
    _require_hardware()
    options |= {"tokens": tokens or (2048, 4096, 8192), "heads": heads, "groups": groups}
    for num_ranks in worlds or (2, 4):
        run_on_ranks(measure, num_ranks, {"part": "compare", **options})


@click.command("predict")
@WORLDS
@TOKENS
@heads_option(2)
@machine_options
@REPEATS
@OUT
def predict(worlds: tuple[int, ...], tokens: tuple[int, ...], **options: object) -> None:
    """Forecasts against measurements: forward and backward of every strategy. The forecasts use
    the machine file that `burst-rt calibrate` wrote.

    Default: 2 ranks, 4K to 32K tokens. With more ranks than cores (say -n 4), the forecast also
    counts that ranks share cores.
    """
    _require_hardware()
    options |= {"tokens": tokens or (4096, 8192, 16384, 32768), "groups": (1,)}
    for num_ranks in worlds or (2,):
        run_on_ranks(measure, num_ranks, {"part": "predict", **options})
