"""Benchmarks as pictures (PNG), in colours that colour-blind people can tell apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from burst_rt.launch.measure.report import Cell

__all__ = ["COLOURS", "Rows", "draw_bars", "new_figure", "save_figure"]

# M. Okabe and K. Ito, "Color Universal Design" (2008).
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#F0E442", "#000000")

Rows = Sequence[Mapping[str, Cell]]


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
    figure, axes = new_figure(title, "", "times the fastest")
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
            color=COLOURS[number % 8],
            label=name,
        )
    middles = [i + 0.4 - width / 2 for i in range(len(rows))]
    axes.set_xticks(middles, list(map(label, rows)), rotation=45, ha="right", fontsize=8)
    axes.set_ylim(bottom=0.9)
    save_figure(figure, axes, path)


def new_figure(title: str, xlabel: str, ylabel: str):  # type: ignore[no-untyped-def]  # matplotlib's own types
    """A figure with a title and a grid, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.grid(visible=True, alpha=0.3)
    return figure, axes


def save_figure(figure, axes, path: Path) -> None:  # type: ignore[no-untyped-def]
    """Writes the figure with a legend; the folder is made."""
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
