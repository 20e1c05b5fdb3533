"""A job whose rank is killed: the page keeps every tab, also those that nobody had opened, and says
why the job failed.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from dashboards import RunningCommand, command, kill_rank
from playwright.sync_api import Browser, Page, expect

from burst_rt.job.postmortem import PostMortem

_PROGRAM = Path(__file__).parent / "programs" / "ring.py"
_SIZES = {"laptop": {"width": 1440, "height": 900}, "phone": {"width": 390, "height": 844}}
_NUM_SPANS = "async () => (await import('/main.js')).made.get('timeline').spans.total"
_NUM_PHASES = """async () => {
  const { STEPS } = await import('/spans.js');
  const { made } = await import('/main.js');
  return made.get('timeline').spans.ranks.get(0).lanes[STEPS].count;
}"""
_PIDS = "async () => (await import('/live.js')).job.present.ranks.map((rank) => rank.pid)"


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder of this test's own, for the folders of its jobs."""
    # Short: Open MPI puts sockets into a job's folder.
    with tempfile.TemporaryDirectory(prefix="web-", dir="/tmp", ignore_cleanup_errors=True) as name:
        monkeypatch.setenv("TMPDIR", name)
        yield Path(name)


def _dashboard(stack: ExitStack, job: RunningCommand, cwd: Path, *, attached: bool) -> str:
    """The link of the job's own dashboard, or of one that is attached to the job."""
    if not attached:
        return job.link("dashboard")
    options = ["--attach", str(job.hub()), "--at", "0"]
    return stack.enter_context(command("dashboard", *options, cwd=cwd)).link("dashboard")


@pytest.mark.parametrize("attached", [False, True])
def test_a_page_keeps_tabs_that_nobody_had_opened_when_a_rank_was_killed(
    browser: Browser, pictures: Path, tmp_path: Path, jobs: Path, *, attached: bool
) -> None:
    record, asked, errors = tmp_path / "job.record", list[str](), list[str]()
    options = ["--telemetry"] if attached else ["--dashboard-at", "0"]
    options += ["--record", str(record), str(_PROGRAM), "2048", str(tmp_path / "stop")]
    with ExitStack() as stack:
        job = stack.enter_context(command("run", "-n", "2", *options, cwd=tmp_path))
        page = browser.new_page(viewport=_SIZES["laptop"], color_scheme="light")  # type: ignore[arg-type]  # the type's name is private
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(_dashboard(stack, job, tmp_path, attached=attached))
        expect(page.locator(".card.live")).to_have_count(2, timeout=60_000)
        step = page.locator(".fact", has_text=re.compile("^Step")).locator("dd")
        expect(step).to_have_text(re.compile(r"^([5-9]|\d\d+)$"), timeout=60_000)
        computes = page.locator("[data-rank='0'] .shares b").first
        expect(computes).not_to_have_text("0 %", timeout=30_000)
        expect(page.locator(".post-mortem")).to_be_hidden()
        kill_rank(job.process, page.evaluate(_PIDS)[1])
        expect(page.locator("#banner")).to_contain_text("The job has ended", timeout=15_000)
        job.process.wait(20)
        assert not [url for url in asked if "/api/timeline" in url or "/api/plans" in url]
        (folder,) = jobs.glob("burst-rt-jobs-*/*")
        _expect_post_mortem(page, folder)
        _expect_all_tabs(page)
        if attached:
            # Its dashboard is still there.
            page.goto(page.url.partition("#")[0])
            page.reload()
            _expect_post_mortem(page, folder)
            _expect_all_tabs(page)
        else:
            _shoot(page, pictures)
        page.close()
        assert errors == []
    with command("dashboard", "--replay", str(record), "--at", "0", cwd=tmp_path) as replay:
        page = browser.new_page()
        page.goto(replay.link("dashboard"))
        _expect_post_mortem(page, folder)
        page.close()


def test_a_page_says_so_where_the_hub_was_killed_too(browser: Browser, tmp_path: Path) -> None:
    arguments = ["--telemetry", str(_PROGRAM), "2048", str(tmp_path / "stop")]
    with ExitStack() as stack:
        job = stack.enter_context(command("run", "-n", "2", *arguments, cwd=tmp_path))
        page = browser.new_page()
        page.goto(_dashboard(stack, job, tmp_path, attached=True))
        expect(page.locator(".card.live")).to_have_count(2, timeout=60_000)
        kill_rank(job.process, job.hub())
        expect(page.locator("#banner")).to_contain_text("tabs that were not open have nothing")
        page.close()


def _expect_post_mortem(page: Page, folder: Path) -> None:
    """In the words of `burst-rt postmortem`, above everything else."""
    told = PostMortem(folder)
    first, *chain = told.heading()
    assert re.match(r"first to stop: rank 1, .*(SIGKILL|no word of its end).*; in ", first)
    card = page.locator(".post-mortem")
    expect(card.locator(".first")).to_have_text(first)
    assert card.locator("li").all_inner_texts() == chain
    assert card.locator(".advice p").all_inner_texts() == list(told.advice())
    assert card.locator("pre").text_content() == "\n".join(told.lines())
    box, facts = card.bounding_box(), page.locator(".facts").first.bounding_box()
    assert box is not None
    assert facts is not None
    assert box["y"] + box["height"] < facts["y"]


def _expect_all_tabs(page: Page) -> None:
    page.keyboard.press("2")
    expect(page.locator(".status")).to_contain_text("shown", timeout=10_000)
    assert page.evaluate(_NUM_SPANS) > 50
    assert page.evaluate(_NUM_PHASES) > 10
    # The last call that both ranks have ended ends where the window does.
    assert "exposed transfers" in page.locator(".status").inner_text()
    page.keyboard.press("3")
    page.get_by_label("What").select_option("process")
    expect(page.locator(".charts h2", has_text=re.compile("^computes$"))).to_be_visible()
    page.get_by_role("button", name="all").click()
    expect(page.locator(".charts h2", has_text=re.compile("^computes$"))).to_be_visible()
    page.get_by_label("What").select_option("job")
    expect(page.locator(".charts h2", has_text=re.compile("^loss$"))).to_be_visible()
    page.keyboard.press("4")
    expect(page.locator("tr.chosen")).to_have_count(2)
    page.keyboard.press("5")
    expect(page.locator("pre").first).to_contain_text("strategy")
    measured = page.locator("table").last.locator("tbody tr td:nth-child(4)")
    assert all(re.search(r"\d m?s$", words) for words in measured.all_inner_texts())
    page.keyboard.press("1")
    expect(page.locator(".card")).to_have_count(2)


def _shoot(page: Page, folder: Path) -> None:
    """Pictures on a laptop and a phone, light and dark; nothing is wider than the page."""
    for size, viewport in _SIZES.items():
        page.set_viewport_size(viewport)  # type: ignore[arg-type]  # the type's name is private
        for theme in ("light", "dark"):
            page.emulate_media(color_scheme=theme)
            for key, tab in (("1", "overview"), ("2", "timeline"), ("3", "history"), ("5", "job")):
                page.keyboard.press(key)
                page.wait_for_timeout(600)
                page.screenshot(path=folder / f"killed-{tab}-{size}-{theme}.png")
                wide = "document.documentElement.scrollWidth - innerWidth"
                assert page.evaluate(wide) <= 0, (tab, size)
