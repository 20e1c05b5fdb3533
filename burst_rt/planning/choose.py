"""Choosing: from a problem to candidates, to their scores, to one program. One road for everybody.

    problem -> candidates (`strategies/table.py`) -> score -> the best one

A score is the bytes that all ranks send, or, where a machine is known, a forecast of the time
(`forecast.py`). `choose` takes a strategy that somebody named, and counts bytes; `Chooser` is what
planners use: it forecasts where it can and counts bytes elsewhere. Layouts are chosen the same way.
Which kernel does the tiles is chosen afterwards, by measured speed: `kernels.pick`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from burst_rt.errors import InputError
from burst_rt.planning.evenness import evenness
from burst_rt.planning.layouts import BALANCED, FOLLOWING, TOLERANCE, WHOLE, Layout, make_layout
from burst_rt.planning.masks import branches_of
from burst_rt.planning.problem import Problem
from burst_rt.planning.recurrences import RecurrenceSizes
from burst_rt.planning.recurrent_layers import scan_seconds, scans_of
from burst_rt.planning.scan import Scan
from burst_rt.planning.strategies import Choice, check_name
from burst_rt.planning.strategies.ring import backward_ring
from burst_rt.planning.strategies.table import TABLE, Direction, few_queries
from burst_rt.scheduler import Cost

if TYPE_CHECKING:
    from burst_rt.planning.forecast import Forecast
    from burst_rt.scheduler.simulator import Hardware

__all__ = [
    "CANDIDATES", "FORECAST_UP_TO", "LAYOUTS", "LAYOUTS_UP_TO", "Chooser", "Ranking", "choose",
    "fastest_layout", "fastest_strategy", "forecast", "rank_strategies", "typical", "whole_layout",
]  # fmt: skip

# The strategies that a planner chooses from; in a forward also `ring-q`, where queries are few. The
# paper's baselines are for comparing only.
CANDIDATES = ("ring-kv", "burst", "bidirectional", "two-level", "direct", "all-to-all", "hybrid")
# The largest world for which planners forecast. Up to 32 ranks a new shape takes a second or two to
# plan; at 64 ranks it takes ten.
FORECAST_UP_TO = 32
# Forecasts that differ by less than this share count as equal; among those, the one that sends the
# fewest bytes is taken.
_SAME = 0.02
# The layouts that are chosen from; among equals the first is taken.
LAYOUTS = ("zigzag", "contiguous", "striped", BALANCED)
# The largest world with forecasts of layouts. Forecasts of four layouts take about five seconds on
# 16 ranks, fifteen on 32, eight on 64.
LAYOUTS_UP_TO = 64
# Without forecasts, a layout counts as even if its cells exceed the most even one's by at most this
# share.
_EVEN = 0.05
# Number of matrix products for a cell: in the forward, and in the backward.
_WORK = (2, 5)
# The largest world for which layouts of whole documents are forecast. Each batch has its own; five
# of them take a tenth of a second on 8 ranks, 0.4 s on 16, a second on 32.
_WHOLE_UP_TO = 16
# What the busiest rank may have above its share, if documents are dealt whole; the best is taken.
_TOLERANCES = (TOLERANCE, 0.15, 0.4, 0.9)


class Chooser:
    """What one planner chooses with: the machine, and the `capacity` latest rankings and layouts.

    hardware: None where no machine is known, so that bytes decide.
    """

    def __init__(self, hardware: Hardware | None, ranks_per_node: int, capacity: int) -> None:
        self.hardware = hardware
        self._ranks_per_node = ranks_per_node
        self._ranking = lru_cache(capacity)(self._rank)
        self._layout = lru_cache(capacity)(self._suit)

    def choose(self, problem: Problem, strategy: str, *, forward: bool) -> Choice:
        """The program for one direction; "auto" is forecast where the world is not too large.

        Raises InputError for a strategy that this problem does not allow.
        """
        hardware, per_node = self.hardware, self._ranks_per_node
        if strategy != "auto" or hardware is None or not 1 < problem.world_size <= FORECAST_UP_TO:
            return choose(problem, strategy, forward=forward, ranks_per_node=per_node)
        return fastest_strategy(
            problem, hardware, forward=forward, ranks_per_node=per_node,
            ranking=self._ranking(typical(problem), forward),
        )  # fmt: skip

    def layout(self, problem: Problem, recurrences: tuple[RecurrenceSizes, ...]) -> Layout:
        """The layout that suits a problem best; see `fastest_layout`. Takes seconds; kept."""
        return self._layout(problem, recurrences)

    def whole(self, problem: Problem, token_cells: float) -> Layout:
        """See `whole_layout`."""
        return whole_layout(
            problem, self.hardware, ranks_per_node=self._ranks_per_node, token_cells=token_cells
        )

    def forget(self) -> None:
        """Lets go of all rankings and layouts."""
        self._ranking.cache_clear()
        self._layout.cache_clear()

    def _rank(self, problem: Problem, forward: bool) -> Ranking:
        assert self.hardware is not None
        return rank_strategies(
            problem, self.hardware, forward=forward, ranks_per_node=self._ranks_per_node
        )

    def _suit(self, problem: Problem, recurrences: tuple[RecurrenceSizes, ...]) -> Layout:
        suited, _ = fastest_layout(
            problem, self.hardware, ranks_per_node=self._ranks_per_node, recurrences=recurrences
        )
        return suited.q_layout


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
    return _forecast(choice, hardware)


def _forecast(choice: Choice, hardware: Hardware) -> Forecast:
    # Most jobs have no machine file, and do without the simulator.
    from burst_rt.planning.forecast import of_choice

    return of_choice(choice, hardware)


class Ranking(NamedTuple):
    """The strategy that is forecast to end first, and the bytes and seconds of each candidate."""

    strategy: str  # as `choose` takes it
    candidates: Mapping[str, int]  # see `Choice.candidates`
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
    among those, the program that sends the fewest bytes is taken. ranking: the ranking of
    `typical(problem)`; None makes it.
    """
    like = typical(problem)
    ranking = ranking or rank_strategies(
        like, hardware, forward=forward, ranks_per_node=ranks_per_node
    )
    choice = choose(problem, ranking.strategy, forward=forward, ranks_per_node=ranks_per_node)
    candidates = dict(ranking.candidates) if like == problem else choice.candidates
    return choice._replace(candidates=candidates, seconds=ranking.seconds)


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


class _Scored(NamedTuple):
    """A candidate with its score."""

    strategy: str  # as `choose` takes it
    choice: Choice
    forecast: Forecast


def rank_strategies(
    problem: Problem, hardware: Hardware, *, forward: bool, ranks_per_node: int
) -> Ranking:
    """Forecasts all candidates; see `fastest_strategy`."""
    scored = _scored(problem, hardware, forward=forward, ranks_per_node=ranks_per_node)
    able = [one for one in scored if one.forecast.fits] or scored
    limit_s = min(one.forecast.time_s for one in able) * (1 + _SAME)
    quick = (one for one in able if one.forecast.time_s <= limit_s)
    taken = min(quick, key=lambda one: one.forecast.sent_bytes)
    candidates: dict[str, int] = {}
    for one in scored:
        candidates |= one.choice.candidates
    seconds = {one.choice.strategy: one.forecast.time_s for one in scored}
    return Ranking(taken.strategy, candidates, seconds, taken.forecast.time_s)


def _scored(
    problem: Problem, hardware: Hardware, *, forward: bool, ranks_per_node: int
) -> list[_Scored]:
    """The candidates that are for this problem and differ, each with its forecast."""
    scored: list[_Scored] = []
    few = ("ring-q",) if forward and few_queries(problem) else ()
    for strategy in (*CANDIDATES, *few):
        try:
            choice = choose(problem, strategy, forward=forward, ranks_per_node=ranks_per_node)
        except InputError:
            continue  # not for this problem
        if all(choice.program != other.choice.program for other in scored):
            scored.append(_Scored(strategy, choice, _forecast(choice, hardware)))
    return scored


def fastest_layout(
    problem: Problem,
    hardware: Hardware | None,
    *,
    ranks_per_node: int,
    recurrences: tuple[RecurrenceSizes, ...] = (),
) -> tuple[Problem, dict[str, float]]:
    """The problem with the layout under which it is forecast to end first, and all forecasts.

    A forecast is the sum of forward and backward, each with the strategy that a planner takes under
    the mask itself: up to 32 ranks the best one (see `fastest_strategy`), else the one that sends
    the fewest bytes. problem: with as many keys as queries, in any layout. Where no machine is
    known, and above 64 ranks, nothing is forecast: among the layouts whose cells are within 5
    percent of the most even one's, the one that sends the fewest bytes is taken. recurrences: the
    layers that take turns with a layer of attention; they add their time and bytes, and leave out
    striped layouts.
    """
    spread = {}
    for kind in [kind for kind in LAYOUTS if kind != "striped" or not recurrences]:
        mask = problem.mask if kind == BALANCED else None
        layout = make_layout(kind, problem.q_layout.seq_len, problem.world_size, mask)
        spread[kind] = replace(problem, q_layout=layout, kv_layout=layout)
    branches = branches_of(problem.mask)
    scans = {
        kind: [
            scan
            for sizes in recurrences
            for scan in scans_of(sizes, given.q_layout, given.batch, branches)
        ]
        for kind, given in spread.items()
    }
    if hardware is None or not 1 < problem.world_size <= LAYOUTS_UP_TO:
        even = _most_even(spread)
        fewest = min(even, key=lambda kind: _wire_bytes(spread[kind], scans[kind]))
        return spread[fewest], {}
    seconds = {}
    for kind, given in spread.items():
        times = (
            _seconds(given, hardware, forward=forward, ranks_per_node=ranks_per_node)
            for forward in (True, False)
        )
        # Layers of the same sizes have equal scans.
        counts = Counter(scans[kind])
        seconds[kind] = sum(times) + sum(
            count * scan_seconds(scan, hardware) for scan, count in counts.items()
        )
    return spread[min(seconds, key=seconds.__getitem__)], seconds


def whole_layout(
    problem: Problem, hardware: Hardware | None, *, ranks_per_node: int, token_cells: float
) -> Layout:
    """The layout of whole documents that cuts as many of them as pay; a balanced one where that is
    faster.

    Layouts that tolerate more or less unevenness are forecast, forward and backward, with the
    programs that send the fewest bytes, and with the tokens of the rank that has the most. Where no
    machine is known, and above 16 ranks, a rank may have 5 percent above its share. problem: with
    as many keys as queries, in any layout. token_cells: see `make_layout`. Local; the same on every
    rank.
    """
    size = (problem.q_layout.seq_len, problem.world_size)
    if hardware is None or not 1 < problem.world_size <= _WHOLE_UP_TO:
        return make_layout(WHOLE, *size, problem.mask, token_cells)
    layouts = dict.fromkeys(
        make_layout(WHOLE, *size, problem.mask, token_cells, tolerance) for tolerance in _TOLERANCES
    )
    if len(layouts) == 1:  # documents are even without cuts, as many short ones are
        return next(iter(layouts))
    known: Hardware = hardware
    rate = known.device.rates.get("linear") or known.device.rates["default"]
    layouts[make_layout(BALANCED, *size, problem.mask)] = None
    # Other layers' weights have a product in the forward, and two in the backward.
    flops = 3 * 2 * token_cells * problem.num_heads * (problem.head_dim + problem.v_head_dim)

    def seconds(layout: Layout) -> float:
        given = replace(problem, q_layout=layout, kv_layout=layout)
        tokens = max(map(layout.shard_len, range(problem.world_size))) * problem.batch
        return rate.seconds(Cost(flops=int(flops * tokens))) + sum(
            forecast(given, "auto", known, forward=forward, ranks_per_node=ranks_per_node).time_s
            for forward in (True, False)
        )

    return min(layouts, key=seconds)


def _seconds(problem: Problem, hardware: Hardware, *, forward: bool, ranks_per_node: int) -> float:
    """Seconds forecast for a direction with the strategy that a planner takes."""
    if problem.world_size <= FORECAST_UP_TO:
        ranking = rank_strategies(problem, hardware, forward=forward, ranks_per_node=ranks_per_node)
        return ranking.time_s
    return forecast(
        problem, "auto", hardware, forward=forward, ranks_per_node=ranks_per_node
    ).time_s


def _most_even(problems: Mapping[str, Problem]) -> list[str]:
    """The layouts whose busiest rank has the fewest cells, or nearly so."""
    work = {}
    for kind, problem in problems.items():
        sides = (problem.q_layout, problem.kv_layout)
        programs = (choose(problem, "auto", forward=forward).program for forward in (True, False))
        cells = [evenness(program, *sides).cells for program in programs]
        work[kind] = sum(products * number for products, number in zip(_WORK, cells, strict=True))
    most = min(work.values()) * (1 + _EVEN)
    return [kind for kind, amount in work.items() if amount <= most]


def _wire_bytes(problem: Problem, scans: list[Scan]) -> int:
    programs = (choose(problem, "auto", forward=forward).program for forward in (True, False))
    return sum(x.wire_bytes() for x in programs) + sum(x.wire_bytes() for x in scans)
