"""Curves of a job by its steps, in a real browser: what comes first, smoothing, and marks where
checkpoints, evaluations, restarts and loss spikes were.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import msgspec
import pytest
from dashboards import serving
from playwright.sync_api import Browser, Page, expect
from telemetry_feed import arrive, counters, offset_s

from burst_rt.telemetry.messages import JobReport, PhaseEnded
from burst_rt.telemetry.model.job_model import JobModel

_SPIKE = 150  # the step
# What a chart shows, by the title of its panel.
_CHART = """async (title) => {
  const { charts } = (await import("/main.js")).made.get("history");
  const named = ({ panel }) => panel.node.querySelector("h2").textContent === title;
  const { chart } = [...charts.values()].find(named);
  const { since, until, marks, lines } = chart;
  const line = ({ name, times, values, smooth, dots }) => ({ name, times, values, smooth, dots });
  return { since, until, marks, lines: lines.map(line) };
}"""
_SMOOTHED = """async ([values, points]) => (await import("/chart.js")).smoothed(values, points)"""


def _loss(step: int) -> float:
    return 7.0 if step == _SPIKE else 2.0 + 3.0 * 0.98**step + 0.01 * (step % 5)


def _job() -> JobModel:
    """A job that was started again at step 100, with a checkpoint every 40 and an evaluation every
    20 steps, of half a second each."""
    model = JobModel(time.time())
    for rank in range(2):
        first, *others = arrive(rank)
        model.apply(0.0, rank, msgspec.structs.replace(first, restarts=1))
        for message in others:
            model.apply(0.0, rank, message)
    for step in range(100, 201):
        hub_s = (step - 99) / 2
        for rank in range(2):
            model.apply(hub_s, rank, counters(rank, hub_s, step))
        at_s = hub_s - offset_s(0)
        values = {"my_figure": 1.0, "loss": _loss(step), "tokens_per_s": 1e5, "grad_norm": 1.0}
        model.apply(hub_s, 0, JobReport(at_s, step, values))
        for name, every in (("evaluation", 20), ("checkpoint", 40)):
            if step % every == 0:
                for rank in range(2):
                    ended_s = hub_s - offset_s(rank)
                    phase = PhaseEnded(name, -1, 0, ended_s - 0.25, ended_s)
                    model.apply(hub_s, rank, phase)
        if step % 20 == 0:
            model.apply(hub_s, 0, JobReport(at_s, step, {"heldout_loss": _loss(step) + 0.5}))
    return model


def _open(browser: Browser, link: str) -> Page:
    page = browser.new_page(viewport={"width": 1440, "height": 900}, color_scheme="light")
    page.goto(f"{link}#history")
    expect(page.locator(".charts .panel").first).to_be_visible(timeout=10_000)
    return page


def test_a_jobs_curves_are_by_step_with_the_useful_first_and_marks(
    browser: Browser, pictures: Path
) -> None:
    with serving(_job()) as running:
        page = _open(browser, running.served.link)
        titles = page.locator(".charts h2").all_inner_texts()
        assert titles == ["loss", "tokens/s", "gradient norm", "my figure"]
        found = page.evaluate(_CHART, "loss")
        assert (found["since"], found["until"]) == (100, 200)
        train, heldout = found["lines"]
        assert [line["name"] for line in found["lines"]] == ["loss", "held-out loss"]
        points = {
            round(step): value
            for step, value in zip(heldout["times"], heldout["values"], strict=True)
            if value is not None
        }
        assert set(points) == {100, 120, 140, 160, 180, 200}
        assert points[160] == pytest.approx(_loss(160) + 0.5, rel=1e-5)
        assert heldout["dots"]
        assert not train["dots"]
        marks = [(mark["kind"], mark["at"]) for mark in found["marks"]]
        assert marks.count(("evaluation", 140)) == 1  # though two ranks and a report told of it
        assert sorted(marks) == sorted(
            [("restart", 100), ("loss spike", _SPIKE)]
            + [("evaluation", step) for step in range(100, 201, 20)]
            + [("checkpoint", step) for step in (120, 160, 200)]
        )
        words = {mark["kind"]: mark["text"] for mark in found["marks"]}
        assert words["restart"] == "the job was started again: restart 1 (step 100)"
        assert words["checkpoint"] == "checkpoint in 0.25 s (step 200)"
        assert words["loss spike"].startswith("loss 7: losses before it were below 2.")
        legend = [
            words.replace("\n", "") for words in page.locator(".tools .mark").all_inner_texts()
        ]
        assert legend == ["↻restart", "○evaluation", "◆checkpoint", "▲loss spike"]
        # Under the pointer.
        canvas = page.locator(".charts canvas").first
        box = canvas.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + 68 + (box["width"] - 78) * 0.5, box["y"] + 60)
        tip = page.locator(".chart .tooltip:visible")
        expect(tip).to_contain_text(re.compile(r"step 1(49|50|51)"))
        expect(tip).to_contain_text("▲ loss 7")
        page.screenshot(path=pictures / "history-steps.png")
        # The warning is an event, too.
        page.keyboard.press("1")
        expect(page.locator(".events")).to_contain_text("loss spike loss 7")
        page.close()


def test_curves_of_ranks_are_by_the_jobs_steps_or_by_time(browser: Browser) -> None:
    with serving(_job()) as running:
        page = _open(browser, running.served.link)
        page.get_by_label("What").select_option(label="Ranks")
        expect(page.locator(".charts h2").first).to_have_text("computes")
        found = page.evaluate(_CHART, "computes")
        assert [line["name"] for line in found["lines"]] == ["rank 0", "rank 1"]
        assert (found["since"], found["until"]) == (pytest.approx(101, abs=1.5), 200)
        assert all(99 <= step <= 200 for line in found["lines"] for step in line["times"])
        page.get_by_role("button", name="By step").click()
        expect(page.get_by_role("button", name="By step")).to_have_attribute(
            "aria-pressed", "false"
        )
        page.wait_for_timeout(300)
        found = page.evaluate(_CHART, "computes")
        assert found["until"] == pytest.approx(50.5, abs=5)
        checkpoints = [mark["at"] for mark in found["marks"] if mark["kind"] == "checkpoint"]
        assert checkpoints == pytest.approx([10.5, 30.5, 50.5])
        page.close()


def test_smoothing_keeps_level_trend_and_gaps(browser: Browser) -> None:
    with serving(_job()) as running:
        page = _open(browser, running.served.link)
        ramp = [float(i) for i in range(40)]
        assert page.evaluate(_SMOOTHED, [ramp, 10]) == pytest.approx(ramp)
        noisy = [None if i % 7 == 3 else 5.0 + (-1) ** i for i in range(60)]
        smooth = page.evaluate(_SMOOTHED, [noisy, 20])
        assert [value is None for value in smooth] == [value is None for value in noisy]
        assert all(abs(value - 5.0) < 0.3 for value in smooth[15:45] if value is not None)
        # As a reader asks; few values stay as they are.
        assert page.evaluate(_CHART, "loss")["lines"][0]["smooth"] is None
        page.get_by_label("Smoothing").select_option(label="smooth: 20 points")
        page.wait_for_timeout(400)
        train, heldout = page.evaluate(_CHART, "loss")["lines"]
        at = train["values"].index(7.0)
        assert train["smooth"][at] < 3.0
        assert heldout["smooth"] is None
        page.close()
