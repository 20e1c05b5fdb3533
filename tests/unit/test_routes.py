"""Ways round other than the plain ring: what is sent, over which links; and all-to-all, alone and
around a ring.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain

import pytest
from covering import sampled
from graphs import KIND_PAIRS, MASKS, SIZES, bytes_of, check_shares, graphs_of, other_rings, problem

from burst_rt import Causal, SlidingWindow
from burst_rt.errors import InputError
from burst_rt.planning.choose import choose
from burst_rt.planning.operations import ForwardTile
from burst_rt.planning.roles import Role
from burst_rt.planning.strategies import Hybrid, Ring, check_name
from burst_rt.scheduler import Graph, check_world


def links(graphs: list[Graph]) -> Counter[tuple[int, int]]:
    """Bytes by (sender, receiver)."""
    found: Counter[tuple[int, int]] = Counter()
    for graph in graphs:
        for task in graph.tasks:
            for m in task.sends:
                found[graph.rank, m.peer] += m.size_bytes
    return found


@sampled(size=SIZES, kinds=KIND_PAIRS, mask=MASKS)
def test_graphs_fit_and_send_what_they_say(
    size: tuple[int, int, int], kinds: tuple[str, str], mask: str
) -> None:
    p = problem(*size, mask=MASKS[mask], kinds=kinds)
    for ring in other_rings(p):
        graphs = graphs_of(ring)
        check_world(graphs)
        check_shares(graphs, ring)
        assert sum(map(bytes_of, graphs)) == ring.wire_bytes()


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_both_ways_round_halve_each_link(world_size: int, forward: bool) -> None:
    """Full mask: the bytes of the ring, half to the next rank and half to the one before."""
    p = problem(64 * world_size, 64 * world_size, world_size)
    ring = choose(p, "auto", forward=forward).program
    both = choose(p, "bidirectional", forward=forward).program
    assert both.wire_bytes() == ring.wire_bytes()
    found = links(graphs_of(both))
    if world_size == 2:
        assert set(found.values()) == {ring.wire_bytes() // 2}
        return
    assert set(found) == {(r, (r + way) % world_size) for r in range(world_size) for way in (1, -1)}
    assert set(found.values()) == {ring.wire_bytes() // world_size // 2}


@pytest.mark.parametrize("world_size", [3, 4, 8])
def test_causal_zigzag_sends_the_late_half_back(world_size: int) -> None:
    """Late keys are seen by late queries only, which are those of lower ranks: rank r's go r hops
    back instead of all the way round.
    """
    n = 64
    p = problem(n * world_size, n * world_size, world_size, mask=Causal())
    both = choose(p, "bidirectional", forward=True).program
    early, late = (world_size - 1) * world_size, sum(range(world_size))
    assert both.wire_bytes() == (early + late) * n // 2 * 2 * p.k_token_bytes
    assert both.wire_bytes() < choose(p, "ring-kv", forward=True).program.wire_bytes()
    backward = choose(p, "bidirectional", forward=False).program
    assert backward.wire_bytes() < choose(p, "auto", forward=False).program.wire_bytes()


@pytest.mark.parametrize("left", [1, 63, 64, 65, 128, 129, 300, 448, 511, -1])
def test_a_window_takes_as_many_hops_as_it_reaches_shards(left: int) -> None:
    """ceil(left / shard), with contiguous shards; a window to the first token takes all."""
    n, world_size = 64, 8
    p = problem(
        n * world_size, n * world_size, world_size,
        mask=SlidingWindow(left), kinds=("contiguous", "contiguous"),
    )  # fmt: skip
    ways = (("ring-kv", True), ("ring-q", True), ("ring-kv", False), ("burst", False))
    for strategy, forward in ways:
        program = choose(p, strategy, forward=forward).program
        assert isinstance(program, Ring)
        assert str(program).endswith("backwards") == program.queries_travel
        graphs = graphs_of(program)
        hops = max(
            sum(task.name.startswith("hop ") and bool(task.sends) for task in graph.tasks)
            for graph in graphs
        )
        assert hops == (-(-left // n) if 0 <= left < n * (world_size - 1) else world_size - 1)


@pytest.mark.parametrize("kind", ["zigzag", "striped", "contiguous"])
@pytest.mark.parametrize("tokens", [(61, 61), (24, 61), (3, 3)])
def test_what_all_ranks_gather_is_in_ascending_order(kind: str, tokens: tuple[int, int]) -> None:
    """Each position comes to its own place."""
    p = problem(*tokens, 4, mask=Causal(), kinds=(kind, kind), heads=(8, 4))
    hybrid = choose(p, "all-to-all", forward=True).program
    assert isinstance(hybrid, Hybrid)
    inner = hybrid.ring.problem
    assert inner.kv_runs == ((range(tokens[1]),),)
    for role, runs, joined in (
        (Role.Q, p.q_runs, inner.q_runs),
        (Role.K, p.kv_runs, inner.kv_runs),
    ):
        gathered = list(chain(*joined[0]))
        for rank in range(4):
            places = chain(*hybrid.places(role, rank))
            assert [gathered[place] for place in places] == list(chain(*runs[rank]))


@pytest.mark.parametrize(("world_size", "local"), [(4, 2), (6, 3), (6, 2), (8, 4)])
def test_two_levels_cross_nodes_once_a_block_and_node(world_size: int, local: int) -> None:
    """Full mask, forward: each node but the owner's gets each block once from outside, and passes
    it on inside.
    """
    n = 32
    p = problem(n * world_size, n * world_size, world_size)
    found = links(graphs_of(choose(p, f"two-level:{local}", forward=True).program))
    crossing = sum(size for (a, b), size in found.items() if a // local != b // local)
    nodes = world_size // local
    assert crossing == world_size * (nodes - 1) * n * 2 * p.k_token_bytes
    assert sum(found.values()) == world_size * (world_size - 1) * n * 2 * p.k_token_bytes


@sampled(size=SIZES, kinds=KIND_PAIRS, mask=MASKS)
def test_all_to_all_fits_and_sends_what_it_says(
    size: tuple[int, int, int], kinds: tuple[str, str], mask: str
) -> None:
    world_size = size[-1]
    p = problem(*size, mask=MASKS[mask], kinds=kinds, heads=(2 * world_size, world_size))
    for group in (n for n in range(1, world_size + 1) if world_size % n == 0):
        for forward in (True, False):
            program = choose(p, f"hybrid:{group}", forward=forward).program
            graphs = graphs_of(program)
            check_world(graphs)
            check_shares(graphs, program)
            assert sum(map(bytes_of, graphs)) == program.wire_bytes()
            # Of other masks, and between strided and consecutive tokens, the cells of a tile are
            # counted from above.
            if mask == "full" or (mask == "causal" and kinds.count("striped") != 1):
                flops = sum(t.cost.flops for g in graphs for t in g.tasks)
                ring = choose(p, "auto", forward=forward).program
                assert flops == sum(t.cost.flops for g in graphs_of(ring) for t in g.tasks)


@pytest.mark.parametrize("input_bytes", [2, 4])
@pytest.mark.parametrize(("world_size", "size"), [(1, 1), (2, 2), (4, 2), (4, 4), (8, 4), (6, 3)])
def test_bytes_of_all_to_all_are_those_of_its_text(
    world_size: int, size: int, input_bytes: int
) -> None:
    n, heads, g, d = 32, 2 * size, 2, 64
    p = problem(
        n * world_size,
        n * world_size,
        world_size,
        heads=(heads, heads // g),
        head_dim=d,
        input_bytes=input_bytes,
    )
    s, a, e = input_bytes, 4, n * heads * d
    groups = world_size // size
    forward = choose(p, f"hybrid:{size}", forward=True).program
    spread = (2 * s * e + 2 * s * e // g + a * n * heads) * (size - 1) // size
    assert {bytes_of(graph) for graph in graphs_of(forward)} == {
        spread + (groups - 1) * 2 * s * e // g
    }
    backward = choose(p, f"hybrid:{size}", forward=False).program
    spread = (3 * s * e + 4 * s * e // g + 2 * a * n * heads) * (size - 1) // size
    ring = min((2 * s + 2 * a) * e // g, (2 * s + a) * e + 2 * a * e // d)
    assert {bytes_of(graph) for graph in graphs_of(backward)} == {spread + (groups - 1) * ring}


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_bytes_of_the_naive_ring_are_those_of_its_text(world_size: int) -> None:
    n, s, a, e_kv = 32, 2, 4, 32 * 2 * 16
    p = problem(n * world_size, n * world_size, world_size, heads=(4, 2), input_bytes=s)
    for forward, a_hop in ((True, 2 * s * e_kv), (False, (3 * s + 2 * a) * e_kv)):
        program = choose(p, "ring-naive", forward=forward).program
        graphs = graphs_of(program)
        check_world(graphs)
        check_shares(graphs, program)
        assert {bytes_of(graph) for graph in graphs} == {(world_size - 1) * a_hop}
        assert program.wire_bytes() == world_size * (world_size - 1) * a_hop


def test_one_group_is_one_tile() -> None:
    """Contiguous and zigzag shards of all ranks are the whole sequence: nothing is cut."""
    for kind in ("contiguous", "zigzag"):
        p = problem(64, 64, 4, kinds=(kind, kind), heads=(4, 4), mask=Causal())
        for graph in graphs_of(choose(p, "all-to-all", forward=True).program):
            tiles = [t.op for t in graph.tasks if isinstance(t.op, ForwardTile)]
            assert [len(tile.pieces) for tile in tiles] == [1]


def test_what_does_not_divide_is_refused_by_name() -> None:
    p = problem(64, 64, 4, heads=(6, 2))
    with pytest.raises(InputError, match="4 must divide the number of kv heads, got 2"):
        choose(p, "all-to-all", forward=True)
    with pytest.raises(InputError, match="groups of 3 and 4 ranks"):
        choose(p, "hybrid:3", forward=False)
    with pytest.raises(
        InputError, match="must divide the number of ranks, got 3 ranks per node and 4 ranks"
    ):
        choose(p, "two-level:3", forward=True)
    # By itself it takes groups that can share the heads.
    assert choose(p, "hybrid", forward=True, ranks_per_node=4).strategy == "hybrid:2"


@pytest.mark.parametrize(
    "name",
    ["", "ring", "hybrid:", "hybrid:0", "hybrid:two", "hybrid:-1", "burst:2", "Auto", None, 3],
)
def test_unknown_names(name: object) -> None:
    with pytest.raises(InputError, match="strategy must be one of"):
        check_name(name)
