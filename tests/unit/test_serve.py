"""The benchmark of serving: every part at tiny sizes on ranks that are threads, and its forecasts
of large models.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from covering import first_of
from tolerances import ERROR

from benchmarks.paper import FIRST_TOKEN_S, STRATEGIES
from benchmarks.prefill import (
    LLAMA_405B,
    PUBLISHED_S,
    Prefill,
    Prompt,
    prefill,
    published_peak,
    with_peak,
)
from benchmarks.serve import PARTS, Bench, Rows
from burst_rt import Context, run_local
from burst_rt.errors import ConfigError, InputError
from burst_rt.launch.plan.models import MODELS, Model, parse_model
from burst_rt.launch.train.config import ModelConfig
from burst_rt.planning.machines import load_hardware
from burst_rt.planning.masks import Full
from burst_rt.scheduler.simulator import Hardware

_TINY = ModelConfig(layers=2, dim=32, heads=4, kv_heads=2)
_LARGE, _H100 = parse_model(LLAMA_405B), load_hardware("h100-sxm")


def _on_16_nodes(model: Model, tokens: int, hardware: Hardware, fp8: bool = False) -> Prefill:
    return prefill(model, Prompt(tokens, world_size=128, tensor_parallel=8, fp8=fp8), hardware)


def _measured(ctx: Context) -> dict[str, Rows]:
    # Two lengths of cache, and a question that is worth sending instead of keys.
    with torch.inference_mode():
        bench = Bench(ctx, _TINY, pairs=1, max_tokens=2048, chunk=500, threads=2)
        return {name: measure(bench) for name, (measure, _) in PARTS.items()}


@pytest.fixture(scope="module")
def parts() -> dict[str, Rows]:
    first, second = run_local(2, _measured)
    assert first.keys() == second.keys()
    return first


def test_every_part_measures(parts: dict[str, Rows]) -> None:
    columns = {
        "first-token": {
            "tokens", "ranks s", "torch s", "of torch's time, paired", "first run s",
            "scores differ x 1e7",
        },
        "chunks": {"tokens", "chunk", "whole s", "in chunks s", "more %"},
        "token": {
            "cached", "layer ms", "processor ms", "kernel ms", "runtime adds ms",
            "a tenth below ms", "adds, window ms", "once a token ms",
        },
        "question": {
            "document", "question", "strategy", "ms", "of ring-kv's time, paired", "sent MiB",
            "plan",
        },
    }  # fmt: skip
    assert {name: set(rows[0]) for name, rows in parts.items()} == columns
    for rows in parts.values():
        for row in rows:
            numbers = [value for value in row.values() if isinstance(value, int | float)]
            assert all(map(math.isfinite, numbers))
    assert [row["cached"] for row in parts["token"]] == [1024, 2048]


def test_ranks_and_torch_give_the_same_scores(parts: dict[str, Rows]) -> None:
    (row,) = parts["first-token"]
    difference = row["scores differ x 1e7"]
    assert isinstance(difference, float)
    assert 0 < difference / 1e7 < ERROR[torch.float32]


def test_a_question_goes_by_keys_by_queries_and_as_planned(parts: dict[str, Rows]) -> None:
    plans = {row["strategy"]: str(row["plan"]) for row in parts["question"]}
    assert "k, v travel" in plans["ring-kv"]
    assert "q, acc, ml travel" in plans["ring-q"]
    assert plans["auto"] == plans["ring-q"]
    sent = {row["strategy"]: float(row["sent MiB"] or 0) for row in parts["question"]}
    # Half of the keys and values, and half of the questions, go to the other rank.
    tokens = 2048 + 64
    assert sent["ring-kv"] == pytest.approx(tokens / 2 * 2 * 2 * 8 * 4 / 2**20, rel=0.3)
    assert 0 < sent["auto"] == sent["ring-q"] < sent["ring-kv"]


def test_llama_405b_on_16_nodes_is_attention_and_the_rest() -> None:
    assert _LARGE.num_weights == pytest.approx(405e9, rel=0.01)
    short, long = (_on_16_nodes(_LARGE, tokens, _H100, fp8=True) for tokens in (131_072, 1_048_576))
    assert long.linear_s / short.linear_s == pytest.approx(8, rel=0.05)
    assert long.attention_s / short.attention_s == pytest.approx(64, rel=0.1)
    assert long.time_s == long.linear_s + long.attention_s
    # Its half of all cells, at the machine's own speed.
    flops = 126 * 2 * 1_048_576**2 * 16384 / 128
    forward = _H100.device.rates["forward"]
    assert forward.flops_per_s is not None
    assert long.attention_s > flops / (forward.flops_per_s * forward.efficiency)


def test_a_feed_forward_in_fp8_takes_half_the_time_and_memory() -> None:
    half, whole = (_on_16_nodes(_LARGE, 131_072, _H100, fp8=fp8) for fp8 in (True, False))
    assert half.attention_s == whole.attention_s
    weights = _LARGE.num_layers * _LARGE.layer.num_weights("gate_up", "down") / 8
    assert whole.weight_bytes - half.weight_bytes == pytest.approx(weights, rel=1e-6)
    linear = _H100.device.rates["linear"]
    assert linear.flops_per_s is not None
    speed = linear.flops_per_s * linear.efficiency
    saved = 2 * weights * 131_072 / 16 / 2 / speed
    assert whole.linear_s - half.linear_s == pytest.approx(saved, rel=1e-3)
    assert whole.weight_bytes > _H100.device.memory_bytes > half.weight_bytes


def test_a_machine_at_its_published_utilization_takes_the_published_time() -> None:
    peak = published_peak(_LARGE, 128)
    assert peak < 989.5e12  # the data sheet's
    rates = {
        name: replace(_H100.device.rates[name], efficiency=0.63, masked=None)
        for name in ("forward", "linear")
    }
    device = replace(_H100.device, rates={**_H100.device.rates, **rates})
    machine = with_peak(replace(_H100, device=device), peak)
    found = _on_16_nodes(_LARGE, 1_000_000, machine)
    # Beside the products that the utilization is of, there are all-reduces, and ranks whose last
    # blocks see more than others'.
    assert found.time_s == pytest.approx(PUBLISHED_S["1M"], rel=0.07)


def test_nodes_that_share_a_network_card_are_refused() -> None:
    assert _H100.nics is not None
    shared = replace(_H100, nics=replace(_H100.nics, count=4))
    with pytest.raises(ConfigError, match=r"all 8 ranks of a node, .* got 8 ranks and 4 cards"):
        _on_16_nodes(_LARGE, 131_072, shared)
    with pytest.raises(ConfigError, match=r"all 8 ranks of a node, .* got 4 ranks and 8 cards"):
        prefill(_LARGE, Prompt(131_072, world_size=128, tensor_parallel=4), _H100)


def test_sizes_that_cannot_be_shared_are_refused() -> None:
    for world_size, tokens in ((100, 131_072), (128, 0)):
        with pytest.raises(InputError, match=r"at least 1 token, and ranks in groups of 8"):
            prefill(_LARGE, Prompt(tokens, world_size, tensor_parallel=8), _H100)


@pytest.mark.parametrize("tokens", first_of([*FIRST_TOKEN_S], 1, 32_768, 131_072))
def test_llama_7b_by_a_caches_graphs_takes_what_the_paper_measured(tokens: int) -> None:
    """Where it computes all scores, as the paper's rings do; "auto" is never slower than rings."""
    published = FIRST_TOKEN_S[tokens][STRATEGIES.index("burst")]
    model, machine = MODELS["llama-7b"], load_hardware("a100-pcie")
    found = prefill(model, Prompt(tokens, 8, structure=Full()), machine)
    assert found.time_s == pytest.approx(published, rel=0.1)
    by_keys, by_itself = (
        prefill(model, Prompt(tokens, 8, strategy=name), machine) for name in ("ring-kv", "auto")
    )
    assert by_itself.time_s <= 1.02 * by_keys.time_s  # forecasts so near count as equal
    assert by_keys.time_s < found.time_s


def test_chunks_take_little_more_than_the_whole_prompt_where_messages_are_free() -> None:
    """Each chunk waits for its slowest rank, and the cells are the same."""
    slow = load_hardware("a100-pcie")
    link = replace(slow.node.link, latency_s=0.0, bytes_per_s=1e18)
    forward = replace(slow.device.rates["forward"], masked=None)
    rates = {**slow.device.rates, "forward": forward}
    device = replace(slow.device, rates=rates)
    machine = replace(slow, device=device, node=replace(slow.node, link=link))
    whole, chunked = (
        prefill(MODELS["llama-7b"], Prompt(65_536, 8, chunk=chunk), machine)
        for chunk in (None, 16_384)
    )
    assert whole.attention_s < chunked.attention_s < 1.1 * whole.attention_s
    assert chunked.linear_s == pytest.approx(whole.linear_s, rel=0.01)
