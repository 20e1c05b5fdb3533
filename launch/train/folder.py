"""The folder of a run: `metrics.jsonl`, `loss.png`, `checkpoints/`. For: writing from rank 0 alone, failing on every rank alike."""

from __future__ import annotations

import os
from datetime import datetime
from itertools import count
from pathlib import Path

from burst_rt.context import Context
from burst_rt.errors import ConfigError
from burst_rt.launch.train.agreement import on_first, share_bytes
from burst_rt.launch.train.checkpoint import Checkpoint, save_checkpoint
from burst_rt.launch.train.metrics import MetricsFile, StepRecord

__all__ = ["RunFolder"]


class RunFolder:
    """Every method is collective but touches the disk on rank 0 only; a failure there is a ConfigError everywhere."""

    def __init__(self, world: Context, out: Path | None, *, resume: bool) -> None:
        """Create the folder (None: runs/train-TIME); one that holds a run already is taken only to `resume` it."""
        self._world = world
        claimed = on_first(world, lambda: _claim(out, resume=resume))
        self.path = Path(os.fsdecode(share_bytes(world, os.fsencode(claimed) if claimed else None)))
        self._metrics: MetricsFile | None = None

    def open_metrics(self, *, after_step: int) -> None:
        self._metrics = on_first(self._world, lambda: MetricsFile(self.path / "metrics.jsonl", after_step=after_step))

    def append(self, record: StepRecord) -> None:
        """Add a line to the metrics; not collective, as it happens at every step. Raises OSError on rank 0."""
        if self._metrics is not None:
            self._metrics.append(record)

    def save(self, checkpoint: Checkpoint, *, keep: int) -> None:
        on_first(self._world, lambda: save_checkpoint(self.path, checkpoint, keep=keep))

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


def _claim(out: Path | None, *, resume: bool) -> Path:
    if out is None:
        return _new_folder(Path("runs", f"train-{datetime.now():%Y%m%d-%H%M%S}"))
    path = out
    if not resume and any((path / name).exists() for name in ("metrics.jsonl", "checkpoints")):
        raise ConfigError(f"--out: {path} already holds a run; add --resume to continue it, or choose another folder.")
    path.mkdir(parents=True, exist_ok=True)
    return path


def _new_folder(path: Path) -> Path:
    """That folder, made now, or one named after it: another run may have begun in the same second."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for number in count(2):
        try:
            path.mkdir()
        except FileExistsError:
            path = path.with_name(f"{path.name.partition('_')[0]}_{number}")
        else:
            break
    return path
