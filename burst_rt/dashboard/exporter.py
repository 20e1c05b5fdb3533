"""`/metrics` for Prometheus, with DCGM's names: a snapshot in its text format, made when scraped.

GPU fields have the names, units and labels of NVIDIA's DCGM exporter
(github.com/NVIDIA/dcgm-exporter, `etc/default-counters.csv`) where that has them, so dashboards and
alerts made for it work here. The runtime's own fields begin with `burst_rt_`. A value that a source
has not measured is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from burst_rt.dashboard.links import LinkView
from burst_rt.telemetry.metrics import METRICS
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
    "temperature_c": _Field("DCGM_FI_DEV_GPU_TEMP", 1, "GPU temperature (in C)."),
    "memory_temperature_c": _Field("DCGM_FI_DEV_MEMORY_TEMP", 1, "Memory temperature (in C)."),
    "sm_clock_mhz": _Field("DCGM_FI_DEV_SM_CLOCK", 1, "SM clock frequency (in MHz)."),
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
        self._links = links

    def collect(self) -> Iterator[Metric]:
        yield from _of_job(self._snapshot)
        yield from _of_ranks(self._snapshot.ranks)
        yield from _of_links(self._links)
        yield from _of_gpus([source for source in self._snapshot.sources if source.kind == "gpu"])
        yield from _of_sources(
            [source for source in self._snapshot.sources if source.kind in ("host", "process")]
        )


def _of_job(snapshot: Snapshot) -> Iterator[Metric]:
    job, progress = snapshot.job, snapshot.progress
    info = GaugeMetricFamily(
        "burst_rt_job_info", "The job: always 1.", labels=("command", "package")
    )
    info.add_metric((job.command, job.package), 1)
    yield info
    yield GaugeMetricFamily(
        "burst_rt_job_start_time_seconds",
        "When the job's hub began, in seconds since the epoch.",
        job.began_at_s,
    )
    yield GaugeMetricFamily("burst_rt_job_ranks", "Ranks of the job.", job.world_size)
    yield CounterMetricFamily(
        "burst_rt_telemetry_dropped_messages",
        "Telemetry that ranks dropped because a queue was full.",
        job.dropped,
    )
    if progress.at_s is not None:
        yield GaugeMetricFamily("burst_rt_job_step", "Step of the last report.", progress.step)
        reported = GaugeMetricFamily(
            "burst_rt_job_report", "Values of the job's last report.", labels=("name",)
        )
        for name, value in sorted(progress.values.items()):
            if name not in _SERVING:
                reported.add_metric((name,), value)
        yield reported
    for name, field in _SERVING.items():
        if name in progress.values:
            label = METRICS[name].label
            yield GaugeMetricFamily(field, f"{label[0].upper()}{label[1:]}.", progress.values[name])


def _of_ranks(ranks: Iterable[RankView]) -> Iterator[Metric]:
    status = GaugeMetricFamily(
        "burst_rt_rank_status",
        "1 for the status that a rank has.",
        labels=("rank", "host", "status"),
    )
    overlap = GaugeMetricFamily(
        "burst_rt_rank_overlap_ratio",
        "Share of the transfer time that compute hid.",
        labels=("rank",),
    )
    counters = [(_counter(*row[:2], ("rank",)), row[2]) for row in _RANK_COUNTERS]
    tasks = _counter("burst_rt_rank_lane_tasks", "Tasks done.", ("rank", "lane"))
    sizes = _counter(
        "burst_rt_rank_lane_bytes", "Bytes sent (lane network) or moved.", ("rank", "lane")
    )
    flops = _counter(
        "burst_rt_rank_lane_flops", "Floating-point operations of tiles.", ("rank", "lane")
    )
    for rank in ranks:
        name = str(rank.rank)
        for word in _STATUSES:
            status.add_metric((name, rank.host, word), float(rank.status == word))
        if rank.overlap is not None:
            overlap.add_metric((name,), rank.overlap)
        for family, value in counters:
            family.add_metric((name,), value(rank))
        for lane, counts in rank.lanes.items():
            tasks.add_metric((name, lane), counts.tasks)
            sizes.add_metric((name, lane), counts.size_bytes)
            flops.add_metric((name, lane), counts.flops)
    yield from (status, overlap, *(family for family, _ in counters), tasks, sizes, flops)


_RANK_COUNTERS: tuple[tuple[str, str, Callable[[RankView], float]], ...] = (
    ("burst_rt_rank_calls", "Calls that have ended.", lambda rank: rank.calls),
    ("burst_rt_rank_compute_seconds", "Time in tiles.", lambda rank: rank.compute_s),
    (
        "burst_rt_rank_wait_seconds",
        "Time compute stood still while a transfer was under way.",
        lambda rank: rank.wait_s,
    ),
    ("burst_rt_rank_call_seconds", "Time in calls.", lambda rank: rank.total_s),
)


def _of_links(links: Iterable[LinkView]) -> Iterator[Metric]:
    rates = GaugeMetricFamily(
        "burst_rt_link_bytes_per_second",
        "Bytes a second from rank to rank.",
        labels=("sender", "receiver"),
    )
    states = GaugeMetricFamily(
        "burst_rt_link_state",
        "1 for the state that a link has.",
        labels=("sender", "receiver", "state"),
    )
    for link in links:
        ends = (str(link.sender), str(link.receiver))
        rates.add_metric(ends, link.bytes_per_s)
        for word in _LINK_STATES:
            states.add_metric((*ends, word), float(link.state == word))
    yield from (rates, states)


def _of_gpus(gpus: list[SourceView]) -> Iterator[Metric]:
    labels = ("gpu", "UUID", "modelName", "Hostname", "ranks")
    for metric in sorted({name for gpu in gpus for name in gpu.values}):
        field, info = DCGM.get(metric), METRICS.get(metric)
        if field is not None:
            family: Metric = GaugeMetricFamily(field.name, field.help, labels=labels)
        elif info is not None:
            name, text = f"burst_rt_gpu_{metric}", f"{info.label} ({info.unit})"
            family = (
                _counter(name, text, labels)
                if info.cumulative
                else GaugeMetricFamily(name, text, labels=labels)
            )
        else:
            continue
        for gpu in gpus:
            if metric in gpu.values:
                value = gpu.values[metric] * (field.scale if field else 1)
                family.add_metric(_gpu_labels(gpu), value)  # type: ignore[attr-defined]  # both families have it
        yield family


def _gpu_labels(gpu: SourceView) -> tuple[str, ...]:
    about = gpu.about
    ranks = ",".join(map(str, gpu.ranks))
    return (
        about.get("index", ""),
        gpu.name.removeprefix("gpu:"),
        about.get("name", ""),
        gpu.host,
        ranks,
    )


def _of_sources(sources: list[SourceView]) -> Iterator[Metric]:
    for kind, label in (("host", "host"), ("process", "rank")):
        own = [source for source in sources if source.kind == kind]
        for metric in sorted({name for source in own for name in source.values if name in METRICS}):
            info = METRICS[metric]
            family = GaugeMetricFamily(
                f"burst_rt_{kind}_{metric}", f"{info.label} ({info.unit})", labels=(label,)
            )
            for source in own:
                if metric in source.values:
                    family.add_metric(
                        (source.host if kind == "host" else source.name.removeprefix("rank:"),),
                        source.values[metric],
                    )
            yield family


def _counter(name: str, text: str, labels: tuple[str, ...]) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, labels=labels)
