"""What the page draws, over models made by hand, in a real browser: nothing covers anything,
whatever the number of ranks.
"""

from __future__ import annotations

import itertools
import re
import time
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from dashboards import serving
from playwright.sync_api import Browser, Page, expect
from telemetry_feed import Load, arrive, call, gpu_sample, offset_s

from burst_rt.telemetry.messages import HubReport, JobReport, SourceInfo, SourceSample
from burst_rt.telemetry.model.job_model import JobModel

_LAPTOP = {"width": 1440, "height": 900}
_TABS = ("overview", "timeline", "history", "traffic", "job")
_PHONE = {"width": 390, "height": 844}
# Texts of the ring with their boxes, and points along its links, in pixels of the page.
_RING = """(svg) => {
  const box = (node) => {
    const { left, top, right, bottom } = node.getBoundingClientRect();
    return [left, top, right, bottom];
  };
  const along = (path) => [...Array(41).keys()].map((i) => {
    const at = path.getPointAtLength((path.getTotalLength() * i) / 40);
    const seen = at.matrixTransform(path.getScreenCTM());
    return [seen.x, seen.y];
  });
  const points = [...svg.querySelectorAll("path.link")].flatMap(along);
  const nodes = [...svg.querySelectorAll("text")].filter((node) => node.textContent);
  const texts = nodes.map((node) => [node.textContent, ...box(node)]);
  return { texts, points, svg: box(svg), tips: svg.querySelectorAll("path.tip").length };
}"""

# The same, of a ring that has just been told of links between all.
_ALL_TO_ALL = """async () => {
  const { job } = await import("/live.js");
  const { ring } = (await import("/main.js")).made.get("overview");
  const ranks = job.present.ranks.map(({ rank }) => rank);
  const others = (sender) => ranks.filter((rank) => rank !== sender);
  const link = (sender) => (receiver) => ({ sender, receiver, bytes_per_s: 2e6, state: "ok" });
  const links = ranks.flatMap((sender) => others(sender).map(link(sender)));
  ring.update({ ...job.present, links });
  return (%s)(ring.node);
}"""

_TICKS = """async () => {
  const { ticks } = await import("/chart.js");
  const { measure, short } = await import("/format.js");
  return ticks(0, 1.1, 3).map((at) => short(measure(at, "B/s")));
}"""

# What keys change.
_TIMELINE = """async () => {
  const t = (await import("/main.js")).made.get("timeline");
  const { following, span, until, withMessages, selected, scroll } = t;
  return [following, span, until, withMessages, selected, scroll, scrollY];
}"""


class _Text(NamedTuple):
    words: str
    left: float
    top: float
    right: float
    bottom: float

    def covers(self, other: _Text) -> bool:
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )


def _job(num_ranks: int) -> JobModel:
    """Ranks that have made calls for 8 s."""
    model, load = JobModel(time.time()), Load(num_ranks, 60.0 * num_ranks)
    load.begin(model)
    for i in range(10):
        load.advance(model, 6.0 + i / 5)
    return model


def _open(browser: Browser, link: str) -> Page:
    page = browser.new_page(viewport=_LAPTOP, color_scheme="light")  # type: ignore[arg-type]  # the type's name is private
    page.goto(link)
    expect(page.locator(".card").first).to_be_visible()
    return page


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8, 12, 64])
def test_words_of_the_ring_cover_neither_links_nor_each_other(
    browser: Browser, num_ranks: int
) -> None:
    with serving(_job(num_ranks)) as running:
        page = _open(browser, running.served.link)
        expect(page.locator(".ring text.of")).to_contain_text(
            "links" if num_ranks > 1 else "nothing"
        )
        if num_ranks > 2:
            running.do(lambda model: model.apply(9.0, -1, HubReport(1, "lost", "it ended")))
            expect(page.locator(".ring text.silent").first).not_to_be_empty()
        found = page.locator(".ring svg").evaluate(_RING)
        page.close()
    texts = [_Text(*text) for text in found["texts"]]
    for one, other in itertools.combinations(texts, 2):
        assert not one.covers(other), (one, other)
    left, top, right, bottom = found["svg"]
    for text in texts:
        assert left <= text.left
        assert text.right <= right
        assert top <= text.top
        assert text.bottom <= bottom, (text, found["svg"])
        inside = [
            (x, y)
            for x, y in found["points"]
            if text.left < x < text.right and text.top < y < text.bottom
        ]
        assert not inside, (text, inside)
        # Letters that can be read.
        assert num_ranks > 8 or text.bottom - text.top > 10, text
    assert found["tips"] == (num_ranks if 1 < num_ranks <= 24 else 0)
    assert any("clockwise" in text.words for text in texts) == (num_ranks > 24)


@pytest.mark.parametrize("num_ranks", [4, 8, 12])
def test_words_have_room_where_all_ranks_send_to_all(browser: Browser, num_ranks: int) -> None:
    with serving(_job(num_ranks)) as running:
        page = _open(browser, running.served.link)
        expect(page.locator(".ring text.of")).to_contain_text("links")
        found = page.evaluate(_ALL_TO_ALL % _RING)
        page.close()
    texts = [_Text(*text) for text in found["texts"]]
    assert {text.words for text in texts} > {f"over {num_ranks * (num_ranks - 1)} links"}
    for one, other in itertools.combinations(texts, 2):
        assert not one.covers(other), (one, other)
    # The ranks' numbers are in their circles, which lie above the links.
    for text in (text for text in texts if not text.words.isdigit()):
        for x, y in found["points"]:
            assert not (text.left < x < text.right and text.top < y < text.bottom), text


def test_a_job_that_is_stopped_has_lost_nobody(browser: Browser) -> None:
    with serving(_job(3)) as running:
        page = _open(browser, running.served.link)
        running.do(lambda model: model.apply(9.0, -1, HubReport(-1, "stopping", "SIGINT")))
        for rank in range(3):
            lost = HubReport(rank, "lost", "it ended")
            running.do(lambda model, lost=lost: model.apply(9.1, -1, lost))  # type: ignore[misc]
        expect(page.locator(".card.stopped")).to_have_count(3)
        expect(page.locator("#health")).to_have_text("○ 3 ranks stopped")
        expect(page.locator(".events")).to_contain_text("job stopping by SIGINT")
        expect(page.locator(".lost")).to_have_count(0)
        assert not running.model.failed
        page.close()


def test_a_job_that_serves_has_a_block_of_its_own(browser: Browser, pictures: Path) -> None:
    with serving(_job(4)) as running:
        page = _open(browser, running.served.link)
        expect(page.locator(".facts").first).to_contain_text("Step")
        expect(page.locator(".serving")).to_be_hidden()
        for i in range(1, 41):
            values = {
                "time_to_first_token_s": 1.5,
                "time_per_token_s": 0.02 + 0.001 * (i % 7),
                "mean_time_per_token_s": 0.023,
                "output_tokens_per_s": 1 / 0.023,
                "cached_tokens": 9000.0 + 10 * i,
                "cache_capacity_tokens": 16384.0,
            }
            at_s = 8.0 + i / 20
            told = JobReport(at_s - offset_s(0), 10 * i, values)
            running.do(lambda model, at_s=at_s, told=told: model.apply(at_s, 0, told))  # type: ignore[misc]
        block = page.locator(".serving")
        for name, value in (
            ("Time to first token", "1.50 s"),
            ("Time per token, last", "25.0 ms"),
            ("Time per token, mean", "23.0 ms"),
            ("Output tokens/s", "43.5"),
            ("Tokens cached", "9,400"),
            ("Cache", "57 % of 16,384"),
        ):
            fact = block.locator(".fact", has=page.get_by_text(name, exact=True))
            expect(fact.locator("dd")).to_have_text(value)
        # The step of such a job is a number of tokens, which the block has.
        expect(page.locator(".facts").first).not_to_contain_text("Step")
        for size, viewport in (("laptop", _LAPTOP), ("phone", _PHONE)):
            page.set_viewport_size(viewport)  # type: ignore[arg-type]  # the type's name is private
            page.wait_for_timeout(600)
            page.screenshot(path=pictures / f"serving-{size}.png")
            cells = block.locator(".fact").evaluate_all(
                "(cells) => cells.filter((cell) => cell.scrollWidth > cell.clientWidth + 1).length"
            )
            assert cells == 0, "words that do not fit"
        page.close()


def test_messages_of_the_timeline_have_arrows_and_it_says_where_some_are_not_drawn(
    browser: Browser,
) -> None:
    with serving(_job(16)) as running:
        page = _open(browser, running.served.link)
        page.keyboard.press("2")
        expect(page.locator(".stage canvas")).to_be_visible()
        expect(page.locator(".status")).to_contain_text("shown", timeout=10_000)
        page.keyboard.press("l")
        count = """async () => {
          const picture = (await import('/main.js')).made.get('timeline');
          const own = CanvasRenderingContext2D.prototype.lineTo;
          let count = 0;
          CanvasRenderingContext2D.prototype.lineTo = function (...to) {
            count += 1;
            own.apply(this, to);
          };
          picture.draw();
          CanvasRenderingContext2D.prototype.lineTo = own;
          return count;
        }"""
        page.evaluate(
            "async () => { const t = (await import('/main.js')).made.get('timeline'); t.span = "
            "1.5; t.until = t.spans.newest + 0.05; }"
        )
        bare = page.evaluate(count)
        page.keyboard.press("m")
        messages = page.evaluate(
            "async () => { const t = (await import('/main.js')).made.get('timeline'); t.draw(); "
            "return t.met; }"
        )
        assert 50 < messages <= 1500
        # two lines each, but for those too short to be seen
        assert page.evaluate(count) >= bare + messages
        expect(page.locator(".status")).not_to_contain_text("messages drawn")
        page.keyboard.press("n")
        expect(page.locator(".status")).to_contain_text(
            re.compile(r"hop \d+ q\d+ kv\d+: a tile: queries of rank \d+ with keys of rank \d+")
        )
        page.keyboard.press("Escape")
        page.keyboard.press("f")
        expect(page.locator(".status")).to_contain_text("only the newest 1.50 k of")
        page.close()


def test_curves_of_the_past_have_a_legend_units_and_reasons(browser: Browser) -> None:
    model = JobModel(time.time())
    for rank in (2, 10, 0, 1):
        for message in arrive(rank, 11, gpu=True):
            model.apply(0.0, rank, message)
    # One that nobody computes on.
    model.apply(
        0.0,
        0,
        SourceInfo(
            name="gpu:1234-abcdef",
            kind="gpu",
            host="host",
            metrics=["power_w"],
            about={"name": "a GPU"},
        ),
    )
    for i in range(20):
        for rank in (2, 10, 0, 1):
            sample = gpu_sample(rank, i / 2, 300.0 + rank)
            values = sample.values | {
                "sm_clock_mhz": 1980.0,
                "throttle_bits": 0x44,
                "pcie_tx_bytes_per_s": 0.0,
            }
            model.apply(i / 2, rank, msgspec.structs.replace(sample, values=values))
        model.apply(
            i / 2, 0, SourceSample("gpu:1234-abcdef", i / 2 - offset_s(0), {"power_w": 60.0})
        )
    with serving(model) as running:
        page = _open(browser, running.served.link)
        page.keyboard.press("3")
        expect(page.locator(".charts .panel").first).to_be_visible(timeout=10_000)
        names = [
            "rank 0: a GPU",
            "rank 1: a GPU",
            "rank 2: a GPU",
            "rank 10: a GPU",
            "a GPU abcdef",
        ]
        assert page.locator(".tools .legend span").all_inner_texts() == names
        assert page.get_by_label("Which").locator("option").all_inner_texts() == ["all", *names]
        colours = page.locator(".tools .legend .swatch").evaluate_all(
            "(all) => all.map((one) => one.style.background)"
        )
        assert len(set(colours)) == 5
        for metric, words in (
            ("SM clock", "1.98 GHz"),
            ("why clocks are held back", "power cap, hardware thermal slowdown"),
        ):
            canvas = page.locator(
                ".charts .panel", has=page.locator("h2", has_text=re.compile(f"^{metric}$"))
            ).locator("canvas")
            canvas.scroll_into_view_if_needed()
            canvas.hover()
            tip = page.locator(".chart .tooltip:visible")
            expect(tip).to_contain_text(words)
            # The same colours as above.
            assert (
                tip.locator(".swatch").evaluate_all(
                    "(all) => all.map((one) => one.style.background)"
                )
                == colours[:4]
            )
            page.mouse.move(0, 0)
        assert page.evaluate(_TICKS) == ["0 B/s", "0.5 B/s", "1 B/s"]
        page.close()


@pytest.mark.parametrize("tab", _TABS)
def test_escape_closes_the_dialog_alone_and_no_key_acts_behind_it(
    browser: Browser, tab: str
) -> None:
    with serving(_job(4)) as running:
        page = _open(browser, running.served.link)
        page.set_viewport_size({"width": 1000, "height": 400})  # there is more behind, to scroll to
        page.keyboard.press("2")
        expect(page.locator(".status")).to_contain_text("shown", timeout=10_000)
        page.keyboard.press("n")
        expect(page.locator(".status")).to_contain_text("took")
        page.keyboard.press(str(1 + _TABS.index(tab)))
        expect(page).to_have_url(re.compile(f"#{tab}$"))
        before = page.evaluate(_TIMELINE)
        page.keyboard.press("?")
        dialog = page.get_by_role("dialog", name="Keys")
        expect(dialog).to_be_visible()
        for key in ("1", "2", "5", "+", "-", "a", "d", "l", "f", "m", "n", "p", "?", "PageDown"):
            page.keyboard.press(key)
        expect(dialog).to_be_visible()
        page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()
        expect(page).to_have_url(re.compile(f"#{tab}$"))
        assert page.evaluate(_TIMELINE) == before
        # Keys act again.
        page.keyboard.press("3" if tab != "history" else "1")
        expect(page).not_to_have_url(re.compile(f"#{tab}$"))
        page.close()


def test_the_first_line_says_what_limits_the_job(browser: Browser) -> None:
    """Rank 1 comes 0.5 s late to every call. On a phone the line is no wider than the page."""
    model = JobModel(1e9)
    ranks = range(2)
    for rank in ranks:
        for message in arrive(rank):
            model.apply(0.1, rank, message)
    with serving(model) as shown:
        page = _open(browser, shown.served.link)
        page.set_viewport_size(_PHONE)  # type: ignore[arg-type]  # the type's name is private
        verdict = page.locator(".verdict")
        expect(verdict).to_be_hidden()

        def calls(model: JobModel) -> None:
            early = ((0.1, 0.1, 0.61), (0.0, 0.0, 0.1), (0.61, 0.61, 0.7))
            late = ((0.1, 0.1, 0.11), (0.0, 0.0, 0.1), (0.11, 0.11, 0.2))
            for number in range(8):
                at_s = 1.0 + number
                for rank, tasks in enumerate((early, late)):
                    ended = call(rank, number, at_s + 0.5 * rank, *tasks)
                    model.apply(at_s + 0.8, rank, ended)

        shown.do(calls)
        expect(verdict).to_contain_text("Rank 1 comes late: between calls it spends 500.0 ms more")
        expect(verdict).to_contain_text("See what it does between calls: py-spy dump --pid")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.close()
