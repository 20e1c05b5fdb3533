"""Every metric there is: its unit, its meaning and its range.

Samplers, viewers and exporters all read this one table. The useful metrics of a kind of source come
first in it, and on the page.

A source (a GPU, a host, a rank's process, the job) has some of the metrics. A metric that a chip or
driver does not have is left out, never made up. A value outside its range is not a measurement, and
is dropped. NVML's fields: docs.nvidia.com/deploy/nvml-api; GPM: its group "GPM Functions".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = [
    "HEALTHY_REASONS",
    "METRICS",
    "THROTTLE_REASONS",
    "Metric",
    "plausible",
    "throttle_reasons",
]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric's meaning, its unit, and the range of its values."""

    unit: str  # "%", "B", "B/s", "W", "J", "C", "Hz", "s", "1" and so on
    label: str
    low: float = 0.0
    high: float = math.inf
    cumulative: bool = False  # a counter that only grows


def _percent(label: str) -> Metric:
    return Metric(unit="%", label=label, low=0.0, high=100.0)


_TERABYTE = 1e12

METRICS: dict[str, Metric] = {
    # A GPU, from NVML.
    "sm_percent": _percent("time in which some kernel ran"),
    "sm_clock_mhz": Metric(unit="MHz", label="clock of the multiprocessors", high=1e5),
    "throttle_bits": Metric(unit="bits", label="why clocks are held back", high=2**24),
    "power_w": Metric(unit="W", label="power draw", high=1e4),
    "memory_used_bytes": Metric(unit="B", label="memory in use", high=1e3 * _TERABYTE),
    "temperature_c": Metric(unit="C", label="chip temperature", low=-50, high=200),
    "gpm_tensor_percent": _percent("time in which tensor cores computed (GPM)"),
    "gpm_sm_percent": _percent("multiprocessors that were busy (GPM)"),
    "gpm_dram_percent": _percent("memory bandwidth used (GPM)"),
    "gpm_occupancy_percent": _percent("warps active, of those possible (GPM)"),
    "nvlink_tx_bytes_per_s": Metric(unit="B/s", label="sent over NVLink", high=10 * _TERABYTE),
    "nvlink_rx_bytes_per_s": Metric(unit="B/s", label="received over NVLink", high=10 * _TERABYTE),
    "pcie_tx_bytes_per_s": Metric(unit="B/s", label="sent over PCIe", high=_TERABYTE),
    "pcie_rx_bytes_per_s": Metric(unit="B/s", label="received over PCIe", high=_TERABYTE),
    "memory_busy_percent": _percent("time in which device memory was read or written"),
    "memory_temperature_c": Metric(unit="C", label="memory temperature", low=-50, high=200),
    "memory_clock_mhz": Metric(unit="MHz", label="clock of device memory", high=1e5),
    "ecc_corrected": Metric(
        unit="1",
        label="memory errors corrected since the job began",
        high=1e12,
        cumulative=True,
    ),
    "ecc_uncorrected": Metric(
        unit="1",
        label="memory errors not corrected since the job began",
        high=1e12,
        cumulative=True,
    ),
    "num_xid": Metric(
        unit="1",
        label="critical errors (XID) since the job began",
        high=1e6,
        cumulative=True,
    ),
    "num_processes": Metric(unit="1", label="processes that compute on it", high=1e5),
    "energy_j": Metric(unit="J", label="energy since the job began", high=1e12, cumulative=True),
    "power_cap_w": Metric(unit="W", label="power that the chip may draw", high=1e4),
    "sm_clock_max_mhz": Metric(unit="MHz", label="highest clock of the multiprocessors", high=1e5),
    # A host, from psutil.
    "cpu_percent": _percent("cores busy, on average"),
    "cpu_most_percent": _percent("the busiest core"),
    "host_memory_used_bytes": Metric(unit="B", label="memory in use", high=1e3 * _TERABYTE),
    "net_tx_bytes_per_s": Metric(unit="B/s", label="sent over the network", high=_TERABYTE),
    "net_rx_bytes_per_s": Metric(unit="B/s", label="received over the network", high=_TERABYTE),
    # A rank's process, from psutil and from what its calls counted.
    "compute_percent": _percent("time in tiles"),
    "wait_percent": _percent("time compute stood still for a transfer or a late rank"),
    "outside_percent": _percent("time outside of calls"),
    "overlap_percent": _percent("share of the transfer time that compute hid"),
    "flops_per_s": Metric(unit="flop/s", label="floating-point operations of tiles", high=1e18),
    "sent_bytes_per_s": Metric(unit="B/s", label="sent by calls", high=10 * _TERABYTE),
    "calls_per_s": Metric(unit="1/s", label="calls", high=1e7),
    "process_percent": Metric(unit="%", label="used of one core", high=1e5),
    "rss_bytes": Metric(unit="B", label="resident memory", high=1e3 * _TERABYTE),
    "num_threads": Metric(unit="1", label="threads", high=1e5),
    "telemetry_percent": Metric(
        unit="%", label="used of one core by telemetry's own threads", high=1e4
    ),
    # The job, from `telemetry.report`. Other values that a job reports have their own names, and no
    # entry here.
    "loss": Metric(unit="1", label="of training", low=-math.inf, high=math.inf),
    "heldout_loss": Metric(unit="1", label="of held-out text", low=-math.inf, high=math.inf),
    "tokens_per_s": Metric(unit="1/s", label="all ranks together"),
    "step_s": Metric(unit="s", label="of a step"),
    "grad_norm": Metric(unit="1", label="norm of all gradients"),
    "learning_rate": Metric(unit="1", label="of the optimizer"),
    "step": Metric(unit="1", label="of the last report"),
    # The same, from `telemetry.TokenMeter`.
    "time_to_first_token_s": Metric(unit="s", label="from the last prompt to its first token"),
    "time_per_token_s": Metric(unit="s", label="of the last output token"),
    "mean_time_per_token_s": Metric(unit="s", label="of an output token, mean since the start"),
    "output_tokens_per_s": Metric(unit="1/s", label="output tokens, all sequences together"),
    "cached_tokens": Metric(unit="1", label="tokens in the cache, all ranks together"),
    "cache_capacity_tokens": Metric(unit="1", label="tokens that the cache has room for"),
}

# nvmlClocksEventReasons of nvml.h.
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
# Those that a healthy chip shows at any time: they do not make an event.
HEALTHY_REASONS = 0x1 | 0x2 | 0x4 | 0x10 | 0x100


def plausible(name: str, value: float) -> bool:
    """Whether a metric can have this value. A metric that is not in the table can have any finite
    one.
    """
    metric = METRICS.get(name)
    return math.isfinite(value) and (metric is None or metric.low <= value <= metric.high)


def throttle_reasons(bits: float) -> list[str]:
    """The reasons encoded in a `throttle_bits`, in words."""
    return [text for bit, text in THROTTLE_REASONS.items() if int(bits) & bit]
