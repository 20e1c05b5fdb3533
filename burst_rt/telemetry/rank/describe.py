"""A plan in words, with its candidates and the time that it should take.

The time is the planner's forecast, or a simulated run, where a machine like this one is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from burst_rt.planning.machines import load_hardware
from burst_rt.scheduler.simulator import Hardware
from burst_rt.telemetry.messages import Candidate

if TYPE_CHECKING:
    from burst_rt.attention.planner import Plan
    from burst_rt.runtime.machine import Machine
    from burst_rt.serving.decode_plan import DecodePlan
    from burst_rt.telemetry.rank.call_log import Described

__all__ = ["describe", "machine_like"]

# Maximum world size that is simulated, on one rank alone: a simulation runs in Python, and is worth
# its time only if it takes milliseconds.
_PREDICT_UP_TO = 16
# Names of the machines of `planning/machines`, and the words in the name of such a device.
_MACHINES = {
    "h200-sxm": ("H200",),
    "h100-sxm": ("H100", "HBM3"),
    "a100-sxm": ("A100", "SXM"),
    "a100-pcie": ("A100", "PCI"),
}


def machine_like(device_name: str) -> str | None:
    """The shipped machine that has this device; None where none has."""
    for machine, words in _MACHINES.items():
        if all(word in device_name for word in words):
            return machine
    return None


def describe(plan: Plan | DecodePlan | None, machine: Machine, rank: int) -> Described:
    """The description of a plan for telemetry; None means a custom pipeline. Takes milliseconds, so
    it is called by the agent's thread.
    """
    from burst_rt.serving.decode_plan import DecodePlan
    from burst_rt.telemetry.rank.call_log import Described

    if plan is None:
        return Described(kind="pipeline", explain="custom task graph")
    if isinstance(plan, DecodePlan):
        return Described(kind="decode", explain=plan.explain(), problem=str(plan.program))
    problem, choice, seconds = plan.key.problem, plan.choice, plan.choice.seconds or {}
    own = f" / {problem.v_head_dim}" if problem.v_head_dim != problem.head_dim else ""
    about = (
        f"layout {problem.q_layout.kind}, {problem.q_layout.seq_len:,} tokens, {problem.num_heads} "
        f"heads of {problem.head_dim}{own} "
        f"({problem.num_kv_heads} kv), batch {problem.batch}, {plan.key.dtype}, {problem.mask!r}"
    )
    candidates = tuple(
        Candidate(name, size, seconds.get(name)) for name, size in choice.candidates.items()
    )
    kind = "forward" if plan.key.forward else "backward"
    return Described(
        kind=kind,
        explain=plan.explain(tables=False),
        predicted_s=_predicted_s(plan, machine, rank),
        problem=about,
        strategy=choice.strategy,
        candidates=candidates,
    )


def _predicted_s(plan: Plan, machine: Machine, rank: int) -> float | None:
    """The planner's forecast. Where there is none, rank 0 makes one here."""
    choice = plan.choice
    if choice.seconds:
        return choice.seconds.get(choice.strategy)
    if rank != 0 or plan.key.problem.world_size > _PREDICT_UP_TO:
        return None
    hardware = machine.hardware or _shipped(machine.device)
    if hardware is None:
        return None
    from burst_rt.planning.forecast import of_choice

    return of_choice(choice, hardware).time_s


def _shipped(device: torch.device) -> Hardware | None:
    name = machine_like(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return load_hardware(name) if name else None
