"""One line of JSON a step: the record of a run that outlives it.

For: `metrics.jsonl`, the plot and the final table. Not for: live telemetry.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from burst_rt.errors import ConfigError

__all__ = ["MetricsFile", "StepRecord"]


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Step `step` (from 1) of a run.

    `loss` in nats a byte over the global batch; `tokens_per_s` of the whole world; `wait_fraction`
    is the part of the step that compute stood idle for a transfer of attention, averaged over
    ranks; `bytes_sent` by attention, all ranks together.
    The held-out numbers are None where they were not measured at this step.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    step_s: float
    tokens_per_s: float
    wait_fraction: float
    bytes_sent: int
    heldout_loss: float | None = None
    heldout_perplexity: float | None = None


class MetricsFile:
    """Appends records to `path`; `history` holds what was kept of an earlier run and what was
    appended since.
    """

    def __init__(self, path: Path, *, after_step: int) -> None:
        """Keep the file's records up to `after_step` (an interrupted run may have gone further than
        its checkpoint).

        Raises OSError, and ConfigError when the file holds something else.
        """
        self._path = path
        self.history = [record for record in _read(path) if record.step <= after_step]
        temporary = path.with_name(f".writing-{path.name}")
        temporary.write_text("".join(_line(record) for record in self.history))
        os.replace(temporary, path)

    def append(self, record: StepRecord) -> None:
        self.history.append(record)
        # Opened anew for each line: a step takes far longer, and a killed run leaves at most its
        # last line short.
        with self._path.open("a") as file:
            file.write(_line(record))


def _line(record: StepRecord) -> str:
    return json.dumps(asdict(record)) + "\n"


def _read(path: Path) -> list[StepRecord]:
    if not path.exists():
        return []
    whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    try:
        return [msgspec.convert(json.loads(line), StepRecord) for line in whole]
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not the record of a run: {error}; move it away, then run again."
        ) from error
