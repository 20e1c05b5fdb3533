"""What the runtime tells an observer about the calls that it performs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from burst_rt.drivers import BaseDriver
from burst_rt.scheduler import Schedule

__all__ = ["Description", "Observer", "Subject"]


@dataclass(frozen=True, kw_only=True)
class Description:
    """What a schedule does, in words and plain data."""

    kind: str  # "forward", "backward", "decode" or "pipeline"
    explain: str  # strategy, kernel and why, bytes, memory
    # Time of a run on a machine like this one. None where that is not known, or where another rank
    # says it.
    predicted_s: float | None = None
    problem: str = ""  # layout, shapes and mask, the same on all ranks of the group
    strategy: str = ""  # the candidate that runs
    # The strategies that it was chosen from: name, bytes that all ranks together send in one run,
    # and seconds, None without a forecast.
    candidates: tuple[tuple[str, int, float | None], ...] = ()


class Subject(Protocol):
    """What a schedule was made from."""

    def describe(self) -> Description:
        """The description of one run. Takes milliseconds; any thread may ask."""


class Observer(Protocol):
    """Is told about one runtime's calls, in the thread that makes the calls.

    No method may block or raise.
    """

    def began(self, number: int, driver: BaseDriver) -> None:
        """Call `number` begins. Any thread may ask the driver what it is doing."""

    def abandoned(self) -> None:
        """The call that began does not take place: the ranks do not agree on it."""

    def ended(self, schedule: Schedule, driver: BaseDriver, subject: Subject | None) -> None:
        """The call that began has ended well.

        subject: what the schedule was made from, as given to `Runtime.perform`; None for a custom
        pipeline.
        """

    def planned(self, started_s: float) -> None:
        """This rank has made a plan. started_s: when it began, by `time.perf_counter`."""

    def agreed(self, number: int, entered_s: float) -> None:
        """The ranks have agreed in call `number`, which is none of these: it performs no schedule.

        entered_s: when this rank entered it, by `time.perf_counter`.
        """

    def left(self, code: int) -> None:
        """This rank has left the group with this exit code."""
