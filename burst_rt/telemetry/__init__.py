"""Telemetry: what every rank, GPU and transfer does, seen from one place.

Its cost cannot hurt the run.

Off unless asked: `burst-rt run --telemetry` (or `--record FILE`), BURST_RT_TELEMETRY=1, or
`burst_rt.init(telemetry=True)`. A rank's agent (`agent`) tells a hub (`hub`) what the rank does.
All viewers ask the hub's model of the job (`job_model`). `report` lets a job add figures of its
own, and `TokenMeter` adds the figures of a job that serves.
"""

from burst_rt.telemetry.joining import report
from burst_rt.telemetry.tokens import TokenMeter

__all__ = ["TokenMeter", "report"]
