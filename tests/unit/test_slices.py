"""Heads that are exchanged in slices, between nodes or between all ranks: results, messages, bytes,
and what runs while a slice travels.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from covering import sampled
from graphs import KIND_PAIRS, MASKS, SIZES, bytes_of, check_shares, graphs_of, problem
from spec import errors_of
from tolerances import ERROR
from worlds import Case, attend_over_threads

from burst_rt import Causal, Documents, Full, Mask
from burst_rt.errors import InputError
from burst_rt.kernels import sum_dtype
from burst_rt.launch.plan.layers import SpreadLayer
from burst_rt.launch.plan.model import Question, forecast_model
from burst_rt.launch.plan.models import parse_model
from burst_rt.planning.choose import choose
from burst_rt.planning.machines import load_hardware
from burst_rt.planning.operations import TileOperation
from burst_rt.planning.ranking import forecast
from burst_rt.planning.strategies import Hybrid
from burst_rt.planning.strategies.table import TABLE, Direction
from burst_rt.scheduler import NCCL_LANES, Graph, Schedule, check_world
from burst_rt.scheduler.simulator import simulate


class _Shape(NamedTuple):
    world_size: int
    per_node: int
    heads: int
    kv_heads: int
    slices: int
    dtype: torch.dtype = torch.float32


_SHAPES = {
    "one node": _Shape(2, 2, 8, 8, 4),
    "one node, bf16": _Shape(3, 3, 12, 6, 2, torch.bfloat16),
    "one kv head of several slices": _Shape(2, 2, 12, 4, 6),
    "nodes of one rank": _Shape(4, 1, 16, 4, 4),
    "one rank": _Shape(1, 1, 4, 2, 2),
    "two nodes": _Shape(4, 2, 8, 8, 4),
    "two nodes, bf16": _Shape(6, 3, 8, 4, 2, torch.bfloat16),
    "two nodes, one kv head": _Shape(4, 2, 8, 2, 4),
    "three nodes": _Shape(6, 2, 6, 3, 2),
    "one slice": _Shape(4, 2, 4, 4, 1),
}
_MASKED: dict[str, Mask] = {
    "full": Full(),
    "causal": Causal(),
    "documents": Causal() & Documents([20, 30, 13]),
}


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    """Threads are one node: makes the strategy see as many nodes as the shape has."""
    row, per_node = TABLE["sliced"], _SHAPES[shape].per_node

    def apart(d: Direction) -> object:
        return row.programs(d._replace(ranks_per_node=per_node))

    monkeypatch.setitem(TABLE, "sliced", row._replace(programs=apart))  # type: ignore[arg-type]


@sampled(
    shape=_SHAPES, mask=_MASKED, kind=["zigzag", "striped", "contiguous"], options=[False, True]
)
def test_results(nodes: None, shape: str, mask: str, kind: str, options: bool) -> None:
    """options: sinks and slopes of each head, of which a slice has its own."""
    world_size, _, heads, kv_heads, slices, dtype = _SHAPES[shape]
    case = Case(
        63, heads=heads, kv_heads=kv_heads, batch=2, mask=_MASKED[mask], kind=kind, dtype=dtype,
        strategy=f"sliced:{slices}", sinks=options, alibi="heads" if options else "",
        v_head_dim=24 if options else None,
    )  # fmt: skip
    for name, error in errors_of(attend_over_threads(world_size, case), case.truth).items():
        # lse is kept in the type of the sums.
        assert error < ERROR[sum_dtype(dtype) if name == "lse" else dtype], (name, error)


@pytest.mark.parametrize("shape", ["one node", "two nodes", "two nodes, one kv head"])
def test_few_tokens_and_rows_without_keys(nodes: None, shape: str) -> None:
    """Some shards are empty; no query of the first sees a key, and each slice says so."""
    world_size, _, heads, kv_heads, slices, _ = _SHAPES[shape]
    for q_len, kv_len in ((3, 3), (1, 9), (50, 20), (2, 1)):
        case = Case(
            q_len, kv_len=kv_len, heads=heads, kv_heads=kv_heads, mask=Causal(),
            strategy=f"sliced:{slices}",
        )  # fmt: skip
        for name, error in errors_of(attend_over_threads(world_size, case), case.truth).items():
            assert error < ERROR[torch.float32], (q_len, kv_len, name, error)


@pytest.mark.parametrize("shape", ["two nodes"])
def test_gradients_that_nobody_needs(nodes: None, shape: str) -> None:
    for needs in ((True, False, False), (False, True, False), (False, False, True)):
        case = Case(40, heads=8, mask=Causal(), strategy="sliced:4", needs_grad=needs)
        result = attend_over_threads(4, case)
        assert [x is not None for x in (result.dq, result.dk, result.dv)] == [*needs]
        assert max(errors_of(result, case.truth).values()) < ERROR[torch.float32]


def _program(given: _Shape, name: str, *, forward: bool) -> Hybrid:
    p = problem(64, 64, given.world_size, mask=Causal(), heads=(given.heads, given.kv_heads))
    program = choose(p, name, forward=forward, ranks_per_node=given.per_node).program
    assert isinstance(program, Hybrid)
    return program


@sampled(size=SIZES, kinds=KIND_PAIRS, mask=MASKS, slices=[1, 2, 4], nodes=[1, 2])
def test_graphs_fit_and_send_what_they_say(
    size: tuple[int, int, int], kinds: tuple[str, str], mask: str, slices: int, nodes: int
) -> None:
    world_size = size[-1]
    if world_size % nodes:
        nodes = world_size
    p = problem(*size, mask=MASKS[mask], kinds=kinds, heads=(4 * world_size, 2 * world_size))
    for forward in (True, False):
        program = choose(
            p, f"sliced:{slices}", forward=forward, ranks_per_node=world_size // nodes
        ).program
        graphs = graphs_of(program)
        check_world(graphs)
        check_shares(graphs, program)
        assert sum(map(bytes_of, graphs)) == program.wire_bytes()
        check_world([program.graph(rank, NCCL_LANES) for rank in range(world_size)])


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize(
    "shape", ["one node", "one kv head of several slices", "nodes of one rank"]
)
def test_slices_send_no_more_than_all_at_once(shape: str, forward: bool) -> None:
    """Keys that several slices share travel once."""
    given = _SHAPES[shape]
    in_slices = _program(given, f"sliced:{given.slices}", forward=forward)
    at_once = _program(given, "all-to-all", forward=forward)
    assert in_slices.wire_bytes() == at_once.wire_bytes()
    for rank in range(given.world_size):
        few, one = in_slices.footprint(rank), at_once.footprint(rank)
        assert (few.sums, few.copies) == (one.sums, one.copies)
        assert few.tile.num_heads * given.slices == one.tile.num_heads
        slots = [
            sum(part.size_bytes for part in program.graph(rank).slots)
            for program in (in_slices, at_once)
        ]
        assert slots[0] == slots[1]


def test_between_nodes_go_heads_and_inside_them_rings() -> None:
    """Full mask, forward: the seven eighths of q, k, v, out and lse that other nodes compute."""
    p = problem(32 * 64, 32 * 64, 32, heads=(16, 8))
    program = choose(p, "sliced:2", forward=True, ranks_per_node=4).program
    for graph in graphs_of(program):
        sent = [m for task in graph.tasks for m in task.sends]
        far = [m for m in sent if m.peer // 4 != graph.rank // 4]
        assert {m.peer % 4 for m in far} == {graph.rank % 4}
        a_token = p.q_token_bytes + p.k_token_bytes + p.v_token_bytes + p.out_token_bytes
        assert sum(m.size_bytes for m in far) == 64 * (a_token + p.row_bytes // 2) * 7 // 8
        near = {m.peer for m in sent} - {m.peer for m in far}
        assert near == {graph.rank - graph.rank % 4 + (graph.rank + 1) % 4}


def _tiles(graph: Graph) -> list[int]:
    return [task.id for task in graph.tasks if isinstance(task.op, TileOperation)]


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("per_node", [1, 4])
def test_a_slice_is_computed_while_the_next_travel(per_node: int, forward: bool) -> None:
    """On a network on which a slice travels for about as long as it is computed."""
    hardware = load_hardware("h100-sxm")
    assert hardware.nics is not None
    link = replace(hardware.nics.link, bytes_per_s=3.125e9)
    hardware = replace(
        hardware,
        node=replace(hardware.node, ranks=per_node),
        nics=replace(hardware.nics, link=link),
    )
    p = problem(1 << 18, 1 << 18, 8, mask=Causal(), heads=(32, 32), head_dim=128, input_bytes=2)
    program = choose(p, "sliced:4", forward=forward, ranks_per_node=per_node).program
    graphs = graphs_of(program)
    run = simulate([Schedule.of(graph) for graph in graphs], hardware, spans=True)
    for graph, spans in zip(graphs, run.spans, strict=True):
        at = {span.task: span for span in spans}
        gathers = [at[task.id] for task in graph.tasks if task.name == "gather"]
        returns = [at[task.id] for task in graph.tasks if task.name == "give back"]
        tiles = [at[task] for task in _tiles(graph)]
        assert len(gathers) == len(returns) == 4
        assert all(a.ended_s <= b.started_s for a, b in pairwise(gathers))
        # The first slice is computed, and is on its way back, before the last one has come.
        assert tiles[0].started_s < gathers[1].ended_s
        assert returns[0].started_s < tiles[-1].started_s
        assert all(a.started_s < b.started_s for a, b in pairwise(returns))
    at_once = forecast(p, "all-to-all", hardware, forward=forward, ranks_per_node=per_node)
    assert run.end_s < 0.9 * at_once.time_s


def test_numbers_of_slices() -> None:
    p = problem(64, 64, 4, heads=(24, 12))
    for per_node, taken in ((4, 3), (1, 3), (2, 3)):  # three kv heads a rank, or six a node
        name = choose(p, "sliced", forward=True, ranks_per_node=per_node).strategy
        assert name == f"sliced:{taken}"
    one_head = problem(64, 64, 4, heads=(4, 4))
    assert choose(one_head, "sliced", forward=True, ranks_per_node=4).program == (
        choose(one_head, "all-to-all", forward=True).program
    )
    alone = problem(64, 64, 1, heads=(4, 4))
    assert choose(alone, "sliced", forward=True).strategy == "sliced:1"
    with pytest.raises(InputError, match=r"5 slices .* got 6 query heads and 3 kv heads a rank"):
        choose(p, "sliced:5", forward=True, ranks_per_node=4)
    with pytest.raises(InputError, match=r"must divide the number of kv heads, got 2 kv heads"):
        choose(problem(64, 64, 4, heads=(4, 2)), "sliced", forward=False)


@pytest.mark.parametrize("mask", ["causal", "window:8191"])
def test_nodes_that_do_the_same_have_one_node_s_graphs(
    mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forecast is that of all ranks' own graphs."""
    question = Question(parse_model("llama-3-8b"), 100_001, "train", mask)
    hardware = load_hardware("h100-sxm")

    def forecasts(world_size: int) -> tuple[float, ...]:
        found = forecast_model(question, "sliced", world_size, hardware)
        return found.time_s, found.idle_s, found.sent_bytes, found.memory_bytes

    few = forecasts(16)
    monkeypatch.setattr(SpreadLayer, "_nodes_alike", lambda *_: 0)
    assert few == pytest.approx(forecasts(16), rel=5e-3)
