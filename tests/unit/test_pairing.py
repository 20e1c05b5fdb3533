"""What ranks pair up by its order: where one rank has another order, every rank is told.

Ranks are threads. Over a process group: tests/mpi/programs/beside.py; compiled:
tests/mpi/programs/attention_compiled.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import burst_rt
from burst_rt import Context
from burst_rt.errors import ContractMismatch
from burst_rt.runtime.collectives import all_reduce
from burst_rt.scheduler import Graph, GraphBuilder

_TOKENS = 24


def _order(ctx: Context, odd: int = 1) -> Sequence[int]:
    """The order in which a rank does two things."""
    return (1, 0) if ctx.rank == odd else (0, 1)


class _Seen(torch.utils._python_dispatch.TorchDispatchMode):
    """A mode of a user's, under which calls go through the dispatcher."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # torch's own protocol
        return func(*args, **(kwargs or {}))


def _under_a_mode(attend: Callable[..., Tensor], *qkv: Tensor) -> Tensor:
    with _Seen():  # type: ignore[no-untyped-call]
        return attend(*qkv)


_WAYS: dict[str, Callable[..., Tensor]] = {
    "plain": lambda attend, *qkv: attend(*qkv),
    "under a mode": _under_a_mode,
    "burst_rt.checkpoint": burst_rt.checkpoint,
    "computed again": partial(checkpoint, use_reentrant=False),
}


@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_backwards_of_two_equal_calls(way: str, world_size: int) -> None:
    """After the error the same backwards run in one order, and the gradients are right."""

    def run(ctx: Context) -> None:
        layout = ctx.layout(_TOKENS)
        whole = [
            torch.randn(3, 1, _TOKENS, 2, 8, generator=torch.Generator().manual_seed(seed))
            for seed in (0, 1)
        ]
        mine = [layout.shard(x, 2).requires_grad_() for x in whole]
        attend = partial(burst_rt.burst_attention, layout=layout, causal=True)
        outs = [_WAYS[way](attend, *x.unbind()) for x in mine]
        with pytest.raises(ContractMismatch) as caught:
            outs[_order(ctx)[0]].sum().backward()
        said = str(caught.value)
        assert "the call whose backward this is: call " in said
        assert " on rank 1" in said
        assert said.endswith("Every rank must run the backwards in the same order")
        outs = [_WAYS[way](attend, *x.unbind()) for x in mine]
        for i in (1, 0):
            ((i + 1) * outs[i]).sum().backward()
        for i, x in enumerate(mine):
            truth = whole[i].double().requires_grad_()
            q, k, v = (each.transpose(1, 2) for each in truth.unbind())
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            ((i + 1) * out).sum().backward()
            assert truth.grad is not None
            torch.testing.assert_close(x.grad, layout.shard(truth.grad, 2).float())

    burst_rt.run_local(world_size, run)


def test_two_backwards_of_one_call_are_of_one_call() -> None:
    """As a pipeline's schedule has them: forward, forward, backward, backward, each twice."""

    def run(ctx: Context) -> None:
        layout = ctx.layout(_TOKENS)
        q = torch.ones(1, layout.shard_len, 2, 8, requires_grad=True)
        outs = [burst_rt.burst_attention(q, q, q, layout=layout) for _ in range(2)]
        for i in (0, 0, 1, 1):
            outs[i].sum().backward(retain_graph=True)

    burst_rt.run_local(2, run)


def _means(ctx: Context, count: int | None = None) -> list[Tensor]:
    """Two means of which each rank has two terms."""
    x = torch.full((2, 2), 1.0 + ctx.rank, requires_grad=True)
    return [burst_rt.mean_over_ranks(each, group=ctx, count=count) for each in (x[0], 2 * x[1])]


def test_backwards_of_two_means() -> None:
    def run(ctx: Context) -> None:
        means = _means(ctx)
        with pytest.raises(ContractMismatch, match="whose backward this is: call"):
            means[_order(ctx)[0]].backward()
        means = _means(ctx)
        for i in (1, 0):
            means[i].backward()

    burst_rt.run_local(2, run)


def _sum_up(ctx: Context) -> burst_rt.Pipeline:
    """A pipeline that sums four numbers over the ranks."""

    def build(rank: int) -> Graph:
        g = GraphBuilder(rank, ctx.world_size, ctx.lanes)
        sizes = [32] + [0] * (ctx.world_size - 1)
        all_reduce(g, g.buffer("x", parts=ctx.world_size, size_bytes=sizes, initialised=True))
        return g.build()

    return ctx.pipeline(build)


def test_backwards_of_a_function_of_ones_own() -> None:
    def run(ctx: Context) -> None:
        pipeline = _sum_up(ctx)

        def total(x: Tensor) -> Tensor:
            pipeline.run(buffers={"x": x}, ops={})
            return x

        sum_up = burst_rt.differentiable(lambda x: (total(x.clone()), ()), lambda _, dx: total(dx))
        x = torch.ones(2, 4, dtype=torch.float64, requires_grad=True)
        outs = [sum_up(each) for each in x]
        with pytest.raises(ContractMismatch, match="whose backward this is: call"):
            outs[_order(ctx)[0]].sum().backward()
        outs = [sum_up(each) for each in x]
        for i in (1, 0):
            (outs[i] * (i + 1 + ctx.rank)).sum().backward()
        assert x.grad is not None
        assert x.grad[:, 0].tolist() == [1 + 2, 2 + 3]

    burst_rt.run_local(2, run)


def test_runs_of_two_equal_pipelines() -> None:
    def run(ctx: Context) -> None:
        pipelines = [_sum_up(ctx), _sum_up(ctx)]

        def together(i: int) -> None:
            pipelines[i].run(buffers={"x": torch.ones(4, dtype=torch.float64)}, ops={})

        together(0)
        together(1)
        with pytest.raises(ContractMismatch, match="the pipeline that ran first: in call"):
            together(_order(ctx)[0])
        together(1)
        together(0)
        # One that is made anew in each step has not run before.
        _sum_up(ctx).run(buffers={"x": torch.ones(4, dtype=torch.float64)}, ops={})

    burst_rt.run_local(2, run)


def _parameters(*shapes: tuple[int, ...], seed: int = 0) -> list[torch.nn.Parameter]:
    """Each with a gradient of its own number."""
    generator = torch.Generator().manual_seed(seed)
    found = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    for number, parameter in enumerate(found):
        parameter.grad = torch.full_like(parameter, float(number + 1))
    return found


_SHAPES: dict[str, tuple[tuple[tuple[int, ...], ...], str]] = {
    "other shapes": (((2, 3), (3, 2)), r"parameters: 2: float32 \(2, 3\); float32 \(3, 2\) "),
    "other numbers of elements": (((2, 3), (70, 70)), r"parameters: 2: float32"),
    "one shape": (((70, 70), (70, 70)), r"parameter 0, float32 \(70, 70\), has other values"),
    "scalars": (((), ()), r"parameter 0, float32 \(\), has other values"),
}


@pytest.mark.parametrize("case", _SHAPES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_parameters_in_another_order(case: str, world_size: int) -> None:
    def run(ctx: Context) -> None:
        shapes, said = _SHAPES[case]
        parameters = _parameters(*shapes)
        given = [parameters[i] for i in _order(ctx)]
        with pytest.raises(ContractMismatch, match=said):
            burst_rt.average_gradients(given, group=ctx)
        for number, parameter in enumerate(parameters):  # nothing was mixed
            assert parameter.grad is not None
            assert (parameter.grad == number + 1).all()
        burst_rt.average_gradients(parameters, group=ctx)

    burst_rt.run_local(world_size, run)


def test_other_models() -> None:
    """One from another seed, with fewer parameters, or trained in part; not one rounded."""

    def run(ctx: Context) -> None:
        odd = ctx.rank == 1
        shapes = ((8, 8), (8,))
        with pytest.raises(ContractMismatch, match="has other values on some ranks"):
            burst_rt.average_gradients(_parameters(*shapes, seed=ctx.rank), group=ctx)
        for few in (0, 1):
            with pytest.raises(ContractMismatch, match=rf"parameters: .*{few}: .* on rank 1"):
                burst_rt.average_gradients(_parameters(*shapes)[: few if odd else 2], group=ctx)
        burst_rt.average_gradients([], group=ctx)
        parameters = _parameters(*shapes)
        parameters[0].requires_grad_(not odd)
        with pytest.raises(ContractMismatch, match="parameters: "):
            burst_rt.average_gradients(parameters, group=ctx)
        with torch.no_grad():
            parameters = _parameters(*shapes)
            parameters[0].mul_(1 + 1e-6 * ctx.rank)
        assert parameters[1].grad is not None
        parameters[1].grad.mul_(3 * ctx.rank)
        burst_rt.average_gradients(parameters, group=ctx)
        assert parameters[1].grad.tolist() == [3.0] * 8

    burst_rt.run_local(2, run)


def test_counts_of_a_mean() -> None:
    def run(ctx: Context) -> None:
        with pytest.raises(ContractMismatch, match="count: 7 on rank 0, 8 on rank 1"):
            _means(ctx, count=7 + ctx.rank)
        first, second = _means(ctx, count=8)
        assert first.item() == (2 * 1 + 2 * 2) / 8
        assert second.item() == 2 * first.item()

    burst_rt.run_local(2, run)
