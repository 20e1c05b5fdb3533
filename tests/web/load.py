"""A dashboard under load: 64 ranks and 2,000 spans a second of a made-up job, or more of them, in a
real browser. Prints figures as JSON.

    python tests/web/load.py --seconds 130 --rate 20000

Frame times are those of the page's animation frames, drawing included. Tasks are those of the
page's thread: no frame comes before the longest of them has ended, and their processor time depends
little on what else the machine does. The heap is what is left after a collection. A page that has
seen ten minutes' worth of spans must not hold more than one that has seen two.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dashboards import Serving, serving
from playwright.sync_api import CDPSession, sync_playwright
from telemetry_feed import Load

from burst_rt.telemetry.model.job_model import JobModel

_TICK_S = 0.1
_LEAST_US = 200.0  # shorter tasks keep no frame waiting
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
  return {
    frames: sorted.length, median_ms: at(0.5), p95_ms: at(0.95), p99_ms: at(0.99), worst_ms: at(1),
  };
}"""

_TAKE_DRAWING = """async () => {
  const { frames, spans } = (await import("/main.js")).made.get("timeline");
  let held = 0;
  for (const { lanes } of spans.ranks.values()) for (const lane of lanes) held += lane.size;
  const mean = Math.round(100 * frames.tookMs / frames.count) / 100;
  const worst = Math.round(10 * frames.worstMs) / 10;
  const drawn = { mean_ms: mean, worst_ms: worst, most_spans: frames.mostSpans };
  return { ...drawn, spans_taken: spans.total, places: held };
}"""


def _feed(running: Serving, load: Load, stop: threading.Event) -> None:
    began_s = time.monotonic()
    while not stop.is_set():
        running.do(lambda model: load.advance(model, time.monotonic() - began_s))
        stop.wait(_TICK_S)


def _heap_mb(cdp: CDPSession) -> float:
    cdp.send("HeapProfiler.collectGarbage")
    used = cdp.send("Runtime.getHeapUsage")
    size_bytes: float = used["usedSize"] + used.get("backingStorageSize", 0)
    return round(size_bytes / 1e6, 1)


def _tasks(trace: bytes) -> dict[str, float]:
    """Processor time of the tasks of the page's thread, in ms, from Chromium's trace."""
    events = json.loads(trace)["traceEvents"]
    threads = {
        (event["pid"], event["tid"])
        for event in events
        if event["name"] == "thread_name" and event["args"]["name"] == "CrRendererMain"
    }
    took_us = sorted(
        event["tdur"]
        for event in events
        if event.get("tdur", 0) > _LEAST_US and event["name"].endswith("::RunTask")
        if (event["pid"], event["tid"]) in threads
    )
    parts = {"median_ms": 0.5, "p99_ms": 0.99, "worst_ms": 1.0}
    last = len(took_us) - 1
    return {name: round(took_us[int(part * last)] / 1e3, 1) for name, part in parts.items()}


def measure(seconds: float, rate: float, num_ranks: int, every_s: float) -> dict[str, object]:
    """Shows the timeline, then the overview, for half the time each."""
    path = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    load, stop = Load(num_ranks, rate), threading.Event()
    with serving(JobModel(time.time())) as running, sync_playwright() as playwright:
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
            browser.start_tracing(page=page, categories=["toplevel"])
            page.wait_for_timeout(1000 * min(15.0, seconds * part))
            report[f"{name} tasks"] = _tasks(browser.stop_tracing())
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=130.0)
    parser.add_argument(
        "--rate", type=float, default=20_000.0, help="spans a second, all ranks together"
    )
    parser.add_argument("--num-ranks", type=int, default=64)
    options = parser.parse_args()
    Path("build/screenshots").mkdir(parents=True, exist_ok=True)
    print(
        json.dumps(
            measure(options.seconds, options.rate, options.num_ranks, options.seconds / 12),
            indent=1,
        )
    )
