"""A layer on ranks: the same output and gradients as the whole layer in float64, bytes as its
graphs say, misuse refused on every rank.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from layer_worlds import LayerCase, spread
from tolerances import ERROR

import burst_rt
from benchmarks.tensor_parallel import ParallelLayer
from burst_rt import Context
from burst_rt.errors import InputError
from burst_rt.launch.plan.layers import TENSOR_PARALLEL

_STRATEGIES = (*TENSOR_PARALLEL, "burst", "all-to-all")


@pytest.mark.parametrize("strategy", _STRATEGIES)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_result_is_that_of_the_whole_layer(world: int, strategy: str) -> None:
    for case in (LayerCase(strategy), LayerCase(strategy, seq_len=3, batch=1)):
        for outcome in burst_rt.run_local(world, lambda ctx, case=case: spread(ctx, case)):  # type: ignore[misc]
            assert len(outcome.errors) == 8
            assert max(outcome.errors.values()) <= ERROR[torch.float64], outcome.errors
            assert outcome.sent == outcome.predicted
            assert (outcome.sent[0] > 0) == (world > 1) or case.seq_len == 3


@pytest.mark.parametrize("strategy", _STRATEGIES)
def test_in_float32(strategy: str) -> None:
    for outcome in burst_rt.run_local(
        2, lambda ctx: spread(ctx, LayerCase(strategy, dtype=torch.float32))
    ):
        assert max(outcome.errors.values()) <= ERROR[torch.float32], outcome.errors


@pytest.mark.parametrize("strategy", _STRATEGIES)
def test_autocast_changes_nothing(strategy: str) -> None:
    def attend(ctx: Context) -> None:
        case = LayerCase(strategy, dtype=torch.float32)
        plain = spread(ctx, case)
        with torch.autocast("cpu", torch.bfloat16):
            assert spread(ctx, case).errors == plain.errors

    burst_rt.run_local(2, attend)


@pytest.mark.parametrize("strategy", TENSOR_PARALLEL)
@pytest.mark.parametrize("name", ["num_heads", "num_kv_heads", "ffn_dim"])
def test_what_the_ranks_cannot_share_is_refused_on_all(name: str, strategy: str) -> None:
    case = LayerCase(strategy)
    # What 3 does not divide; the kv heads still divide the heads.
    shape = replace(
        case.shape,
        **{
            "num_heads": {"num_heads": 16, "num_kv_heads": 4},
            "num_kv_heads": {"num_kv_heads": 8},
            "ffn_dim": {"ffn_dim": 37},
        }[name],
    )

    def call(ctx: Context) -> None:
        with pytest.raises(InputError, match=r"the number of ranks must divide .*, got 3 ranks"):
            ParallelLayer(ctx.layout(9, "contiguous"), shape, strategy, case.weights())
        assert max(spread(ctx, case).errors.values()) <= ERROR[torch.float64]

    burst_rt.run_local(3, call)


def test_an_input_that_one_rank_gets_wrong_is_refused_on_all() -> None:
    case = LayerCase("tensor-parallel+sequence", seq_len=10)

    def call(ctx: Context) -> None:
        layout = ctx.layout(10, "contiguous")
        layer = ParallelLayer(layout, case.shape, case.strategy, case.weights())
        x = layout.shard(case.inputs()[0])
        with pytest.raises(
            InputError, match=r"rank 1: ParallelLayer \(tensor-parallel\+sequence\): x: expected"
        ):
            layer(x[:, 1:] if ctx.rank == 1 else x)
        layer(x)

    burst_rt.run_local(2, call)


def test_a_split_sequence_must_be_contiguous() -> None:
    case = LayerCase("tensor-parallel+sequence")

    def call(ctx: Context) -> None:
        with pytest.raises(InputError, match="the layout must be contiguous, got zigzag"):
            ParallelLayer(ctx.layout(37), case.shape, case.strategy, case.weights())

    burst_rt.run_local(2, call)
