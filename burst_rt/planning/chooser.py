"""What planners choose with: strategies by forecasts where a machine is known, and layouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from burst_rt.planning.caches import kept_results
from burst_rt.planning.choose import choose
from burst_rt.planning.evenness import evenness
from burst_rt.planning.layouts import BALANCED, TOLERANCE, WHOLE, Layout, make_layout
from burst_rt.planning.masks import branches_of
from burst_rt.planning.problem import Problem
from burst_rt.planning.recurrences import RecurrenceSizes
from burst_rt.planning.recurrent_layers import scan_seconds, scans_of
from burst_rt.planning.scan import Scan
from burst_rt.planning.strategies import Choice
from burst_rt.scheduler import Cost

if TYPE_CHECKING:
    from burst_rt.planning.ranking import Ranking
    from burst_rt.scheduler.simulator import Hardware

__all__ = ["LAYOUTS", "LAYOUTS_UP_TO", "Chooser", "fastest_layout", "whole_layout"]

# The layouts that are chosen from; among equals the first is taken.
LAYOUTS = ("zigzag", "contiguous", "striped", BALANCED)
# The largest world with forecasts of layouts. Forecasts of four layouts take about four seconds on
# 16 ranks, three on 32, fifteen on 64.
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
        keep = kept_results(capacity, lambda problem, _: problem.mask)
        self._ranking = keep(self._rank)
        self._layout = keep(self._suit)

    def choose(self, problem: Problem, strategy: str, *, forward: bool) -> Choice:
        """The program for one direction; "auto" is forecast, except in very large worlds.

        Raises InputError for a strategy that this problem does not allow.
        """
        per_node = self._ranks_per_node
        if strategy == "auto" and self.hardware is not None:
            # Most jobs have no machine file, and do without the simulator.
            from burst_rt.planning.ranking import fastest_strategy, is_forecast, typical

            if is_forecast(problem, per_node):
                return fastest_strategy(
                    problem, self.hardware, forward=forward, ranks_per_node=per_node,
                    ranking=self._ranking(typical(problem), forward),
                )  # fmt: skip
        return choose(problem, strategy, forward=forward, ranks_per_node=per_node)

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
        self._ranking.forget()
        self._layout.forget()

    def _rank(self, problem: Problem, forward: bool) -> Ranking:
        from burst_rt.planning.ranking import rank_strategies

        assert self.hardware is not None
        return rank_strategies(
            problem, self.hardware, forward=forward, ranks_per_node=self._ranks_per_node
        )

    def _suit(self, problem: Problem, recurrences: tuple[RecurrenceSizes, ...]) -> Layout:
        suited, _ = fastest_layout(
            problem, self.hardware, ranks_per_node=self._ranks_per_node, recurrences=recurrences
        )
        return suited.q_layout


def fastest_layout(
    problem: Problem,
    hardware: Hardware | None,
    *,
    ranks_per_node: int,
    recurrences: tuple[RecurrenceSizes, ...] = (),
) -> tuple[Problem, dict[str, float]]:
    """The problem with the layout under which it is forecast to end first, and all forecasts.

    A forecast is the sum of forward and backward, each with the strategy that a planner takes under
    the mask itself (see `fastest_strategy`). problem: with as many keys as queries, in any layout.
    Where no machine is known, and above 64 ranks, nothing is forecast: among the layouts whose
    cells are within 5 percent of the most even one's, the one that sends the fewest bytes is taken.
    recurrences: the layers that take turns with a layer of attention; they add their time and
    bytes, and leave out striped layouts.
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
    from burst_rt.planning.ranking import forecast

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
    from burst_rt.planning.ranking import rank_strategies

    ranking = rank_strategies(problem, hardware, forward=forward, ranks_per_node=ranks_per_node)
    return ranking.time_s


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
