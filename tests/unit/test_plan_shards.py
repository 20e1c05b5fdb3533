"""Plans of sharded weights, of data x context, and of many ranks, against whole simulations."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner
from covering import sampled

from burst_rt.errors import InputError
from burst_rt.launch.main import cli
from burst_rt.launch.plan import compare as comparing
from burst_rt.launch.plan.bounds import Known
from burst_rt.launch.plan.compare import COMPARED, Answer, compare
from burst_rt.launch.plan.layers import SpreadLayer
from burst_rt.launch.plan.model import (
    Question,
    candidates_of,
    forecast_model,
    parse_strategy,
    tile_of,
)
from burst_rt.launch.plan.models import parse_model
from burst_rt.launch.plan.shards import OPTIMIZERS, SHARDS, Shard, held_bytes, ring_bytes
from burst_rt.planning.chooser import LAYOUTS
from burst_rt.planning.machines import load_hardware
from burst_rt.scheduler.simulator import Hardware

_H100 = load_hardware("h100-sxm")
_SMALL = parse_model("layers=2,dim=1024,heads=16,kv_heads=8,ffn=2816,vocab=32000")


_WIDE = parse_model("layers=2,dim=4096,heads=32,kv_heads=8,ffn=14336")


def _of_nodes(ranks: int) -> Hardware:
    return replace(_H100, node=replace(_H100.node, ranks=ranks))


def test_what_is_held_by_hand() -> None:
    """Of 80 weights in layers of at most 8 and 20 outside, on 10 ranks: parts of 10."""
    held = {shard: held_bytes(shard, 80, 20, 8, 10) for shard in SHARDS}
    assert held == {
        "none": 100 * (2 + 2 + 12),
        "zero1": 100 * (2 + 2) + 10 * 12,
        "zero2": 100 * 2 + 10 * 2 + 8 * 2 + 10 * 12,
        # A part of each; two layers' weights, one's gradients; what is outside, and its gradient.
        "fsdp": 10 * (2 + 2 + 12) + 8 * (2 * 2 + 2) + 20 * (2 + 2),
    }


def test_what_is_sent_by_hand() -> None:
    """Every rank of 4 nodes of 8 sends 7/8 to its neighbour, and its share of 3/4 to a node."""
    assert ring_bytes(3200, 100, 32, 8) == (2800, 300)
    assert ring_bytes(3200, 400, 8, 8) == (2800, 0)
    assert ring_bytes(3200, 100, 32, 1) == (3100, 0)


@pytest.mark.parametrize("context", [None, 4, 6, 8, 12])
def test_sharded_weights_are_gathered_twice_and_gradients_scattered(context: int | None) -> None:
    """On 24 ranks of 3 nodes, whatever ranks share a sequence."""
    about = Question(_SMALL, 4800, "train", shard="zero1", context=context, activations="kept")
    whole, sharded = (
        forecast_model(replace(about, shard=shard), "ring-kv", 24, _H100)
        for shard in ("zero1", "fsdp")
    )
    ((count, _),) = _SMALL.layers
    weights = count * 2 * _SMALL.layer.num_weights()
    once = weights * 7 // 8 + weights * 2 // (3 * 8)
    # Unsharded, the gradients are reduced and gathered.
    assert sharded.sent_bytes - whole.sent_bytes == pytest.approx(once, rel=1e-3)
    assert sharded.memory_bytes < whole.memory_bytes


def test_a_data_axis_shards_and_does_not_lengthen_attention() -> None:
    about = Question(_SMALL, 1 << 17, "train", shard="fsdp", context=8, activations="kept")
    one, four = (forecast_model(about, "ring-kv", world, _H100) for world in (8, 32))
    assert four.memory_bytes < one.memory_bytes
    # The optimizer of each has a fourth of the weights.
    default = _H100.device.rates["default"]
    assert default.bytes_per_s is not None
    fewer = OPTIMIZERS["adamw"].moved * _SMALL.num_weights * (1 / 8 - 1 / 32)
    spared_s = fewer / default.bytes_per_s / default.efficiency
    assert one.time_s - 1.01 * spared_s <= four.time_s < 1.05 * one.time_s
    with pytest.raises(InputError, match="--context: expected a divisor of --world 12, got 8"):
        forecast_model(about, "ring-kv", 12, _H100)


@sampled(
    world=(16, 32),
    nodes=(4, 8),
    layout=("zigzag", "contiguous", "balanced"),
    shard=("zero1", "fsdp"),
    tokens=(4096, 100_000),
)
def test_one_rank_stands_for_those_that_do_the_same(
    world: int, nodes: int, layout: str, shard: Shard, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = _of_nodes(nodes)
    question = Question(_SMALL, tokens, "train", layout=layout, shard=shard)
    folded = forecast_model(question, f"hybrid:{nodes}", world, machine)
    monkeypatch.setattr(SpreadLayer, "_fold", lambda *_, **__: 1)
    whole = forecast_model(question, f"hybrid:{nodes}", world, machine)
    assert folded.time_s == pytest.approx(whole.time_s, rel=1e-3)
    assert folded.idle_s == pytest.approx(whole.idle_s, rel=1e-2, abs=1e-6)
    assert folded.sent_bytes == whole.sent_bytes


@pytest.mark.parametrize(
    ("strategy", "world", "machine", "layout", "mask", "told"),
    [
        ("two-level", 64, "h100-sxm", "zigzag", "causal", True),
        pytest.param("burst", 64, "h100-sxm", "contiguous", "full", True, marks=pytest.mark.long),
        # Ranks wait much.
        pytest.param("ring-kv", 64, "a100-pcie", "zigzag", "causal", False, marks=pytest.mark.long),
    ],
)
def test_shorter_rings_tell_about_long_ones(
    strategy: str,
    world: int,
    machine: str,
    layout: str,
    mask: str,
    told: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    question = Question(_WIDE, 16384 * world, "train", mask, layout=layout, shard="fsdp")
    hardware = load_hardware(machine)
    (candidate,) = candidates_of(question, strategy, world, hardware)
    (whole_candidate,) = candidates_of(question, strategy, world, hardware, whole=True)
    assert candidate.num_simulated < whole_candidate.num_simulated == world
    whole = whole_candidate.simulated()
    worlds: set[int] = set()
    simulated = SpreadLayer.simulated

    def counted(self: SpreadLayer, *args: Any, **options: Any) -> Any:
        worlds.add(self.world_size)
        return simulated(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(SpreadLayer, "simulated", counted)
        forecast = candidate.simulated()
    assert (max(worlds) < world) is told
    assert forecast.time_s == pytest.approx(whole.time_s, rel=1e-2)
    assert forecast.idle_s == pytest.approx(whole.idle_s, abs=1e-2 * whole.time_s)
    assert forecast.sent_bytes == pytest.approx(whole.sent_bytes, rel=1e-3)
    assert forecast.memory_bytes == pytest.approx(whole.memory_bytes, rel=1e-3)
    with monkeypatch.context() as patch:
        tile = tile_of(question, strategy, world, hardware)
        patch.setattr(SpreadLayer, "settled", lambda layer, _: layer)
        assert tile == tile_of(question, strategy, world, hardware)


def test_rings_whose_hops_differ_are_simulated_whole() -> None:
    about = Question(_SMALL, 64 * 8192, "train")
    for question, strategy, world in [
        (replace(about, mask="window:4095"), "ring-kv", 64),
        (replace(about, layout="balanced"), "ring-kv", 64),
        (replace(about, layout="contiguous"), "ring-kv", 64),
        (about, "direct", 64),
        (replace(about, seq_len=64 * 8000), "ring-kv", 64),  # few tokens a rank
        (about, "ring-kv", 60),  # no whole nodes
        (about, "ring-kv", 56),  # too few of them
        (replace(about, model=parse_model("qwen3.5-9b")), "ring-kv", 64),
    ]:
        (told,) = candidates_of(question, strategy, world, _H100)
        (whole,) = candidates_of(question, strategy, world, _H100, whole=True)
        assert told.num_simulated == whole.num_simulated == world


def test_a_thousand_ranks_are_told_by_few(monkeypatch: pytest.MonkeyPatch) -> None:
    worlds: list[int] = []
    choose = SpreadLayer._choose

    def counted(self: SpreadLayer, *args: Any, **options: Any) -> Any:
        worlds.append(self.world_size)
        return choose(self, *args, **options)

    monkeypatch.setattr(SpreadLayer, "_choose", counted)
    question = Question(_SMALL, 1 << 22, "train")
    for strategy in ("ring-kv", "two-level", "hybrid"):
        (candidate,) = candidates_of(question, strategy, 1024, _H100)
        assert candidate.simulates
        assert candidate.num_simulated <= 64
    (direct,) = candidates_of(question, "direct", 1024, _H100)
    assert not direct.simulates
    assert direct.bound.time_s > 0
    assert max(worlds) <= 320  # no program of a thousand ranks is made


def test_directions_that_do_the_same_are_simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[bool] = []
    simulated = SpreadLayer.simulated

    def counted(self: SpreadLayer, *args: Any, **options: Any) -> Any:
        runs.append(options["forward"])
        return simulated(self, *args, **options)

    monkeypatch.setattr(SpreadLayer, "simulated", counted)
    about = Question(_SMALL, 1 << 16, "train", activations="kept")
    passes: Known = {}
    strategies = ("ring-kv", "burst")
    candidates = [candidates_of(about, strategy, 4, _H100)[0] for strategy in strategies]
    times = [candidate.simulated(known=passes).time_s for candidate in candidates]
    assert (runs.count(True), runs.count(False)) == (1, 2)
    assert times == [forecast_model(about, strategy, 4, _H100).time_s for strategy in strategies]


@sampled(
    strategy=COMPARED,
    world=(4, 8, 16),
    machine=("a100-pcie", "h100-sxm"),
    layout=("zigzag", "contiguous"),
    shard=("zero1", "fsdp"),
)
def test_bounds_are_no_more_than_what_is_simulated(
    strategy: str, world: int, machine: str, layout: str, shard: Shard
) -> None:
    hardware = load_hardware(machine)
    question = Question(_SMALL, 50_000, "train", layout=layout, shard=shard)
    try:
        (candidate,) = candidates_of(question, strategy, world, hardware)
        bound = candidate.bound
    except InputError:
        return  # not for these ranks
    assert not bound.simulated
    whole = candidate.simulated()
    assert whole.simulated
    assert 0 < bound.time_s <= whole.time_s * (1 + 1e-9)
    assert bound.memory_bytes == whole.memory_bytes


def _answer(world: int, monkeypatch: pytest.MonkeyPatch, all_up_to: int, **options: Any) -> Answer:
    monkeypatch.setattr(comparing, "_ALL_UP_TO", all_up_to)
    question = Question(_SMALL, 1 << 18, "train", shard="fsdp", **options)
    assert _H100.nics is not None
    slow = replace(_H100.nics, link=replace(_H100.nics.link, bytes_per_s=5e9))
    return compare(question, replace(_H100, nics=slow), world)


@pytest.mark.parametrize("layout", ["zigzag", pytest.param("auto", marks=pytest.mark.long)])
def test_strategies_that_cannot_win_need_no_simulation(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[SpreadLayer] = []
    simulated = SpreadLayer.simulated

    def counted(self: SpreadLayer, *args: Any, **options: Any) -> Any:
        runs.append(self)
        return simulated(self, *args, **options)

    monkeypatch.setattr(SpreadLayer, "simulated", counted)
    quick = _answer(16, monkeypatch, 0, layout=layout)
    few = len(runs)
    runs.clear()
    whole = _answer(16, monkeypatch, 99, layout=layout)
    assert few < len(runs)
    assert quick.best == whole.best
    times = {f.strategy: f.time_s for f in whole.found}
    for f in quick.found:
        assert f.time_s == times[f.strategy] or (not f.simulated and f.time_s < times[f.strategy])


def test_worlds_that_are_too_large_to_simulate_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("burst_rt.launch.plan.model.SIMULATED_UP_TO", 4)
    answer = _answer(24, monkeypatch, 0)
    assert answer.best is not None
    assert answer.best.strategy == "hybrid:8"  # one rank for eight: three
    assert {f.simulated for f in answer.found if f.strategy != "hybrid:8"} == {False}


def _planned(words: str) -> Any:
    done = CliRunner().invoke(cli, ["plan", *words.split(), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_an_answer_says_how_to_run_it() -> None:
    about = "--hardware h100 --model qwen3-8b --seq 64K --world 32 --context 16"
    said = _planned(about)
    start, *lines = said["run"]
    assert "--nnodes 4 --nproc-per-node 8" in start
    calls = {
        ast.unparse(node.func): node
        for node in ast.walk(ast.parse("\n".join(line.strip() for line in lines)))
        if isinstance(node, ast.Call)
    }
    assert ast.literal_eval(calls["torch.distributed.init_device_mesh"].args[1]) == (2, 16)
    assert {"fully_shard", "burst_rt.init"} <= set(calls)
    tokens, kind = map(ast.literal_eval, calls["ctx.layout"].args)
    assert (tokens, kind in LAYOUTS) == (1 << 16, True)
    (strategy,) = [
        ast.literal_eval(word.value)
        for word in calls["burst_rt.burst_attention"].keywords
        if word.arg == "strategy"
    ]
    assert parse_strategy(strategy) == said["take"]
    assert "fully_shard" not in " ".join(_planned(f"{about} --shard zero1")["run"])


@pytest.mark.parametrize(
    ("kept", "line"),
    [
        ("kept", ""),
        ("attention-kept", "burst_rt.checkpoint(layer, hidden)"),
        ("computed-again", "torch.utils.checkpoint.checkpoint(layer, hidden, use_reentrant=False)"),
    ],
)
def test_a_program_keeps_what_its_memory_is_counted_for(kept: str, line: str) -> None:
    about = "--hardware h100 --model qwen3-8b --seq 32K --world 8"
    program = "\n".join(_planned(f"{about} --activations {kept}")["run"])
    assert line in program
    assert ("checkpoint" in program) == bool(line)


def test_a_program_leaves_each_layer_its_window() -> None:
    lines = _planned("--hardware h100 --model gpt-oss-20b --seq 64K --world 8")["run"]
    assert "mask=mask)  # each layer's own" in "\n".join(lines)


# As many on each host as torchrun starts, and no group of --tensor over two hosts.
@pytest.mark.parametrize(
    ("words", "hosts"), [("12", (2, 6)), ("12 --tensor 4", (3, 4)), ("16", (2, 8)), ("6", (1, 6))]
)
def test_what_is_started_is_what_was_forecast(words: str, hosts: tuple[int, int]) -> None:
    nodes, per_node = hosts
    about = f"--hardware h100 --model llama-7b --seq 96K --world {words}"
    said = _planned(about)
    assert f"--nnodes {nodes} --nproc-per-node {per_node}" in said["run"][0]
    rows = said["strategies"]
    assert [row["time_s"] for row in _planned(f"{about} --nodes {nodes}")["strategies"]] == [
        row["time_s"] for row in rows
    ]


def test_where_none_fits_it_says_what_would() -> None:
    about = "--hardware h100 --model llama-3-70b --seq 64K --world 24"
    said = _planned(f"{about} --shard zero1")
    assert said["take"] is None
    assert "None fits on any number of ranks up to 512." in said["why"]
    assert "makes it fit: --shard fsdp (" in said["why"]
    assert _planned(about)["take"] is not None
    # The time is there even so.
    assert all(row["time_s"] > 0 for row in said["strategies"])


def test_cards_of_another_rate() -> None:
    about = "--hardware h100 --model llama-3-8b --seq 64K --world 16"
    fast, slow = (_planned(f"{about} --link {rate}") for rate in ("400Gbit", "800Mbit"))
    assert fast["strategies"][0] == _planned(about)["strategies"][0]
    assert slow["strategies"][0]["time_s"] > 2 * fast["strategies"][0]["time_s"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--link 400", "--link: expected a rate such as 400Gbit or 800Mbit, got '400'"),
        ("--link 0Gbit", "--link: expected a rate"),
        ("--context 3", "--context: expected a divisor of --world 8, got 3"),
        ("--phase first-token --shard fsdp", "--shard fsdp: only training shards weights"),
    ],
)
def test_words_that_do_not_fit(words: str, said: str) -> None:
    about = "plan --hardware h100 --model llama-7b --seq 64K --world 8"
    done = CliRunner().invoke(cli, [*about.split(), *words.split()])
    told = str(done.exception) if done.exception else done.output
    assert said in told or said in done.output
