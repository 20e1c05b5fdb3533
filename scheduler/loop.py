"""The loop between engine and driver, and the `Driver` protocol.

The same few lines run graphs of CPUs and of GPUs. Where nothing is left to decide, as in a line of
tasks or where all tasks go onto streams at once, no engine is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from burst_rt.scheduler.engine import (
    Abort,
    Batches,
    Engine,
    Event,
    Instruction,
    Issue,
    Schedule,
    TaskDone,
)
from burst_rt.scheduler.graph import Task

__all__ = ["Driver", "run"]


class Driver(Protocol):
    """Performs instructions and says what happened.

    on_events: set by `run` while there is an engine to ask. A driver whose tasks run inside `wait`
    calls it in the middle of a task, with the ends of other tasks, so that messages that follow
    them leave before the task ends.
    """

    on_events: Callable[[Sequence[TaskDone]], object] | None

    def issue(self, task: Task, after: tuple[int, ...]) -> None:
        """Starts the task and returns without waiting for it. The task's lane waits for the events
        of the tasks in `after` first.
        """

    def wait(self) -> Sequence[Event]:
        """Blocks until something has happened, and returns it. The driver has deadlines of its own;
        past one of them it returns a failure.
        """

    def abort(self) -> None:
        """Stops what is under way, as far as that is possible. Must neither raise nor block."""


def run(schedule: Schedule, driver: Driver, *, validate: bool = False) -> None:
    """Runs a schedule to its end on a driver. Blocks, bounded by the driver's deadlines.

    validate: see `Engine`.

    Raises the error of the task that failed, PeerLost or Stalled, or what the driver raises. By
    then the driver has been told to abort, and nothing further is issued.
    """
    try:
        # A line on a host needs no batches.
        batches = None if validate or schedule.line is not None else schedule.batches
        past = (
            _run_line(schedule, driver)
            if batches is None
            else _run_batches(schedule, batches, driver)
        )
        if past is None:
            return
        tasks, engine = schedule.graph.tasks, Engine(schedule, validate=validate)
        instructions = engine.start()
        for events in past:
            instructions = engine.handle(events)
        driver.on_events = lambda events: _obey(engine.handle(events), tasks, driver)
        while not _obey(instructions, tasks, driver):
            instructions = engine.handle(driver.wait())
    except BaseException:
        driver.abort()
        raise
    finally:
        driver.on_events = None


def _obey(instructions: Sequence[Instruction], tasks: Sequence[Task], driver: Driver) -> bool:
    """Whether the run has finished. Raises the error of an abort."""
    for instruction in instructions:
        if isinstance(instruction, Issue):
            driver.issue(tasks[instruction.task], instruction.after)
        elif isinstance(instruction, Abort):
            raise instruction.error
        else:
            return True
    return False


def _run_line(schedule: Schedule, driver: Driver) -> list[Sequence[Event]] | None:
    """Runs a line without an engine, which takes longer than a small task; None at its end.

    If anything other than the end of the issued task happens, returns all events so far, for an
    engine to judge. The list is empty if the schedule is not a line.
    """
    past: list[Sequence[Event]] = []
    if schedule.line is None:
        return past
    for task, end in zip(schedule.graph.tasks, schedule.line, strict=True):
        driver.issue(task, ())
        past.append(driver.wait())
        if past[-1] != end:
            return past
    return None


def _run_batches(
    schedule: Schedule, batches: Batches, driver: Driver
) -> list[Sequence[Event]] | None:
    """Runs what is issued in two batches without an engine; None at its end.

    If anything other than the ends of tasks happens, returns all events so far, for an engine to
    judge.
    """
    tasks, past = schedule.graph.tasks, list[Sequence[Event]]()
    for batch in batches:
        still_open = set[int]()
        for task, after in batch:
            still_open.add(task)
            driver.issue(tasks[task], after)
        while still_open:
            past.append(driver.wait())
            for event in past[-1]:
                if type(event) is not TaskDone or event.task not in still_open:
                    return past
                still_open.remove(event.task)
    return None
