"""Choosing a program by bytes: of a strategy that somebody named, or where no machine is known.

    problem -> candidates (`strategies/table.py`) -> score -> the best one

A score is the bytes that all ranks send, or, where a machine is known, a forecast of the time
(`ranking.py`). `chooser.py` is what planners use: it forecasts where it can and counts bytes
elsewhere. Which kernel does the tiles is chosen afterwards, by measured speed: `kernels.pick`.
"""

from __future__ import annotations

from burst_rt.planning.problem import Problem
from burst_rt.planning.strategies import Choice, check_name
from burst_rt.planning.strategies.ring import backward_ring
from burst_rt.planning.strategies.table import TABLE, Direction

__all__ = ["CANDIDATES", "FORECAST_UP_TO", "choose"]

# The strategies that a planner chooses from; in a forward also `ring-q`, where queries are few. The
# paper's baselines are for comparing only.
CANDIDATES = ("ring-kv", "burst", "bidirectional", "two-level", "direct", "all-to-all", "hybrid")
# The largest world for which planners forecast where hops differ. A new shape takes a second or two
# to plan, with 256 ranks up to five a direction. Where hops are alike, no world is too large.
FORECAST_UP_TO = 256


def choose(problem: Problem, strategy: str, *, forward: bool, ranks_per_node: int = 1) -> Choice:
    """The program for one direction.

    A strategy may have several programs, which differ in the side that travels or in its route. The
    program that sends the fewest bytes is taken. Ties go to the first: `ring-kv` before `burst`,
    because it sends fewer messages, and rings before `direct`, because neighbours are near. Raises
    InputError for a strategy that this problem does not allow.
    """
    name, size = check_name(strategy)
    row = TABLE[name]
    if row.like is not None:
        choice = choose(problem, row.like, forward=forward, ranks_per_node=ranks_per_node)
        return choice._replace(strategy=name, kernel=row.kernel)
    if not forward and not any(problem.needs_grad):
        # Sinks alone need a gradient. It follows from lse and delta, so no strategy has tiles or
        # messages.
        return Choice(backward_ring(problem, queries_travel=False), "ring-kv", {"ring-kv": 0})
    if row.backward_like is not None and not forward:
        return choose(problem, row.backward_like, forward=False, ranks_per_node=ranks_per_node)
    programs = dict(row.programs(Direction(problem, forward, ranks_per_node, size)))
    candidates = {label: program.wire_bytes() for label, program in programs.items()}
    taken = name if name in programs else min(candidates, key=candidates.__getitem__)
    return Choice(programs[taken], taken, candidates)
