"""Program on an emulated GPU: makes a mistake of the kind `args[0]` and prints "seen" if it is an
error; does the same right, and prints "fine".
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from emulated.books import Race

import burst_rt
from burst_rt.drivers.device import TorchDevice
from burst_rt.kernels.triton import tables as of_triton


def devices(right: bool) -> None:
    """Tensors of two devices in one operator."""
    x = torch.ones(3, device="cuda")
    assert (x + torch.ones(3, device="cuda" if right else "cpu")).sum().item() == 6


def order(right: bool) -> None:
    """One stream reads what another one writes."""
    x, stream = torch.zeros(3, device="cuda"), torch.cuda.Stream()
    if right:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = x + 1
    if right:
        torch.cuda.current_stream().wait_stream(stream)
    x.add_(y)


def memory(right: bool) -> None:
    """Memory of one stream is used again while another one reads it."""
    x, stream = torch.zeros(3, device="cuda"), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = x + 1
    if right:
        x.record_stream(stream)
    del x
    time.sleep(0.1)  # the emulation holds memory of work that lags, where a GPU's is free at once
    torch.zeros(3, device="cuda")
    del y


def driver(right: bool) -> None:
    """The driver's streams do not wait for each other."""
    wait = TorchDevice.wait if right else lambda *_: None

    def attend(ctx: burst_rt.Context) -> None:
        layout = ctx.layout(64)
        x = torch.randn(1, layout.shard_len, 2, 16, device=ctx.device, requires_grad=True)
        burst_rt.burst_attention(x, x, x, layout=layout, strategy="burst").sum().backward()

    with mock.patch.object(TorchDevice, "wait", wait):
        burst_rt.run_local(2, attend)


@triton.jit  # type: ignore[untyped-decorator]
def _double_kernel(p_x: Any, length: Any, BLOCK: tl.constexpr, MASKED: tl.constexpr) -> None:
    o_x = tl.arange(0, BLOCK)
    mask = o_x < length if MASKED else o_x < BLOCK
    tl.store(p_x + o_x, 2 * tl.load(p_x + o_x, mask=mask), mask=mask)


def addresses(right: bool) -> None:
    """A kernel reads beyond its memory."""
    x = torch.ones(5, device="cuda")
    _double_kernel[1,](x, 5, 8, right)
    assert x.tolist() == [2] * 5


def specialized(right: bool) -> None:
    """A kernel is started on an address that it was not compiled for."""
    x = torch.ones(8, device="cuda")
    compiled = _double_kernel[1,](x, 4, 4, True)
    compiled[1, 1, 1](x[4 if right else 3 :].data_ptr(), 4, 4, True)


def tables(right: bool) -> None:
    """Kernels of one stream read tables that another one copies."""
    plain = of_triton._on_stream

    def attend(ctx: burst_rt.Context) -> None:
        ctx.attention.poison = False  # kernels go to the caller's stream
        for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
            with torch.cuda.stream(stream):
                x = torch.randn(1, 40, 2, 16, device=ctx.device)
                burst_rt.burst_attention(x, x, x, layout=ctx.layout(40), causal=True)

    with mock.patch.object(of_triton, "_on_stream", plain if right else lambda kept, _: kept.table):
        burst_rt.run_local(1, attend)


_MISTAKES: dict[str, tuple[Callable[[bool], None], str]] = {
    "devices": (devices, "on the same device"),
    "order": (order, "nothing puts it after"),
    "memory": (memory, "nothing puts it after"),
    "driver": (driver, "nothing puts it after"),
    "addresses": (addresses, "are no memory of a device"),
    "specialized": (specialized, "% 16"),
    "tables": (tables, "nothing puts it after"),
}
make, said = _MISTAKES[sys.argv[1]]
try:
    make(False)
except (Race, RuntimeError, ValueError) as error:
    if said in str(error):
        print("seen", flush=True)
torch.cuda.synchronize()
make(True)
print("fine", flush=True)
