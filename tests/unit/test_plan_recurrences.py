"""Layers that mix tokens by a state: operations as PyTorch counts them, states between ranks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from burst_rt.errors import InputError
from burst_rt.launch.plan.layers import TENSOR_PARALLEL, SpreadLayer
from burst_rt.launch.plan.sublayers import Attention, FeedForward, LayerSizes, Product, Sublayer
from burst_rt.planning.layouts import make_layout
from burst_rt.planning.masks import Causal
from burst_rt.planning.recurrences import RecurrenceSizes
from burst_rt.scheduler import HOST_LANES, NCCL_LANES, check_world

_DELTA = RecurrenceSizes(
    rule="delta", num_heads=8, num_key_heads=4, key_dim=16, value_dim=8, channels=128, kernel=4
)


def _layer(recurrence: RecurrenceSizes, *, attention: bool = False) -> LayerSizes:
    into, out = Product("in", 64 * 192, 64 * 192), Product("out", 64 * 64, 64 * 64)
    mixing = [Sublayer(recurrence, 64, into, out, 192, 64)]
    if attention:
        mixing.insert(0, Sublayer(Attention(8, 8, 8, 8), 64, into, out, 192, 64))
    feed_forward = Sublayer(FeedForward((64,)), 64, into, out, 192, 64)
    return LayerSizes(64, (*mixing, feed_forward))


def _products(counter: FlopCounterMode) -> int:
    counts = counter.get_flop_counts()["Global"]
    return sum(flops for name, flops in counts.items() if str(name).endswith("bmm"))


def test_a_delta_rule_has_the_operations_of_its_chunks() -> None:
    """transformers solves triangles, and does not count as products, where kernels make W and U
    from an inverse.
    """
    tokens, heads, key, value, chunk = 128, 2, 16, 8, 64
    q, k = (torch.randn(1, tokens, heads, key) for _ in range(2))
    v = torch.randn(1, tokens, heads, value)
    decay, beta = -torch.rand(1, tokens, heads), torch.rand(1, tokens, heads)
    with FlopCounterMode(display=False) as counter:
        torch_chunk_gated_delta_rule(q, k, v, decay, beta, chunk_size=chunk)
    rule = RecurrenceSizes(rule="delta", num_heads=heads, key_dim=key, value_dim=value, chunk=chunk)
    inverse = heads * tokens * (2 * chunk * (key + value) + chunk**2 // 3)
    assert _products(counter) == rule.forward_flops(tokens) - inverse


def test_linear_attention_has_the_operations_of_its_chunks() -> None:
    config = AutoConfig.for_model(
        "minimax", hidden_size=64, num_attention_heads=4, num_key_value_heads=4, head_dim=16,
        num_hidden_layers=2, block_size=32,
    )  # fmt: skip
    layer: Any = MiniMaxLightningAttention(config, 1)
    angles = torch.zeros(1, 128, 16)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(torch.randn(1, 128, 64), position_embeddings=(angles, angles), attention_mask=None)
    rule = RecurrenceSizes(rule="linear", num_heads=4, key_dim=16, value_dim=16, chunk=32)
    assert _products(counter) == rule.forward_flops(128)


def test_the_backward_does_each_product_twice_and_the_states_again() -> None:
    for rule, state in (("linear", 2), ("delta", 4), ("scan", 5)):
        made = RecurrenceSizes(rule=rule, num_heads=2, key_dim=4, value_dim=8)  # type: ignore[arg-type]
        again = made.backward_flops(100) - 2 * made.forward_flops(100)
        assert again == 100 * state * 2 * 4 * 8
        # The map of a delta rule is a matrix too.
        assert made.map_flops(100) - again == (100 * 4 * 2 * 4 * 4 if rule == "delta" else 0)


def test_bytes_of_states_and_of_the_tokens_before_a_run() -> None:
    assert _DELTA.state_bytes(batch=3) == 3 * 8 * 16 * 8 * 4
    assert _DELTA.halo_bytes(2, batch=3) == 3 * 3 * 128 * 2
    assert _DELTA.chunk_state_bytes(130) == 3 * _DELTA.state_bytes()
    none = RecurrenceSizes(rule="convolution", num_heads=64, channels=64, kernel=3)
    assert (none.state_bytes(), none.forward_flops(10), none.moved_bytes(10, 2)) == (0, 0, 0)
    assert none.halo_bytes(2) == 2 * 64 * 2


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"rule": "rotary"}, "rule must be one of linear, delta, scan, convolution, got 'rotary'"),
        ({"num_heads": 0}, "num_heads must be an integer of at least 1, got 0"),
        ({"num_key_heads": 3}, "num_key_heads must divide num_heads, got 3 and 8"),
        ({"chunk": True}, "chunk must be an integer"),
    ],
)
def test_sizes_that_are_none_are_refused(wrong: dict[str, Any], said: str) -> None:
    fields: dict[str, Any] = {"rule": "linear", "num_heads": 8} | wrong
    with pytest.raises(InputError, match=f"RecurrenceSizes: {said}"):
        RecurrenceSizes(**fields)


@pytest.mark.parametrize("strategy", ["ring-kv", "all-to-all", *TENSOR_PARALLEL])
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("attention", [True, False])
def test_graphs_of_all_ranks_fit(strategy: str, world: int, attention: bool) -> None:
    layer = _layer(_DELTA, attention=attention)
    for kind, seq_len in (("zigzag", 37), ("contiguous", 64), ("balanced", 64), ("zigzag", 3)):
        spread = SpreadLayer(layer, seq_len, world, strategy, kind=kind)
        for forward in (True, False):
            for lanes in (HOST_LANES, NCCL_LANES):
                check_world(
                    [spread.graph(rank, forward=forward, lanes=lanes) for rank in range(world)]
                )


@pytest.mark.parametrize("kind", ["zigzag", "contiguous"])
@pytest.mark.parametrize("forward", [True, False])
def test_each_run_sends_one_state_to_the_next(kind: str, forward: bool) -> None:
    world, seq_len, batch = 4, 64, 2
    layer = _layer(_DELTA)
    spread = SpreadLayer(layer, seq_len, world, "ring-kv", batch, 2, Causal(), kind)
    runs = sorted(
        (run.start, rank)
        for rank, own in enumerate(make_layout(kind, seq_len, world).runs)
        for run in own
    )
    owners = [rank for _, rank in runs]
    size = _DELTA.state_bytes(batch) + _DELTA.halo_bytes(2, batch)
    expected = [0] * world
    for first, second in pairwise(owners):
        expected[first if forward else second] += size * (first != second)
    gradients = 0 if forward else 2 * 2 * layer.num_weights * (world - 1) // world
    assert [spread.sent_bytes(rank, forward=forward) - gradients for rank in range(world)] == (
        expected
    )


def test_memory_and_cache_are_those_of_a_state() -> None:
    spread = SpreadLayer(_layer(_DELTA), 64, 2, "ring-kv", 2)
    assert spread.cached_bytes(0) == _DELTA.state_bytes(2) + _DELTA.halo_bytes(2, 2)
    with_attention = SpreadLayer(_layer(_DELTA, attention=True), 64, 2, "ring-kv", 2)
    assert with_attention.cached_bytes(0) - spread.cached_bytes(0) == 64 * 2 * 8 * 8 * 2
    assert spread.checkpointed_bytes(0, attention=True) == 64 * 64 * 2
    rows, runs = 64, 2
    kept = rows * (4 * 64 + 2 * (192 + 64)) * 2 + runs * _DELTA.state_bytes(2)
    assert spread.memory(0).activations == kept


def test_a_recurrence_has_no_striped_layout_and_its_heads_are_shared() -> None:
    with pytest.raises(InputError, match="a recurrence needs runs of consecutive tokens"):
        SpreadLayer(_layer(_DELTA), 64, 2, "ring-kv", kind="striped")
    with pytest.raises(InputError, match="must divide num_heads of a recurrence, got 3 ranks"):
        SpreadLayer(_layer(_DELTA), 64, 3, TENSOR_PARALLEL[0])
