"""A rank of `test_processes.py`: processes that really send to each other, each with a GPU of its
own, or sharing one.

Arguments: the transport, and what to do. "spec": calls against the float64 spec, each made twice;
rank 0 prints the transport and the largest errors as JSON. "lost": the last rank kills itself
before its third call; the other ranks print how their third call ended, and after how many seconds.

NCCL before 2.30 refuses two ranks on one GPU of one host. It knows hosts by their names, so ranks
that share a GPU give themselves names, each in a namespace of its own.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import time

import torch
from spec import errors_of
from worlds import Case, attend

import burst_rt
from burst_rt import Causal, Context, SlidingWindow
from burst_rt.errors import BurstError

_CLONE_NEWUTS = 0x04000000
_HALF = Case(1000, heads=4, kv_heads=2, head_dim=128, dtype=torch.bfloat16, mask=Causal())
_WIDE = Case(500, heads=4, head_dim=64, mask=Causal())
CASES = {
    "bf16, zigzag, auto": _HALF,
    "bf16, contiguous, burst": _HALF.but(kind="contiguous", strategy="burst"),
    "fp32, striped, ring-kv": _WIDE.but(kind="striped", strategy="ring-kv"),
    "fp32, zigzag, burst": _WIDE.but(strategy="burst"),
    "fp32, contiguous, bidirectional": _WIDE.but(kind="contiguous", strategy="bidirectional"),
    "fp32, zigzag, all-to-all": _WIDE.but(strategy="all-to-all"),
    "bf16, zigzag, sliced": _HALF.but(strategy="sliced:2", heads=8, kv_heads=4),
    "fp32, contiguous, window, direct": _WIDE.but(
        kind="contiguous", strategy="direct", mask=SlidingWindow(40)
    ),
}


def _on_a_host_of_its_own(rank: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), "unshare: a host name of its own needs root")
    socket.sethostname(f"host{rank}")


def _against_the_spec(ctx: Context) -> dict[str, float]:
    worst = {}
    for name, case in CASES.items():
        first, again = attend(ctx, case), attend(ctx, case)
        for x, y in zip(first, again, strict=True):
            assert x is None or (y is not None and torch.equal(x, y)), f"{name}: other bits"
        worst[name] = max(errors_of(first, case.truth).values())
    return worst | {"fp32, sum and mean of gradients": _sums(ctx)}


def _sums(ctx: Context) -> float:
    """The error of a sum that goes from device to device in two pieces, and of such gradients."""
    count, world = 20_000_000, ctx.world_size
    x = torch.arange(count, device=ctx.device, dtype=torch.float32) / count + ctx.rank
    weight = torch.nn.Parameter(torch.ones_like(x))
    weight.grad = x.clone()
    ctx.all_reduce(x)
    burst_rt.average_gradients([weight], group=ctx)
    truth = torch.arange(count, device=ctx.device).double() / count + (world - 1) / 2
    off = [((y - truth).norm() / truth.norm()).item() for y in (x.double() / world, weight.grad)]
    return float(max(off))


def _until_one_is_lost(ctx: Context) -> dict[str, object]:
    inputs = _HALF.inputs()
    for _ in range(2):
        attend(ctx, _HALF, inputs)
    ctx.all_gather(None)
    if ctx.rank == ctx.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begun_s = time.monotonic()
    try:
        attend(ctx, _HALF, inputs)
    except BurstError as error:
        return {"error": type(error).__name__, "after_s": time.monotonic() - begun_s}
    return {"error": None}


def main() -> None:
    """The rank."""
    transport, job = sys.argv[1:]
    rank, world_size = (
        int(os.environ.get(f"OMPI_COMM_WORLD_{name}", os.environ.get(other, "1")))
        for name, other in (("RANK", "RANK"), ("SIZE", "WORLD_SIZE"))
    )
    num_gpus = torch.cuda.device_count()
    alone = num_gpus >= world_size
    if transport != "mpi" and not alone:
        _on_a_host_of_its_own(str(rank))
    # A CPU rehearses the launching.
    device = f"cuda:{rank if alone else 0}" if num_gpus else "cpu"
    with burst_rt.init(device=device, transport=transport, timeout_s=60) as ctx:
        found = _against_the_spec(ctx) if job == "spec" else _until_one_is_lost(ctx)
        if ctx.rank == 0:
            print(json.dumps({"transport": ctx.why_transport, "found": found}), flush=True)


main()
