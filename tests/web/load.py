"""A dashboard under load: 64 ranks and 2,000 spans a second of a made-up job, or more of them, in a real browser. Prints figures as JSON.

    python tests/web/load.py --seconds 130 --rate 20000

Frame times are those of the page's animation frames, drawing included; the heap is what is left after a collection. A page that has seen
ten minutes' worth of spans must not hold more than one that has seen two.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import threading
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dashboards import Serving, serving
from playwright.sync_api import CDPSession, sync_playwright

from burst_rt.telemetry.messages import VERSION, Call, Counters, FromRank, Group, Heartbeat, Hello, LaneCounters, Plan, Report, TaskInfo
from burst_rt.telemetry.state import State
from burst_rt.telemetry.timeline import SPAN

_HOPS = 8
_TASKS = 2 * _HOPS - 1
_TICK_S = 0.1
# Of the page: how long frames took and how far apart they were.
_COUNT_FRAMES = """() => {
  window.gaps = [];
  let last = performance.now();
  const frame = (at) => {
    window.gaps.push(at - last);
    last = at;
    if (window.gaps.length > 20000) window.gaps.shift();
    requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
}"""
_TAKE_FRAMES = """() => {
  const sorted = window.gaps.slice(1).sort((a, b) => a - b);
  window.gaps = [];
  const at = (part) => Math.round(10 * (sorted[Math.floor(part * (sorted.length - 1))] || 0)) / 10;
  return { frames: sorted.length, median_ms: at(0.5), p95_ms: at(0.95), p99_ms: at(0.99), worst_ms: at(1) };
}"""

_TAKE_DRAWING = """async () => {
  const { frames, spans } = (await import("/main.js")).made.get("timeline");
  let held = 0;
  for (const { lanes } of spans.ranks.values()) for (const lane of lanes) held += lane.size;
  const mean = Math.round(100 * frames.tookMs / frames.count) / 100;
  return { mean_ms: mean, worst_ms: Math.round(10 * frames.worstMs) / 10, spans_taken: spans.total, places: held };
}"""


class Load:
    """Ranks that each make calls of `_TASKS` tasks so that all together there are `rate` spans a second."""

    def __init__(self, num_ranks: int, rate: float) -> None:
        self.num_ranks = num_ranks
        self.period_s = num_ranks * _TASKS / rate
        self.calls = 0
        self.spans = 0

    def begin(self, state: State) -> None:
        """All ranks join."""
        everyone = list(range(self.num_ranks))
        for rank in everyone:
            following, preceding = (rank + 1) % self.num_ranks, (rank - 1) % self.num_ranks
            tiles = [
                TaskInfo(f"hop {h} q{rank} kv{(rank - h) % self.num_ranks}", "compute", "forward", h, 0, 10**9, False, [], [])
                for h in range(_HOPS)
            ]
            moves = [
                TaskInfo(f"hop {h}", "network", "exchange", h, 10**6, 0, False, [(following, h, 10**6)], [(preceding, h, 10**6)])
                for h in range(_HOPS - 1)
            ]
            hello = Hello(VERSION, "", rank, self.num_ranks, rank % 8, f"node{rank // 8}", 1000 + rank, "cpu", "", "load.py", "0.1", 5.0)
            first: list[FromRank] = [
                hello,
                Group("all", everyone, "mpi", ""),
                Plan(0, "all", "forward", [*tiles, *moves], "made up", self.period_s * 0.8),
            ]
            for message in first:
                state.apply(0.0, rank, message)

    def advance(self, state: State, now_s: float) -> None:
        """What has happened since."""
        while (self.calls + 1) * self.period_s <= now_s:
            self._call(state, self.calls * self.period_s)
            self.calls += 1
        for rank in range(self.num_ranks):
            state.apply(now_s, rank, Heartbeat(now_s, 0.0, 1e-4, "all", self.calls, f"hop {self.calls % _HOPS}", now_s))
            lanes = {
                "network": LaneCounters(self.calls * 7, self.calls * 7 * 10**6, 0),
                "compute": LaneCounters(self.calls * 8, 0, self.calls * 8 * 10**9),
            }
            worked_s = 0.85 * self.calls * self.period_s
            state.apply(
                now_s, rank, Counters(now_s, self.calls, self.calls, worked_s, 0.1 * worked_s, worked_s, worked_s, 0.9 * worked_s, lanes, 0)
            )
        state.apply(now_s, 0, Report(now_s, self.calls, {"loss": 1 + 5 * math.exp(-now_s / 100), "tokens_per_s": 1e6}))

    def _call(self, state: State, start_s: float) -> None:
        hop_s = 0.9 * self.period_s / _HOPS
        for rank in range(self.num_ranks):
            shake = 0.05 * hop_s * math.sin(rank * 7 + self.calls)
            spans = np.zeros(_TASKS, SPAN)
            spans["task"] = np.arange(_TASKS)
            begins = np.concatenate([np.arange(_HOPS), np.arange(_HOPS - 1) + 0.05]) * hop_s + shake + 0.05 * hop_s
            spans["issued"] = spans["started"] = begins
            spans["ended"] = begins + hop_s * 0.9
            state.apply(
                start_s + self.period_s, rank, Call("all", self.calls, 0, start_s, start_s + self.period_s, 0.0, 0.0, spans.tobytes())
            )
            self.spans += _TASKS


def _feed(running: Serving, load: Load, stop: threading.Event) -> None:
    began_s = time.monotonic()
    while not stop.is_set():
        running.do(lambda state: load.advance(state, time.monotonic() - began_s))
        stop.wait(_TICK_S)


def _heap_mb(cdp: CDPSession) -> float:
    cdp.send("HeapProfiler.collectGarbage")
    used = cdp.send("Runtime.getHeapUsage")
    size_bytes: float = used["usedSize"] + used.get("backingStorageSize", 0)
    return round(size_bytes / 1e6, 1)


def measure(seconds: float, rate: float, num_ranks: int, every_s: float) -> dict[str, object]:
    """Shows the timeline, then the overview, for half the time each."""
    path = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    load, stop = Load(num_ranks, rate), threading.Event()
    with serving(State(time.time())) as running, sync_playwright() as playwright:
        running.do(load.begin)
        feeding = threading.Thread(target=_feed, args=(running, load, stop))
        feeding.start()
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        cdp = page.context.new_cdp_session(page)
        page.goto(running.served.link)
        page.evaluate(_COUNT_FRAMES)
        report: dict[str, object] = {"num_ranks": num_ranks, "spans_per_s": rate}
        for name, key, part in (("timeline", "2", 0.8), ("overview", "1", 0.2)):
            page.keyboard.press(key)
            page.wait_for_timeout(3000)
            page.evaluate(_TAKE_FRAMES)
            heaps = []
            until_s = time.monotonic() + seconds * part
            while time.monotonic() < until_s:
                page.wait_for_timeout(1000 * min(every_s, max(0.1, until_s - time.monotonic())))
                heaps.append(_heap_mb(cdp))
            report[name] = page.evaluate(_TAKE_FRAMES) | {"heap_mb": heaps}
            if name == "timeline":
                report["drawing"] = page.evaluate(_TAKE_DRAWING)
            page.screenshot(path=f"build/screenshots/load-{name}.png")
        report["spans_in_all"] = load.spans
        stop.set()
        feeding.join()
        browser.close()
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=130.0)
    parser.add_argument("--rate", type=float, default=20_000.0, help="spans a second, all ranks together")
    parser.add_argument("--num-ranks", type=int, default=64)
    options = parser.parse_args()
    Path("build/screenshots").mkdir(parents=True, exist_ok=True)
    print(json.dumps(measure(options.seconds, options.rate, options.num_ranks, options.seconds / 12), indent=1))
