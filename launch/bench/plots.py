"""Benchmarks as pictures (PNG), in colours that colour-blind people can tell apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from burst_rt.launch.bench.report import Cell

__all__ = ["draw_bars", "draw_lines", "draw_scatter"]

# M. Okabe and K. Ito, "Color Universal Design" (2008).
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#F0E442", "#000000")
_MARKERS = "osD^vPX*"

Rows = Sequence[Mapping[str, Cell]]


def draw_scatter(path: Path, rows: Rows, x: str, y: str, *, by: str, title: str) -> None:
    """Draws `y` over `x`, both logarithmic, with a series for each value of `by`.

    The diagonal is where `x` and `y` are equal.
    """
    figure, axes = _figure(title, x, y)
    for number, name in enumerate(dict.fromkeys(str(row[by]) for row in rows)):
        points = [(float(row[x] or 0), float(row[y] or 0)) for row in rows if row[by] == name]
        axes.plot(
            *zip(*points, strict=True),
            _MARKERS[number % 8],
            color=_COLOURS[number % 8],
            label=name,
            alpha=0.8,
        )
    places = [float(row[x] or 0) for row in rows]
    low, high = min(places), max(places)
    axes.plot([low, high], [low, high], color="grey", linewidth=1, zorder=0)
    axes.set_xscale("log")
    axes.set_yscale("log")
    _save(figure, axes, path)


def draw_lines(
    path: Path, rows: Rows, x: str, columns: Sequence[str], *, ylabel: str, title: str
) -> None:
    """Draws a line for each column over `x`."""
    figure, axes = _figure(title, x, ylabel)
    for number, name in enumerate(columns):
        points = [
            (float(row[x] or 0), float(row[name] or 0)) for row in rows if row[name] is not None
        ]
        axes.plot(
            *zip(*points, strict=True),
            f"-{_MARKERS[number % 8]}",
            color=_COLOURS[number % 8],
            label=name,
        )
    ticks = [row[x] for row in rows]
    axes.set_xticks([float(tick or 0) for tick in ticks], list(map(str, ticks)))
    axes.set_ylim(bottom=0)
    _save(figure, axes, path)


def draw_bars(
    path: Path,
    rows: Rows,
    columns: Sequence[str],
    *,
    label: Callable[[Mapping[str, Cell]], str],
    title: str,
) -> None:
    """Draws a group of bars for each row, as multiples of the row's least value.

    Rows of very different sizes can then be seen together.
    """
    figure, axes = _figure(title, "", "times the fastest")
    width = 0.8 / len(columns)
    for number, name in enumerate(columns):
        heights = []
        for row in rows:
            least = min(float(row[c]) for c in columns if row[c] is not None)  # type: ignore[arg-type]
            heights.append(0.0 if row[name] is None else float(row[name] or 0) / least)
        axes.bar(
            [i + number * width for i in range(len(rows))],
            heights,
            width,
            color=_COLOURS[number % 8],
            label=name,
        )
    middles = [i + 0.4 - width / 2 for i in range(len(rows))]
    axes.set_xticks(middles, list(map(label, rows)), rotation=45, ha="right", fontsize=8)
    axes.set_ylim(bottom=0.9)
    _save(figure, axes, path)


def _figure(title: str, xlabel: str, ylabel: str):  # type: ignore[no-untyped-def]  # matplotlib's own types
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.grid(visible=True, alpha=0.3)
    return figure, axes


def _save(figure, axes, path: Path) -> None:  # type: ignore[no-untyped-def]
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
