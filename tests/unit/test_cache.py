"""A key-value cache over ranks that are threads: every step against the spec, and what is refused.

What is cached is checked by what queries see of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import log2
from typing import Any

import numpy as np
import pytest
import torch
from covering import drawn
from graphs import check_shares
from hypothesis import strategies as st
from simulated_faults import Faults, rehearse, verdict
from simulated_memory import reference as of_program_order
from spec import reference, relative_error, seen
from tolerances import ERROR

import burst_rt
from burst_rt import (
    BlockSparse,
    Causal,
    Context,
    Documents,
    First,
    KVCache,
    Mask,
    SlidingWindow,
    Step,
    run_local,
)
from burst_rt.errors import (
    BurstError,
    ConfigError,
    ContractMismatch,
    DeviceError,
    InputError,
    PeerLost,
)
from burst_rt.planning.choose import choose
from burst_rt.planning.masks import Positions, Spans, spans_of
from burst_rt.planning.problem import Problem
from burst_rt.scheduler import Schedule, check_world
from burst_rt.serving.chunks import BatchRows, CachedMask, Dealt
from burst_rt.serving.decode_plan import DecodePlan
from burst_rt.transport.base import PendingInts

_WORLDS = (1, 2, 3, 4, 5)
_HEADS, _KV_HEADS, _D = 4, 2, 16


@dataclass(frozen=True)
class Case:
    """Steps of a batch of sequences, and the attention of the one layer.

    steps: new tokens of each row, and whether they are spread. keep: after step i, so many tokens
    of each row stay.
    """

    steps: tuple[tuple[tuple[int, ...], bool | None], ...]
    padding: tuple[int, ...] | None = None
    keep: dict[int, tuple[int, ...]] = field(default_factory=dict)
    mask: Mask | None = None
    block: int = 16
    dtype: torch.dtype = torch.float32
    v_dim: int = _D
    softcap: float | None = None
    sinks: bool = False
    strategy: str = "auto"

    @property
    def batch(self) -> int:
        return len(self.steps[0][0])


def _new(case: Case, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of all new tokens of a step."""
    made = torch.Generator().manual_seed(number)
    tokens = max(case.steps[number][0])
    shapes = ((_HEADS, _D), (_KV_HEADS, _D), (_KV_HEADS, case.v_dim))
    q, k, v = (
        torch.randn(case.batch, tokens, *shape, generator=made).to(case.dtype) for shape in shapes
    )
    return q, k, v


def _sinks(case: Case) -> torch.Tensor | None:
    return torch.linspace(-1, 2, _HEADS) if case.sinks else None


def _expected(case: Case) -> list[list[torch.Tensor]]:
    """What the spec gives for each row's new tokens of each step: `[tokens, heads, v_dim]`."""
    k = [torch.empty(0, _KV_HEADS, _D, dtype=case.dtype) for _ in range(case.batch)]
    v = [torch.empty(0, _KV_HEADS, case.v_dim, dtype=case.dtype) for _ in range(case.batch)]
    found = []
    for number, (tokens, _) in enumerate(case.steps):
        new_q, new_k, new_v = _new(case, number)
        rows = []
        for row, n in enumerate(tokens):
            k[row] = torch.cat((k[row], new_k[row, :n]))
            v[row] = torch.cat((v[row], new_v[row, :n]))
            visible = seen(Causal() & (case.mask or Causal()), n, len(k[row]))
            hidden = case.padding[row] if case.padding else 0
            visible[:, :hidden] = False
            visible[: max(0, hidden - (len(k[row]) - n))] = False
            q = new_q[row : row + 1, :n]
            out = reference(
                q, k[row][None], v[row][None], torch.zeros(1, n, _HEADS, case.v_dim),
                mask=visible, softcap=case.softcap, sinks=_sinks(case),
            ).out[0]  # fmt: skip
            out[: max(0, hidden - (len(k[row]) - n))] = 0.0  # padding sees nothing, and no sink
            rows.append(out)
        found.append(rows)
        if number in case.keep:
            for row, stay in enumerate(case.keep[number]):
                k[row], v[row] = k[row][:stay], v[row][:stay]
    return found


def _worst(
    ctx: Context, case: Case, expected: list[list[torch.Tensor]]
) -> tuple[float, list[torch.Tensor]]:
    """The largest error of this rank's outputs, and what decodes gave."""
    ends = torch.tensor([tokens for tokens, _ in case.steps]).sum(0)
    cache = KVCache(
        ctx, num_layers=1, batch=case.batch, num_kv_heads=_KV_HEADS, head_dim=_D,
        v_head_dim=case.v_dim, capacity=int(ends.max()), dtype=case.dtype, block=case.block,
    )  # fmt: skip
    worst, decoded = 0.0, []
    for number, (tokens, sharded) in enumerate(case.steps):
        padding = case.padding if number == 0 else None
        step = cache.step(tokens, padding=padding, sharded=sharded)
        q, k, v = (step.cut(x) for x in _new(case, number))
        out = step.attend(
            0, q, k, v,
            mask=case.mask, softcap=case.softcap, sinks=_sinks(case), strategy=case.strategy,
        )  # fmt: skip
        lengths = cache.lengths
        step.commit()
        if not step.sharded:
            decoded.append(out)
        for row, want in enumerate(expected[number]):
            at = step.positions[row][step.valid[row]] - lengths[row]
            hidden = step.positions[row][step.valid[row]] < (case.padding or [0] * case.batch)[row]
            got = out[row][step.valid[row]].double()
            if case.sinks:
                got = got.masked_fill(hidden[:, None, None], 0.0)
            worst = max(worst, relative_error(got, want[at]) if len(at) else 0.0)
        if number in case.keep:
            cache.truncate(case.keep[number])
    return worst, decoded


_ONE, _TWO = (1,), (1, 1)
_CASES = {
    "one chunk": Case((((300,), True),)),
    "chunks and decodes": Case(
        (((300,), None), ((17,), None), (_ONE, None), ((5,), None), ((70,), None), ((16,), None))
    ),
    "a short prompt is decoded": Case((((7,), None), (_ONE, None))),
    "a short prompt is spread": Case((((7,), True), (_ONE, True), (_ONE, None)), block=2),
    "documents": Case(
        (((60,), None), ((17,), None), (_ONE, None), ((2,), None)),
        mask=Documents([30, 40, 10]) | SlidingWindow(3),
    ),
    "blocks": Case(
        (((60,), None), ((17,), None), (_ONE, None), ((2,), None)),
        mask=BlockSparse([[(i * j + i) % 3 == 0 for j in range(8)] for i in range(8)], 10),
    ),
    "rows of one length": Case((((90, 90), None), (_TWO, None), (_TWO, None))),
    "left padding": Case(
        (((90, 90, 90), None), ((40, 40, 40), None), ((1, 1, 1), None)), padding=(0, 33, 89)
    ),
    "rows of different lengths": Case(
        (((90, 20, 60), None), ((1, 1, 0), None), ((3, 0, 2), None), ((40, 30, 50), True))
    ),
    "a row is used again": Case(
        (((60, 90, 80), None), ((0, 40, 0), None), ((1, 1, 1), None)), keep={0: (60, 0, 80)}
    ),
    "truncated": Case(
        (((90, 90), None), ((4, 4), None), ((4, 4), None), ((30, 30), None)),
        keep={0: (81, 60), 1: (83, 61)},
    ),
    "window": Case((((200,), None), ((64,), None), (_ONE, None)), mask=SlidingWindow(30)),
    "window and first": Case(
        (((200, 200), None), (_TWO, None)), mask=SlidingWindow(30) | First(4), padding=(0, 9)
    ),
    "sinks and softcap": Case(
        (((120,), None), (_ONE, None), ((33,), None)), sinks=True, softcap=2.0
    ),
    "v of its own width": Case((((120,), None), (_ONE, None)), v_dim=8),
    "bfloat16": Case((((200,), None), (_ONE, None)), dtype=torch.bfloat16),
    "float64": Case((((200,), None), (_ONE, None)), dtype=torch.float64),
    "float64, rows of different lengths, a window and sinks": Case(
        (((90, 20, 60), None), ((40, 30, 50), True), ((1, 1, 0), None)),
        dtype=torch.float64,
        mask=SlidingWindow(30),
        sinks=True,
        strategy="ring-q",
    ),
    "large blocks": Case((((700,), None), ((300,), None), (_ONE, None)), block=256),
    "by queries": Case(
        (((400,), None), ((40,), None), ((33,), True)), strategy="ring-q", sinks=True
    ),
    "by queries, rows of different lengths": Case(
        (((90, 20), None), ((40, 30), None)), strategy="ring-q", padding=(10, 0)
    ),
    "by keys": Case((((400,), None), ((40,), None)), strategy="ring-kv"),
    "by heads": Case(
        (((200, 90), None), ((40, 30), None)),
        strategy="hybrid",
        mask=SlidingWindow(30) | First(4),
        padding=(10, 0),
    ),
}


# Code that no other case of this file reaches.
_ALWAYS = {("bfloat16", 1), ("blocks", 1), ("one chunk", 1), ("by heads", 5)}


def _long_unless_its_turn(name: str, world: int) -> pytest.MarkDecorator | tuple[()]:
    """Each case is run in one world, in turns; in the others by `make test-all`."""
    turn = (world - list(_CASES).index(name)) % len(_WORLDS)
    return () if turn == 0 or (name, world) in _ALWAYS else pytest.mark.long


@pytest.mark.parametrize(
    ("name", "world"),
    [
        pytest.param(name, world, marks=_long_unless_its_turn(name, world))
        for name in _CASES
        for world in _WORLDS
    ],
)
def test_every_step_is_exact(name: str, world: int) -> None:
    case = _CASES[name]
    expected = _expected(case)
    ranks = run_local(world, lambda ctx: _worst(ctx, case, expected))
    assert max(worst for worst, _ in ranks) <= ERROR[case.dtype]
    # Every rank has a decode's outputs, and the same bits.
    for _, decoded in ranks[1:]:
        assert all(map(torch.equal, decoded, ranks[0][1]))


@drawn(10, 30, st.data())
def test_any_split_of_a_prompt_is_exact(data: st.DataObject) -> None:
    world, block = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([1, 3, 16, 64]))
    tokens = data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=5))
    mask = data.draw(st.sampled_from([None, SlidingWindow(11), SlidingWindow(90) | First(3)]))
    case = Case(tuple(((n,), None) for n in tokens), block=block, mask=mask)
    expected = _expected(case)
    worst = run_local(world, lambda ctx: _worst(ctx, case, expected)[0])
    assert max(worst) <= ERROR[case.dtype]


def _cache(ctx: Context, **options: object) -> KVCache:
    chosen = {
        "num_layers": 2, "batch": 2, "num_kv_heads": 1, "head_dim": 8, "capacity": 100,
        "dtype": torch.float32, "block": 4,
    } | options  # fmt: skip
    return KVCache(ctx, **chosen)  # type: ignore[arg-type]


def _tensors(step: Step, heads: int = 2) -> tuple[torch.Tensor, ...]:
    rows = step.valid.shape
    return tuple(torch.ones(*rows, n, 8) for n in (heads, 1, 1))


def _filled(ctx: Context, tokens: int = 30, **options: object) -> KVCache:
    cache = _cache(ctx, **options)
    step = cache.step(tokens)
    for layer in range(cache.num_layers):
        step.attend(layer, *_tensors(step))
    step.commit()
    return cache


def test_rows_are_reordered() -> None:
    def rows(ctx: Context) -> bool:
        cache = _cache(ctx, num_layers=1, num_kv_heads=1)
        new = torch.randn(2, 41, 1, 8, generator=torch.Generator().manual_seed(0))
        step = cache.step(40, padding=[0, 9])
        step.attend(0, *(step.cut(new[:, :40]) for _ in range(3)))
        step.commit()

        def last() -> torch.Tensor:
            step = cache.step(1)
            out = step.attend(0, *(new[:1, 40:].expand(2, -1, -1, -1),) * 3)
            cache.truncate(cache.lengths)
            return out

        before, padding = last(), cache.padding
        cache.reorder(torch.tensor([1, 0]))
        swapped = torch.equal(last(), before[[1, 0]]) and cache.padding == padding[::-1]
        cache.reorder([1, 1])
        return swapped and torch.equal(last(), before[[0, 0]])

    assert run_local(3, rows) == [True] * 3


def test_a_step_that_is_not_committed_changes_nothing() -> None:
    def lengths(ctx: Context) -> tuple[tuple[int, ...], bool]:
        cache = _filled(ctx)
        step = cache.step(1)
        first = step.attend(0, *_tensors(step))
        again = cache.step(1)
        return cache.lengths, torch.equal(first, again.attend(0, *_tensors(again)))

    assert run_local(2, lengths) == [((30, 30), True)] * 2


def test_a_step_that_lacks_its_commit_alone_is_not_lost_without_a_word() -> None:
    def lengths(ctx: Context) -> list[tuple[int, ...]]:
        cache, found = _filled(ctx), []
        for end in (Step.commit, lambda _: cache.truncate(cache.lengths)):
            step = cache.step(1)
            for layer in range(2):
                step.attend(layer, *_tensors(step))
            with pytest.raises(InputError, match=r"not committed: .* call step.commit\(\)"):
                cache.step(1)
            end(step)
            found.append(cache.lengths)
        cache.step(1)
        return found

    assert run_local(2, lengths) == [[(31, 31), (31, 31)]] * 2


def test_rows_that_move_do_not_hide_a_step_that_lacks_its_commit_alone() -> None:
    def lengths(ctx: Context) -> tuple[int, ...]:
        cache = _filled(ctx)
        step = cache.step(1)
        for layer in range(2):
            step.attend(layer, *_tensors(step))
        cache.reorder([1, 0])
        with pytest.raises(InputError, match=r"not committed"):
            cache.step(1)
        cache.truncate(cache.lengths)
        cache.step(1)
        return cache.lengths

    assert run_local(2, lengths) == [(30, 30)] * 2


def test_ranks_whose_rows_differ_go_on_after_a_reset() -> None:
    def lengths(ctx: Context) -> tuple[int, ...]:
        cache = _filled(ctx)
        with pytest.raises(ContractMismatch):
            _swapped_on_one_rank(ctx, cache)
        cache.reset()
        step = cache.step(1)
        for layer in range(2):
            step.attend(layer, *_tensors(step))
        step.commit()
        return cache.lengths

    assert run_local(2, lengths) == [(1, 1)] * 2


def test_a_layer_that_an_error_has_interrupted_attends_again() -> None:
    def again(ctx: Context) -> bool:
        cache = _cache(ctx)
        step = cache.step(40)
        with pytest.raises(InputError, match="hybrid"):
            step.attend(0, *_tensors(step), strategy="hybrid:3")
        with pytest.raises(InputError, match="ring-kw"):
            cache.step(1).explain(2, strategy="ring-kw")
        step = cache.step(40)
        out = step.attend(0, *_tensors(step))
        return torch.equal(out, torch.ones(2, step.num_tokens, 2, 8))

    assert run_local(2, again) == [True] * 2


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_last_token_of_each_row_on_every_rank(world: int, dtype: torch.dtype) -> None:
    """Prefills and decodes of rows of different lengths; values are the tokens' own places."""
    steps = ([90, 20, 60], [1, 3, 0], [0, 33, 2], [5, 5, 5], [20, 20, 20])

    def lasts(ctx: Context) -> list[tuple[list[list[float]], list[list[float]]]]:
        cache, found = _cache(ctx, num_layers=1, batch=3, capacity=200), []
        for tokens in steps:
            step = cache.step(tokens)
            step.attend(0, *_tensors(step))
            # What no token has is not to be taken.
            own = torch.where(step.valid, step.positions, -1)
            x = torch.stack((own, torch.arange(3)[:, None].expand_as(own)), -1).to(dtype)
            step.commit()
            last = step.last(x)
            assert last.dtype == dtype
            rows = zip(cache.lengths, range(3), tokens, strict=True)
            want = [[at - 1.0, row] if new else [0.0, 0.0] for at, row, new in rows]
            found.append((last.tolist(), want))
        return found

    for rank in run_local(world, lasts):
        for got, want in rank:
            assert got == want


@pytest.mark.parametrize("strategy", ["ring-kv", "ring-q"])
def test_what_was_forgotten_does_not_come_back(strategy: str) -> None:
    def finite(ctx: Context) -> bool:
        cache = _cache(ctx, num_layers=1)
        step = cache.step(90)
        step.attend(0, *(x * torch.nan for x in _tensors(step)))
        step.commit()
        cache.reset()
        step = cache.step([80, 20])
        out = step.attend(0, *_tensors(step), strategy=strategy)
        return bool(out[step.valid].isfinite().all())

    assert run_local(2, finite) == [True] * 2


@pytest.mark.parametrize("tokens", [1024, pytest.param(4096, marks=pytest.mark.long)])
def test_thousands_of_decodes_take_a_few_plans(tokens: int) -> None:
    def plans(ctx: Context) -> tuple[int, int]:
        cache = _cache(ctx, num_layers=1, batch=1, capacity=tokens)
        for _ in range(tokens):
            step = cache.step(1)
            step.attend(0, *_tensors(step))
            step.commit()
        return cache.lengths[0], len(ctx.attention.kept[DecodePlan])

    found = run_local(2, plans)
    assert found[0][0] == tokens
    assert max(count for _, count in found) <= log2(tokens)


def test_a_cache_that_grows_takes_a_plan_each_time_it_grows() -> None:
    """And none for a step: capacities are reserved four times while 500 tokens are decoded."""

    def plans(ctx: Context) -> tuple[int, int]:
        cache = _cache(ctx, num_layers=1, batch=1, capacity=100)
        for at in range(500):
            if at == cache.capacity:
                cache.reserve(at + 100)
            step = cache.step(1)
            step.attend(0, *_tensors(step))
            step.commit()
        return cache.capacity, len(ctx.attention.kept[DecodePlan])

    for capacity, count in run_local(2, plans):
        assert capacity == 500
        assert count <= 5


def test_a_step_explains_what_it_sends() -> None:
    def said(ctx: Context) -> list[tuple[str, int]]:
        cache, found = _cache(ctx, num_layers=1), []
        for tokens in (60, 1):
            step, before = cache.step(tokens), ctx.stats().bytes_sent
            step.attend(0, *_tensors(step), strategy="ring-kv")
            found.append((step.explain(2, strategy="ring-kv"), ctx.stats().bytes_sent - before))
            step.commit()
        return found

    (prefill, sent), (decode, gathered) = run_local(2, said)[0]
    assert "strategy ring-kv; k, v travel" in prefill
    assert f"this rank sends {sent:,}" in prefill
    assert f"this rank sends {gathered:,} bytes" in decode


def test_room_is_made_and_what_is_cached_stays() -> None:
    def grown(ctx: Context) -> tuple[bool, int, int]:
        cache = _filled(ctx, capacity=31)
        first = cache.step(1)
        before = first.attend(0, *_tensors(first))
        small = cache.nbytes
        cache.reserve(5000)
        again = cache.step(1)
        return torch.equal(before, again.attend(0, *_tensors(again))), small, cache.nbytes

    for same, small, large in run_local(3, grown):
        assert same
        # Of 1,667 tokens a rank in blocks of 4, up to 1,668 and so 1,792; 2 layers, batch 2.
        assert large == 1792 * 2 * 2 * 16 * 4 > small == 256 * 2 * 2 * 16 * 4


def test_room_is_made_between_two_layers() -> None:
    def decoded(ctx: Context, grown: bool) -> list[torch.Tensor]:
        cache, found = _filled(ctx, capacity=40), []
        for _ in range(3):
            step = cache.step(2)
            with torch.inference_mode():
                found.append(step.attend(0, *_tensors(step)))
            if grown:
                cache.reserve(2 * cache.capacity)
            found.append(step.attend(1, *_tensors(step)))
            step.commit()
        return found

    for plain, grown in run_local(
        3, lambda ctx: (decoded(ctx, grown=False), decoded(ctx, grown=True))
    ):
        assert all(map(torch.equal, plain, grown))


@dataclass(frozen=True)
class _Own(Mask):
    """A mask whose comparison with another one raises."""

    width: torch.Tensor

    def spans(self, at: Positions) -> Spans:
        return SlidingWindow(int(self.width[0])).spans(at)


def _drawn(step: Step, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """q, k and v of a step, the same on every rank that has as many tokens."""
    made = torch.Generator().manual_seed(step.num_tokens)
    rows = step.valid.shape
    return tuple(torch.randn(*rows, n, 8, generator=made).to(dtype) for n in (2, 1, 1))


def test_layers_may_have_masks_that_cannot_be_compared() -> None:
    def decoded(ctx: Context) -> bool:
        cache = _cache(ctx)
        step = cache.step(30)
        for layer in range(2):
            step.attend(layer, *_drawn(step))
        step.commit()
        found = []
        for masks in ([_Own(torch.tensor([5, 0])) for _ in range(2)], [SlidingWindow(5)] * 2):
            step = cache.step(1)
            found.append([step.attend(n, *_drawn(step), mask=mask) for n, mask in enumerate(masks)])
            cache.truncate(cache.lengths)
        return all(map(torch.equal, *found))

    assert run_local(2, decoded) == [True, True]


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_of_any_strides_give_the_same(tokens: int, dtype: torch.dtype) -> None:
    def decoded(ctx: Context) -> list[bool]:
        cache = _cache(ctx, num_layers=1, dtype=dtype)
        step = cache.step(30)
        step.attend(0, *_drawn(step, dtype))
        step.commit()
        q, k, v = _drawn(cache.step(tokens), dtype)
        same = []
        for strided in (
            q,
            q[:1].expand_as(q),
            q[:, :, :1].expand_as(q),
            q[..., :1].expand_as(q),
            q.mT.contiguous().mT,
            q.repeat_interleave(2, 3)[..., ::2],
        ):
            found = []
            for each in (strided, strided.contiguous()):
                found.append(cache.step(tokens).attend(0, each, k, v))
                cache.truncate(cache.lengths)
            same.append(torch.equal(*found))
        return same

    assert run_local(2, decoded) == [[True] * 6] * 2


def test_memory_that_is_not_there_is_refused_and_the_cache_stays() -> None:
    def refused(ctx: Context) -> tuple[str, tuple[int, ...], int]:
        cache = _filled(ctx)
        with pytest.raises(DeviceError) as error:
            cache.reserve(10**13)
        step = cache.step(1)
        step.attend(0, *_tensors(step))
        with pytest.raises(DeviceError, match="KVCache: out of memory"):
            _cache(ctx, capacity=10**13)
        return str(error.value), cache.lengths, cache.capacity

    for message, lengths, capacity in run_local(2, refused):
        assert "2 sequences x 2 layers x 1 kv heads x (8 + 8) x 4 bytes" in message
        assert (lengths, capacity) == ((30, 30), 100)


@pytest.mark.parametrize("spare_bytes", [0, -1])
def test_what_the_ranks_of_a_host_cannot_all_have_is_refused(
    spare_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a host gives out more memory than it has, taking it would succeed, and using it end
    the job."""
    need = 2 * 512 * 2 * 2 * (8 + 8) * 4  # ranks x tokens x sequences x layers x channels x bytes
    monkeypatch.setattr("burst_rt.serving.memory.free_host_bytes", lambda: need + spare_bytes)

    def reserve(ctx: Context) -> tuple[str, int]:
        cache = _filled(ctx)
        try:
            cache.reserve(1024)
        except DeviceError as error:
            return str(error), cache.capacity
        return "", cache.capacity

    for message, capacity in run_local(2, reserve):
        if spare_bytes < 0:
            assert f"2 ranks of this host need {need:,}, and {need - 1:,} are free" in message
        assert capacity == (100 if spare_bytes < 0 else 1024)


def _stale(cache: KVCache, *, attend: bool, between: Callable[[KVCache], object]) -> None:
    step = cache.step(1)
    step.attend(0, *_tensors(step))
    if not attend:
        step.attend(1, *_tensors(step))
        cache.truncate(cache.lengths)
    between(cache)
    if attend:
        step.attend(1, *_tensors(step))
    step.commit()


def _without_a_layer(cache: KVCache) -> None:
    step = cache.step(1)
    step.attend(0, *_tensors(step))
    step.commit()


def _twice(cache: KVCache) -> None:
    step = cache.step(1)
    for _ in range(2):
        step.attend(0, *_tensors(step))


_BY_ROW = CachedMask(Causal(), Dealt(4, 1), BatchRows((0, 0), (1, 2), (0, 0), 99))


def _shorter(ctx: Context, cache: KVCache) -> None:
    cache.truncate(30 - ctx.rank)
    cache.step(1)


_WRONG: dict[str, tuple[str, Callable[[Context, KVCache], object]]] = {
    "too many tokens": ("make room with", lambda _, c: c.step(71)),
    "no tokens": ("tokens must be", lambda _, c: c.step(0)),
    "another batch": ("for each of 2 sequences", lambda _, c: c.step([1, 1, 1])),
    "too many to decode": ("at most 16", lambda _, c: c.step(17, sharded=False)),
    "sharded by a number": ("sharded must be", lambda _, c: c.step(1, sharded=1)),  # type: ignore[arg-type]
    "about bytes": (
        "about a text",
        lambda ctx, c: c.step(1, about=b"d" if ctx.rank else ""),  # type: ignore[arg-type]
    ),
    "about a number": ("about a text", lambda _, c: c.step(1, about=5)),  # type: ignore[arg-type]
    "padding later": ("empty cache", lambda _, c: c.step(1, padding=[0, 1])),
    "longer": ("at most the sequences' 30", lambda _, c: c.truncate(31)),
    "less room": ("at least 100", lambda _, c: c.reserve(50)),
    "no such row": ("rows must be 2 numbers", lambda _, c: c.reorder([0, 2])),
    "rows that are no integers": (
        "rows must be 2 numbers",
        lambda _, c: c.reorder(torch.tensor([1.5, 0.0])),
    ),
    "too many dimensions": (
        "rows must be 2 numbers",
        lambda _, c: c.reorder(torch.tensor([[1, 0], [0, 1]])),
    ),
    "no such layer": ("from 0 to 1", lambda _, c: _attend(c, layer=2)),
    "heads": ("multiple of the cache's", lambda _, c: _attend(c, kv_heads=2)),
    "dtype": ("dense torch.float32", lambda _, c: _attend(c, dtype=torch.float64)),
    "tokens of the step": ("shape (2, 1, 2, 8)", lambda _, c: _attend(c, tokens=2)),
    "gradients": ("inference_mode", lambda _, c: _attend(c, grad=True)),
    "scale": ("scale must be", lambda _, c: _attend(c, scale=-1.0)),
    "sinks": ("sinks must be", lambda _, c: _attend(c, sinks=torch.ones(3))),
    "documents of fewer tokens": (
        "for as many tokens as the cache has room for (capacity), or for any number, got one of "
        "another number: Documents([31]) has 31 keys",
        lambda _, c: _attend(c, mask=Documents([31])),
    ),
    "a table of fewer blocks": (
        "of another number: BlockSparse(",
        lambda _, c: _attend(c, mask=BlockSparse([[True]], 50)),
    ),
    "a mask of rows": ("one for all sequences", lambda _, c: _attend(c, mask=_BY_ROW)),
    "no mask": ("SlidingWindow", lambda _, c: _attend(c, mask="causal")),
    "two steps": (
        "another step has been begun",
        lambda _, c: _stale(c, attend=False, between=lambda c: c.step(1)),
    ),
    "rows changed": (
        "rows were changed",
        lambda _, c: _stale(c, attend=True, between=lambda c: c.reorder([1, 0])),
    ),
    "a layer twice": ("layer 0 has attended in this step", lambda _, c: _twice(c)),
    "the last of other tokens": (
        "this rank's tokens of the step, ...] = (2, 1), got torch.float32 (2, 3, 4)",
        lambda _, c: c.step(1).last(torch.ones(2, 3, 4)),
    ),
    "the last of integers": (
        "x must be floating point",
        lambda _, c: c.step(1).last(torch.ones(2, 1, dtype=torch.int64)),
    ),
    "a layer left out": ("layer 1 has not attended", lambda _, c: _without_a_layer(c)),
    "capacity": ("capacity must be", lambda ctx, _: _cache(ctx, capacity=0)),
    "block": ("block must be", lambda ctx, _: _cache(ctx, block=0)),
    "a huge block": ("of 1 to 1,099,511,627,776 tokens", lambda ctx, _: _cache(ctx, block=1 << 62)),
    "type": ("float64, float32", lambda ctx, _: _cache(ctx, dtype=torch.int8)),
    "no context": ("burst_rt.init", lambda ctx, _: _cache(None)),  # type: ignore[arg-type]
}


def _attend(
    cache: KVCache,
    *,
    layer: int = 0,
    kv_heads: int = 1,
    dtype: torch.dtype = torch.float32,
    tokens: int = 1,
    grad: bool = False,
    mask: object = None,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    step = cache.step(1)
    q, k, v = (torch.ones(2, tokens, n, 8, dtype=dtype) for n in (kv_heads * 2, kv_heads, kv_heads))
    if kv_heads > 1:
        q, k, v = q[:, :, :1].expand(-1, -1, 3, -1)[:, :, :0], k[:, :, :1], v[:, :, :1]
    q.requires_grad_(grad)
    step.attend(layer, q, k, v, mask=mask, scale=scale, sinks=sinks)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", _WRONG)
def test_wrong_arguments_are_refused_on_every_rank_and_change_nothing(name: str) -> None:
    words, wrong = _WRONG[name]

    def refused(ctx: Context) -> tuple[str, tuple[int, ...]]:
        cache = _filled(ctx)
        with pytest.raises(InputError) as error:
            wrong(ctx, cache)
        step = cache.step(1)  # the context goes on
        step.attend(0, *_tensors(step))
        return str(error.value), cache.lengths

    for message, lengths in run_local(2, refused):
        assert words in message, message
        assert lengths == (30, 30)


def test_numbers_of_tokens_may_come_as_anything_that_holds_integers() -> None:
    """Ranks may hold them differently, too."""
    ways: list[Callable[[list[int]], Any]] = [list, tuple, np.array, torch.tensor, _of_numpy]

    def run(ctx: Context) -> list[tuple[int, ...]]:
        cache, found = _cache(ctx, num_layers=1, batch=2, capacity=100), []
        for turn in range(len(ways)):
            way = ways[(turn + ctx.rank) % len(ways)]
            step = cache.step(way([3, 2]), padding=way([1, 0]))
            step.attend(0, *_tensors(step))
            step.commit()
            found.append(cache.lengths)
            cache.truncate(way([0, 0]))
        cache.step((4, np.int64(4), torch.tensor(4))[ctx.rank])
        for wrong in (np.array([1.0, 2.0]), torch.tensor([[1, 2]]), np.float64(3.0), "ab"):
            with pytest.raises(InputError, match="tokens must be an integer"):
                cache.step(wrong)  # type: ignore[arg-type]
        return found

    assert run_local(3, run) == [[(3, 2)] * len(ways)] * 3


def _of_numpy(numbers: list[int]) -> list[Any]:
    return [np.int64(number) for number in numbers]


_DIFFER: dict[str, Callable[[Context, KVCache, KVCache], object]] = {
    "tokens": lambda ctx, a, b: a.step(1 + ctx.rank),
    "lengths": lambda ctx, a, b: _shorter(ctx, a),
    "cache": lambda ctx, a, b: (a, b)[ctx.rank].step(1),
    "about": lambda ctx, a, b: a.step(1, about=str(ctx.rank)),
    "rows since the last step": lambda ctx, a, b: _swapped_on_one_rank(ctx, a),
    "capacity": lambda ctx, a, b: _cache(ctx, capacity=100 + ctx.rank),
}


def _swapped_on_one_rank(ctx: Context, cache: KVCache) -> None:
    cache.reorder([0, 1] if ctx.rank else [1, 0])
    cache.step(1)


@pytest.mark.parametrize("name", _DIFFER)
def test_ranks_that_differ_are_refused_on_every_rank(name: str) -> None:
    def differ(ctx: Context) -> str:
        first, second = _filled(ctx), _filled(ctx)
        with pytest.raises(ContractMismatch) as error:
            _DIFFER[name](ctx, first, second)
        return str(error.value)

    assert all(name in message for message in run_local(2, differ))


def test_layers_that_were_called_otherwise_are_found_out_in_the_next_step() -> None:
    def differ(ctx: Context) -> str:
        cache = _filled(ctx, num_layers=4)
        step = cache.step(1)
        for layer in (0, 1, 3, 2):
            step.attend(layer, *_tensors(step), scale=0.5 + ctx.rank * (layer == 3))
        step.commit()
        with pytest.raises(ContractMismatch):
            cache.step(1)
        with pytest.raises(ContractMismatch) as error:
            cache.step(1)  # the cache stays wrong until it is emptied
        cache.reset()
        cache.step(1)  # goes on
        return str(error.value)

    found = run_local(2, differ)
    called = "2 heads, mask None, scale {}, softcap None, strategy auto, no sinks"
    alike = called.format(0.5)
    on_0 = f"layers of the last step: layers 0, 1, 3, 2: {alike} on rank 0"
    on_1 = f"layers 0 to 1: {alike}; layer 3: {called.format(1.5)}; layer 2: {alike} on rank 1"
    assert all(on_0 in message and on_1 in message for message in found), found[0]


@pytest.mark.parametrize("name", ["truncate", "reorder", "all_reduce"])
def test_after_one_ranks_error_the_right_call_is_taken(name: str) -> None:
    wrong: dict[str, Callable[[Context, KVCache], object]] = {
        "truncate": lambda ctx, cache: cache.truncate(-1),
        "reorder": lambda ctx, cache: cache.reorder([5, 5]),
        "all_reduce": lambda ctx, cache: ctx.all_reduce(torch.zeros(1)),
    }

    def goes_on(ctx: Context) -> None:
        cache = _filled(ctx)
        with pytest.raises((InputError, ContractMismatch)):
            wrong[name](ctx, cache) if ctx.rank else cache.step(1)
        step = cache.step(1)
        for layer in range(2):
            step.attend(layer, *_tensors(step))
        step.commit()
        assert cache.lengths == (31, 31)

    run_local(2, goes_on)


def test_a_layers_call_after_the_context_is_closed_is_refused() -> None:
    with burst_rt.init() as ctx:
        step = _cache(ctx).step(1)
    with pytest.raises(ConfigError, match="this context is closed"):
        step.attend(0, *_tensors(step))


def test_a_broken_context_takes_no_further_layer() -> None:
    def run(ctx: Context) -> None:
        step = _cache(ctx).step(1)
        q, k, v = _tensors(step)
        with pytest.raises((InputError, ContractMismatch, PeerLost)):
            step.attend(0, q[..., :-1] if ctx.rank else q, k, v)
        assert ctx.runtime.broken is not None
        with pytest.raises(PeerLost, match="this context broke in an earlier call"):
            step.attend(1, q, k, v)

    run_local(2, run)


@pytest.mark.parametrize("tokens", [1, 30])  # a decode and a prefill
@pytest.mark.parametrize("which", range(3))
def test_values_that_are_not_finite_stay_out_of_the_cache(tokens: int, which: int) -> None:
    with burst_rt.init(check_finite=True) as ctx:
        step = _cache(ctx).step(tokens)
        right = _tensors(step)
        wrong = [x.clone() for x in right]
        wrong[which][-1, -1, -1, -1] = float("nan")
        with pytest.raises(InputError, match=f"Step.attend: {'qkv'[which]} must hold finite"):
            step.attend(0, *wrong)
        assert step.attend(0, *right).isfinite().all()


def test_an_error_about_a_layers_strategy_names_the_call() -> None:
    with burst_rt.init() as ctx:
        step = _cache(ctx).step(1)
        with pytest.raises(InputError, match=r"Step\.attend: strategy must be one of"):
            step.attend(0, *_tensors(step), strategy="square")
        with pytest.raises(InputError, match=r"Step\.explain: strategy must be one of"):
            step.explain(2, strategy="square")


def _positions(dealt: Dealt, rank: int, length: int) -> Sequence[int]:
    return [p for p in range(length) if p // dealt.block % dealt.world_size == rank]


@pytest.mark.parametrize("world", _WORLDS)
@pytest.mark.parametrize("block", [1, 4, 7])
def test_columns_and_positions_are_one_formula(world: int, block: int) -> None:
    dealt = Dealt(block, world)
    for rank in range(world):
        own = _positions(dealt, rank, 100)
        assert dealt.position(np.arange(len(own)), rank).tolist() == own
        assert all(dealt.owner(p) == rank for p in own)
        assert [dealt.count(n, rank) for n in range(101)] == [
            sum(p < n for p in own) for n in range(101)
        ]
    counts = [dealt.count(100, rank) for rank in range(world)]
    assert max(counts) - min(counts) <= block


@pytest.mark.parametrize("world", [1, 3, 12])
def test_a_chunk_sees_by_the_numbers_of_its_columns(world: int) -> None:
    """`Cached.spans` and `Cached.pieces` against the structure, cell by cell."""
    rows = BatchRows((30, 0, 7), (20, 41, 1), (3, 0, 5), 99)
    dealt = Dealt(4, world)
    for structure in (Causal(), Causal() & (SlidingWindow(9) | First(2))):
        mask = CachedMask(structure, dealt, rows)
        q_map, kv_map = mask.layout(queries=True), mask.layout(queries=False)
        truth = np.zeros((3, q_map.seq_len, kv_map.seq_len), bool)
        for b, (before, after) in enumerate(zip(rows.before, rows.after, strict=True)):
            for q_rank in range(world):
                places = [p for p in _positions(dealt, q_rank, after) if p >= before]
                q_at = q_map.runs[q_rank][0].start
                for i, place in enumerate(places):
                    for rank in range(world):
                        kv_at = kv_map.runs[rank][0].start
                        for c, p in enumerate(_positions(dealt, rank, after)):
                            seen_there = rows.padding[b] <= p and place >= rows.padding[b]
                            truth[b, q_at + i, kv_at + c] = seen_there and bool(
                                structure.allows(place, p)
                            )
        shift = kv_map.seq_len - q_map.seq_len
        spans = spans_of(mask, range(shift, kv_map.seq_len))
        cells = spans.sees(np.arange(kv_map.seq_len), like=np.arange(q_map.seq_len)[:, None])
        assert (cells == truth).all()
        for q_runs in q_map.runs:
            for q in q_runs:
                for kv in (run for runs in kv_map.runs for run in runs):
                    moved = range(q.start + shift, q.stop + shift)
                    part = truth[:, q.start : q.stop, kv.start : kv.stop]
                    inside = np.zeros(part.shape[1:], bool)
                    for piece in mask.pieces(moved, kv):
                        inside[piece.rows, piece.columns] = True
                    assert not (part & ~inside).any()


def test_the_chunk_that_forecasts_are_made_for_has_no_more_tokens_than_there_is_room() -> None:
    """Its mask may be for no more."""
    mask = CachedMask(
        Causal() & Documents([60, 40]), Dealt(16, 2), BatchRows((10,), (90,), (0,), 100)
    ).alike
    q_layout, kv_layout = mask.layouts or (None, None)
    assert q_layout is not None
    assert kv_layout is not None
    shift = kv_layout.seq_len - q_layout.seq_len
    assert spans_of(mask, range(shift, kv_layout.seq_len)).starts.shape[1] == q_layout.seq_len


@pytest.mark.parametrize("strategy", ["ring-kv", "ring-q"])
def test_graphs_of_a_chunk_are_rehearsed(strategy: str) -> None:
    """Every value is made from the right ones, in any order of events."""
    mask = CachedMask(Causal(), Dealt(16, 4), BatchRows((200,), (120,), (0,), 999))
    problem = mask.problem(
        batch=1, num_heads=2, num_kv_heads=1, head_dim=8, input_bytes=4, sum_bytes=4
    )  # fmt: skip
    program = choose(problem, strategy, forward=True).program
    graphs = [program.graph(rank) for rank in range(4)]
    check_world(graphs)
    check_shares(graphs, program)
    expected = of_program_order(graphs)
    for seed in range(20):
        faults = Faults(seed=seed)
        rehearsal = rehearse([Schedule.of(graph) for graph in graphs], faults)
        assert not verdict(rehearsal, faults, expected)


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_layer_that_one_rank_cannot_call_ends_all_ranks(wrong: int) -> None:
    """The others wait for its messages by then, and are not to wait for `timeout_s`."""

    def differ(ctx: Context) -> BurstError:
        cache = _filled(ctx)
        step = cache.step(1)
        step.attend(0, *_tensors(step))
        with pytest.raises(BurstError) as error:
            step.attend(2 if ctx.rank == wrong else 1, *_tensors(step))
        return error.value

    found = run_local(3, differ, timeout_s=60)
    own = found.pop(wrong)  # says why, where the others can only say who
    assert isinstance(own, InputError)
    assert "layer must be a number from 0 to 1, got 2" in str(own)
    assert all(isinstance(error, PeerLost | ContractMismatch) for error in found)
    assert all("left this step" in str(error) for error in found)
    assert all(f"InputError: {own}" in str(error) for error in found)


@pytest.mark.parametrize("tokens", [1, 40])
def test_the_ranks_agree_once_a_step(tokens: int) -> None:
    """However many layers it has."""

    def agreements(ctx: Context) -> int:
        cache = _filled(ctx)
        control, counted = ctx.runtime.control, []
        allreduce_max = control.allreduce_max

        def counting(values: Sequence[int]) -> PendingInts:
            counted.append(values)
            return allreduce_max(values)

        control.allreduce_max = counting  # type: ignore[method-assign]
        step = cache.step(tokens)
        for layer in range(cache.num_layers):
            step.attend(layer, *_tensors(step))
        step.commit()
        return len(counted)

    assert run_local(2, agreements) == [1, 1]


def _chunk(before: int, tokens: int, structure: Mask, world: int = 4) -> Problem:
    rows = BatchRows((before,), (tokens,), (0,), 1 << 20)
    return CachedMask(structure, Dealt(128, world), rows).problem(
        batch=1, num_heads=8, num_kv_heads=8, head_dim=64, input_bytes=2, sum_bytes=4
    )  # fmt: skip


def test_chunks_of_a_prompt_share_graphs_and_send_little_more_than_they_must() -> None:
    ways = set()
    for before in range(0, 64 * 512, 512):
        program = choose(_chunk(before, 512, Causal()), "ring-kv", forward=True).program
        ways.add(program.wiring)
        # Keys and values of all that is cached afterwards, to all other ranks.
        least = (before + 512) * 8 * (64 + 64) * 2 * 3
        most = -(-(before + 512) // 1024) * 1024 if before < 8192 else (before + 512) * 1.125
        assert least <= program.wire_bytes() <= most * 8 * (64 + 64) * 2 * 3
    assert len(ways) <= 26


def test_a_window_keeps_far_keys_at_home() -> None:
    window = choose(_chunk(60_000, 512, SlidingWindow(1000)), "ring-kv", forward=True).program
    full = choose(_chunk(60_000, 512, Causal()), "ring-kv", forward=True).program
    assert window.wire_bytes() < full.wire_bytes() / 6
