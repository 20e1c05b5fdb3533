"""`/metrics` for Prometheus, with DCGM's names: a snapshot in its text format, made when scraped.

GPU fields have the names, units and labels of NVIDIA's DCGM exporter
(github.com/NVIDIA/dcgm-exporter, `etc/default-counters.csv`; NVIDIA/DCGM, `dcgm_fields.h`) where
those have them, so dashboards and alerts made for it work here. The runtime's own fields begin with
`burst_rt_`. A value that a source has not measured is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from burst_rt.dashboard.links import LinkView
from burst_rt.telemetry.messages import LaneCounters
from burst_rt.telemetry.metrics import METRICS, THROTTLE_REASONS
from burst_rt.telemetry.model.views import RankView, Snapshot, SourceView

__all__ = ["CONTENT_TYPE", "DCGM", "exposition"]

CONTENT_TYPE = CONTENT_TYPE_LATEST
_STATUSES = ("live", "silent", "lost", "left", "ended", "stopped")
_LINK_STATES = ("ok", "slow", "silent")
_MIB = 1 << 20


class _Field(NamedTuple):
    name: str
    scale: float
    help: str


# DCGM's field, the factor to the field's unit, and its meaning, by metric.
DCGM: dict[str, _Field] = {
    "sm_percent": _Field("DCGM_FI_DEV_GPU_UTIL", 1, "GPU utilization (in %)."),
    "memory_busy_percent": _Field("DCGM_FI_DEV_MEM_COPY_UTIL", 1, "Memory utilization (in %)."),
    "memory_used_bytes": _Field(
        "DCGM_FI_DEV_FB_USED", 1 / _MIB, "Framebuffer memory used (in MiB)."
    ),
    "power_w": _Field("DCGM_FI_DEV_POWER_USAGE", 1, "Power draw (in W)."),
    "power_cap_w": _Field("DCGM_FI_DEV_ENFORCED_POWER_LIMIT", 1, "Power cap in force (in W)."),
    "temperature_c": _Field("DCGM_FI_DEV_GPU_TEMP", 1, "GPU temperature (in C)."),
    "memory_temperature_c": _Field("DCGM_FI_DEV_MEMORY_TEMP", 1, "Memory temperature (in C)."),
    "sm_clock_mhz": _Field("DCGM_FI_DEV_SM_CLOCK", 1, "SM clock frequency (in MHz)."),
    "sm_clock_max_mhz": _Field(
        "DCGM_FI_DEV_MAX_SM_CLOCK", 1, "Highest SM clock frequency (in MHz)."
    ),
    "memory_clock_mhz": _Field("DCGM_FI_DEV_MEM_CLOCK", 1, "Memory clock frequency (in MHz)."),
    "pcie_tx_bytes_per_s": _Field(
        "DCGM_FI_PROF_PCIE_TX_BYTES", 1, "Rate of data sent over PCIe (in bytes per second)."
    ),
    "pcie_rx_bytes_per_s": _Field(
        "DCGM_FI_PROF_PCIE_RX_BYTES", 1, "Rate of data received over PCIe (in bytes per second)."
    ),
    "nvlink_tx_bytes_per_s": _Field(
        "DCGM_FI_PROF_NVLINK_TX_BYTES", 1, "Rate of data sent over NVLink (in bytes per second)."
    ),
    "nvlink_rx_bytes_per_s": _Field(
        "DCGM_FI_PROF_NVLINK_RX_BYTES",
        1,
        "Rate of data received over NVLink (in bytes per second).",
    ),
    "gpm_sm_percent": _Field(
        "DCGM_FI_PROF_SM_ACTIVE", 0.01, "Ratio of cycles in which a multiprocessor had a warp."
    ),
    "gpm_occupancy_percent": _Field(
        "DCGM_FI_PROF_SM_OCCUPANCY", 0.01, "Ratio of warps resident on multiprocessors."
    ),
    "gpm_tensor_percent": _Field(
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
        0.01,
        "Ratio of cycles in which tensor cores were active.",
    ),
    "gpm_dram_percent": _Field(
        "DCGM_FI_PROF_DRAM_ACTIVE", 0.01, "Ratio of cycles in which device memory was active."
    ),
}


# Metrics that a job that serves reports (`telemetry.TokenMeter`).
_SERVING = {
    "time_to_first_token_s": "burst_rt_time_to_first_token_seconds",
    "time_per_token_s": "burst_rt_time_per_output_token_seconds",
    "mean_time_per_token_s": "burst_rt_time_per_output_token_mean_seconds",
    "output_tokens_per_s": "burst_rt_output_tokens_per_second",
    "cached_tokens": "burst_rt_cache_tokens",
    "cache_capacity_tokens": "burst_rt_cache_capacity_tokens",
}


def exposition(snapshot: Snapshot, links: Iterable[LinkView]) -> bytes:
    """The text that Prometheus gets."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(snapshot, links))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, snapshot: Snapshot, links: Iterable[LinkView]) -> None:
        self._snapshot = snapshot
        self._links = list(links)

    def collect(self) -> Iterator[Metric]:
        sources = self._snapshot.sources
        yield from _of_job(self._snapshot)
        yield from _of_ranks(self._snapshot.ranks)
        yield from _of_links(self._links)
        yield from _of_gpus([source for source in sources if source.kind == "gpu"])
        yield from _of_sources("host", [source for source in sources if source.kind == "host"])
        yield from _of_sources("rank", [source for source in sources if source.kind == "process"])


# The values of a family's labels, and the value.
_Samples: TypeAlias = Iterable[tuple[tuple[str, ...], float]]


def _gauge(name: str, text: str, labels: tuple[str, ...], samples: _Samples) -> Metric:
    return _filled(GaugeMetricFamily(name, text, labels=labels), samples)


def _counter(name: str, text: str, labels: tuple[str, ...], samples: _Samples) -> Metric:
    return _filled(CounterMetricFamily(name, text, labels=labels), samples)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, samples: _Samples) -> Metric:
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


def _of_job(snapshot: Snapshot) -> Iterator[Metric]:
    job, progress = snapshot.job, snapshot.progress
    about = ((job.command, job.package), 1)
    yield _gauge("burst_rt_job_info", "The job: always 1.", ("command", "package"), [about])
    text = "When the job's hub began, in seconds since the epoch."
    yield _gauge("burst_rt_job_start_time_seconds", text, (), [((), job.began_at_s)])
    yield _gauge("burst_rt_job_ranks", "Ranks of the job.", (), [((), job.world_size)])
    if job.verdict is not None:
        labels = (job.verdict.kind, str(job.verdict.rank) if job.verdict.rank >= 0 else "")
        text = "What limits the job now, and the part of the ranks' time that it costs."
        yield _gauge("burst_rt_limit_ratio", text, ("kind", "rank"), [(labels, job.verdict.share)])
    text = "Telemetry that ranks dropped because a queue was full."
    yield _counter("burst_rt_telemetry_dropped_messages", text, (), [((), job.dropped)])
    if progress.at_s is not None:
        yield _gauge("burst_rt_job_step", "Step of the last report.", (), [((), progress.step)])
        values = sorted(progress.values.items())
        reported = (((name,), value) for name, value in values if name not in _SERVING)
        yield _gauge("burst_rt_job_report", "Values of the job's last report.", ("name",), reported)
    for name, field in _SERVING.items():
        if name in progress.values:
            label = METRICS[name].label
            text = f"{label[0].upper()}{label[1:]}."
            yield _gauge(field, text, (), [((), progress.values[name])])


def _of_ranks(ranks: Sequence[RankView]) -> Iterator[Metric]:
    yield _gauge(
        "burst_rt_rank_status",
        "1 for the status that a rank has.",
        ("rank", "host", "status"),
        (
            ((str(rank.rank), rank.host, status), float(rank.status == status))
            for rank in ranks
            for status in _STATUSES
        ),
    )
    overlaps = (((str(r.rank),), r.overlap) for r in ranks if r.overlap is not None)
    text = "Share of the transfer time that compute hid."
    yield _gauge("burst_rt_rank_overlap_ratio", text, ("rank",), overlaps)
    for name, text, count in _RANK_COUNTERS:
        yield _counter(name, text, ("rank",), (((str(rank.rank),), count(rank)) for rank in ranks))
    for name, text, work in _LANE_COUNTERS:
        counts = (
            ((str(rank.rank), lane), work(counters))
            for rank in ranks
            for lane, counters in rank.lanes.items()
        )
        yield _counter(name, text, ("rank", "lane"), counts)


_RANK_COUNTERS: tuple[tuple[str, str, Callable[[RankView], float]], ...] = (
    ("burst_rt_rank_calls", "Calls that have ended.", lambda rank: rank.calls),
    ("burst_rt_rank_compute_seconds", "Time in tiles.", lambda rank: rank.compute_s),
    (
        "burst_rt_rank_wait_seconds",
        "Time compute stood still for a transfer, or for a rank that came late.",
        lambda rank: rank.wait_s,
    ),
    ("burst_rt_rank_call_seconds", "Time in calls.", lambda rank: rank.total_s),
    ("burst_rt_rank_steps", "Steps that have ended.", lambda rank: rank.steps),
    ("burst_rt_rank_step_seconds", "Time in steps.", lambda rank: rank.step_s),
    (
        "burst_rt_rank_step_call_seconds",
        "Time in steps that was in calls of attention.",
        lambda rank: rank.step_call_s,
    ),
)
_LANE_COUNTERS: tuple[tuple[str, str, Callable[[LaneCounters], float]], ...] = (
    ("burst_rt_rank_lane_tasks", "Tasks done.", lambda lane: lane.tasks),
    (
        "burst_rt_rank_lane_bytes",
        "Bytes sent (lane network) or moved.",
        lambda lane: lane.size_bytes,
    ),
    ("burst_rt_rank_lane_flops", "Floating-point operations of tiles.", lambda lane: lane.flops),
)


def _of_links(links: Sequence[LinkView]) -> Iterator[Metric]:
    ends = ("sender", "receiver")
    rates = (((str(link.sender), str(link.receiver)), link.bytes_per_s) for link in links)
    text = "Bytes a second from rank to rank."
    yield _gauge("burst_rt_link_bytes_per_second", text, ends, rates)
    states = (
        ((str(link.sender), str(link.receiver), state), float(link.state == state))
        for link in links
        for state in _LINK_STATES
    )
    yield _gauge(
        "burst_rt_link_state", "1 for the state that a link has.", (*ends, "state"), states
    )


def _of_gpus(gpus: Sequence[SourceView]) -> Iterator[Metric]:
    labels = ("gpu", "UUID", "modelName", "Hostname", "ranks")
    for metric in sorted({name for gpu in gpus for name in gpu.values}):
        field, info = DCGM.get(metric), METRICS.get(metric)
        scale = field.scale if field else 1
        samples = (
            (_gpu_labels(gpu), gpu.values[metric] * scale) for gpu in gpus if metric in gpu.values
        )
        if field is not None:
            yield _gauge(field.name, field.help, labels, samples)
        elif info is not None:
            family = _counter if info.cumulative else _gauge
            text = f"{info.label} ({info.unit})"
            yield family(_name("gpu", metric), text, labels, samples)
    reasons = (
        ((*_gpu_labels(gpu), reason), float(int(bits) & bit > 0))
        for gpu in gpus
        if (bits := gpu.values.get("throttle_bits")) is not None
        for bit, reason in THROTTLE_REASONS.items()
    )
    text = "1 for each reason for which clocks are held back."
    yield _gauge("burst_rt_gpu_throttled", text, (*labels, "reason"), reasons)


# Metrics that Prometheus knows by another name: without abbreviated units, and no word twice.
_NAMES = {
    "energy_j": "energy_joules", "num_processes": "processes", "num_xid": "xid",
    "throttle_bits": "throttle_reasons", "process_percent": "cpu_percent",
    "host_memory_used_bytes": "memory_used_bytes", "num_threads": "threads",
}  # fmt: skip


def _name(of: str, metric: str) -> str:
    known = _NAMES.get(metric, metric)
    return f"burst_rt_{of}_{known}{'econd' * known.endswith('_per_s')}"


def _gpu_labels(gpu: SourceView) -> tuple[str, ...]:
    about, ranks = gpu.about, ",".join(map(str, gpu.ranks))
    uuid = gpu.name.removeprefix("gpu:")
    return about.get("index", ""), uuid, about.get("name", ""), gpu.host, ranks


def _of_sources(label: str, sources: Sequence[SourceView]) -> Iterator[Metric]:
    """label: what names a source: "host" or "rank"."""
    for metric in sorted({name for source in sources for name in source.values} & METRICS.keys()):
        info = METRICS[metric]
        samples = (
            ((source.host if label == "host" else source.name.removeprefix("rank:"),), value)
            for source in sources
            if (value := source.values.get(metric)) is not None
        )
        name = _name("host" if label == "host" else "process", metric)
        yield _gauge(name, f"{info.label} ({info.unit})", (label,), samples)
