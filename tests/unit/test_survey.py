"""The survey: what ranks measure for `auto` when a job starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import burst_rt
from burst_rt import Context
from burst_rt.attention import survey as surveys
from burst_rt.planning.machines import parse_hardware, to_toml
from burst_rt.runtime.machine import Machine
from burst_rt.scheduler.simulator import Hardware


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Nothing is known. Returns the ranks that have measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(surveys, "_figures", None)
    ranks: list[int] = []
    measure = surveys._measured

    def counted(runtime: Any) -> Any:
        ranks.append(runtime.rank)
        return measure(runtime)

    monkeypatch.setattr(surveys, "_measured", counted)
    return ranks


def _hardware(ctx: Context) -> str:
    assert ctx.runtime.machine.hardware is not None
    return to_toml(ctx.runtime.machine.hardware)


def _run(world_size: int, **options: Any) -> list[str]:
    return burst_rt.run_local(world_size, _hardware, survey=True, timeout_s=60, **options)


def test_all_ranks_plan_with_the_same_figures(measured: list[int]) -> None:
    def run(ctx: Context) -> tuple[str, str]:
        layout = ctx.layout(512)
        q = torch.randn(1, layout.shard_len, 2, 16)
        return _hardware(ctx), burst_rt.explain(
            q, q, q, causal=True, layout=layout
        ).forward.explain()

    said = burst_rt.run_local(3, run, survey=True, timeout_s=60)
    assert len({text for text, _ in said}) == 1
    assert sorted(measured) == [0, 1, 2]
    machine = parse_hardware(said[0][0], "here")
    assert set(machine.device.rates) == {"forward", "backward", "default", "linear"}
    assert 1e6 < machine.node.link.bytes_per_s < 1e12
    assert 1e8 < (machine.device.rates["forward"].flops_per_s or 0) < 1e14
    assert "  forecast: ring-kv " in said[0][1]


def test_figures_are_in_steps() -> None:
    steps = {surveys._rounded(1e9 * (1 + i / 1000)) for i in range(90)}
    assert len(steps) in (1, 2)
    assert surveys._rounded(1 << 20) == float(f"{1 << 20:.4g}")
    assert surveys._rounded(1.03 * 2**0.25) == surveys._rounded(0.97 * 2**0.25)


def test_later_jobs_and_groups_find_the_figures(
    measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, _) = _run(2)
    assert _run(2) == [first, first]
    monkeypatch.setattr(surveys, "_figures", None)  # another process
    assert _run(2) == [first, first]
    assert sorted(measured) == [0, 1]
    # A smaller group of the same process.
    assert parse_hardware(_run(3)[0], "here").node.ranks == 3
    assert len(measured) == 2
    # Another job of other ranks measures.
    monkeypatch.setattr(surveys, "_figures", None)
    _run(3)
    assert len(measured) == 5


@pytest.mark.parametrize("text", ["", "name = 3", json.dumps({"a": 1}), "[device]"])
def test_damaged_figures_are_measured_again(
    text: str, measured: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = parse_hardware(_run(2)[0], "here")
    (file,) = (tmp_path / "burst_rt").glob("survey-*.json")

    def told(runtime: Any) -> Hardware:
        measured.append(runtime.rank)
        return first

    monkeypatch.setattr(surveys, "_measured", told)  # measuring takes seconds
    written = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(written | {"answer": text}), encoding="utf-8")
    monkeypatch.setattr(surveys, "_figures", None)
    _run(2)
    assert len(measured) == 4


def test_links_between_hosts_are_measured_and_not_remembered(
    measured: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ranks 0 and 1 as on one host, 2 and 3 as on another."""
    begin = Machine.__init__

    def apart(self: Machine, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        self.ranks_per_node = 2

    monkeypatch.setattr(Machine, "__init__", apart)
    machine = parse_hardware(_run(4)[0], "here")
    assert machine.node.ranks == 2
    assert machine.nics is not None
    assert machine.nics.count in (1, 2)
    assert not [*(tmp_path / "burst_rt").glob("survey-*.json")]
    monkeypatch.setattr(surveys, "_figures", None)
    _run(4)
    assert len(measured) == 8


def test_nobody_measures_unless_it_may(measured: list[int], tmp_path: Path) -> None:
    """Ranks as threads, a rank alone, a machine file, or a program that says so."""
    machine = _run(2)[0]
    assert (
        burst_rt.run_local(2, lambda ctx: ctx.runtime.machine.hardware, timeout_s=60) == [None] * 2
    )
    file = tmp_path / "machine.toml"
    file.write_text(machine.replace("measured", "written"), encoding="utf-8")
    count = len(measured)
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("BURST_RT_HARDWARE", str(file))
        assert "written" in _run(2)[0]
    with burst_rt.init(survey=True) as ctx:
        assert ctx.runtime.machine.hardware is None
    assert len(measured) == count
