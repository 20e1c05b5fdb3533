"""The ranks' side of `burst-rt calibrate`: this machine measured as the simulator sees it.

* devices: the strategies themselves run at several sizes, full and causal, and every task of their
  traces is a sample (`fit`). All ranks compute at once, so that what they share (memory, power) is
  in the rates.
* matrix products, by a product of a typical shape.
* links: exchanges of messages of several sizes between neighbours, all ranks at once, both
  directions at once; between ranks of a host and, if there are several hosts, between hosts.

On CPUs the machine file says that as many ranks as were measured have a core each, and that more
ranks on the host share these cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

import burst_rt
from burst_rt.job.control_groups import host_bytes
from burst_rt.launch.measure.report import machine, median
from burst_rt.launch.measure.timing import (
    TIMES_OVER,
    have_memory,
    keep_freed_memory,
    progress_bar,
    slowest_s,
)
from burst_rt.launch.plan.doubts import BusyCores, doubts
from burst_rt.planning.fit import Sample, fit_cards, fit_link, fit_rates
from burst_rt.planning.machines import to_toml
from burst_rt.scheduler import Cost, Graph, GraphBuilder, Op, Span
from burst_rt.scheduler.simulator import Device, Hardware, Link, Nics, Node

__all__ = ["Calibration", "measure_machine"]

# Tokens of a rank, and the strategies whose operations are sampled. Whole matrices of scores are
# sampled at sizes that no cache holds.
_TOKENS = (256, 512, 1024, 2048)
_WHOLE = (1024, 2048, 4096, 8192)
_STRATEGIES = {
    "ring-kv": (*_TOKENS, 4096, 8192),
    "burst": _TOKENS,
    "all-to-all": _TOKENS[:3],
    "burst-untiled": _WHOLE,
    "ring-naive": _WHOLE,
}
# Seconds for each of them, and for links of one kind. What a strategy leaves is the next one's. A
# size that is foreseen to take longer is left out; the smallest never is.
_SECONDS = {"ring-kv": 40.0, "burst": 15.0, "all-to-all": 10.0, "burst-untiled": 15.0,
            "ring-naive": 15.0}  # fmt: skip
_LINK_S = 8.0
# A call of twice the tokens takes about so many times as long.
_GROWTH = 4.0
# Number of tokens from which on calls have a quarter of the heads and run at most twice: they take
# seconds.
_LONG = 4096
_MESSAGE_BYTES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
_LINEAR = ((256, 512), (512, 1024), (1024, 1024), (2048, 1024))  # rows, width
# Number of ranks that the machine file allows on a host for each rank that was measured. They share
# the measured ranks' cores.
_RANKS_A_CORE = 8


class Calibration:
    """One rank of the measuring job.

    Every public method is collective, and blocks until the other ranks call it.
    """

    def __init__(
        self,
        ctx: burst_rt.Context,
        *,
        heads: int,
        head_dim: int,
        dtype: torch.dtype,
        repeats: int,
        max_tokens: int,
    ) -> None:
        self.ctx = ctx
        ctx.stats()  # from here on, GPUs take times
        self.max_tokens = max_tokens
        self.heads, self.head_dim, self.dtype, self.repeats = heads, head_dim, dtype, repeats
        self.per_node = ctx.runtime.machine.ranks_per_node
        self.samples: list[Sample] = []
        self.left_out: list[str] = []  # sizes that this machine is too slow for
        self._busy = BusyCores()

    def hardware(self, say: Callable[[str], None]) -> Hardware:
        """Measures the machine in at most two minutes; `say` is told what is being measured."""
        samples = self.samples
        until_s = time.monotonic()
        for strategy, sizes in _STRATEGIES.items():
            until_s += _SECONDS[strategy]
            if strategy == "all-to-all" and self.heads % self.ctx.world_size:
                continue
            say(f"tiles and sums of {strategy}")
            took_s = 0.0
            for tokens in (size for size in sizes if size <= self.max_tokens):
                started_s = time.monotonic()
                late = started_s + _GROWTH * took_s > until_s
                # Rank 0's clock decides for all.
                if took_s and self.ctx.all_gather(late)[0]:
                    self.left_out.append(f"{strategy} from {tokens:,} tokens a rank")
                    break
                for causal in (False, True):
                    samples += self.attention(strategy, tokens, causal)
                took_s = time.monotonic() - started_s
        say("matrix products")
        samples += self.products()
        say("links")
        inside = self.link(1, self.per_node) if self.per_node > 1 else None
        outside = (
            self.link(self.per_node, self.ctx.world_size)
            if self.ctx.world_size > self.per_node
            else None
        )
        link = inside or outside
        assert link is not None
        nics = None if outside is None else self.cards(outside)
        return Hardware(
            self._name(),
            Device(self._memory_bytes(), fit_rates(samples)),
            self._node(link, nics),
            nics,
        )

    def doubts(self, hardware: Hardware) -> list[str]:
        """The reasons not to trust the figures, a sentence each; see `plan.doubts`."""
        busy, own = self._busy.so_far()
        cores = self.ctx.all_gather(own)
        first = self.ctx.rank - self.ctx.rank % self.per_node
        of_others = max(0.0, busy - sum(cores[first : first + self.per_node]))
        most = max(self.ctx.all_gather(of_others))
        threads = 1 if self.ctx.device.type == "cuda" else torch.get_num_threads()
        free = max(0, (psutil.cpu_count() or 1) - self.per_node * threads)
        return list(doubts(self.samples, hardware, most, free, self.per_node))

    def attention(self, strategy: str, tokens: int, causal: bool) -> Iterator[Sample]:
        """Samples of every task of both directions, from the traces of all ranks.

        There are none where a rank's share of memory may not be enough.
        """
        layout = self.ctx.layout(tokens * self.ctx.world_size, "zigzag" if causal else "contiguous")
        heads, repeats = (
            (max(1, self.heads // 4), min(2, self.repeats))
            if tokens >= _LONG
            else (self.heads, self.repeats)
        )
        shape = (1, layout.shard_len, heads, self.head_dim)
        q, k, v, dout = (
            torch.randn(shape, device=self.ctx.device).to(self.dtype) for _ in range(4)
        )
        for x in (q, k, v):
            x.requires_grad_()
        plan = burst_rt.explain(q, k, v, causal=causal, layout=layout, strategy=strategy).backward
        assert plan is not None
        takes = plan.memory().total * TIMES_OVER
        if any(self.ctx.all_gather(bool(takes > self._memory_bytes()))):
            return
        have_memory(self.ctx, takes)
        suffix = "-untiled" if strategy == "burst-untiled" else ""
        for repeat in range(repeats + 1):
            out = burst_rt.burst_attention(q, k, v, causal=causal, layout=layout, strategy=strategy)
            for backward in (False, True):
                if backward:
                    torch.autograd.grad(out, (q, k, v), dout)
                ranks = self.ctx.gather_last_run()
                if repeat:
                    yield from _samples(ranks, suffix)

    def products(self) -> Iterator[Sample]:
        """Samples of matrix products on this rank, while the other ranks do the same."""
        for rows, width in _LINEAR:
            x, weight = (
                torch.randn(n, width, device=self.ctx.device).to(self.dtype) for n in (rows, width)
            )
            cost = Cost(2 * rows * width * width)
            for repeat in range(self.repeats + 1):
                took = slowest_s(self.ctx, lambda x=x, weight=weight: x @ weight)  # type: ignore[misc]
                if repeat:
                    yield Sample("linear", cost, took)

    def cards(self, outside: Link) -> Nics:
        """The cards of a host; one rank of each host sends alone. outside: where all ranks send."""
        if self.per_node == 1:
            return Nics(1, outside)
        alone = self.link(self.per_node, self.ctx.world_size, every=self.per_node)
        return fit_cards(outside, alone.bytes_per_s, self.per_node)

    def link(self, step: int, ring: int, every: int = 1) -> Link:
        """The link to the rank `step` further on, in rings of `ring` neighbouring ranks.

        every: the first of so many neighbouring ranks sends, the others do not.
        """
        rank = self.ctx.rank
        first = rank - rank % ring

        # Pipelines cannot stage device memory; between hosts, host memory goes the same way.
        staged = self.ctx.runtime.machine.choice.staged
        where = torch.device("cpu") if staged else self.ctx.device
        nothing = self.ctx.pipeline(lambda r: _nothing(r, self.ctx))
        idle = partial(nothing.run, buffers={}, ops={"wait": lambda: None})
        exchanges = {
            size: partial(
                self.ctx.pipeline(
                    partial(
                        _exchange, ctx=self.ctx, step=step, ring=ring, size_bytes=size, every=every
                    )
                ).run,
                buffers={
                    name: torch.empty(size, dtype=torch.uint8, device=where)
                    for name in ("out", "in")
                },
                ops={},
            )
            for size in _MESSAGE_BYTES
        }
        # The sizes and the idle call take turns, so that what disturbs the machine for a while
        # hits all of them.
        idle_s: list[float] = []
        took: dict[int, list[float]] = {size: [] for size in _MESSAGE_BYTES}
        rounds, left_s = 4 * self.repeats + 1, _LINK_S
        for size, exchange in list(exchanges.items()):
            # The first run of each warms up.
            once_s = slowest_s(self.ctx, exchange)
            left_s -= rounds * once_s
            if left_s < 0 and size > _MESSAGE_BYTES[1]:
                del exchanges[size], took[size]
        for repeat in range(rounds):
            for size, exchange in exchanges.items():
                exchange_s, nothing_s = slowest_s(self.ctx, exchange), slowest_s(self.ctx, idle)
                if repeat:  # The first round warms up.
                    took[size].append(exchange_s)
                    idle_s.append(nothing_s)

        assert first + ring <= self.ctx.world_size
        link = fit_link({size: median(of) for size, of in took.items()})
        # The cost of a call itself does not belong to the link.
        return replace(link, latency_s=max(link.latency_s - median(idle_s), 1e-7))

    def _name(self) -> str:
        chip = (
            torch.cuda.get_device_name(self.ctx.device)
            if self.ctx.device.type == "cuda"
            else machine()["cpu"]
        )
        return (
            f"{chip}, measured with {self.ctx.world_size} ranks over "
            f"{self.ctx.runtime.machine.choice.name}"
        )

    def _memory_bytes(self) -> int:
        if self.ctx.device.type == "cuda":
            return int(torch.cuda.get_device_properties(self.ctx.device).total_memory)
        return host_bytes() // self.per_node

    def _node(self, link: Link, nics: Nics | None) -> Node:
        if self.ctx.device.type == "cuda" or nics is not None:
            return Node(self.per_node, link)
        return Node(_RANKS_A_CORE * self.per_node, link, cores=self.per_node)


def _samples(ranks: Sequence[tuple[Graph, Sequence[Span]]], suffix: str) -> Iterator[Sample]:
    for graph, spans in ranks:
        for span in spans:
            task = graph.tasks[span.task]
            if task.op is not None and task.lane == "compute":
                name = task.op.name + (suffix if task.op.name in ("forward", "backward") else "")
                yield Sample(name, task.cost, span.ended_s - span.started_s)


def _exchange(
    rank: int, ctx: burst_rt.Context, step: int, ring: int, size_bytes: int, every: int
) -> Graph:
    g = GraphBuilder(rank, ctx.world_size, ctx.lanes)
    out, into = (
        g.buffer(name, size_bytes=size_bytes, initialised=name == "out") for name in ("out", "in")
    )
    first = rank - rank % ring
    after, before = (first + (rank - first + way) % ring for way in (step, -step))
    if rank % every == 0:
        g.exchange("exchange", sends=[(out, after)], recvs=[(into, before)], tag=0)
    return g.build()


def _nothing(rank: int, ctx: burst_rt.Context) -> Graph:
    g = GraphBuilder(rank, ctx.world_size, ctx.lanes)
    g.compute("wait", op=Op("wait"), writes=[g.buffer("nothing")])
    return g.build()


def measure_machine(made: str, doubts: str, repeats: int, max_tokens: int, **shape: Any) -> None:
    """Measures on all ranks; rank 0 writes the machine file and the file of doubts.

    made, doubts: the paths of the two; reasons not to trust the figures are one a line.
    shape: heads, head_dim, and dtype by its name.
    """
    keep_freed_memory()
    with burst_rt.init() as ctx:
        if ctx.world_size < 2:
            raise burst_rt.errors.InputError(
                "calibrate: links need at least 2 ranks, got 1; use -n 2 or more"
            )
        torch.manual_seed(ctx.rank)
        first = ctx.rank == 0
        about = "{heads} heads x {head_dim}, {dtype}".format(**shape)
        shape["dtype"] = getattr(torch, shape["dtype"])
        calibration = Calibration(ctx, **shape, repeats=repeats, max_tokens=max_tokens)
        with progress_bar(first, len(_STRATEGIES) + 2) as step:
            hardware = calibration.hardware(step)
        doubtful = calibration.doubts(hardware)
        if first:
            text = "".join(f"{doubt}\n" for doubt in doubtful)
            Path(doubts).write_text(text, encoding="utf-8")
            by = ", ".join(f"{name} {value}" for name, value in machine().items())
            day = date.today().isoformat()
            head = f"# Made by `burst-rt calibrate` on {day}: {about}.\n# {by}\n"
            if calibration.left_out:
                head += (
                    f"# Left out, to end within two minutes: {', '.join(calibration.left_out)}.\n"
                )
            head += "\n"
            Path(made).write_text(head + to_toml(hardware), encoding="utf-8")
