"""The loop between an engine and a driver. The same dozen lines run graphs of CPUs and of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from burst_rt.errors import BurstError
from burst_rt.scheduler.engine import Abort, Engine, Event, Finish, Issue
from burst_rt.scheduler.graph import Task

__all__ = ["Driver", "run"]


class Driver(Protocol):
    """Performs instructions and says what happened."""

    def issue(self, task: Task, after: tuple[int, ...]) -> None:
        """Starts the task and returns without waiting for it. The task's lane waits for the events
        of the tasks in `after` first.
        """

    def wait(self) -> Sequence[Event]:
        """Blocks until something has happened, and returns it. The driver has deadlines of its own;
        past one of them it returns a failure.
        """

    def abort(self, error: BurstError) -> None:
        """Stops what is under way, as far as that is possible. Must neither raise nor block."""


def run(engine: Engine, driver: Driver) -> None:
    """Runs the engine's schedule to its end on the driver. Blocks, bounded by the driver's
    deadlines.

    Raises the error of the task that failed, or PeerLost or Stalled. By then the driver has been
    told to abort, and nothing further is issued.
    """
    tasks = engine.schedule.graph.tasks
    instructions = engine.start()
    while True:
        for instruction in instructions:
            if isinstance(instruction, Issue):
                driver.issue(tasks[instruction.task], instruction.after)
            elif isinstance(instruction, Finish):
                return
            elif isinstance(instruction, Abort):
                driver.abort(instruction.error)
                raise instruction.error
        instructions = engine.handle(driver.wait())
