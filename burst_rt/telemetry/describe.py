"""A plan in words, and how long it should take where a machine like this one is known: forecast by the planner, or simulated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from burst_rt.scheduler import load_hardware

if TYPE_CHECKING:
    from burst_rt.attention.planner import Plan
    from burst_rt.telemetry.calls import Described

__all__ = ["describe", "machine_like"]

# Simulating is Python: worth it for worlds that take milliseconds, and on one rank.
_PREDICT_UP_TO = 16
# What a device's name must hold for one of `scheduler/hardware`.
_MACHINES = {"h200-sxm": ("H200",), "h100-sxm": ("H100", "HBM3"), "a100-sxm": ("A100", "SXM"), "a100-pcie": ("A100", "PCI")}


def machine_like(device_name: str) -> str | None:
    """Which of the shipped machines has this device; None: none has."""
    return next((machine for machine, words in _MACHINES.items() if all(word in device_name for word in words)), None)


def describe(plan: Plan | None, device: torch.device, rank: int) -> Described:
    """What telemetry says of a plan (None: a custom pipeline). Takes milliseconds; for the agent's thread."""
    from burst_rt.telemetry.calls import Described

    if plan is None:
        return Described("pipeline", "custom task graph", None)
    problem, predicted_s = plan.key.problem, None
    about = (
        f"\n  layout {problem.q_layout.kind}, {problem.q_layout.seq_len:,} tokens, {problem.num_heads} heads of {problem.head_dim} "
        f"({problem.num_kv_heads} kv), batch {problem.batch}, {plan.key.dtype}, {problem.mask!r}"
    )
    machine = machine_like(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if plan.choice.seconds:
        predicted_s = plan.choice.seconds.get(plan.choice.strategy)
    elif rank == 0 and machine is not None and problem.world_size <= _PREDICT_UP_TO:
        from burst_rt.attention.forecast import of_choice

        predicted_s = of_choice(plan.choice, load_hardware(machine)).time_s
    return Described("forward" if plan.key.forward else "backward", plan.explain() + about, predicted_s)
