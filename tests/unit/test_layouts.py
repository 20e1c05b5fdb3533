"""Layouts: every token has one owner, shards are even, shard and unshard are inverse."""

from __future__ import annotations

import pytest
import torch

import burst_rt
from burst_rt import Context
from burst_rt.errors import InputError
from burst_rt.planning.layouts import KINDS, make_layout

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
    for same_run in zip(*lengths, strict=True):
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
        (8, "spiral", r"one of \['contiguous', 'striped', 'zigzag'\], got 'spiral'"),
        (8, None, "got None"),
        (8, ["zigzag"], "got"),
    ],
)
def test_impossible_layouts_are_refused(seq_len: int, kind: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        burst_rt.init().layout(seq_len, kind)


@pytest.mark.parametrize("kind", KINDS)
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
        layout = ctx.layout(seq_len, kind)
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
