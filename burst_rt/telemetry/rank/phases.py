"""Steps and spans of a job's own code, for viewers: `with step():`, `with span("optimizer"):`.

Each only notes two times, and the agent's thread sends them later: no rank waits for another.
"""

from __future__ import annotations

import threading
import time
from functools import lru_cache
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from burst_rt.errors import InputError
from burst_rt.telemetry.rank.joining import check_sendable_name, check_step, current_agent

if TYPE_CHECKING:
    from burst_rt.telemetry.rank.agent import Agent

__all__ = ["Phase", "span", "step"]


class _Entered(NamedTuple):
    """What is kept while a phase is under way."""

    agent: Agent
    step: int
    outer_step: int  # the step that was under way before
    depth: int
    calls_s: float  # the rank's time in calls of attention until then
    started_s: float


class Phase:
    """What `step` and `span` return, for `with` statements. name: "" for a step."""

    __slots__ = ("_entered", "_name", "_number")

    def __init__(self, name: str, number: int | None = None) -> None:
        self._name = name
        self._number = number
        self._entered: list[_Entered] = []  # several where it is entered in itself

    def __enter__(self) -> None:
        agent = current_agent()
        if agent is None:
            return
        step = outer_step = agent.step
        if not self._name:
            step = agent.last_step + 1 if self._number is None else self._number
            agent.step = agent.last_step = step
            agent.stepping = threading.get_ident()
            agent.totals.in_step = True
        depth = agent.depths.get(threading.get_ident(), 0)
        agent.depths[threading.get_ident()] = depth + 1
        calls_s = agent.totals.graph_s
        started_s = time.perf_counter()
        self._entered.append(_Entered(agent, step, outer_step, depth, calls_s, started_s))

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._entered:
            return
        ended_s = time.perf_counter()
        agent, step, outer_step, depth, calls_s, started_s = self._entered.pop()
        agent.depths[threading.get_ident()] = depth
        if not self._name:
            agent.step = outer_step
            agent.totals.in_step = outer_step >= 0
            # A step that failed is shown, but is no measure; nor does a step in a step count twice.
            if error_type is None and outer_step < 0:
                counts = agent.totals.counts
                counts.steps += 1
                counts.step_s += ended_s - started_s
                counts.step_call_s += agent.totals.graph_s - calls_s
        agent.note_phase(self._name, step, depth, started_s, ended_s)


def step(number: int | None = None) -> Phase:
    """A step of the job, from here to the end of the `with` block: `with telemetry.step(): ...`.

    Any rank may say it, and each says its own. Viewers show steps above the rank's calls, and which
    part of a step's time is in calls of attention. number: of the step, 0 or more; without it, one
    more than the rank's last, from 1.

    Local; returns at once, and only notes the time where telemetry is on. Raises InputError for a
    number that is no whole number from 0 to 2^63 - 1.
    """
    if number is not None:
        whole = check_step("telemetry.step", number)
        if whole != number or whole < 0:
            raise InputError(
                f"telemetry.step: number: expected a whole number, 0 or more, got {number!r:.80}; "
                "count steps from 0 or 1"
            )
        number = whole
    return Phase("", number)


def span(name: str) -> Phase:
    """A named part of the job's time, from here to the end of the `with` block: `with
    telemetry.span("optimizer"): ...`. Spans may lie in steps and in each other.

    Local; returns at once, and only notes the time where telemetry is on. Raises InputError for a
    name that is no str, empty, not UTF-8, or longer than 256 bytes.
    """
    if not isinstance(name, str):
        raise InputError(
            f"telemetry.span: name: expected a str, got {type(name).__name__}; name the span"
        )
    return Phase(_checked(name))


@lru_cache(maxsize=1024)
def _checked(name: str) -> str:
    if not name:
        raise InputError("telemetry.span: name: expected one character or more, got none; name it")
    check_sendable_name("telemetry.span", name)
    return name
