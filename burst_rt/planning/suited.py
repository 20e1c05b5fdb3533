"""Which layout suits a problem: by forecasts, or else by evenness and bytes."""

from __future__ import annotations

from dataclasses import replace

from burst_rt.planning.evenness import evenness
from burst_rt.planning.forecast import FORECAST_UP_TO, forecast, rank_strategies
from burst_rt.planning.layouts import BALANCED, make_layout
from burst_rt.planning.problem import Problem
from burst_rt.planning.strategies import choose
from burst_rt.scheduler.simulator import Hardware

__all__ = ["LAYOUTS", "fastest_layout"]

# The largest world with forecasts. Forecasts of four layouts take about five seconds on 16 ranks,
# fifteen on 32, eight on 64.
_LAYOUTS_UP_TO = 64
# The layouts that are chosen from; among equals the first is taken.
LAYOUTS = ("zigzag", "contiguous", "striped", BALANCED)
# Without forecasts, a layout counts as even if its cells exceed the most even one's by at most this
# share.
_EVEN = 0.05
# Number of matrix products for a cell: in the forward, and in the backward.
_WORK = (2, 5)


def fastest_layout(
    problem: Problem, hardware: Hardware | None, *, ranks_per_node: int
) -> tuple[Problem, dict[str, float]]:
    """The problem with the layout under which it is forecast to end first, and all forecasts.

    A forecast is the sum of forward and backward, each with the strategy that a planner takes under
    the mask itself: up to 32 ranks the best one (see `fastest_strategy`), else the one that sends
    the fewest bytes. problem: with as many keys as queries, in any layout. Where no machine is
    known, and above 64 ranks, nothing is forecast: among the layouts whose cells are within 5
    percent of the most even one's, the one that sends the fewest bytes is taken.
    """
    spread = {}
    for kind in LAYOUTS:
        mask = problem.mask if kind == BALANCED else None
        layout = make_layout(kind, problem.q_layout.seq_len, problem.world_size, mask)
        spread[kind] = replace(problem, q_layout=layout, kv_layout=layout)
    if hardware is None or not 1 < problem.world_size <= _LAYOUTS_UP_TO:
        return min(_most_even(list(spread.values())), key=_wire_bytes), {}
    seconds = {}
    for kind, given in spread.items():
        times = (
            _seconds(given, hardware, forward=forward, ranks_per_node=ranks_per_node)
            for forward in (True, False)
        )
        seconds[kind] = sum(times)
    return spread[min(seconds, key=seconds.__getitem__)], seconds


def _seconds(problem: Problem, hardware: Hardware, *, forward: bool, ranks_per_node: int) -> float:
    """Seconds forecast for a direction with the strategy that a planner takes."""
    if problem.world_size <= FORECAST_UP_TO:
        ranking = rank_strategies(problem, hardware, forward=forward, ranks_per_node=ranks_per_node)
        return ranking.time_s
    return forecast(
        problem, "auto", hardware, forward=forward, ranks_per_node=ranks_per_node
    ).time_s


def _most_even(problems: list[Problem]) -> list[Problem]:
    """The layouts whose busiest rank has the fewest cells, or nearly so."""
    work = []
    for problem in problems:
        sides = (problem.q_layout, problem.kv_layout)
        programs = (choose(problem, "auto", forward=forward).program for forward in (True, False))
        cells = [evenness(program, *sides).cells for program in programs]
        work.append(sum(products * each for products, each in zip(_WORK, cells, strict=True)))
    most = min(work) * (1 + _EVEN)
    return [problem for problem, each in zip(problems, work, strict=True) if each <= most]


def _wire_bytes(problem: Problem) -> int:
    return sum(
        choose(problem, "auto", forward=forward).program.wire_bytes() for forward in (True, False)
    )
