"""Attention under every mask over ranks that are threads, against the float64 spec under cells from
plain loops: all pairs of mask, strategy, layouts, world, lengths, type and kernel, and drawn masks.
"""

from __future__ import annotations

import random
from itertools import combinations, pairwise, product

import pytest
import torch
from covering import first_of
from drawn_masks import drawn_mask
from mask_cases import FACTORS, Row, all_pairs, assert_right, assert_row, can_meet, family_pairs
from mask_truths import Sizes, cells_of, truth_of
from spec import reference
from worlds import Case, attend_over_threads

import burst_rt
from burst_rt import (
    BlockSparse,
    Causal,
    Documents,
    Mask,
    Prefix,
    SlidingWindow,
)
from burst_rt.errors import ContractMismatch, InputError
from burst_rt.kernels.cpu_calls import PartSize
from burst_rt.planning.masks import pieces

_ROWS = list(all_pairs(FACTORS))
_SAMPLE = list(family_pairs())


def test_the_array_covers_all_pairs() -> None:
    for a, b in combinations(range(len(FACTORS)), 2):
        met = {(row[a], row[b]) for row in _ROWS}
        for x, y in product(FACTORS[a], FACTORS[b]):
            assert can_meet((a, b, x, y)) == ((x, y) in met), (x, y)
    refused = [pair for pair in product((0,), (4,), FACTORS[0], FACTORS[4]) if not can_meet(pair)]
    assert refused
    assert all(
        truth_of(mask, Sizes(lengths[0], lengths[1], 1)) is None for _, _, mask, lengths in refused
    )


def test_the_sample_lacks_pairs_of_mask_and_strategy_only() -> None:
    for a, b in combinations(range(len(FACTORS)), 2):
        met, sampled = ({(row[a], row[b]) for row in rows} for rows in (_ROWS, _SAMPLE))
        assert sampled < met if (a, b) == (0, 1) else sampled == met


@pytest.mark.parametrize(
    "row",
    [*_SAMPLE, *(pytest.param(row, marks=pytest.mark.long) for row in _ROWS)],
    ids=lambda row: " ".join(map(str, row)),
)
def test_every_pair(row: Row) -> None:
    assert_row(row)


_DRAWN = 300
_EACH = 15


@pytest.mark.parametrize("part", first_of(range(_DRAWN // _EACH), 2, 14, 19))
def test_drawn_masks(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`&` and `|` of masks and functions, against `&` and `|` of their cells.

    In every other part, short runs of rows are pieces of their own, too. Parts 14 and 19 reach
    code that no other test of this file does.
    """
    if part % 2:
        monkeypatch.setattr(pieces, "_FEW_ROWS", 3)
    for seed in range(part * _EACH, (part + 1) * _EACH):
        chance = random.Random(seed)
        q_len = chance.choice([1, 30, 64, 97])
        kv_len = q_len if chance.random() < 0.7 else chance.choice([20, 70])
        world = chance.randrange(1, 6)
        batch = chance.choice([1, 2])
        mask, cells = drawn_mask(chance, q_len, kv_len, batch)
        balanced = ["balanced"] * (q_len == kv_len and mask.has_spans)
        # Enough heads for every rank to have some.
        spread = chance.random() < 0.3
        spreading = ["all-to-all", f"hybrid:{2 if world == 4 else world}"] * spread
        case = Case(
            q_len,
            kv_len,
            batch=batch,
            heads=4 * world if spread else 4,
            kv_heads=chance.choice([2 * world, None]) if spread else None,
            mask=mask,
            kind=chance.choice(["zigzag", "contiguous", "striped", *balanced]),
            strategy=chance.choice(
                [
                    "burst", "ring-kv", "ring-q", "bidirectional", "direct",
                    f"two-level:{2 if world == 4 else world}", *spreading,
                ]
            ),
            seed=seed,
        )  # fmt: skip
        truth = reference(
            *case.inputs(), mask=cells[:, : case.heads].expand(batch, -1, q_len, kv_len)
        )
        assert_right(attend_over_threads(world, case), truth, case.dtype)


@pytest.mark.parametrize("kind", ["contiguous", "striped"])
@pytest.mark.parametrize("strategy", ["burst", "ring-kv", "all-to-all"])
def test_hundreds_of_documents_in_a_shard(strategy: str, kind: str) -> None:
    """Of one to three tokens each, 200 a shard; the second batch row has them in reverse."""
    lengths = [1, 2, 3, 1, 3] * 80
    mask = Causal() & Documents([lengths, lengths[::-1]])
    case = Case(800, heads=2, batch=2, mask=mask, kind=kind, strategy=strategy)
    truth = reference(*case.inputs(), mask=cells_of(mask, Sizes(800, 800, 2)))
    assert_right(attend_over_threads(2, case), truth, case.dtype)


_BLOCKS = torch.rand(2, 128, 128, generator=torch.Generator().manual_seed(0)) < 0.3


@pytest.mark.parametrize(
    "mask",
    [
        Causal() & Documents([100, 3, 409]),
        SlidingWindow(200, 30),
        # Some 25 spans a row.
        Causal() & BlockSparse(_BLOCKS[0], 4),
        BlockSparse(_BLOCKS, 4),
    ],
    ids=str,
)
def test_parts_of_long_tiles(mask: Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles larger than what the fused kernel is given at once."""
    from burst_rt.kernels import cpu

    monkeypatch.setattr(cpu, "SMALL_PART", PartSize(48, 80, 1))
    case = Case(512, heads=4, kv_heads=2, batch=2, mask=mask)
    truth = reference(*case.inputs(), mask=cells_of(mask, Sizes(512, 512, 2)))
    for world in (1, 2, 3):
        assert_right(attend_over_threads(world, case), truth, case.dtype)


def test_what_a_mask_hides_is_not_sent() -> None:
    """A window of a quarter of a shard, contiguous: every rank hears from one other."""
    sent = []
    for mask in (SlidingWindow(15), Causal(), Documents([64] * 4)):

        def run(ctx: burst_rt.Context, mask: Mask = mask) -> int:
            layout = ctx.layout(256, "contiguous")
            q, k, v = (torch.randn(1, layout.shard_len, 2, 16) for _ in range(3))
            burst_rt.burst_attention(q, k, v, mask=mask, layout=layout)
            return ctx.stats().bytes_sent

        sent.append(sum(burst_rt.run_local(4, run)))
    shard = 64 * 2 * 16 * 4 * 2
    window, causal, documents = sent
    assert window == 3 * shard // 2  # the second block of each shard but the last
    assert causal == 6 * shard
    assert documents == 0


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (Documents([3, 4]), "has 7 keys, and kv_layout has 8 tokens"),
        (Prefix((1, 2, 3)), "is for 3 batch rows, and q has 1"),
        (BlockSparse([[True]], 4), "has 1 query blocks, and 8 tokens make 2"),
    ],
    ids=repr,
)
def test_a_mask_for_another_call_is_refused_on_every_rank(mask: Mask, said: str) -> None:
    def run(ctx: burst_rt.Context) -> None:
        layout = ctx.layout(8)
        x = torch.randn(1, layout.shard_len, 2, 16)
        with pytest.raises(InputError, match=said):
            burst_rt.burst_attention(x, x, x, mask=mask, layout=layout)
        burst_rt.burst_attention(x, x, x, layout=layout)

    burst_rt.run_local(2, run)


def test_documents_that_differ_between_ranks_are_found() -> None:
    def run(ctx: burst_rt.Context) -> None:
        mask = Documents([30 + 20 * ctx.rank, 50 - 20 * ctx.rank])
        plain, balanced = ctx.layout(80), ctx.layout(80, "balanced", mask=Causal() & mask)
        x = torch.randn(1, plain.shard_len, 2, 16)
        with pytest.raises(ContractMismatch, match=r"mask: .*Documents"):
            burst_rt.burst_attention(x, x, x, mask=mask, layout=plain)
        # The runs that the documents lead to, where the call's own mask is the same.
        with pytest.raises(ContractMismatch, match=r"; layout: balanced 80, runs [0-9a-f]{16} on"):
            burst_rt.burst_attention(x, x, x, causal=True, layout=balanced)
        with pytest.raises(ContractMismatch, match=r"layout: .*balanced 80"):
            balanced.unshard(x)
        burst_rt.burst_attention(x, x, x, causal=True, layout=plain)

    burst_rt.run_local(2, run)


@pytest.mark.parametrize("strategy", ["ring-kv", "ring-q", "direct", "two-level:2", "hybrid:2"])
def test_fresh_documents_in_balanced_layouts(strategy: str) -> None:
    """Long enough for shards of several runs. Shapes stay, whatever the documents are."""
    chance = random.Random(0)
    for _ in range(3):
        cuts = sorted(chance.sample(range(1, 400), 4))
        mask = Causal() & Documents([b - a for a, b in pairwise([0, *cuts, 401])])
        case = Case(401, heads=4, kv_heads=2, mask=mask, kind="balanced", strategy=strategy)
        truth = reference(*case.inputs(), mask=cells_of(mask, Sizes(401, 401, 1)))
        assert_right(attend_over_threads(4, case), truth, case.dtype)
