"""Looking ahead from the command line: the paper's figures from its three calibration rows,
out-of-memory rows, models by their sizes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from burst_rt.baselines.layers import LayerShape
from burst_rt.errors import InputError
from burst_rt.launch.main import cli
from burst_rt.launch.plan.model import (
    ACTIVATIONS,
    MODELS,
    fewest_ranks,
    forecast_model,
    parse_model,
    published_mask,
    tile_of,
)
from burst_rt.launch.plan.paper import FIRST_TOKEN_S, OUT_OF_MEMORY, STRATEGIES
from burst_rt.launch.plan.words import parse_mask, parse_tokens
from burst_rt.planning.machines import load_hardware
from burst_rt.planning.masks import Causal, Chunked, Documents, First, Full, Prefix, SlidingWindow
from burst_rt.planning.suited import LAYOUTS

_LLAMA = MODELS["llama-7b"]
_A100 = load_hardware("a100-pcie")


def test_the_models_are_as_large_as_they_are_called() -> None:
    assert _LLAMA.num_weights == pytest.approx(6.7e9, rel=0.01)
    assert MODELS["llama-13b"].num_weights == pytest.approx(13e9, rel=0.01)


@pytest.mark.parametrize("tokens", FIRST_TOKEN_S)
def test_the_papers_first_token_latencies_come_out(tokens: int) -> None:
    for strategy, seconds in zip(STRATEGIES, FIRST_TOKEN_S[tokens], strict=True):
        found = forecast_model(
            _LLAMA, strategy, 8, tokens, _A100, "first-token", mask=published_mask(strategy)
        )
        assert found.time_s == pytest.approx(seconds, rel=0.15), strategy


@pytest.mark.parametrize(("strategy", "first"), OUT_OF_MEMORY.items())
def test_what_the_paper_ran_out_of_memory_with_does_so_here(strategy: str, first: int) -> None:
    for tokens in FIRST_TOKEN_S:
        found = forecast_model(_LLAMA, strategy, 8, tokens, _A100, "first-token", mask="full")
        assert found.out_of_memory is (tokens >= first)
        assert (found.time_s is None) is found.out_of_memory


def test_a_training_step_is_a_forward_and_a_backward_and_sums_gradients() -> None:
    first = forecast_model(_LLAMA, "burst", 8, 32768, _A100, "first-token")
    step = forecast_model(_LLAMA, "burst", 8, 32768, _A100, "train")
    assert first.time_s is not None
    assert step.time_s is not None
    assert step.time_s > 3 * first.time_s
    weights = _LLAMA.num_layers * _LLAMA.layer.num_weights() * 2
    assert step.sent_bytes - first.sent_bytes > 2 * 7 / 8 * weights
    assert (first.activations, step.activations) == (None, "kept")


def test_activations_that_do_not_fit_are_computed_again_attention_last() -> None:
    """The less is kept, the longer a step takes. Attention kept, nothing more is sent."""
    kept, attention, again = (
        forecast_model(_LLAMA, "burst", 8, 32768, _A100, "train", activations=each)
        for each in ACTIVATIONS
    )
    first = forecast_model(_LLAMA, "burst", 8, 32768, _A100, "first-token")
    times = [each.time_s or 0.0 for each in (kept, attention, again)]
    assert 0 < times[0] < times[1] < times[2]
    assert times[2] - times[0] == pytest.approx(first.time_s)
    assert kept.sent_bytes == attention.sent_bytes == again.sent_bytes - first.sent_bytes
    assert kept.memory_bytes > attention.memory_bytes > again.memory_bytes
    # Of all layers but the one whose backward runs: 4096 tokens of out, and of lse for 32 heads.
    outputs = 4096 * (4096 * 2 + 32 * 4)
    assert attention.memory_bytes - again.memory_bytes == 31 * outputs
    for tokens, taken in ((1 << 15, kept), (1 << 17, attention)):
        chosen = forecast_model(_LLAMA, "burst", 8, tokens, _A100, "train")
        assert chosen.activations == taken.activations


def test_the_fewest_ranks_hold_the_model_and_half_as_many_do_not() -> None:
    fewest = fewest_ranks(_LLAMA, "burst", 1 << 18, _A100, "train")
    assert fewest is not None
    assert not forecast_model(_LLAMA, "burst", fewest, 1 << 18, _A100, "train").out_of_memory
    assert forecast_model(_LLAMA, "burst", fewest // 2, 1 << 18, _A100, "train").out_of_memory
    # A model that is too large for a device stays so: every rank of a ring holds all weights.
    huge = parse_model("layers=200,dim=8192,heads=64,kv_heads=8,ffn=28672")
    assert fewest_ranks(huge, "burst", 1 << 15, _A100, "train") is None


def test_the_tile_is_a_block_of_the_ring_and_the_shard_at_home() -> None:
    assert tile_of(_LLAMA, "ring-kv", 8, 1 << 17, _A100) == (1 << 14, 1 << 13)


def test_a_model_by_its_sizes() -> None:
    model = parse_model("layers=32,dim=4096,heads=32,kv_heads=8,ffn=14336,vocab=128256")
    assert model.layer == LayerShape(4096, 32, 8, 128, 14336)
    assert model.num_weights == pytest.approx(8.03e9, rel=0.01)
    for wrong in (
        "gpt",
        "layers=32",
        "layers=x,dim=1,heads=1,ffn=1",
        "layers=0,dim=4,heads=1,ffn=1",
    ):
        with pytest.raises(InputError, match="model: "):
            parse_model(wrong)


@pytest.mark.parametrize(
    ("text", "tokens"), [("131072", 1 << 17), ("128K", 1 << 17), ("1m", 1 << 20)]
)
def test_tokens(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "K", "0", "-1", "1.5K", "1G"])
def test_tokens_that_are_none(text: str) -> None:
    with pytest.raises(InputError, match="--seq"):
        parse_tokens(text)


def test_masks_in_words(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths"
    lengths.write_text("[100, 28]\n128", encoding="utf-8")
    for text, mask in {
        "full": Full(),
        "window:4K": SlidingWindow(4096),
        "window:64,8": SlidingWindow(64, 8),
        "window:0": SlidingWindow(0),
        "window:4K,0": SlidingWindow(4096),
        "chunked:8K": Causal() & Chunked(8192),
        "causal & first:4 | window:1023": Causal() & First(4) | SlidingWindow(1023),
        "prefix:1K&first:2K": Prefix(1024) & First(2048),
        f"documents:{lengths}": Causal() & Documents([100, 28, 128]),
    }.items():
        assert parse_mask(text) == mask


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected full, causal, window:"),
        ("diagonal", 'got "diagonal"'),
        ("window", 'got "window"'),
        ("window:4,5,6", r"window: expected a number of tokens .* got '5,6'"),
        ("causal&&first:4", 'got ""'),
        ("documents:nowhere", "file of documents cannot be read"),
        ("documents:a\0b", "file of documents cannot be read"),
        ("chunked:0", "size must be"),
        ("window:99999999999999999999", "window: expected a number"),
    ],
)
def test_masks_in_words_that_are_none(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        parse_mask(text)


def test_a_window_is_cheaper_than_a_causal_mask_and_documents_must_fit(tmp_path: Path) -> None:
    words = [
        "plan",
        "--world",
        "4",
        "--hardware",
        "a100-pcie",
        "--seq",
        "16K",
        "--phase",
        "first-token",
        "--json",
        "--mask",
    ]
    lengths = tmp_path / "lengths"
    lengths.write_text("4096 12288", encoding="utf-8")
    times = []
    for mask in ("causal", "window:1023", f"documents:{lengths}"):
        done = CliRunner().invoke(cli, [*words, mask])
        times.append(min(found["time_s"] for found in json.loads(done.stdout)["strategies"]))
    causal, window, documents = times
    assert window < documents < causal
    for wrong, said in {
        "4096": "does not fit --seq and --batch: .* has 4096 keys",
        "4096 1.5": "expected a number of tokens .* got '1.5'",
        "": "expected the tokens of each document, got nothing",
    }.items():
        lengths.write_text(wrong, encoding="utf-8")
        parse_mask.cache_clear()
        done = CliRunner().invoke(cli, [*words, f"documents:{lengths}"])
        assert isinstance(done.exception, InputError)
        assert re.search(said, str(done.exception))


def test_layouts_that_follow_the_mask(tmp_path: Path) -> None:
    """One long document beside short ones: of four layouts, balanced ends first, and auto takes it
    where no other is better.
    """
    lengths = tmp_path / "lengths"
    lengths.write_text(f"{'800 ' * 40} 40000 {'1000 ' * 59} 72", encoding="utf-8")
    model = "layers=2,dim=2048,heads=16,kv_heads=4,ffn=4096"
    argv = f"--hardware h100-sxm --world 4 --seq 128K --phase first-token --json --model {model}"
    about = [*argv.split(), "--mask", f"documents:{lengths}"]
    words = ["simulate", "--strategy", "direct", *about, "--layout"]
    found = {
        layout: json.loads(CliRunner().invoke(cli, [*words, layout]).stdout)
        for layout in (*LAYOUTS, "auto")
    }
    times = {layout: said["time_s"] for layout, said in found.items()}
    assert times["auto"] == min(times.values())
    assert times["balanced"] < min(times["zigzag"], times["contiguous"])
    assert found["auto"]["layout"] in LAYOUTS
    planned = CliRunner().invoke(cli, ["plan", *about, "--layout", "balanced"]).stdout
    said = json.loads(planned)
    layouts = {row["strategy"]: row["layout"] for row in said["strategies"]}
    assert said["layout"] == layouts[said["take"]] == "balanced"
    assert layouts["tensor-parallel"] == layouts["tensor-parallel+sequence"] == "contiguous"
    assert "with the balanced layout: " in said["why"]


def test_simulate_prints_json() -> None:
    argv = (
        "simulate --hardware a100-pcie --model llama-7b --strategy tensor-parallel+sequence "
        "--world 8 --seq 131072 --phase first-token"
    )
    done = CliRunner().invoke(cli, [*argv.split(), "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["time_s"] == pytest.approx(28.73, rel=0.15)
    assert (said["world"], said["seq"], said["mask"], said["out_of_memory"]) == (
        8,
        131072,
        "causal",
        False,
    )
    assert "tensor-parallel+sequence" in CliRunner().invoke(cli, argv.split()).stdout


def test_plan_and_simulate_say_the_same_of_the_same() -> None:
    about = [
        "--hardware",
        "a100-pcie",
        "--world",
        "4",
        "--seq",
        "16K",
        "--model",
        "layers=2,dim=768,heads=12,ffn=2048",
        "--json",
    ]
    planned, simulated = (
        json.loads(CliRunner().invoke(cli, words + about).stdout)
        for words in (["plan"], ["simulate", "--strategy", "burst"])
    )
    (row,) = [row for row in planned["strategies"] if row["strategy"] == "burst"]
    assert {name: simulated[name] for name in row} == row


def test_what_becomes_of_activations_may_be_chosen_for_training() -> None:
    argv = "--hardware a100-pcie --world 4 --seq 16K --model layers=2,dim=768,heads=12,ffn=2048"
    about = ["simulate", "--strategy", "burst", "--json", *argv.split(), "--activations"]
    for word, taken in (("auto", "kept"), ("attention-kept", "attention kept")):
        done = CliRunner().invoke(cli, [*about, word])
        assert json.loads(done.stdout)["activations"] == taken
    words = [*about, "kept", "--phase", "first-token"]
    with pytest.raises(InputError, match="--activations kept: only training keeps any"):
        CliRunner().invoke(cli, words, catch_exceptions=False)


def test_plan_names_what_comes_to_the_same_once() -> None:
    argv = "plan --world 8 --hardware a100-pcie --seq 128K --mask full"
    said = CliRunner().invoke(cli, argv.split()).stdout.splitlines()
    # On one node two levels are a ring.
    assert "(here bidirectional and two-level are the same)" in said[-1]
    assert "1.00 times" not in said[-1]
    argv = "plan --world 4 --hardware a100-pcie --model layers=2,dim=768,heads=6,ffn=2048 --seq 16K"
    refused = [
        line
        for line in CliRunner().invoke(cli, argv.split()).stdout.splitlines()
        if "not possible here" in line
    ]
    assert [
        line.count("tensor-parallel:") for line in refused if line.startswith("tensor-parallel:")
    ] == [1]


def test_plan_says_what_to_take_and_why() -> None:
    argv = (
        "plan --world 4 --nodes 2 --hardware h100 --model layers=2,dim=768,heads=6,ffn=2048 "
        "--seq 16K"
    )
    done = CliRunner().invoke(cli, [*argv.split(), "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    times = [s["time_s"] for s in said["strategies"] if s["time_s"] is not None]
    assert times == sorted(times)
    assert said["take"] == said["strategies"][0]["strategy"]
    assert said["fewest_ranks"] == 1
    assert said["ranks_per_node"] == 2
    assert "4 must divide the number of kv heads, got 6" in said["refused"]["all-to-all"]
    printed = CliRunner().invoke(cli, argv.split()).stdout
    assert f"Take {said['take']}" in printed
    assert "tiles are" in printed
    with pytest.raises(InputError, match="--nodes: expected a divisor of --world 4, got 3"):
        CliRunner().invoke(
            cli, [*argv.replace("--nodes 2", "--nodes 3").split()], catch_exceptions=False
        )
