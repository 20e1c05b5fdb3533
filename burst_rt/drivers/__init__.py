"""Drivers: perform the scheduler's instructions on this rank's hardware. `HostDriver` is for CPUs."""

from burst_rt.drivers.host import HostDriver, Opening, Progress, raw_bytes
from burst_rt.drivers.watch import Backoff, Watch

__all__ = ["Backoff", "HostDriver", "Opening", "Progress", "Watch", "raw_bytes"]
