"""A record in a real browser: any moment of it, played or dragged to, kept in the link; and two
records side by side.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dashboards import command, wait_until
from playwright.sync_api import Browser, Page, expect
from telemetry_feed import Load, record_load

_LENGTH_S = 90.0
_SIZES = {
    "laptop": {"width": 1440, "height": 900},
    "small": {"width": 1024, "height": 768},
    "tablet": {"width": 800, "height": 900},
    "phone": {"width": 390, "height": 844},
}
_MOMENT = "async () => (await import('/ask.js')).shown.at"
_WINDOW = """async () => {
  const { since, until, span, following, spans } = (await import("/main.js")).made.get("timeline");
  return { since, until, span, following, oldest: spans.oldest, newest: spans.newest };
}"""
# The step at which the first chart of History ends.
_STEP = """async () => {
  const { charts } = (await import("/main.js")).made.get("history");
  return [...charts.values()][0].chart.until;
}"""
# When the losses were that Overview's curve has.
_LOSSES = """async () => {
  const { curve } = await import("/live.js");
  return [...curve("job", "loss")].map(([at]) => at);
}"""
_DRAG = """(bar, at) => {
  bar.value = at;
  bar.dispatchEvent(new Event("input"));
}"""
_SIDES = """async () => (await import("/main.js")).made.get("compare").sides.map(
  ({ start, span, until, spans, rows, canvas }) => {
    const { y, height } = rows?.at(-1) ?? { y: 0, height: 0 };
    return { start, span, until, total: spans.total, hidden: y + height - canvas.clientHeight };
  })"""


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two jobs of four ranks; the calls of the second take 1.5 times as long."""
    folder = tmp_path_factory.mktemp("records")
    paths = folder / "before.record", folder / "after.record"
    for path, rate in zip(paths, (120.0, 80.0), strict=True):
        record_load(path, Load(4, rate), _LENGTH_S)
    return paths


@pytest.fixture
def link(records: tuple[Path, Path], tmp_path: Path) -> Iterator[str]:
    options = ("--replay", str(records[0]), "--beside", str(records[1]), "--at", "0")
    with command("dashboard", *options, cwd=tmp_path) as replay:
        yield replay.link("dashboard")


def _open(browser: Browser, link: str, where: str = "", size: str = "laptop") -> Page:
    page = browser.new_page(viewport=_SIZES[size], color_scheme="light")  # type: ignore[arg-type]  # the type's name is private
    page.goto(f"{link}{where}")
    expect(page.locator(".scrubber output")).to_contain_text("of 1:30.0", timeout=15_000)
    return page


def _drag(page: Page, at_s: float) -> None:
    page.get_by_label("Time of the record").evaluate(_DRAG, at_s)
    said = f"{int(at_s // 60)}:{at_s % 60:04.1f} of 1:30.0"
    expect(page.locator(".scrubber output")).to_have_text(said)
    expect(page.locator("#banner")).to_contain_text(
        f"as it was {int(at_s // 60)}:{int(at_s % 60):02}"
    )


def test_a_record_is_dragged_to_any_moment_in_all_tabs(
    browser: Browser, pictures: Path, link: str
) -> None:
    page = _open(browser, link)
    expect(page.locator(".fact", has_text="Step").locator("dd")).to_have_text("180")
    _drag(page, 30.0)
    expect(page.locator(".fact", has_text="Step").locator("dd")).to_have_text("60")
    # Curves end there, too.
    wait_until(page, _LOSSES, lambda losses: len(losses) > 50)
    assert page.evaluate(_LOSSES)[-1] == pytest.approx(30.0)
    page.keyboard.press("2")
    expect(page.locator(".status").first).to_contain_text(re.compile(r"\d of 90 s shown"))
    seen = page.evaluate(_WINDOW)
    assert seen["until"] == pytest.approx(30.0)
    assert seen["oldest"] < 1.0
    assert seen["newest"] == pytest.approx(30.0, abs=1.0)
    page.screenshot(path=pictures / "replay-moment.png")
    # Back: what is held is of that moment, and nothing of later ones stays.
    _drag(page, 12.5)
    wait_until(page, _WINDOW, lambda window: window["newest"] <= 12.5)
    expect(page.locator(".status").first).to_contain_text("of 90 s shown")
    page.keyboard.press("3")
    page.get_by_role("button", name="10 min").click()
    page.wait_for_timeout(500)
    assert page.evaluate(_STEP) == pytest.approx(25, abs=1)
    _drag(page, 40.0)
    wait_until(page, _STEP, lambda step: abs(step - 80) < 1.5)
    page.close()


def test_a_record_plays_as_fast_as_asked_and_pauses(browser: Browser, link: str) -> None:
    page = _open(browser, link)
    _drag(page, 20.0)
    page.get_by_label("Speed").select_option("4")
    page.locator("main").focus()
    page.keyboard.press(" ")
    expect(page.get_by_role("button", name="Pause")).to_be_visible()
    wait_until(page, _MOMENT, lambda at_s: at_s > 26)
    page.keyboard.press(" ")
    expect(page.get_by_role("button", name="Play")).to_be_visible()
    page.wait_for_timeout(500)
    at_s = page.evaluate(_MOMENT)
    page.wait_for_timeout(600)
    assert page.evaluate(_MOMENT) == at_s
    # To the end, where it stops; from there it begins again.
    _drag(page, 89.5)
    page.get_by_role("button", name="Play").click()
    expect(page.get_by_role("button", name="Play")).to_be_visible(timeout=10_000)
    assert page.evaluate(_MOMENT) == pytest.approx(_LENGTH_S)
    page.get_by_label("Speed").select_option("1")
    page.get_by_role("button", name="Play").click()
    wait_until(page, _MOMENT, lambda at_s: at_s is not None and at_s < 20)
    page.close()


def test_moment_and_zoom_are_kept_in_the_link(browser: Browser, link: str) -> None:
    page = _open(browser, link, "#timeline")
    _drag(page, 59.8)
    page.keyboard.press("+")
    page.keyboard.press("ArrowLeft")
    page.wait_for_url(re.compile(r"#timeline\?at=59\.8&span=[\d.]+&until=[\d.]+"))
    before = page.evaluate(_WINDOW)
    assert not before["following"]
    # Other tabs keep it.
    page.keyboard.press("1")
    page.wait_for_url(re.compile(r"#overview\?at=59\.8&span="))
    page.keyboard.press("2")
    page.wait_for_url(re.compile(r"#timeline\?at=59\.8&span="))
    again = _open(browser, link, "#" + page.url.partition("#")[2])
    expect(again.locator(".scrubber output")).to_have_text("0:59.8 of 1:30.0")
    expect(again.locator(".status").first).to_contain_text("of 90 s shown")
    after = again.evaluate(_WINDOW)
    assert after["span"] == pytest.approx(before["span"], rel=1e-6)
    assert after["until"] == pytest.approx(before["until"], rel=1e-6)
    # A link that says nonsense shows the end.
    odd = _open(browser, link, "#timeline?at=soon&span=-3")
    expect(odd.locator(".scrubber output")).to_have_text("1:30.0 of 1:30.0")
    for one in (page, again, odd):
        one.close()


def test_a_key_before_the_next_frame_moves_from_the_moment_shown(
    browser: Browser, link: str
) -> None:
    page = _open(browser, link, "#timeline")
    _drag(page, 59.8)
    until = page.evaluate(
        """async () => {
          const timeline = (await import("/main.js")).made.get("timeline");
          timeline.until = 0; // where the moment before was
          const key = new KeyboardEvent("keydown", { key: "ArrowLeft", bubbles: true });
          document.body.dispatchEvent(key);
          return timeline.until;
        }"""
    )
    assert 50 < until < 59.8
    page.close()


def test_a_moment_before_there_were_ranks_is_shown_too(browser: Browser, tmp_path: Path) -> None:
    record_load(tmp_path / "many.record", Load(12, 120.0), 6.0, late_s=2.0)
    options = ("--replay", "many.record", "--at", "0")
    errors = list[str]()
    with command("dashboard", *options, cwd=tmp_path) as replay:
        page = browser.new_page(viewport=_SIZES["laptop"])  # type: ignore[arg-type]  # the type's name is private
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(replay.link("dashboard"))
        page.locator(".tile[data-rank='7']").click()
        expect(page.locator(".one .card")).to_have_attribute("data-rank", "7")
        bar = page.get_by_label("Time of the record")
        bar.evaluate(_DRAG, 1.0)
        expect(page.locator("#health")).to_have_text("○ waiting for ranks")
        expect(page.locator(".tile:visible")).to_have_count(0)
        bar.evaluate(_DRAG, 6.0)
        expect(page.locator("#banner")).to_contain_text("as it was 0:06")
        expect(page.locator(".one .card")).to_have_attribute("data-rank", "7")
        # There is nothing beside it.
        expect(page.get_by_role("link", name="Compare")).to_be_hidden()
        page.goto(page.url.partition("#")[0] + "#compare")
        expect(page.locator("main")).to_contain_text("There is no second record")
        page.close()
    assert errors == []


def test_what_is_held_is_a_minute_and_the_page_says_of_how_much(
    browser: Browser, link: str
) -> None:
    page = _open(browser, link, "#timeline")
    _drag(page, 85.0)
    for _ in range(12):
        page.keyboard.press("-")
    expect(page.locator(".status").first).to_contain_text(
        re.compile(r"^(59\.\d|60|6[01]\.\d) of 90 s shown")
    )
    page.close()


def test_two_records_are_compared_and_the_same_call_is_shown_of_both(
    browser: Browser, pictures: Path, link: str
) -> None:
    page = _open(browser, link)
    page.get_by_role("link", name="Compare").click()
    row = page.locator("tr", has=page.get_by_text("forward call", exact=True))
    expect(row).to_contain_text("+50.0 %", timeout=20_000)
    expect(page.locator(".side h2").first).to_contain_text("before.record: forward call ")
    wait_until(
        page,
        _SIDES,
        lambda sides: all(side["start"] is not None and side["total"] > 30 for side in sides),
    )
    sides = page.evaluate(_SIDES)
    assert sides[0]["span"] == sides[1]["span"]
    starts = [side["start"] for side in sides]
    assert starts[1] == pytest.approx(1.5 * starts[0], abs=0.1)
    assert sides[0]["until"] - starts[0] == pytest.approx(sides[1]["until"] - starts[1])
    # All lanes of both are in sight, below the axis.
    assert all(side["hidden"] <= -26 for side in sides)
    # Zoom and pan are of both.
    page.locator(".side canvas").first.hover()
    page.keyboard.press("+")
    page.keyboard.press("ArrowRight")
    page.wait_for_timeout(400)
    moved = page.evaluate(_SIDES)
    assert moved[0]["span"] < sides[0]["span"]
    assert moved[0]["span"] == moved[1]["span"]
    assert moved[0]["until"] - starts[0] == pytest.approx(moved[1]["until"] - starts[1])
    # Another call.
    button = page.get_by_role("button", name=re.compile("forward call")).nth(3)
    button.click()
    expect(button).to_have_attribute("aria-pressed", "true")
    expect(page.locator(".side h2").nth(1)).to_contain_text(f"after.record: {button.inner_text()}")
    page.wait_for_timeout(500)
    page.screenshot(path=pictures / "compare.png", full_page=True)
    page.close()


@pytest.mark.parametrize("size", list(_SIZES))
def test_a_record_fits_every_window(browser: Browser, pictures: Path, link: str, size: str) -> None:
    page = _open(browser, link, "#timeline?at=30&span=2", size)
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        for name, key in (("timeline", "2"), ("compare", "6")):
            page.keyboard.press(key)
            page.wait_for_timeout(900)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            page.screenshot(path=pictures / f"replay-{name}-{size}-{theme}.png", full_page=True)
    page.close()


def _get(link: str, path: str) -> Any:
    """The JSON of an answer, asked with the link's token."""
    base, _, token = link.partition("/?token=")
    request = urllib.request.Request(base + path, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer)


def test_what_may_be_asked_of_a_record_is_bounded(
    records: tuple[Path, Path], link: str, tmp_path: Path
) -> None:
    assert _get(link, "/api/present?at=10")["job"]["now_s"] == 10.0
    for at in ("1e300", "nan", "-inf", "x", ""):
        shown = _get(link, f"/api/present?at={at}")["job"]
        assert shown["now_s"] == shown["length_s"], at
    assert _get(link, "/api/present?at=-1")["job"]["now_s"] == 0.0
    # Records that there are not are the nearest ones.
    names = [_get(link, f"/api/present?record={n}")["job"]["record"] for n in (-3, 0, 1, 7, 1e9)]
    assert names == [str(records[n]) for n in (0, 0, 1, 1, 1)]
    # One record alone has nothing beside it.
    with command("dashboard", "--replay", str(records[0]), "--at", "0", cwd=tmp_path) as alone:
        assert not _get(alone.link("dashboard"), "/api/present")["beside"]
        assert _get(alone.link("dashboard"), "/api/compare") is None
