"""Numbers over time, of bounded size.

The last ten minutes are kept as they came, an hour and a half as means of 5 s, a day as means of a
minute.

One `SourceHistory` holds all metrics of one source: rows of float32, and one float64 time a row. A
metric that a row lacks is NaN there. Older samples than the coarsest level holds are gone; a record
keeps everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["FULL_S", "SourceHistory"]

FULL_S = 600.0
# The coarser levels: seconds that a row covers, and number of rows.
_COARSER = ((5.0, 1080), (60.0, 1440))
_FIRST_ROWS = 64


class _Ring:
    """The last `capacity` rows. Grows as it fills, so that a short run takes little memory."""

    def __init__(self, capacity: int, num_columns: int) -> None:
        self.capacity = capacity
        self.times = np.empty(min(_FIRST_ROWS, capacity))
        self.values = np.empty((len(self.times), num_columns), np.float32)
        self.count = 0  # ever added

    def add(self, at_s: float, row: npt.NDArray[np.float32]) -> None:
        if self.count == len(self.times) < self.capacity:
            size = min(2 * self.count, self.capacity)
            self.times = np.resize(self.times, size)
            self.values = np.resize(self.values, (size, self.values.shape[1]))
        i = self.count % len(self.times)
        self.times[i] = at_s
        self.values[i] = row
        self.count += 1

    def widen(self, num_columns: int) -> None:
        wider = np.full((len(self.times), num_columns), np.nan, np.float32)
        wider[:, : self.values.shape[1]] = self.values
        self.values = wider

    def window(
        self, since_s: float, until_s: float
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float32]]:
        """Rows in order of time, copied."""
        count = min(self.count, len(self.times))
        order = np.arange(self.count - count, self.count) % len(self.times)
        inside = order[(self.times[order] >= since_s) & (self.times[order] <= until_s)]
        return self.times[inside], self.values[inside]

    @property
    def first_s(self) -> float:
        """Time of the oldest row, infinity without any."""
        if self.count == 0:
            return np.inf
        return float(
            self.times[self.count % len(self.times) if self.count > len(self.times) else 0]
        )


class SourceHistory:
    """See the module. rows_per_s: how many rows a second are kept for ten minutes; rows that come
    faster are kept for less time.
    """

    def __init__(self, rows_per_s: float = 5.0) -> None:
        self.metrics: list[str] = []
        self._column: dict[str, int] = {}
        self._full = _Ring(max(1, round(FULL_S * rows_per_s)), 0)
        self._coarse = [_Ring(rows, 0) for _, rows in _COARSER]
        # For each coarser level its next row, which is a mean of rows of the level below: when the
        # time of that row ends, and the first row below that belongs to it.
        self._bucket = [(-np.inf, 0) for _ in _COARSER]

    def add(self, at_s: float, values: Mapping[str, float]) -> None:
        """Appends one row; times must not go back."""
        for name in values:
            if name not in self._column:
                self._column[name] = len(self.metrics)
                self.metrics.append(name)
        if len(self.metrics) > self._full.values.shape[1]:
            for ring in (self._full, *self._coarse):
                ring.widen(len(self.metrics))
        self._thin(at_s)
        row = np.full(len(self.metrics), np.nan, np.float32)
        with np.errstate(over="ignore"):  # values beyond float32 are infinite
            for name, value in values.items():
                row[self._column[name]] = value
        self._full.add(at_s, row)

    def _thin(self, at_s: float) -> None:
        """Adds the coarser rows whose time is over."""
        below = self._full
        for level, (step_s, _) in enumerate(_COARSER):
            end_s, first = self._bucket[level]
            if at_s < end_s:
                return
            first = max(first, below.count - len(below.times))
            if below.count > first:
                rows = np.arange(first, below.count) % len(below.times)
                self._coarse[level].add(below.times[rows[-1]], _mean(below.values[rows]))
            self._bucket[level] = (at_s + step_s, below.count)
            below = self._coarse[level]

    def window(
        self, since_s: float, until_s: float, metrics: Sequence[str] = (), max_rows: int = 2000
    ) -> tuple[npt.NDArray[np.float64], dict[str, npt.NDArray[np.float32]]]:
        """Times and values of a window, in order. Each part of the window comes from the finest
        level that still has it. Beyond `max_rows` rows, neighbours become their mean.
        """
        until = until_s
        times: list[npt.NDArray[np.float64]] = []
        values: list[npt.NDArray[np.float32]] = []
        for ring in (self._full, *self._coarse):
            rows = ring.window(since_s, until)
            times.insert(0, rows[0])
            values.insert(0, rows[1])
            until = min(until, np.nextafter(ring.first_s, -np.inf))
        time, value = np.concatenate(times), np.concatenate(values)
        every = max(1, -(-len(time) // max(1, max_rows)))
        if every > 1:
            # Every n-th row would not do: a source's samples and its rates come in turns.
            missing = -len(time) % every
            value = np.pad(value, ((0, missing), (0, 0)), constant_values=np.nan)
            value = _mean(value.reshape(-1, every, value.shape[1]), 1)
            time = np.append(time[every - 1 :: every], time[-1:] if missing else [])
        return time, {
            name: value[:, self._column[name]]
            for name in (metrics or self.metrics)
            if name in self._column
        }

    @property
    def size_bytes(self) -> int:
        """Memory of the arrays."""
        return sum(ring.times.nbytes + ring.values.nbytes for ring in (self._full, *self._coarse))


def _mean(rows: npt.NDArray[np.float32], axis: int = 0) -> npt.NDArray[np.float32]:
    """The mean of each column over the rows that have it; NaN where none has."""
    has_value = ~np.isnan(rows)
    with np.errstate(invalid="ignore"):
        mean: npt.NDArray[np.float32] = (
            np.where(has_value, rows, 0).sum(axis) / has_value.sum(axis)
        ).astype(np.float32)
    return mean
