"""Which rows meet, and what follows: rows that a rank does not need are neither sent nor read."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache, reduce
from itertools import permutations, product
from operator import and_

import numpy as np
import pytest
import torch
from covering import covering, pairs_of, sampled
from graphs import Window, as_ring, bytes_of, graphs_of, problem
from mask_truths import FUNCTIONS, MASKS, Sizes, truth_of
from spec import Attention, errors_of, reference
from tolerances import ERROR
from worlds import Case, attend_over_threads

from burst_rt import BlockSparse, Causal, Documents, First, Mask, Prefix, SlidingWindow
from burst_rt.planning import intervals, needs, sides
from burst_rt.planning.choose import choose
from burst_rt.planning.layouts import KINDS, Block, Layout, blocks_of, make_layout
from burst_rt.planning.masks import Spans
from burst_rt.planning.masks.spans import Positions
from burst_rt.planning.needs import Needed, num_rows, union_of

_TOKENS = 1100


def _table(share: float) -> torch.Tensor:
    """So many of the blocks of 128 tokens, of 4,096, and those on the diagonal."""
    drawn = torch.rand(32, 32, generator=torch.Generator().manual_seed(0)) < share
    return drawn | torch.eye(32, dtype=torch.bool)


_WINDOW = Causal() & SlidingWindow(150)
# Masks of which a rank needs rows here and there, of 4,096 tokens.
_HOLES: dict[str, Mask] = {
    "documents": Documents([350, 950, 150, 1146, 750, 750]),
    "causal documents": Causal() & Documents([350, 950, 150, 1146, 750, 750]),
    "window and first": (SlidingWindow(250) | First(4)) & Causal(),
    "blocks": BlockSparse(_table(0.06), 128),
    "causal blocks": Causal() & BlockSparse(_table(0.06), 128),
}


@sampled(name=MASKS, rows=[1, 3], kv_len=[40, 46])
def test_a_rank_needs_the_rows_that_it_computes_with(
    name: str, rows: int, kv_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more and no fewer, in groups; plain loops say which cells there are."""
    monkeypatch.setattr(sides, "ROWS_TOGETHER", rows)
    for module in (intervals, needs):  # a few rows at a time
        monkeypatch.setattr(module, "SOME", 10 if rows == 1 else 150)
    sizes = Sizes(40, kv_len, 2)
    truth = truth_of(name, sizes)
    assert truth is not None
    cells = truth.any(0)
    mask = MASKS[name].mask(sizes).bound(40, kv_len)
    for q_kind, kv_kind in product(sorted(KINDS), repeat=2):
        p = problem(40, kv_len, 3, mask=mask, kinds=(q_kind, kv_kind))
        _check(p.needs.queries, cells, p.q_layout, p.kv_layout, rows)
        _check(p.needs.keys, cells.T, p.kv_layout, p.q_layout, rows)


_ROWS = [[(i * j + i) % 3 == 0 for j in range(6)] for i in range(6)]
_BLOCKS = BlockSparse(_ROWS, 7)


class _Spans:
    """Those of Causal."""

    def spans(self, q: Positions) -> Spans:
        return Causal().spans(q)


class _LikeCausal(_Spans, First):
    """Not First's own spans: what is known of those does not hold for these."""


class _Narrow(Causal):
    """Not Causal's own spans."""

    def spans(self, q: Positions) -> Spans:
        return SlidingWindow(2).spans(q)


@pytest.mark.parametrize(
    "mask",
    [
        _LikeCausal(3),
        _Narrow() & Documents([15, 25]),
        Causal() & Documents([[1] * 20 + [20], [3, 0, 36, 1]]),
        BlockSparse([_ROWS, _ROWS], 7) & Documents([[9, 31], [22, 18]]) & SlidingWindow(6, 3),
        (First(3) | SlidingWindow(5)) & Causal() & _BLOCKS,
        Causal() & _BLOCKS & Documents([9, 20, 11]) | First(2),
        (Causal() | _BLOCKS) & (SlidingWindow(9, 9) | First(1)) & Documents([15, 25]),
        (First(20) | _BLOCKS) & First(30),
        BlockSparse([_ROWS, [row[::-1] for row in _ROWS]], 7) & Prefix((30, 3)),
        reduce(and_, (SlidingWindow(3 + n) | First(n) for n in range(1, 6)), Causal()),
    ],
    ids=range(10),
)
@pytest.mark.parametrize("some", [10, 1 << 22])
def test_masks_that_are_combined(mask: Mask, some: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sides, "ROWS_TOGETHER", 4)
    for module in (intervals, needs):
        monkeypatch.setattr(module, "SOME", some)
    at = torch.arange(40)
    cells = mask.allows(at[:, None], at).reshape(-1, 40, 40).any(0)
    for kind in sorted(KINDS):
        p = problem(40, 40, 3, mask=mask, kinds=(kind, kind))
        _check(p.needs.queries, cells, p.q_layout, p.kv_layout, 4)
        _check(p.needs.keys, cells.T, p.kv_layout, p.q_layout, 4)


def _check(needed: Needed, cells: torch.Tensor, own: Layout, other: Layout, rows: int) -> None:
    """What is needed of the rows of `cells`, which `own` deals, by those who have its columns."""
    for owner, rank in product(range(3), repeat=2):
        columns = [column for run in other.runs[rank] for column in run]
        for number, block in enumerate(blocks_of(own.runs[owner], 2)):
            seen = cells[[row for run in block for row in run]][:, columns].any(1)
            groups = ((a, min(a + rows, len(seen))) for a in range(0, len(seen), rows))
            expected = union_of((a, b) for a, b in groups if seen[a:b].any())
            assert needed[owner][number][rank] == expected, (own, other, owner, number, rank)


def test_of_a_mask_without_spans_whole_blocks_are_needed() -> None:
    p = problem(40, 40, 2, mask=Window(), kinds=("contiguous", "contiguous"))
    nothing, block = (), ((0, 10),)
    assert p.needs.keys == (
        ((block, nothing), (block, block)),
        ((nothing, block), (nothing, block)),
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_of_a_function_what_it_is_within_is_needed(name: str) -> None:
    """What a function says is not known before it is asked."""
    p = problem(40, 40, 3, mask=FUNCTIONS[name].mask(Sizes(40, 40, 2)).bound(40, 40))
    q = np.arange(40)
    cells = torch.from_numpy(p.mask.outline(q).sees(q, like=q[:, None]).any(0))
    _check(p.needs.queries, cells, p.q_layout, p.kv_layout, needs.ROWS_TOGETHER)
    _check(p.needs.keys, cells.T, p.kv_layout, p.q_layout, needs.ROWS_TOGETHER)


@cache
def _cells(name: str, tokens: int) -> torch.Tensor:
    cells: torch.Tensor = _HOLES[name].allows(torch.arange(tokens)[:, None], torch.arange(tokens))
    return cells


@pytest.mark.parametrize("kind", ["balanced", *sorted(KINDS)])
@pytest.mark.parametrize("name", sorted(_HOLES))
def test_direct_sends_the_lower_bound(name: str, kind: str) -> None:
    """Every group of rows goes once to each rank that computes with it, and its sums come back."""
    tokens, mask = 4096, _HOLES[name]
    layout = make_layout(kind, tokens, 4, mask if kind == "balanced" else None)
    p = replace(problem(tokens, tokens, 4, mask=mask), q_layout=layout, kv_layout=layout)
    cells = _cells(name, tokens)
    for forward in (True, False):
        ring = as_ring(choose(p, "direct", forward=forward).program)
        least = 0
        theirs = [_of_rows(cells, layout.runs[rank], ring.queries_travel) for rank in range(4)]
        for owner, rank in permutations(range(4), 2):
            for block in blocks_of(layout.runs[owner], 2):
                met = theirs[rank][[row for run in block for row in run]]
                groups = [some for some in met.split(needs.ROWS_TOGETHER) if some.any()]
                by_row = [size for role, size in (*ring.bundle, *ring.sums) if not role.pairs]
                pairs = [size for role, size in ring.bundle if role.pairs]  # of the whole block
                least += sum(map(len, groups)) * sum(by_row)
                least += len(met) * sum(pairs) if groups else 0
        assert sum(map(bytes_of, graphs_of(ring))) == least > 0


def _of_rows(cells: torch.Tensor, runs: Block, queries: bool) -> torch.Tensor:
    """Which queries see any of some keys; or which keys are seen by any of some queries."""
    positions = [row for run in runs for row in run]
    return cells[:, positions].any(1) if queries else cells[positions].any(0)


def test_rows_in_stretches() -> None:
    assert union_of([(4, 6), (0, 4), (9, 10)]) == ((0, 6), (9, 10))
    assert num_rows(((0, 6), (9, 10))) == 7


def _drawn(tokens: int, chance: random.Random) -> Mask:
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(min(tokens - sum(lengths), int(chance.lognormvariate(5, 1)) + 1))
    return Causal() & Documents(lengths)


_LENGTHS = [150, 20, 330, 100, 500]
_MASKS: dict[str, Mask] = {
    "window and first": _WINDOW | First(8),
    "documents": Documents(_LENGTHS),
    "blocks": BlockSparse(_table(0.06)[:18, :18], 64),
    "function": Mask.from_function(
        lambda b, h, q, kv: (q + kv) % 3 > 0, Documents(_LENGTHS), "third"
    ),
    **{f"drawn {seed}": _drawn(_TOKENS, random.Random(seed)) for seed in range(3)},
}


def _case(mask: Mask) -> Case:
    return Case(_TOKENS, heads=2, kv_heads=1, head_dim=8, batch=2, mask=mask)


@cache
def _truth_of_the_function() -> Attention:
    at = torch.arange(_TOKENS)
    third = Documents(_LENGTHS).allows(at[:, None], at) & ((at[:, None] + at) % 3 > 0)
    return reference(*_case(_MASKS["function"]).inputs(), mask=third)


_FACTORS = (
    ["ring-kv", "burst", "ring-q", "direct", "bidirectional", "two-level:2"],
    sorted(KINDS),
    list(_MASKS),
)
# Every strategy and every mask meets every layout; where a strategy meets a mask is `long`.
_SAMPLE = set(covering(_FACTORS, [pair for pair in pairs_of(_FACTORS) if pair[:2] != (0, 2)]))


@pytest.mark.parametrize(
    ("strategy", "kind", "name"),
    [
        pytest.param(*row, marks=() if row in _SAMPLE else pytest.mark.long)
        for row in product(*_FACTORS)
    ],
)
def test_memory_that_no_row_was_sent_to_is_not_read(
    strategy: str, kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fresh memory holds NaN in all tests; where blocks come in part, a read of the rest shows."""
    monkeypatch.setattr(sides, "ROWS_TOGETHER", 32)
    case = _case(_MASKS[name]).but(kind=kind, strategy=strategy)
    truth = _truth_of_the_function() if name == "function" else case.truth
    for field, error in errors_of(attend_over_threads(4, case), truth).items():
        assert error < ERROR[torch.float32], field


@pytest.mark.parametrize(("strategy", "forward"), [("ring-q", True), ("burst", False)])
def test_sums_return_in_several_row_ranges(
    strategy: str, forward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sides, "ROWS_TOGETHER", 32)
    mask = _drawn(_TOKENS, random.Random(4))
    layout = make_layout("balanced", _TOKENS, 4, mask)
    p = replace(problem(_TOKENS, _TOKENS, 4, mask=mask), q_layout=layout, kv_layout=layout)
    ring = as_ring(choose(p, strategy, forward=forward).program)
    home = [
        ring.sum_rows[owner][block][hop]
        for owner, blocks in enumerate(ring.sum_hops)
        for block, hops in enumerate(blocks)
        for hop, sum_hop in hops.items()
        if sum_hop.returns_to_owner
    ]
    assert max(map(len, home)) > 1
    case = Case(_TOKENS, head_dim=8, mask=mask, kind="balanced", strategy=strategy)
    found = attend_over_threads(4, case)
    for name, error in errors_of(found, reference(*case.inputs(), mask=mask)).items():
        assert error < ERROR[case.dtype], name


def test_a_window_sends_no_more_than_itself() -> None:
    """A shard of 1,024 tokens, a window of 256: the last 256 keys, over one hop."""
    p = problem(4096, 4096, 4, mask=Causal() & SlidingWindow(255), kinds=("contiguous",) * 2)
    for strategy in ("ring-kv", "direct"):
        forward = choose(p, strategy, forward=True).program
        assert forward.wire_bytes() == 3 * 256 * 2 * p.k_token_bytes
        backward = choose(p, strategy, forward=False).program
        assert sum(map(bytes_of, graphs_of(backward))) == backward.wire_bytes()
    keys = choose(p, "ring-kv", forward=False).program
    assert keys.wire_bytes() == 3 * 256 * 2 * (p.k_token_bytes + p.k_sum_bytes)
