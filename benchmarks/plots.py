"""Plots of benchmarks: forecasts over measurements, and lines over a size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from burst_rt.launch.measure.plots import COLOURS, Rows, new_figure, save_figure

__all__ = ["draw_lines", "draw_scatter"]

_MARKERS = "osD^vPX*"


def draw_scatter(path: Path, rows: Rows, x: str, y: str, *, by: str, title: str) -> None:
    """Draws `y` over `x`, both logarithmic, with a series for each value of `by`.

    The diagonal is where `x` and `y` are equal.
    """
    figure, axes = new_figure(title, x, y)
    for number, name in enumerate(dict.fromkeys(str(row[by]) for row in rows)):
        points = [(float(row[x] or 0), float(row[y] or 0)) for row in rows if row[by] == name]
        axes.plot(
            *zip(*points, strict=True),
            _MARKERS[number % 8],
            color=COLOURS[number % 8],
            label=name,
            alpha=0.8,
        )
    places = [float(row[x] or 0) for row in rows]
    low, high = min(places), max(places)
    axes.plot([low, high], [low, high], color="grey", linewidth=1, zorder=0)
    axes.set_xscale("log")
    axes.set_yscale("log")
    save_figure(figure, axes, path)


def draw_lines(
    path: Path, rows: Rows, x: str, columns: Sequence[str], *, ylabel: str, title: str
) -> None:
    """Draws a line for each column over `x`."""
    figure, axes = new_figure(title, x, ylabel)
    for number, name in enumerate(columns):
        points = [
            (float(row[x] or 0), float(row[name] or 0)) for row in rows if row[name] is not None
        ]
        axes.plot(
            *zip(*points, strict=True),
            f"-{_MARKERS[number % 8]}",
            color=COLOURS[number % 8],
            label=name,
        )
    ticks = [row[x] for row in rows]
    axes.set_xticks([float(tick or 0) for tick in ticks], list(map(str, ticks)))
    axes.set_ylim(bottom=0)
    save_figure(figure, axes, path)
