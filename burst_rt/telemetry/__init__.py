"""Telemetry: what every rank, GPU and transfer does, seen from one place.

Its cost cannot hurt the run.

Off unless asked: `burst-rt run --telemetry` (or `--record FILE`), BURST_RT_TELEMETRY=1, or
`burst_rt.init(telemetry=True)`. `report` lets a job add figures of its own, `step` and `span` its
steps and their parts, and `TokenMeter` adds the figures of a job that serves.

`messages`, `metrics` and `wire` are what all speak. Each folder knows only those before it:
`model`, what a job is; `read`, viewers and records; `hub`, the process that feeds the model;
`rank`, what runs in a rank and tells the hub.
"""

from burst_rt.telemetry.rank.joining import report
from burst_rt.telemetry.rank.phases import span, step
from burst_rt.telemetry.rank.tokens import TokenMeter

__all__ = ["TokenMeter", "report", "span", "step"]
