"""Machine files: the shipped ones say what they should, a written one is read back the same, a
wrong one is refused by name.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest

from burst_rt.errors import ConfigError, InputError
from burst_rt.planning.machines import load_hardware, to_toml
from burst_rt.planning.masks import Causal, Full, Mask, SlidingWindow
from burst_rt.planning.strategies.ring_builder import tile_cost
from burst_rt.scheduler import Cost, GraphBuilder, Op
from burst_rt.scheduler.simulator import Device, Hardware, Link, Nics, Node, Rate, Switch

_RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
_SHIPPED = ["a100-pcie", "a100-sxm", "b200-sxm", "gb200-nvl72", "h100-sxm", "h200-sxm", "mi300x"]
_RATE = Rate(launch_s=1e-6, flops_per_s=1e12, bytes_per_s=1e11, efficiency=0.5)
_LINK = Link(latency_s=0.0, bytes_per_s=1e10, efficiency=0.75, duplex="half")
_RATES = {
    "forward": _RATE,
    "forward-untiled": replace(_RATE, flops_per_s=None),
    "score gradients": replace(_RATE, bytes_per_s=None, edge=0.25),
    "backward": replace(_RATE, efficiency=0.1),
    "default": replace(_RATE, launch_s=0.0),
}
_BARE = Hardware('a "bare" machine', Device(1 << 30, _RATES), Node(2, _LINK))
_FULL = replace(
    _BARE,
    node=Node(4, _LINK, 2, Switch(2, 3e9, 1.0), _LINK, replace(_LINK, duplex="full")),
    nics=Nics(2, replace(_LINK, work_byte_s=2e-10)),
)


def test_the_package_holds_the_shipped_files() -> None:
    files = resources.files("burst_rt.planning").joinpath("machines").iterdir()
    assert sorted(file.name for file in files) == [f"{name}.toml" for name in _SHIPPED]


@pytest.mark.parametrize("name", _SHIPPED)
def test_every_number_of_a_shipped_file_says_where_it_is_from(name: str) -> None:
    text = (
        resources.files("burst_rt.planning")
        .joinpath("machines", f"{name}.toml")
        .read_text(encoding="utf-8")
    )
    sources = set(re.findall(r"^#   ([A-Z]): .{20,}", text, re.MULTILINE))
    numbers = [line for line in text.splitlines() if re.match(r"\w+ = [\d.]", line)]
    assert len(numbers) > 20
    assert all(
        (found := re.search(r"  # ([A-Z]): ", line)) and found[1] in sources for line in numbers
    )


@pytest.mark.parametrize("name", _SHIPPED)
def test_a_shipped_machine_loads(name: str) -> None:
    machine = load_hardware(name)
    assert machine.name == name
    assert machine.device.memory_bytes >= 80e9
    assert machine.device.rates["forward"].efficiency > machine.device.rates["backward"].efficiency


def test_figures_that_tell_the_shipped_machines_apart() -> None:
    # H100: 1,979 TFLOP/s with sparsity; NVLink 900 GB/s both ways; eight cards of 400 Gb/s.
    machine = load_hardware("h100-sxm")
    assert machine.device.rates["forward"].flops_per_s == 1979e12 / 2
    assert machine.node.link.bytes_per_s == 900e9 / 2
    assert machine.nics is not None
    assert machine.nics.count * machine.nics.link.bytes_per_s * 8 == 8 * 400e9
    assert load_hardware("h200-sxm").device.rates["forward"].bytes_per_s == 4.8e12
    # PCIe has no link but the bus, on which all eight meet.
    pcie = load_hardware("a100-pcie").node
    assert pcie.host_link is None
    assert pcie.link.efficiency < 0.5 < load_hardware("a100-sxm").node.link.efficiency


_MASKS: dict[str, Mask] = {
    "full": Full(), "causal": Causal(), "window of 1,024": SlidingWindow(1023),
    "window of 4,096": SlidingWindow(4095),
}  # fmt: skip
# TFLOP/s of one tile by Hopper's own forward kernel, and ms of whole calls, 16 heads of 128
# (benchmarks/LOG.md, "On a GPU: a forward with a producer").
_FORWARD = {
    ("full", 4096): 590, ("full", 8192): 630, ("full", 16384): 645,
    ("causal", 8192): 552, ("causal", 16384): 641,
}  # fmt: skip
_FORWARD_MS = {
    ("full", 32768): 13.0, ("causal", 32768): 6.97, ("window of 4,096", 32768): 2.35,
    ("window of 1,024", 32768): 0.912,
}  # fmt: skip


def _tile(mask: str, tokens: int, *, forward: bool) -> Cost:
    pieces = _MASKS[mask].pieces(range(tokens), range(tokens))
    return tile_cost(pieces, (4 if forward else 10) * 2048, 4096, 8192)


def test_the_file_of_an_h100_has_the_speeds_that_were_measured() -> None:
    """Whatever the mask: that of a cell, and what an edge costs."""
    rates = load_hardware("h100-sxm").device.rates
    for (mask, tokens), tflops in _FORWARD.items():
        cost = _tile(mask, tokens, forward=True)
        told = cost.flops / rates["forward"].seconds(cost)
        assert told == pytest.approx(tflops * 1e12, rel=0.12), (mask, tokens)
    for (mask, tokens), ms in _FORWARD_MS.items():
        told = rates["forward"].seconds(_tile(mask, tokens, forward=True))
        assert told == pytest.approx(ms / 1e3, rel=0.12), (mask, tokens)
    compared = 0
    for table, column in (
        ("gpu-kernels-h100", "triton TFLOP/s"), ("gpu-masks-h100", "backward TFLOP/s"),
    ):  # fmt: skip
        written = json.loads((_RESULTS / f"{table}.json").read_text(encoding="utf-8"))
        *_, rows = written.values()
        for row in rows:
            of_forward = row.get("direction") == "forward"
            if row["mask"] not in _MASKS or row.get("head_dim", 128) != 128 or of_forward:
                continue
            if row["tokens"] < 16384 and row["mask"] != "full":
                continue  # few blocks keep a GPU busy badly
            cost = _tile(row["mask"], row["tokens"], forward=False)
            told = cost.flops / rates["backward"].seconds(cost)
            assert told == pytest.approx(row[column] * 1e12, rel=0.1), row
            compared += 1
    assert compared == 9


@pytest.mark.parametrize(
    "machine", [_BARE, _FULL, *map(load_hardware, _SHIPPED)], ids=lambda machine: machine.name
)
def test_what_is_written_is_read_back_the_same(machine: Hardware, tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(to_toml(machine), encoding="utf-8")
    assert load_hardware(path) == machine
    assert load_hardware(str(path)) == machine


def test_a_task_takes_launch_plus_arithmetic_plus_memory() -> None:
    g = GraphBuilder(0, 1)
    out = g.buffer("out")
    for name in ("forward", "backward", "add"):
        g.compute(name, Op(name), writes=[out], cost=Cost(flops=2 * 10**12, size_bytes=3 * 10**11))
    # 2 s of arithmetic and 3 s of memory, at half the nominal rate, or a tenth.
    tasks = g.build().tasks
    assert [_BARE.device.seconds(task) for task in tasks] == [1e-6 + 10.0, 1e-6 + 50.0, 10.0]
    # A kernel of the program's own, where the machine knows it.
    assert [_BARE.device.seconds(task, "untiled") for task in tasks] == [
        1e-6 + 6.0,
        1e-6 + 50.0,
        10.0,
    ]


def test_the_beginning_of_a_name_is_enough_where_it_is_one_machines() -> None:
    assert load_hardware("h100") == load_hardware("h100-sxm")
    with pytest.raises(InputError, match="got 'a100'"):
        load_hardware("a100")


def test_what_is_no_text_in_a_file_is_refused(tmp_path: Path) -> None:
    path, pipe = tmp_path / "machine.toml", tmp_path / "pipe"
    path.write_bytes(b"\xff\xfe\x80")
    os.mkfifo(pipe)
    for where, said in (
        (path, "it is no text in UTF-8"), (pipe, "it is no file"), ("a" * 5000, "name too long"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=said):
            load_hardware(where)
    path.write_text(to_toml(_BARE), encoding="utf-8-sig")
    assert load_hardware(path) == _BARE


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(
        InputError,
        match=r"\['a100-pcie', .*\] or the path of a TOML file, got 'b9000'; there is no such file",
    ):
        load_hardware("b9000")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("ranks = 2", "ranks = 0", "node.ranks: expected more than 0, got 0"),
        ("ranks = 2", "ranks = 2.5", r"node.ranks: expected an integer, got 2\.5"),
        ("ranks = 2", "ranks = true", "node.ranks: expected an integer, got True"),
        ("ranks = 2", "", "'node.ranks' is missing; expected an integer"),
        ("ranks = 2", "ranks = 2\nrank = 2", "unknown field 'node.rank'; expected .*'ranks'"),
        (
            "efficiency = 0.75",
            "efficiency = -1",
            "node.link.efficiency: expected more than 0, got -1",
        ),
        (
            "efficiency = 0.75",
            "efficiency = 3.0",
            r"node.link.efficiency: expected at most 1, .* is reached, got 3\.0",
        ),
        (
            "efficiency = 0.75",
            "efficiency = nan",
            "node.link.efficiency: expected a number of at most 1e[+]30, got nan",
        ),
        (
            "efficiency = 0.75",
            'efficiency = "0.75"',
            "node.link.efficiency: expected a number, got '0.75'",
        ),
        (
            "latency_s = 0.0",
            "latency_s = -0.5",
            r"node.link.latency_s: expected at least 0, got -0\.5",
        ),
        (
            'duplex = "half"',
            'duplex = "both"',
            "node.link.duplex: expected 'full' or 'half', got 'both'",
        ),
        ("[device.rates.backward]", "[device.backward]", "unknown field 'device.backward'"),
        (
            "[device.rates.default]",
            "[device.rates.other]",
            "device.rates: expected tables, one of them 'default', got",
        ),
        ("launch_s = 1e-06", "", "'device.rates.forward.launch_s' is missing; expected a number"),
        ("ranks = 2", f"ranks = 1{400 * '0'}", r"node.ranks: .* of at most 1e\+30, got more"),
        ("ranks = 2", f"ranks = 1{5000 * '0'}", "expected TOML, got .*4300 digits"),
        ("latency_s = 0.0", "latency_s = 1e308", r"latency_s: .* of at most 1e\+30, got 1e\+308"),
        ("efficiency = 0.75", "efficiency = 1e-320", "expected at least 1e-30, got 1e-320"),
        ("[node]", f"a = {20_000 * '['}\n[node]", "expected TOML, got .*recursion"),
        ("[node]", "[[node]]", "node: expected a table"),
        ("[node]", "[node", "expected TOML"),
        ("name =", "nome =", "unknown field 'nome'"),
        (r"name = ", 'name = ""  # ', "name: expected a string that is not empty, got ''"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place_and_what_is_expected(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "machine.toml"
    text = to_toml(_BARE)
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as caught:
        load_hardware(path)
    assert str(path) in str(caught.value)
