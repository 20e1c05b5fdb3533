"""Samples of NVIDIA GPUs, from NVML, on a thread of their own.

NVML's package is nvidia-ml-py, its module pynvml; see docs.nvidia.com/deploy/nvml-api.

The readings that a chip and its driver have are found out once; the others are left out. NVML may
be missing, fail at any call, hang, or give a value that cannot be: then figures are missing, an
event says why, and nothing else changes. GPUs are found by UUID or by PCI address, never by CUDA's
numbers, which need not be NVML's.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from burst_rt.telemetry.messages import FromRank, Note, Severity, SourceInfo, SourceSample
from burst_rt.telemetry.metrics import HEALTHY_REASONS, plausible, throttle_reasons

__all__ = ["GpuId", "NvmlSampler", "NvmlThread", "gpu_source"]

# Seconds until a call is said to hang. Its own thread goes on waiting for it; no other thread does.
_SLOW_S = 5.0
# Number of failures in a row after which a reading is given up.
_MAX_FAILURES = 10
_SAY_AGAIN_S = 60.0
_PROCESSES_EVERY_S = 1.0
_SLOW_PCIE = "pcie_throughput"  # taken only where there are no counters
# Minimum number of seconds that a rate is taken over: NVML does not update its counters by the
# microsecond.
_RATE_OVER_S = 0.005
# A scope of nvmlFieldValue_t: all links taken together.
_ALL_LINKS = 0xFFFFFFFF

_log = logging.getLogger("burst_rt.telemetry")


class GpuId(NamedTuple):
    """A GPU as a rank knows it; "" means unknown."""

    uuid: str  # may begin with "GPU-"
    pci: str  # address "domain:bus:device.0" in hexadecimal


def gpu_source(uuid: str) -> str:
    """The name of a GPU's source; "" without a GPU."""
    return f"gpu:{uuid.removeprefix('GPU-')}" if uuid else ""


class _Unsupported(Exception):
    """This chip or driver does not have a reading."""


class _Gpu:
    """One GPU: which readings it has, and how to take them."""

    def __init__(self, nvml: Any, handle: Any, source: str) -> None:  # pynvml has no types
        self.nvml = nvml
        self.handle = handle
        self.source = source
        self.total_bytes = float("inf")
        self.details: dict[str, list[float]] = {}
        self._first: dict[str, float] = {}
        self._last: dict[str, tuple[float, float]] = {}
        self._processes_at_s = 0.0
        self._num_processes = 0
        self._num_xid = 0
        self.notes: list[tuple[Severity, str, str]] = []
        self._noted: dict[str, float] = {}
        self._throttled = 0
        self._prepared: dict[str, Any] = {}
        # Failures in a row, of the readings that this chip and its driver have.
        names = [name for name in _READINGS if name != _SLOW_PCIE]
        self.failures = {name: 0 for name in names if self._has(name)}
        if "pcie_counters" not in self.failures and self._has(_SLOW_PCIE):
            self.failures[_SLOW_PCIE] = 0

    def _has(self, reading: str) -> bool:
        try:
            _READINGS[reading](self)
        except (self.nvml.NVMLError, _Unsupported):
            return False
        return True

    def read(self) -> dict[str, float]:
        """The values of all readings that work now."""
        values: dict[str, float] = {}
        for name in list(self.failures):
            try:
                values |= _READINGS[name](self)
                self.failures[name] = 0
            except (self.nvml.NVMLError, _Unsupported) as error:
                self.failures[name] += 1
                if self.failures[name] == 1:
                    self._note(Severity.WARNING, "nvml", f"{name}: {error}")
                if self.failures[name] >= _MAX_FAILURES:
                    del self.failures[name]
        return values

    def _note(self, severity: Severity, kind: str, text: str) -> None:
        """Notes a text, which may be true of each sample, once a minute."""
        now_s = time.monotonic()
        if now_s - self._noted.get(text, -math.inf) >= _SAY_AGAIN_S:
            self._noted[text] = now_s
            self.notes.append((severity, kind, f"{self.source}: {text}"))

    def sensible(self, values: dict[str, float]) -> dict[str, float]:
        """The values that can be true."""
        good = {name: value for name, value in values.items() if plausible(name, value)}
        if good.get("memory_used_bytes", 0.0) > self.total_bytes:
            del good["memory_used_bytes"]
        return good

    def field(self, number: int, scope: int = 0) -> float:
        """A field by its number. Raises _Unsupported where the chip has no such field."""
        value = self.nvml.nvmlDeviceGetFieldValues(self.handle, [(number, scope)])[0]
        if value.nvmlReturn:
            raise _Unsupported(f"field {number}")
        kinds = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
        if value.valueType >= len(kinds):
            raise _Unsupported(f"field {number} of type {value.valueType}")
        return float(getattr(value.value, kinds[value.valueType]))

    def since_start(self, name: str, value: float) -> float:
        """How much a counter has grown since it was first read."""
        return value - self._first.setdefault(name, value)

    def _rate(self, name: str, value: float) -> dict[str, float]:
        now_s = time.perf_counter()
        last = self._last.get(name)
        if last is not None and now_s - last[0] < _RATE_OVER_S:
            return {}
        self._last[name] = (now_s, value)
        # A counter that wraps gives no rate.
        grown = last is not None and value >= last[1]
        return {name: (value - last[1]) / (now_s - last[0])} if last is not None and grown else {}

    def utilisation(self) -> dict[str, float]:
        rates = self.nvml.nvmlDeviceGetUtilizationRates(self.handle)
        return {"sm_percent": float(rates.gpu), "memory_busy_percent": float(rates.memory)}

    def memory(self) -> dict[str, float]:
        memory = self.nvml.nvmlDeviceGetMemoryInfo(self.handle)
        self.total_bytes = float(memory.total)
        return {"memory_used_bytes": float(memory.used)}

    def throttle(self) -> dict[str, float]:
        try:
            bits = int(self.nvml.nvmlDeviceGetCurrentClocksEventReasons(self.handle))
        except self.nvml.NVMLError:  # drivers before 535 know only the older name
            bits = int(self.nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self.handle))
        unhealthy = bits & ~HEALTHY_REASONS
        if unhealthy & ~self._throttled and plausible("throttle_bits", float(bits)):
            reasons = ", ".join(throttle_reasons(unhealthy))
            self._note(Severity.WARNING, "throttle", f"clocks are held back: {reasons}")
        self._throttled = unhealthy
        return {"throttle_bits": float(bits)}

    def pcie_counters(self) -> dict[str, float]:
        sent = self.field(self.nvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES)
        received = self.field(self.nvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES)
        return self._rate("pcie_tx_bytes_per_s", sent) | self._rate("pcie_rx_bytes_per_s", received)

    def pcie_throughput(self) -> dict[str, float]:
        # NVML returns KB/s. It watches the link for 20 ms at each of these calls.
        sent, received = (
            self.nvml.nvmlDeviceGetPcieThroughput(self.handle, way)
            for way in (self.nvml.NVML_PCIE_UTIL_TX_BYTES, self.nvml.NVML_PCIE_UTIL_RX_BYTES)
        )
        return {"pcie_tx_bytes_per_s": 1e3 * sent, "pcie_rx_bytes_per_s": 1e3 * received}

    def nvlink(self) -> dict[str, float]:
        # NVML counts KiB.
        sent = 1024 * self.field(self.nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _ALL_LINKS)
        received = 1024 * self.field(self.nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, _ALL_LINKS)
        return self._rate("nvlink_tx_bytes_per_s", sent) | self._rate(
            "nvlink_rx_bytes_per_s", received
        )

    def processes(self) -> dict[str, float]:
        now_s = time.perf_counter()
        if now_s - self._processes_at_s > _PROCESSES_EVERY_S:
            processes = self.nvml.nvmlDeviceGetComputeRunningProcesses(self.handle)
            self._processes_at_s, self._num_processes = now_s, len(processes)
            pids = [float(p.pid) for p in processes]
            sizes = [float(p.usedGpuMemory or 0) for p in processes]
            self.details = {"process_pid": pids, "process_bytes": sizes}
        return {"num_processes": float(self._num_processes)}

    def ecc(self) -> dict[str, float]:
        nvml = self.nvml
        kinds = {
            "ecc_corrected": nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
            "ecc_uncorrected": nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
        }
        counts = {}
        for name, kind in kinds.items():
            before = self._last.get(name, (0.0, 0.0))[1]
            total = nvml.nvmlDeviceGetTotalEccErrors(self.handle, kind, nvml.NVML_VOLATILE_ECC)
            count = self.since_start(name, float(total))
            if count > before and name == "ecc_uncorrected":
                text = f"memory errors that could not be corrected: {count:g}"
                self._note(Severity.ERROR, "ecc", text)
            self._last[name] = (0.0, count)
            counts[name] = count
        return counts

    def xid(self) -> dict[str, float]:
        nvml = self.nvml
        if "xid" not in self._prepared:
            self._prepared["xid"] = events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(self.handle, nvml.nvmlEventTypeXidCriticalError, events)
        try:
            while self._num_xid < 1000:
                event = nvml.nvmlEventSetWait_v2(self._prepared["xid"], 0)
                self._num_xid += 1
                text = f"XID {event.eventData} (docs.nvidia.com/deploy/xid-errors)"
                self._note(Severity.ERROR, "xid", text)
        except nvml.NVMLError as error:
            if error.value != nvml.NVML_ERROR_TIMEOUT:
                raise
        return {"num_xid": float(self._num_xid)}

    def gpm(self) -> dict[str, float]:
        nvml = self.nvml
        names = {
            "gpm_sm_percent": nvml.NVML_GPM_METRIC_SM_UTIL,
            "gpm_occupancy_percent": nvml.NVML_GPM_METRIC_SM_OCCUPANCY,
            "gpm_tensor_percent": nvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
            "gpm_dram_percent": nvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
        }
        if "gpm" not in self._prepared:
            if not nvml.nvmlGpmQueryDeviceSupport(self.handle).isSupportedDevice:
                raise _Unsupported("GPM")
            self._prepared["gpm"] = [nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()]
            nvml.nvmlGpmSampleGet(self.handle, self._prepared["gpm"][1])
            return {}
        before, now = self._prepared["gpm"] = self._prepared["gpm"][::-1]
        nvml.nvmlGpmSampleGet(self.handle, now)
        asked = nvml.c_nvmlGpmMetricsGet_t()
        asked.version, asked.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(names)
        asked.sample1, asked.sample2 = before, now
        for i, number in enumerate(names.values()):
            asked.metrics[i].metricId = number
        nvml.nvmlGpmMetricsGet(asked)
        return {
            name: float(asked.metrics[i].value)
            for i, name in enumerate(names)
            # NaN where the time between the samples was too short to measure anything.
            if not asked.metrics[i].nvmlReturn and not math.isnan(asked.metrics[i].value)
        }


def _energy(gpu: _Gpu) -> dict[str, float]:
    joules = gpu.nvml.nvmlDeviceGetTotalEnergyConsumption(gpu.handle) / 1e3
    return {"energy_j": gpu.since_start("energy", joules)}


def _temperature(gpu: _Gpu) -> dict[str, float]:
    nvml = gpu.nvml
    value = nvml.nvmlDeviceGetTemperature(gpu.handle, nvml.NVML_TEMPERATURE_GPU)
    return {"temperature_c": float(value)}


def _clock(gpu: _Gpu, metric: str, kind: int, what: str = "Clock") -> dict[str, float]:
    return {metric: float(getattr(gpu.nvml, f"nvmlDeviceGet{what}Info")(gpu.handle, kind))}


def _power(gpu: _Gpu, metric: str, what: str) -> dict[str, float]:
    return {metric: getattr(gpu.nvml, f"nvmlDeviceGet{what}")(gpu.handle) / 1e3}


# What reads some values of a GPU as they are now, by the name that notes give it. A counter whose
# rate is wanted gives nothing the first time.
_READINGS: dict[str, Callable[[_Gpu], dict[str, float]]] = {
    "utilisation": _Gpu.utilisation,
    "memory": _Gpu.memory,
    "power": lambda gpu: _power(gpu, "power_w", "PowerUsage"),
    "power_cap": lambda gpu: _power(gpu, "power_cap_w", "EnforcedPowerLimit"),
    "energy": _energy,
    "temperature": _temperature,
    "memory_temperature": lambda gpu: {
        "memory_temperature_c": gpu.field(gpu.nvml.NVML_FI_DEV_MEMORY_TEMP)
    },
    "sm_clock": lambda gpu: _clock(gpu, "sm_clock_mhz", gpu.nvml.NVML_CLOCK_SM),
    "max_clock": lambda gpu: _clock(gpu, "sm_clock_max_mhz", gpu.nvml.NVML_CLOCK_SM, "MaxClock"),
    "memory_clock": lambda gpu: _clock(gpu, "memory_clock_mhz", gpu.nvml.NVML_CLOCK_MEM),
    "throttle": _Gpu.throttle,
    "pcie_counters": _Gpu.pcie_counters,
    "nvlink": _Gpu.nvlink,
    "processes": _Gpu.processes,
    "ecc": _Gpu.ecc,
    "xid": _Gpu.xid,
    "gpm": _Gpu.gpm,
    "pcie_throughput": _Gpu.pcie_throughput,
}


class NvmlSampler:
    """Samples the GPUs of this host that `gpus` names; none named means all. Raises
    pynvml.NVMLError without NVML.
    """

    def __init__(self, gpus: Sequence[GpuId], host: str) -> None:
        import pynvml

        pynvml.nvmlInit()
        self.host = host
        self.driver = _words(pynvml, pynvml.nvmlSystemGetDriverVersion)
        self.gpus: list[_Gpu] = []
        self.sources: list[SourceInfo] = []
        self._doubted: set[tuple[str, str]] = set()
        uuids = {gpu.uuid.removeprefix("GPU-"): gpu for gpu in gpus if gpu.uuid}
        addresses = {gpu.pci.lower(): gpu for gpu in gpus if gpu.pci}
        for i in range(pynvml.nvmlDeviceGetCount()):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(i)
            except pynvml.NVMLError:
                continue  # all GPUs of the host are counted: another job's, or one that is lost
            uuid = _words(pynvml, pynvml.nvmlDeviceGetUUID, handle).removeprefix("GPU-")
            address = _pci_address(pynvml, handle)
            rank_gpu = uuids.get(uuid) or addresses.get(address)
            if gpus and rank_gpu is None:
                continue
            # The source has the name that the GPU's rank gives it.
            name = gpu_source(rank_gpu.uuid if rank_gpu and rank_gpu.uuid else uuid)
            gpu = _Gpu(pynvml, handle, name)
            time.sleep(_RATE_OVER_S)  # readings with a rate have been read once
            about = {
                "name": _words(pynvml, pynvml.nvmlDeviceGetName, handle),
                "driver": self.driver,
                "pci": address,
                "index": str(i),
            }
            if gpu.total_bytes != float("inf"):
                about["memory_bytes"] = str(int(gpu.total_bytes))
            self.gpus.append(gpu)
            metrics = sorted(gpu.sensible(gpu.read()))
            self.sources.append(
                SourceInfo(name=name, kind="gpu", host=host, metrics=metrics, about=about)
            )

    def sample(self) -> list[SourceSample | Note]:
        """Samples every GPU once, and notes what is worth an event. Blocks as long as NVML does."""
        messages: list[SourceSample | Note] = []
        for gpu in self.gpus:
            values = gpu.read()
            at_s = time.perf_counter()
            good = gpu.sensible(values)
            for name in values.keys() - good.keys():
                if (gpu.source, name) not in self._doubted:
                    self._doubted.add((gpu.source, name))
                    text = f"{gpu.source}: {name} = {values[name]:g} is impossible and is left out"
                    messages.append(Note(at_s, Severity.WARNING, "nvml", text))
            messages += [Note(at_s, *note) for note in gpu.notes]
            gpu.notes.clear()
            messages.append(SourceSample(gpu.source, at_s, good, gpu.details))
        return messages


class NvmlThread:
    """Samples GPUs in a thread of its own, so that a driver that hangs makes no other thread wait.
    put: takes the messages.
    """

    def __init__(
        self, put: Callable[[FromRank], None], gpus: Sequence[GpuId], host: str, rate_hz: float
    ) -> None:
        self.percent = 0.0  # percent of a core
        self._put = put
        self._gpus = gpus
        self._host = host
        self._period_s = 1.0 / rate_hz
        self._asked_s: float | None = None
        self._told = False
        self._stopped = threading.Event()
        threading.Thread(target=self._main, name="burst_rt nvml", daemon=True).start()

    def stop(self) -> None:
        """Ends the thread after the call under way; does not wait for it."""
        self._stopped.set()

    def look_after(self) -> None:
        """Notes once that NVML has hung for 5 s. Another thread calls this now and then."""
        asked_s = self._asked_s
        if asked_s is not None and not self._told and time.perf_counter() - asked_s > _SLOW_S:
            self._told = True
            self._note(
                Severity.WARNING,
                f"{self._host}: NVML has not answered for {_SLOW_S:g} s; no figures of GPUs until "
                "NVML answers",
            )

    def _main(self) -> None:
        try:
            self._run()
        except Exception as error:  # noqa: BLE001  (whatever the library raises: figures end, the rank goes on)
            if type(error).__name__.startswith("NVMLError_LibraryNotFound") or isinstance(
                error, ImportError
            ):
                _log.debug("no NVML on %s: %s", self._host, error)
            else:
                self._note(
                    Severity.WARNING,
                    f"{self._host}: no figures of GPUs from now on: {type(error).__name__}: "
                    f"{error}",
                )
        finally:
            self._asked_s = None

    def _run(self) -> None:
        self._asked_s = time.perf_counter()
        sampler = NvmlSampler(self._gpus, self._host)
        for source in sampler.sources:
            self._put(source)
        while sampler.gpus and not self._stopped.is_set():
            began_s, used_s = time.perf_counter(), time.thread_time()
            self._asked_s = began_s
            for message in sampler.sample():
                self._put(message)
            self._asked_s = None
            if self._told:
                self._told = False
                self._note(Severity.INFO, f"{self._host}: NVML answers again")
            took_s = time.perf_counter() - began_s
            self.percent = 100 * (time.thread_time() - used_s) / max(self._period_s, took_s)
            self._stopped.wait(max(0.0, self._period_s - took_s))

    def _note(self, severity: Severity, text: str) -> None:
        self._put(Note(time.perf_counter(), severity, "nvml", text))


def _words(nvml: Any, read: Callable[..., object], *handle: object) -> str:
    """A name that NVML has for something; "" if it has none or the name is not text."""
    try:
        return str(read(*handle))
    except (nvml.NVMLError, UnicodeDecodeError):
        return ""


def _pci_address(nvml: Any, handle: Any) -> str:
    try:
        info = nvml.nvmlDeviceGetPciInfo(handle)
    except nvml.NVMLError:
        return ""
    return f"{info.domain:08x}:{info.bus:02x}:{info.device:02x}.0"
