"""What telemetry costs: the time of a step with and without it. The ranks' side of `burst-rt bench telemetry`; start it through that.

Steps with everything on (agents, hub, record, a viewer that asks twice a second)
and with nothing are taken in turn in one job, in many short rounds, so that the machine's noise hits both alike; between rounds the hub
ends and starts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch

import burst_rt
from burst_rt.launch.bench.report import Cell, median, publish
from burst_rt.telemetry import joining
from burst_rt.telemetry.agent import Agent
from burst_rt.telemetry.wire import RECORD_VARIABLE, SECRET_VARIABLE, TELEMETRY_VARIABLE

__all__ = ["main"]


def main(repeats: int, steps: int, tokens: int, out: Path | None) -> None:
    """The ranks' side."""
    rows = _ab(repeats, steps, tokens)
    if rows:
        note = f"medians of {repeats} rounds of {steps} steps each way, in turn; a step is forward and backward of attention"
        publish("telemetry: a step with and without it", rows, out, note)


def _ab(repeats: int, steps: int, tokens: int) -> list[dict[str, Cell]]:
    for name in (TELEMETRY_VARIABLE, RECORD_VARIABLE, SECRET_VARIABLE):
        os.environ.pop(name, None)
    times: dict[bool, list[float]] = {True: [], False: []}
    used: list[tuple[float, float]] = []
    rank = 0
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(repeats + 1):
            # Now one first, now the other.
            for on in (True, False) if repeat % 2 else (False, True):
                os.environ[RECORD_VARIABLE] = str(Path(folder) / "record") if on else ""
                with burst_rt.init(telemetry=on, timeout_s=1200, stall_s=120) as ctx:
                    rank = ctx.rank
                    step_s, parts = _round(ctx, steps, tokens, on)
                joining.farewell(0)
                if repeat:  # the first warms up
                    times[on].append(step_s)
                    used += [parts] if on else []
    if rank:
        return []
    with_it, without = median(times[True]), median(times[False])
    paired = [100 * (a / b - 1) for a, b in zip(times[True], times[False], strict=True)]
    spread = statistics.stdev(paired) / len(paired) ** 0.5 if len(paired) > 1 else 0.0
    return [
        {
            "tokens": tokens, "without ms": without * 1e3, "with ms": with_it * 1e3, "cost %": 100 * (with_it / without - 1),
            "paired cost %": median(paired), "+- %": spread, "an agent, % of a core": 100 * median([agent for agent, _ in used]),
            "hub, % of a core": 100 * median([hub for _, hub in used]),
        }
    ]  # fmt: skip


def _round(ctx: burst_rt.Context, steps: int, tokens: int, on: bool) -> tuple[float, tuple[float, float]]:
    """Seconds a step, of the slowest rank; and what part of a core this rank's agent and the hub took (0 where they are off)."""
    layout = ctx.layout(tokens)
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, layout.shard_len, 8, 64, requires_grad=i < 3) for i in range(4))
    hub = _hub() if on and ctx.rank == 0 else None
    viewer = _start_viewer() if hub is not None else None
    took = torch.zeros(ctx.world_size, dtype=torch.float64)
    agent = joining._agents.get(None)
    hub_s, agent_s, started_s = 0.0, 0.0, 0.0
    for step in range(steps + 1):
        if step == 1:
            ctx.all_reduce(took)  # a common start
            hub_s, agent_s = _cpu_s(hub), _thread_s(agent)
            started_s = time.perf_counter()
        attended = burst_rt.burst_attention(q, k, v, causal=True, layout=layout)
        assert isinstance(attended, torch.Tensor)
        torch.autograd.grad(attended, (q, k, v), dout)
        if ctx.rank == 0:
            burst_rt.telemetry.report(step, loss=1.0, tokens_per_s=1.0)
    elapsed_s = time.perf_counter() - started_s
    parts = (_thread_s(agent) - agent_s) / elapsed_s, (_cpu_s(hub) - hub_s) / elapsed_s
    took[ctx.rank] = elapsed_s / steps
    if viewer is not None:
        viewer.kill()
        viewer.wait()
    return float(ctx.all_reduce(took).max()), parts


def _hub() -> psutil.Process | None:
    """The hub that this process has started."""
    running = (p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE)
    return next((p for p in running if "burst_rt.telemetry.hub" in p.cmdline()), None)


def _thread_s(agent: Agent | None) -> float:
    """Processor time of an agent's thread."""
    thread = agent._thread.ident if agent is not None else None
    return time.clock_gettime(time.pthread_getcpuclockid(thread)) if thread is not None else 0.0


def _cpu_s(process: psutil.Process | None) -> float:
    return sum(process.cpu_times()[:2]) if process is not None else 0.0


_VIEWER = """
import sys, time
from burst_rt.telemetry.viewer import Viewer
with Viewer(sys.argv[1], sys.argv[2]) as viewer:
    while True:
        viewer.snapshot()
        viewer.timeline(-2.0)
        time.sleep(0.5)
"""


def _start_viewer() -> subprocess.Popen[bytes] | None:
    agent = joining._agents.get(None)
    if agent is None:
        return None
    command = [sys.executable, "-P", "-c", _VIEWER, agent.address, agent.secret]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    main(options.repeats, options.steps, options.tokens, options.out)
