"""What a person sees of a run: a heading, progress, a table at the end. For: rank 0's terminal or
log. Not for: files.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from burst_rt.launch.train.config import ProgressMode
from burst_rt.launch.train.metrics import StepRecord

__all__ = ["LAST_STEPS", "Report", "Summary", "choose_mode"]

LAST_STEPS = 10
_LINE_EVERY = 10
_LOG_WIDTH = 100


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A finished run. Losses in nats a byte: of the first step, and the mean of the last ten.

    `resumed_after` is the step it was continued after, 0 where it was not: speed, communication and
    time are since then.
    """

    world_size: int
    data_parallel: int
    context_parallel: int
    num_parameters: int
    steps: int
    resumed_after: int
    loss_first: float
    loss_last: float
    heldout_loss: float
    heldout_perplexity: float
    tokens_per_s: float
    wait_fraction: float
    bytes_sent: int
    elapsed_s: float
    out: str

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def choose_mode(mode: ProgressMode, world_size: int) -> ProgressMode:
    """Resolve "auto". Under mpirun every rank's stdout looks like a terminal, even into a file, so
    only one process may believe it.
    """
    if mode != "auto":
        return mode
    return "bar" if world_size == 1 and sys.stdout.isatty() else "lines"


class Report:
    """Shows a run's progress as a bar, as a line every ten steps, or not at all; a context
    manager.
    """

    def __init__(self, mode: ProgressMode, *, steps: int, done: int) -> None:
        self._mode = mode
        self._steps = steps
        self._first = done
        self._started_s = time.monotonic()
        # Said outright, not detected: under mpirun stdout looks like a terminal even where it is a
        # file.
        shown = mode == "bar"
        self._console = Console(
            force_terminal=shown,
            color_system="auto" if shown else None,
            width=None if shown else _LOG_WIDTH,
            quiet=mode == "none",
            highlight=False,
        )
        news = TextColumn("{task.fields[news]}", markup=False)
        columns = (
            TextColumn("step"),
            BarColumn(),
            MofNCompleteColumn(),
            news,
            TextColumn("eta"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=self._console, disable=mode != "bar")
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
            self.say(
                f"{place}  {news}  eta {timedelta(seconds=round(self._remaining_s(record.step)))}"
            )
        if record.heldout_loss is not None:
            self.say(
                f"{place}  held-out loss {record.heldout_loss:.3f}, perplexity "
                f"{record.heldout_perplexity:.2f}"
            )

    def conclude(self, summary: Summary) -> None:
        """Draw the table of a finished run."""
        since = f" since step {summary.resumed_after}" if summary.resumed_after else ""
        now = (
            f", {summary.steps - summary.resumed_after} of them now"
            if summary.resumed_after
            else ""
        )
        table = Table(title="training finished", title_justify="left", show_header=False)
        table.add_row(
            "ranks",
            f"{summary.world_size} ({summary.data_parallel} data x {summary.context_parallel} "
            "context)",
        )
        table.add_row("steps", f"{summary.steps}{now}")
        table.add_row(
            "training loss",
            f"{summary.loss_first:.4f} at the first step, {summary.loss_last:.4f} over the last "
            f"{LAST_STEPS}",
        )
        table.add_row(
            "held-out",
            f"loss {summary.heldout_loss:.4f} nats per byte, perplexity "
            f"{summary.heldout_perplexity:.3f}",
        )
        table.add_row(f"speed{since}", f"{summary.tokens_per_s:,.0f} tokens/s")
        table.add_row(
            f"communication{since}",
            f"{summary.bytes_sent / 1e6:,.1f} MB sent by attention; compute waited "
            f"{summary.wait_fraction:.2%} of the time",
        )
        table.add_row(f"time{since}", f"{summary.elapsed_s:.1f} s")
        table.add_row("written", escape(f"{summary.out}/ (metrics.jsonl, loss.png, checkpoints/)"))
        self._bar.stop()
        self._console.print(table)

    def _remaining_s(self, step: int) -> float:
        return (
            (time.monotonic() - self._started_s) / max(1, step - self._first) * (self._steps - step)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()
