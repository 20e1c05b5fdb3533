"""Softcap, ALiBi slopes, sinks and a head_dim of v's own over ranks that are threads, against the
float64 spec: over strategies, worlds, masks, types and kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from graphs import bytes_of, graphs_of, problem
from spec import errors_of, reference, relative_error
from tolerances import ERROR, SINKS
from torch.library import opcheck
from worlds import Case, attend_over_threads

import burst_rt
from burst_rt import BlockSparse, Causal, Context, Documents, Full, SlidingWindow
from burst_rt.attention import autograd
from burst_rt.errors import ContractMismatch, InputError
from burst_rt.kernels import KERNELS, Work, sum_dtype
from burst_rt.kernels.cpu_calls import PartSize
from burst_rt.planning.choose import choose
from burst_rt.planning.problem import ScoreFlags, TileShape
from burst_rt.runtime.runtime import Runtime
from burst_rt.scheduler import check_world

_BASE = Case(61, heads=4, kv_heads=2, batch=2, mask=Causal())
_TERMS: dict[str, dict[str, Any]] = {
    "sinks": {"sinks": True},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi": "heads"},
    "narrow v": {"v_head_dim": 8},
    "wide v": {"v_head_dim": 20},
    "all": {"sinks": True, "softcap": 1.5, "alibi": "batch and heads", "v_head_dim": 8},
}


def _assert_right(world: int, case: Case, **options: Any) -> None:
    result = attend_over_threads(world, case, **options)
    for name, error in errors_of(result, case.truth).items():
        most = SINKS if name == "dsinks" else ERROR
        assert error < most[sum_dtype(case.dtype) if name == "lse" else case.dtype], (name, error)
    assert (result.dsinks is not None) == case.sinks


@pytest.mark.parametrize("terms", _TERMS)
@pytest.mark.parametrize(
    ("strategy", "world", "kernel"),
    [
        ("burst", 1, "cpu"),
        ("ring-kv", 3, "cpu"),
        ("burst", 4, "naive"),
        ("ring-q", 3, "cpu"),
        ("ring-q", 2, "naive"),
        ("bidirectional", 2, "naive"),
        ("two-level:2", 4, "cpu"),
        ("all-to-all", 2, "cpu"),
        ("hybrid:2", 4, "cpu"),
        ("ring-naive", 3, "cpu"),
        ("burst-untiled", 2, "auto"),
    ],
)
def test_every_strategy(terms: str, strategy: str, world: int, kernel: str) -> None:
    _assert_right(world, _BASE.but(**_TERMS[terms], strategy=strategy), kernel=kernel)


@pytest.mark.parametrize("terms", _TERMS)
@pytest.mark.parametrize(
    ("world", "changes"),
    [
        # Under the full mask few tokens travel as one block, where nothing goes by positions.
        (3, {"mask": Full(), "kind": "striped", "strategy": "burst"}),
        (2, {"q_len": 61, "kv_len": 24, "mask": Causal()}),  # rows that see no key
        (3, {"q_len": 24, "kv_len": 61, "kind": "contiguous", "dtype": torch.bfloat16}),
        (2, {"mask": SlidingWindow(9, 3), "dtype": torch.float64}),
        (5, {"mask": Causal() & Documents([20, 1, 40]), "strategy": "burst"}),
        (2, {"mask": BlockSparse(torch.eye(8, dtype=torch.bool), 8), "q_len": 64}),
        (2, {"q_len": 3, "dtype": torch.float16}),  # a handful of cells
        (2, {"lse_grad": False, "scale": 0.7, "kv_heads": 4}),
    ],
)
def test_masks_lengths_and_types(terms: str, world: int, changes: dict[str, Any]) -> None:
    _assert_right(world, _BASE.but(**(_TERMS[terms] | changes)))


@pytest.mark.parametrize("terms", _TERMS)
def test_parts_of_long_tiles(terms: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that the CPU kernel does in parts, with an edge of the mask in many of them."""
    from burst_rt.kernels import cpu

    for name in ("PART", "SMALL_PART", "DISTANCES_PART"):
        monkeypatch.setattr(cpu, name, PartSize(21, 32, 1))
    monkeypatch.setattr(cpu, "matrix_part", lambda heads: PartSize(21, 32, 1))
    for mask, batch in ((Causal(), 2), (SlidingWindow(70, 5), 2), (SlidingWindow(70, 5), 1)):
        _assert_right(2, _BASE.but(**_TERMS[terms], q_len=200, mask=mask, batch=batch))


@pytest.mark.parametrize("strategy", ["burst", "ring-q"])
def test_staged_messages_carry_the_same(strategy: str) -> None:
    case = _BASE.but(**_TERMS["all"], strategy=strategy)
    plain = attend_over_threads(3, case)
    for x, y in zip(plain, attend_over_threads(3, case, transport="staged"), strict=True):
        assert x is not None
        assert y is not None
        assert torch.equal(x, y)


def test_a_slope_without_distance_and_a_cap_out_of_reach_change_nothing() -> None:
    plain = attend_over_threads(2, _BASE)
    capped = attend_over_threads(2, _BASE.but(softcap=1e4))
    for x, y in zip(plain[:5], capped[:5], strict=True):
        assert x is not None
        assert y is not None
        assert relative_error(x, y) < 1e-5


def test_gradients_by_differences() -> None:
    """Of q, k, v of two head_dims and of sinks, in float64, with a softcap and slopes."""
    with burst_rt.init() as ctx:
        layout = ctx.layout(5)
        generator = torch.Generator().manual_seed(0)
        q, k, v, sinks = (
            torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
            for shape in ((1, 5, 2, 3), (1, 5, 1, 3), (1, 5, 1, 4), (2,))
        )
        slopes = torch.tensor([0.5, 0.1])

        def attend(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            q, k, v, sinks = inputs
            return burst_rt.burst_attention(
                q, k, v, layout=layout, causal=True, softcap=1.5, alibi_slopes=slopes, sinks=sinks,
                return_lse=True,
            )  # fmt: skip

        assert torch.autograd.gradcheck(attend, (q, k, v, sinks))


def _qkv(ctx: Context, heads: int = 4) -> tuple[Any, list[torch.Tensor]]:
    layout = ctx.layout(24)
    generator = torch.Generator().manual_seed(ctx.rank)
    shape = (1, layout.shard_len, heads, 8)
    return layout, [torch.randn(shape, generator=generator) for _ in range(3)]


@pytest.mark.parametrize(
    "strategy", ["auto", "burst", "burst-untiled", "all-to-all", "hybrid:2", "ring-naive"]
)
def test_a_backward_that_sinks_alone_need_has_no_messages_and_no_tiles(strategy: str) -> None:
    """The share of each rank is of its own queries, and in the type of the sinks."""
    case = _BASE.but(sinks=True, kv_heads=4)
    whole, (_, given) = case.inputs(), case.of_heads()
    assert given is not None

    def run(ctx: Context) -> None:
        layout, _ = case.layouts(ctx)
        q, k, v, dout = map(layout.shard, whole[:4])
        here = torch.zeros_like(whole.q)
        here[:, layout.positions()] = dout
        expected = reference(*whole[:3], here, mask=case.mask, sinks=given).dsinks
        assert expected is not None
        shares = []
        for needed in (False, True):
            sinks = given.detach().requires_grad_()
            options: dict[str, Any] = {
                "mask": case.mask, "layout": layout, "sinks": sinks, "strategy": strategy,
            }  # fmt: skip
            queries = q.detach().requires_grad_(needed)
            out = burst_rt.burst_attention(queries, k, v, **options)
            told = burst_rt.explain(queries, k, v, **options)
            assert ("nothing travels" in str(told)) != needed
            before = ctx.stats().bytes_sent
            out.backward(dout)
            assert (ctx.stats().bytes_sent > before) == needed
            assert sinks.grad is not None
            assert relative_error(sinks.grad, expected) < SINKS[torch.float32]
            shares.append(sinks.grad)
            for graph, _ in [] if needed else ctx.gather_last_run():
                assert {task.op and task.op.name for task in graph.tasks} == {"agree", "delta"}
        assert relative_error(shares[0], shares[1].double()) < SINKS[torch.float32]

    burst_rt.run_local(4, run)


def test_sinks_keep_their_type() -> None:
    def run(ctx: Context) -> None:
        layout, (q, k, v) = _qkv(ctx)
        sinks = torch.tensor([0.0, 1.0, -1.0, 0.5], dtype=torch.bfloat16, requires_grad=True)
        out = burst_rt.burst_attention(q.requires_grad_(), k, v, layout=layout, sinks=sinks)
        out.sum().backward()
        assert sinks.grad is not None
        assert sinks.grad.dtype == torch.bfloat16

    burst_rt.run_local(2, run)


def test_a_query_that_sees_no_key_has_the_sinks_lse() -> None:
    case = _BASE.but(q_len=61, kv_len=24, sinks=True)
    result = attend_over_threads(2, case)
    _, sinks = case.of_heads()
    assert sinks is not None
    blind = slice(0, 61 - 24)
    assert not result.out[:, blind].any()
    assert torch.equal(result.lse[:, :, blind], sinks[:, None].expand(2, 4, 61 - 24))


def test_a_sink_of_minus_infinity_is_none() -> None:
    def run(ctx: Context) -> None:
        layout, (q, k, v) = _qkv(ctx)
        plain = burst_rt.burst_attention(q, k, v, layout=layout, return_lse=True)
        sinks = torch.full((4,), -torch.inf)
        same = burst_rt.burst_attention(q, k, v, layout=layout, sinks=sinks, return_lse=True)
        for x, y in zip(plain, same, strict=True):
            assert relative_error(x, y.double()) < ERROR[torch.float32]

    burst_rt.run_local(2, run)


@pytest.mark.parametrize(
    ("odd", "common", "said"),
    [
        ({"sinks": True}, {}, "sinks: "),
        ({"needs": True}, {"sinks": True}, r"needs_grad \(sinks\): "),
        ({"softcap": 3.0}, {"softcap": 2.0}, "softcap: "),
        ({"slopes": True}, {}, "alibi_slopes: "),
        ({"narrow": True}, {}, "head_dim: "),
    ],
)
def test_what_differs_between_ranks_is_found_before_anything_is_sent(
    odd: dict[str, Any], common: dict[str, Any], said: str
) -> None:
    def run(ctx: Context) -> None:
        layout, (q, k, v) = _qkv(ctx)
        mine = odd if ctx.rank == 1 else common
        needed = "needs" in mine
        options: dict[str, Any] = {}
        if "sinks" in mine or needed:
            options["sinks"] = torch.zeros(4, requires_grad=needed)
        if "softcap" in mine:
            options["softcap"] = mine["softcap"]
        if "slopes" in mine:
            options["alibi_slopes"] = torch.ones(4)
        if "narrow" in mine:
            v = v[..., :4]
        with pytest.raises(ContractMismatch, match=said):
            burst_rt.burst_attention(q, k, v, layout=layout, **options)
        assert ctx.stats().bytes_sent == 0
        burst_rt.burst_attention(q, k, v[..., :4], layout=layout)

    burst_rt.run_local(3, run)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "strategy", ["ring-kv", "burst", "ring-q", "bidirectional", "all-to-all", "ring-naive"]
)
def test_bytes_are_those_of_vs_own_head_dim(strategy: str, world: int) -> None:
    """What the graphs send is what the programs announce; each tensor as wide as it is."""
    plain = problem(60, 60, world, heads=(2 * world, world), head_dim=24)
    options = ScoreFlags(softcap=True, sinks=True, sinks_need_grad=True)
    for forward in (True, False):
        sent = []
        for p in (plain, replace(plain, v_head_dim=8, scores=options)):
            program = choose(p, strategy, forward=forward).program
            graphs = graphs_of(program)
            check_world(graphs)
            assert sum(map(bytes_of, graphs)) == program.wire_bytes()
            sent.append(program.wire_bytes())
        if world > 1 and strategy in ("ring-kv", "bidirectional") and forward:
            assert 3 * sent[1] == 2 * sent[0]  # k of 24 and v of 8, not twice 24
        else:
            assert sent[1] < sent[0] or world == 1


def test_what_vendors_kernels_refuse() -> None:
    for name in ("flash", "cudnn"):
        kernel = KERNELS[name]
        cuda = Work(torch.device("cuda"), torch.bfloat16, 64, Full())
        for work, why in (
            (cuda._replace(scores=ScoreFlags(softcap=True)), "has no softcap and no ALiBi"),
            (cuda._replace(scores=ScoreFlags(alibi_slopes=True)), "alibi_slopes were asked"),
            (cuda._replace(v_head_dim=32), "one head_dim for q, k and v, got 64 and 32 of v"),
        ):
            reason = kernel.refuses(work)
            assert reason is not None
            assert why in reason
    sinks = Work(
        torch.device("cpu"), torch.bfloat16, 64, Full(), scores=ScoreFlags(sinks=True),
        tiles=(Full().pieces(range(64), range(64)),),
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KERNELS["flash"], "device_type", "cpu", raising=False)
        patch.setattr(type(KERNELS["flash"]), "_missing", lambda self, device: None)
        reason = KERNELS["flash"].refuses(sinks)
        assert reason is not None
        assert "and here sinks are added up" in reason
        assert KERNELS["flash"].refuses(sinks._replace(partials="16bit")) is None


def test_the_memory_of_matrices_is_bounded() -> None:
    for options in (ScoreFlags(softcap=True), ScoreFlags(alibi_slopes=True)):
        for forward in (True, False):
            sizes = [
                KERNELS["cpu"].scratch_bytes(
                    forward, torch.float32, TileShape(1, 8, 2, 64, n, n, scores=options)
                )
                for n in (1000, 100_000)
            ]
            assert 0 < sizes[0] <= sizes[1] < 2**27


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_is_eager_and_the_ops_pass_opcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    # opcheck compares the outputs of two calls, and one of them is the call's number.
    monkeypatch.setattr(Runtime, "number", 1)
    with burst_rt.init() as ctx:
        layout, (q, k, v) = _qkv(ctx)
        v = v[..., :4]
        slopes, sinks = torch.rand(4), torch.randn(4)

        def model(*inputs: torch.Tensor) -> torch.Tensor:
            q, k, v, sinks = inputs
            out = burst_rt.burst_attention(
                2 * q, k, v, layout=layout, causal=True, softcap=2.0, alibi_slopes=slopes,
                sinks=sinks,
            )  # fmt: skip
            return out.sin().sum()

        found = []
        whole = torch.__version__ >= "2.13"
        for function in (model, torch.compile(model, fullgraph=whole, backend="aot_eager")):
            inputs = [x.detach().requires_grad_() for x in (q, k, v, sinks)]
            value = function(*inputs)
            found.append((value.detach(), *torch.autograd.grad(value, inputs)))
        assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))

        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        learned = sinks.requires_grad_()
        call = burst_rt.make_call(
            *inputs, layout=layout, softcap=2.0, alibi_slopes=slopes, sinks=learned
        )
        arguments = autograd.arguments_of(call.options, call.needs)
        op = torch.ops.burst_rt.attention_forward.default
        opcheck(op, (*inputs, *arguments, slopes, learned))
        with torch.no_grad():
            out, lse, number = op(*inputs, *arguments, slopes, learned)
        saved = [x.detach() for x in (*inputs, out, lse)]
        opcheck(
            torch.ops.burst_rt.attention_backward.default,
            (torch.randn_like(out), None, *saved, number, *arguments, slopes, sinks.detach()),
        )


def test_the_module_explain_and_the_public_function() -> None:
    with burst_rt.init() as ctx:
        layout, (q, k, v) = _qkv(ctx)
        slopes, sinks = torch.rand(4), torch.randn(4)
        given: dict[str, Any] = {"alibi_slopes": slopes, "sinks": sinks}
        module = burst_rt.BurstAttention(layout, causal=True, softcap=2.0)
        expected = burst_rt.burst_attention(
            q, k, v, layout=layout, causal=True, softcap=2.0, **given
        )
        assert torch.equal(module(q, k, v, **given), expected)
        told = str(burst_rt.explain(q, k, v, layout=layout, softcap=2.0, **given))
        assert "scores: softcap, alibi_slopes, sinks\n" in told
        call = burst_rt.make_call(q, k, v, layout=layout, causal=True, softcap=2.0, **given)
        apply: Any = burst_rt.BurstAttentionFunction.apply
        assert torch.equal(apply(q, k, v, call, slopes, sinks)[0], expected)
        with pytest.raises(InputError, match="alibi_slopes of shape"):
            apply(q, k, v, call)
        for wrong in (sinks[:3], sinks[0]):
            with pytest.raises(InputError, match="apply it to the tensors it was made for"):
                apply(q, k, v, call, slopes, wrong)


def test_ranks_without_queries_have_no_share_of_the_gradient_of_sinks() -> None:
    def run(ctx: burst_rt.Context) -> None:
        layout = ctx.layout(2)
        q, k = (torch.ones(1, layout.shard_len, 4, 16) for _ in range(2))
        sinks = torch.zeros(4, requires_grad=True)
        out = burst_rt.burst_attention(
            q.requires_grad_(), k, k, layout=layout, sinks=sinks, strategy="ring-naive"
        )
        out.sum().backward()
        assert sinks.grad is not None
        assert (sinks.grad != 0).tolist() == [layout.shard_len > 0] * 4

    burst_rt.run_local(4, run)
