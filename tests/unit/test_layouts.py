"""Layouts: every token has one owner, shards are even, shard and unshard are inverse."""

from __future__ import annotations

import pickle
from itertools import accumulate, chain
from typing import Any

import pytest
import torch
from spec import reference, relative_error
from tolerances import ERROR
from torch.optim.swa_utils import AveragedModel
from worlds import Case

import burst_rt
from burst_rt import BlockSparse, Causal, Context, Documents
from burst_rt.errors import InputError
from burst_rt.planning import chooser
from burst_rt.planning.chooser import fastest_layout
from burst_rt.planning.layouts import KINDS, Layout, make_layout
from burst_rt.planning.problem import Problem
from burst_rt.recurrence import RecurrenceSizes

_LENGTHS = (1, 2, 3, 7, 8, 63, 100, 1000, 1009)
_WORLDS = (1, 2, 3, 4, 5, 8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", _WORLDS)
@pytest.mark.parametrize("seq_len", _LENGTHS)
def test_every_token_has_one_owner_and_runs_are_even(
    kind: str, world_size: int, seq_len: int
) -> None:
    layout = make_layout(kind, seq_len, world_size)
    owned = [position for runs in layout.runs for run in runs for position in run]
    assert sorted(owned) == list(range(seq_len))
    lengths = [[len(run) for run in runs] for runs in layout.runs]
    assert {len(row) for row in lengths} == {2 if world_size > 1 else 1}
    for same_run in (*zip(*lengths, strict=True), list(map(sum, lengths))):
        assert max(same_run) - min(same_run) <= 1
    for rank, row in enumerate(lengths):
        assert layout.shard_len(rank) == sum(row)
        for run in layout.runs[rank]:
            assert list(run) == sorted(run)


def test_what_each_kind_looks_like() -> None:
    placed = {kind: [[*a, *b] for a, b in make_layout(kind, 8, 2).runs] for kind in KINDS}
    assert placed == {
        "contiguous": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "zigzag": [[0, 1, 6, 7], [2, 3, 4, 5]],
        "striped": [[0, 2, 4, 6], [1, 3, 5, 7]],
    }


def test_layouts_are_equal_and_hash_by_what_determines_them() -> None:
    assert make_layout("zigzag", 100, 4) == make_layout("zigzag", 100, 4)
    others = [
        make_layout("striped", 100, 4),
        make_layout("zigzag", 101, 4),
        make_layout("zigzag", 100, 5),
    ]
    assert len({make_layout("zigzag", 100, 4), *others}) == 4


@pytest.mark.parametrize(
    ("seq_len", "kind", "says"),
    [
        (0, "zigzag", "at least 1 token, got 0"),
        (-1, "zigzag", "got -1"),
        (True, "zigzag", "got True"),
        (8.0, "zigzag", "got 8.0"),
        ("8", "zigzag", "got '8'"),
        (8, "spiral", r"'contiguous', 'striped', 'zigzag'\] or, .*, 'auto', got 'spiral'"),
        (8, None, "got None"),
        (8, ["zigzag"], "got"),
    ],
)
def test_impossible_layouts_are_refused(seq_len: int, kind: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        burst_rt.init().layout(seq_len, kind)


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        ("balanced", {}, r"kind 'balanced' needs mask, .*causal=True\), got none"),
        ("auto", {}, "kind 'auto' needs mask, .*, got none"),
        ("balanced", {"mask": "causal"}, "mask: expected Mask .* got 'causal'"),
        ("auto", {"mask": Causal}, "mask: expected Mask .* got type"),
        ("zigzag", {"mask": Causal()}, "kind 'zigzag' does not depend on a mask"),
        ("balanced", {"mask": Documents([3, 4])}, "does not fit seq_len 8: .* has 7 keys"),
        ("auto", {"mask": BlockSparse([[True]], 4)}, "does not fit seq_len 8: .* 1 query blocks"),
        ("balanced", {"mask": Causal(), "heads": (8, 2)}, "'auto' and 'whole' only, got kind 'bal"),
        ("zigzag", {"dtype": torch.float32}, "heads, head_dim and dtype are for the kinds 'auto'"),
        ("auto", {"mask": Causal(), "heads": 8}, "heads: expected tuple.* got 8"),
        ("auto", {"mask": Causal(), "heads": (8, 3)}, r"a multiple of the second, .*\(8, 3\)"),
        ("auto", {"mask": Causal(), "heads": (8, 0)}, r"got \(8, 0\) and 128"),
        ("auto", {"mask": Causal(), "head_dim": -1}, r"head_dim at least 1, got .* and -1"),
    ],
)
def test_layouts_that_a_mask_cannot_give_are_refused(
    kind: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(InputError, match=says):
        burst_rt.init().layout(8, kind, **options)


def test_a_sequence_too_long_to_be_balanced_is_refused() -> None:
    with pytest.raises(InputError, match=r"looks at every token, at most 2\*\*26, got 67108865"):
        make_layout("balanced", (1 << 26) + 1, 2, Causal())


@pytest.mark.parametrize(("world_size", "seq_len"), [(1, 5), (2, 64), (3, 100), (5, 3), (4, 999)])
def test_a_balanced_layout(world_size: int, seq_len: int) -> None:
    shapes = set()
    for lengths in ([seq_len], [1] * seq_len, [seq_len // 3, seq_len - seq_len // 3]):
        mask = Causal() & Documents(lengths)
        layout = make_layout("balanced", seq_len, world_size, mask)
        assert layout == make_layout("balanced", seq_len, world_size, mask)
        owned = [list(chain.from_iterable(runs)) for runs in layout.runs]
        assert sorted(chain.from_iterable(owned)) == list(range(seq_len))
        assert all(mine == sorted(mine) for mine in owned)
        shapes.add(tuple(map(layout.shard_len, range(world_size))))
        for runs in layout.runs:
            # Where the shard is cut into its two travelling blocks.
            ends = list(accumulate(map(len, runs)))
            assert len(runs) <= 16
            assert world_size == 1 or ends[-1] // 2 in ends[:-1]
    assert len(shapes) == 1


def test_another_mask_is_another_layout() -> None:
    masks = [Causal() & Documents([first, 100 - first]) for first in (10, 30, 50)]
    layouts = [make_layout("balanced", 100, 2, mask) for mask in masks]
    assert len({*layouts, make_layout("zigzag", 100, 2)}) == 4
    assert len({*map(str, layouts)}) == 3


@pytest.mark.parametrize("machine", ["h100-sxm", "none"])
def test_auto_is_one_layout_on_all_ranks(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By forecasts where there is a machine file, else by evenness and bytes; made once."""
    monkeypatch.setenv("BURST_RT_HARDWARE", machine)
    mask = Causal() & Documents([200] * 5 + [1000] + [100] * 5)
    asked: list[int] = []

    def counted(problem: Problem, *args: Any, **options: Any) -> object:
        asked.append(problem.head_dim)
        return fastest_layout(problem, *args, **options)

    monkeypatch.setattr(chooser, "fastest_layout", counted)

    def layouts(ctx: Context) -> list[Layout]:
        options: dict[str, Any] = {"heads": (6, 3), "head_dim": 32, "dtype": torch.float32}
        made = [ctx.layout(2500, "auto", mask=mask, **options) for _ in range(2)]
        made.append(ctx.layout(2500, "auto", mask=mask))
        case = Case(2500, heads=6, kv_heads=3, mask=mask)
        q, k, v = (made[0].shard(x) for x in case.inputs()[:3])
        burst_rt.burst_attention(q, k, v, layout=made[0], mask=mask)  # the ranks agree
        return [each.map for each in made]

    first, *others = burst_rt.run_local(2, layouts)
    assert all(other == first for other in others)
    assert first[0] is first[1]
    assert sorted(asked) == [32] * 2 + [128] * 2
    assert machine == "h100-sxm" or first[0].kind in ("balanced", "striped")


def test_recurrences_are_sizes_and_for_auto() -> None:
    sizes = RecurrenceSizes(rule="linear", num_heads=2, key_dim=8, value_dim=8)
    with burst_rt.init(device="cpu") as ctx:
        for kind, given, got in (("zigzag", sizes, "'zigzag'"), ("auto", 3, "int")):
            with pytest.raises(InputError, match=f"RecurrenceSizes.*got.*{got}"):
                ctx.layout(100, kind, mask=Causal(), recurrences=[given])  # type: ignore[list-item]


def test_explain_says_how_even_a_layout_is() -> None:
    mask = Causal() & Documents([30, 70])

    def said(ctx: Context) -> list[str]:
        words = []
        for kind in ("contiguous", "balanced"):
            layout = ctx.layout(100, kind, mask=mask if kind == "balanced" else None)
            x = torch.zeros(1, layout.shard_len, 2, 16, requires_grad=True)
            for strategy in ("burst", "all-to-all"):
                options: dict[str, Any] = {"layout": layout, "strategy": strategy}
                words.append(str(burst_rt.explain(x, x, x, mask=mask, **options)))
        return words

    contiguous, spread, balanced, _ = burst_rt.run_local(2, said)[0]
    cells = 30 * 31 // 2 + 70 * 71 // 2
    first = 30 * 31 // 2 + 20 * 21 // 2  # of rank 0, by query
    forward = 2 * max(first, cells - first) / cells
    first = 30 * 31 // 2 + 20 * 50 + 20 * 21 // 2  # by key
    backward = 2 * max(first, cells - first) / cells
    even = f"tokens 1.00, cells {forward:.2f} forward, {backward:.2f} backward"
    assert f"layout contiguous: largest rank over mean: {even}\n  zigzag: tokens" in contiguous
    # Heads are spread, and every rank has all cells.
    assert spread.count("tokens 1.00, cells 1.00 forward, 1.00 backward") == len(KINDS) + 1
    assert "; balanced: tokens 1.00, cells 1.0" in contiguous
    assert "layout balanced: largest rank over mean: tokens 1.00, cells 1.0" in balanced
    assert f"\n  contiguous: {even}; zigzag: tokens" in balanced


@pytest.mark.parametrize("kind", [*KINDS, "balanced"])
@pytest.mark.parametrize(
    ("world_size", "seq_len"), [(1, 5), (2, 64), (3, 100), (5, 3), (5, 1), (4, 63)]
)
def test_unshard_undoes_shard(kind: str, world_size: int, seq_len: int) -> None:
    generator = torch.Generator().manual_seed(0)
    wholes = [
        (1, torch.randn(2, seq_len, 3, 5, generator=generator)),
        (
            2,
            torch.randn(1, 1, seq_len, generator=generator, dtype=torch.float64),
        ),  # an lse of one head
        (-1, torch.randn(3, seq_len, generator=generator).to(torch.bfloat16)),
        (0, torch.arange(seq_len)),
        (0, torch.arange(seq_len) % 3 == 0),
        (-2, torch.randn(seq_len, 0, generator=generator)),
    ]

    def there_and_back(ctx: Context) -> None:
        mask = Causal() if kind == "balanced" else None
        layout = ctx.layout(seq_len, kind, mask=mask)
        for dim, whole in wholes:
            shard = layout.shard(whole, dim)
            assert shard.shape[dim] == layout.shard_len
            assert torch.equal(shard, whole.index_select(dim, layout.positions()))
            assert torch.equal(layout.unshard(shard, dim), whole)
            # Not contiguous: the same values.
            strided = torch.stack((shard, shard), -1)[..., 0]
            assert torch.equal(layout.unshard(strided, dim), whole)

    burst_rt.run_local(world_size, there_and_back)


def test_views_that_are_lazily_conjugated_or_negated() -> None:
    def check(ctx: Context) -> None:
        layout = ctx.layout(4)
        x = torch.complex(torch.arange(2.0), torch.arange(1.0, 3.0))
        whole = layout.unshard(x.clone(), dim=0)
        assert torch.equal(layout.unshard(x.conj(), dim=0), whole.conj())
        assert torch.equal(layout.unshard(x.conj().imag, dim=0), -whole.imag)

    burst_rt.run_local(2, check)


def test_positions_of_any_rank() -> None:
    def positions(ctx: Context) -> list[list[int]]:
        layout = ctx.layout(7, "zigzag")
        assert layout.positions().dtype == torch.int64
        assert torch.equal(layout.positions(), layout.positions(ctx.rank))
        for rank in (-1, 2):
            with pytest.raises(InputError, match=r"rank must be in \[0, 2\)"):
                layout.positions(rank)
        return [layout.positions(rank).tolist() for rank in range(2)]

    first, second = burst_rt.run_local(2, positions)
    assert first == second == [[0, 5, 6], [1, 2, 3, 4]]


def test_shard_passes_gradients() -> None:
    def gradient(ctx: Context) -> torch.Tensor:
        whole = torch.zeros(10, requires_grad=True)
        layout = ctx.layout(10)
        (layout.shard(whole, 0) * (ctx.rank + 1)).sum().backward()
        assert whole.grad is not None
        return whole.grad

    expected = torch.zeros(10)
    for rank, runs in enumerate(make_layout("zigzag", 10, 3).runs):
        for position in (*runs[0], *runs[1]):
            expected[position] = rank + 1
    assert torch.equal(torch.stack(burst_rt.run_local(3, gradient)).sum(0), expected)


def test_a_tensor_of_the_wrong_length_is_refused() -> None:
    def wrong(ctx: Context) -> None:
        layout = ctx.layout(10)
        for dim in (0, 2, -3):
            with pytest.raises(InputError, match=r"layout\.shard: expected 10 tokens"):
                layout.shard(torch.zeros(4, 9), dim)
        # On one rank only: told to all.
        with pytest.raises(
            InputError,
            match=r"rank 1: layout\.unshard: expected 5 tokens along dim 0, got shape \(4,\)",
        ):
            layout.unshard(torch.zeros(4 if ctx.rank == 1 else 5), dim=0)
        with pytest.raises(
            InputError,
            match=r"rank 0: layout\.unshard: x must not require grad, .*; pass x\.detach\(\)",
        ):
            layout.unshard(torch.zeros(5, requires_grad=ctx.rank == 0), dim=0)
        with torch.no_grad():
            layout.unshard(torch.zeros(5, requires_grad=True), dim=0)

    burst_rt.run_local(2, wrong)


def test_hybrids_of_balanced_layouts_are_each_their_own() -> None:
    """Two layouts of one length, one after the other, under one mask."""
    for lengths in ([400, 50, 62], [20, 30, 300, 162]):

        def run(ctx: burst_rt.Context, lengths: list[int] = lengths) -> torch.Tensor:
            layout = ctx.layout(512, "balanced", mask=Causal() & Documents(lengths))
            generator = torch.Generator().manual_seed(0)
            whole = torch.randn(1, 512, 4, 16, generator=generator, dtype=torch.float64)
            x = layout.shard(whole)
            out = burst_rt.burst_attention(x, x, x, causal=True, layout=layout, strategy="hybrid:2")
            return layout.unshard(out)

        generator = torch.Generator().manual_seed(0)
        x = torch.randn(1, 512, 4, 16, generator=generator, dtype=torch.float64)
        expected = reference(x, x, x, torch.zeros_like(x), mask=Causal()).out
        assert relative_error(burst_rt.run_local(4, run)[0], expected) < ERROR[torch.float64]


def test_a_copy_of_a_model_is_on_the_same_ranks() -> None:
    """As `AveragedModel`, and pipelines that cut copies, make them."""
    with burst_rt.init() as ctx:
        layout = ctx.layout(16)
        model = torch.nn.ModuleDict({"attention": burst_rt.BurstAttention(layout, causal=True)})
        vars(model)["extra"] = [ctx]
        averaged: Any = AveragedModel(model).module
        assert averaged.attention.layout is layout
        assert averaged.extra == [ctx]
        for thing, said in ((layout, "make it again with ctx.layout"), (ctx, "burst_rt.init")):
            with pytest.raises(InputError, match=said):
                pickle.dumps(thing)
