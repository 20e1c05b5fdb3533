"""Looking ahead from the command line: the paper's figures from its three calibration rows,
out-of-memory rows, models by their sizes.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.paper import FIRST_TOKEN_S, OUT_OF_MEMORY, STRATEGIES
from burst_rt.errors import InputError
from burst_rt.launch.main import cli
from burst_rt.launch.plan.compare import COMPARED
from burst_rt.launch.plan.layers import LayerShape, SpreadLayer
from burst_rt.launch.plan.model import (
    ACTIVATIONS,
    ATTENTION,
    ModelForecast,
    Phase,
    Question,
    fewest_ranks,
    forecast_model,
    parse_strategy,
    published_mask,
    tile_of,
)
from burst_rt.launch.plan.models import MODELS, parse_model
from burst_rt.launch.plan.words import parse_mask, parse_tokens
from burst_rt.planning.chooser import LAYOUTS
from burst_rt.planning.machines import load_hardware, to_toml
from burst_rt.planning.masks import Causal, Chunked, Documents, First, Full, Prefix, SlidingWindow
from burst_rt.scheduler.simulator import Hardware

_LLAMA = MODELS["llama-7b"]
_A100 = load_hardware("a100-pcie")
_LLAMA_3_8B = "layers=32,dim=4096,heads=32,kv_heads=8,ffn=14336,vocab=128256"


def _forecast(
    strategy: str, world: int, tokens: int, machine: Hardware, phase: Phase, **options: Any
) -> ModelForecast:
    return forecast_model(Question(_LLAMA, tokens, phase, **options), strategy, world, machine)


def test_the_models_are_as_large_as_they_are_called() -> None:
    assert _LLAMA.num_weights == pytest.approx(6.7e9, rel=0.01)
    assert MODELS["llama-13b"].num_weights == pytest.approx(13e9, rel=0.01)


@pytest.mark.parametrize("tokens", FIRST_TOKEN_S)
def test_the_papers_first_token_latencies_come_out(tokens: int) -> None:
    for strategy, seconds in zip(STRATEGIES, FIRST_TOKEN_S[tokens], strict=True):
        found = _forecast(strategy, 8, tokens, _A100, "first-token", mask=published_mask(strategy))
        assert found.time_s == pytest.approx(seconds, rel=0.15), strategy


@pytest.mark.parametrize(("strategy", "first"), OUT_OF_MEMORY.items())
def test_what_the_paper_ran_out_of_memory_with_does_so_here(strategy: str, first: int) -> None:
    for tokens in FIRST_TOKEN_S:
        found = _forecast(strategy, 8, tokens, _A100, "first-token", mask="full")
        assert found.out_of_memory is (tokens >= first)
        assert found.time_s > 0


def test_a_training_step_is_a_forward_and_a_backward_and_sums_gradients() -> None:
    first = _forecast("burst", 8, 32768, _A100, "first-token")
    step = _forecast("burst", 8, 32768, _A100, "train")
    assert first.time_s is not None
    assert step.time_s is not None
    assert step.time_s > 3 * first.time_s
    weights = _LLAMA.num_layers * _LLAMA.layer.num_weights() * 2
    assert step.sent_bytes - first.sent_bytes > 2 * 7 / 8 * weights
    assert (first.activations, step.activations) == (None, "kept")


def test_activations_that_do_not_fit_are_computed_again_attention_last() -> None:
    """The less is kept, the longer a step takes. Attention kept, nothing more is sent."""
    kept, attention, again = (
        _forecast("burst", 8, 32768, _A100, "train", activations=each) for each in ACTIVATIONS
    )
    first = _forecast("burst", 8, 32768, _A100, "first-token")
    times = [each.time_s or 0.0 for each in (kept, attention, again)]
    assert 0 < times[0] < times[1] < times[2]
    assert times[2] - times[0] == pytest.approx(first.time_s)
    assert kept.sent_bytes == attention.sent_bytes == again.sent_bytes - first.sent_bytes
    assert kept.memory_bytes > attention.memory_bytes > again.memory_bytes
    # Of all layers but the one whose backward runs: 4096 tokens of out, and of lse for 32 heads.
    outputs = 4096 * (4096 * 2 + 32 * 4)
    assert attention.memory_bytes - again.memory_bytes == 31 * outputs
    for tokens, taken in ((1 << 15, kept), (1 << 17, attention)):
        chosen = _forecast("burst", 8, tokens, _A100, "train")
        assert chosen.activations == taken.activations


def test_the_fewest_ranks_hold_the_model_and_one_fewer_do_not() -> None:
    fewest = fewest_ranks(Question(_LLAMA, 1 << 18, "train"), "burst", _A100)
    assert fewest is not None
    assert not _forecast("burst", fewest, 1 << 18, _A100, "train").out_of_memory
    assert _forecast("burst", fewest - 1, 1 << 18, _A100, "train").out_of_memory
    # A model that is too large for a device stays so: every rank of a ring holds all weights.
    huge = parse_model("layers=200,dim=8192,heads=64,kv_heads=8,ffn=28672")
    assert fewest_ranks(Question(huge, 1 << 15, "train"), "burst", _A100) is None


def test_the_tile_is_a_block_of_the_ring_and_the_resident_shard() -> None:
    assert tile_of(Question(_LLAMA, 1 << 17, "first-token"), "ring-kv", 8, _A100) == (
        1 << 14,
        1 << 13,
    )


def test_a_model_by_its_sizes() -> None:
    model = parse_model(_LLAMA_3_8B)
    assert model.layer == LayerShape(4096, 32, 8, 128, 14336)
    assert model.num_weights == pytest.approx(8.03e9, rel=0.01)
    for wrong, said in {
        "gpt": r"expected one of \[.*'llama-7b', .*\] or sizes .*,vocab=128256', got 'gpt'",
        "layers=32": "dim, heads, ffn missing in 'layers=32'",
        "layers=2,layers=3,dim=8,heads=2,ffn=8": "layers: expected it once, got it again as '3'",
        "layers=2,dim=4096,heads=33,ffn=8": "head_dim: expected dim / heads to be .* 4096 / 33",
        "layers=x,dim=1,heads=1,ffn=1": "layers: expected a whole number .*, got 'x'",
        "layers=0,dim=4,heads=1,ffn=1": "layers: expected a whole number from 1 .* got '0'",
        "layers=1,dim=4,heads=1,ffn=1,vocab=128K": "vocab: expected a whole number .* got '128K'",
        "layers=1,foo=2": "expected sizes from layers, dim, .*, vocab, got 'foo'",
    }.items():
        with pytest.raises(InputError, match=f"^--model: {said}"):
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
        ("window:4,5,6", "window: expected LEFT or LEFT,RIGHT, got '4,5,6'"),
        ("causal&&first:4", 'got ""'),
        ("documents:nowhere", "file of documents cannot be read"),
        ("documents:a\0b", "file of documents cannot be read"),
        ("documents:/dev/zero", "cannot be read: it is no file"),
        ("chunked:0", "--mask chunked: .*size must be"),
        ("first:3&" * 64 + "full", "at most 64 masks"),
        ("window:99999999999999999999", "window: expected a number"),
    ],
)
def test_masks_in_words_that_are_none(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        parse_mask(text)


def test_lengths_written_on_windows(tmp_path: Path) -> None:
    path = tmp_path / "lengths"
    path.write_text("4 5\r\n", encoding="utf-8-sig")
    assert parse_mask(f"documents:{path}") == Causal() & Documents([4, 5])


def test_a_first_token_needs_no_memory_for_a_backward() -> None:
    """The rings' forwards hold the same; the backwards do not."""
    layer = SpreadLayer(_LLAMA.layer, 131072, 8, "ring-kv")
    assert layer.memory(0, backward=False).working < layer.memory(0).working
    ring, burst = (
        _forecast(strategy, 8, 131072, _A100, "first-token") for strategy in ("ring-kv", "burst")
    )
    assert ring.memory_bytes == burst.memory_bytes


def test_a_machines_name_is_no_markup(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(to_toml(replace(_A100, name="x [/x] [red]y")), encoding="utf-8")
    words = ["plan", "--world", "2", "--seq", "4K", "--hardware", str(path)]
    done = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert "x [/x] [red]y" in " ".join(done.stdout.split())


@pytest.mark.parametrize("ranks", ["0", "1025", "9" * 5000, "8,2000"])
def test_numbers_of_ranks_that_cannot_be_planned(ranks: str) -> None:
    words = ["plan", "--seq", "4K", "--hardware", "a100-pcie", "--world", ranks]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 2
    assert "each at most 1,024, got" in done.stderr
    assert len(done.stderr) < 500


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


def test_a_layout_that_tensor_parallelism_does_not_have_is_refused() -> None:
    about = "--hardware a100-pcie --world 2 --seq 8K --model layers=1,dim=256,heads=4,ffn=512"
    words = ["simulate", "--strategy", "tensor-parallel", *about.split(), "--json"]
    assert CliRunner().invoke(cli, words).exit_code == 0
    assert CliRunner().invoke(cli, [*words, "--layout", "contiguous"]).exit_code == 0
    done = CliRunner().invoke(cli, [*words, "--layout", "striped"])
    assert isinstance(done.exception, InputError)
    assert re.search("--layout: .*got 'striped'", str(done.exception))


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
    assert "Here two-level:8 does the same." in said
    assert not any("1.00 times" in line for line in said)
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
    queries, keys = said["tile"]
    assert f"has {queries:,} queries x {keys:,} keys" in printed
    with pytest.raises(InputError, match="--nodes: expected a divisor of --world 4, got 3"):
        CliRunner().invoke(
            cli, [*argv.replace("--nodes 2", "--nodes 3").split()], catch_exceptions=False
        )


_LONG = f"--hardware h100-sxm --model {_LLAMA_3_8B} --seq 1M"
_ZERO = f"{_LONG} --shard zero1"


def _planned(words: str) -> Any:
    done = CliRunner().invoke(cli, ["plan", *words.split(), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("phase", "world"), [("train", 8), ("first-token", 5)], ids=["train", "first-token"]
)
def test_no_plan_needs_more_ranks_than_it_has(phase: str, world: int) -> None:
    said = _planned(f"{_LONG} --phase {phase} --world {world}")
    assert said["fewest_ranks"] == world
    fewer = _planned(f"{_LONG} --phase {phase} --world {world - 1}")
    assert said["take"] not in {row["strategy"] for row in _that_fit(fewer)}
    assert f"the model fits on {world} ranks, and on no fewer." in said["why"]


def _that_fit(said: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in said["strategies"] if not row["out_of_memory"]]


def test_where_none_fits_the_strategy_that_needs_fewest_ranks_is_named() -> None:
    said = _planned(f"{_ZERO} --world 8")
    assert (said["take"], _that_fit(said)) == (None, [])
    assert said["fewest_ranks"] == 12
    fit = {row["strategy"] for row in _that_fit(_planned(f"{_ZERO} --world 12"))}
    assert said["fewest_ranks_with"] in fit
    # burst takes the most memory of the rings; and no other strategy fits on fewer.
    assert "burst" not in fit
    assert _that_fit(_planned(f"{_ZERO} --world 11")) == []
    assert f"are 12, with {said['fewest_ranks_with']}." in said["why"]
    # Those that do not fit stand in the order of what they lack.
    memory = [row["memory_bytes"] for row in said["strategies"]]
    assert memory == sorted(memory)


def test_where_no_strategy_is_possible_the_reason_is_named(tmp_path: Path) -> None:
    machines = Path(__file__).parents[2] / "burst_rt" / "planning" / "machines"
    shipped = (machines / "h100-sxm.toml").read_text()
    one_node = tmp_path / "one-node.toml"
    one_node.write_text(shipped[: shipped.index("[nics")])
    said = _planned(f"--hardware {one_node} --seq 8K --world 16")
    assert (said["take"], said["strategies"]) == (None, [])
    assert said["why"].startswith("Take none: no strategy is possible on 16 ranks: ")
    assert "the machine file has no [nics]" in said["why"]


def test_above_64_ranks_whole_nodes_are_tried() -> None:
    question = Question(parse_model(_LLAMA_3_8B), 1 << 23, "train")
    fewest = fewest_ranks(question, "hybrid", load_hardware("h100-sxm"))
    assert fewest is not None
    assert (fewest > 64, fewest % 8) == (True, 0)


def test_several_numbers_of_ranks_are_compared() -> None:
    """Few ranks compute attention again, and cost more time of devices than more ranks do."""
    about = f"--hardware h100-sxm --model {_LLAMA_3_8B} --seq 512K --shard zero1"
    few, some, more = said = _planned(f"{about} --world 4,9,10")
    assert [each["world"] for each in said] == [4, 9, 10]
    assert few["rank_seconds"] is None
    for each in (some, more):
        assert each["rank_seconds"] == each["world"] * each["strategies"][0]["time_s"]
    assert some["rank_seconds"] > more["rank_seconds"]
    (keeps,) = re.findall(r"On fewer than (\d+), attention is computed again", some["why"])
    assert int(keeps) == 10
    assert some["strategies"][0]["activations"] == "computed again"
    assert more["strategies"][0]["activations"] == "attention kept"
    printed = CliRunner().invoke(cli, ["plan", *about.split(), "--world", "4,9,10"]).stdout
    rows = [line.split() for line in printed.splitlines() if line.startswith("│")]
    assert [row[3] for row in rows] == ["none", some["take"], more["take"]]
    for each, row in zip((some, more), rows[1:], strict=True):
        assert f"{each['rank_seconds']:,.1f}" in row
    assert "10 ranks: the least ranks x s" in printed
    for wrong in ("8,x", "0", "8,"):
        done = CliRunner().invoke(cli, ["plan", *about.split(), "--world", wrong])
        assert "expected numbers of ranks such as 8 or 8,16,32" in done.output


def test_more_ranks_than_a_node_has_devices_are_refused() -> None:
    words = f"plan {_LONG} --world 12 --nodes 1"
    with pytest.raises(InputError, match=r"h100-sxm has 8 devices, so .* at least 2 nodes, got 1"):
        CliRunner().invoke(cli, words.split(), catch_exceptions=False)


def test_groups_are_named_with_their_ranks() -> None:
    said = _planned("--hardware h100-sxm --world 16 --seq 16K --model " + _LLAMA_3_8B)
    names = {row["strategy"] for row in said["strategies"]}
    assert {"hybrid:8", "two-level:8"} <= names


def test_tensor_parallelism_is_said_to_be_no_strategy_of_burst_attention() -> None:
    said = _planned("--hardware h100-sxm --world 8 --seq 4K")
    assert said["take"] == "tensor-parallel+sequence"
    assert "burst_attention has no tensor-parallel+sequence" in said["why"]
    own = next(row["strategy"] for row in said["strategies"] if "tensor" not in row["strategy"])
    assert f"The fastest of its own strategies is {own}, which takes" in said["why"]
    words = "plan --hardware h100-sxm --world 4,8 --seq 4K"
    printed = CliRunner().invoke(cli, words.split()).stdout.splitlines()
    assert "burst_attention has no tensor-parallel+sequence: it is Megatron-LM's." in printed


def test_names_are_whole_in_a_narrow_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("burst_rt.launch.plan.printed._WIDTH", 80)
    words = "plan --hardware h100-sxm --world 8 --seq 4K"
    printed = CliRunner().invoke(cli, words.split()).stdout
    assert "…" not in printed
    assert "│ tensor-parallel " in printed


def test_simulate_says_which_strategies_it_takes() -> None:
    about = "--hardware h100-sxm --world 4 --seq 4K --model layers=1,dim=64,heads=4,ffn=64"
    for wrong in ("tree", "auto", "hybrid:x", "burst:4", "tensor-parallel:2"):
        with pytest.raises(
            InputError, match=f"--strategy: expected one of .*got '{wrong}'"
        ) as said:
            CliRunner().invoke(
                cli, ["simulate", *about.split(), "--strategy", wrong], catch_exceptions=False
            )
        assert "tensor-parallel+sequence" in str(said.value)
        assert ("`burst-rt plan` compares" in str(said.value)) is (wrong == "auto")
    helped = " ".join(CliRunner().invoke(cli, ["simulate", "--help"]).output.split())
    helped = helped.replace("- ", "-")  # names that a line ends in
    for name in (*COMPARED, *ATTENTION):
        assert parse_strategy(name) == name
        assert f"{name}," in helped or f"{name};" in helped


@pytest.mark.parametrize(
    ("world", "start"),
    [
        (12, "torchrun --nnodes 2 --nproc-per-node 6 --rdzv"),
        (8, "torchrun --nnodes 1 --nproc-per-node 8 train.py"),
        (13, "torchrun train.py on every host, 13 processes in all"),
    ],
)
def test_as_many_processes_are_started_as_were_planned(world: int, start: str) -> None:
    words = f"plan --hardware h100-sxm --model {_LLAMA_3_8B} --seq 128K --world {world}"
    assert start in CliRunner().invoke(cli, words.split()).stdout


def test_where_only_anothers_strategy_fits_it_is_said_what_makes_ones_own_fit() -> None:
    said = _planned(f"--hardware h100-sxm --model {_LLAMA_3_8B} --seq 128K --world 8 --shard none")
    assert said["take"].startswith("tensor-parallel")
    assert "None of its own strategies fits here." in said["why"]
    assert "lacks" in said["why"]
    assert "fit" in said["why"].partition("lacks")[2]
