"""Pictures of the dashboard for the guide, of a real job.

    python docs/pictures.py FOLDER

A small training on two ranks is recorded, and the record is shown in Chromium. `make docs` puts the
pictures into the pages that it builds; `python docs/pictures.py docs` renews those of the tree,
which readers of the sources see. Without playwright or a Chromium nothing is done, and a line says
so. Ends within five minutes, or fails.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
_JOB_DEADLINE_S = 240.0
_COMMAND = [sys.executable, "-P", "-m", "burst_rt.launch.main"]
# Enough steps for curves, long enough for a verdict on a quiet machine (made once a second), and a
# learning rate at which the loss spikes now and then.
_TRAINING = (
    "train -n 2 --steps 160 --seq-len 1024 --dim 64 --layers 2 --heads 4 --kv-heads 2 --lr 0.02 "
    "--eval-every 10 --eval-sequences 2 --checkpoint-every 25 --progress none"
)
_WINDOW = {"width": 1280, "height": 760}
# Shows the record as it was when so much of it was over.
_GO = """(bar, part) => {
  bar.value = part * bar.max;
  bar.dispatchEvent(new Event("input"));
}"""
# The window of the timeline: so many seconds before that moment.
_ZOOM = """async (seconds) => {
  const { made } = await import("/main.js");
  const { shown } = await import("/ask.js");
  made.get("timeline").open(seconds, shown.at - 1);
}"""


def main(folder: Path) -> None:
    """Makes the pictures. Raises CalledProcessError where the job fails."""
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        browser = None
    if browser is None:
        print("docs/pictures.py: no playwright or no Chromium; the guide has the tree's pictures")
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        record = Path(name) / "job.record"
        _run(record, Path(name))
        _show(record, browser, folder)


def _run(record: Path, folder: Path) -> None:
    """Records the job."""
    where = ["--out", str(folder / "run"), "--record", str(record)]
    subprocess.run(
        [*_COMMAND, *_TRAINING.split(), *where], check=True, timeout=_JOB_DEADLINE_S, cwd=folder
    )


def _show(record: Path, browser: str, folder: Path) -> None:
    """Shows the record, and takes the pictures."""
    from playwright.sync_api import sync_playwright

    options = ["dashboard", "--replay", record.name, "--at", "0"]
    showing = subprocess.Popen(
        [*_COMMAND, *options], stderr=subprocess.PIPE, text=True, cwd=record.parent
    )
    assert showing.stderr is not None
    try:
        link = re.search(r"dashboard (http\S+)", showing.stderr.readline())
        assert link is not None, "the dashboard did not start"
        with sync_playwright() as playwright:
            arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
            opened = playwright.chromium.launch(executable_path=browser, args=arguments)
            page = opened.new_page(viewport=_WINDOW, color_scheme="light")  # type: ignore[arg-type]  # the type's name is private
            page.goto(link[1])
            page.wait_for_selector(".card")
            page.get_by_label("Time of the record").evaluate(_GO, 0.85)
            page.wait_for_selector(".card.live")
            page.wait_for_timeout(1500)
            page.screenshot(path=folder / "dashboard.png")
            page.locator(".verdict").screenshot(path=folder / "verdict.png")
            page.keyboard.press("2")
            page.wait_for_timeout(2000)
            page.evaluate(_ZOOM, 2.0)
            page.wait_for_timeout(800)
            page.locator(".stage").screenshot(path=folder / "steps.png")
            page.keyboard.press("3")
            page.get_by_role("button", name="10 min").click()
            page.get_by_label("Smoothing").select_option("5")
            page.wait_for_timeout(1500)
            page.evaluate("scrollTo(0, 0)")
            page.screenshot(path=folder / "history.png")
            opened.close()
    finally:
        showing.terminate()  # what is started in the background may have been told to ignore Ctrl-C
        showing.wait(20)
        showing.stderr.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
