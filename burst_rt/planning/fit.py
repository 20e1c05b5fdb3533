"""From measured tasks to rates: least squares of relative errors, without negative coefficients.

Pure; numpy only.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

import numpy as np

from burst_rt.scheduler import Cost
from burst_rt.scheduler.simulator import Link, Nics, Rate

__all__ = ["Sample", "fit_cards", "fit_link", "fit_rate", "fit_rates"]

# Maximum difference of the relative errors of equally good fits.
_ROUNDING = 1e-9


class Sample(NamedTuple):
    """A task that ran."""

    name: str  # name of the task's rate, such as "forward" or "forward-untiled"
    cost: Cost
    seconds: float


def fit_rates(samples: Iterable[Sample]) -> dict[str, Rate]:
    """A rate for each name; "default" is the rate of all samples that do no arithmetic.

    Needs at least one sample that does no arithmetic.
    """
    named: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        named[sample.name].append(sample)
        if not sample.cost.flops:
            named["default"].append(sample)
    return {name: fit_rate(of) for name, of in sorted(named.items())}


def fit_rate(samples: Iterable[Sample]) -> Rate:
    """The rate that comes closest, in relative terms, to the medians of equal tasks.

    The rate has a speed of memory, and a speed of arithmetic where the tasks do any.
    """
    at: dict[Cost, list[float]] = defaultdict(list)
    for sample in samples:
        at[sample.cost].append(sample.seconds)
    costs = list(at)
    took = np.array([statistics.median(at[cost]) for cost in costs])
    if any(cost.flops for cost in costs):
        # Kernels that cut along the mask lose time at the mask's edge; other kernels lose time
        # everywhere under the mask.
        columns = np.array(
            [
                (1.0, cost.flops, cost.masked_flops, cost.edge_flops, cost.size_bytes)
                for cost in costs
            ]
        )
        launch, flop, masked, edge, byte = _fit(columns, took)
        # A rate's speed is the speed without a mask. If every task had a mask, the speed under the
        # mask replaces it.
        flop, masked = (flop, masked) if flop else (masked, 0.0)
        memory = 1 / byte if byte else None
        if not flop:
            return Rate(launch, bytes_per_s=memory)
        return Rate(
            launch,
            1 / flop,
            memory,
            masked=flop / (flop + masked) if masked else None,
            edge=edge / flop if edge else None,
        )
    launch, byte = _fit(np.array([(1.0, cost.size_bytes) for cost in costs]), took)
    return Rate(launch, bytes_per_s=1 / byte if byte else None)


def fit_link(seconds_by_size: Mapping[int, float]) -> Link:
    """A link, from the seconds of a message of each size in both directions at once.

    Where large messages took no longer than small ones, other work on the machine has hidden what a
    byte costs. Then the largest message alone gives the speed, which is too low by what a call
    costs, and the latency is 0.
    """
    latency_s, byte = _fit(
        np.array([(1.0, size) for size in seconds_by_size]),
        np.array(list(seconds_by_size.values())),
    )
    if not byte:
        largest = max(seconds_by_size)
        latency_s, byte = 0.0, seconds_by_size[largest] / largest
    return Link(latency_s, 1 / byte, 1.0, "full")


def fit_cards(link: Link, alone_per_s: float, num_ranks: int) -> Nics:
    """The network cards that the ranks of a host share.

    link: to another host, while all `num_ranks` ranks of each host send. alone_per_s: bytes a
    second while one of them sends. A rank that is twice as fast alone shares its card with one
    other.
    """
    together_per_s = num_ranks * link.bytes_per_s
    count = min(max(round(together_per_s / alone_per_s), 1), num_ranks)
    return Nics(count, replace(link, bytes_per_s=together_per_s / count))


def _fit(
    columns: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
    took: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
) -> list[float]:
    """The coefficients, none negative, with the least sum of squares of relative errors.

    All choices of columns are tried. Among equally good choices, the choice with the fewest columns
    is taken. An error in a task that takes sixteen times as long counts twice: forecasts are for
    long runs, which consist of long tasks.
    """
    weight = (took / took.max()) ** 0.25
    relative = columns * (weight / took)[:, None]
    # Scale all columns to one size: the tiny coefficient of bytes would be lost among the others.
    scale = np.maximum(np.abs(relative).max(axis=0), 1e-300)
    # A smaller difference is rounding, which varies from CPU to CPU. The fit with fewer columns
    # comes first, and then stays.
    rounding = _ROUNDING**2 * float((weight**2).sum())
    best, best_error = np.zeros(columns.shape[1]), float("inf")
    for count in range(1, columns.shape[1] + 1):
        for chosen in combinations(range(columns.shape[1]), count):
            part = list(chosen)
            solution, *_ = np.linalg.lstsq(relative[:, part] / scale[part], weight, rcond=None)
            error = float(((relative[:, part] / scale[part] @ solution - weight) ** 2).sum())
            if (solution >= 0).all() and error < best_error * (1 - 1e-9) - rounding:
                best, best_error = np.zeros(columns.shape[1]), error
                best[part] = solution / scale[part]
    return [float(value) for value in best]
