"""Graphs of all ranks: everything that is seen is computed once, nothing else is computed, nothing
that nobody needs is sent.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from covering import sampled
from graphs import (
    KIND_PAIRS,
    MASKS,
    SIZES,
    as_ring,
    bytes_of,
    check_shares,
    graphs_of,
    other_rings,
    problem,
)
from spec import seen
from tolerances import BALANCE

from burst_rt import Causal, Documents, Full, SlidingWindow
from burst_rt.errors import InternalError
from burst_rt.planning import sides
from burst_rt.planning.choose import choose
from burst_rt.planning.layouts import KINDS
from burst_rt.planning.masks import Mask, Piece, Relation, Shape
from burst_rt.planning.operations import BackwardTile, FinishRows, ForwardTile, MergeRows
from burst_rt.planning.problem import Problem
from burst_rt.planning.roles import Role
from burst_rt.planning.strategies import Ring
from burst_rt.planning.strategies.ring import backward_ring, forward_ring
from burst_rt.planning.strategies.routes import OneRing, Route, Straight
from burst_rt.scheduler import Graph, check_world, match_messages
from burst_rt.scheduler.verify import Endpoint

Positions = tuple[int, ...]


def rings(p: Problem, route: Route | None = None) -> Iterator[Ring]:
    """Both directions, with either side travelling, block by block."""
    for queries_travel in (False, True):
        yield forward_ring(p, route, queries_travel=queries_travel)
    for queries_travel in (False, True):
        yield backward_ring(p, queries_travel=queries_travel, route=route)


def tiles(
    ring: Ring, graph: Graph
) -> Iterator[tuple[Positions, Positions, tuple[Piece, ...], int]]:
    """(positions of the rows, of the columns, pieces, flops) of every tile task."""
    for task in graph.tasks:
        if isinstance(task.op, (ForwardTile, BackwardTile)):
            owner, block, pieces = task.op.owner, task.op.block, task.op.pieces
            moving = tuple(itertools.chain(*ring.travelling[owner][block]))
            home = tuple(itertools.chain(*ring.resident[graph.rank]))
            yield (
                *((moving, home) if ring.queries_travel else (home, moving)),
                pieces,
                task.cost.flops,
            )


@sampled(size=SIZES, kinds=KIND_PAIRS, mask=MASKS)
def test_each_seen_cell_is_computed_once_and_no_other(
    size: tuple[int, int, int], kinds: tuple[str, str], mask: str
) -> None:
    q_len, kv_len, world_size = size
    p = problem(q_len, kv_len, world_size, mask=MASKS[mask], kinds=kinds)
    shift = kv_len - q_len
    for ring in (*rings(p), *other_rings(p)):
        times = torch.zeros(q_len, kv_len, dtype=torch.int64)
        for graph in graphs_of(ring):
            for q_positions, kv_positions, pieces, flops in tiles(ring, graph):
                per_cell = (4 if ring.forward else 10) * p.head_dim * p.num_heads * p.batch
                assert flops == sum(piece.num_cells for piece in pieces) * per_cell
                for piece in pieces:
                    q = torch.tensor(q_positions[piece.q_start : piece.q_stop])
                    kv = torch.tensor(kv_positions[piece.kv_start : piece.kv_stop])
                    cells = torch.ones(len(q), len(kv), dtype=torch.bool)
                    if piece.shape is Shape.LOWER:
                        cells = cells.tril()
                    if piece.shape is Shape.MASKED:
                        cells = p.mask.allows(q[:, None], kv[None, :])
                    else:
                        assert piece.num_cells == int(cells.sum())
                    assert cells.any() or piece.shape is Shape.MASKED
                    times[q[:, None] - shift, kv[None, :]] += cells
        assert torch.equal(times, seen(p.mask, q_len, kv_len).long())


@sampled(size=SIZES, kinds=KIND_PAIRS, mask=MASKS)
def test_only_what_somebody_further_on_needs_is_sent(
    size: tuple[int, int, int],
    kinds: tuple[str, str],
    mask: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A row goes as far as the last rank that computes with it; a sum starts at the first and goes
    home from the last. By rows, from booleans; `direct` sends what is needed and nothing else.
    """
    monkeypatch.setattr(sides, "ROWS_TOGETHER", 2)
    q_len, kv_len, world_size = size
    p = problem(q_len, kv_len, world_size, mask=MASKS[mask], kinds=kinds)
    for ring in map(replace, (*rings(p), *rings(p, Straight(world_size)))):
        straight = isinstance(ring.route, Straight)
        sizes = [
            sum(size for role, size in tensors if role not in (Role.ROWS, Role.ML))
            for tensors in (ring.bundle, ring.sums)
        ]
        row_bytes = sum(size for role, size in ring.bundle if role is Role.ROWS)
        ml_bytes = sum(size for role, size in ring.sums if role is Role.ML)
        expected = 0
        for owner, blocks in enumerate(ring.travelling):
            for block in blocks:
                ranks = [(owner + hop) % world_size for hop in range(1, world_size)]
                wanted = [meeting(ring, block, rank) for rank in ranks]
                adding = [hop for hop, rows in enumerate(wanted) if rows]
                for hop, rows in enumerate(wanted):
                    if not straight:
                        rows = set().union(*wanted[hop:])
                    expected += len(rows) * sizes[0] + bool(rows) * row_bytes * sum(map(len, block))
                    if straight:
                        summed = rows
                    elif adding and adding[0] <= hop <= adding[-1]:
                        summed = set().union(*wanted)
                    else:
                        summed = set()
                    expected += len(summed) * sizes[1]
                    expected += bool(summed) * ml_bytes * sum(map(len, block))
        graphs = graphs_of(ring)
        check_world(graphs)
        check_shares(graphs, ring)
        assert sum(map(bytes_of, graphs)) == ring.wire_bytes() == expected


@pytest.mark.parametrize("mask", [Full(), Causal()], ids=["full", "causal"])
def test_every_byte_that_travels_is_looked_at_or_sent_on(mask: Mask) -> None:
    """No message of blocks of unequal lengths could be four bytes shorter."""
    p = problem(37, 37, 3, mask=mask)
    for ring in (*rings(p), *rings(p, Straight(3))):
        graphs = graphs_of(ring)
        matched = match_messages(graphs)
        assert matched
        for received, sent in matched.items():
            with pytest.raises(InternalError, match=r"of which only .* have come"):
                check_world(_shorter(_shorter(graphs, received, "recvs"), sent, "sends"))


@pytest.mark.parametrize("cuts", [[0, 36, 52, 55, 63, 64], [0, 20, 30, 64]])
@pytest.mark.parametrize(("strategy", "forward"), [("ring-q", True), ("burst", False)])
def test_sums_that_begin_in_a_used_slot_look_at_nothing_of_it(
    strategy: str, forward: bool, cuts: list[int]
) -> None:
    """Blocks of unequal lengths, whose sums begin at different hops."""
    p = problem(64, 64, 6, mask=Documents(cuts), kinds=("contiguous", "contiguous"))
    program = choose(p, strategy, forward=forward).program
    check_world([program.graph(rank) for rank in range(6)])


@pytest.mark.parametrize("kind", ["contiguous", "striped"])
def test_a_band_is_not_cut_where_a_shards_runs_follow_each_other(kind: str) -> None:
    mask = SlidingWindow(255 if kind == "contiguous" else 1023)
    p = problem(4096, 4096, 4, mask=mask, kinds=(kind, kind))
    ring = backward_ring(p, queries_travel=True)
    own = [ring.pieces(1, block, 1) for block in range(2)]
    # Rows are counted along a block, columns along the shard: 512 and 1,024.
    assert own[1] == (Piece(0, 512, 257, 1024, Shape.BAND, 512 * 256),)
    assert [piece.shape for piece in own[0]] == [Shape.LOWER, Shape.BAND]


def _shorter(graphs: list[Graph], end: Endpoint, side: str) -> list[Graph]:
    task = graphs[end.rank].tasks[end.task]
    messages = list(getattr(task, side))
    short = messages[end.number]
    messages[end.number] = short._replace(size_bytes=short.size_bytes - 4)
    tasks = list(graphs[end.rank].tasks)
    changes: Any = {side: tuple(messages)}
    tasks[end.task] = replace(task, **changes)
    changed = replace(graphs[end.rank], tasks=tuple(tasks))
    return [changed if graph.rank == end.rank else graph for graph in graphs]


def meeting(ring: Ring, block: tuple[range, ...], rank: int) -> set[int]:
    """The rows of a block that a rank computes with, in pairs: of each run the first to the last.

    From the booleans of every cell; a mask without spans is asked for the relation of whole runs.
    """
    mask, at = ring.problem.mask, 0
    found: set[int] = set()
    for run in block:
        rows: list[int] = []
        for home in filter(None, ring.resident[rank]) if run else ():
            q, kv = (run, home) if ring.queries_travel else (home, run)
            if not mask.has_spans:
                whole = mask.relation(q, kv) is not Relation.EMPTY
                rows += range(len(run)) if whole else ()
                continue
            cells = mask.allows(torch.tensor(q)[:, None], torch.tensor(kv)[None, :])
            met = cells.reshape(-1, len(q), len(kv)).any(0).any(1 if ring.queries_travel else 0)
            rows += torch.nonzero(met).flatten().tolist()
        if rows:
            found.update(range(at + min(rows), at + max(rows) + 1))
        at += len(run)
    return {row for pair in {row // 2 for row in found} for row in (2 * pair, 2 * pair + 1)} & {
        *range(at)
    }


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_causal_contiguous_never_sends_the_last_keys(world_size: int) -> None:
    p = problem(
        64 * world_size,
        64 * world_size,
        world_size,
        mask=Causal(),
        kinds=("contiguous", "contiguous"),
    )
    for ring in rings(p):
        graphs = graphs_of(ring)
        if ring.queries_travel:
            # Queries of the first rank see no keys but its own.
            assert not any(ring.sum_hops[0])
            assert not any(map(any, ring.bundles[0]))
            continue
        assert not any(ring.sum_hops[-1])
        assert not any(map(any, ring.bundles[-1]))
        for graph in graphs:
            named = {part.id: part.buffer for part in graph.parts}
            own = {"k", "v"} & {named[m.part] for task in graph.tasks for m in task.sends}
            assert own == (set() if graph.rank == world_size - 1 else {"k", "v"})


@pytest.mark.parametrize("tokens_per_rank", [1000, 1001, 4096])
@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8])
def test_causal_zigzag_is_even(world_size: int, tokens_per_rank: int) -> None:
    p = problem(
        world_size * tokens_per_rank - 1,
        world_size * tokens_per_rank - 1,
        world_size,
        mask=Causal(),
    )
    for ring in (*rings(p), *other_rings(p)):
        work = [sum(flops for *_, flops in tiles(ring, graph)) for graph in graphs_of(ring)]
        assert max(work) <= BALANCE * min(work)


# The table of the design: bytes a hop and rank for the full mask and equal shards. s: bytes an
# input, a: bytes a sum, E: local elements.
_TABLE = {
    ("ring-kv", True): lambda s, a, e_q, e_kv, d: 2 * s * e_kv,
    ("burst", True): lambda s, a, e_q, e_kv, d: 2 * s * e_kv,
    ("ring-q", True): lambda s, a, e_q, e_kv, d: (s + a) * e_q + 2 * a * e_q // d,
    ("ring-kv", False): lambda s, a, e_q, e_kv, d: (2 * s + 2 * a) * e_kv,
    ("ring-q", False): lambda s, a, e_q, e_kv, d: (2 * s + a) * e_q + 2 * a * e_q // d,
    ("burst", False): lambda s, a, e_q, e_kv, d: (2 * s + a) * e_q + 2 * a * e_q // d,
}


@sampled(
    step=_TABLE,
    input_bytes=[2, 4, 8],
    world_size=[1, 2, 3, 4, 5, 8],
    sizes=[((8, 8), (32, 32)), ((8, 2), (32, 32)), ((4, 1), (16, 64)), ((4, 2), (64, 16))],
)
def test_bytes_are_those_of_the_table(
    step: tuple[str, bool],
    input_bytes: int,
    world_size: int,
    sizes: tuple[tuple[int, int], tuple[int, int]],
) -> None:
    (strategy, forward), (heads, lengths) = step, sizes
    q_len, kv_len = (n * world_size for n in lengths)
    p = problem(
        q_len, kv_len, world_size, heads=heads, head_dim=64, input_bytes=input_bytes, batch=3
    )
    ring = as_ring(choose(p, strategy, forward=forward).program)
    e_q, e_kv = (3 * n * h * 64 for n, h in zip(lengths, heads, strict=True))
    a_hop = _TABLE[step](input_bytes, max(input_bytes, 4), e_q, e_kv, 64)
    assert {bytes_of(graph) for graph in graphs_of(ring)} == {a_hop * (world_size - 1)}


def test_the_table_in_the_units_of_the_design() -> None:
    """16-bit inputs, E = tokens x q-heads x d, g = 4: forward 4 E / g or (6 + 8 / d) E, backward
    12 E / g or (8 + 8 / d) E.
    """
    d, g, e = 128, 4, 32 * 8 * 128
    p = problem(64, 64, 2, heads=(8, 2), head_dim=d, input_bytes=2)
    forward, ring_q, ring_kv, burst = (ring.wire_bytes() // 2 for ring in rings(p))
    assert (forward, ring_q) == (4 * e // g, 6 * e + 8 * e // d)
    assert (ring_kv, burst) == (12 * e // g, 8 * e + 8 * e // d)


@pytest.mark.parametrize(
    ("input_bytes", "q_len", "strategy"),
    [
        # 16-bit: Q-side (8 + 8/128) Eq against 12 Ekv: even at Eq / Ekv = 1.488. 32-bit: (12 +
        # 8/128) Eq against 16 Ekv: 1.326.
        (2, 1480, "burst"),
        (2, 1496, "ring-kv"),
        (4, 1320, "burst"),
        (4, 1336, "ring-kv"),
    ],
)
def test_auto_changes_side_where_the_bytes_do(input_bytes: int, q_len: int, strategy: str) -> None:
    p = problem(q_len, 1000, 4, head_dim=128, input_bytes=input_bytes, heads=(4, 4))
    taken = choose(p, "auto", forward=False)
    assert taken.strategy == strategy
    assert set(taken.candidates) == {"burst", "ring-kv"}
    assert (
        taken.candidates[strategy] == min(taken.candidates.values()) == taken.program.wire_bytes()
    )


@pytest.mark.parametrize(
    ("heads", "strategy"), [((8, 8), "burst"), ((8, 4), "ring-kv"), ((8, 1), "ring-kv")]
)
@pytest.mark.parametrize("input_bytes", [2, 4])
def test_auto_for_grouped_heads(heads: tuple[int, int], strategy: str, input_bytes: int) -> None:
    p = problem(64, 64, 2, heads=heads, head_dim=128, input_bytes=input_bytes)
    assert choose(p, "auto", forward=False).strategy == strategy


def test_auto_knows_the_mask_and_what_needs_a_gradient() -> None:
    # Grouped heads, but no gradient of k or v: nothing comes home with K, V. Without one of q: no
    # dQ.
    even = problem(64, 64, 2, heads=(4, 4), head_dim=128, input_bytes=2)
    assert choose(even, "auto", forward=False).strategy == "burst"
    only_q = replace(even, needs_grad=(True, False, False))
    assert choose(only_q, "auto", forward=False).strategy == "ring-kv"
    for strategy, left in (("ring-kv", 4), ("burst", 8 + 8 / 128)):
        assert (
            choose(only_q, strategy, forward=False).program.wire_bytes() == 2 * 32 * 4 * 128 * left
        )
    # Ties go to ring-kv; a world of one sends nothing.
    assert choose(problem(64, 64, 1), "auto", forward=False) == choose(
        problem(64, 64, 1), "ring-kv", forward=False
    )
    assert choose(problem(64, 64, 1), "auto", forward=False).candidates == {
        "ring-kv": 0,
        "burst": 0,
    }


@pytest.mark.parametrize("needs_grad", list(itertools.product([False, True], repeat=3))[1:])
def test_only_needed_sums_travel(needs_grad: tuple[bool, bool, bool]) -> None:
    p = problem(50, 50, 3, mask=Causal(), needs_grad=needs_grad)
    for ring in (ring for ring in rings(p) if not ring.forward):
        graphs = graphs_of(ring)
        check_world(graphs)
        wanted = {
            name for name, needed in zip(("dq", "dk", "dv"), needs_grad, strict=True) if needed
        }
        for graph in graphs:
            assert {part.buffer.rstrip("01") for part in graph.parts} & {"dq", "dk", "dv"} == wanted


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_receive_memory_is_two_slots_whatever_the_world(world_size: int) -> None:
    p = problem(64 * world_size, 64 * world_size, world_size)
    for ring in rings(p):
        for graph in graphs_of(ring):
            slots = {
                part.buffer: part
                for part in graph.parts
                if not part.initialised and part.size_bytes
            }
            names = {name for name, _ in (*ring.bundle, *ring.sums)}
            assert set(slots) == {f"{name}{i}" for name in names for i in range(2)}
            size = sum(part.size_bytes for part in graph.parts if not part.initialised)
            assert size == 2 * 64 * sum(size for _, size in (*ring.bundle, *ring.sums))


def test_nothing_is_sent_before_the_ranks_agree() -> None:
    p = problem(60, 60, 3, mask=Causal())
    for ring in rings(p):
        for graph in graphs_of(ring):
            after = {0}
            for task in graph.tasks:
                if after & set(graph.predecessors[task.id]):
                    after.add(task.id)
                assert task.id in after or not task.is_exchange
            assert graph.tasks[0].lane == "control"


def test_graphs_of_one_problem_are_equal() -> None:
    p = problem(61, 61, 3, mask=Causal())
    for ring, again in zip(rings(p), rings(replace(p)), strict=True):
        assert graphs_of(ring) == graphs_of(again)


@pytest.mark.parametrize("strategy", ["auto", "burst", "ring-kv"])
def test_forward_of_the_plain_ring_is_the_same_for_all_strategies(strategy: str) -> None:
    p = problem(61, 61, 3, mask=Causal())
    taken = choose(p, strategy, forward=True)
    called = "ring-kv" if strategy == "auto" else strategy
    assert taken.strategy == called
    assert taken.program == choose(p, "ring-kv", forward=True).program
    assert taken.candidates == {called: taken.program.wire_bytes()}


@pytest.mark.parametrize(
    ("heads", "input_bytes", "even"),
    [
        # (6 + 8/128) Eq against 4 Ekv / g: even at Sq / Skv = 0.660 without groups, at 0.0825 for
        # g = 8. 32-bit: (8 + 8/128) Eq against 8 Ekv.
        ((4, 4), 2, 659.8),
        ((8, 1), 2, 82.5),
        ((4, 4), 4, 992.2),
    ],
)
def test_auto_lets_queries_travel_where_they_are_few(
    heads: tuple[int, int], input_bytes: int, even: float
) -> None:
    """And has no such candidate elsewhere, as in self-attention."""
    step = 8
    below = int(even) // step * step
    for q_len, strategy in ((below, "ring-q"), (below + step, "ring-kv"), (1000, "ring-kv")):
        p = problem(q_len, 1000, 4, head_dim=128, input_bytes=input_bytes, heads=heads)
        taken = choose(p, "auto", forward=True)
        assert taken.strategy == strategy
        assert list(taken.candidates) == ["ring-kv", "ring-q"][: 1 + (strategy == "ring-q")]
        assert taken.candidates[strategy] == taken.program.wire_bytes()
        assert taken.program.queries_travel is (strategy == "ring-q")
        assert min(taken.candidates.values()) == taken.candidates[strategy]
        # The backward is its own choice; that of the strategy is that of `burst`.
        assert choose(p, "ring-q", forward=False) == choose(p, "burst", forward=False)


def test_states_that_have_come_home_are_merged_before_the_end() -> None:
    """Each block's once; out and lse are written by the last task, and by no tile."""
    p = problem(64, 64, 4)
    for graph in graphs_of(forward_ring(p, queries_travel=True)):
        *others, last = (task.op for task in graph.tasks if task.lane == "compute")
        assert [op.block for op in others if isinstance(op, MergeRows)] == [0, 1]
        assert isinstance(last, FinishRows)
        assert not any(isinstance(op, FinishRows) for op in others)
        own = {part.id for part in graph.parts if part.buffer in ("acc", "ml")}
        assert set(graph.tasks[-1].accumulates) == own


@pytest.mark.parametrize("kinds", [(k, k) for k in KINDS], ids="-".join)
def test_rectangles_that_touch_are_one(kinds: tuple[str, str]) -> None:
    """Under the full mask a tile is one piece, whatever the layout."""
    p = problem(64, 64, 4, kinds=kinds)
    for ring in rings(p):
        for graph in graphs_of(ring):
            sizes = [[piece.num_cells for piece in pieces] for *_, pieces, _ in tiles(ring, graph)]
            assert sizes == [[8 * 16]] * 8


def test_the_verifier_reads_these_graphs() -> None:
    """Not vacuously: one rank's graph of another problem does not fit in."""
    for ring, other in zip(rings(problem(60, 60, 3)), rings(problem(66, 66, 3)), strict=True):
        graphs = graphs_of(ring)
        graphs[1] = other.graph(1)
        with pytest.raises(InternalError, match=r"rank [012]"):
            check_world(graphs)


def test_shards_travel_whole_where_every_rank_needs_all_of_them() -> None:
    """Without sums, or short: half the tasks; never under a mask, or where blocks go two ways."""
    for seq_len, mask, without_sums, with_sums in (
        (256, None, True, True),
        (260, None, True, False),
        (256, Causal(), False, False),
    ):
        p = problem(seq_len, seq_len, 4, mask=mask)
        for strategy in ("ring-kv", "burst", "ring-q", "two-level:2", "direct"):
            for forward in (True, False):
                ring = as_ring(choose(p, strategy, forward=forward).program)
                assert bool(ring.sums) is (not forward or strategy == "ring-q")
                single = with_sums if ring.sums else without_sums
                assert ring.single_block is single
                assert {len(blocks) for blocks in ring.travelling} == {1 if single else 2}
                # As many bytes as block by block.
                route = OneRing(4, (1, 1)) if isinstance(ring.route, OneRing) else ring.route
                halved = replace(ring, single_block=False, route=route)
                assert not single or ring.wire_bytes() == halved.wire_bytes()
        assert not as_ring(choose(p, "bidirectional", forward=True).program).single_block


def test_sums_leave_block_by_block() -> None:
    """One message a block: the first block's sum is on its way while the second's is being made."""
    p = problem(64, 64, 4)
    for ring in list(rings(p))[1:]:
        names = Counter(
            task.name.split(".")[0] for task in ring.graph(0).tasks if task.name.startswith("sum")
        )
        assert names == {"sum 1": 2, "sum 2": 2, "sum 3": 2}
