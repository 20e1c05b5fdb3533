"""Rank 0 prints the machine that the ranks have measured, as TOML."""

from __future__ import annotations

import burst_rt
from burst_rt.planning.machines import to_toml

with burst_rt.init(device="cpu") as ctx:
    machine = ctx.runtime.machine.hardware
    assert machine is not None
    if ctx.rank == 0:
        print(to_toml(machine), flush=True)
