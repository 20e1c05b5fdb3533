"""What a run tells: its metrics and loss curve as files, and what a person sees in a terminal.

`metrics.jsonl` has one line of JSON a step and outlives the run; `loss.png` is drawn from it. Rank
0's terminal or log gets a heading, progress, and a table at the end. Live views are the
dashboard's.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from burst_rt.launch.train.config import ProgressMode

__all__ = [
    "MetricsFile", "Report", "StepRecord", "plot_loss",
]  # fmt: skip

_LINE_EVERY = 10
_LOG_WIDTH = 100
# Colours of the loss curve, and the part of the average that a step leaves as it was.
_RAW, _SMOOTH, _HELDOUT, _TEXT = "#b8c4d6", "#1f4e8c", "#c8501e", "#444444"
_SMOOTHING = 0.8
_log = logging.getLogger("burst_rt.train")


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step of a run; a line of metrics.jsonl."""

    # Number of the step, from 1.
    step: int
    # Nats a token (of the byte-level model: a byte), over the global batch.
    loss: float
    lr: float
    grad_norm: float
    step_s: float
    # Speed of the whole world.
    tokens_per_s: float
    # Part of the step for which compute waited for a transfer of attention, averaged over ranks.
    wait_fraction: float
    # Bytes that attention sends, all ranks together.
    bytes_sent: int
    # None where held-out text was not measured at this step.
    heldout_loss: float | None = None
    heldout_perplexity: float | None = None


class MetricsFile:
    """Appends records to `path`. `history` holds the records kept of an earlier run and those
    appended since.
    """

    def __init__(self, path: Path, *, after_step: int) -> None:
        """Keep the file's records up to `after_step`: an interrupted run may have gone further than
        its checkpoint. A damaged file is set aside under another name, and a warning says so, and
        which steps have no record. Raises OSError.
        """
        self._path = path
        is_there = path.exists()
        records, is_whole = _read(path)
        self.history = [record for record in records if 0 < record.step <= after_step]
        aside = None if is_whole else _set_aside(path)
        missing = sorted(set(range(1, after_step + 1)) - {record.step for record in self.history})
        if aside or missing:
            _log.warning(
                "burst-rt: %s is %s%s: %s; the run goes on",
                path,
                "damaged" if is_there else "missing",
                f", and is kept as {aside.name}" if aside else "",
                f"{_ranges(missing)} {'has' if len(missing) == 1 else 'have'} no record"
                if missing
                else "no record is lost",
            )
        self._is_whole = True  # whether the file has all of `history`
        self._write_all()

    def append(self, record: StepRecord) -> None:
        """Add a record. Where it cannot be written now (a quota, a file server that restarts), a
        warning says so, and a later record is written with all that the file lacks.
        """
        self.history.append(record)
        try:
            if not self._is_whole:
                self._write_all()
                return
            # The file is opened for each line: a step takes far longer, and a killed run leaves at
            # most its last line short.
            with self._path.open("a") as file:
                file.write(_line(record))
        except OSError as error:
            if self._is_whole:
                _log.warning(
                    "burst-rt: step %d is not in %s yet: %s; the run goes on, and the file is "
                    "written again with a later step",
                    record.step,
                    self._path,
                    error,
                )
            self._is_whole = False

    def complete(self) -> None:
        """Write what the file lacks. Raises OSError."""
        if not self._is_whole:
            self._write_all()

    def _write_all(self) -> None:
        temporary = self._path.with_name(f".writing-{self._path.name}")
        temporary.write_text("".join(_line(record) for record in self.history))
        os.replace(temporary, self._path)
        self._is_whole = True


def _line(record: StepRecord) -> str:
    return json.dumps(asdict(record)) + "\n"


def _read(path: Path) -> tuple[list[StepRecord], bool]:
    """The records in the order of their steps, and whether the file has nothing else, apart from a
    last line that was cut as it was written.
    """
    if not path.exists():
        return [], True
    records: dict[int, StepRecord] = {}
    lines = path.read_bytes().split(b"\n")
    readable = [record for line in lines[:-1] if (record := _record(line)) is not None]
    for record in readable:
        records.setdefault(record.step, record)
    is_whole = len(records) == len(lines) - 1 and (not lines[-1] or _is_text(lines[-1]))
    return [records[step] for step in sorted(records)], is_whole


def _record(line: bytes) -> StepRecord | None:
    try:
        return msgspec.convert(json.loads(line), StepRecord)
    except (ValueError, RecursionError):
        return None


def _is_text(line: bytes) -> bool:
    try:
        return line.decode().isprintable()
    except UnicodeDecodeError:
        return False


def _set_aside(path: Path) -> Path:
    """Copies a damaged file to a name that nothing has, for a person to look at."""
    number = next(n for n in count(1) if not path.with_name(f"damaged-{n}-{path.name}").exists())
    aside = path.with_name(f"damaged-{number}-{path.name}")
    shutil.copyfile(path, aside)
    return aside


def _ranges(steps: Sequence[int]) -> str:
    """Steps in words: "step 3", "steps 3 to 9", "steps 3 to 9, 12"."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][-1] + 1:
            runs[-1][1:] = [step]
        else:
            runs.append([step])
    words = [" to ".join(map(str, run)) for run in runs]
    more = f" and {len(words) - 5} more spans" if len(words) > 5 else ""
    return f"step{'s' * (len(steps) > 1)} {', '.join(words[:5])}{more}"


def plot_loss(records: Sequence[StepRecord], path: Path, *, title: str, unit: str) -> None:
    """Write training and held-out loss over steps as a PNG. Raises OSError; needs no display."""
    # matplotlib takes a while to load, and only the rank that draws needs it.
    from matplotlib.figure import Figure

    steps = [record.step for record in records]
    heldout = [
        (record.step, record.heldout_loss) for record in records if record.heldout_loss is not None
    ]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    losses = [record.loss for record in records]
    axes.plot(steps, losses, color=_RAW, linewidth=1, label="training, each step")
    axes.plot(steps, _smoothed(losses), color=_SMOOTH, linewidth=2, label="training, smoothed")
    if heldout:
        points = zip(*heldout, strict=True)
        axes.plot(*points, "o-", color=_HELDOUT, linewidth=1, markersize=6, label="held-out")
    axes.set_title(title, loc="left", fontsize=11, color=_TEXT)
    axes.set_xlabel("step", color=_TEXT)
    axes.set_ylabel(f"loss (nats per {unit})", color=_TEXT)
    axes.tick_params(colors=_TEXT)
    axes.grid(axis="y", color="#e6e6e6")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, labelcolor=_TEXT)
    figure.savefig(path, dpi=150)


def _smoothed(values: Sequence[float]) -> list[float]:
    """Exponential moving average, corrected at its start: the first point is the first value."""
    average, weight, smoothed = 0.0, 0.0, []
    for value in values:
        average = _SMOOTHING * average + (1 - _SMOOTHING) * value
        weight = _SMOOTHING * weight + (1 - _SMOOTHING)
        smoothed.append(average / weight)
    return smoothed


class Report:
    """Shows a run's progress as a bar, as a line every ten steps, or not at all, until `stop`."""

    def __init__(self, mode: ProgressMode, *, steps: int, done: int, world_size: int = 1) -> None:
        if mode == "auto":
            # Under mpirun every rank's stdout looks like a terminal even where it is a file, so
            # only a process on its own may believe it.
            mode = "bar" if world_size == 1 and sys.stdout.isatty() else "lines"
        self._mode = mode
        self._steps = steps
        self._first = done
        self._started_s = time.monotonic()
        shown = mode == "bar"
        self._console = Console(
            # Said outright, not detected, for the same reason.
            force_terminal=shown,
            color_system="auto" if shown else None,
            width=None if shown else _LOG_WIDTH,
            quiet=mode == "none",
            highlight=False,
        )
        self._bar = Progress(
            TextColumn("step"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[news]}", markup=False),
            TextColumn("eta"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not shown,
        )
        self._task = self._bar.add_task("step", total=steps, completed=done, news="")

    def say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False)

    def show(self, record: StepRecord) -> None:
        news = (
            f"loss {record.loss:.3f}  {record.tokens_per_s:,.0f} tokens/s  wait "
            f"{record.wait_fraction:.1%}"
        )
        place = f"step {record.step:>{len(str(self._steps))}}/{self._steps}"
        self._bar.start()
        self._bar.update(self._task, completed=record.step, news=news)
        if self._mode == "lines" and (
            record.step % _LINE_EVERY == 0 or record.step in (self._first + 1, self._steps)
        ):
            taken = record.step - self._first
            elapsed_s = time.monotonic() - self._started_s
            remaining_s = elapsed_s / max(1, taken) * (self._steps - record.step)
            self.say(f"{place}  {news}  eta {timedelta(seconds=round(remaining_s))}")
        if record.heldout_loss is not None:
            self.say(
                f"{place}  held-out loss {record.heldout_loss:.3f}, perplexity "
                f"{record.heldout_perplexity:.2f}"
            )

    def conclude(self, table: Table) -> None:
        """Show the end of the run."""
        self.stop()
        self._console.print(table)

    def stop(self) -> None:
        """Show no more progress."""
        self._bar.stop()
