"""Policies: pure functions of a graph that order the ready tasks of a lane.

A policy has no say on lanes that are issued in program order.
It can change the time that a graph takes and never the result, because the graph itself chains
accumulations in program order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from burst_rt.scheduler.graph import Graph, Task

__all__ = ["Policy", "critical_path", "program_order"]

# Gives each task its place: a permutation of range(len(graph.tasks)). The ready task with the
# smallest place is issued first.
Policy: TypeAlias = Callable[[Graph], list[int]]

# Rates that belong to no real machine: a policy needs only a plausible ratio of compute to
# transfers.
_SECONDS_PER_FLOP = 1e-11
_SECONDS_PER_BYTE = 1e-10


def program_order(graph: Graph) -> list[int]:
    """Tasks in the order in which the program added them."""
    return list(range(len(graph.tasks)))


def critical_path(graph: Graph) -> list[int]:
    """Transfers before all other tasks, each kind by falling upward rank, equal ranks by id. The
    upward rank of a task is the length of the costliest path from the task to the end.

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
