"""Recurrences over ranks against the float64 spec, which goes one token at a time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from recurrences import (
    KINDS,
    Drawn,
    attend,
    drawn,
    drawn_along_a_tree,
    errors,
    truth,
    truth_of_paths,
)
from torch.utils.flop_counter import FlopCounterMode

import burst_rt
from burst_rt import Context, Documents, PrefixTree, recurrence
from burst_rt.errors import ContractMismatch, InputError
from burst_rt.planning.segments import Segment, StageFlops, Way

_ALLOWED = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def _run(case: Drawn, dtype: torch.dtype = torch.float32) -> list[dict[str, torch.Tensor]]:
    return burst_rt.run_local(case.world_size, lambda ctx: attend(ctx, case, dtype), timeout_s=60)


def _rounded(case: Drawn, dtype: torch.dtype) -> Drawn:
    """The case with the inputs that a call of this type gets."""
    tokens, shared = (
        {name: x.to(dtype).double() for name, x in some.items()}
        for some in (case.tokens, case.shared)
    )
    state = None if case.state is None else case.state.to(dtype).double()
    return replace(case, tokens=tokens, shared=shared, state=state)


@pytest.mark.parametrize(
    "seeds", [range(64), pytest.param(range(64, 560), marks=pytest.mark.long)], ids=["few", "many"]
)
def test_drawn_calls_against_the_spec(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths that divide by nothing, documents of one token and across ranks, decays near 0 and 1,
    states in and out, worlds of 1 to 5; out, state and every gradient.
    """
    monkeypatch.setenv("BURST_RT_POISON", "1")
    # So that segments have several parts.
    monkeypatch.setattr("burst_rt.recurrence.chunked._CHUNKS_TOGETHER", 1)
    for seed in seeds:
        case = drawn(seed)
        for found in _run(case)[:1]:
            wrong = {name: e for name, e in errors(found, truth(case)).items() if not e < 1e-5}
            assert not wrong, (case.about, wrong)


@pytest.mark.parametrize(
    "seeds", [range(48), pytest.param(range(48, 480), marks=pytest.mark.long)], ids=["few", "many"]
)
def test_calls_along_drawn_trees(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each path by itself: several trees, nodes of one token and of none, nodes over several ranks,
    padding, worlds of 1 to 4, all layouts of runs; out and every gradient.
    """
    monkeypatch.setattr("burst_rt.recurrence.chunked._CHUNKS_TOGETHER", 1)
    for seed in seeds:
        _check_along_a_tree(drawn_along_a_tree(seed))


def _check_along_a_tree(case: Drawn) -> None:
    for found in _run(case)[:1]:
        wrong = {name: e for name, e in errors(found, truth_of_paths(case)).items() if not e < 1e-5}
        assert not wrong, (case.about, wrong)


@pytest.mark.parametrize("kind", KINDS[:-1])  # a convolution's states are not folded
def test_segments_of_trees_are_folded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that go on, in both directions, though the estimate would fold few of short rows."""
    folded = []

    def ways(
        segments: tuple[Segment, ...], _: StageFlops, __: int | None, *, forward: bool
    ) -> tuple[Way, ...]:
        befores = {segment.before for segment in segments}
        on = [
            number in befores if forward else segment.before is not None
            for number, segment in enumerate(segments)
        ]
        folded.append(sum(on))
        return tuple(Way.FOLDED if each else Way.RELAYED for each in on)

    monkeypatch.setattr("burst_rt.recurrence.call.ways_of", ways)
    for seed in range(3):
        _check_along_a_tree(drawn_along_a_tree(seed, kind, 3))
    assert max(folded) > 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_types_of_inputs(kind: str, dtype: torch.dtype) -> None:
    for seed in range(3):
        case = _rounded(drawn(seed, kind, 3), dtype)
        worst = max(errors(_run(case, dtype)[0], truth(case)).values())
        assert worst < _ALLOWED[dtype], (case.about, worst)


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_goes_on_by_itself(kind: str) -> None:
    """Without a layout: a text in several calls, each of which begins from the last one's state."""
    for seed in range(8):
        case = replace(drawn(seed, kind, 1), returns_state=True)
        count, state, outs = case.seq_len, case.state, []
        for at in (slice(1), slice(1, 4), slice(4, count)):
            tokens = {name: x[:, at].float() for name, x in case.tokens.items()}
            if next(iter(tokens.values())).shape[1]:
                begins = None if case.documents is None else case.begins()[:, at]
                out, state = getattr(recurrence, case.function)(
                    **tokens, **{name: x.float() for name, x in case.shared.items()},
                    **case.options, layout=None, documents=begins, return_state=True,
                    initial_state=None if state is None else state.float(),
                )  # fmt: skip
                outs.append(out)
        assert state is not None
        expected = {name: x for name, x in truth(case).items() if name in ("out", "state")}
        found = {"out": torch.cat(outs, 1), "state": state}
        assert all(e < 1e-5 for e in errors(found, expected).values()), case.about


def test_what_needs_a_layout() -> None:
    x = torch.randn(1, 20, 4)
    whole = recurrence.linear_recurrence(x, -x.abs(), layout=None, documents=Documents([8, 12]))
    last = recurrence.linear_recurrence(x[:, 8:], -x[:, 8:].abs(), layout=None)
    torch.testing.assert_close(whole[:, 8:], last)
    with pytest.raises(InputError, match="layout: expected one where tensors need gradients"):
        recurrence.linear_recurrence(x.requires_grad_(), -x.detach().abs(), layout=None)
    with pytest.raises(InputError, match="layout: expected one beside a PrefixTree, got None"):
        recurrence.linear_recurrence(x.detach(), -x.detach().abs(), layout=None, documents=_TREE)
    with pytest.raises(InputError, match="got None: linear_recurrence is then local"):
        recurrence.explain_recurrence(
            recurrence.linear_recurrence, x.detach(), -x.detach().abs(), layout=None
        )


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_every_time(kind: str) -> None:
    case = drawn(7, kind, 4)
    first, again = _run(case), _run(case)
    for rank in first[1:] + again:
        assert rank.keys() == first[0].keys()
        assert all(torch.equal(x, first[0][name]) for name, x in rank.items()), case.about


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tree", [True, False])
def test_the_same_bits_whichever_rank_is_late(tree: bool, kind: str) -> None:
    """What segments share is added up in one order."""
    cases = ((drawn_along_a_tree if tree else drawn)(seed, kind, 3) for seed in range(200))
    wanted = "balanced" if tree else "zigzag"
    case = next(
        x for x in cases
        if x.seq_len > 60 and x.layout == wanted and (len(x.paths) > 5 or not tree)
    )  # fmt: skip

    def rank(ctx: Context, late: int) -> dict[str, torch.Tensor]:
        with pytest.MonkeyPatch.context() as patch:
            if ctx.rank == late:  # ranks are threads: the first to come waits, then the others
                patch.setattr(ctx.runtime.machine, "take", _slowly(ctx.runtime.machine.take))
            return attend(ctx, case)

    runs = [
        burst_rt.run_local(3, lambda ctx: rank(ctx, late), timeout_s=60)  # noqa: B023
        for late in (0, 1, 2, 2)
    ]
    for run in runs:
        for found in run:
            assert all(torch.equal(x, runs[0][0][name]) for name, x in found.items()), case.about


def _slowly(function: Any) -> Any:
    def slow(*args: Any) -> Any:
        time.sleep(0.05)
        return function(*args)

    return slow


def test_the_states_of_a_tree_are_what_is_sent() -> None:
    """One to each rank with answers, however many; the gradients come back as their sum."""
    tree = PrefixTree([400, *[50] * 8], [-1, *[0] * 8])
    state = 2 * 8 * 8 * 4

    def rank(ctx: Context) -> tuple[int, int]:
        layout = ctx.layout(800, "contiguous")
        given = _arguments(layout, documents=tree)
        given["v"].requires_grad_()
        explained = recurrence.explain_recurrence(recurrence.gated_delta_rule, **given)
        assert "10 segments along the paths of a tree" in str(explained)
        plans = (explained.forward, explained.backward)
        before, sent = ctx.stats().bytes_sent, []
        out = recurrence.gated_delta_rule(**given)
        assert isinstance(out, torch.Tensor)
        sent.append(ctx.stats().bytes_sent - before)
        out.sum().backward()
        sent.append(ctx.stats().bytes_sent - before - sent[0])
        assert [plan.bytes_sent() for plan in plans if plan] == sent
        assert [plan.program.wire_bytes() for plan in plans if plan] == [3 * state] * 2
        return sent[0], sent[1]

    # The question is on ranks 0 and 1, the answers are on ranks 2 and 3.
    sent = burst_rt.run_local(4, rank)
    assert sent == [(state, 0), (2 * state, state), (0, state), (0, state)]


def test_flops_of_a_forward_are_those_of_its_plan() -> None:
    def rank(ctx: Context) -> None:
        given = _arguments(ctx.layout(800, "contiguous"))
        plan = recurrence.explain_recurrence(recurrence.gated_delta_rule, **given).forward
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            recurrence.gated_delta_rule(**given)
        assert counter.get_total_flops() == plan.flops > 0

    burst_rt.run_local(2, rank)


def test_both_ways_of_the_state_are_taken() -> None:
    def ways(world_size: int) -> set[Way]:
        def rank(ctx: Context) -> set[Way]:
            layout = ctx.layout(4096, "contiguous")
            tokens = layout.shard_len
            q, k, v = (torch.randn(1, tokens, 1, 8) for _ in range(3))
            g, beta = -torch.rand(1, tokens, 1), torch.rand(1, tokens, 1)
            recurrence.gated_delta_rule(q, k, v, g, beta, layout=layout, use_qk_l2norm=True)
            (plan,) = ctx.attention.kept[recurrence.RecurrencePlan].values()
            assert plan.bytes_sent() == (8 * 8 * 4 if ctx.rank < world_size - 1 else 0)
            assert f"this rank sends {plan.bytes_sent():,}" in plan.explain()
            return set(plan.program.ways)

        return burst_rt.run_local(world_size, rank)[0]

    assert ways(2) == {Way.RELAYED}
    assert ways(8) == {Way.RELAYED, Way.FOLDED}


@pytest.mark.parametrize("kind", KINDS)
def test_explained_memory_grows_with_the_batch(kind: str) -> None:
    case = replace(drawn(5, kind, 2), documents=None)

    def rank(ctx: Context) -> None:
        layout = ctx.layout(case.seq_len)
        tokens = {name: layout.shard(x).float() for name, x in case.tokens.items()}
        shared = {name: x.float() for name, x in case.shared.items()}
        function = getattr(recurrence, case.function)
        next(iter(tokens.values())).requires_grad_()
        explained = recurrence.explain_recurrence(function, **tokens, **shared, layout=layout)
        assert f"{explained.memory[0]:,} bytes" in str(explained)
        longer = recurrence.explain_recurrence(
            function, **{name: torch.cat([x, x], 0) for name, x in tokens.items()}, **shared,
            layout=layout,
        )  # fmt: skip
        for once, twice in zip(explained.memory, longer.memory, strict=True):
            assert 1.6 * once < twice < 2.4 * once

    burst_rt.run_local(2, rank)


def test_calls_take_the_memory_that_is_planned() -> None:
    settings = {"BURST_RT_POISON": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    program = [sys.executable, str(Path(__file__).parents[1] / "peaks.py")]
    done = subprocess.run(program, env=os.environ | settings, capture_output=True, text=True)
    ratios = [line.rsplit(maxsplit=1) for line in done.stdout.splitlines()]
    assert len(ratios) == 20, done.stderr
    assert all(0.9 < float(ratio) < 1.1 for _, ratio in ratios), done.stdout


# The compiler asks for .grad after a cut.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_programs_are_cut_at_a_call() -> None:
    parts = []

    def counted(graph: Any, _: Any) -> Any:
        parts.append(graph)
        return graph

    with burst_rt.init(device="cpu") as ctx:
        layout = ctx.layout(64)
        q, k, v = (torch.randn(1, 64, 2, 8, requires_grad=True) for _ in range(3))
        g = -torch.rand(2)

        def program(x: torch.Tensor) -> torch.Tensor:
            mixed = recurrence.linear_attention(q * 2, k, x.relu(), g, layout=layout)
            assert isinstance(mixed, torch.Tensor)
            return mixed.square().sum()

        eager = torch.autograd.grad(program(v), (q, v))
        compiled = torch.autograd.grad(torch.compile(program, backend=counted)(v), (q, v))
    assert all(map(torch.equal, eager, compiled))
    assert len(parts) == 2


def test_only_what_is_needed_gets_gradients() -> None:
    def rank(ctx: Context) -> None:
        layout = ctx.layout(50)
        q, k, v = (torch.randn(1, layout.shard_len, 2, 8) for _ in range(3))
        g, beta = -torch.rand(1, layout.shard_len, 2), torch.rand(1, layout.shard_len, 2)
        v.requires_grad_()
        out = recurrence.gated_delta_rule(q, k, v, g, beta, layout=layout, use_qk_l2norm=True)
        assert isinstance(out, torch.Tensor)
        out.sum().backward()
        assert v.grad is not None
        assert q.grad is k.grad is None
        with torch.no_grad():
            silent = recurrence.gated_delta_rule(q, k, v, g, beta, layout=layout)
        assert isinstance(silent, torch.Tensor)
        assert not silent.requires_grad

    burst_rt.run_local(2, rank)


def test_kernels_by_name() -> None:
    """On a CPU flash-linear-attention's is refused, but for recurrences that it never serves."""

    def rank(ctx: Context) -> None:
        layout = ctx.layout(20)
        x = torch.zeros(1, layout.shard_len, 1, 16, dtype=torch.bfloat16)
        with pytest.raises(InputError, match="'fla' was asked for, but the fla kernel takes CUDA"):
            recurrence.linear_attention(x, x, x, x[..., 0], layout=layout)
        recurrence.linear_recurrence(x[:, :, 0], x[:, :, 0], layout=layout)

    burst_rt.run_local(2, rank, recurrence_kernel="fla")
    with pytest.raises(InputError, match=r"recurrence_kernel must be 'auto' or one of .*'mamba'"):
        burst_rt.run_local(1, rank, recurrence_kernel="mamba")


def test_second_derivatives_are_refused_on_every_rank() -> None:
    def rank(ctx: Context) -> None:
        layout = ctx.layout(20)
        x = torch.randn(1, layout.shard_len, 4, requires_grad=True)
        out = recurrence.linear_recurrence(x, -x.detach().abs(), layout=layout)
        assert isinstance(out, torch.Tensor)
        with pytest.raises(InputError, match="linear_recurrence: second derivatives"):
            torch.autograd.grad(out.sum(), x, create_graph=ctx.rank == 0)

    burst_rt.run_local(1, rank)
    burst_rt.run_local(2, rank, timeout_s=60)


_TREE = PrefixTree([5, 9, 6], [-1, 0, 0])


def _arguments(own: Any, /, **changes: Any) -> dict[str, Any]:
    tokens = own.shard_len
    q, k, v = (torch.randn(1, tokens, 2, 8) for _ in range(3))
    g, beta = -torch.rand(1, tokens, 2), torch.rand(1, tokens, 2)
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta, "layout": own} | changes


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"v": torch.randn(1, 3, 2, 8)}, r"v must be \[batch, this rank's tokens 10, heads, V\]"),
        ({"q": torch.randn(1, 10, 2, 4)}, r"k must be \[batch 1, .*key heads 2, K 4\]"),
        ({"k": [1.0]}, "k: expected Tensor; got list"),
        ({"beta": torch.ones(1, 10, 2, dtype=torch.int64)}, "beta must be a dense tensor of"),
        ({"v": torch.randn(1, 10, 3, 8), "g": -torch.rand(1, 10, 3), "beta": torch.rand(1, 10, 3)},
         "multiple of the number of key heads .*, got 3 and 2"),
        ({"scale": "1"}, "scale: expected float .*; got '1'"),
        ({"initial_state": torch.zeros(1, 2, 8, 7)}, r"initial_state must be \[batch 1, heads 2"),
        ({"documents": [5, 5]}, "documents: expected Documents .* PrefixTree .*; got list"),
        ({"documents": torch.zeros(1, 9, dtype=torch.bool)}, r"got \(1, 9\) of torch.bool"),
        ({"documents": burst_rt.Documents([3, 3])}, "documents must be those of the whole"),
        ({"documents": PrefixTree([9, 9], [-1, 0])}, "the whole row's PrefixTree; .* 18 keys"),
        ({"documents": _TREE.window(3)}, r"without a window .*window\(3\); take its .unlimited"),
        ({"documents": _TREE, "return_state": True}, "return_state: expected False beside a Pre"),
        ({"documents": _TREE, "initial_state": torch.zeros(1, 2, 8, 8)},
         "initial_state: expected None beside a PrefixTree"),
        ({"layout": "zigzag"}, "layout: expected ContextLayout .*; got 'zigzag'"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_on_every_rank(changes: dict[str, Any], why: str) -> None:
    def rank(ctx: Context) -> None:
        layout = ctx.layout(20)
        wrong = changes if ctx.rank == 1 else {}
        with pytest.raises(InputError, match=f"gated_delta_rule: .*{why}"):
            recurrence.gated_delta_rule(**_arguments(layout, **wrong))
        recurrence.gated_delta_rule(**_arguments(layout))  # nothing was sent, so all goes on

    burst_rt.run_local(2, rank, timeout_s=30)


def test_what_ranks_do_not_agree_on() -> None:
    def rank(ctx: Context) -> None:
        layout = ctx.layout(20)
        with pytest.raises(ContractMismatch, match=r"options: .*scale=2\.0"):
            recurrence.gated_delta_rule(**_arguments(layout, scale=1.0 + ctx.rank))
        tree = _TREE if ctx.rank else None
        with pytest.raises(ContractMismatch, match=r"documents: .*PrefixTree\(\[5, 9, 6\]"):
            recurrence.gated_delta_rule(**_arguments(layout, documents=tree))

    burst_rt.run_local(2, rank, timeout_s=30)


def test_striped_layouts_are_refused() -> None:
    def rank(ctx: Context) -> None:
        layout = ctx.layout(20, "striped")
        for documents in (None, _TREE):
            with pytest.raises(
                InputError, match="a recurrence takes layouts of consecutive tokens"
            ):
                recurrence.gated_delta_rule(**_arguments(layout, documents=documents))

    burst_rt.run_local(2, rank, timeout_s=30)


def test_convolutions_know_what_they_cannot_do() -> None:
    def rank(ctx: Context) -> None:
        layout = ctx.layout(20)
        x = torch.randn(1, layout.shard_len, 4)
        with pytest.raises(
            InputError, match="activation must be None, 'silu' or 'swish', got 'gelu'"
        ):
            recurrence.causal_conv1d(x, torch.randn(4, 3), activation="gelu", layout=layout)
        with pytest.raises(InputError, match="K at least 2, got K = 1"):
            recurrence.causal_conv1d(x, torch.randn(4, 1), layout=layout)

    burst_rt.run_local(1, rank)


def test_checkpointing_runs_no_recurrence_twice() -> None:
    """`burst_rt.checkpoint` keeps results and states: the same gradients, and as many calls."""

    def rank(ctx: Context) -> None:
        layout = ctx.layout(70)
        gen = torch.Generator().manual_seed(ctx.rank)
        x = torch.randn(2, layout.shard_len, 3 * 8, generator=gen).requires_grad_()
        weight = torch.randn(3 * 8, 4, generator=torch.Generator().manual_seed(9)).requires_grad_()

        def layer(x: torch.Tensor) -> torch.Tensor:
            mixed = recurrence.causal_conv1d(x.tanh(), weight, None, "silu", layout=layout)
            assert isinstance(mixed, torch.Tensor)
            q, k, v = mixed.unflatten(2, (3, 1, 8)).unbind(2)
            g, beta = -v[..., 0].sigmoid(), k[..., 0].sigmoid()
            out = recurrence.gated_delta_rule(
                q, k, v, g, beta, layout=layout, use_qk_l2norm=True, return_state=True
            )
            result: torch.Tensor = out[0].sin() + out[1].sum()
            return result

        grads, calls = [], []
        for run in (layer, lambda x: burst_rt.checkpoint(layer, x)):
            before = ctx.stats().calls
            grads.append(torch.autograd.grad(run(x).square().sum(), (x, weight)))
            calls.append(ctx.stats().calls - before)
        assert calls == [4, 4]
        assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))

    burst_rt.run_local(2, rank, timeout_s=60)


def test_messages_move_on_between_the_parts_of_a_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that comes while a rank computes is not left until all of a stage is done."""
    monkeypatch.setattr("burst_rt.recurrence.chunked._CHUNKS_TOGETHER", 1)
    asked = []
    monkeypatch.setattr("burst_rt.drivers.Progress.__call__", lambda self: asked.append(self))
    parts = 3

    def rank(ctx: Context) -> None:
        layout = ctx.layout(64 * parts - 5)
        q, k, v = (torch.randn(1, layout.shard_len, 1, 4) for _ in range(3))
        g = -torch.rand(1, layout.shard_len, 1)
        out = recurrence.linear_attention(q, k, v.requires_grad_(), g, layout=layout)
        out.sum().backward()

    burst_rt.run_local(1, rank)
    assert len(asked) == 2 * 3 * parts  # prepare, advance and emit, forward and backward


def test_a_backward_that_one_rank_cannot_make_is_every_ranks_error() -> None:
    def run(ctx: Context) -> None:
        layout = ctx.layout(8, "contiguous")
        weight = torch.ones(3, 2, requires_grad=True)
        for spoil in (True, False):
            x = torch.ones(1, layout.shard_len, 3, requires_grad=True) * 1
            out: Any = recurrence.causal_conv1d(x, weight, layout=layout)
            if spoil:
                if ctx.rank == 0:
                    x.detach().zero_()
                with pytest.raises(InputError, match=r"rank 0: .*modified by an inplace operation"):
                    out.sum().backward()
            else:
                one = ctx.rank == 1
                several = torch.ones(out.shape if one else (2, *out.shape))
                with pytest.raises(InputError, match=r"batched gradients .* are not supported"):
                    torch.autograd.grad(out, weight, several, is_grads_batched=not one)
        ctx.all_reduce(torch.ones(1))  # the context stays usable

    burst_rt.run_local(2, run)
