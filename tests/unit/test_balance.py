"""Balance: the load of every mask against plain loops, and ranks that are even for drawn mixes."""

from __future__ import annotations

from itertools import pairwise
from math import ceil, log2

import numpy as np
import pytest
from covering import first_of
from graphs import Window
from mask_truths import MASKS, Sizes, truth_of
from mixes import Mix, mix

from burst_rt import BlockSparse, Causal, Documents, First, Full, Mask, Prefix, SlidingWindow
from burst_rt.planning import balance
from burst_rt.planning.balance import Load, deal, even_bounds, load_of, step_of
from burst_rt.planning.layouts import make_layout
from burst_rt.planning.masks.spans import Positions


@pytest.mark.parametrize("sizes", [Sizes(27, 27, 3), Sizes(20, 33, 2), Sizes(33, 20, 1)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_the_load_counts_cells_and_keys_across_a_cut(name: str, sizes: Sizes) -> None:
    truth = truth_of(name, sizes)
    if truth is None:
        return
    load = load_of(MASKS[name].mask(sizes), sizes.q_len, sizes.kv_len)
    # A mask that tells no batch rows apart is counted once.
    cells = truth[: MASKS[name].mask(sizes).batch]
    assert load.rows.tolist() == cells.sum((0, 2)).tolist()
    assert load.columns.tolist() == cells.sum((0, 1)).tolist()
    for query in range(sizes.q_len):
        cut = max(0, sizes.at(query))
        across = cells[:, query, :cut].sum()
        if query:
            across += cells[:, query - 1, cut:].sum()
        assert load.torn[query] == across


@pytest.mark.parametrize("shared", [1, 100])
@pytest.mark.parametrize("some", [1, 7, 1000])
def test_the_load_of_tables_of_blocks(
    some: int, shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A label's queries are looked at together, in as many goes as there are spans for."""
    monkeypatch.setattr(balance, "_SPANS", some)
    monkeypatch.setattr(balance, "_SHARED", shared)
    draw = np.random.default_rng(some)
    table, none = draw.random((2, 8, 9)) < 0.4, np.zeros((8, 9), bool)
    several = SlidingWindow(11) | First(3)
    rows = Causal() | Prefix((3, 20))
    for mask in (
        several & BlockSparse(table, 7),
        rows & BlockSparse(table[0], 7),
        BlockSparse(none, 7),
    ):
        load = load_of(mask, 50, 63)
        bound = mask.bound(50, 63)
        cells = bound.spans(np.arange(50) + 13).sees(np.arange(63), np.arange(50)[:, None])
        assert load.rows.tolist() == cells.sum((0, 2)).tolist()
        assert load.columns.tolist() == cells.sum((0, 1)).tolist()
        for query in range(1, 50):
            cut = query + 13
            assert load.torn[query] == cells[:, query, :cut].sum() + cells[:, query - 1, cut:].sum()


@pytest.mark.parametrize("seed", first_of(range(200), 25))
def test_drawn_mixes_are_dealt_evenly(seed: int) -> None:
    mask, seq_len, world_size = mix(seed)
    load = load_of(mask, seq_len, seq_len)
    dealt = deal(load, even_bounds(len(load.rows), world_size))
    assert deal(Load(*(x.copy() for x in load)), even_bounds(len(load.rows), world_size)) == dealt
    _has_one_owner(dealt, Mix(mask, seq_len, world_size))
    cells = _cells(load.rows, dealt)
    step = step_of(seq_len, world_size)
    sums = np.cumsum(np.concatenate([[0], load.rows]))
    block = (sums[step:] - sums[:-step]).max()
    even = sums[-1] / world_size
    assert np.abs(cells - even).max() <= max(0.05 * even, block)


def _cells(costs: Positions, runs: tuple[tuple[range, ...], ...]) -> Positions:
    """By rank."""
    return np.array([sum(costs[run.start : run.stop].sum() for run in own) for own in runs])


def _busiest(costs: Positions, runs: tuple[tuple[range, ...], ...]) -> float:
    """The largest rank over the mean."""
    cells = _cells(costs, runs)
    return float(cells.max() / cells.mean())


def _has_one_owner(dealt: tuple[tuple[range, ...], ...], given: Mix) -> None:
    """Every position has one owner; runs are few, not empty, ascending, and do not touch."""
    world_size = given.world_size
    assert len(dealt) == world_size
    runs = sorted((run.start, run.stop) for own in dealt for run in own)
    assert [0, *(stop for _, stop in runs)] == [*(start for start, _ in runs), given.seq_len]
    for own in dealt:
        assert len(own) <= min(16, 1 + ceil(log2(world_size)))
        assert all(run and run.step == 1 for run in own)
        assert all(a.stop < b.start for a, b in pairwise(own))
    # As many tokens as a contiguous shard, under every mask.
    lengths = [sum(map(len, own)) for own in dealt]
    plain = make_layout("contiguous", given.seq_len, world_size)
    assert lengths == [plain.shard_len(rank) for rank in range(world_size)]


def test_cells_by_key_are_even_too_where_they_can_be() -> None:
    """The mean over mixes; a few shards of a few heavy tokens cannot be even in three ways."""
    dealt, plain = [], []
    for seed in range(60):
        mask, seq_len, world_size = mix(seed)
        load = load_of(mask, seq_len, seq_len)
        runs = deal(load, even_bounds(len(load.rows), world_size))
        zigzag = make_layout("zigzag", seq_len, world_size).runs
        dealt.append(_busiest(load.columns, runs))
        plain.append(_busiest(load.columns, zigzag))
    assert np.mean(dealt) < 1.04
    assert np.mean(plain) > 1.2


def test_what_a_long_document_and_short_ones_come_to() -> None:
    def runs(mask: Mask, seq_len: int, world_size: int) -> list[list[tuple[int, int]]]:
        dealt = deal(load_of(mask, seq_len, seq_len), even_bounds(seq_len, world_size))
        return [[(run.start, run.stop) for run in own] for own in dealt]

    # Zigzag for one causal document.
    assert runs(Causal(), 64, 4) == [
        [(0, 8), (56, 64)],
        [(8, 16), (48, 56)],
        [(16, 24), (40, 48)],
        [(24, 40)],
    ]
    # Neighbours stay together where it costs nothing, and documents whole.
    quarters = [[(16 * rank, 16 * rank + 16)] for rank in range(4)]
    assert runs(Full(), 64, 4) == runs(Causal() & Documents([16] * 4), 64, 4) == quarters
    # One long document among documents of one token: everybody has its share of both.
    mask = Causal() & Documents([1] * 300 + [400] + [1] * 300)
    for own in runs(mask, 1000, 4):
        assert 90 <= sum(max(0, min(stop, 700) - max(start, 300)) for start, stop in own) <= 110


def test_more_ranks_than_tokens_and_one_rank() -> None:
    for seq_len, world_size in ((3, 5), (1, 2), (1, 1), (7, 1), (64, 64)):
        _has_one_owner(
            deal(load_of(Causal(), seq_len, seq_len), even_bounds(seq_len, world_size)),
            Mix(Causal(), seq_len, world_size),
        )


def test_queries_that_see_nothing_and_other_keys_than_queries() -> None:
    nothing = Documents(ids=[-1] * 12)
    dealt = deal(load_of(nothing, 12, 12), even_bounds(12, 3))
    assert dealt == ((range(4),), (range(4, 8),), (range(8, 12),))
    load = load_of(Causal(), 4096, 6000)
    assert _busiest(load.rows, deal(load, even_bounds(len(load.rows), 3))) < 1.02


def test_a_mask_without_spans_costs_its_outline() -> None:
    function = Mask.from_function(lambda b, h, q, kv: (q + kv) % 2 == 0, within=SlidingWindow(20))
    for mask, known in ((function, SlidingWindow(20)), (Window() & Causal(), Causal())):
        for got, expected in zip(load_of(mask, 90, 90), load_of(known, 90, 90), strict=True):
            assert (got == expected).all()


def test_packed_rows_of_a_batch_are_dealt_by_their_sum() -> None:
    rows = [[700, 300], [300, 700]]
    mask = Causal() & Documents(rows)
    load = load_of(mask, 1000, 1000)
    each = [load_of(Causal() & Documents(lengths), 1000, 1000) for lengths in rows]
    assert (load.rows == each[0].rows + each[1].rows).all()
    assert _busiest(load.rows, deal(load, even_bounds(len(load.rows), 4))) < 1.03
