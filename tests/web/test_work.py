"""How much work the page does at a time, counted and not timed: answers are taken in portions, and
a picture costs what its width does.
"""

from __future__ import annotations

import time

import pytest
from dashboards import serving, wait_until
from playwright.sync_api import Browser, expect
from telemetry_feed import Load

from burst_rt.telemetry.model.job_model import JobModel

_NUM_RANKS = 64
_RATE = 20_000.0
# A call of `Load`, and a portion, of spans.
_TASKS, _PORTION = 15, 400
# Takes an answer in portions and in one go, and the latter again.
_TAKE = """async (numRanks) => {
  const { Spans } = await import("/spans.js");
  const view = await (await fetch("/api/timeline?since=-3&limit=20000")).json();
  const held = (spans) => [...spans.ranks.values()];
  const rowsOf = ({ lanes, waits, calls }) => [...lanes, waits, calls];
  const rows = (spans) => held(spans).flatMap(rowsOf);
  const work = (spans) => spans.total + spans.flows.count
    + held(spans).reduce((sum, { waits }) => sum + waits.count, 0);
  const columns = (spans) => JSON.stringify([spans.flows, ...rows(spans)].map((one) => [one.count,
    ...Object.keys(one.columns).map((name) => [...one[name].subarray(0, one.count)])]));
  const [parted, whole] = [new Spans(), new Spans()];
  let [portions, most, before] = [0, 0, 0];
  for (const _ of parted.taking(structuredClone(view), numRanks)) {
    portions += 1;
    most = Math.max(most, work(parted) - before);
    before = work(parted);
  }
  most = Math.max(most, work(parted) - before);
  whole.take(structuredClone(view), numRanks);
  const [once, total] = [columns(whole), work(whole)];
  whole.take(view, numRanks);
  const words = whole.seen.size;
  const sent = view.calls.reduce((sum, call) => sum + call.spans.length, 0);
  const [same, again] = [once === columns(parted), once === columns(whole)];
  return { portions, most, total, words, same, again, sent, flows: view.flows.length };
}"""
# Rectangles of a picture, by the seconds that it shows.
_RECTS = """async (span) => {
  const timeline = (await import("/main.js")).made.get("timeline");
  timeline.setFollow(false);
  [timeline.span, timeline.until] = [span, timeline.spans.newest];
  const own = CanvasRenderingContext2D.prototype.fillRect;
  let count = 0;
  CanvasRenderingContext2D.prototype.fillRect = function (...box) {
    count += 1;
    own.apply(this, box);
  };
  timeline.draw();
  CanvasRenderingContext2D.prototype.fillRect = own;
  const { looked, rows, canvas } = timeline;
  return { count, looked, rows: rows.length, width: canvas.clientWidth };
}"""


@pytest.fixture(scope="module")
def model() -> JobModel:
    model, load = JobModel(time.time()), Load(_NUM_RANKS, _RATE)
    load.begin(model)
    for i in range(1, 61):
        load.advance(model, i / 10)
    return model


def test_an_answer_is_taken_in_portions_that_come_to_the_same(
    browser: Browser, model: JobModel
) -> None:
    with serving(model) as running:
        page = browser.new_page()
        page.goto(running.served.link)
        found = page.evaluate(_TAKE, _NUM_RANKS)
        page.close()
    assert found["sent"] > 19_000
    assert found["flows"] > 5_000
    # No more than a portion and the call that fills it.
    assert found["most"] <= _PORTION + 2 * _TASKS
    assert found["portions"] >= found["total"] / (_PORTION + 2 * _TASKS)
    assert found["same"]
    assert found["again"], "what was here already is left out"
    # A word a rank's call and one for the call of all, not one a message.
    assert found["words"] < found["sent"] / 10


def test_a_picture_has_as_many_rectangles_as_pixels_allow(
    browser: Browser, model: JobModel
) -> None:
    with serving(model) as running:
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(f"{running.served.link}#timeline")
        expect(page.locator(".status").first).to_contain_text("shown", timeout=20_000)
        total = "async () => (await import('/main.js')).made.get('timeline').spans.total"
        wait_until(page, total, lambda total: total > 15_000)
        near, far = (page.evaluate(_RECTS, span) for span in (0.2, 30.0))
        page.close()
    assert near["looked"] < far["looked"] / 3, "spans that are not in sight cost nothing"
    # What is closer than a pixel is one.
    assert far["looked"] > 5_000
    assert far["count"] < far["looked"] / 2
    assert far["count"] < far["rows"] * far["width"]
