"""The loss curve as a picture. For: a look at a finished run. Not for: live views, which are the
dashboard's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from burst_rt.launch.train.metrics import StepRecord

__all__ = ["plot_loss"]

_RAW, _SMOOTH, _HELDOUT, _TEXT = "#b8c4d6", "#1f4e8c", "#c8501e", "#444444"
_SMOOTHING = 0.8


def plot_loss(records: Sequence[StepRecord], path: Path, *, title: str) -> None:
    """Write training and held-out loss over steps as a PNG. Raises OSError; needs no display."""
    steps = [record.step for record in records]
    heldout = [
        (record.step, record.heldout_loss) for record in records if record.heldout_loss is not None
    ]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(
        steps,
        [record.loss for record in records],
        color=_RAW,
        linewidth=1,
        label="training, each step",
    )
    axes.plot(
        steps,
        _smoothed([record.loss for record in records]),
        color=_SMOOTH,
        linewidth=2,
        label="training, smoothed",
    )
    if heldout:
        axes.plot(
            *zip(*heldout, strict=True),
            "o-",
            color=_HELDOUT,
            linewidth=1,
            markersize=6,
            label="held-out",
        )
    axes.set_title(title, loc="left", fontsize=11, color=_TEXT)
    axes.set_xlabel("step", color=_TEXT)
    axes.set_ylabel("loss (nats per byte)", color=_TEXT)
    axes.tick_params(colors=_TEXT)
    axes.grid(axis="y", color="#e6e6e6")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, labelcolor=_TEXT)
    figure.savefig(path, dpi=150)


def _smoothed(values: Sequence[float]) -> list[float]:
    """Exponential moving average, corrected for its start, so that the first point is the first
    value.
    """
    average, weight, smoothed = 0.0, 0.0, []
    for value in values:
        average = _SMOOTHING * average + (1 - _SMOOTHING) * value
        weight = _SMOOTHING * weight + (1 - _SMOOTHING)
        smoothed.append(average / weight)
    return smoothed
