"""What `burst-rt dashboard` and `burst-rt top` look at: a running job's hub, or a record."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from burst_rt.telemetry.read.tape import TapeViewer
    from burst_rt.telemetry.read.viewer import Viewer

__all__ = ["open_tape", "open_viewer", "viewer_options"]

_F = TypeVar("_F", bound=Callable[..., Any])


def _seconds(_: click.Context, __: click.Parameter, value: float | None) -> float | None:
    # No comparison of a range holds for NaN, so click lets it pass.
    if value is not None and math.isnan(value):
        raise click.BadParameter("expected seconds, got nan")
    return value


def viewer_options(command: _F) -> _F:
    """Adds `--attach`, `--replay` and `--until` to a command."""
    attach = click.option(
        "--attach",
        type=int,
        metavar="JOB",
        help="Number of the running job. [default: the only job on this host]",
    )
    replay = click.option(
        "--replay",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Show a record (made with --record FILE) instead of a running job.",
    )
    until = click.option(
        "--until",
        type=click.FloatRange(min=0),
        callback=_seconds,
        metavar="S",
        help="Replay the first S seconds of the record. [default: all of it]",
    )
    return attach(replay(until(command)))


def open_tape(record: Path, until: float | None) -> TapeViewer:
    """A record as viewers see it, read once to its end. Raises InputError."""
    from burst_rt.telemetry.read.record import Record
    from burst_rt.telemetry.read.tape import Tape, TapeViewer

    return TapeViewer(Tape(Record(record), until))


@contextmanager
def open_viewer(attach: int | None, replay: Path | None, until: float | None) -> Iterator[Viewer]:
    """The viewer that these options ask for: of a record, or of a running job's hub.

    A record is read whole. Raises InputError and ConfigError.
    """
    from burst_rt.telemetry.read.viewer import HubViewer

    if replay is not None:
        if attach is not None:
            raise click.UsageError("--attach and --replay cannot be used together; choose one")
        yield open_tape(replay, until)
        return
    if until is not None:
        raise click.UsageError("--until works only with --replay")
    from burst_rt.telemetry.hub.jobs import find_job

    job = find_job(attach)
    with HubViewer(job.address, job.secret) as viewer:
        yield viewer
