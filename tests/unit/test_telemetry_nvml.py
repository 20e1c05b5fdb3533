"""Samples of GPUs, with a library that stands in for NVML: what is there, what is left out, and
everything that can go wrong.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from standin import build_standin, with_standin

from burst_rt.telemetry.metrics import METRICS

_DEADLINE_S = 30.0
_SAMPLE = """
import json, sys, time
import msgspec
from burst_rt.telemetry.messages import Note
from burst_rt.telemetry.rank.nvml import GpuId, NvmlSampler
sampler = NvmlSampler([GpuId(*pair) for pair in json.loads(sys.argv[1])], "here")
messages = []
for _ in range(int(sys.argv[2])):
    messages += sampler.sample()
    time.sleep(0.01)
plain = [[type(m).__name__, msgspec.structs.asdict(m)] for m in messages]
print(json.dumps([[msgspec.structs.asdict(s) for s in sampler.sources], plain]))
"""
_THREAD = """
import sys, time
from burst_rt.telemetry.rank import nvml
nvml._SLOW_S = 0.2
said = []
thread = nvml.NvmlThread(said.append, [], "here", 50.0)
end_s = time.perf_counter() + float(sys.argv[1])
while time.perf_counter() < end_s:
    time.sleep(0.02)
    thread.look_after()
for message in said:
    print(type(message).__name__, getattr(message, "text", ""))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_standin(tmp_path_factory.mktemp("nvml"))


class _Sampled(NamedTuple):
    # As JSON has them.
    sources: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    notes: list[dict[str, Any]]


def _run(source: str, environment: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, "-P", "-c", source, *arguments]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=_DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _sample(
    library: Path, wanted: list[tuple[str, str]] | None = None, times: int = 3, **settings: str
) -> _Sampled:
    sources, messages = json.loads(
        _run(_SAMPLE, with_standin(library, **settings), json.dumps(wanted or []), str(times))
    )
    by_kind: dict[str, list[dict[str, Any]]] = {"SourceSample": [], "Note": []}
    for kind, message in messages:
        by_kind[kind].append(message)
    return _Sampled(sources, by_kind["SourceSample"], by_kind["Note"])


def test_a_gpu_that_may_not_be_opened_hides_no_other(library: Path) -> None:
    """NVML counts all GPUs of a host, also those of other jobs."""
    got = _sample(library, STANDIN_DEVICES="3", STANDIN_CLOSED="1")
    assert [source["name"] for source in got.sources] == ["gpu:0000-0", "gpu:0000-2"]
    assert got.samples


def test_a_new_chip_has_all_there_is(library: Path) -> None:
    got = _sample(library, STANDIN_XID="1", STANDIN_REASONS=str(0x44))
    assert [source["name"] for source in got.sources] == ["gpu:0000-0", "gpu:0000-1"]
    assert got.sources[0]["about"]["name"] == "Stand-in 0"
    last = got.samples[-2]["values"]
    assert got.samples[-2]["source"] == "gpu:0000-0"
    expected = {name for name in METRICS if name in last}
    # GPM's DRAM figure is the one that this chip says it has not.
    assert set(last) == expected == {
        "sm_percent", "memory_busy_percent", "memory_used_bytes", "power_w", "power_cap_w",
        "energy_j", "temperature_c", "memory_temperature_c",
        "sm_clock_mhz", "sm_clock_max_mhz", "memory_clock_mhz", "throttle_bits",
        "pcie_tx_bytes_per_s", "pcie_rx_bytes_per_s", "nvlink_tx_bytes_per_s",
        "nvlink_rx_bytes_per_s", "num_processes", "ecc_corrected", "ecc_uncorrected", "num_xid",
        "gpm_sm_percent", "gpm_occupancy_percent",
        "gpm_tensor_percent",
    }  # fmt: skip
    assert (last["sm_percent"], last["power_w"], last["temperature_c"]) == (51.0, 123.456, 55.0)
    assert last["memory_used_bytes"] == 3 << 30
    assert (last["power_cap_w"], last["sm_clock_max_mhz"]) == (700.0, 2010.0)
    assert last["gpm_tensor_percent"] == 15.0
    assert 0 < last["energy_j"] < 100  # since the start, not since the driver was loaded
    assert 0 < last["ecc_corrected"] < 100
    assert last["pcie_tx_bytes_per_s"] > 0
    assert last["nvlink_rx_bytes_per_s"] > last["pcie_rx_bytes_per_s"]  # counted in KiB
    assert got.samples[-2]["details"] == {
        "process_pid": [4321.0],
        "process_bytes": [float(2 << 30)],
    }
    texts = [note["text"] for note in got.notes]
    assert "gpu:0000-0: XID 79 (docs.nvidia.com/deploy/xid-errors)" in texts
    # Once a GPU, not at every sample; and not of a power cap, at which a healthy chip works.
    assert not any("power cap" in text for text in texts)
    assert sum("held back: hardware thermal slowdown" in text for text in texts) == 2


def test_what_an_old_chip_has_not_is_left_out(library: Path) -> None:
    got = _sample(library, STANDIN_OLD="1", STANDIN_DEVICES="1")
    last = got.samples[-1]["values"]
    missing = {
        "energy_j",
        "power_cap_w",
        "sm_clock_max_mhz",
        "memory_temperature_c",
        "nvlink_tx_bytes_per_s",
        "gpm_sm_percent",
        "gpm_tensor_percent",
    }
    assert not missing & set(last)
    assert not missing & set(got.sources[0]["metrics"])
    # The slow way for PCIe, in its place.
    assert (last["pcie_tx_bytes_per_s"], last["pcie_rx_bytes_per_s"]) == (1e6, 1.001e6)


def test_gpus_are_found_by_uuid_or_by_pci_address(library: Path) -> None:
    assert [s["name"] for s in _sample(library, [("0000-1", "")]).sources] == ["gpu:0000-1"]
    # A rank that only knows the address: the source has the name the rank knows.
    assert [s["name"] for s in _sample(library, [("", "00000000:41:00.0")]).sources] == [
        "gpu:0000-0"
    ]
    assert _sample(library, [("something else", "")]).sources == []


def test_garbage_is_left_out_and_said_once(library: Path) -> None:
    got = _sample(library, times=4, STANDIN_GARBAGE="1", STANDIN_DEVICES="1")
    for sample in got.samples:
        assert not {
            "sm_percent",
            "memory_used_bytes",
            "power_w",
            "temperature_c",
            "gpm_sm_percent",
        } & set(sample["values"])
        assert sample["values"]["sm_clock_mhz"] == 1980
    doubts = [note["text"] for note in got.notes if "is impossible" in note["text"]]
    assert len(doubts) == len(set(doubts)) >= 5
    assert got.sources[0]["about"]["name"] == ""


def test_what_was_not_measured_is_left_out_and_no_doubt(library: Path) -> None:
    got = _sample(library, STANDIN_NAN="1", STANDIN_DEVICES="1")
    assert all("gpm_dram_percent" not in sample["values"] for sample in got.samples)
    assert got.samples[-1]["values"]["gpm_sm_percent"] > 0
    assert not [note["text"] for note in got.notes if "is impossible" in note["text"]]


def test_a_gpu_that_is_lost_stops_giving_figures(library: Path) -> None:
    got = _sample(library, times=15, STANDIN_FAIL_AFTER="120", STANDIN_DEVICES="1")
    assert got.samples[0]["values"]
    assert not set(got.samples[-1]["values"]) - {"num_processes", "num_xid"}
    assert any("GPU is lost" in note["text"] for note in got.notes)
    assert len(got.notes) < 30


def test_a_driver_that_hangs_keeps_nobody_waiting(library: Path) -> None:
    started_s = time.monotonic()
    out = _run(_THREAD, with_standin(library, STANDIN_HANG_AFTER="300"), "1.5")
    assert time.monotonic() - started_s < 15
    assert (
        "Note here: NVML has not answered for 0.2 s; no figures of GPUs until NVML answers"
        in out.splitlines()
    )
    assert out.splitlines().count("SourceSample ") > 0


def test_without_a_driver_there_is_nothing_to_say(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_text("no library", encoding="utf-8")
    assert _run(_THREAD, with_standin(tmp_path), "0.3") == ""
