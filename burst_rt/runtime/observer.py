"""What the runtime tells of the calls it performs, to whoever looks on."""

from __future__ import annotations

from typing import Protocol

from burst_rt.drivers import BaseDriver
from burst_rt.scheduler import Schedule

__all__ = ["Observer"]


class Observer(Protocol):
    """Hears of one runtime's calls, in the thread that makes them. No method may block or raise."""

    def began(self, number: int, driver: BaseDriver) -> None:
        """Call `number` begins; any thread may ask the driver what it does."""

    def abandoned(self) -> None:
        """The call that began does not take place: the ranks do not agree on it."""

    def ended(self, schedule: Schedule, driver: BaseDriver, subject: object) -> None:
        """The call that began has ended well. subject: what the schedule was made from, as
        `Runtime.perform` got it; None for a custom pipeline.
        """

    def left(self, code: int) -> None:
        """This rank has left the group, with this exit code."""
