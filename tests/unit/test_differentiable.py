"""Functions with a backward of one's own: what autograd makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import burst_rt
from burst_rt.errors import InputError
from burst_rt.runtime.collectives import all_reduce, even_parts
from burst_rt.scheduler import Graph, GraphBuilder


def product() -> Callable[..., Any]:
    """(x @ w + shift, x), whose backward overwrites what it gets."""

    def forward(
        x: Tensor, w: Tensor, shift: float
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
        assert not torch.is_grad_enabled()
        return (x @ w + shift, x.clone()), (x, w)

    def backward(
        kept: tuple[Tensor, ...], d_out: Tensor, d_same: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        x, w = kept
        assert d_out.is_contiguous()
        dx, dw = d_same.add_(d_out @ w.T), x.T @ d_out
        d_out.fill_(torch.nan)
        return dx, dw, None

    return burst_rt.differentiable(forward, backward)


def inputs() -> tuple[Tensor, Tensor]:
    noise = torch.Generator().manual_seed(0)
    x, w = (torch.randn(s, generator=noise, dtype=torch.float64) for s in ((3, 4), (4, 5)))
    return x.requires_grad_(), w.requires_grad_()


def test_gradients_are_those_of_the_backward() -> None:
    function = product()
    assert torch.autograd.gradcheck(lambda x, w: function(x, w, 2.0), inputs())


def test_what_is_not_used_has_a_gradient_of_zeros_and_grads_are_copies() -> None:
    x, w = inputs()
    out, _ = product()(x, w, 0.0)
    grad = torch.ones(5, 3, dtype=torch.float64).T  # not contiguous
    out.backward(grad)
    assert torch.equal(grad, torch.ones_like(grad))
    torch.testing.assert_close(x.grad, grad @ w.detach().T)


def test_a_single_tensor_needs_no_tuple() -> None:
    double = burst_rt.differentiable(lambda x: (2 * x, ()), lambda kept, d_out: d_out.mul_(2))
    x, _ = inputs()
    double(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 2.0))


def test_gradients_of_gradients_are_refused() -> None:
    x, w = inputs()
    out, _ = product()(x, w, 0.0)
    (dx,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_a_pipeline_has_a_backward() -> None:
    """Every rank's vector summed up over the ranks; the backward sums the gradients up."""

    def call(ctx: burst_rt.Context) -> None:
        def build(rank: int) -> Graph:
            g = GraphBuilder(rank, ctx.world_size, ctx.lanes)
            sizes = [8 * count for count in even_parts(5, ctx.world_size)]
            parts = ctx.world_size
            all_reduce(g, g.buffer("x", parts=parts, size_bytes=sizes, initialised=True))
            return g.build()

        pipeline = ctx.pipeline(build)

        def total(x: Tensor) -> Tensor:
            pipeline.run(buffers={"x": x}, ops={})
            return x

        sum_up = burst_rt.differentiable(lambda x: (total(x.clone()), ()), lambda _, dx: total(dx))
        x = torch.full((5,), 1.0 + ctx.rank, dtype=torch.float64, requires_grad=True)
        y = sum_up(x)
        assert y.tolist() == [6.0] * 5
        ((1 + ctx.rank) * y).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [6.0] * 5

    burst_rt.run_local(3, call)


def test_a_rank_that_cannot_read_what_it_kept_is_every_ranks_error() -> None:
    def run(ctx: burst_rt.Context) -> None:
        def forward(x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            return ctx.all_reduce(x.clone()), (x,)

        function = burst_rt.differentiable(forward, lambda _, d_out: ctx.all_reduce(d_out))
        x = torch.ones(2, requires_grad=True) * 1
        out = function(x)
        if ctx.rank == 0:
            x.detach().zero_()
        with pytest.raises(InputError, match=r"rank 0: .*modified by an inplace operation"):
            out.sum().backward()
        ctx.all_reduce(torch.ones(1))  # the context stays usable

    burst_rt.run_local(2, run)
