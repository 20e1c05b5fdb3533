"""What the scheduler itself costs: building, scheduling, checking and running graphs.

The graphs run on a driver that does nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from burst_rt.errors import BurstError
from burst_rt.launch.bench.report import Cell, median, publish
from burst_rt.planning.layouts import make_layout
from burst_rt.planning.masks import Causal
from burst_rt.planning.problem import Problem
from burst_rt.planning.strategies import choose
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
    check_world,
    run,
)

__all__ = ["main"]

_NUM_TASKS = 10_000
_REPEATS = 7


class _NoOpDriver:
    """A driver that reports every task done as soon as the task is issued."""

    def __init__(self) -> None:
        self._done: list[Event] = []

    def issue(self, task: Task, after: tuple[int, ...]) -> None:
        self._done.append(TaskDone(task.id))

    def wait(self) -> Sequence[Event]:
        done, self._done = self._done, []
        return done

    def abort(self, error: BurstError) -> None:
        raise AssertionError("nothing fails here") from error


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


def main(out: Path | None) -> None:
    """Runs the benchmark and prints the tables; adds them to the JSON file `out`, if given."""
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
        "plans",
        [_plan_row(world, forward) for world in (2, 8, 32) for forward in (True, False)],
        out,
        "all ranks built and verified",
    )


def _plan_row(world: int, forward: bool) -> dict[str, Cell]:
    layout = make_layout("zigzag", 8192 * world, world)
    problem = Problem(
        q_layout=layout,
        kv_layout=layout,
        mask=Causal(),
        batch=1,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        input_bytes=2,
        sum_bytes=4,
        needs_grad=(True, True, True),
    )

    def plan() -> None:
        ring = choose(problem, "ring-kv", forward=forward).program
        check_world([ring.graph(rank) for rank in range(world)])

    num_tasks = len(choose(problem, "ring-kv", forward=forward).program.graph(0).tasks)
    return {
        "ranks": world,
        "direction": "forward" if forward else "backward",
        "tasks a rank": num_tasks,
        "ms": _median_s(plan) * 1e3,
    }
