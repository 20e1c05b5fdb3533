"""Calibrating: a machine that is busy with something else is noticed, one that is not is believed;
nothing wrong is written.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import burst_rt
from burst_rt.errors import ConfigError
from burst_rt.launch.main import cli
from burst_rt.launch.plan import calibrate
from burst_rt.launch.plan.doubts import BusyCores, doubts
from burst_rt.planning.fit import Sample
from burst_rt.planning.machines import to_toml
from burst_rt.scheduler import Cost
from burst_rt.scheduler.simulator import Device, Hardware, Link, Node, Rate

_MACHINE = Hardware(
    "some CPU",
    Device(1 << 32, {"forward": Rate(1e-4, 2e10), "default": Rate(1e-4)}),
    Node(2, Link(2e-4, 1e9, 1.0, "full"), cores=2),
)


def _samples(noise: float) -> list[Sample]:
    """Tasks of several sizes, ten of each, that take up to 1 + noise times as long as they
    should.
    """
    random.seed(3)
    sizes = (10**8, 10**9, 10**10)
    return [
        Sample("forward", Cost(n), (1e-4 + n / 2e10) * (1 + noise * random.random()))
        for n in sizes
        for _ in range(10)
    ]


def _doubts(
    samples: Sequence[Sample],
    machine: Hardware = _MACHINE,
    *,
    others: float = 0.1,
    free: float = 0.0,
) -> str:
    return "; ".join(doubts(samples, machine, others, free, 2))


def test_a_quiet_machine_is_believed() -> None:
    assert _doubts(_samples(0.2)) == ""
    # Cores that the ranks leave may be busy.
    assert _doubts(_samples(0.2), others=5.0, free=6.0) == ""


def test_equal_tasks_that_take_unequally_long_are_noticed() -> None:
    assert "the times of equal tasks differ too much" in _doubts(_samples(4.0))


def test_other_processes_are_noticed() -> None:
    assert (
        _doubts(_samples(0.1), others=1.2)
        == "other processes kept 1.2 cores busy, and 2 ranks leave them 0"
    )


def test_a_launch_that_cannot_be_is_noticed() -> None:
    odd = replace(_MACHINE, device=Device(1 << 32, {"forward": Rate(0.19, 2e10)}))
    assert (
        _doubts(_samples(0.1), odd) == "starting forward would take 190 ms, which is far too long"
    )
    # Of whole matrices the shortest task takes long itself.
    slow = [sample._replace(seconds=sample.seconds + 0.15) for sample in _samples(0.1)]
    assert _doubts(slow, odd) == ""
    assert (
        _doubts(_samples(0.1), replace(_MACHINE, device=Device(1 << 32, {"forward": Rate(0.19)})))
        == ""
    )
    far = replace(_MACHINE, node=replace(_MACHINE.node, link=Link(0.05, 1e9, 1.0, "full")))
    assert _doubts(_samples(0.1), far) == "an empty message would take 50 ms, which is far too long"


def test_cores_are_counted() -> None:
    busy = BusyCores()
    until_s = time.process_time() + 0.5
    while time.process_time() < until_s:
        pass
    host, own = busy.so_far()
    assert 0.1 < own < 1.2
    assert host > 0.5 * own


def test_figures_of_a_busy_machine_are_not_written_unless_forced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(argv: Sequence[str], **_: object) -> int:
        options = json.loads(argv[-1])
        Path(options["made"]).write_text(to_toml(_MACHINE), encoding="utf-8")
        Path(options["doubts"]).write_text("it was so\nand so\n", encoding="utf-8")
        return 0

    monkeypatch.setattr("burst_rt.launch.measure.ranks.launch", measure)
    out = tmp_path / "machine.toml"
    with pytest.raises(
        ConfigError, match=r"the machine was busy: it was so; and so\. Nothing was written"
    ) as refused:
        CliRunner().invoke(cli, ["calibrate", "--out", str(out)], catch_exceptions=False)
    assert refused.value.exit_code != 0
    assert "\n" not in str(refused.value)
    assert not out.exists()
    done = CliRunner().invoke(cli, ["calibrate", "--out", str(out), "--force"])
    assert done.exit_code == 0, done.output
    assert f"wrote {out}" in done.output
    assert out.read_text(encoding="utf-8").startswith(
        "# Doubtful: it was so.\n# Doubtful: and so.\n"
    )


def test_sizes_that_would_take_too_long_are_left_out_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calibrate, "_SECONDS", dict.fromkeys(calibrate._STRATEGIES, 0.0))
    monkeypatch.setattr(calibrate, "_LINK_S", 0.0)
    monkeypatch.setattr(calibrate, "_LINEAR", calibrate._LINEAR[:1])

    def measure(ctx: burst_rt.Context) -> tuple[list[str], set[str]]:
        measuring = calibrate.Calibration(
            ctx, heads=2, head_dim=16, dtype=torch.float32, repeats=1, max_tokens=1024
        )
        hardware = measuring.hardware(lambda what: None)
        return measuring.left_out, set(hardware.device.rates)

    first, second = burst_rt.run_local(2, measure, timeout_s=120)
    assert first == second
    left_out, rates = first
    assert left_out == [
        f"{name} from 512 tokens a rank" for name in ("ring-kv", "burst", "all-to-all")
    ]
    assert {"forward", "backward", "forward-untiled", "linear", "default"} <= rates
