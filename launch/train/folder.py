"""The folder of a run: `metrics.jsonl`, `loss.png`, `machine.toml`, `checkpoints/`, `model/`.

Only rank 0 touches the disk. Its failure is a ConfigError on every rank.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path

from burst_rt.context import Context
from burst_rt.job.reports import say_resume
from burst_rt.launch.train.checkpoint import (
    Checkpoint,
    checkpoints_of,
    save_checkpoint,
    save_folder,
)
from burst_rt.launch.train.claim import Claim, claim
from burst_rt.launch.train.config import MACHINE_FILE
from burst_rt.launch.train.report import MetricsFile, StepRecord, plot_loss
from burst_rt.planning.machines import to_toml

__all__ = ["RunFolder"]


class RunFolder:
    """A run's folder, which no other run gets until `release`. Every method but `append` and
    `release` is collective.
    """

    def __init__(
        self, world: Context, out: Path | None, *, resume: bool, elastic: bool = False
    ) -> None:
        """Take the folder as `claim` says."""
        self._world = world
        # A run that had to change its groups may have to again.
        self._how = "--elastic" if elastic else "--resume"
        # Both on rank 0 alone.
        self._claim: Claim | None = None
        self._metrics: MetricsFile | None = None

        def take() -> tuple[bytes, bool]:
            self._claim = claim(out, resume=resume, elastic=elastic)
            # A name need not be Unicode.
            return os.fsencode(self._claim.path), bool(checkpoints_of(self._claim.path))

        path, self.has_checkpoints = world.first(take)
        self.path = Path(os.fsdecode(path))

    def release(self) -> None:
        """Let other runs have the folder."""
        if self._claim is not None:
            self._claim.release()

    def open_metrics(self, *, after_step: int) -> None:
        """Keep the metrics up to `after_step`, and append to them from now on."""

        def read() -> None:
            self._metrics = MetricsFile(self.path / "metrics.jsonl", after_step=after_step)

        self._world.first(read)

    def append(self, record: StepRecord) -> None:
        """Add a line to the metrics. Not collective, as it happens at every step."""
        if self._metrics is not None:
            self._metrics.append(record)

    def save(self, checkpoint: Checkpoint, *, keep: int) -> None:
        """Write a checkpoint; from then on a launcher whose job fails says how to go on."""

        def save() -> None:
            save_checkpoint(self.path, checkpoint, keep=keep)
            self._save_machine()
            say_resume(self.resume_command)

        self._world.first(save)

    def _save_machine(self) -> None:
        """Write what strategies were planned with, so that a run that is resumed plans alike."""
        hardware, path = self._world.runtime.machine.hardware, self.path / MACHINE_FILE
        if hardware is not None and not path.exists():
            path.write_text(to_toml(hardware), encoding="utf-8")

    def save_model(self, save: Callable[[Path], object]) -> None:
        """Let `save` write the folder of the trained model."""
        self._world.first(lambda: save_folder(self.path / "model", save))

    def conclude(self, title: str, unit: str) -> None:
        """Complete the metrics, and draw the loss curve, in nats a `unit`."""

        def write() -> None:
            if self._metrics is not None:
                self._metrics.complete()
            plot_loss(self.history, self.path / "loss.png", title=title, unit=unit)

        self._world.first(write)

    @property
    def history(self) -> list[StepRecord]:
        """The run's records so far; empty on ranks other than 0."""
        return self._metrics.history if self._metrics is not None else []

    @property
    def resume_command(self) -> str:
        """The command that goes on with the run."""
        num_ranks = self._world.world_size
        ranks = f" -n {num_ranks}" if num_ranks > 1 else ""
        return f"burst-rt train{ranks} {self._how} --out {shlex.quote(str(self.path))}"
