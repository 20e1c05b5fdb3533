"""Which rows meet, and what follows: rows that a rank does not need are neither sent nor read."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from graphs import as_ring, bytes_of, graphs_of, problem
from mask_truths import MASKS, Sizes
from spec import errors_of, reference
from tolerances import ERROR
from worlds import Case, attend_over_threads

from burst_rt import Causal, Documents, First, Mask, SlidingWindow
from burst_rt.planning import needs
from burst_rt.planning.layouts import KINDS, make_layout
from burst_rt.planning.needs import find_needs, num_rows, rounded, united
from burst_rt.planning.strategies import choose

_TOKENS = 1100
_WINDOW = Causal() & SlidingWindow(150)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("stretches", [3, 256])
def test_no_row_is_missing(name: str, stretches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cell that is seen lies between the first and the last row that are said to meet."""
    monkeypatch.setattr(needs, "_STRETCHES", stretches)
    chance = random.Random(name)
    sizes = Sizes(40, 40, 2)
    mask = MASKS[name].mask(sizes).bound(40, 40)
    q_runs, kv_runs = (
        [run for runs in make_layout(chance.choice(sorted(KINDS)), 40, 3).runs for run in runs]
        for _ in range(2)
    )
    found = find_needs(mask, q_runs, kv_runs)
    for i, q in enumerate(q_runs):
        for j, kv in enumerate(kv_runs):
            cells = mask.allows(torch.tensor(q)[:, None], torch.tensor(kv)[None, :])
            seen = cells.reshape(-1, len(q), len(kv)).any(0)
            for side, met in ((found.queries, seen.any(1)), (found.keys, seen.any(0))):
                start, stop = side[i, j].tolist()
                assert set(torch.nonzero(met).flatten().tolist()) <= set(range(start, stop))
                if stretches > 40 and mask.has_spans:
                    assert met[start:stop].any() == (stop > start)


def test_rows_go_in_stretches_that_kernels_load() -> None:
    assert rounded([(5, 260), (600, 610)], 620) == ((0, 620),)
    assert rounded([(5, 200), (600, 610)], 605) == ((0, 256), (512, 605))
    assert rounded([], 100) == ()
    assert united([(4, 6), (0, 4), (9, 10)]) == ((0, 6), (9, 10))
    assert num_rows(((0, 6), (9, 10))) == 7


def _drawn(tokens: int, chance: random.Random) -> Mask:
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(min(tokens - sum(lengths), int(chance.lognormvariate(5, 1)) + 1))
    return Causal() & Documents(lengths)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize(
    "strategy", ["ring-kv", "burst", "ring-q", "direct", "bidirectional", "two-level:2"]
)
def test_memory_that_no_row_was_sent_to_is_not_read(
    strategy: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fresh memory holds NaN in all tests; where blocks come in part, a read of the rest shows."""
    monkeypatch.setattr(needs, "ROWS_TOGETHER", 32)
    chance = random.Random(f"{strategy} {kind}")
    for mask in (_WINDOW | First(8), _drawn(_TOKENS, chance)):
        case = Case(
            _TOKENS,
            heads=2,
            kv_heads=1,
            head_dim=8,
            batch=2,
            mask=mask,
            kind=kind,
            strategy=strategy,
        )
        found = attend_over_threads(4, case)
        expected = reference(*case.inputs(), mask=mask)
        for name, error in errors_of(found, expected).items():
            assert error < ERROR[case.dtype], (mask, name)


@pytest.mark.parametrize(("strategy", "forward"), [("ring-q", True), ("burst", False)])
def test_sums_come_home_in_several_stretches(
    strategy: str, forward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needs, "ROWS_TOGETHER", 32)
    mask = _drawn(_TOKENS, random.Random(4))
    layout = make_layout("balanced", _TOKENS, 4, mask)
    p = replace(problem(_TOKENS, _TOKENS, 4, mask=mask), q_layout=layout, kv_layout=layout)
    ring = as_ring(choose(p, strategy, forward=forward).program)
    home = [
        ring.sum_rows(owner, block, hop)
        for owner, blocks in enumerate(ring.legs)
        for block, legs in enumerate(blocks)
        for hop, leg in legs.items()
        if leg.home
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
