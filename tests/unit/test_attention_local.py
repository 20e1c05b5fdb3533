"""Whole attention over ranks that are threads, against the spec: every layout, strategy, mask,
shape and type.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from covering import first_of, sampled
from decodes import CASES, decode
from spec import Attention, errors_of, relative_error, single_process
from tolerances import ERROR, RATIO
from worlds import Case, attend, attend_over_threads

import burst_rt
from burst_rt import Causal, Context, Full, Mask
from burst_rt.attention.call import key_of
from burst_rt.attention.execute import run_types
from burst_rt.attention.options import OptionArguments, Options
from burst_rt.drivers import BaseDriver
from burst_rt.errors import InputError, InternalError
from burst_rt.kernels import sum_dtype
from burst_rt.planning.layouts import KINDS
from burst_rt.planning.masks import Relation
from burst_rt.planning.strategies import STRATEGIES, Hybrid, Program, Ring, RingNaive
from burst_rt.runtime.machine import Slots
from burst_rt.scheduler import Task

_WORLDS = (1, 2, 3, 4, 5, 8)


@dataclass(frozen=True)
class SlidingWindow(Mask):
    """Keys less than `width` away, before and after. What the docs promise to carry: two methods,
    nothing else.
    """

    width: int

    def relation(self, q: range, kv: range) -> Relation:
        if kv[0] - q[-1] >= self.width or q[0] - kv[-1] >= self.width:
            return Relation.EMPTY
        return (
            Relation.FULL
            if kv[-1] - q[0] < self.width and q[-1] - kv[0] < self.width
            else Relation.PARTIAL
        )

    def allows(self, q_position: Any, kv_position: Any) -> Any:  # ints or tensors
        return (q_position - kv_position < self.width) & (kv_position - q_position < self.width)


@dataclass(frozen=True)
class Parity(Mask):
    """Queries at odd positions see nothing; that is said only cell by cell."""

    def relation(self, q: range, kv: range) -> Relation:
        return Relation.PARTIAL

    def allows(self, q_position: Any, kv_position: Any) -> Any:  # ints or tensors
        return (q_position % 2 == 0) & (kv_position >= 0)


def assert_right(result: Attention, truth: Attention, dtype: torch.dtype = torch.float32) -> None:
    for name, error in errors_of(result, truth).items():
        # lse is kept in the type of the sums.
        assert error < ERROR[sum_dtype(dtype) if name == "lse" else dtype], (name, error)


# What is measured against torch's own attention, fp32, in one process.
_PROMISED = {
    "full": Case(1000, heads=2, head_dim=64),
    "causal": Case(1000, heads=2, head_dim=64, mask=Causal()),
    "63 tokens": Case(63, mask=Causal()),
    "a prime": Case(509, heads=4, kv_heads=2, mask=Causal()),
    "one kv head": Case(300, heads=4, kv_heads=1, head_dim=32, batch=3, mask=Causal()),
    "large heads": Case(257, heads=1, head_dim=256, mask=Causal()),
    "small heads": Case(600, heads=3, head_dim=16),
    "few queries": Case(64, kv_len=700, head_dim=32, mask=Causal()),
    "few keys": Case(700, kv_len=64, head_dim=32, mask=Causal()),
    "few queries, full": Case(37, kv_len=500),
    "window": Case(500, mask=SlidingWindow(40)),
    # Many rows of few tokens: what a single one is off by is a matter of luck.
    "2 tokens": Case(2, heads=4, batch=64, head_dim=64, mask=Causal()),
    "3 tokens": Case(3, heads=4, batch=64, mask=Causal()),
    "5 tokens": Case(5, heads=4, batch=64, head_dim=64, mask=Causal()),
    "9 tokens": Case(9, heads=4, batch=64, mask=Causal()),
    "2 keys": Case(30, kv_len=2, batch=16),
    "2 queries": Case(2, kv_len=30, batch=16),
}


@pytest.mark.parametrize("third", first_of(range(3), 1))
@pytest.mark.parametrize("name", _PROMISED)
def test_errors_are_those_of_one_process(name: str, third: int) -> None:
    """At most 1.5 times torch's own, for all worlds; the layouts and strategies take turns.

    A third of the worlds each time, in turns.
    """
    case = _PROMISED[name].but(lse_grad=False)
    truth = case.truth
    expected = errors_of(single_process(*case.inputs()[:4], mask=case.mask), truth)
    turns = list(itertools.product(KINDS, ("burst", "ring-kv", "ring-q")))
    place = list(_PROMISED).index(name)
    for i, world_size in enumerate(_WORLDS):
        if (place + i) % 3 != third:
            continue
        kind, strategy = turns[(i + place) % len(turns)]
        errors = errors_of(
            attend_over_threads(world_size, case.but(kind=kind, strategy=strategy)), truth
        )
        for field, error in errors.items():
            assert error <= RATIO * expected[field], (
                world_size,
                kind,
                strategy,
                field,
                error / expected[field],
            )


@sampled(
    world_size=_WORLDS,
    kind=KINDS,
    strategy=["burst", "ring-kv", "ring-q"],
    mask=[Full(), Causal()],
)
def test_every_layout_and_strategy_in_every_world(
    world_size: int, kind: str, strategy: str, mask: Mask
) -> None:
    case = Case(63, heads=4, kv_heads=2, batch=2, mask=mask, kind=kind, strategy=strategy)
    assert_right(attend_over_threads(world_size, case), case.truth)


_FEW = Case(40, kv_len=1500, heads=4, kv_heads=2, strategy="ring-q")
_FEW_QUERIES = {
    "causal": _FEW.but(mask=Causal(), batch=2),
    "a window": _FEW.but(mask=burst_rt.SlidingWindow(200, 0), dtype=torch.bfloat16, v_head_dim=24),
    "documents": _FEW.but(
        mask=Causal() & burst_rt.Documents([700, 780, 20]), dtype=torch.float64, batch=3
    ),
    "blind rows": _FEW.but(q_len=2000, kv_len=600, mask=Causal(), sinks=True),
    "one query": _FEW.but(q_len=1, mask=Full(), softcap=2.0),
}


# The row that stays: ranges of rows that ranks need touch, and are united.
@sampled((3, "zigzag", "blind rows"), world_size=_WORLDS, kind=KINDS, name=_FEW_QUERIES)
def test_few_queries_travel_past_many_keys(world_size: int, kind: str, name: str) -> None:
    """Shards longer than a stretch of rows that are sent together; rows that see no key of a rank,
    or none at all; every type.
    """
    case = _FEW_QUERIES[name].but(kind=kind)
    assert_right(attend_over_threads(world_size, case), case.truth, case.dtype)


@sampled(
    world_size=[1, 4, 6],
    kind=KINDS,
    strategy=[
        "bidirectional",
        "two-level:2",
        "all-to-all",
        "hybrid:2",
        "ring-naive",
        "burst-untiled",
    ],
    mask=[Full(), Causal()],
)
def test_every_other_strategy(world_size: int, kind: str, strategy: str, mask: Mask) -> None:
    number = int(strategy[-1]) if strategy[-1].isdecimal() else 1
    if world_size % number:
        with pytest.raises(InputError, match=r"divide"):
            attend_over_threads(world_size, Case(63, strategy=strategy))
        return
    # Layouts and masks take turns with shapes.
    cases = (
        Case(63, heads=24, kv_heads=12),
        Case(5, heads=12, batch=2),
        Case(20, kv_len=45, heads=12, dtype=torch.bfloat16),
    )
    case = cases[(list(KINDS).index(kind) + isinstance(mask, Causal)) % 3].but(
        mask=mask, kind=kind, strategy=strategy
    )
    assert_right(attend_over_threads(world_size, case), case.truth, case.dtype)


@sampled(
    lengths=[
        (1, 1),
        (3, 3),
        (1, 9),
        (9, 1),
        (3, 100),
        (100, 3),
        (64, 80),
        (80, 64),
        (7, 61),
        (61, 7),
    ],
    kinds=[("contiguous", "contiguous"), ("striped", "striped"), ("zigzag", "contiguous")],
    mask=[None, Causal()],
    strategy=["burst", "ring-kv"],
    world_size=[2, 5],
)
def test_short_and_unequal_lengths(
    lengths: tuple[int, int],
    kinds: tuple[str, str],
    mask: Mask | None,
    strategy: str,
    world_size: int,
) -> None:
    """Shorter than the world too: some shards, some blocks are empty."""
    case = Case(
        lengths[0], kv_len=lengths[1], mask=mask, kind=kinds[0], kv_kind=kinds[1], strategy=strategy
    )
    assert_right(attend_over_threads(world_size, case), case.truth)


@pytest.mark.parametrize("strategy", ["burst", "ring-kv"])
def test_rows_that_see_no_key(strategy: str) -> None:
    """0 and -inf, never NaN; gradients exactly 0, whatever comes for them."""
    for mask, blind in ((Causal(), slice(0, 30)), (Parity(), slice(1, None, 2))):
        case = Case(50, kv_len=20, mask=mask, strategy=strategy)
        result = attend_over_threads(3, case)
        assert_right(result, case.truth)
        assert not result.out[:, blind].any()
        assert (result.lse[:, :, blind] == -torch.inf).all()
        assert result.dq is not None
        assert not result.dq[:, blind].any()


@pytest.mark.parametrize("strategy", ["burst", "ring-kv"])
@pytest.mark.parametrize("mask", [Causal(), Parity()], ids=repr)
def test_nan_that_comes_for_rows_that_see_no_key_goes_nowhere(mask: Mask, strategy: str) -> None:
    """The gradient of logaddexp(-inf, -inf) is NaN."""

    def run(ctx: Context) -> list[torch.Tensor]:
        q_layout, kv_layout = ctx.layout(50), ctx.layout(20)
        generator = torch.Generator().manual_seed(ctx.rank)
        q = torch.randn(1, q_layout.shard_len, 2, 16, generator=generator, requires_grad=True)
        k = torch.randn(1, kv_layout.shard_len, 2, 16, generator=generator, requires_grad=True)
        out, lse = burst_rt.burst_attention(
            q,
            k,
            k,
            mask=mask,
            layout=q_layout,
            kv_layout=kv_layout,
            strategy=strategy,
            return_lse=True,
        )
        grads = torch.autograd.grad(torch.logaddexp(lse, lse).sum(), lse, retain_graph=True)
        assert torch.equal(grads[0].isnan(), lse.isinf())
        assert grads[0].isnan().any()
        return list(torch.autograd.grad((out, lse), (q, k), (torch.ones_like(out), grads[0])))

    for grads in burst_rt.run_local(2, run):
        assert all(torch.isfinite(grad).all() for grad in grads)


@pytest.mark.parametrize("strategy", ["burst", "ring-kv"])
@pytest.mark.parametrize(
    "mask",
    [SlidingWindow(9), SlidingWindow(20) & Causal(), Causal() & SlidingWindow(1), Parity()],
    ids=repr,
)
def test_masks_of_ones_own(mask: Mask, strategy: str) -> None:
    for kind in KINDS:
        case = Case(100, heads=4, kv_heads=2, mask=mask, kind=kind, strategy=strategy)
        assert_right(attend_over_threads(3, case), case.truth)


def test_a_narrow_window_sends_to_neighbours_only() -> None:
    """The interface carries masks that save: fewer bytes than causal, fewer tiles."""

    def sent(ctx: Context, mask: Mask) -> int:
        layout = ctx.layout(400, "contiguous")
        x = torch.zeros(1, 100, 2, 16)
        return burst_rt.explain(
            x, x, x, mask=mask, layout=layout
        ).forward.choice.program.wire_bytes()

    window, causal = burst_rt.run_local(
        4, lambda ctx: (sent(ctx, SlidingWindow(10) & Causal()), sent(ctx, Causal()))
    )[0]
    # The window: the last block of three ranks, one hop. Causal: all blocks of three ranks, three,
    # two and one hop.
    assert (window, causal) == (3 * 50 * 2 * 2 * 16 * 4, (3 + 2 + 1) * 100 * 2 * 2 * 16 * 4)


@pytest.mark.parametrize("head_dim", [1, 3, 16, 40, 64, 80, 128, 256])
def test_head_sizes(head_dim: int) -> None:
    case = Case(70, heads=2, head_dim=head_dim, mask=Causal())
    assert_right(attend_over_threads(2, case), case.truth)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (4, 2), (6, 2), (8, 1), (3, 3)])
@pytest.mark.parametrize("strategy", ["burst", "ring-kv"])
def test_head_counts(heads: int, kv_heads: int, strategy: str) -> None:
    case = Case(70, heads=heads, kv_heads=kv_heads, mask=Causal(), strategy=strategy)
    assert_right(attend_over_threads(3, case), case.truth)


@sampled(
    kernel=["auto", "naive"],
    dtype=[torch.float64, torch.float32, torch.bfloat16, torch.float16],
    batch=[1, 3],
    strategy=["burst", "ring-kv"],
)
def test_types(dtype: torch.dtype, batch: int, strategy: str, kernel: str) -> None:
    case = Case(
        130,
        heads=4,
        kv_heads=2,
        head_dim=32,
        batch=batch,
        dtype=dtype,
        mask=Causal(),
        strategy=strategy,
    )
    result = attend_over_threads(3, case, kernel=kernel)
    assert_right(result, case.truth, dtype)
    assert result.lse.dtype == sum_dtype(dtype)
    assert {x.dtype for x in (result.out, *result[2:]) if x is not None} == {dtype}


def test_errors_do_not_grow_with_the_world() -> None:
    case = Case(640, heads=2, head_dim=32, mask=Causal(), lse_grad=False)
    truth = case.truth
    by_world = {
        world_size: errors_of(attend_over_threads(world_size, case), truth)
        for world_size in (1, 2, 4, 8, 16)
    }
    for field in by_world[1]:
        assert max(errors[field] for errors in by_world.values()) < RATIO * by_world[1][field], (
            field,
            by_world,
        )


@pytest.mark.parametrize("scale", [1.0, 0.3, 4, 1e-8])
def test_scales(scale: float) -> None:
    case = Case(50, mask=Causal(), scale=scale)
    assert_right(attend_over_threads(2, case), case.truth)


def test_large_scores() -> None:
    """Scores of some hundreds: exp of them overflows, of the differences to the largest it does
    not.
    """
    case = Case(100, mask=Causal(), scale=60.0)
    inputs = case.inputs()
    result = burst_rt.run_local(3, lambda ctx: attend(ctx, case, inputs))[0]
    truth = case.truth
    assert all(torch.isfinite(x).all() for x in result if x is not None)
    # Rounding of the scores themselves, 500 x roundoff, becomes relative error of the weights.
    assert relative_error(result.out, truth.out) < 500 * ERROR[torch.float32]
    assert relative_error(result.lse, truth.lse) < ERROR[torch.float32]


@pytest.mark.parametrize("strategy", ["burst", "ring-kv"])
@pytest.mark.parametrize("batch", [1, 2])
def test_strided_inputs_and_gradients(strategy: str, batch: int) -> None:
    """A packed qkv, a last dimension that is not contiguous, broadcast k and v, an expanded
    gradient: the same as from dense copies.
    """
    generator = torch.Generator().manual_seed(0)
    packed = torch.randn(batch, 60, 6, 16, generator=generator)
    transposed = torch.randn(batch, 60, 16, 2, generator=generator).transpose(2, 3)
    broadcast = torch.randn(batch, 60, 1, 16, generator=generator).expand(batch, 60, 2, 16)
    one_number = torch.tensor(0.5).expand(batch, 60, 2, 16)
    packs = {
        "packed": packed.split(2, dim=2),
        "heads interleaved": packed.unflatten(2, (2, 3)).unbind(3),
        "heads first": tuple(
            x.transpose(1, 2).contiguous().transpose(1, 2) for x in packed.split(2, dim=2)
        ),
        "transposed": (transposed, transposed, transposed),
        "broadcast": (packed[:, :, :2], broadcast, broadcast),
        "one number": (packed[:, :, :2], one_number, packed[:, :, 2:4]),
        "reversed": tuple(x.flip(1)[:, 0:60] for x in packed.split(2, dim=2)),
        "every other token": tuple(
            torch.randn(batch, 120, 2, 16, generator=generator)[:, ::2] for _ in range(3)
        ),
    }

    def run(
        ctx: Context, tensors: tuple[torch.Tensor, ...], dense: bool
    ) -> tuple[torch.Tensor, ...]:
        layout = ctx.layout(60 * ctx.world_size)
        q, k, v = (x.contiguous() if dense else x for x in tensors)
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out = burst_rt.burst_attention(q, k, v, causal=True, layout=layout, strategy=strategy)
        assert out.is_contiguous()
        # An expanded scalar: the gradient of sum() has strides 0.
        return (out.detach(), *torch.autograd.grad(out.sum(), (q, k, v)))

    for name, tensors in packs.items():

        def both(
            ctx: Context, tensors: tuple[torch.Tensor, ...] = tensors
        ) -> list[tuple[torch.Tensor, ...]]:
            return [run(ctx, tensors, dense) for dense in (False, True)]

        for strided, dense in burst_rt.run_local(2, both):
            for x, y in zip(strided, dense, strict=True):
                assert torch.isfinite(x).all(), name
                assert relative_error(x, y) < ERROR[torch.float32], name


def test_inputs_are_not_written_to() -> None:
    case = Case(50, heads=2, mask=Causal())
    inputs, before = case.inputs(), case.inputs()
    burst_rt.run_local(2, lambda ctx: attend(ctx, case, inputs))
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


@pytest.mark.parametrize("strategy", ["burst", "ring-kv"])
def test_the_same_bits_in_twenty_runs(strategy: str) -> None:
    case = Case(127, heads=2, mask=Causal(), strategy=strategy)
    first = attend_over_threads(4, case)
    for _ in range(19):
        for x, y in zip(first[:5], attend_over_threads(4, case)[:5], strict=True):
            assert x is not None
            assert y is not None
            assert torch.equal(x, y)


@pytest.mark.parametrize("run", ["ForwardRun", "BackwardRun"])
def test_nothing_of_a_call_outlives_it(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from burst_rt.attention import execute

    taken: list[weakref.ref[torch.Tensor]] = []
    kind = getattr(execute, run)
    slots = kind._slots

    def noted(self: Any) -> Slots:  # a run
        found: Slots = slots(self)
        taken.extend(map(weakref.ref, found.storage.values()))
        return found

    monkeypatch.setattr(kind, "_slots", noted)

    def call(ctx: Context) -> bool:
        # Small slots are kept.
        layout = ctx.layout(2048)
        x = torch.ones(1, 1024, 1, 256, requires_grad=True)
        out = burst_rt.burst_attention(x, x, x, layout=layout)
        if run == "BackwardRun":
            out.sum().backward()
        ctx.gather_last_run()  # all ranks have ended
        gc.collect()
        return any(ref() is not None for ref in taken)

    assert burst_rt.run_local(2, call) == [False, False]
    assert len(taken) >= 4


def test_memory_is_poisoned_in_these_tests() -> None:
    """What no tile writes stays NaN: the other tests would see it."""
    from burst_rt.attention.execute import Binding, ForwardRun
    from burst_rt.drivers import Progress
    from burst_rt.kernels import QKV

    def forward(ctx: Context) -> tuple[bool, bool]:
        layout = ctx.layout(20)
        x = torch.zeros(1, 10, 1, 16)
        call = burst_rt.make_call(x, x, x, layout=layout)
        run = ForwardRun(
            Binding(
                plan=call.forward_plan,
                machine=ctx.runtime.machine,
                scale=None,
                progress=Progress(),
                poison=ctx.attention.poison,
                qkv=QKV(x, x, x),
            )
        )
        slots = [slot.view(torch.float32) for slot in run.storage.values()]
        return bool(slots) and all(bool(slot.isnan().all()) for slot in slots), bool(
            run.lse.isnan().all()
        )

    assert burst_rt.run_local(2, forward) == [(True, True)] * 2


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("way", [*STRATEGIES, "decode"])
def test_a_task_changes_nothing_that_it_only_reads(
    way: str, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that is declared as read may be under way to another rank."""
    what_does, checked = BaseDriver._what_does, itertools.count()

    def watched(driver: BaseDriver, task: Task) -> Callable[..., None]:
        does, memory = what_does(driver, task), driver._options.memory
        changed = {*task.writes, *task.accumulates}
        read = [part for part in task.reads if part in memory and part not in changed]

        def compare(op: object) -> None:
            before = [bytes(memory[part]) for part in read]
            does(op)
            assert [bytes(memory[part]) for part in read] == before, task.name
            next(checked)

        return compare

    monkeypatch.setattr(BaseDriver, "_what_does", watched)

    def call(ctx: Context) -> None:
        if way == "decode":
            decode(ctx, case=CASES["a window"])
            return
        layout = ctx.layout(12 * world, "zigzag")
        q, k, v = (torch.randn(1, 12, heads, 8, requires_grad=True) for heads in (12, 12, 12))
        burst_rt.burst_attention(
            q, k, v, layout=layout, causal=way != "ring-naive", strategy=way
        ).sum().backward()

    burst_rt.run_local(world, call)
    assert next(checked) > 0


@sampled(
    world_size=[1, 2, 3, 5],
    mask=[None, Causal(), SlidingWindow(11)],
    strategy=["auto", "burst", "ring-kv", "ring-q"],
)
def test_what_is_sent_is_what_the_plan_says(
    world_size: int, mask: Mask | None, strategy: str
) -> None:
    cases = [
        Case(64, dtype=torch.bfloat16, mask=mask, strategy=strategy),
        Case(61, heads=4, kv_heads=1, batch=2, mask=mask, strategy=strategy, kind="striped"),
        Case(30, kv_len=75, dtype=torch.float64, mask=mask, strategy=strategy, kind="contiguous"),
        Case(61, mask=mask, strategy=strategy, needs_grad=(False, True, False)),
    ]

    def count(ctx: Context) -> None:
        for case in cases:
            inputs = case.inputs()
            layout, kv_layout = case.layouts(ctx)
            sides = (layout, kv_layout, kv_layout)
            q, k, v = (
                side.shard(x).requires_grad_(need)
                for side, x, need in zip(sides, inputs[:3], case.needs_grad, strict=True)
            )
            explanation = burst_rt.explain(
                q, k, v, mask=mask, layout=layout, kv_layout=kv_layout, strategy=strategy
            )
            before = ctx.stats()
            out = burst_rt.burst_attention(
                q, k, v, mask=mask, layout=layout, kv_layout=kv_layout, strategy=strategy
            )
            between = ctx.stats()
            assert ctx.runtime.transport.bytes_sent == between.bytes_sent
            assert between.bytes_sent - before.bytes_sent == explanation.forward.bytes_sent()
            out.sum().backward()
            after = ctx.stats()
            assert explanation.backward is not None
            assert after.bytes_sent - between.bytes_sent == explanation.backward.bytes_sent()
            assert after.calls == before.calls + 2
        totals = torch.tensor([ctx.stats().bytes_sent, -ctx.stats().bytes_received])
        assert ctx.all_reduce(totals).sum() == 0

    burst_rt.run_local(world_size, count)


def test_explain_says_what_was_chosen_and_why() -> None:
    def explain(ctx: Context) -> list[str]:
        layout = ctx.layout(64)
        q = torch.zeros(1, 32, 4, 128, dtype=torch.bfloat16, requires_grad=True)
        k = torch.zeros(1, 32, 2, 128, dtype=torch.bfloat16, requires_grad=True)
        said = []
        for kv in (q, k):
            explanation = burst_rt.explain(q, kv, kv, layout=layout)
            assert ctx.runtime.transport.bytes_sent == 0
            assert explanation.backward is not None
            assert explanation.backward.choice.strategy == ("burst" if kv is q else "ring-kv")
            said.append(str(explanation))
        assert burst_rt.explain(q.detach(), k.detach(), k.detach(), layout=layout).backward is None
        return said

    even, grouped = burst_rt.run_local(2, explain)[0]
    e = 32 * 4 * 128
    assert "forward: strategy ring-kv; k, v travel" in even
    assert "backward: strategy burst; q, dout, rows, dq travel" in even
    assert f"ring-kv {2 * 12 * e:,}" in even
    assert f"burst {2 * (8 * e + 8 * e // 128):,}; this rank sends {8 * e + 8 * e // 128:,}" in even
    assert "backward: strategy ring-kv; k, v, dk, dv travel" in grouped
    assert f"ring-kv {2 * 12 * e // 2:,}" in grouped
    assert "kernel cpu" in even


def test_the_module_is_the_function() -> None:
    def run(ctx: Context) -> None:
        layout = ctx.layout(40)
        generator = torch.Generator().manual_seed(ctx.rank)
        q, k, v = (torch.randn(1, 20, 2, 16, generator=generator) for _ in range(3))
        module = burst_rt.BurstAttention(layout, causal=True, scale=0.2, strategy="burst")
        expected = burst_rt.burst_attention(q, k, v, causal=True, scale=0.2, layout=layout)
        assert isinstance(expected, torch.Tensor)
        assert torch.equal(module(q, k, v), expected)
        assert torch.equal(
            burst_rt.BurstAttention(causal=True, scale=0.2)(q, k, v, layout), expected
        )
        assert not list(module.parameters())
        assert "mask=causal, strategy=burst" in repr(module)
        other = ctx.layout(80)
        k2 = torch.randn(1, 40, 2, 16, generator=generator)
        module_out = burst_rt.BurstAttention(layout)(q, k2, k2, kv_layout=other)
        called_out = burst_rt.burst_attention(q, k2, k2, layout=layout, kv_layout=other)
        assert torch.equal(module_out, called_out)

    burst_rt.run_local(2, run)


def test_a_custom_spec_goes_through_the_function() -> None:
    """`BurstAttentionFunction` and `make_call` are public: what `burst_attention` itself calls."""

    def run(ctx: Context) -> None:
        layout = ctx.layout(40)
        q = torch.randn(1, 20, 2, 16, requires_grad=True)
        call = burst_rt.make_call(q, q, q, causal=True, layout=layout)
        assert call == burst_rt.make_call(q, q, q, mask=Causal(), layout=layout)
        out, lse = burst_rt.BurstAttentionFunction.apply(q, q, q, call)  # type: ignore[no-untyped-call]
        expected = burst_rt.burst_attention(q, q, q, causal=True, layout=layout, return_lse=True)
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])

    burst_rt.run_local(2, run)


def test_every_kind_of_program_has_the_classes_that_run_it() -> None:
    programs: tuple[type[Program], ...] = (Ring, Hybrid, RingNaive)
    for program in programs:
        for run in run_types(program):
            assert run.__module__.rpartition(".")[2] == program.__module__.rpartition(".")[2]

    class Unheard(Ring):
        pass

    with pytest.raises(InternalError, match=r"no class runs Unheard .* expected a key of RUNS"):
        run_types(Unheard)


def test_the_options_of_a_call_are_the_same_wherever_they_are_listed() -> None:
    """`Options` is the list; type checkers need it again as a TypedDict and as parameters."""
    fields = set(Options._fields)
    assert OptionArguments.__annotations__.keys() | {"layout", "return_lse"} == fields
    parameters = inspect.signature(burst_rt.burst_attention).parameters
    assert parameters.keys() - {"q", "k", "v"} == fields
    assert {name: parameters[name].default for name in Options._field_defaults} == (
        Options._field_defaults
    )


def test_options_that_differ_make_calls_that_differ() -> None:
    """Numbers of another type are other options, and so are tensors of another look."""

    def run(ctx: burst_rt.Context) -> None:
        layout = ctx.layout(8)
        ones = torch.ones(2)
        given: list[dict[str, Any]] = [
            {}, {"causal": True}, {"scale": 1}, {"scale": 1.0}, {"scale": True}, {"softcap": 1},
            {"dropout_p": 0}, {"strategy": "burst"}, {"return_lse": True}, {"alibi_slopes": ones},
            {"sinks": ones}, {"sinks": ones.double()}, {"kv_layout": ctx.layout(8, "striped")},
        ]  # fmt: skip
        options = [Options(layout, **changes) for changes in given]
        keys = [key_of(choice, choice.mask) for choice in options]
        assert len(set(keys)) == len(keys)
        assert key_of(Options(layout, sinks=torch.zeros(2)), None) in keys  # values do not count

    burst_rt.run_local(1, run)
