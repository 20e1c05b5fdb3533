"""From measured tasks to rates: least squares in relative terms, with coefficients that are not
negative. Pure; numpy only.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import NamedTuple

import numpy as np

from burst_rt.scheduler import Cost
from burst_rt.scheduler.simulator import Link, Rate

__all__ = ["Sample", "fit_link", "fit_rate", "fit_rates"]

# Fits whose relative errors differ by less than this are equally good.
_ROUNDING = 1e-9


class Sample(NamedTuple):
    """A task that ran: its rate's name ("forward", "forward-untiled"), what it cost, how long it
    took.
    """

    name: str
    cost: Cost
    seconds: float


def fit_rates(samples: Iterable[Sample]) -> dict[str, Rate]:
    """A rate for each name, and "default": of all samples that do no arithmetic together. Needs at
    least one such sample.
    """
    named: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        named[sample.name].append(sample)
        if not sample.cost.flops:
            named["default"].append(sample)
    return {name: fit_rate(of) for name, of in sorted(named.items())}


def fit_rate(samples: Iterable[Sample]) -> Rate:
    """The rate that comes closest to the medians of equal tasks, relatively: of arithmetic, if
    there is any, and memory.
    """
    at: dict[Cost, list[float]] = defaultdict(list)
    for sample in samples:
        at[sample.cost].append(sample.seconds)
    costs = list(at)
    took = np.array([statistics.median(at[cost]) for cost in costs])
    if any(cost.flops for cost in costs):
        # Kernels that cut along the mask lose time at its edge, kernels that do not, everywhere
        # under it.
        columns = np.array(
            [
                (1.0, cost.flops, cost.masked_flops, cost.edge_flops, cost.size_bytes)
                for cost in costs
            ]
        )
        launch, flop, masked, edge, byte = _fit(columns, took)
        # A rate has one speed for what no mask touches; where none was seen, the mask's own is that
        # speed.
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
    """A link from the time of a message of each size, both directions at once."""
    latency_s, byte = _fit(
        np.array([(1.0, size) for size in seconds_by_size]),
        np.array(list(seconds_by_size.values())),
    )
    return Link(latency_s, 1 / byte, 1.0, "full")


def _fit(
    columns: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
    took: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
) -> list[float]:
    """Coefficients, none negative, with the least sum of squares of relative errors: the best of
    all choices of columns.

    Of equally good choices the one with the fewest columns is taken. An error in a task that takes
    sixteen times as long counts twice: forecasts are of long runs, and made of long tasks.
    """
    weight = (took / took.max()) ** 0.25
    relative = columns * (weight / took)[:, None]
    # Columns of one size, or a byte's tiny coefficient would be lost in a second's.
    scale = np.maximum(np.abs(relative).max(axis=0), 1e-300)
    # Below this a difference is rounding, which is another one on another CPU: the fit with fewer
    # columns, which comes first, stays.
    rounding = _ROUNDING**2 * float((weight**2).sum())
    best, best_error = np.zeros(columns.shape[1]), float("inf")
    for count in range(1, columns.shape[1] + 1):
        for chosen in combinations(range(columns.shape[1]), count):
            part = list(chosen)
            found, *_ = np.linalg.lstsq(relative[:, part] / scale[part], weight, rcond=None)
            error = float(((relative[:, part] / scale[part] @ found - weight) ** 2).sum())
            if (found >= 0).all() and error < best_error * (1 - 1e-9) - rounding:
                best, best_error = np.zeros(columns.shape[1]), error
                best[part] = found / scale[part]
    return [float(value) for value in best]
