"""Decode over ranks that are threads, against the spec; its graphs, bytes and plans."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from decodes import CASES, decode, own_columns, run_one, spans_of
from graphs import check_shares
from simulated_faults import Faults, rehearse
from simulated_memory import reference as of_program_order
from spec import relative_error
from tolerances import ERROR

import burst_rt
from burst_rt import Context
from burst_rt.errors import InputError
from burst_rt.kernels import KERNELS, QKV, ScoreOptions
from burst_rt.kernels import decode as decode_kernels
from burst_rt.kernels.decode import Partial, SeenColumns
from burst_rt.planning.machines import load_hardware
from burst_rt.planning.masks.spans import Spans
from burst_rt.scheduler import (
    HOST_LANES,
    NCCL_LANES,
    Engine,
    Graph,
    GraphBuilder,
    Lane,
    Schedule,
    check_world,
)
from burst_rt.scheduler.simulator import (
    simulate,
)
from burst_rt.serving.bruck import bruck_gather, bruck_parts
from burst_rt.serving.decode_graph import Decode
from burst_rt.serving.decode_plan import DecodePlan, bucket_of
from burst_rt.transport.staged import stage_graph

_WORLDS = (1, 2, 3, 4, 5)


@pytest.mark.parametrize("name", CASES)
def test_against_the_spec(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BURST_RT_POISON", "1")
    # So that there are several parts.
    monkeypatch.setattr(decode_kernels, "_PART_BYTES", 1 << 12)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        case = replace(CASES[name], dtype=dtype)
        truth = case.truth()
        for world in _WORLDS:
            outs = burst_rt.run_local(world, partial(decode, case=case))
            assert outs[0].dtype == dtype
            assert relative_error(outs[0], truth) < ERROR[dtype], (dtype, world)
            # The same bits on every rank.
            assert all(torch.equal(out, outs[0]) for out in outs), (dtype, world)


def test_every_kernel_has_a_decode() -> None:
    case = replace(CASES["everything"], dtype=torch.float64)
    truth = case.truth()
    for kernel in ("naive", "untiled"):
        for softcap in (case.softcap, None):
            some = replace(case, softcap=softcap)
            outs = burst_rt.run_local(2, partial(decode, case=some), kernel=kernel)
            error = relative_error(outs[0], truth if softcap else some.truth())
            assert error < ERROR[torch.float64], (kernel, softcap)


@pytest.mark.parametrize("world", _WORLDS)
def test_staged_through_chunks_of_the_host(world: int) -> None:
    case = CASES["a window and the beginning"]

    def call(ctx: Context) -> torch.Tensor:
        out = decode(ctx, case)
        (plan,) = ctx.attention.kept[DecodePlan].values()
        assert bool(plan.chunks) is (world > 1)
        return out

    outs = burst_rt.run_local(world, call, transport="staged")
    plain = burst_rt.run_local(world, partial(decode, case=case))
    assert relative_error(outs[0], case.truth()) < ERROR[torch.float32]
    assert all(torch.equal(out, plain[0]) for out in outs)


def program(world: int, **changed: int) -> Decode:
    numbers = {
        "batch": 2, "num_queries": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
        "v_head_dim": 8, "input_bytes": 2, "sum_bytes": 4, "keys": 1024,
    }  # fmt: skip
    return Decode(world_size=world, **(numbers | changed))


def graphs_of(decoding: Decode, lanes: tuple[Lane, ...] = HOST_LANES) -> list[Graph]:
    return [decoding.graph(rank, lanes) for rank in range(decoding.world_size)]


@pytest.mark.parametrize("lanes", [HOST_LANES, NCCL_LANES])
@pytest.mark.parametrize("world", [*range(1, 10), 16, 17])
def test_graphs_fit_and_send_what_they_say(world: int, lanes: tuple[Lane, ...]) -> None:
    decoding = program(world)
    graphs = graphs_of(decoding, lanes)
    check_world(graphs)
    check_shares(graphs, decoding)
    rounds = (world - 1).bit_length()  # ceil(log2 W)
    assert decoding.num_rounds == rounds
    sent = [[m for task in graph.tasks for m in task.sends] for graph in graphs]
    for graph, messages in zip(graphs, sent, strict=True):
        assert sum(task.is_exchange for task in graph.tasks) == rounds
        # Only blocks and their pieces: few messages.
        assert len(messages) <= rounds * (rounds + 1) // 2
        assert sum(m.size_bytes for m in messages) == (world - 1) * decoding.block_bytes
        assert len({m.tag for m in messages}) == rounds
    assert decoding.wire_bytes() == sum(m.size_bytes for own in sent for m in own)
    if lanes is HOST_LANES:
        check_world([stage_graph(graph, chunk_bytes=100) for graph in graphs])


@pytest.mark.parametrize("world", [*range(1, 10), 16, 17])
def test_every_rank_gets_every_block_in_order(world: int) -> None:
    """Played by hand: bytes are moved as the messages say, round by round."""
    size, parts = 3, bruck_parts(world)
    assert sum(parts) == world
    built = []
    for rank in range(world):
        g = GraphBuilder(rank, world)
        blocks = g.buffer(
            "blocks", parts=len(parts), size_bytes=[size * n for n in parts], initialised=True
        )
        assert bruck_gather(g, blocks, size, tag=5) == 5 + len(parts) - 1
        built.append(g.build())
    memory = [[bytearray(part.size_bytes) for part in graph.parts] for graph in built]
    for rank, parts_of_rank in enumerate(memory):
        parts_of_rank[0][:] = bytes([rank] * size)
    for number in range(len(parts) - 1):
        mail: dict[tuple[int, int], list[bytes]] = {}
        for graph in built:
            for m in graph.tasks[number].sends:
                piece = bytes(memory[graph.rank][m.part][m.offset : m.end])
                mail.setdefault((graph.rank, m.peer), []).append(piece)
        for graph in built:
            for m in graph.tasks[number].recvs:
                memory[graph.rank][m.part][m.offset : m.end] = mail[m.peer, graph.rank].pop(0)
    for rank, parts_of_rank in enumerate(memory):
        held = b"".join(map(bytes, parts_of_rank))
        assert held == b"".join(bytes([(rank + j) % world] * size) for j in range(world))


@pytest.mark.parametrize("world", _WORLDS)
def test_any_order_of_tasks_gives_the_same(world: int) -> None:
    """By the simulator's integers, in place of tensors."""
    graphs = graphs_of(program(world))
    expected = of_program_order(graphs)
    for order in range(40):
        schedules = list(map(Schedule.of, graphs))
        ended = rehearse(schedules, Faults(order), engine=partial(Engine, validate=True))
        assert ended.values == expected, order


def test_what_a_decode_takes_by_simulation() -> None:
    """More keys take longer, in proportion where there are many; more ranks less long."""
    hardware = load_hardware("h100-sxm")

    def seconds(world: int, keys: int) -> float:
        decoding = program(world, keys=keys, head_dim=128, v_head_dim=128, num_queries=1)
        return simulate(list(map(Schedule.of, graphs_of(decoding))), hardware).end_s

    assert seconds(4, 1 << 24) == pytest.approx(2 * seconds(4, 1 << 23), rel=0.05)
    assert seconds(8, 1 << 24) == pytest.approx(seconds(4, 1 << 23), rel=0.05)
    # The rounds are latency, and with half the keys little else changes.
    few = [seconds(world, 1024) for world in (2, 4, 8)]
    latency = hardware.node.link.latency_s
    assert few[1] - few[0] == pytest.approx(latency, rel=0.03)
    assert few[2] - few[1] == pytest.approx(latency, rel=0.03)


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.long)])
def test_few_plans_for_many_lengths(stride: int) -> None:
    """Steps of a cache that grows to 4,096 tokens; and what is verified is verified once."""
    lengths = range(1, 4097, stride)

    def call(ctx: Context) -> tuple[int, int, int]:
        q = torch.randn(1, 1, 2, 16)
        before = ctx.stats().calls
        for length in lengths:
            num = len(own_columns(length, ctx.rank, ctx.world_size))
            cache = torch.zeros(1, num, 2, 16)
            spans = Spans(np.zeros((1, 1, 1), np.int64), np.full((1, 1, 1), num, np.int64))
            run_one(ctx, QKV(q, cache, cache), SeenColumns(spans, num), length, ScoreOptions())
        verified = len(ctx.attention.planner._verified)
        return len(ctx.attention.kept[DecodePlan]), verified, ctx.stats().calls - before

    # Buckets 1024, 2048 and 4096, which go the same way.
    assert burst_rt.run_local(2, call) == [(3, 1, len(lengths))] * 2
    assert [bucket_of(n) for n in (0, 1, 1024, 1025, 5000)] == [1024, 1024, 1024, 2048, 8192]


def test_bytes_and_messages_of_a_run() -> None:
    case = CASES["lengths differ"]

    def call(ctx: Context) -> tuple[int, int]:
        before = ctx.stats().bytes_sent
        decode(ctx, case)
        (plan,) = ctx.attention.kept[DecodePlan].values()
        told = plan.describe()
        assert told.kind == "decode"
        assert f"{plan.program.num_rounds} rounds" in told.explain
        return ctx.stats().bytes_sent - before, plan.bytes_sent()

    for world in _WORLDS:
        # 3 sequences, 4 heads, 16 channels and lse: 4 bytes each.
        size = (world - 1) * 3 * 4 * 17 * 4
        assert burst_rt.run_local(world, call) == [(size, size)] * world


def test_memory_is_used_again() -> None:
    def call(ctx: Context) -> bool:
        decode(ctx, CASES["one token"])
        (plan,) = ctx.attention.kept[DecodePlan].values()
        take = ctx.runtime.machine._pool._idle[-1]
        decode(ctx, CASES["one token"])
        return take[0] is plan and take[1] is ctx.runtime.machine._pool._idle[-1][1]

    assert burst_rt.run_local(2, call) == [True, True]


def test_no_alibi() -> None:
    def call(ctx: Context) -> None:
        q = torch.zeros(1, 1, 2, 16)
        score_options = ScoreOptions(alibi_slopes=torch.ones(1, 2))
        nothing = SeenColumns(
            Spans(np.zeros((1, 1, 1), np.int64), np.zeros((1, 1, 1), np.int64)), 1
        )
        run_one(ctx, QKV(q, q, q), nothing, 1, score_options)

    with pytest.raises(InputError, match="no ALiBi"):
        burst_rt.run_local(2, call)


def test_parts_fold_like_the_whole() -> None:
    """Rows that one part, the other, both or none have seen."""
    generator = torch.Generator().manual_seed(3)
    none = torch.finfo(torch.float32).min
    lse = torch.tensor([[1.0, none, 2.0, none], [none, 3.0, 50.0, none]])
    out = torch.randn(2, 4, 3, generator=generator) * (lse > none).unsqueeze(-1)
    whole = Partial(out[0].clone(), lse[0].clone())
    whole.fold(out[1], lse[1])
    truth = torch.logsumexp(lse, 0)
    torch.testing.assert_close(whole.lse, truth)
    weights = torch.exp(lse - truth).unsqueeze(-1)
    torch.testing.assert_close(whole.out, (out * weights).sum(0))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("kernel", ["cpu", "naive", "untiled"])
def test_weights_of_large_scores_add_up_to_one(
    kernel: str, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However coarse a float32 lse is there, the mean of ones is one."""

    def call(ctx: Context, top: float) -> torch.Tensor:
        generator = torch.Generator().manual_seed(5)
        q = torch.ones(1, 2, 4, 8)
        k = torch.randn(1, 300, 2, 8, generator=generator) + top
        own = own_columns(300, ctx.rank, world)
        what_is_seen = SeenColumns(spans_of(torch.ones(1, 2, len(own), dtype=torch.bool)), len(own))
        qkv = QKV(q, k[:, own], torch.ones(1, len(own), 2, 8))
        return run_one(ctx, qkv, what_is_seen, 300, ScoreOptions(), 1.0)

    for part_bytes in (1 << 24, 1 << 12):
        monkeypatch.setattr(decode_kernels, "_PART_BYTES", part_bytes)
        for top in (1e4, -1e4):
            out = burst_rt.run_local(world, partial(call, top=top), kernel=kernel)[0]
            assert relative_error(out, torch.ones(1, 2, 4, 8)) < ERROR[torch.float32]


def test_kernels_in_the_list_do_not_hide_the_default() -> None:
    """Only these have a decode of their own."""
    own = {name for name, kernel in KERNELS.items() if "decode" in vars(type(kernel))}
    assert own == {"cpu", "triton"}
