"""Sums that go from device to device (runtime/device_sums.py), here between CPU ranks; and means of
gradients in pieces.
"""

from __future__ import annotations

import pytest
import torch

import burst_rt
from burst_rt import Context
from burst_rt.errors import ContractMismatch
from burst_rt.runtime import device_sums, gradients, reductions
from burst_rt.runtime.device_sums import goes_between_devices, piece_bytes


@pytest.fixture(autouse=True)
def _between_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reductions, "goes_between_devices", lambda _, x: x.numel() > 100)
    for module in (device_sums, gradients):
        monkeypatch.setattr(module, "piece_bytes", lambda _: 1 << 10)


def _of(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).mul(100).to(dtype)


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_a_sum_in_pieces_is_the_sum_of_all_ranks(world_size: int, dtype: torch.dtype) -> None:
    def summed(ctx: Context) -> tuple[torch.Tensor, int]:
        x, again = (_of(ctx.rank, 1003, dtype).view(17, 59) for _ in range(2))
        ctx.all_reduce(x)
        sent = ctx.runtime.transport.bytes_sent
        ctx.all_reduce(again)
        assert torch.equal(x, again)
        return x.flatten(), sent

    results = burst_rt.run_local(world_size, summed)
    terms = torch.stack([_of(rank, 1003, dtype) for rank in range(world_size)])
    for x, sent in results:
        assert torch.equal(x, results[0][0])
        off = (x.double() - terms.double().sum(0)).abs()
        assert bool((off <= torch.finfo(torch.float32).eps * terms.double().abs().sum(0)).all())
        assert sent >= (world_size - 1) / world_size * x.nbytes


def test_only_large_tensors_on_devices_go_that_way() -> None:
    def asked(ctx: Context) -> bool:
        return goes_between_devices(ctx.runtime, torch.empty(1 << 20))

    assert burst_rt.run_local(2, asked) == [False, False]


def test_pieces_grow_with_the_ranks() -> None:
    assert [piece_bytes(world) for world in (2, 16, 64)] == [64 << 20, 64 << 20, 256 << 20]


def test_other_sizes_are_refused_on_every_rank() -> None:
    def wrong(ctx: Context) -> str:
        with pytest.raises(ContractMismatch) as caught:
            ctx.all_reduce(torch.zeros(1003 if ctx.rank else 5))
        return str(caught.value)

    first, second = burst_rt.run_local(2, wrong)
    assert "shape" in first
    assert "(1003,)" in first + second


@pytest.mark.parametrize("world_size", [1, 3])
def test_means_of_gradients_in_pieces(world_size: int) -> None:
    """Gradients of several types, of many sizes, not all contiguous: more than one piece."""
    sizes = [(7,), (300, 3), (0,), (1,), (40, 20), (257,)]

    def made(rank: int) -> list[torch.nn.Parameter]:
        parameters = []
        for number, size in enumerate(sizes):
            dtype = (torch.float32, torch.bfloat16)[number % 2]
            parameter = torch.nn.Parameter(torch.ones(size, dtype=dtype))
            count = parameter.numel()
            parameter.grad = _of(10 * number + rank, count, torch.float32).view(size).to(dtype)
            if size == (40, 20):
                parameter.grad = parameter.grad.T.contiguous().T
            parameters.append(parameter)
        return parameters

    def averaged(ctx: Context) -> list[torch.Tensor]:
        parameters = made(ctx.rank)
        burst_rt.average_gradients(parameters, group=ctx)
        return [p.grad for p in parameters if p.grad is not None]

    all_ranks = [made(rank) for rank in range(world_size)]
    for got in burst_rt.run_local(world_size, averaged):
        for number, grad in enumerate(got):
            terms = [ps[number].grad.double() for ps in all_ranks]  # type: ignore[union-attr]  # all have one
            expected = sum(terms) / world_size
            torch.testing.assert_close(grad, expected.to(grad.dtype))  # type: ignore[union-attr]
