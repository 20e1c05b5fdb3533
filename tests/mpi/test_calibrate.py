"""This machine measured, and benchmarks that plan with the result: small and rough, but the whole
way.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from jobs import python_and_environment

from burst_rt.planning.machines import load_hardware

_SHAPE = ("--repeats", "1", "--heads", "2")


def _burst_rt(*words: str) -> str:
    return _run("-P", "-m", "burst_rt.launch.main", *words)


def _benchmark(*words: str, hardware: str = "none") -> str:
    return _run("-m", "benchmarks", *words, hardware=hardware)


def _run(*words: str, hardware: str = "none") -> str:
    python, environment = python_and_environment("torch")
    environment["BURST_RT_HARDWARE"] = hardware
    done = subprocess.run(
        [python, *words],
        env=environment,
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibrated") / "machine.toml"
    said = _burst_rt(
        "calibrate", "-n", "2", "--max-tokens", "1024", "--out", str(path), "--force", *_SHAPE
    )
    assert f"wrote {path}" in said
    return path


def test_what_is_measured_is_a_machine(calibrated: Path) -> None:
    machine = load_hardware(calibrated)
    assert {"forward", "backward", "forward-untiled", "scores", "linear", "default"} <= set(
        machine.device.rates
    )
    forward, default = machine.device.rates["forward"], machine.device.rates["default"]
    assert forward.flops_per_s is not None
    assert 1e8 < forward.flops_per_s < 1e14
    assert default.bytes_per_s is None or 1e7 < default.bytes_per_s < 1e13
    assert 1e7 < machine.node.link.bytes_per_s < 1e13
    # Ranks beyond those that were measured share their cores.
    assert machine.node.cores == 2
    assert machine.node.ranks > 2


def test_benchmarks_plan_with_it(calibrated: Path, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    _benchmark("predict", "--tokens", "512", *_SHAPE, "--out", str(out), hardware=str(calibrated))
    _benchmark(
        "strategies",
        "-n",
        "2",
        "--tokens",
        "512",
        "--group",
        "2",
        *_SHAPE,
        "--out",
        str(out),
        hardware=str(calibrated),
    )
    _benchmark("scaling", "-n", "1", "-n", "2", "--tokens", "512", *_SHAPE, "--out", str(out))
    results = json.loads(out.read_text())
    rows = next(
        rows for title, rows in results.items() if title.startswith("forecast against measured")
    )
    strategies = {
        "ring-kv",
        "burst",
        "bidirectional",
        "direct",
        "two-level",
        "all-to-all",
        "hybrid",
        "ring-naive",
        "burst-untiled",
    }
    assert {(row["strategy"], row["mask"], row["direction"]) for row in rows} == {
        (strategy, mask, direction)
        for strategy in strategies
        for mask in ("full", "causal")
        for direction in ("forward", "backward")
    }
    assert all(row["measured s"] > 0 and row["forecast s"] > 0 for row in rows)
    compared = next(rows for title, rows in results.items() if title.startswith("strategies"))
    # One key/value head for two ranks: not for all-to-all.
    assert all(row["all-to-all"] is None and row["slower %"] >= 0 for row in compared)
    assert sum(title.split()[0] in ("strong", "weak") for title in results) == 2
    pictures = sorted(path.name for path in tmp_path.glob("*.png"))
    assert pictures == [
        "bench.compare-2.png",
        "bench.predict-2.png",
        "bench.strong.png",
        "bench.weak.png",
    ]


def test_predicting_without_a_machine_file_says_what_to_do() -> None:
    with pytest.raises(AssertionError, match="run `burst-rt calibrate` first"):
        _benchmark("predict", "--tokens", "512", *_SHAPE)
