"""Rankings of strategies by forecasts, of as few of them as it takes to tell which is the fastest.

In worlds of up to 16 ranks all candidates are simulated. In larger ones a candidate is left out if
its bound (`bounds.py`) says that it is no faster than another one; candidates of which one rank a
node is simulated come first. Above 32 ranks, two shorter rings stand in for the whole where they
tell as much (`steady.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import NamedTuple

from burst_rt.errors import InputError
from burst_rt.planning.bounds import bound_of
from burst_rt.planning.choose import CANDIDATES, FORECAST_UP_TO, choose
from burst_rt.planning.forecast import Forecast, fold_of, of_choice
from burst_rt.planning.layouts import FOLLOWING, Layout, make_layout
from burst_rt.planning.problem import Problem
from burst_rt.planning.steady import Steady, has_like_hops
from burst_rt.planning.strategies import Choice
from burst_rt.planning.strategies.table import few_queries
from burst_rt.scheduler.simulator import Hardware

__all__ = [
    "Ranking", "fastest_strategy", "forecast", "is_forecast", "rank_strategies", "typical",
]  # fmt: skip

# Forecasts that differ by less than this share count as equal; among those, the one that sends the
# fewest bytes is taken.
_SAME = 0.02
# The largest world in which all candidates are simulated, and the largest of which all ranks are
# where shorter rings tell as much.
_EVERY_UP_TO, _WHOLE_UP_TO = 16, 32
# Two shorter rings have this many nodes, or on one node units of so many ranks. Two nodes are
# between them: a ring of an odd number that goes both ways differs from one of an even number.
_FEW, _MORE, _UNIT = 3, 5, 8
# The strategies whose hops are alike; what others send to other nodes grows faster than the nodes.
_RINGS = ("ring-kv", "burst", "bidirectional", "two-level", "hybrid")


def forecast(
    problem: Problem,
    strategy: str,
    hardware: Hardware,
    *,
    forward: bool,
    ranks_per_node: int | None = None,
) -> Forecast:
    """Simulates one direction of a strategy.

    ranks_per_node: see `choose`; None takes as many as the machine's nodes have. Raises InputError
    for a strategy that this problem does not allow.
    """
    per_node = ranks_per_node or min(hardware.node.ranks, problem.world_size)
    choice = choose(problem, strategy, forward=forward, ranks_per_node=per_node)
    return of_choice(choice, hardware)


class Ranking(NamedTuple):
    """The strategy that is forecast to end first, and the bytes and seconds of each candidate."""

    strategy: str  # as `choose` takes it
    candidates: Mapping[str, int]  # see `Choice.candidates`; none where shorter rings told
    seconds: Mapping[str, float]  # see `Choice.seconds`
    time_s: float  # forecast for the strategy that is taken


def fastest_strategy(
    problem: Problem,
    hardware: Hardware,
    *,
    forward: bool,
    ranks_per_node: int,
    ranking: Ranking | None = None,
) -> Choice:
    """The program that is forecast to end first, among those that fit into memory.

    If no program fits, the choice is among all of them. Forecasts within 2 percent count as equal;
    among those, up to 16 ranks, the program that sends the fewest bytes is taken. ranking: the
    ranking of `typical(problem)`; None makes it.
    """
    like = typical(problem)
    ranking = ranking or rank_strategies(
        like, hardware, forward=forward, ranks_per_node=ranks_per_node
    )
    choice = choose(problem, ranking.strategy, forward=forward, ranks_per_node=ranks_per_node)
    told = like == problem and ranking.candidates
    candidates = dict(ranking.candidates) if told else choice.candidates
    return choice._replace(candidates=candidates, seconds=ranking.seconds)


def is_forecast(problem: Problem, ranks_per_node: int) -> bool:
    """Whether planners forecast the problem: not where too many ranks would be simulated."""
    if problem.world_size <= FORECAST_UP_TO:
        return problem.world_size > 1
    return _shorter_worlds(typical(problem), ranks_per_node) is not None


def typical(problem: Problem) -> Problem:
    """The problem under a typical mask that costs about as much; there are few such masks
    (`Mask.alike`).

    Layouts that follow the mask are replaced by layouts that follow the typical mask.
    """
    mask = problem.mask.alike
    if mask == problem.mask:
        return problem
    if mask.layouts is not None:
        q_layout, kv_layout = mask.layouts
        return replace(problem, mask=mask, q_layout=q_layout, kv_layout=kv_layout)

    def alike(layout: Layout) -> Layout:
        try:
            size = (layout.seq_len, layout.world_size)
            return make_layout(layout.kind, *size, mask) if layout.kind in FOLLOWING else layout
        except InputError:
            return layout  # which follows a mask of another kind

    q_layout, kv_layout = alike(problem.q_layout), alike(problem.kv_layout)
    return replace(problem, mask=mask, q_layout=q_layout, kv_layout=kv_layout)


def rank_strategies(
    problem: Problem, hardware: Hardware, *, forward: bool, ranks_per_node: int
) -> Ranking:
    """Forecasts the candidates; see `fastest_strategy`. Takes seconds."""
    given = _contenders(problem, hardware, forward=forward, ranks_per_node=ranks_per_node)
    finalists = _finalists([*given], problem.world_size)
    able = [one for one in finalists if one.forecast.fits] or finalists
    # In larger worlds candidates that count as equal have been left out.
    same = _SAME if problem.world_size <= _EVERY_UP_TO else 0.0
    limit_s = min(one.forecast.time_s for one in able) * (1 + same)
    quick = (one for one in able if one.forecast.time_s <= limit_s)
    taken = min(quick, key=lambda one: one.forecast.sent_bytes)
    candidates: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for one in finalists:
        *shorter, choice = one.choices
        candidates |= {} if shorter else choice.candidates
        seconds[choice.strategy] = one.forecast.time_s
    return Ranking(taken.strategy, candidates, seconds, taken.forecast.time_s)


@dataclass(frozen=True)
class _Contender:
    """A strategy in one direction of a problem.

    choices: of the problem; or of two that are as long a rank, and stand in for it.
    """

    strategy: str  # as `choose` takes it
    choices: tuple[Choice, ...]
    world_size: int
    hardware: Hardware

    @property
    def fold(self) -> int:
        """See `fold_of`."""
        return fold_of(self.choices[-1].program, self.hardware)

    @cached_property
    def least_s(self) -> float:
        """Seconds that it takes at least."""
        return self._extended([_least_s(choice, self.hardware) for choice in self.choices])

    @cached_property
    def forecast(self) -> Forecast:
        """The simulation of all ranks, or what shorter rings tell."""
        forecasts = [of_choice(choice, self.hardware) for choice in self.choices]

        def extended(of: Callable[[Forecast], float]) -> float:
            return self._extended([of(each) for each in forecasts])

        return replace(
            forecasts[-1],
            time_s=extended(lambda f: f.time_s),
            exposed_s=max(0.0, extended(lambda f: f.exposed_s)),
            sent_bytes=round(extended(lambda f: f.sent_bytes)),
        )

    def _extended(self, values: list[float]) -> float:
        if len(values) == 1:
            return values[0]
        steady = Steady(*(choice.program.problem.world_size for choice in self.choices))
        return steady.extended(values[0], values[1], self.world_size)


def _least_s(choice: Choice, hardware: Hardware) -> float:
    program = choice.program
    world = program.problem.world_size
    return bound_of(program.graph, hardware, world, kernel=choice.kernel).time_s


def _contenders(
    problem: Problem, hardware: Hardware, *, forward: bool, ranks_per_node: int
) -> Iterator[_Contender]:
    """The strategies that are for this problem and differ."""
    problems: list[Problem] = [problem]
    names: tuple[str, ...] = CANDIDATES
    worlds = _shorter_worlds(problem, ranks_per_node)
    if worlds is not None:
        problems, names = [_of_world(problem, world) for world in worlds], _RINGS
    if forward and few_queries(problem):
        names += ("ring-q",)
    known: list[tuple[Choice, ...]] = []
    for strategy in names:
        try:
            choices = tuple(
                choose(each, strategy, forward=forward, ranks_per_node=ranks_per_node)
                for each in problems
            )
        except InputError:
            continue  # not for this problem
        if all(choices[-1].program != others[-1].program for others in known):
            known.append(choices)
            yield _Contender(strategy, choices, problem.world_size, hardware)


def _finalists(candidates: list[_Contender], world_size: int) -> list[_Contender]:
    """The candidates whose forecasts say which one is the fastest. Takes seconds."""
    if world_size <= _EVERY_UP_TO:
        return candidates
    limit_s, finalists = inf, []
    # One of which few ranks are simulated may make others needless.
    for candidate in sorted(candidates, key=lambda each: (-each.fold, each.least_s)):
        if candidate.least_s < limit_s:
            finalists.append(candidate)
            if candidate.forecast.fits:
                # What is hardly faster counts as equal.
                limit_s = min(limit_s, candidate.forecast.time_s / (1 + _SAME))
    return [candidate for candidate in candidates if candidate in finalists]


def _shorter_worlds(problem: Problem, ranks_per_node: int) -> Steady | None:
    """The worlds of two shorter rings that tell about the problem's; None where none do."""
    world, layout = problem.world_size, problem.q_layout
    nodes_alike = world % ranks_per_node == 0
    unit = ranks_per_node if world > ranks_per_node else _UNIT
    unit *= -(-_UNIT // unit)
    alike = layout == problem.kv_layout and has_like_hops(problem.mask, layout)
    if not (world > _WHOLE_UP_TO and nodes_alike and alike and _MORE * unit < world):
        return None
    return Steady(_FEW * unit, _MORE * unit)


def _of_world(problem: Problem, world_size: int) -> Problem:
    """The problem on other ranks, whose shards are as long."""

    def layout(given: Layout) -> Layout:
        tokens = given.seq_len * world_size // given.world_size
        return make_layout(given.kind, max(tokens, 1), world_size)

    return replace(problem, q_layout=layout(problem.q_layout), kv_layout=layout(problem.kv_layout))
