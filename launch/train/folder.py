"""The folder of a run: `metrics.jsonl`, `loss.png`, `checkpoints/`. For: writing from rank 0 alone,
failing on every rank alike.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from types import TracebackType
from typing import Self

from burst_rt.context import Context
from burst_rt.job.reports import say_resume
from burst_rt.launch.train.agreement import on_first, share_bytes
from burst_rt.launch.train.checkpoint import Checkpoint, save_checkpoint
from burst_rt.launch.train.claim import claim
from burst_rt.launch.train.metrics import MetricsFile, StepRecord

__all__ = ["RunFolder", "resume_command"]


def resume_command(num_ranks: int, folder: Path) -> str:
    """What goes on with the run in `folder`."""
    ranks = f" -n {num_ranks}" if num_ranks > 1 else ""
    return f"burst-rt train{ranks} --resume --out {shlex.quote(str(folder))}"


class RunFolder:
    """Every method is collective but touches the disk on rank 0 only; a failure there is a
    ConfigError everywhere.

    A context manager: until its end no other run gets the folder.
    """

    def __init__(self, world: Context, out: Path | None, *, resume: bool) -> None:
        """See `claim`."""
        self._world = world
        self._claim = on_first(world, lambda: claim(out, resume=resume))
        self.path = Path(
            os.fsdecode(share_bytes(world, os.fsencode(self._claim.path) if self._claim else None))
        )
        self._metrics: MetricsFile | None = None

    def open_metrics(self, *, after_step: int) -> None:
        self._metrics = on_first(
            self._world, lambda: MetricsFile(self.path / "metrics.jsonl", after_step=after_step)
        )

    def append(self, record: StepRecord) -> None:
        """Add a line to the metrics; not collective, as it happens at every step. Raises OSError on
        rank 0.
        """
        if self._metrics is not None:
            self._metrics.append(record)

    def save(self, checkpoint: Checkpoint, *, keep: int) -> None:
        """Write a checkpoint; from then on a launcher whose job fails says how to go on."""

        def save() -> None:
            save_checkpoint(self.path, checkpoint, keep=keep)
            say_resume(resume_command(self._world.world_size, self.path))

        on_first(self._world, save)

    def plot(self, title: str) -> None:
        def draw() -> None:
            # matplotlib takes a while to load, and one rank draws.
            from burst_rt.launch.train.plots import plot_loss

            plot_loss(self.history, self.path / "loss.png", title=title)

        on_first(self._world, draw)

    @property
    def history(self) -> list[StepRecord]:
        """The run's records so far; empty on ranks other than 0."""
        return self._metrics.history if self._metrics is not None else []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._claim is not None:
            self._claim.release()
