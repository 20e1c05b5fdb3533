"""Plans of meshes: context x tensor, pipeline x context, micro-batches, and optimizers."""

from __future__ import annotations

import ast
import json
import re
import time
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner

from burst_rt.errors import InputError
from burst_rt.launch.main import cli
from burst_rt.launch.plan.layers import LayerShape, SpreadLayer
from burst_rt.launch.plan.model import candidates_of, forecast_model
from burst_rt.launch.plan.models import parse_model
from burst_rt.launch.plan.printed import Ticker
from burst_rt.launch.plan.question import Question
from burst_rt.launch.plan.shards import OPTIMIZERS, held_bytes
from burst_rt.launch.plan.steps import Total, handover_seconds, of_step, pipeline_seconds
from burst_rt.planning.machines import load_hardware
from burst_rt.scheduler import check_world

_H100 = load_hardware("h100-sxm")
_SMALL = parse_model("layers=4,dim=1024,heads=16,kv_heads=8,ffn=2816,vocab=32000")
_WIDE = parse_model("layers=2,dim=4096,heads=32,kv_heads=8,ffn=14336")
_LAYER = LayerShape(dim=1024, num_heads=16, num_kv_heads=8, head_dim=64, ffn_dim=2816)


def _train(**options: Any) -> Question:
    return Question(_SMALL, 1 << 16, "train", activations="kept", **options)


@pytest.mark.parametrize("shard", ["zero1", "fsdp"])
@pytest.mark.parametrize("strategy", ["ring-kv", "burst", "two-level:2", "hybrid:2", "direct"])
@pytest.mark.parametrize(("world", "tensor", "replicas"), [(4, 2, 1), (2, 4, 2), (1, 8, 2)])
def test_graphs_of_a_mesh_fit(
    strategy: str, world: int, tensor: int, replicas: int, shard: Any
) -> None:
    layer = SpreadLayer(
        _LAYER, 4096, world, strategy.split(":")[0] if world == 1 else strategy,
        shard=shard, tensor=tensor, replicas=replicas, ranks_per_node=8,
    )  # fmt: skip
    world_size = layer.num_spread * layer.copies
    for forward in (True, False):
        schedules = layer.schedules(forward=forward)
        assert len(schedules) == world_size
        if layer.copies == 1:
            check_world([layer.graph(rank, forward=forward) for rank in range(world_size)])
        assert layer.seconds(_H100, forward=forward) > 0


def test_a_tensor_axis_divides_weights_heads_and_products() -> None:
    whole = SpreadLayer(_LAYER, 4096, 4, "ring-kv")
    split = replace(whole, tensor=2)
    rank = 0
    weights, norms = _LAYER.num_weights(), 2 * _LAYER.dim
    assert whole.memory(rank).weights == 2 * weights
    assert split.memory(rank).weights == 2 * (norms + (weights - norms) // 2)
    # Each member's ring has half of the heads; two sums of all rows go to the neighbour, 2 (T-1)/T
    # of them each.
    rows = 1024 * _LAYER.dim * 2
    sent = split.sent_bytes(rank, forward=True)
    assert sent == whole.sent_bytes(rank, forward=True) // 2 + 2 * rows
    for layer, tasks in ((whole, 1), (split, 2)):
        flops = sum(task.cost.flops for task in layer.graph(rank, forward=True).tasks)
        expected = sum(task.cost.flops for task in whole.graph(0, forward=True).tasks)
        assert flops == expected // tasks


def test_a_tensor_axis_alone_takes_about_megatrons_time() -> None:
    """On one place, only the sums' making differs: one exchange for theirs in steps."""
    question = _train(shard="zero1")
    axis = forecast_model(replace(question, tensor=8), "ring-kv", 8, _H100)
    megatron = forecast_model(question, "tensor-parallel", 8, _H100)
    assert axis.time_s == pytest.approx(megatron.time_s, rel=0.1)


@pytest.mark.parametrize("tensor", [3, 16])
def test_heads_that_a_tensor_axis_cannot_divide_are_named(tensor: int) -> None:
    with pytest.raises(InputError, match=r"--tensor: expected a divisor of num_(kv_)?heads"):
        forecast_model(_train(tensor=tensor), "ring-kv", 48, _H100)


def test_a_long_ring_beside_a_tensor_axis_is_told_by_shorter_ones() -> None:
    question = Question(_WIDE, 16384 * 32, "train", shard="fsdp", tensor=2, activations="kept")
    (candidate,) = candidates_of(question, "two-level", 64, _H100)
    assert candidate.num_simulated == 32
    told, whole = candidate.simulated(), forecast_model(question, "two-level", 64, _H100)
    assert told != whole
    assert told.time_s == pytest.approx(whole.time_s, rel=1e-2)


def test_a_pipeline_by_hand() -> None:
    """Full and empty once: (M + P - 1) slots of a forward and a backward. Then with handovers."""
    assert pipeline_seconds(1.0, 2.0, 0.0, 4, 8) == (8 + 3) * 3.0
    assert pipeline_seconds(1.0, 2.0, 0.0, 4, 1) == 4 * 3.0
    assert pipeline_seconds(1.0, 2.0, 0.5, 2, 1) == 2 * 3.0 + 2 * 0.5
    # The last of two stages goes forward at 1, backward at 3; the first follows it at once.
    assert pipeline_seconds(1.0, 1.0, 0.0, 2, 2) == 6.0


def test_a_step_by_hand() -> None:
    forward, usual, summing = Total(1.0, 0.1, 10), Total(2.0, 0.2, 20), Total(3.0, 0.4, 50)
    assert of_step(forward, usual, summing, 4, 1, (0.0, 0)) == pytest.approx(
        (4 * 1.0 + 3 * 2.0 + 3.0, 4 * 0.1 + 3 * 0.2 + 0.4, 4 * 10 + 3 * 20 + 50)
    )
    piped = of_step(forward, usual, summing, 4, 2, (0.0, 5))
    assert piped.time_s == pytest.approx((4 + 1) * 3.0 + 1.0)
    assert piped.idle_s == pytest.approx(1.1 + 0.3 + piped.time_s - 13.0)
    assert piped.sent_bytes == 150 + 4 * 5
    assert of_step(forward, usual, summing, 4, 3, (0.0, 5)).sent_bytes == 150 + 2 * 4 * 5


def test_a_handover_passes_a_card_for_each_rank() -> None:
    assert _H100.nics is not None
    link = _H100.nics.link
    expected = link.latency_s + 1e9 / (link.bytes_per_s * link.efficiency)
    assert handover_seconds(_H100, 32, 2, 10**9) == pytest.approx(expected)
    assert handover_seconds(_H100, 32, 1, 10**9) == 0.0
    assert handover_seconds(_H100, 8, 2, 10**9) < expected  # within a node


def test_stages_hold_their_layers_and_the_activations_of_the_micro_batches_ahead() -> None:
    one = forecast_model(_train(shard="none"), "ring-kv", 8, _H100)
    piped = forecast_model(_train(shard="none", pipeline=4, micro_batches=8), "ring-kv", 32, _H100)
    alone = forecast_model(_train(shard="none", pipeline=4, micro_batches=1), "ring-kv", 32, _H100)
    weights = _SMALL.num_weights - _SMALL.outside
    # A fourth of the layers, and half of what is outside.
    spared = (weights * 3 // 4 + _SMALL.outside // 2) * (2 + 2 + 12)
    ((count, shape),) = _SMALL.layers
    (layer,) = (SpreadLayer(shape, 1 << 16, 8, "ring-kv"),)
    kept = layer.memory(0).activations
    assert one.memory_bytes - alone.memory_bytes == pytest.approx(
        spared + (count - 1) * kept, rel=0.02
    )
    assert piped.memory_bytes - alone.memory_bytes == 3 * kept
    # Eight micro-batches through four stages of a layer each.
    slots = (8 + 3) / 4
    assert piped.time_s == pytest.approx(slots * one.time_s, rel=0.05)
    assert piped.idle_s > one.idle_s


def test_micro_batches_sum_their_gradients_once() -> None:
    one, four = (
        forecast_model(_train(shard="zero1", micro_batches=n), "ring-kv", 32, _H100) for n in (1, 4)
    )
    weights = 2 * (_SMALL.num_weights - _SMALL.outside)
    once = 2 * (weights * 7 // 8 + weights * 3 // (4 * 8))
    assert 4 * one.sent_bytes - four.sent_bytes == pytest.approx(3 * once, rel=1e-3)
    assert one.time_s < four.time_s <= 4 * one.time_s
    assert four.memory_bytes == one.memory_bytes
    # Sharded weights are gathered for each.
    one, four = (
        forecast_model(_train(shard="fsdp", micro_batches=n), "ring-kv", 32, _H100) for n in (1, 4)
    )
    assert four.sent_bytes == 4 * one.sent_bytes


def test_what_optimizers_hold_and_move_by_hand() -> None:
    held = {name: held_bytes("none", 80, 20, 8, 10, name) for name in OPTIMIZERS}
    # Weights and gradients of 2 bytes; the states; of 8 bits, with a scale for 256 numbers.
    assert held == {
        "adamw": 100 * (4 + 12), "adamw-bf16": 100 * (4 + 4), "adamw-8bit": 100 * 4 + 204,
        "sgd": 100 * 4,
    }  # fmt: skip
    times = {
        name: forecast_model(_train(shard="none", optimizer=name), "ring-kv", 8, _H100).time_s
        for name in OPTIMIZERS
    }
    rate = _H100.device.rates["default"]
    assert rate.bytes_per_s is not None
    per_byte = 1 / (rate.bytes_per_s * rate.efficiency)
    more = (OPTIMIZERS["adamw"].moved - OPTIMIZERS["sgd"].moved) * _SMALL.num_weights
    assert times["adamw"] - times["sgd"] == pytest.approx(more * per_byte, rel=1e-3)


def _planned(words: str) -> Any:
    done = CliRunner().invoke(cli, ["plan", *words.split(), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_what_would_make_it_fit_does() -> None:
    about = "--hardware a100-pcie --model llama-3-8b --world 8"
    said = _planned(f"{about} --seq 8M")
    assert said["take"] is None
    assert all(row["time_s"] > 0 for row in said["strategies"])
    (told,) = re.findall(r"Each of these makes it fit: (.*?)\.(?: |$)", said["why"])
    remedies = re.findall(r"(--\S+ \S+) \(([\d.]+) GB\)", told.replace("),", ") "))
    assert [words.split()[0] for words, _ in remedies] == ["--seq"]
    for words, size in remedies:
        there = _planned(f"{about} {words}")
        assert there["take"] is not None
        held = {row["memory_bytes"] for row in there["strategies"]}
        assert any(f"{each / 1e9:,.1f}" == size for each in held)


def test_settings_that_would_make_it_fit_are_told() -> None:
    about = "--hardware h100 --model llama-3-70b --seq 32K --world 24"
    said = _planned(f"{about} --shard zero1")
    assert said["take"] is None
    told = dict(re.findall(r"(--\S+ \S+) \(([\d.]+) GB\)", said["why"]))
    assert "--shard fsdp" in told
    for words in told:
        assert _planned(f"{about} {'' if 'shard' in words else '--shard zero1'} {words}")["take"]


@pytest.mark.parametrize(
    ("words", "axes", "sizes", "calls"),
    [
        ("--tensor 4", ("dp", "cp", "tp"), (1, 4, 4), {"parallelize_module", "fully_shard"}),
        (
            "--pipeline 2 --micro-batches 6 --context 4",
            ("pp", "dp", "cp"),
            (2, 2, 4),
            {"PipelineStage", "Schedule1F1B", "fully_shard"},
        ),
        (
            "--pipeline 2 --tensor 2 --optimizer adamw-8bit --shard none",
            ("pp", "dp", "cp", "tp"),
            (2, 1, 4, 2),
            {"DistributedDataParallel", "bitsandbytes.optim.AdamW8bit"},
        ),
    ],
)
def test_an_answer_says_how_its_mesh_is_run(
    words: str, axes: tuple[str, ...], sizes: tuple[int, ...], calls: set[str]
) -> None:
    said = _planned(f"--hardware h100 --model qwen3-8b --seq 64K --world 16 {words}")
    start, *lines = said["run"]
    assert "--nnodes 2 --nproc-per-node 8 --rdzv-backend c10d" in start
    made = {
        ast.unparse(node.func): node
        for node in ast.walk(ast.parse("\n".join(line.strip() for line in lines)))
        if isinstance(node, ast.Call)
    }
    mesh = made["torch.distributed.init_device_mesh"]
    assert ast.literal_eval(mesh.args[1]) == sizes
    assert ast.literal_eval(mesh.keywords[0].value) == axes
    assert calls <= set(made)
    if "Schedule1F1B" in made and "--micro-batches" in words:
        assert ast.literal_eval(made["Schedule1F1B"].keywords[0].value) == 6


def test_an_answer_that_takes_long_says_what_it_is_at(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("burst_rt.launch.plan.printed._QUIET_S", 0.0)
    monkeypatch.setattr("burst_rt.launch.plan.printed._BETWEEN_S", 0.01)
    said, deadline_s = "", time.monotonic() + 60
    with Ticker() as ticker:
        ticker.doing("64 ranks, burst")
        while "burst-rt: 64 ranks, burst\n" not in said:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
            said += capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--tensor 3", "--tensor: expected a divisor of --world 8, got 3"),
        ("--tensor 4 --pipeline 4", "expected their product to divide --world 8, got 4 x 4"),
        ("--tensor 2 --context 3", "--context: expected a divisor of --world 8 / 2 = 4, got 3"),
        ("--phase first-token --optimizer sgd", "--optimizer sgd: only training has one"),
        ("--phase first-token --pipeline 2", "--pipeline 2: only training is forecast with stages"),
        ("--phase first-token --micro-batches 2", "--micro-batches 2: only training has them"),
    ],
)
def test_meshes_that_are_none(words: str, said: str) -> None:
    about = "plan --hardware h100 --model llama-7b --seq 64K --world 8"
    done = CliRunner().invoke(cli, [*about.split(), *words.split()])
    told = str(done.exception) if done.exception else done.output
    assert said in told or said in done.output
