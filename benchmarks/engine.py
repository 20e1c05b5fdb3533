"""What the scheduler itself costs: building, scheduling, checking, running and planning graphs.

The graphs run on a driver that does nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import click
import torch

from burst_rt.attention.planner import PlanKey, Planner
from burst_rt.launch.measure.options import OUT
from burst_rt.launch.measure.report import Cell, median, publish
from burst_rt.planning.layouts import make_layout
from burst_rt.planning.masks import Causal
from burst_rt.planning.problem import Problem
from burst_rt.scheduler import (
    Cost,
    Event,
    Graph,
    GraphBuilder,
    Op,
    Schedule,
    Task,
    TaskDone,
    check_graph,
    run,
)

__all__ = ["command"]

_NUM_TASKS = 10_000
_REPEATS = 7
_TOKENS = 4096  # number of tokens of a rank


class _NoOpDriver:
    """A driver that reports every task done as soon as the task is issued."""

    on_events: Callable[[Sequence[TaskDone]], object] | None = None

    def __init__(self) -> None:
        self._done: list[Event] = []

    def issue(self, task: Task, after: tuple[int, ...]) -> None:
        self._done.append(TaskDone(task.id))

    def wait(self) -> Sequence[Event]:
        done, self._done = self._done, []
        return done

    def abort(self) -> None:
        raise AssertionError("nothing fails here")


def _ring_graph(num_tasks: int) -> Graph:
    """A long ring: an exchange and three tiles a hop over two slots."""
    g = GraphBuilder(0, 2)
    slots = [g.buffer("slot0", size_bytes=8, initialised=True), g.buffer("slot1", size_bytes=8)]
    out = g.buffer("out", initialised=True)
    for hop in range(num_tasks // 4):
        here, coming = slots[hop % 2], slots[(hop + 1) % 2]
        g.exchange(f"hop {hop}", sends=[(here, 1)], recvs=[(coming, 1)], tag=hop)
        for tile in range(3):
            g.compute(
                f"tile {hop}.{tile}",
                Op("tile", (hop, tile)),
                reads=[here],
                accumulates=[out],
                cost=Cost(100, 10),
            )
    return g.build()


def _median_s(fn: Callable[[], object]) -> float:
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        fn()
        times.append(time.perf_counter() - start)
    return median(times)


@click.command()
@OUT
def command(out: Path | None) -> None:
    """Cost of the scheduler: building, verifying and running graphs."""
    graph = _ring_graph(_NUM_TASKS)
    schedule = Schedule.of(graph)
    steps = {
        "build": lambda: _ring_graph(_NUM_TASKS),
        "schedule (policy included)": lambda: Schedule.of(graph),
        "check one rank": lambda: check_graph(graph),
        "engine and loop, no-op driver": lambda: run(schedule, _NoOpDriver()),
    }
    rows: list[dict[str, Cell]] = [
        {"step": name, "us a task": _median_s(fn) / _NUM_TASKS * 1e6} for name, fn in steps.items()
    ]
    publish(f"scheduler, a graph of {_NUM_TASKS:,} tasks", rows, out, f"medians of {_REPEATS}")
    publish(
        "a new way: both directions of a causal call, planned and verified on one rank",
        [_way_row(world) for world in (2, 8, 64)],
        out,
        f"ms, medians of {_REPEATS}; {_TOKENS:,} tokens a rank, zigzag",
    )


def _way_row(world: int) -> dict[str, Cell]:
    """Seconds that a rank takes to plan a call of a way never seen before, by strategy."""
    row: dict[str, Cell] = {"ranks": world}
    lengths = count(world * _TOKENS, 2 * world)  # each is a way of its own
    for strategy in ("burst", "direct", "all-to-all"):

        def plan(strategy: str = strategy) -> None:
            layout = make_layout("zigzag", next(lengths), world)
            problem = Problem(
                q_layout=layout, kv_layout=layout, mask=Causal(), batch=1, num_heads=64,
                num_kv_heads=64, head_dim=128, input_bytes=2, sum_bytes=4,
                needs_grad=(True, True, True),
            )  # fmt: skip
            planner = Planner(world // 2)
            for forward in (True, False):
                planner.plan(
                    PlanKey(
                        forward=forward, problem=problem, strategy=strategy, kernel="auto",
                        dtype=torch.bfloat16, device=torch.device("cpu"),
                    )
                )  # fmt: skip

        row[strategy] = _median_s(plan) * 1e3
    return row
