"""A survey: what decides between strategies, measured in a second or two when a job starts.

The ranks measure together, with all of them at work: messages of up to three sizes to neighbours
on the host and to counterparts on the next host, one tile of attention in each direction, a sum of
two tensors and a product of matrices. `burst-rt calibrate` measures more, and better.

The figures are those of the slowest rank, rounded to steps of 19 percent, so that small changes do
not change a plan. Further groups of the same processes plan with the figures of the first. Where
all ranks are on one host the figures are remembered, so that later jobs plan alike. Networks
between hosts differ from day to day, and are measured anew.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import psutil
import torch

from burst_rt.errors import ConfigError
from burst_rt.kernels import Work, pick
from burst_rt.kernels.speed import TileProblem, chip_and_versions
from burst_rt.planning.machines import parse_hardware, to_toml
from burst_rt.planning.masks import Full
from burst_rt.remembered import recall, remember
from burst_rt.runtime.calibrated import fit_to_job
from burst_rt.runtime.objects import all_gather
from burst_rt.runtime.pipeline import make_pipeline
from burst_rt.runtime.runtime import Runtime
from burst_rt.scheduler import Graph, GraphBuilder
from burst_rt.scheduler.simulator import Device, Hardware, Link, Nics, Node, Rate

__all__ = ["survey"]

# The figures that this process has measured.
_figures: str | None = None

_KIND = "survey"  # the answers' name in `remembered`
# Seconds for the messages of one kind of link. A size that is foreseen to take longer is left out.
_LINK_S = 0.8
_MESSAGE_BYTES = (1 << 14, 1 << 18, 1 << 22)
_REPEATS = 3
_TOKENS = 1024  # a tile has so many queries and keys
_HEAD_DIM = 64
_NUMBERS = 1 << 22  # two tensors of so many are added
_WIDTH = 512  # the matrices that are multiplied are square


def survey(runtime: Runtime) -> Hardware:
    """Measures the machine of a job of several ranks. Collective; blocks for a few seconds.

    The same on every rank. Raises what a call raises.
    """
    global _figures
    key = _key(runtime)
    known, *others = all_gather(runtime, _figures)
    if known is None or any(text != known for text in others):
        found = recall(_KIND, key, _is_machine) if runtime.rank == 0 and key else None
        known = all_gather(runtime, found)[0]
    hardware = None if known is None else _fitting(runtime, known)
    if hardware is None:
        known = all_gather(runtime, to_toml(_measured(runtime)))[0]
        hardware = parse_hardware(known, "of the survey")
        if runtime.rank == 0 and key:
            remember(_KIND, key, known)
    _figures = known
    return hardware


def _fitting(runtime: Runtime, text: str) -> Hardware | None:
    """The machine of an earlier survey as this group sees it, or None where it lacks a link."""
    hardware = parse_hardware(text, "of the survey")
    return fit_to_job(hardware, runtime.machine.ranks_per_node, runtime.world_size)


def _key(runtime: Runtime) -> dict[str, str] | None:
    """What the figures depend on; None where they depend on a network."""
    machine = runtime.machine
    if machine.ranks_per_node < runtime.world_size:
        return None
    return chip_and_versions(machine.device) | {
        "ranks": str(runtime.world_size), "transport": machine.choice.name,
        "cores": str(psutil.cpu_count()),
    }  # fmt: skip


def _is_machine(text: object) -> bool:
    try:
        return isinstance(text, str) and bool(parse_hardware(text, "that is remembered"))
    except ConfigError:
        return False


def _measured(runtime: Runtime) -> Hardware:
    machine, world = runtime.machine, runtime.world_size
    per_node = machine.ranks_per_node
    inside = _link(runtime, 1, per_node) if per_node > 1 else None
    outside = _link(runtime, per_node, world) if per_node < world else None
    link = inside or outside
    assert link is not None
    memory = int(psutil.virtual_memory().total) // machine.ranks_here
    if machine.device.type == "cuda":
        memory = int(torch.cuda.get_device_properties(machine.device).total_memory)
    return Hardware(
        f"{world} ranks over {machine.choice.name}, measured when the job began",
        Device(int(_rounded(memory)), _rates(runtime)),
        Node(per_node, link),
        None if outside is None else Nics(per_node, outside),
    )


def _rates(runtime: Runtime) -> dict[str, Rate]:
    device = runtime.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rates = {}
    for name, products in (("forward", 2), ("backward", 5)):
        work = Work(device, dtype, _HEAD_DIM, Full(), forward=name == "forward", ring_size=2)
        kernel = pick(work).kernel
        small, large = (TileProblem(work, tokens=n, alone=False) for n in (64, _TOKENS))
        small_s, large_s = (_seconds(runtime, partial(x.run, kernel)) for x in (small, large))
        flops = 2 * products * _TOKENS**2 * large.num_heads * _HEAD_DIM
        launch_s = min(small_s, large_s / 2)
        rates[name] = Rate(_rounded(launch_s), _rounded(flops / (large_s - launch_s)))
    x, y = (torch.zeros(_NUMBERS, device=device) for _ in range(2))
    added_s = _seconds(runtime, partial(torch.add, x, y, out=x))
    rates["default"] = Rate(1e-6, bytes_per_s=_rounded(3 * x.nbytes / added_s))
    a, b = (torch.zeros(_WIDTH, _WIDTH, dtype=dtype, device=device) for _ in range(2))
    product_s = _seconds(runtime, partial(torch.mm, a, b))
    rates["linear"] = Rate(1e-6, _rounded(2 * _WIDTH**3 / product_s))
    return rates


def _seconds(runtime: Runtime, run: Callable[[], object]) -> float:
    """Median seconds of a function on the slowest rank, while all ranks run it."""
    took = [_slowest_s(runtime, run) for _ in range(_REPEATS + 1)]
    return max(median(took[1:]), 1e-9)  # the first warms up


def _slowest_s(runtime: Runtime, run: Callable[[], object]) -> float:
    all_gather(runtime, None)  # a common start
    started_s = time.perf_counter()
    run()
    if runtime.device.type == "cuda":
        torch.cuda.synchronize(runtime.device)
    return float(max(all_gather(runtime, time.perf_counter() - started_s)))


def _link(runtime: Runtime, step: int, ring: int) -> Link:
    """The link to the rank `step` further on, in rings of `ring` neighbouring ranks, used both ways
    by all ranks at once.
    """
    idle_s = _seconds(runtime, _exchanging(runtime, step, ring, 0))
    took: dict[int, float] = {}
    left_s, last = _LINK_S, _MESSAGE_BYTES[0]
    for size in _MESSAGE_BYTES:
        if took and took[last] / last * size * (_REPEATS + 1) > left_s:
            break
        took[size] = _seconds(runtime, _exchanging(runtime, step, ring, size))
        left_s -= took[size] * (_REPEATS + 1)
        last = size
    smallest = min(took)
    latency_s = max(took[smallest] - idle_s, 1e-6)
    if last == smallest:
        return Link(0.0, _rounded(last / took[last]), 1.0, "full")
    byte_s = (took[last] - took[smallest]) / (last - smallest)
    per_s = 1 / byte_s if byte_s > 0 else last / took[last]
    latency_s = max(latency_s - smallest / per_s, 1e-6)
    return Link(_rounded(latency_s), _rounded(per_s), 1.0, "full")


def _exchanging(runtime: Runtime, step: int, ring: int, size: int) -> Callable[[], object]:
    """What exchanges messages of a size once; without messages for size 0."""

    def build(rank: int) -> Graph:
        g = GraphBuilder(rank, runtime.world_size, runtime.machine.lanes)
        out, into = (
            g.buffer(name, size_bytes=size, initialised=name == "out") for name in ("out", "in")
        )
        first = rank - rank % ring
        after, before = (first + (rank - first + way) % ring for way in (step, -step))
        if size:
            g.exchange("exchange", sends=[(out, after)], recvs=[(into, before)], tag=0)
        else:
            g.compute("nothing", "nothing", writes=[into])
        return g.build()

    buffers = {
        name: torch.zeros(size, dtype=torch.uint8, device=runtime.device)
        for name in ("out", "in")
        if size
    }
    pipeline = make_pipeline(runtime, build)
    return partial(pipeline.run, buffers=buffers, ops={} if size else {"nothing": lambda *_: None})


def _rounded(value: float) -> float:
    """The nearest of the powers of 2**(1/4), with four digits: a step is 19 percent."""
    return float(f"{2 ** (round(math.log2(value) * 4) / 4):.4g}")
