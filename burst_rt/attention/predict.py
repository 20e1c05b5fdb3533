"""The time that a plan should take, where a machine like this one is known.

It is the planner's forecast, or a simulated run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from burst_rt.planning.machines import load_hardware
from burst_rt.planning.strategies import Choice

if TYPE_CHECKING:
    from burst_rt.scheduler.simulator import Hardware

__all__ = ["machine_like", "predicted_s"]

# Maximum world size that is simulated, on one rank alone: a simulation runs in Python, and is worth
# its time only if it takes milliseconds.
_PREDICT_UP_TO = 16
# Names of the machines of `planning/machines`, and the words in the name of such a device.
_MACHINES = {
    "gb200-nvl72": ("GB200",),
    "b200-sxm": ("B200",),
    "mi300x": ("MI300X",),
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


def predicted_s(
    choice: Choice, rank: int, hardware: Hardware | None, device: torch.device
) -> float | None:
    """The planner's forecast. Where there is none, rank 0 makes one here, in milliseconds.

    hardware: the machine that the planner planned with, if any; else a shipped machine that has
    this device.
    """
    if choice.seconds:
        return choice.seconds.get(choice.strategy)
    if rank != 0 or choice.program.problem.world_size > _PREDICT_UP_TO:
        return None
    hardware = hardware or _shipped(device)
    if hardware is None:
        return None
    from burst_rt.planning.forecast import of_choice  # here, as in `planning.choose`

    return of_choice(choice, hardware).time_s


def _shipped(device: torch.device) -> Hardware | None:
    name = machine_like(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return load_hardware(name) if name else None
