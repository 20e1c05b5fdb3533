"""The simulator: real engines under a virtual clock, on models of machines.

It is pure: standard library only. The core knows nothing of it.
"""

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
from burst_rt.scheduler.simulator.progress import Rotated
from burst_rt.scheduler.simulator.simulate import (
    Deadlock,
    RankTime,
    Simulated,
    simulate,
)

__all__ = [
    "Deadlock", "Device", "Duplex", "Hardware", "Link", "Nics", "Node", "RankTime", "Rate",
    "Rotated", "Simulated", "Switch", "simulate",
]  # fmt: skip
