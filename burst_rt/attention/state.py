"""What the attention calls of one context share: runtime, options, plans, and what callers keep."""

from __future__ import annotations

import os
import time

from burst_rt.attention.planner import Plan, PlanKey, Planner
from burst_rt.attention.recent import KeptEntries, Recent
from burst_rt.runtime.runtime import Runtime

__all__ = ["AttentionState"]

# How many entries of each type are kept, such as kinds of calls with their plans.
_KEPT = 64
# How many layouts and masks are kept for the backwards of compiled programs.
_HELD = 4096


class AttentionState:
    """The state that the attention calls of one context share. Each context has one of these.

    kernel, recurrence_kernel, partials, deterministic, check_finite: as `burst_rt.init` takes them.
    """

    def __init__(
        self, runtime: Runtime, *, kernel: str, partials: str, check_finite: bool,
        recurrence_kernel: str = "auto", deterministic: bool = True,
    ) -> None:  # fmt: skip
        machine = runtime.machine
        self.runtime = runtime
        self.kernel = kernel
        self.recurrence_kernel = recurrence_kernel
        self.partials = partials
        self.deterministic = deterministic
        self.check_finite = check_finite
        self.planner = Planner(
            runtime.rank, machine.lanes, machine.lower, machine.ranks_per_node, machine.hardware
        )
        # What the files above this one keep with the context, such as checked calls.
        self.kept = KeptEntries(_KEPT)
        # Layouts and masks of calls that went through the dispatcher. A compiled program knows only
        # their numbers, and asks for the objects again in its backward.
        self.held: Recent[int, object] = Recent(_HELD)
        # The ranks' numbers in torch.distributed, once a call was given DTensors.
        self.processes: list[int] | None = None
        # Classes of masks that have been checked: their masks can be hashed and compared.
        self.comparable: set[type] = set()
        # Whether fresh memory is filled with NaN, so that a read before the first write shows.
        self.poison = os.environ.get("BURST_RT_POISON") == "1"

    def plan(self, key: PlanKey) -> Plan:
        """`Planner.plan`, of which the runtime's observer hears if the plan is new."""
        observer, num_made = self.runtime.observer, self.planner.num_made
        if observer is None:
            return self.planner.plan(key)
        started_s = time.perf_counter()
        plan = self.planner.plan(key)
        if self.planner.num_made > num_made:
            observer.planned(started_s)
        return plan

    def close(self) -> None:
        """Lets go of all plans and calls."""
        self.planner.forget()
        self.kept.clear()
        self.held.clear()
