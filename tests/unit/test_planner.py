"""Plans: cached and bounded, verified for all ranks, and the memory they announce is the memory a
run takes.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from graphs import problem

import burst_rt
from burst_rt import Causal, Context, Documents, Full, Mask
from burst_rt.attention import planner as planner_module
from burst_rt.attention import recent
from burst_rt.attention.execute import BackwardRun, Binding, ForwardRun, run_types
from burst_rt.attention.planner import Plan, PlanKey, Planner
from burst_rt.attention.recent import KeptEntries, Recent
from burst_rt.drivers import Progress
from burst_rt.errors import InputError, InternalError
from burst_rt.kernels import QKV, Results
from burst_rt.planning.caches import kept_results
from burst_rt.planning.layouts import make_layout
from burst_rt.planning.strategies import Ring
from burst_rt.scheduler import Graph, Transfer, check_share


def _key(
    world_size: int = 3,
    *,
    seq_len: int = 60,
    forward: bool = False,
    mask: Mask | None = None,
    kernel: str = "auto",
) -> PlanKey:
    p = problem(seq_len, seq_len, world_size, mask=mask or Causal())
    return PlanKey(forward, p, "auto", kernel, torch.float32, torch.device("cpu"))


def test_a_plan_is_made_once() -> None:
    planner = Planner(1)
    assert planner.plan(_key()) is planner.plan(_key())
    others = [
        _key(forward=True),
        _key(seq_len=61),
        _key(mask=Full()),
        _key(kernel="naive"),
        _key()._replace(strategy="ring-kv"),
    ]
    assert len({id(planner.plan(key)) for key in (_key(), *others)}) == 6


def test_the_cache_forgets_what_was_not_used_for_longest() -> None:
    planner = Planner(0, capacity=2)
    keys = [_key(seq_len=n) for n in (10, 20, 30)]
    first, second = planner.plan(keys[0]), planner.plan(keys[1])
    assert planner.plan(keys[0]) is first
    planner.plan(keys[2])  # the second goes
    assert planner.plan(keys[0]) is first
    assert planner.plan(keys[1]) is not second
    assert len(planner._plans) == 2


@pytest.mark.parametrize(
    ("strategy", "forward"),
    [(name, False) for name in ("ring-kv", "burst", "direct", "hybrid:2")] + [("ring-q", True)],
)
def test_a_way_is_verified_once(
    strategy: str, forward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fresh documents make fresh tables; a graph is only verified where rows go another way."""
    verified: list[int] = []

    def count(own: Graph, stated: Iterable[Transfer]) -> None:
        verified.append(own.rank)
        check_share(own, stated)

    monkeypatch.setattr(planner_module, "check_share", count)
    planner = Planner(1)

    def plan(*lengths: int) -> Plan:
        mask = Causal() & Documents(lengths)
        key = _key(4, seq_len=8192, forward=forward, mask=mask)
        return planner.plan(key._replace(strategy=strategy))

    first = plan(3000, 5192)
    again = plan(3010, 5182)  # within the same stretches of rows
    assert verified == [1]
    assert again.choice.program != first.choice.program
    assert again.graph.peers == first.graph.peers
    pieces = [[getattr(t.op, "pieces", ()) for t in p.graph.tasks] for p in (first, again)]
    assert pieces[0] != pieces[1]
    plan(*[64] * 128)  # no row is needed elsewhere
    assert verified == [1, 1]


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("world_size", [1, 3, 8, 66])
def test_every_rank_finds_its_own_graph(world_size: int, forward: bool) -> None:
    key = _key(world_size, seq_len=2 * world_size + 1, forward=forward)
    for rank in {0, world_size // 2, world_size - 1}:
        plan = Planner(rank).plan(key)
        assert plan.rank == plan.graph.rank == rank
        assert plan.graph.world_size == world_size
        assert plan.graph == plan.choice.program.graph(rank)


@pytest.mark.parametrize("world_size", [3, 66])
def test_graphs_that_do_not_fit_together_are_not_run(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from burst_rt.planning.strategies.ring import Ring

    build = Ring.graph

    def off_by_one(ring: Ring, rank: int, *_: object, **__: object) -> object:
        layout = make_layout(
            "zigzag", ring.problem.q_layout.seq_len + 2 * world_size * (rank == 1), world_size
        )
        other = replace(ring.problem, q_layout=layout, kv_layout=layout)
        return build(replace(ring, problem=other), rank)

    monkeypatch.setattr(Ring, "graph", off_by_one)
    with pytest.raises(InternalError, match=r"rank 1: .* has .* bytes .* stated is"):
        Planner(1).plan(_key(world_size, seq_len=4 * world_size))


def test_what_no_kernel_can_do_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"kernel must be 'auto' or one of .*, got 'cuda'"):
        Planner(0).plan(_key(kernel="cuda"))

    def run(ctx: Context) -> None:
        x = torch.zeros(1, 5, 1, 16)
        with pytest.raises(InputError, match=r"rank 0: kernel 'triton' was asked for, but"):
            burst_rt.burst_attention(x, x, x, layout=ctx.layout(10))

    burst_rt.run_local(2, run, kernel="triton")


def test_a_backward_is_planned_anew_where_it_must_be_deterministic() -> None:
    def call(ctx: Context) -> list[bool]:
        x = torch.zeros(1, 8, 2, 16, requires_grad=True)
        made = burst_rt.make_call(x, x, x, layout=ctx.layout(8))
        plain = made.backward_plan
        torch.use_deterministic_algorithms(True)
        try:
            asked = made.backward_plan
        finally:
            torch.use_deterministic_algorithms(False)
        return [plain is asked, plain is made.backward_plan, asked.key.deterministic]

    assert burst_rt.run_local(1, call) == [[False, True, True]]


def test_two_threads_may_keep_what_is_recent() -> None:
    kept: Recent[int, int] = Recent(3)

    def keep() -> None:
        for i in range(20_000):
            kept.put(i, i)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as pool:
            for job in [pool.submit(keep) for _ in range(2)]:
                job.result()
    finally:
        sys.setswitchinterval(before)
    assert len(kept) == 3


def test_few_masks_with_large_tables_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that chooses its blocks anew in each step holds the tables of its last steps."""
    for module in (recent, planner_module):
        monkeypatch.setattr(module, "MOST_TABLE_BYTES", 100_000)

    def run(ctx: Context) -> None:
        x, layout, masks = torch.ones(1, 64, 1, 8), ctx.layout(64), []
        for shown in range(1, 61):
            mask = burst_rt.BlockSparse(torch.ones(64, 64).tril(-shown) == 0, 1)
            call = burst_rt.make_call(x, x, x, layout=layout, mask=mask & burst_rt.Causal())
            assert mask.table_bytes == 64**2
            assert call.forward_plan.table_bytes > 64**2  # and the runs
            masks.append(weakref.ref(mask))
            del mask, call
        gc.collect()
        alive = [made() is not None for made in masks]
        # Of the latest masks planning keeps some, too.
        assert sum(alive) < 30
        assert alive[-1]

    burst_rt.run_local(1, run)


def test_few_results_are_kept_for_large_masks() -> None:
    small, large = Causal(), burst_rt.BlockSparse(torch.ones(1024, 1025) == 1, 1)
    made: list[tuple[Mask, int]] = []

    @kept_results(16, lambda mask, _: mask)
    def make(mask: Mask, number: int) -> int:
        made.append((mask, number))
        return number

    for mask, kept in ((small, 16), (large, 4)):
        for turn in range(2):
            assert [make(mask, number) for number in range(kept)] == [*range(kept)]
            assert len(made) == kept, turn
        make(mask, kept)
        make(mask, 0)  # the oldest had to go
        assert len(made) == kept + 2
        made.clear()
        make.forget()
        make(mask, kept)
        assert made.pop() == (mask, kept)


def _runs(
    ctx: Context, dtype: torch.dtype, batch: int, strategy: str
) -> list[tuple[Plan, ForwardRun | BackwardRun]]:
    """Both directions of a call, bound to tensors as they are when it starts."""
    layout = ctx.layout(64 * ctx.world_size)
    q, k, v = (
        torch.zeros(batch, 64, heads, 32, dtype=dtype, requires_grad=True) for heads in (4, 2, 2)
    )
    call = burst_rt.make_call(q, k, v, causal=True, layout=layout, strategy=strategy)
    q, k, v = (x.detach() for x in (q, k, v))
    forward, backward = call.forward_plan, call.backward_plan
    given: dict[str, Any] = {
        "machine": ctx.runtime.machine, "scale": None, "progress": Progress(), "poison": False,
        "qkv": QKV(q, k, v),
    }  # fmt: skip
    first = run_types(Ring).forward(Binding(plan=forward, **given))
    results = Results(first.out, first.lse, torch.ones_like(q), None)
    second = BackwardRun(Binding(plan=backward, **given, results=results))
    return [(forward, first), (backward, second)]


@pytest.mark.parametrize("strategy", ["burst", "ring-kv", "ring-q"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_slots_are_as_large_as_announced(
    world_size: int, dtype: torch.dtype, batch: int, strategy: str
) -> None:
    def check(ctx: Context) -> list[int]:
        sizes = []
        for plan, run in _runs(ctx, dtype, batch, strategy):
            taken = sum(slot.nbytes for slot in run.storage.values())
            assert taken == plan.memory().slots
            sizes.append(taken)
            # What travels must be contiguous: blocks of more than one batch row are copied.
            assert (plan.memory().copies > 0) == (batch > 1 and world_size > 1)
        return sizes

    sizes = burst_rt.run_local(world_size, check)
    if world_size == 1:
        assert sizes == [[0, 0]]


def test_memory_does_not_grow_with_the_world() -> None:
    def announced(ctx: Context) -> list[int]:
        return [plan.memory().total for plan, _ in _runs(ctx, torch.bfloat16, 1, "burst")]

    # From three ranks on both slots of every message are used.
    by_world = [burst_rt.run_local(world_size, announced)[0] for world_size in (3, 4, 8)]
    assert by_world[0] == by_world[1] == by_world[2]


def test_what_is_kept_is_told_apart_by_its_type_and_let_go_with_the_context() -> None:
    kept = KeptEntries(2)
    for i in range(3):
        kept[int].put("key", i)
        kept[str].put(i, str(i))
    assert (dict(kept[int]), dict(kept[str])) == ({"key": 2}, {1: "1", 2: "2"})

    def call(ctx: Context) -> tuple[int, int]:
        x = torch.zeros(1, 8, 2, 16)
        calls = burst_rt.make_call(x, x, x, layout=ctx.layout(8)).attention.kept
        before = len(calls[burst_rt.Call])
        ctx.close()
        return before, len(calls[burst_rt.Call])

    assert burst_rt.run_local(1, call) == [(1, 0)]
