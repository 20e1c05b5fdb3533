"""Every metric there is: its unit, what it means, and what it can be. The one table that samplers,
viewers and exporters read.

A source (a GPU, a host, a rank's process, the job) has some of them; one that a chip or driver does
not have is left out, never made up. A value outside its range is not a measurement and is dropped.
NVML's fields: docs.nvidia.com/deploy/nvml-api; GPM: its group "GPM Functions".
"""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["METRICS", "THROTTLE_REASONS", "Metric", "plausible", "throttle_reasons"]


class Metric(NamedTuple):
    """unit: "%", "B", "B/s", "W", "J", "C", "Hz", "s", "1" and so on. cumulative: a counter that
    only grows.
    """

    unit: str
    label: str
    low: float = 0.0
    high: float = math.inf
    cumulative: bool = False


def _percent(label: str) -> Metric:
    return Metric("%", label, 0.0, 100.0)


_TERABYTE = 1e12

METRICS: dict[str, Metric] = {
    # A GPU, from NVML.
    "sm_percent": _percent("time in which some kernel ran"),
    "memory_busy_percent": _percent("time in which device memory was read or written"),
    "memory_used_bytes": Metric("B", "memory in use", 0, 1e3 * _TERABYTE),
    "power_w": Metric("W", "power draw", 0, 1e4),
    "energy_j": Metric("J", "energy since the job began", 0, 1e12, cumulative=True),
    "temperature_c": Metric("C", "chip temperature", -50, 200),
    "memory_temperature_c": Metric("C", "memory temperature", -50, 200),
    "sm_clock_mhz": Metric("MHz", "clock of the multiprocessors", 0, 1e5),
    "memory_clock_mhz": Metric("MHz", "clock of device memory", 0, 1e5),
    "throttle_bits": Metric("bits", "why clocks are held back", 0, 2**24),
    "pcie_tx_bytes_per_s": Metric("B/s", "sent over PCIe", 0, _TERABYTE),
    "pcie_rx_bytes_per_s": Metric("B/s", "received over PCIe", 0, _TERABYTE),
    "nvlink_tx_bytes_per_s": Metric("B/s", "sent over NVLink", 0, 10 * _TERABYTE),
    "nvlink_rx_bytes_per_s": Metric("B/s", "received over NVLink", 0, 10 * _TERABYTE),
    "num_processes": Metric("1", "processes that compute on it", 0, 1e5),
    "ecc_corrected": Metric(
        "1", "memory errors corrected since the job began", 0, 1e12, cumulative=True
    ),
    "ecc_uncorrected": Metric(
        "1", "memory errors not corrected since the job began", 0, 1e12, cumulative=True
    ),
    "num_xid": Metric("1", "critical errors (XID) since the job began", 0, 1e6, cumulative=True),
    "gpm_sm_percent": _percent("multiprocessors that were busy (GPM)"),
    "gpm_occupancy_percent": _percent("warps active, of those possible (GPM)"),
    "gpm_tensor_percent": _percent("time in which tensor cores computed (GPM)"),
    "gpm_dram_percent": _percent("memory bandwidth used (GPM)"),
    # A host, from psutil.
    "cpu_percent": _percent("cores busy, on average"),
    "cpu_most_percent": _percent("the busiest core"),
    "host_memory_used_bytes": Metric("B", "memory in use", 0, 1e3 * _TERABYTE),
    "net_tx_bytes_per_s": Metric("B/s", "sent over the network", 0, _TERABYTE),
    "net_rx_bytes_per_s": Metric("B/s", "received over the network", 0, _TERABYTE),
    # A rank's process, from psutil and from what its calls counted.
    "process_percent": Metric("%", "of one core", 0, 1e5),
    "rss_bytes": Metric("B", "resident memory", 0, 1e3 * _TERABYTE),
    "num_threads": Metric("1", "threads", 0, 1e5),
    "telemetry_percent": Metric("%", "of one core, by telemetry's own threads", 0, 1e4),
    "flops_per_s": Metric("flop/s", "floating-point operations of tiles", 0, 1e18),
    "sent_bytes_per_s": Metric("B/s", "sent by calls", 0, 10 * _TERABYTE),
    "calls_per_s": Metric("1/s", "calls", 0, 1e7),
    "compute_percent": _percent("time in tiles"),
    "wait_percent": _percent("time compute stood still while a transfer was under way"),
    "overlap_percent": _percent("of the time transfers took, what compute hid"),
    # The job, from `telemetry.report`; whatever else it reports has its own name and no entry here.
    "loss": Metric("1", "training loss", -math.inf, math.inf),
    "tokens_per_s": Metric("1/s", "tokens, all ranks together"),
}

# nvmlClocksEventReasons of nvml.h; those that a healthy chip shows at any time are not worth an
# event.
THROTTLE_REASONS: dict[int, str] = {
    0x1: "idle",
    0x2: "clocks set by the user",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
    0x100: "display clocks",
}


def plausible(name: str, value: float) -> bool:
    """Whether a metric can have this value; any finite number for one that is not in the table."""
    metric = METRICS.get(name)
    return math.isfinite(value) and (metric is None or metric.low <= value <= metric.high)


def throttle_reasons(bits: float) -> list[str]:
    """The reasons that a `throttle_bits` stands for, in words."""
    return [text for bit, text in THROTTLE_REASONS.items() if int(bits) & bit]
