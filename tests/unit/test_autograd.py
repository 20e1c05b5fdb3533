"""Attention as torch sees it: custom ops, gradients, what is saved, what is refused, and the
compiler.
"""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from spec import errors_of, reference
from tolerances import ERROR
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.library import opcheck
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from worlds import Case, attend_over_threads

import burst_rt
from burst_rt import Causal, Context, ContextLayout, Documents, Mask, Relation, SlidingWindow
from burst_rt.attention import autograd
from burst_rt.attention import run as attention_run
from burst_rt.attention.sharding import LAYOUTS
from burst_rt.errors import InputError
from burst_rt.planning.masks import MASKS, Both
from burst_rt.runtime.runtime import Runtime


@pytest.fixture
def ctx() -> Iterator[Context]:
    with burst_rt.init() as context:
        yield context


def _qkv(
    ctx: Context, tokens: int = 16, dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[torch.Tensor]:
    """This rank's q, k, v: 4 heads, 2 kv heads of 8."""
    layout = ctx.layout(tokens)
    generator = torch.Generator().manual_seed(seed)
    whole = [
        torch.randn(2, tokens, heads, 8, generator=generator, dtype=dtype) for heads in (4, 2, 2)
    ]
    return [layout.shard(x).requires_grad_() for x in whole]


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: Context, **options: Any
) -> torch.Tensor:
    layout = ctx.layout(q.shape[1] * ctx.world_size)
    out: torch.Tensor = burst_rt.burst_attention(q, k, v, layout=layout, **options)
    return out


_WIDE, _HALF = torch.float32, torch.bfloat16


# Which results there are, and of which type, do not depend on each other.
@pytest.mark.parametrize(
    ("needs", "dtype"),
    [
        *[("qkv", _WIDE), ("q", _HALF), ("kv", _WIDE), ("", _HALF)],
        *(
            pytest.param(needs, dtype, marks=pytest.mark.long)
            for needs, dtype in [("qkv", _HALF), ("q", _WIDE), ("kv", _HALF), ("", _WIDE)]
        ),
    ],
)
def test_both_ops_pass_opcheck(
    ctx: Context, needs: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # opcheck compares the outputs of two calls, and one of them is the call's number.
    monkeypatch.setattr(Runtime, "number", 1)
    layout = ctx.layout(16)
    q, k, v = (
        x.detach().requires_grad_(name in needs)
        for name, x in zip("qkv", _qkv(ctx, dtype=dtype), strict=True)
    )
    call = burst_rt.make_call(q, k, v, causal=True, layout=layout)
    arguments = autograd.arguments_of(call.options, call.needs)
    opcheck(torch.ops.burst_rt.attention_forward.default, (q, k, v, *arguments))
    with torch.no_grad():
        out, lse, number = torch.ops.burst_rt.attention_forward(q, k, v, *arguments)
    tensors = [x.detach() for x in (q, k, v, out, lse)]
    for dlse in (None, torch.randn_like(lse)):
        opcheck(
            torch.ops.burst_rt.attention_backward.default,
            (torch.randn_like(out), dlse, *tensors, number, *arguments),
        )


@pytest.mark.parametrize("name", ["attention_forward", "attention_backward"])
def test_the_ops_are_tagged_for_cuda_graphs(name: str) -> None:
    assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.burst_rt, name).default.tags


def test_a_call_inside_a_capture_is_refused_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replayed, its launches would go on without the other ranks' consent."""

    def run(ctx: Context) -> None:
        q, k, v = _qkv(ctx)
        out = burst_rt.burst_attention(q, k, v, layout=ctx.layout(16))
        ctx.all_reduce(torch.zeros(1))
        if ctx.rank == 0:
            capturing.add(threading.get_ident())
        with pytest.raises(InputError, match="CUDA graph"):
            burst_rt.burst_attention(q, k, v, layout=ctx.layout(16))
        with pytest.raises(InputError, match="CUDA graph"):
            out.sum().backward()
        capturing.clear()
        ctx.all_reduce(torch.zeros(1))
        burst_rt.burst_attention(q, k, v, layout=ctx.layout(16)).sum().backward()

    capturing: set[int] = set()
    check, device = attention_run.check_not_captured, torch.device("cuda")
    monkeypatch.setattr(attention_run, "check_not_captured", lambda _: check(device))
    monkeypatch.setattr(
        torch.cuda, "is_current_stream_capturing", lambda: threading.get_ident() in capturing
    )
    burst_rt.run_local(2, run)


@pytest.mark.parametrize("strategy", ["burst", "ring-kv"])
def test_gradcheck(ctx: Context, strategy: str) -> None:
    layout = ctx.layout(6)
    q, k, v = (x[:1].detach().requires_grad_() for x in _qkv(ctx, 6, torch.float64))

    def attend(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result = burst_rt.burst_attention(
            *inputs, causal=True, layout=layout, strategy=strategy, return_lse=True
        )
        assert isinstance(result, tuple)
        return result

    assert torch.autograd.gradcheck(attend, (q, k, v), fast_mode=False)


@pytest.mark.parametrize("strategy", ["burst", "ring-kv"])
def test_numerical_gradients_over_two_ranks(strategy: str) -> None:
    """Each rank in turn moves its own inputs; the loss is the sum over the ranks, so gradients that
    came over the wire are seen.
    """

    def check(ctx: Context) -> None:
        layout = ctx.layout(6)
        q, k, v = (x[:1].detach().requires_grad_() for x in _qkv(ctx, 6, torch.float64))
        generator = torch.Generator().manual_seed(5 + ctx.rank)
        weights = [
            torch.randn(shape, generator=generator, dtype=torch.float64)
            for shape in (q.shape, (1, 4, layout.shard_len))
        ]

        def my_loss(*inputs: torch.Tensor) -> torch.Tensor:
            results = burst_rt.burst_attention(
                *inputs, causal=True, layout=layout, strategy=strategy, return_lse=True
            )
            return torch.stack([(x * w).sum() for x, w in zip(results, weights, strict=True)]).sum()

        grads = torch.autograd.grad(my_loss(q, k, v), (q, k, v))
        step = 1e-6
        for moving, which in itertools.product(range(ctx.world_size), range(3)):
            for index in range(0, grads[which].numel(), 7):
                losses = []
                for sign in (1, -1):
                    inputs = [x.detach().clone() for x in (q, k, v)]
                    if ctx.rank == moving:
                        inputs[which].view(-1)[index] += sign * step
                    losses.append(ctx.all_reduce(my_loss(*inputs).reshape(1)).item())
                if ctx.rank == moving:
                    slope = (losses[0] - losses[1]) / (2 * step)
                    assert slope == pytest.approx(
                        grads[which].reshape(-1)[index].item(), rel=1e-6, abs=1e-8
                    )

    burst_rt.run_local(2, check)


@pytest.mark.parametrize("strategy", ["burst", "ring-kv"])
@pytest.mark.parametrize("names", ["q", "k", "v", "qv", "kv"])
def test_only_some_inputs_need_gradients(names: str, strategy: str) -> None:
    needs = ("q" in names, "k" in names, "v" in names)
    case = Case(50, mask=Causal(), needs_grad=needs, strategy=strategy)
    inputs = case.inputs()
    result = attend_over_threads(3, case)
    assert tuple(x is not None for x in result[2:5]) == needs
    for name, error in errors_of(result, reference(*inputs, mask=case.mask)).items():
        assert error < ERROR[torch.float32], name


@pytest.mark.parametrize("strategy", ["burst", "ring-kv"])
def test_gradients_of_lse_alone_and_of_out_alone(strategy: str) -> None:
    def run(ctx: Context) -> list[torch.Tensor]:
        layout = ctx.layout(40)
        grads = []
        for use in ("out", "lse", "both"):
            q, k, v = _qkv(ctx, 40)
            result = burst_rt.burst_attention(
                q, k, v, causal=True, layout=layout, strategy=strategy, return_lse=True
            )
            assert isinstance(result, tuple)
            out, lse = result
            (
                out.sum() * (use != "lse") + lse.square().sum()
            ).backward() if use != "out" else out.sum().backward()
            grads += [layout.unshard(x.grad) for x in (q, k, v) if x.grad is not None]
        return grads

    grads = burst_rt.run_local(2, run)[0]
    assert len(grads) == 9
    q, k, v = _qkv(burst_rt.init(), 40)
    # A world of one has the zigzag order of the whole sequence: positions 0 to 39.
    truth_lse = reference(q, k, v, torch.zeros_like(q), mask=Causal()).lse
    for i, (dout, dlse) in enumerate([(1.0, 0.0), (0.0, 2.0), (1.0, 2.0)]):
        truth = reference(q, k, v, torch.full_like(q, dout), dlse * truth_lse, mask=Causal())
        for name, x, y in zip(
            ("dq", "dk", "dv"), grads[3 * i : 3 * i + 3], truth[2:5], strict=True
        ):
            assert y is not None
            scale = torch.linalg.vector_norm(y).item() or 1.0
            assert torch.linalg.vector_norm(x.double() - y).item() / scale < ERROR[torch.float32], (
                dout,
                dlse,
                name,
            )


def test_without_grad_mode_nothing_is_saved_or_sent_back(ctx: Context) -> None:
    q, k, v = _qkv(ctx)
    with torch.no_grad():
        out = _attend(q, k, v, ctx)
    assert not out.requires_grad
    with torch.inference_mode():
        assert not _attend(q, k, v, ctx).requires_grad
    assert not _attend(q.detach(), k.detach(), v.detach(), ctx).requires_grad
    assert _attend(q, k.detach(), v.detach(), ctx).requires_grad


def test_a_tensor_of_inference_mode_beside_one_that_requires_grad_is_refused(
    ctx: Context,
) -> None:
    q, k, v = _qkv(ctx)
    with torch.inference_mode():
        k = k.detach().clone()
    with pytest.raises(InputError, match="k was made in inference mode"):
        _attend(q, k, v, ctx)
    with torch.no_grad():
        assert not _attend(q, k, v, ctx).requires_grad


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # of make_dual itself
def test_forward_mode_is_refused(ctx: Context) -> None:
    q, k, v = (x.detach() for x in _qkv(ctx))
    layout = ctx.layout(q.shape[1] * ctx.world_size)

    def call(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return burst_rt.burst_attention(q, k, v, layout=layout)

    compiled = torch.compile(call, backend="eager")
    assert torch.equal(compiled(q, k), call(q, k))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(k, torch.ones_like(k))
        with pytest.raises(InputError, match="k has a tangent"):
            call(q, dual)
        with pytest.raises(InputError, match="forward-mode differentiation"):
            compiled(q, dual)
        with pytest.raises(InputError, match="q must be a dense tensor"):
            call(q.to_sparse(), k)
        assert call(q, k).isfinite().all()


def test_only_q_k_v_out_and_lse_are_saved(ctx: Context) -> None:
    q, k, v = _qkv(ctx)
    saved: list[torch.Tensor] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = _attend(q, k, v, ctx)
    assert len(saved) == 5
    assert [x.data_ptr() for x in saved[:4]] == [x.data_ptr() for x in (q, k, v, out)]
    assert saved[4].shape == (2, 4, 16)


def test_a_second_derivative_is_refused(ctx: Context) -> None:
    q, k, v = _qkv(ctx)
    out = _attend(q, k, v, ctx)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(InputError, match="second derivatives"):
        dq.sum().backward()
    # The op on its own, which the compiler sees, refuses too.
    call = burst_rt.make_call(q, k, v, layout=ctx.layout(16))
    out, *_ = torch.ops.burst_rt.attention_forward(
        q, k, v, *autograd.arguments_of(call.options, call.needs)
    )
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(InputError, match="second derivatives"):
        dq.sum().backward()


@pytest.mark.parametrize("strategy", ["burst", "ring-naive", "burst-untiled"])
def test_autocast_changes_nothing(strategy: str) -> None:
    def attend(ctx: Context) -> None:
        q, k, v = _qkv(ctx)
        layout = ctx.layout(16)

        def grads() -> tuple[torch.Tensor, ...]:
            out = burst_rt.burst_attention(q, k, v, layout=layout, strategy=strategy)
            return out, *torch.autograd.grad(out.sin().sum(), (q, k, v))

        plain = grads()
        with torch.autocast("cpu", torch.bfloat16):
            assert all(torch.equal(a, b) for a, b in zip(grads(), plain, strict=True))

    burst_rt.run_local(2, attend)


def test_all_reduce_is_a_change_that_autograd_sees() -> None:
    def check(ctx: Context) -> None:
        x, w = torch.ones(1), torch.ones(1, requires_grad=True)
        y = (w * x).sum()
        ctx.all_reduce(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()

    burst_rt.run_local(2, check)


def test_all_reduce_refuses_what_needs_a_gradient() -> None:
    def check(ctx: Context) -> None:
        w = torch.ones(1, requires_grad=True)
        # One rank's tensor is enough, and no rank's is changed.
        x = w * 2 if ctx.rank else torch.ones(1)
        before = x.clone()
        with pytest.raises(InputError, match="expected a tensor that does not require grad"):
            ctx.all_reduce(x)
        assert torch.equal(x, before)
        with torch.no_grad():
            assert ctx.all_reduce(w).item() == 2
        assert ctx.all_reduce((w * 3).detach()).item() == 12

    burst_rt.run_local(2, check)


def test_backward_twice_through_one_graph() -> None:
    def run(ctx: Context) -> None:
        q, k, v = _qkv(ctx)
        out = _attend(q, k, v, ctx)
        first = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
        second = torch.autograd.grad(out.sum(), (q, k, v))
        assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))

    burst_rt.run_local(2, run)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_recomputes_the_same(use_reentrant: bool) -> None:
    def run(ctx: Context) -> None:
        grads = []
        for recompute in (False, True):
            q, k, v = _qkv(ctx)
            out = (
                checkpoint(_attend, q, k, v, ctx, use_reentrant=use_reentrant)
                if recompute
                else _attend(q, k, v, ctx)
            )
            out.sum().backward()
            grads.append([x.grad for x in (q, k, v) if x.grad is not None])
        assert len(grads[0]) == 3
        assert all(torch.equal(x, y) for x, y in zip(*grads, strict=True))

    burst_rt.run_local(2, run)


# As one graph; older versions of torch run the call between two.
_WHOLE = torch.__version__ >= "2.13"


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # torch's own, where it goes on after the call
@pytest.mark.parametrize("fake", [False, True])
def test_flops_are_those_of_the_cells_that_the_mask_shows(fake: bool) -> None:
    """Torch's counter hears of each rank's part; a forward has two products, a backward five."""

    def run(ctx: Context) -> tuple[int, int]:
        layout = ctx.layout(48)
        with FakeTensorMode() if fake else nullcontext(), FlopCounterMode(display=False) as counter:
            q, k, v = (
                torch.randn(2, layout.shard_len, heads, dim, requires_grad=True)
                for heads, dim in ((4, 16), (2, 16), (2, 8))
            )
            out = burst_rt.burst_attention(q, k, v, layout=layout, causal=True)
            forward = counter.get_total_flops()
            out.sum().backward()
        return forward, counter.get_total_flops() - forward

    counted = burst_rt.run_local(3, run)
    products = 2 * 2 * 4 * (48 * 49 // 2)  # of one channel: batch rows, heads and cells
    assert sum(forward for forward, _ in counted) == products * (16 + 8)
    assert sum(backward for _, backward in counted) == products * (3 * 16 + 2 * 8)


def test_compiled_is_eager_forward_and_backward(ctx: Context) -> None:
    layout = ctx.layout(16)

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, lse = burst_rt.burst_attention(
            2 * q, k, v, causal=True, layout=layout, return_lse=True
        )
        return (out.sin() * lse.transpose(1, 2).unsqueeze(-1)).sum()

    results = []
    for function in (model, torch.compile(model, fullgraph=_WHOLE, backend="aot_eager")):
        q, k, v = _qkv(ctx)
        value = function(q, k, v)
        results.append((value.detach(), *torch.autograd.grad(value, (q, k, v))))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_compiler_guards_on_every_argument(ctx: Context) -> None:
    """Another layout, mask, scale or strategy is another call, not the first one's constant."""

    def call(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        return _attend_with(q, k, v, options)

    compiled = torch.compile(call, fullgraph=_WHOLE, backend="aot_eager", dynamic=False)
    long, short = ctx.layout(16), ctx.layout(8)
    mask: Mask = Both(Causal(), Causal())
    with torch.no_grad():
        variants: list[dict[str, Any]] = [
            {"layout": long},
            {"layout": ctx.layout(16, "striped"), "causal": True},
            {"layout": long, "causal": True},
            {"layout": long, "mask": Causal()},
            {"layout": long, "mask": mask},
            {"layout": long, "causal": True, "strategy": "ring-kv"},
            {"layout": short, "causal": True},
            {"layout": short, "kv_layout": short},
        ]
        for options in variants:
            tokens = 8 if options["layout"] is short else 16
            q, k, v = _qkv(ctx, tokens)
            assert torch.equal(compiled(q, k, v, options), call(q, k, v, options)), options


def _attend_with(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor:
    out: torch.Tensor = burst_rt.burst_attention(q, k, v, **options)
    return out


@dataclass(frozen=True)
class _Window(Mask):
    width: int

    def relation(self, q: range, kv: range) -> Relation:
        return Relation.PARTIAL

    def allows(self, q_position: Any, kv_position: Any) -> Any:
        return (kv_position <= q_position) & (kv_position >= q_position - self.width)


_DOCUMENTS = Documents([7, 9])


@pytest.mark.skipif(not _WHOLE, reason="before torch 2.13 the call is not compiled")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("mask", [lambda: SlidingWindow(5, 0), lambda: Causal() & _DOCUMENTS])
def test_a_mask_that_is_made_inside_is_refused(ctx: Context, mask: Callable[[], Mask]) -> None:
    layout = ctx.layout(16)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return burst_rt.burst_attention(q, k, v, layout=layout, mask=mask())

    with pytest.raises(InputError, match="cannot be made inside a compiled function: make it out"):
        torch.compile(call, backend="eager")(*_qkv(ctx))
    assert ctx.all_reduce(torch.ones(1)).item() == 1  # the context is usable


@pytest.mark.skipif(not _WHOLE, reason="before torch 2.13 the call is not compiled")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_another_layout_or_mask_is_another_input_and_no_other_program(ctx: Context) -> None:
    def call(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: ContextLayout, mask: Mask
    ) -> torch.Tensor:
        return burst_rt.burst_attention(q, k, v, layout=layout, mask=mask).sin()

    def results(fn: Any, layout: ContextLayout, mask: Mask) -> list[torch.Tensor]:
        q, k, v = _qkv(ctx)
        out = fn(q, k, v, layout, mask)
        return [out.detach(), *torch.autograd.grad(out.sum(), (q, k, v))]

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    programs = torch._dynamo.utils.counters["stats"]
    before = programs["unique_graphs"]
    first = (ctx.layout(16), _Window(3))
    wanted = results(call, *first)
    for width in range(20):
        documents = Documents([1 + width % 8, 15 - width % 8])
        balanced = ctx.layout(16, "balanced", mask=documents)
        given = (balanced if width % 2 else ctx.layout(16), _Window(width)) if width else first
        for got, expected in zip(results(compiled, *given), results(call, *given), strict=True):
            assert torch.equal(got, expected)
    assert programs["unique_graphs"] - before <= 3, "at most two recompilations"
    # Beyond every bound there is, by far.
    many = [(ctx.layout(16), _Window(width)) for width in range(10_000)]
    with torch.no_grad():
        q, k, v = _qkv(ctx)
        for given in many[::100]:
            compiled(q, k, v, *given)
    for got, expected in zip(results(compiled, *first), wanted, strict=True):
        assert torch.equal(got, expected)
    assert len(ctx.attention.held) <= 4096


@pytest.mark.skipif(not _WHOLE, reason="before torch 2.13 the call is not compiled")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("dynamic", [None, False])
def test_a_new_length_recompiles_no_more_than_torchs_own_attention(
    ctx: Context, dynamic: bool | None
) -> None:
    def ours(qkv: list[torch.Tensor], layout: ContextLayout) -> torch.Tensor:
        q, k, v = qkv
        return burst_rt.burst_attention(2 * q, k, v, layout=layout, causal=True).sin()

    def torchs(qkv: list[torch.Tensor], layout: ContextLayout) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in qkv)
        out = torch.nn.functional.scaled_dot_product_attention(
            2 * q, k, v, is_causal=True, enable_gqa=True
        )
        return out.transpose(1, 2).sin()

    programs = torch._dynamo.utils.counters["stats"]
    lengths = (16, 24, 40, 1, 17)
    counts: list[list[int]] = []
    for function in (ours, torchs):
        torch.compiler.reset()
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        before, after = programs["unique_graphs"], []
        for length in lengths:
            compiled(_qkv(ctx, length), ctx.layout(length)).sum().backward()
            after.append(programs["unique_graphs"] - before)
        counts.append(after)
    assert all(mine <= theirs for mine, theirs in zip(*counts, strict=True)), counts
    # The first, one for all lengths, and one for a single token.
    assert counts[1][-1] == (3 if dynamic is None else len(lengths))


@pytest.mark.skipif(not _WHOLE, reason="before torch 2.13 the call is not compiled")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_no_cuda_graph_of_the_compilers_holds_a_call(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`mode="reduce-overhead"` cuts a program at the ops; what is between may become a graph."""
    from torch._inductor import config, scheduler

    monkeypatch.setattr(config, "custom_should_partition_ops", ["mine::op"])
    reasons: dict[str, str | None] = {}
    should_partition = scheduler.Scheduler.should_partition

    def spy(self: Any, node: Any) -> str | None:
        reason = should_partition(self, node)
        op = getattr(node.node, "op_overload", None)
        reasons[op.name() if op else "other"] = reason
        return reason

    monkeypatch.setattr(scheduler.Scheduler, "should_partition", spy)
    layout = ctx.layout(16)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return burst_rt.burst_attention(q, k, v, layout=layout)

    compiled = torch.compile(call, fullgraph=True, mode="reduce-overhead")
    compiled(*_qkv(ctx)).sum().backward()
    for name in autograd._NAMES:
        # On a CPU inductor cuts everywhere, but for another reason.
        assert "custom partition op" in str(reasons[name]), reasons
    assert config.custom_should_partition_ops[-1] == "mine::op"


@pytest.mark.skipif(not _WHOLE, reason="before torch 2.13 the call is not compiled")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_program_may_make_its_mask(ctx: Context) -> None:
    layout = ctx.layout(16)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return burst_rt.burst_attention(q, k, v, layout=layout, mask=Causal())

    with torch.no_grad():
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        q, k, v = _qkv(ctx)
        expected = burst_rt.burst_attention(q, k, v, layout=layout, causal=True)
        assert torch.equal(compiled(q, k, v), expected)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"mask": _Window(3), "causal": True}, "give mask or causal"),
        ({"causal": "no"}, "causal must be True or False"),
        ({"return_lse": 1}, "return_lse must be True or False"),
    ],
)
def test_a_compiled_call_refuses_what_an_eager_one_does(
    ctx: Context, options: dict[str, Any], why: str
) -> None:
    layout = ctx.layout(16)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return _attend_with(q, k, v, {"layout": layout} | options)

    with torch.no_grad():
        q, k, v = _qkv(ctx)
        for function in (call, torch.compile(call, backend="aot_eager")):
            with pytest.raises(Exception, match=why):
                function(q, k, v)


def test_the_programs_default_device_is_not_ours(ctx: Context) -> None:
    q, k, v = _qkv(ctx)
    layout = ctx.layout(16)
    expected = burst_rt.burst_attention(q, k, v, layout=layout, mask=_Window(5))
    with torch.device("meta"):
        out = burst_rt.burst_attention(q, k, v, layout=layout, mask=_Window(5))
        again = burst_rt.burst_attention(q, k, v, layout=layout, mask=_Window(6))
    assert torch.equal(out, expected)
    again.sum().backward()
    assert q.grad is not None


def test_a_call_that_was_made_for_other_tensors_is_refused_on_every_rank() -> None:
    def run(ctx: Context) -> None:
        q, k, v = _qkv(ctx)
        call = burst_rt.make_call(q, k, v, layout=ctx.layout(16))
        apply: Any = burst_rt.BurstAttentionFunction.apply
        for wrong in (
            (q.double(), k.double(), v.double()),
            (q[:1], k[:1], v[:1]),
            (q, k[:, :, :1], v[:, :, :1]),
        ):
            with pytest.raises(InputError, match="the call was made for a tensor"):
                apply(*wrong, call)
        assert apply(q, k, v, call)[0].shape == q.shape

    burst_rt.run_local(2, run)


@pytest.mark.parametrize("strategy", ["burst", "ring-naive", "hybrid:2"])
def test_a_call_lets_go_of_its_tensors_when_it_returns(strategy: str) -> None:
    """Without waiting for Python to look for cycles."""

    def run(ctx: Context) -> None:
        q, k, v = _qkv(ctx)
        out = _attend(q, k, v, ctx, strategy=strategy)
        out.sum().backward()
        seen = [StorageWeakRef(x.untyped_storage()) for x in (q, k, v, out)]
        del q, k, v, out
        assert [reference.expired() for reference in seen] == [True] * 4

    gc.disable()
    try:
        burst_rt.run_local(4, run)
    finally:
        gc.enable()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_result_that_is_not_used_is_computed_all_the_same(ctx: Context) -> None:
    """Other ranks wait for this one's part: the compiler may drop neither op."""
    layout = ctx.layout(16)

    def unused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        burst_rt.burst_attention(q, k, v, layout=layout)
        return q + 1

    q, k, v = (x.detach() for x in _qkv(ctx))
    before = ctx.stats().calls
    assert torch.equal(torch.compile(unused, fullgraph=_WHOLE, backend="aot_eager")(q, k, v), q + 1)
    assert ctx.stats().calls == before + 1


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_bad_input_to_a_compiled_call(ctx: Context) -> None:
    layout = ctx.layout(16)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return _attend_with(q, k, v, {"layout": layout})

    compiled = torch.compile(call, fullgraph=_WHOLE, backend="aot_eager")
    with torch.no_grad():
        q, k, v = _qkv(ctx)
        with pytest.raises(InputError, match=r"q must be .batch, this rank's 16 of 16 tokens"):
            compiled(q[:, :5], k, v)
        assert torch.equal(compiled(q, k, v), call(q, k, v))


def test_ops_of_a_meta_world_need_no_rank() -> None:
    """Fake tensors (shape propagation, memory estimates) go through without a call."""
    with burst_rt.init() as ctx:
        layout = ctx.layout(16)
        q, k, v = _qkv(ctx)
        call = burst_rt.make_call(q, k, v, layout=layout)
        before = ctx.stats().calls
        out, lse, _ = torch.ops.burst_rt.attention_forward(
            *(x.detach().to("meta") for x in (q, k, v)),
            *autograd.arguments_of(call.options, call.needs),
        )
        assert (out.shape, lse.shape, ctx.stats().calls) == (q.shape, (2, 4, 16), before)


def _call_and_close(seq_len: int) -> weakref.ref[Context]:
    with burst_rt.init() as ctx:
        layout = ctx.layout(seq_len)
        q = torch.ones(1, seq_len, 1, 8, requires_grad=True)
        out = burst_rt.burst_attention(q, q, q, layout=layout)
        out.sum().backward()
        # A compiled program, or a mode, would ask for the layout by its number.
        call = burst_rt.make_call(q, q, q, layout=layout)
        torch.ops.burst_rt.attention_forward(
            q, q, q, *autograd.arguments_of(call.options, call.needs)
        )
        return weakref.ref(ctx)


def _left_more_than(before: tuple[int, int]) -> list[int]:
    gc.collect()
    now = (len(LAYOUTS._objects), len(MASKS._objects))
    return [count for count, most in zip(now, before, strict=True) if count > most]


@pytest.mark.parametrize("contexts", [20, pytest.param(1000, marks=pytest.mark.long)])
def test_contexts_and_lengths_of_the_past_leave_nothing_behind(contexts: int) -> None:
    gc.collect()
    before = len(LAYOUTS._objects), len(MASKS._objects)
    with burst_rt.init() as ctx:
        q = torch.zeros(1, 8, 1, 8)
        layout = ctx.layout(8)
        for scale in range(1, 10 * contexts + 1):
            burst_rt.make_call(q, q, q, layout=layout, scale=scale)
        assert len(ctx.attention.kept[burst_rt.Call]) <= 64
        for seq_len in range(1, 301):
            q = torch.zeros(1, seq_len, 1, 8)
            burst_rt.burst_attention(q, q, q, layout=ctx.layout(seq_len))
    del layout
    gc.collect()
    assert _left_more_than(before) == []
    closed = [_call_and_close(8) for _ in range(contexts)]
    gc.collect()
    assert _left_more_than(before) == []
    assert [reference for reference in closed if reference() is not None] == []


def test_a_spec_lives_as_long_as_the_backward_may_come() -> None:
    with burst_rt.init() as ctx:
        q = torch.ones(1, 8, 1, 8, requires_grad=True)
        outs = [
            burst_rt.burst_attention(q, q, q, layout=ctx.layout(8), scale=scale)
            for scale in (0.5, 1.0, 2.0)
        ]
        gc.collect()
        for out in outs:
            out.sum().backward()
        assert q.grad is not None
