"""What tests of the dashboard share: a Chromium, and where pictures go."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from dashboards import installed
from playwright.sync_api import Browser, sync_playwright

_ROOT = Path(__file__).resolve().parents[2]
_BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


# For a module, not for all tests: while it is open, its event loop runs in this thread, and other
# tests cannot have theirs.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A real Chromium."""
    path = installed(*_BROWSERS, package="chromium-headless-shell")
    with sync_playwright() as playwright:
        # A root user, as in containers, has no sandbox to give.
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox"] if os.geteuid() == 0 else []
        )
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def pictures() -> Path:
    """Where screenshots go."""
    folder = _ROOT / "build" / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
