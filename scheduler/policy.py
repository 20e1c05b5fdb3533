"""Policies: in which order ready tasks of a lane are issued.

A policy is a pure function of the graph. It orders compute and free lanes only, and can change the
time a graph takes but never its result: accumulations are chained in program order by the graph
itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from burst_rt.scheduler.graph import Graph, Task

__all__ = ["Policy", "critical_path", "program_order"]

# For each task its place in the order: a permutation of range(len(graph.tasks)); the smaller goes
# first.
Policy: TypeAlias = Callable[[Graph], list[int]]

# Nominal rates: a policy needs only the proportion of compute to transfers, so any plausible
# machine will do.
_SECONDS_PER_FLOP = 1e-11
_SECONDS_PER_BYTE = 1e-10


def program_order(graph: Graph) -> list[int]:
    """Tasks in the order the program gave them."""
    return list(range(len(graph.tasks)))


def critical_path(graph: Graph) -> list[int]:
    """Transfers first, then by upward rank (length of the costliest path from the task to the end),
    ties by id.

    Source: the upward rank of HEFT (Topcuoglu, Hariri, Wu 2002, section 5.1).
    """
    upward = [0.0] * len(graph.tasks)
    for task in reversed(graph.tasks):
        tail = max((upward[s] for s in graph.successors[task.id]), default=0.0)
        upward[task.id] = _seconds(task) + tail
    order = sorted(
        range(len(graph.tasks)), key=lambda t: (not graph.tasks[t].is_exchange, -upward[t], t)
    )
    place = [0] * len(order)
    for position, task_id in enumerate(order):
        place[task_id] = position
    return place


def _seconds(task: Task) -> float:
    return task.cost.flops * _SECONDS_PER_FLOP + task.cost.size_bytes * _SECONDS_PER_BYTE
