"""Samples of a host's cores and of a rank's own process, from psutil.

They have the shape of a GPU's samples, and come from machines with and without a GPU.
"""

from __future__ import annotations

import time
from pathlib import Path

import psutil

from burst_rt.telemetry.messages import SourceInfo, SourceSample

__all__ = ["HostSampler", "ProcessSampler"]

# Seconds between two readings of threads: each thread is a file to read.
_THREADS_EVERY_S = 1.0


class HostSampler:
    """Cores, memory and network of this host."""

    def __init__(self, host: str) -> None:
        self._name = f"host:{host}"
        self._host = host
        psutil.cpu_percent(percpu=True)  # the first answer says nothing
        self._at_s, self._sent, self._received = time.perf_counter(), *_network()

    def source(self) -> SourceInfo:
        """The host as a source."""
        memory = psutil.virtual_memory()
        about = {"cores": str(psutil.cpu_count()), "memory_bytes": str(memory.total)}
        metrics = [
            "cpu_percent",
            "cpu_most_percent",
            "host_memory_used_bytes",
            "net_tx_bytes_per_s",
            "net_rx_bytes_per_s",
        ]
        return SourceInfo(
            name=self._name, kind="host", host=self._host, metrics=metrics, about=about
        )

    def sample(self) -> SourceSample:
        """A sample of the host's activity since the last sample. Does not block."""
        cores = psutil.cpu_percent(percpu=True)
        memory = psutil.virtual_memory()
        now_s, sent, received = time.perf_counter(), *_network()
        elapsed_s = max(1e-6, now_s - self._at_s)
        values = {
            "cpu_percent": sum(cores) / max(1, len(cores)),
            "cpu_most_percent": max(cores, default=0.0),
            "host_memory_used_bytes": float(memory.total - memory.available),
            "net_tx_bytes_per_s": max(0, sent - self._sent) / elapsed_s,
            "net_rx_bytes_per_s": max(0, received - self._received) / elapsed_s,
        }
        self._at_s, self._sent, self._received = now_s, sent, received
        return SourceSample(self._name, now_s, values, {"core_percent": cores})


class ProcessSampler:
    """CPU, memory and threads of this process."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._process = psutil.Process()
        self._at_s = time.perf_counter()
        self._busy_s = time.process_time()
        self._threads_at_s = 0.0
        self._threads: dict[int, float] = {}

    def sample(self, telemetry_percent: float) -> SourceSample:
        """A sample of the process's activity since the last sample. telemetry_percent: part of a
        core that telemetry's own threads took. Does not block.
        """
        now_s, busy_s = time.perf_counter(), time.process_time()
        values = {
            "process_percent": 100 * (busy_s - self._busy_s) / max(1e-6, now_s - self._at_s),
            "rss_bytes": float(self._process.memory_info().rss),
            "telemetry_percent": telemetry_percent,
        }
        self._at_s, self._busy_s = now_s, busy_s
        details = {}
        since_s = now_s - self._threads_at_s
        if since_s >= _THREADS_EVERY_S:
            threads = {t.id: t.user_time + t.system_time for t in self._process.threads()}
            if self._threads:
                details["thread_percent"] = [
                    100 * (took - self._threads.get(i, 0.0)) / since_s
                    for i, took in sorted(threads.items())
                ]
            values["num_threads"] = float(len(threads))
            self._threads, self._threads_at_s = threads, now_s
        return SourceSample(self._source, now_s, values, details)


def _network(devices: Path = Path("/sys/class/net")) -> tuple[int, int]:
    """Bytes sent and received by this host. devices: where the kernel lists its network devices."""
    # Without the loopback, which carries what the ranks of one host send each other by sockets: the
    # question here is what leaves the host.
    counters = psutil.net_io_counters(pernic=True)
    counters.pop("lo", None)
    # Bonds, bridges and VLANs count what their parts count, too. A container may have no part.
    parts = {name: c for name, c in counters.items() if (devices / name / "device").exists()}
    counters = parts or counters
    sent = sum(c.bytes_sent for c in counters.values())
    received = sum(c.bytes_recv for c in counters.values())
    return sent, received
