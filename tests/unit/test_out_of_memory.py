"""A tile that finds no memory: DeviceError with the plan's formula on that rank, and DeviceError
within seconds on every other.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

import burst_rt
from burst_rt import Context, ContextLayout, KVCache
from burst_rt.attention.execute import ForwardRun
from burst_rt.drivers import is_out_of_memory
from burst_rt.errors import BurstError, DeviceError, PeerLost
from burst_rt.kernels.cpu import CpuKernel
from burst_rt.runtime.machine import Slots
from burst_rt.serving.decode_run import DecodeRun

# What torch says on the host has no class of its own.
_ON_HOST = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
    "memory: you tried to allocate 2 GiB"
)
_ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    MemoryError("2 GiB"),
    RuntimeError(_ON_HOST),
]


def test_what_torch_says_is_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("something else"))


@pytest.mark.parametrize("error", _ERRORS)
def test_a_call_that_cannot_be_bound_is_refused_on_every_rank(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ForwardRun.fresh

    def greedy(*args: Any, **options: Any) -> torch.Tensor:  # fresh's own
        if threading.current_thread().name == "burst_rt rank 1" and armed.is_set():
            raise error
        return whole(*args, **options)

    armed = threading.Event()
    monkeypatch.setattr(ForwardRun, "fresh", greedy)

    def attend(ctx: Context) -> None:
        layout = ctx.layout(120)
        x = torch.ones(1, layout.shard_len, 2, 16, requires_grad=True)
        armed.set()
        with pytest.raises(
            DeviceError, match=r"rank 1: out of memory on cpu: this call takes \d"
        ) as caught:
            burst_rt.burst_attention(x, x, x, layout=layout)
        assert caught.value.__cause__ is (error if ctx.rank == 1 else None)
        # Nothing was sent: once there is room, the next call is as good as ever.
        done.wait(20)
        armed.clear()
        done.wait(20)
        _there_and_back(x, layout)

    done = threading.Barrier(3)
    burst_rt.run_local(3, attend, timeout_s=20)


@pytest.mark.parametrize("error", _ERRORS)
def test_idle_slots_are_let_go_before_a_call_is_refused(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ForwardRun.fresh
    armed, tries = threading.Event(), list[int]()

    def greedy(*args: Any, **options: Any) -> torch.Tensor:  # fresh's own
        if armed.is_set():
            tries.append(1)
            if len(ctx.runtime.machine._pool._idle):
                raise error
        return whole(*args, **options)

    monkeypatch.setattr(ForwardRun, "fresh", greedy)
    with burst_rt.init(device="cpu") as ctx:
        layout = ctx.layout(40)
        x = torch.ones(1, 40, 2, 16)
        expected = burst_rt.burst_attention(x, x, x, layout=layout)
        pool = ctx.runtime.machine._pool
        pool.give_back(object(), Slots({}, {}), None)
        armed.set()
        assert torch.equal(burst_rt.burst_attention(x, x, x, layout=layout), expected)
        assert len(tries) > 1


@pytest.mark.parametrize(("run", "tokens"), [(DecodeRun, 1), (ForwardRun, 40)])
def test_a_step_that_cannot_be_bound_fails_on_every_rank(
    run: type[DecodeRun | ForwardRun], tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are in the call already, and are not to wait for their deadline."""
    whole = run.fresh

    def greedy(*args: Any, **options: Any) -> torch.Tensor:  # fresh's own
        if threading.current_thread().name == "burst_rt rank 1":
            raise MemoryError("2 GiB")
        return whole(*args, **options)

    def attend(ctx: Context) -> None:
        cache = KVCache(
            ctx, num_layers=1, batch=1, num_kv_heads=1, head_dim=8, capacity=64,
            dtype=torch.float32, block=4,
        )  # fmt: skip
        step = cache.step(tokens)
        x = torch.ones(1, step.num_tokens, 1, 8)
        entered_s = time.monotonic()
        with pytest.raises(DeviceError, match="out of memory on cpu"):
            step.attend(0, x, x, x)
        assert time.monotonic() - entered_s < 10
        assert cache.lengths == (0,)

    monkeypatch.setattr(run, "fresh", greedy)
    burst_rt.run_local(3, attend, timeout_s=30, stall_s=30)


def _there_and_back(x: torch.Tensor, layout: ContextLayout) -> None:
    out = burst_rt.burst_attention(x, x, x, layout=layout)
    out.sum().backward()


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("error", _ERRORS)
def test_every_rank_hears_of_it_at_once(
    direction: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank closes its context before all have heard: it is not the leaving that tells them."""
    whole = getattr(CpuKernel, direction)
    tiles: list[str] = []

    def greedy(*args: Any) -> None:  # those of the kernel
        name = threading.current_thread().name
        tiles.append(name)
        if name == "burst_rt rank 1" and tiles.count(name) == 2:
            raise error
        whole(*args)

    all_heard = threading.Barrier(3)

    def attend(ctx: Context) -> tuple[BurstError, float, str]:
        layout = ctx.layout(120)
        x = torch.ones(1, layout.shard_len, 2, 16, requires_grad=True)
        started_s = time.monotonic()
        with pytest.raises(BurstError) as caught:
            _there_and_back(x, layout)
        took_s = time.monotonic() - started_s
        all_heard.wait(20)
        with pytest.raises(PeerLost, match="this context broke in an earlier call") as again:
            burst_rt.burst_attention(x, x, x, layout=layout)
        return caught.value, took_s, str(again.value)

    monkeypatch.setattr(CpuKernel, direction, greedy)
    for rank, (raised, took_s, again) in enumerate(burst_rt.run_local(3, attend, stall_s=60)):
        assert type(raised) is DeviceError
        assert took_s < 10
        assert raised.rank == rank
        if rank == 1:
            assert str(raised).startswith("rank 1: out of memory in 'hop ")
            assert "this call takes" in str(raised)
            assert "scratch" in str(raised)
            assert str(error) in str(raised)
            assert raised.task is not None
        else:
            assert raised.peer is not None
            assert "failed (exit code 74)" in str(raised)
        assert "out of memory" in again or "exit code 74" in again
