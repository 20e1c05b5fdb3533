"""The simulator: real engines under a virtual clock, models of machines, and runs that go wrong.

It is pure: standard library only. The core knows nothing of it.
"""

from burst_rt.scheduler.simulator.faults import Faults, Loss, Rehearsal, Stall, rehearse, verdict
from burst_rt.scheduler.simulator.hardware import (
    Device,
    Duplex,
    Hardware,
    Link,
    Nics,
    Node,
    Rate,
    Switch,
)
from burst_rt.scheduler.simulator.payload import BusyPart, EmptyPart, reference
from burst_rt.scheduler.simulator.progress import Rotated
from burst_rt.scheduler.simulator.simulate import (
    Deadlock,
    RankTime,
    Simulated,
    simulate,
)

__all__ = [
    "BusyPart", "Deadlock", "Device", "Duplex", "EmptyPart", "Faults", "Hardware", "Link", "Loss",
    "Nics", "Node", "RankTime", "Rate", "Rehearsal", "Rotated", "Simulated", "Stall", "Switch",
    "reference", "rehearse", "simulate", "verdict",
]  # fmt: skip
