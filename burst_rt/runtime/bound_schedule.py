"""A schedule with everything that it works on: what a runtime performs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from burst_rt.drivers import Progress
from burst_rt.runtime.observer import Subject
from burst_rt.scheduler import Schedule
from burst_rt.transport import Memory

__all__ = ["BoundSchedule"]


class BoundSchedule(NamedTuple):
    """What `Runtime.perform` runs."""

    schedule: Schedule
    operations: Mapping[type, Callable[..., None]]  # by type; called with the operation
    memory: Mapping[int, Memory]  # the bytes of each part that a message names
    progress: Progress | None = None  # the function that long operations call, if there are any
    subject: Subject | None = None  # what the schedule was made from, for the observer
    # Says how much memory the call takes, for the error when memory runs out.
    takes: Callable[[], str] | None = None
    counted: bool = True  # whether `stats` counts the call
