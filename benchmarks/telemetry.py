"""What telemetry costs: the time of a step with and without it.

Two contexts of one job take turns, a few steps at a time, so that the machine's noise hits both
alike. One context has everything on: agents, hub, record, and a viewer that asks twice a second.
The other context has no telemetry; during its turns the hub and the viewer are suspended and the
agents are held. Before a turn is timed, whatever has just been woken gets time to catch up. The
turns without telemetry wait as long.
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import click
import psutil
import torch

import burst_rt
from burst_rt.errors import InternalError
from burst_rt.job.launched import RECORD_VARIABLE, SECRET_VARIABLE, TELEMETRY_VARIABLE
from burst_rt.launch.measure.options import OUT, RANKS
from burst_rt.launch.measure.ranks import run_on_ranks
from burst_rt.launch.measure.report import Cell, median, publish
from burst_rt.launch.measure.timing import slowest_s
from burst_rt.telemetry.hub.starting import HUB_MODULE
from burst_rt.telemetry.rank import joining
from burst_rt.telemetry.rank.agent import Agent

__all__ = ["command"]

# A period of the viewer: whatever was held asks, samples and writes at once when it is let go.
_SETTLE_S = 0.5
_STEPS = 2  # number of steps of a turn


def measure(repeats: int, tokens: int, out: str | None) -> None:
    """Compares the two contexts; rank 0 prints and writes. Blocks for the other ranks."""
    for name in (TELEMETRY_VARIABLE, RECORD_VARIABLE, SECRET_VARIABLE):
        os.environ.pop(name, None)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ[RECORD_VARIABLE] = str(Path(folder) / "record")
        with burst_rt.init(telemetry=True) as seen, burst_rt.init(telemetry=False) as unseen:
            row = _compare(_Everything(seen), seen, unseen, repeats, tokens)
        joining.farewell(0)
        if seen.rank == 0:
            note = (
                f"medians of {repeats} turns of {_STEPS} steps each; a step is forward and "
                "backward of attention"
            )
            publish("telemetry: a step with and without it", [row], out, note)


def _compare(
    everything: _Everything,
    seen: burst_rt.Context,
    unseen: burst_rt.Context,
    repeats: int,
    tokens: int,
) -> dict[str, Cell]:
    times: dict[burst_rt.Context, list[float]] = {seen: [], unseen: []}
    parts: list[list[float]] = []
    try:
        for repeat in range(repeats + 1):
            # The two contexts take turns in going first.
            for ctx in (seen, unseen) if repeat % 2 else (unseen, seen):
                everything.run(ctx is seen)
                time.sleep(_SETTLE_S)
                before, began_s = everything.cpu_s(), time.perf_counter()
                step_s = _turn(ctx, tokens)
                used, elapsed_s = everything.cpu_s(), time.perf_counter() - began_s
                if repeat:  # the first warms up
                    times[ctx].append(step_s)
                    if ctx is seen:
                        parts.append(
                            [
                                100 * (now - then) / elapsed_s
                                for now, then in zip(used, before, strict=True)
                            ]
                        )
    finally:
        everything.end()
    paired = [100 * (a / b - 1) for a, b in zip(times[seen], times[unseen], strict=True)]
    agent, hub, viewer = map(statistics.fmean, zip(*parts, strict=True))
    return {
        "tokens": tokens, "without ms": median(times[unseen]) * 1e3,
        "with ms": median(times[seen]) * 1e3,
        "paired cost %": median(paired), "+- %": _error_of_median(paired),
        "an agent, % of a core": agent, "hub": hub, "viewer": viewer,
    }  # fmt: skip


def _error_of_median(values: list[float]) -> float:
    """Standard error of the median of normally distributed values with a few outliers.

    The spread is taken from the quartiles.
    """
    if len(values) < 4:
        return float("nan")
    low, _, high = statistics.quantiles(values, n=4)
    return 1.2533 * (high - low) / 1.349 / math.sqrt(len(values))


def _turn(ctx: burst_rt.Context, tokens: int) -> float:
    """Seconds a step on the slowest rank. Blocks for the other ranks."""
    layout = ctx.layout(tokens)
    torch.manual_seed(0)
    shape = (1, layout.shard_len, 8, 64)
    q, k, v, dout = (torch.randn(shape, device=ctx.device, requires_grad=i < 3) for i in range(4))

    def work() -> None:
        for step in range(_STEPS):
            attended = burst_rt.burst_attention(q, k, v, causal=True, layout=layout)
            torch.autograd.grad(attended, (q, k, v), dout)
            if ctx.rank == 0 and ctx.runtime.observer is not None:
                burst_rt.telemetry.report(step, loss=1.0, tokens_per_s=1.0)

    return slowest_s(ctx, work) / _STEPS


class _Everything:
    """The agent of this rank, and on rank 0 the hub and a viewer. They run, or are held."""

    def __init__(self, ctx: burst_rt.Context) -> None:
        agent = joining._agents.get(None)
        if agent is None or agent._thread.ident is None:
            raise InternalError(
                f"rank {ctx.rank}: there is no telemetry to measure, because the hub did not start"
            )
        self._agent_clock = time.pthread_getcpuclockid(agent._thread.ident)
        self._go = threading.Event()
        self._go.set()
        wait_until = agent._wait_until

        def hold(wake_at_s: float) -> None:
            wait_until(wake_at_s)
            self._go.wait()

        agent._wait_until = hold  # type: ignore[method-assign]
        self._hub = _hub() if ctx.rank == 0 else None
        self._viewer = _start_viewer(agent) if ctx.rank == 0 else None

    def run(self, on: bool) -> None:
        """Lets all of them run, or holds them, from here on."""
        for process in (self._hub, self._viewer):
            if process is not None:
                (process.resume if on else process.suspend)()
        (self._go.set if on else self._go.clear)()

    def cpu_s(self) -> tuple[float, float, float]:
        """Processor seconds so far: of the agent's thread, of the hub, of the viewer."""
        hub, viewer = (
            sum(process.cpu_times()[:2]) if process is not None else 0.0
            for process in (self._hub, self._viewer)
        )
        return time.clock_gettime(self._agent_clock), hub, viewer

    def end(self) -> None:
        """Lets all of them run, and ends the viewer. Blocks until the viewer has ended."""
        self.run(True)
        if self._viewer is not None:
            self._viewer.kill()
            self._viewer.wait()


def _hub() -> psutil.Process | None:
    """The hub that this process has started."""
    running = (p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE)
    return next((p for p in running if HUB_MODULE in p.cmdline()), None)


_VIEWER = """
import sys, time
from burst_rt.telemetry.read.viewer import HubViewer
with HubViewer(sys.argv[1], sys.argv[2]) as viewer:
    while True:
        viewer.snapshot()
        viewer.timeline(-2.0)
        time.sleep(0.5)
"""


def _start_viewer(agent: Agent) -> psutil.Popen:
    command = [sys.executable, "-P", "-c", _VIEWER, agent.address, agent.secret]
    return psutil.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


@click.command()
@RANKS
@click.option(
    "--repeats",
    default=100,
    show_default=True,
    type=click.IntRange(1),
    help=f"Turns with telemetry and turns without, {_STEPS} steps each.",
)
@click.option(
    "--tokens",
    default=4096,
    show_default=True,
    type=click.IntRange(1),
    help="Tokens of a step, all ranks together.",
)
@OUT
def command(num_ranks: int, **options: object) -> None:
    """Time of a step with and without telemetry. `hub` measures the hub's memory."""
    run_on_ranks(measure, num_ranks, options, threads=1)
