"""Ranks and their GPUs on the first page: many on one screen, the odd one out first, and of a GPU
what its driver gives and nothing else.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from dashboards import serving
from playwright.sync_api import Browser, Locator, Page, expect
from standin import build_standin, with_standin
from telemetry_feed import Load, arrive, hello, offset_s

from burst_rt.telemetry.messages import HubReport, SourceInfo, SourceSample
from burst_rt.telemetry.model.job_model import JobModel

_SIZES = {
    "laptop": {"width": 1440, "height": 900},
    "small": {"width": 1024, "height": 768},
    "tablet": {"width": 800, "height": 900},
    "phone": {"width": 390, "height": 844},
}
_DEADLINE_S = 30.0
_SAMPLE = """
import time
import msgspec
from burst_rt.telemetry.messages import SourceSample
from burst_rt.telemetry.rank.nvml import NvmlSampler
sampler = NvmlSampler([], "node0")
samples = []
for _ in range(3):
    samples += [one for one in sampler.sample() if isinstance(one, SourceSample)]
    time.sleep(0.01)
print(msgspec.json.encode([sampler.sources, samples[-len(sampler.sources):]]).decode())
"""
# Tiles that are not on the screen, or whose words do not fit.
_BAD_TILES = """(tiles) => tiles.filter((tile) => {
  const { top, bottom, left, right } = tile.getBoundingClientRect();
  const out = top < 0 || bottom > innerHeight || left < 0 || right > innerWidth;
  return out || tile.scrollWidth > tile.clientWidth + 1;
}).length"""


def _gpu(slow: bool, at_s: float, rank: int) -> SourceSample:
    values = {
        "sm_percent": 97.0,
        "memory_used_bytes": 6.1e10 + 1e8 * rank,
        "power_w": 440.0 if slow else 690.0,
        "power_cap_w": 700.0,
        "temperature_c": 63.0 + rank % 4,
        "sm_clock_mhz": 1125.0 if slow else 1980.0 - 15 * (rank % 3),
        "sm_clock_max_mhz": 1980.0,
        "throttle_bits": 0x48 if slow else 0.0,
    }
    return SourceSample(f"gpu:{rank}", at_s, values)


def _job(num_ranks: int, slow: int) -> JobModel:
    """Ranks with GPUs, of which one is slow, that have made calls for some seconds."""
    model, load = JobModel(time.time()), Load(num_ranks, 60.0 * num_ranks, gpus=True)
    load.begin(model)
    for i in range(8):
        at_s = 6.0 + i / 4
        load.advance(model, at_s)
        for rank in range(num_ranks):
            model.apply(at_s, rank, _gpu(rank == slow, at_s, rank))
    return model


def _open(browser: Browser, link: str, size: str = "laptop", theme: str = "light") -> Page:
    page = browser.new_page(viewport=_SIZES[size], color_scheme=theme)  # type: ignore[arg-type]  # the types' names are private
    page.goto(link)
    expect(page.locator(".card").first).to_be_visible()
    return page


def _numbers(page: Page) -> list[int]:
    return [int(tile) for tile in page.locator(".tile .top b").all_inner_texts()]


def test_64_ranks_are_on_one_screen_with_the_odd_one_out_first(
    browser: Browser, pictures: Path
) -> None:
    with serving(_job(64, slow=21)) as running:
        page = _open(browser, running.served.link)
        tiles = page.locator(".tile")
        expect(tiles).to_have_count(64)
        expect(page.locator(".odd-one")).to_have_text(
            "rank 21 is the odd one out: clock 1.13 GHz, median 1.97 GHz"
        )
        assert tiles.evaluate_all(_BAD_TILES) == 0
        assert page.evaluate("document.documentElement.scrollHeight <= innerHeight")
        # Its host first, then hosts in order, eight ranks abreast.
        hosts = page.locator(".host h3").all_inner_texts()
        assert hosts == ["node2", "node0", "node1", *(f"node{i}" for i in range(3, 8))]
        assert _numbers(page)[:10] == [21, 16, 17, 18, 19, 20, 22, 23, 0, 1]
        rows = tiles.evaluate_all("(all) => all.map((one) => one.getBoundingClientRect().top)")
        assert len(set(rows)) == 8
        # Its card says why.
        card = page.locator(".one .card")
        expect(card).to_have_attribute("data-rank", "21")
        expect(card).to_contain_text("hardware slowdown, hardware thermal slowdown")
        for theme in ("light", "dark"):
            page.emulate_media(color_scheme=theme)
            page.screenshot(path=pictures / f"ranks-64-{theme}.png")
        page.close()


def test_tiles_are_sorted_as_a_reader_asks(browser: Browser) -> None:
    with serving(_job(16, slow=5)) as running:
        page = _open(browser, running.served.link)
        order = page.get_by_label("Order")
        expect(page.locator(".tile")).to_have_count(16)
        order.select_option(label="memory")
        assert _numbers(page)[:9] == [15, 14, 13, 12, 11, 10, 9, 8, 7]
        expect(page.locator(".tile").first.locator(".state")).to_have_text("62.5 GB")
        order.select_option(label="clock, lowest")
        assert _numbers(page)[:3] == [5, 2, 1]
        page.get_by_role("button", name="By host").click()
        expect(page.locator(".host h3")).to_have_count(0)
        assert _numbers(page)[:3] == [5, 2, 8]
        order.select_option(label="rank")
        assert _numbers(page) == list(range(16))
        # A reader's tile has the card; a second click gives it back to the odd one out.
        card = page.locator(".one .card")
        page.locator(".tile[data-rank='9']").click()
        expect(card).to_have_attribute("data-rank", "9")
        page.wait_for_timeout(1200)
        expect(card).to_have_attribute("data-rank", "9")
        page.locator(".tile[data-rank='9']").click()
        expect(card).to_have_attribute("data-rank", "5")
        # A rank that is lost comes first at once, though a tile has the focus.
        order.select_option(label="the odd one out")
        page.locator(".tile[data-rank='3']").focus()
        running.do(lambda model: model.apply(9.0, -1, HubReport(12, "lost", "it ended")))
        expect(page.locator(".tile").first).to_have_attribute("data-rank", "12")
        expect(page.locator(".tile").first).to_contain_text("✕ lost")
        expect(card).to_have_attribute("data-rank", "12")
        page.close()


def test_ranks_that_are_alike_have_no_odd_one_out(browser: Browser) -> None:
    with serving(_job(12, slow=-1)) as running:
        page = _open(browser, running.served.link)
        expect(page.locator(".odd-one")).to_have_text("no rank is far from the others")
        assert _numbers(page) == list(range(12))
        expect(page.locator(".tile.odd")).to_have_count(0)
        page.close()


@pytest.mark.parametrize("size", ["small", "tablet", "phone"])
@pytest.mark.parametrize("num_ranks", [2, 4, 64])
def test_nothing_is_wider_than_the_page(
    browser: Browser, pictures: Path, size: str, num_ranks: int
) -> None:
    with serving(_job(num_ranks, slow=1)) as running:
        page = _open(browser, running.served.link, size)
        page.wait_for_timeout(600)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        cells = page.locator(".tile, .card dl div, .gauge, .fact").evaluate_all(
            "(all) => all.filter((one) => one.scrollWidth > one.clientWidth + 1).length"
        )
        assert cells == 0, "words that do not fit"
        page.screenshot(path=pictures / f"ranks-{num_ranks}-{size}.png", full_page=True)
        page.close()


def _sampled(folder: Path, **settings: str) -> tuple[list[SourceInfo], list[SourceSample]]:
    """What the real pynvml says of a driver that stands in for NVIDIA's."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", _SAMPLE],
        env=with_standin(build_standin(folder), **settings),
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return msgspec.json.decode(done.stdout, type=tuple[list[SourceInfo], list[SourceSample]])


def _gauge(card: Locator, name: str) -> Locator:
    return card.locator(".gauge", has_text=re.compile(f"^{name}"))


def _job_on(sources: list[SourceInfo], samples: list[SourceSample]) -> JobModel:
    """A rank on each GPU."""
    model = JobModel(time.time())
    for rank, (source, sample) in enumerate(zip(sources, samples, strict=True)):
        first = msgspec.structs.replace(hello(rank, len(sources)), gpu=source.name, device="cuda:0")
        model.apply(0.0, rank, first)
        for message in arrive(rank, len(sources))[1:]:
            model.apply(0.0, rank, message)
        model.apply(0.5, rank, source)
        at_s = 1.0 - offset_s(rank)
        model.apply(1.0, rank, msgspec.structs.replace(sample, at_s=at_s))
    return model


def test_a_gpus_card_has_what_the_driver_gives(browser: Browser, tmp_path: Path) -> None:
    told = _sampled(tmp_path, STANDIN_REASONS=str(0x40 | 0x4))
    with serving(_job_on(*told)) as running:
        page = _open(browser, running.served.link)
        card = page.locator(".card[data-rank='0']")
        for name, words in (
            ("mem", "3.22/85.9 GB"),
            ("power", "123/700 W"),
            ("clock", "1.98/2.01 GHz"),
        ):
            expect(_gauge(card, name)).to_contain_text(words)
        bar = (
            _gauge(card, "power")
            .locator(".rail")
            .evaluate("(rail) => rail.firstChild.getBoundingClientRect().width / rail.clientWidth")
        )
        assert bar == pytest.approx(123.456 / 700, abs=0.02)
        expect(card.locator(".note.slowed")).to_have_text("power cap, hardware thermal slowdown")
        for name, words in (
            ("NVLink", r"^↑[\d.]+ ↓[\d.]+ \wB/s$"),
            ("PCIe", r"^↑[\d.]+ ↓[\d.]+ \wB/s$"),
            ("ECC", r"^\d+ corrected$"),
            ("chip", "^55 °C$"),
        ):
            row = card.locator("dl div", has=page.get_by_text(name, exact=True))
            expect(row.locator("dd")).to_have_text(re.compile(words))
        page.close()


def test_what_a_chip_does_not_give_is_not_shown(browser: Browser, tmp_path: Path) -> None:
    told = _sampled(tmp_path, STANDIN_OLD="1", STANDIN_REASONS="0")
    with serving(_job_on(*told)) as running:
        page = _open(browser, running.served.link)
        card = page.locator(".card[data-rank='0']")
        expect(_gauge(card, "mem")).to_contain_text("3.22/85.9 GB")
        assert card.locator(".gauge").count() == 1
        names = card.locator("dt").all_inner_texts()
        # Without a cap, or a highest clock, there is no bar, and the figure is one of the others.
        assert {"power", "clock", "PCIe", "ECC"} <= set(names)
        assert not {"NVLink", "XID"} & set(names)
        expect(card.locator(".note:visible")).to_have_count(0)
        page.close()
