"""A survey: what decides between strategies, measured in a second or two when a job starts.

Rank 0 times tiles, sums and products while the other ranks rest. Then all ranks measure together:
how much slower a tile is now, messages of up to three sizes to neighbours on the host and to
counterparts on the next host, how much faster the latter are where one rank of a host sends alone,
and what a message takes from the tiles beside it. `burst-rt calibrate` measures more, and better.

The figures are rounded to steps of 9 percent, so that small changes do not change a plan. Further
groups of the same processes plan with the figures of the first. Where all ranks are on one host the
figures are remembered, so that later jobs plan alike. Networks between hosts differ from day to
day, and are measured anew.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import mean, median

import psutil
import torch

from burst_rt.errors import ConfigError
from burst_rt.job.control_groups import host_bytes
from burst_rt.kernels import Work, pick
from burst_rt.kernels.speed import TileProblem, chip_and_versions, seconds_in_turn
from burst_rt.planning.fit import Sample, fit_cards, fit_rates
from burst_rt.planning.machines import parse_hardware, to_toml
from burst_rt.planning.masks import Causal, Full, Mask, SlidingWindow
from burst_rt.planning.strategies.ring_builder import tile_cost
from burst_rt.remembered import recall, remember
from burst_rt.runtime.calibrated import fit_to_job
from burst_rt.runtime.objects import all_gather, first
from burst_rt.runtime.pipeline import make_pipeline
from burst_rt.runtime.runtime import Runtime
from burst_rt.scheduler import Cost, Graph, GraphBuilder, Op
from burst_rt.scheduler.simulator import Device, Hardware, Link, Nics, Node, Rate

__all__ = ["survey"]

# The figures that this process has measured.
_figures: str | None = None

_KIND = "survey"  # the answers' name in `remembered`
# Seconds for the messages of one kind of link. A size that is foreseen to take longer is left out.
_LINK_S = 0.8
_MESSAGE_BYTES = (1 << 14, 1 << 18, 1 << 22)
_REPEATS = 3
_PAIRS = 12  # so often a small message and none take turns
_MASKS = (Full(), Causal(), SlidingWindow(64), SlidingWindow(512))
# Tiles: mask, number of queries and of keys, and heads for each thread. The first is a large one
# without a mask. What a call costs beside its cells shows in small ones, and in those of one head.
_TILES: tuple[tuple[Mask, int, int], ...] = (
    *product(_MASKS, (1024, 128), (4,)), (Full(), 512, 1), (Full(), 128, 1),
)  # fmt: skip
_HEAD_DIM = 64
_DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
_NUMBERS = (1 << 10, 1 << 22)  # two tensors of so many are added
_WIDTHS = (32, 512)  # the matrices that are multiplied are square
_IDLE_TASKS = (1, 33)
# Seconds of work by which ranks show whether they share cores: many of an operating system's turns.
_TURNS_S = 0.05
# Tiles take so many times the time of the message that moves beside them.
_COVER = 1.5
# Ranks that are slowed down by more than this share cores; by less, memory or power.
_SHARED = 1.5


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
        "cores": str(psutil.cpu_count()), "tiles": str(_TILES),
    }  # fmt: skip


def _is_machine(text: object) -> bool:
    try:
        return isinstance(text, str) and bool(parse_hardware(text, "that is remembered"))
    except ConfigError:
        return False


def _measured(runtime: Runtime) -> Hardware:
    machine, world = runtime.machine, runtime.world_size
    per_node = machine.ranks_per_node
    alone = first(runtime, lambda: _samples(runtime.device))
    samples = [Sample(name, Cost(*cost), seconds) for name, cost, seconds in alone]
    slowdown = _slowdown(runtime, samples[0].seconds)
    memory = host_bytes() // machine.ranks_here
    cores, scale = None, slowdown
    if machine.device.type == "cuda":
        memory = int(torch.cuda.get_device_properties(machine.device).total_memory)
    elif slowdown >= _SHARED:
        cores = max(1, round(per_node / slowdown))
        scale = slowdown * cores / per_node
    task_s = _task_s(runtime) / slowdown
    rates = {
        name: _scaled(rate, task_s, max(1.0, scale)) for name, rate in fit_rates(samples).items()
    }
    inside = _link(runtime, 1, per_node)[0] if per_node > 1 else None
    nics = _nics(runtime) if per_node < world else None
    link = inside or (None if nics is None else nics.link)
    assert link is not None
    return Hardware(
        f"{world} ranks over {machine.choice.name}, measured when the job began",
        Device(int(_rounded(memory)), rates),
        Node(per_node, link, cores),
        nics,
    )


def _samples(device: torch.device) -> list[tuple[str, list[int], float]]:
    """What tasks cost and take here: the first is a whole tile, forward. Blocks for a second."""
    dtype = _DTYPES[device.type]
    costs: dict[str, Cost] = {}
    runs: dict[str, Callable[[], object]] = {}
    for name, products in (("forward", 2), ("backward", 5)):
        for mask, tokens, heads in _TILES:
            work = Work(device, dtype, _HEAD_DIM, mask, forward=name == "forward", ring_size=2)
            tile = TileProblem(work, tokens=tokens, alone=False, heads=heads)
            kernel = pick(work._replace(tiles=(tile.pieces,))).kernel
            which = f"{name} {mask!r} {tokens} {heads}"
            numbers = tile.num_heads * _HEAD_DIM  # a token has so many
            token_bytes = numbers * dtype.itemsize
            costs[which] = tile_cost(
                tile.pieces, 2 * products * numbers, token_bytes, 2 * token_bytes
            )
            runs[which] = partial(tile.run, kernel)
    for numbers in _NUMBERS:
        x, y = (torch.zeros(numbers, device=device) for _ in range(2))
        which = f"default {numbers}"
        costs[which], runs[which] = Cost(size_bytes=3 * x.nbytes), partial(torch.add, x, y, out=x)
    for width in _WIDTHS:
        a, b = (torch.zeros(width, width, dtype=dtype, device=device) for _ in range(2))
        which = f"linear {width}"
        costs[which], runs[which] = Cost(2 * width**3), partial(torch.mm, a, b)
    return [
        (which.split()[0], list(costs[which]), seconds)
        for which, seconds in seconds_in_turn(device, runs).items()
        if isinstance(seconds, float)
    ]


def _whole_tile(runtime: Runtime) -> Callable[[], object]:
    """What does a tile without a mask."""
    device = runtime.device
    mask, tokens, heads = _TILES[0]
    work = Work(device, _DTYPES[device.type], _HEAD_DIM, mask, forward=True, ring_size=2)
    tile = TileProblem(work, tokens=tokens, alone=False, heads=heads)
    return partial(tile.run, pick(work).kernel)


def _slowdown(runtime: Runtime, alone_s: float) -> float:
    """How much longer a whole tile takes on the slowest rank where all ranks compute.

    Ranks that share cores take turns, so each works for several turns.
    """
    run = _whole_tile(runtime)
    times = max(1, round(_TURNS_S / alone_s))
    together_s = _seconds(runtime, lambda: [run() for _ in range(times)])
    return max(1.0, together_s / times / alone_s)


def _task_s(runtime: Runtime) -> float:
    """Seconds that a task takes which does nothing, where all ranks run such tasks."""
    few_s, many_s = (_seconds(runtime, _idling(runtime, count)) for count in _IDLE_TASKS)
    return max(many_s - few_s, 0.0) / (_IDLE_TASKS[1] - _IDLE_TASKS[0])


def _idling(runtime: Runtime, tasks: int) -> Callable[[], object]:
    """What runs tasks that do nothing."""

    def build(rank: int) -> Graph:
        g = GraphBuilder(rank, runtime.world_size, runtime.machine.lanes)
        nothing = g.buffer("nothing", initialised=True)
        for task in range(tasks):
            g.compute(f"nothing {task}", "nothing", accumulates=[nothing])
        return g.build()

    return partial(
        make_pipeline(runtime, build).run, buffers={"nothing": torch.zeros(1, device="cpu")},
        ops={"nothing": lambda *_: None},
    )  # fmt: skip


def _scaled(rate: Rate, task_s: float, times: float) -> Rate:
    """A rate whose tasks take `times` as long and task_s more; rounded."""

    def rounded(value: float | None, factor: float = 1.0) -> float | None:
        return None if value is None else _rounded(value * factor)

    return Rate(
        _rounded(max(rate.launch_s * times + task_s, 1e-7)),
        rounded(rate.flops_per_s, 1 / times),
        rounded(rate.bytes_per_s, 1 / times),
        masked=rounded(rate.masked),
        edge=rounded(rate.edge),
    )


def _seconds(runtime: Runtime, run: Callable[[], object], repeats: int = _REPEATS) -> float:
    """Median seconds of a function on the slowest rank, while all ranks run it."""
    took = [_slowest_s(runtime, run) for _ in range(repeats + 1)]
    return max(median(took[1:]), 1e-9)  # the first warms up


def _slowest_s(runtime: Runtime, run: Callable[[], object]) -> float:
    all_gather(runtime, None)  # a common start
    started_s = time.perf_counter()
    run()
    if runtime.device.type == "cuda":
        torch.cuda.synchronize(runtime.device)
    return float(max(all_gather(runtime, time.perf_counter() - started_s)))


def _nics(runtime: Runtime) -> Nics:
    """The cards between a rank and its counterparts on the other hosts."""
    per_node, world = runtime.machine.ranks_per_node, runtime.world_size
    link, size, all_s = _link(runtime, per_node, world)
    if per_node == 1:
        return Nics(1, link)
    alone = _exchanging(runtime, per_node, world, size, sends=lambda rank: rank % per_node == 0)
    faster = all_s / _seconds(runtime, alone)
    nics = fit_cards(link, link.bytes_per_s * faster, per_node)
    return replace(nics, link=replace(nics.link, bytes_per_s=_rounded(nics.link.bytes_per_s)))


def _link(runtime: Runtime, step: int, ring: int) -> tuple[Link, int, float]:
    """The link to the rank `step` further on, in rings of `ring` neighbouring ranks, used both ways
    by all ranks at once; the largest message's bytes, and its seconds.
    """
    smallest = _MESSAGE_BYTES[0]
    idle, small = _idling(runtime, 1), _exchanging(runtime, step, ring, smallest)
    # In turn, because they differ by little.
    pairs = [(_slowest_s(runtime, idle), _slowest_s(runtime, small)) for _ in range(_PAIRS + 1)]
    idle_s, small_s = (median(times) for times in zip(*pairs[1:], strict=True))
    took = {smallest: small_s}
    left_s, last = _LINK_S, smallest
    for size in _MESSAGE_BYTES[1:]:
        if took[last] / last * size * (_REPEATS + 1) > left_s:
            break
        took[size] = _seconds(runtime, _exchanging(runtime, step, ring, size))
        left_s -= took[size] * (_REPEATS + 1)
        last = size
    latency_s = max(small_s - idle_s, 1e-6)
    if last == smallest:
        return Link(0.0, _rounded(last / took[last]), 1.0, "full"), last, took[last]
    byte_s = (took[last] - small_s) / (last - smallest)
    per_s = 1 / byte_s if byte_s > 0 else last / took[last]
    latency_s = max(latency_s - smallest / per_s, 1e-6)
    work_s = _work_byte_s(runtime, step, ring, last, took[last])
    link = Link(
        _rounded(latency_s), _rounded(per_s), 1.0, "full",
        work_byte_s=_rounded(work_s) if work_s > 0 else None,
    )  # fmt: skip
    return link, last, took[last]


def _work_byte_s(runtime: Runtime, step: int, ring: int, size: int, message_s: float) -> float:
    """Seconds of a core that a message takes from the tiles beside it, for a byte sent or received.

    All ranks compute and exchange. message_s: what a message of this size takes alone. Processor
    time tells, in the mean of all ranks: how long a tile takes varies by more than a message costs.
    """
    run = _whole_tile(runtime)
    tile_s = _seconds(runtime, lambda: [run() for _ in range(4)], 1) / 4
    times = max(1, round(_COVER * message_s / tile_s))
    plain, beside = (
        _exchanging(runtime, step, ring, size, [run] * times, sends=sends)
        for sends in (lambda _: False, lambda _: True)
    )
    # Processor time needs few runs; the first one warms up.
    pairs = [(_processor_s(runtime, plain), _processor_s(runtime, beside)) for _ in range(_REPEATS)]
    more_s = mean(with_s - without_s for without_s, with_s in pairs[1:])
    return max(0.0, more_s) / (2 * size)


def _processor_s(runtime: Runtime, run: Callable[[], object]) -> float:
    """Seconds of processor time that a function takes, in the mean of all ranks, which all run
    it.
    """
    all_gather(runtime, None)  # a common start
    started_s = time.process_time()
    run()
    return float(mean(all_gather(runtime, time.process_time() - started_s)))


def _exchanging(
    runtime: Runtime,
    step: int,
    ring: int,
    size: int,
    tiles: Sequence[Callable[[], object]] = (),
    *,
    sends: Callable[[int], bool] = lambda _: True,
) -> Callable[[], object]:
    """What exchanges messages of a size once, on the ranks that send, and does the tiles
    meanwhile.
    """

    def build(rank: int) -> Graph:
        g = GraphBuilder(rank, runtime.world_size, runtime.machine.lanes)
        out, into = (
            g.buffer(name, size_bytes=size, initialised=name == "out") for name in ("out", "in")
        )
        start = rank - rank % ring
        after, before = (start + (rank - start + way) % ring for way in (step, -step))
        if sends(rank):
            g.exchange("exchange", sends=[(out, after)], recvs=[(into, before)], tag=0)
        for number in range(len(tiles)):
            g.compute(f"tile {number}", Op("tile", (number,)), reads=[out])
        return g.build()

    buffers = {
        name: torch.zeros(size, dtype=torch.uint8, device=runtime.device) for name in ("out", "in")
    }
    pipeline = make_pipeline(runtime, build)

    def tile(number: int) -> None:
        tiles[number]()

    return partial(pipeline.run, buffers=buffers, ops={"tile": tile} if tiles else {})


def _rounded(value: float) -> float:
    """The nearest of the powers of 2**(1/8), with four digits: a step is 9 percent."""
    return float(f"{2 ** (round(math.log2(value) * 8) / 8):.4g}")
