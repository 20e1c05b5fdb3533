"""A runtime followed by telemetry: its observer passes on what happens.

The ranks first find out whether any of them asked for it.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, cast

from burst_rt.drivers import BaseDriver
from burst_rt.runtime.joining import Presence
from burst_rt.runtime.runtime import Runtime
from burst_rt.scheduler import Schedule
from burst_rt.telemetry import joining
from burst_rt.telemetry.describe import describe

if TYPE_CHECKING:
    from burst_rt.attention.planner import Plan
    from burst_rt.serving.decode_plan import DecodePlan
    from burst_rt.telemetry.calls import CallLog

__all__ = ["Teller", "follow"]


def follow(runtime: Runtime, presence: Presence, *, asked: bool | None, within_s: float) -> None:
    """Gives the runtime an observer, where any of its ranks asked for telemetry. Collective; blocks
    at most `within_s` for each of two steps, and 15 s more on the rank that starts a hub.

    asked: what the program says; None leaves it to the environment.
    """
    mine = joining.wish(asked, presence)

    def gather(mine: bytes) -> list[bytes]:
        pending = runtime.collective(
            {"call": "init: telemetry"}, lambda: runtime.control.allgather(mine), within_s
        )
        return pending.result()

    said = gather(json.dumps(asdict(mine)).encode())
    wishes = [joining.Wish(**json.loads(wished)) for wished in said]
    machine, key = runtime.machine, presence.thread
    log = joining.follow(key, runtime.rank, wishes, *machine.choice[:2], gather)
    if log is not None:
        runtime.observer = Teller(log, runtime)


class Teller:
    """An `Observer`: passes on to the log what the runtime tells, with what it was done for."""

    def __init__(self, log: CallLog, runtime: Runtime) -> None:
        self.log = log
        self._machine, self._rank = runtime.machine, runtime.rank
        self.began = log.began
        self.abandoned = log.abandoned
        self.agreed = log.agreed
        self.left = log.left

    def ended(self, schedule: Schedule, driver: BaseDriver, subject: object) -> None:
        """See `Observer.ended`. Attention's calls have a plan for a subject."""
        plan = cast("Plan | DecodePlan | None", subject)
        self.log.ended(schedule, driver, partial(describe, plan, self._machine, self._rank))
