"""The dashboard in a real browser on a real job: figures move, the timeline draws, a killed rank
shows, reload and replay work.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from dashboards import RunningCommand, command, kill_rank
from playwright.sync_api import Browser, Page, expect

from burst_rt.planning.machines import to_toml
from burst_rt.runtime.calibrated import HARDWARE_VARIABLE
from burst_rt.scheduler.simulator import Device, Hardware, Link, Node, Rate

_PROGRAM = Path(__file__).parent / "programs" / "ring.py"
_RED_S = 2.0
_LAPTOP = {"width": 1440, "height": 900}
_PHONE = {"width": 390, "height": 844}
_SETTLE_MS = 1500
# Pixels of each lane's colour on the timeline (light), as (red, green, blue).
_COLOURS = {
    "compute": (0x00, 0x72, 0xB2),
    "send": (0xD9, 0x8F, 0x00),
    "receive": (0x00, 0x90, 0x67),
    "steps": (0x6A, 0x51, 0xA3),
}
# A machine to plan with, as `burst-rt calibrate` would find one: some CPU.
_MACHINE = Hardware(
    "some CPU",
    Device(1 << 32, {"default": Rate(launch_s=1e-3, flops_per_s=2e10, bytes_per_s=1e10)}),
    Node(4, Link(latency_s=5e-4, bytes_per_s=1e9, efficiency=1.0, duplex="full"), cores=2),
)
_COUNT_PIXELS = """(canvas) => {
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const counts = {};
  for (let i = 0; i < pixels.length; i += 4) {
    const key = `${pixels[i]},${pixels[i + 1]},${pixels[i + 2]}`;
    counts[key] = (counts[key] || 0) + 1;
  }
  return counts;
}"""


def _open(browser: Browser, link: str, errors: list[str], **options: object) -> Page:
    page = browser.new_page(**options)  # type: ignore[arg-type]  # those of new_page
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on(
        "console", lambda message: errors.append(message.text) if message.type == "error" else None
    )
    page.on(
        "request",
        lambda request: (
            errors.append(f"asks {request.url}") if "127.0.0.1" not in request.url else None
        ),
    )
    page.goto(link)
    return page


def _drawn(page: Page) -> set[str]:
    counts = page.locator(".stage canvas").evaluate(_COUNT_PIXELS)
    return {lane for lane, rgb in _COLOURS.items() if counts.get(",".join(map(str, rgb)), 0) > 50}


def _expect_all_drawn(page: Page) -> None:
    """Lanes of all kinds, within 15 s."""
    deadline_s = time.monotonic() + 15
    while _drawn(page) != set(_COLOURS) and time.monotonic() < deadline_s:
        page.wait_for_timeout(200)
    assert _drawn(page) == set(_COLOURS)


def _shoot(
    browser: Browser, link: str, folder: Path, pages: tuple[str, ...], errors: list[str]
) -> None:
    """Pictures on a laptop and a phone, light and dark; the four windows settle together."""
    windows = {
        f"{size}-{theme}": _open(browser, link, errors, viewport=viewport, color_scheme=theme)
        for size, viewport in (("laptop", _LAPTOP), ("phone", _PHONE))
        for theme in ("light", "dark")
    }
    for name in pages:
        for page in windows.values():
            page.goto(f"{link.partition('?')[0]}#{name}")
        page.wait_for_timeout(_SETTLE_MS)
        for window, page in windows.items():
            page.screenshot(path=folder / f"{name}-{window}.png")
    for page in windows.values():
        page.close()


def test_a_job_of_four_ranks_from_its_first_call_to_its_replay(
    browser: Browser, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = tmp_path / "machine.toml"
    machine.write_text(to_toml(_MACHINE), encoding="utf-8")
    monkeypatch.setenv(HARDWARE_VARIABLE, str(machine))
    record, stop, errors = tmp_path / "job.record", tmp_path / "stop", list[str]()
    options = ("--dashboard-at", "0", "--record", str(record))
    with command("run", "-n", "4", *options, str(_PROGRAM), "2048", str(stop), cwd=tmp_path) as job:
        page = _open(browser, job.link("dashboard"), errors, viewport=_LAPTOP, color_scheme="light")
        assert "token" not in page.url
        expect(page.locator(".card.live")).to_have_count(4, timeout=60_000)
        _watch_figures_move(page)
        page.reload()
        expect(page.locator(".card.live")).to_have_count(4)
        _watch_the_timeline(page, pictures)
        _visit_the_other_pages(page)
        _shoot(
            browser,
            job.link("dashboard"),
            pictures,
            ("overview", "timeline", "traffic", "job"),
            errors,
        )
        _kill_a_rank(page, job, pictures)
    # The server went with the job.
    errors = [error for error in errors if "ERR_" not in error]
    with command("dashboard", "--replay", str(record), "--at", "0", cwd=tmp_path) as replay:
        _watch_the_replay(
            _open(browser, replay.link("dashboard"), errors, viewport=_LAPTOP), pictures
        )
    assert errors == []


def _watch_figures_move(page: Page) -> None:
    calls = page.locator("[data-rank='1'] dd").last
    expect(page.locator(".fact").first).to_contain_text("Step", timeout=30_000)
    share = page.locator(".fact", has_text="Attention in steps").locator("dd")
    expect(share).to_have_text(re.compile(r"^[1-9]\d* %"))
    before = calls.text_content()
    expect(calls).not_to_have_text(before or "", timeout=10_000)
    expect(page.locator("svg text.sum")).to_contain_text("B/s")
    expect(page.locator("svg .link.ok")).to_have_count(4, timeout=15_000)


# Where a lane of rank 0 is on the canvas.
_ROW = """async (lane) => {
  const { LANES } = await import('/spans.js');
  const { made } = await import('/main.js');
  const { rows, scroll } = made.get('timeline');
  const row = rows.find(({ rank, kind }) => rank === 0 && LANES[kind] === lane);
  return { y: 26 + row.y - scroll, height: row.height };
}"""


def _point_at(page: Page, y: float, words: str) -> None:
    """Goes along a line of the canvas until the tooltip says that."""
    box, tip = page.locator(".stage canvas").bounding_box(), page.locator(".stage .tooltip")
    assert box is not None
    for part in range(300, 950, 5):
        page.mouse.move(box["x"] + box["width"] * part / 1000, box["y"] + y)
        if tip.is_visible() and re.search(words, tip.inner_text()):
            return
    raise AssertionError(f"no {words} at {y}: {tip.inner_text()!r}")


def _watch_the_timeline(page: Page, pictures: Path) -> None:
    page.keyboard.press("2")
    _expect_all_drawn(page)
    # Follows the job until it is told not to.
    expect(page.get_by_role("button", name="Follow")).to_have_attribute("aria-pressed", "true")
    page.keyboard.press("l")
    expect(page.get_by_role("button", name="Follow")).to_have_attribute("aria-pressed", "false")
    tip = page.locator(".stage .tooltip")
    # The steps' lane is the first of a rank. Its upper half is the step, the lower the spans.
    assert page.evaluate(_ROW, "steps")["y"] < page.evaluate(_ROW, "compute")["y"]
    for lane, down, words in (
        ("steps", 0.25, r"^step \d+\n"),
        ("steps", 0.7, r"^(forward|backward)\n"),
        ("compute", 0.25, r"hop[\s\S]*took"),
    ):
        row = page.evaluate(_ROW, lane)
        _point_at(page, row["y"] + down * row["height"], words)
        expect(tip).to_contain_text("took")
    page.screenshot(path=pictures / "timeline-steps.png")
    page.keyboard.press("n")
    expect(page.locator(".status")).to_contain_text("took")
    for _ in range(6):
        page.keyboard.press("+")
    # Comes into view where it was not.
    page.keyboard.press("n")
    page.keyboard.press("m")
    page.wait_for_timeout(300)
    page.screenshot(path=pictures / "timeline-zoomed.png")
    assert "compute" in _drawn(page)
    page.keyboard.press("Escape")


def _visit_the_other_pages(page: Page) -> None:
    page.keyboard.press("3")
    expect(page.locator(".charts .chart canvas").first).to_be_visible(timeout=10_000)
    # The job's own curves come first.
    expect(page.locator(".charts h2").first).to_have_text("loss")
    page.get_by_label("What").select_option(label="Ranks")
    expect(page.locator(".charts h2", has_text=re.compile("^core$"))).to_be_visible()
    page.keyboard.press("4")
    # One a direction, of several; of each strategy the variant of the fewest bytes was forecast.
    expect(page.locator("tr.chosen")).to_have_count(2)
    strategies = page.locator("table").first.locator("tbody tr").all_inner_texts()
    chosen = [row for row in strategies if "✓ runs" in row]
    forecast = [row for row in strategies if re.search(r"\d (?:ms|s)$", row.strip())]
    assert {row.split()[0] for row in chosen} == {"forward", "backward"}
    assert set(chosen) <= set(forecast)
    assert len(forecast) >= 6
    expect(page.locator("table").nth(1)).to_contain_text("rank 3")
    for column in ("sent", "computed"):
        number = page.locator("table").nth(2).locator("th").all_inner_texts().index(column)
        expect(
            page.locator("table").nth(2).locator("tbody tr").first.locator("td").nth(number)
        ).not_to_have_text(re.compile(r"^0\b"))
    page.keyboard.press("5")
    expect(page.locator("pre").first).to_contain_text("strategy", timeout=10_000)
    # Measured beside predicted, and the one over the other.
    compared = page.locator("table").last.locator("tbody tr")
    expect(compared).to_have_count(2, timeout=10_000)
    for row in compared.all_inner_texts():
        assert re.search(r"\d (?:m|µ)?s\s*\d[\d.]* (?:m|µ)?s\s*\d+\.\d\dx$", row.strip()), row
    page.keyboard.press("1")
    expect(page.locator(".card")).to_have_count(4)


def _kill_a_rank(page: Page, job: RunningCommand, pictures: Path) -> None:
    page.goto(page.url.partition("#")[0] + "#overview")
    expect(page.locator(".card.live")).to_have_count(4)
    pid = page.evaluate("async () => (await import('/live.js')).job.present.ranks[2].pid")
    killed_s = time.monotonic()
    kill_rank(job.process, pid)
    page.wait_for_selector("[data-rank='2'].lost", timeout=_RED_S * 1000)
    assert time.monotonic() - killed_s < _RED_S
    expect(page.locator("[data-rank='2']")).to_contain_text("✕ lost")
    expect(page.locator("#banner")).to_contain_text("The job has ended", timeout=15_000)
    # What was last seen stays, and so does who was lost first.
    expect(page.locator("#banner")).to_contain_text(
        re.compile(r"Rank 2 was lost first, at \d+:\d\d\.\d\. Look at it again")
    )
    _expect_one_cause(page)
    page.screenshot(path=pictures / "lost.png")


def _expect_one_cause(page: Page) -> None:
    """Of a job that ended because rank 2 was lost; the others went within a second or so."""
    expect(page.locator(".card.lost")).to_have_count(1)
    expect(page.locator("[data-rank='2'].lost")).to_contain_text(
        re.compile(r"✕ lost first \d+:\d\d\.\d")
    )
    expect(page.locator(".card.ended")).to_have_count(3)
    expect(page.locator("[data-rank='0'].ended")).to_contain_text(
        re.compile(r"ended \d+\.\d s after")
    )
    expect(page.locator("#health")).to_have_text("✕ rank 2 was lost first, 3 ended after it")
    cause = page.locator(".cause")
    expect(cause).to_contain_text(
        "first: rank 2 lost its connection closed unexpectedly; last heard"
    )
    # The first thing in sight is the post-mortem.
    first = page.locator(".post-mortem .first")
    expect(first).to_contain_text("first to stop: rank 2, ")
    expect(first).to_be_in_viewport(ratio=1)
    expect(cause.locator("time")).to_have_text(re.compile(r"^\d+:\d\d\.\d$"))
    expect(page.locator(".events")).not_to_contain_text("rank 2 lost")


def _watch_the_replay(page: Page, pictures: Path) -> None:
    expect(page.locator("#banner")).to_contain_text("A record")
    _expect_one_cause(page)
    page.keyboard.press("2")
    _expect_all_drawn(page)
    page.screenshot(path=pictures / "replay-timeline.png")
    page.reload()
    _expect_all_drawn(page)
