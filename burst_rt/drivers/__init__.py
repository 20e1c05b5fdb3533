"""Drivers perform the scheduler's instructions: `HostDriver` on CPUs, `CudaDriver` on a GPU."""

from burst_rt.drivers.base import (
    BaseDriver,
    DriverOptions,
    Opening,
    Progress,
    as_device_error,
    failure_of,
    is_out_of_memory,
)
from burst_rt.drivers.cuda import CudaDriver
from burst_rt.drivers.host import HostDriver, flat_bytes, raw_bytes
from burst_rt.drivers.watch import Backoff, SharedWatch, Watch
from burst_rt.drivers.watchdog import Watchdog

__all__ = [
    "Backoff", "BaseDriver", "CudaDriver", "DriverOptions", "HostDriver", "Opening", "Progress",
    "SharedWatch", "Watch", "Watchdog", "as_device_error", "failure_of", "flat_bytes",
    "is_out_of_memory", "raw_bytes",
]  # fmt: skip
