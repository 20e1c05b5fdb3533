"""Dashboards for tests: served over a model made by hand, or by a running `burst-rt` command."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import psutil
import pytest

from burst_rt.dashboard.server import RunningDashboard, Where
from burst_rt.launch.run import kill_job
from burst_rt.telemetry.hub.jobs import running_jobs
from burst_rt.telemetry.model.job_model import JobModel
from burst_rt.telemetry.read.viewer import ModelViewer

if TYPE_CHECKING:
    from playwright.sync_api import Page

__all__ = [
    "RunningCommand",
    "Serving",
    "command",
    "installed",
    "kill_rank",
    "serving",
    "wait_until",
]

# Set where every test must run: tests whose program is missing then fail instead of being skipped.
_ALL_VARIABLE = "BURST_RT_ALL_TESTS"
_START_S = 60.0
_END_S = 20.0


def installed(*names: str, package: str) -> str:
    """The path of the first of these programs that this machine has.

    Where the machine has none of them, the test is skipped and says what to install.
    """
    path = next((found for name in names if (found := shutil.which(name))), None)
    if path is None:
        say = pytest.fail if _ALL_VARIABLE in os.environ else pytest.skip
        say(f"needs one of {', '.join(names)} (Debian: apt-get install {package})")
    return path


def wait_until(page: Page, script: str, holds: Callable[[Any], bool]) -> None:
    """Waits until what an async function of the page returns is so.

    `page.wait_for_function` does not do: the promise of such a function is true at once.
    """
    deadline_s = time.monotonic() + _END_S
    while not holds(value := page.evaluate(script)):
        assert time.monotonic() < deadline_s, value
        page.wait_for_timeout(50)


@dataclass
class Serving:
    """A dashboard that listens."""

    served: RunningDashboard
    model: JobModel  # to be changed by `do` alone, which runs in the server's thread
    _loop: asyncio.AbstractEventLoop

    @property
    def host(self) -> str:
        return urlsplit(self.served.link).hostname or ""

    @property
    def port(self) -> int:
        return urlsplit(self.served.link).port or 0

    def do(self, change: Callable[[JobModel], None]) -> None:
        """Changes the model; blocks until that is done, at most 10 s."""

        async def run() -> None:
            change(self.model)

        asyncio.run_coroutine_threadsafe(run(), self._loop).result(10)


@contextmanager
def serving(model: JobModel, where: Where | None = None) -> Iterator[Serving]:
    """Serves a dashboard over a model from a thread, until the end of the block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> RunningDashboard:
        return RunningDashboard(ModelViewer(model), where or Where(port=0))

    served = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    running = asyncio.run_coroutine_threadsafe(served.run(), loop)
    try:
        yield Serving(served, model, loop)
    finally:
        loop.call_soon_threadsafe(served.close)
        running.result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


@dataclass
class RunningCommand:
    """A `burst-rt` command that runs."""

    process: subprocess.Popen[str]
    said: list[str]  # what the command has printed so far on standard error

    def hub(self) -> int:
        """The number of the job's hub, once it can be found. Raises TimeoutError after 60 s."""
        deadline_s = time.monotonic() + _START_S
        while time.monotonic() < deadline_s:
            own = {child.pid for child in psutil.Process(self.process.pid).children(recursive=True)}
            found = own & {job.pid for job in running_jobs()}
            if found:
                return found.pop()
            time.sleep(0.1)
        raise TimeoutError("".join(self.said))

    def link(self, kind: str) -> str:
        """The address that the command prints; blocks until it has, at most 60 s.

        kind: "dashboard" or "metrics". Raises TimeoutError.
        """
        deadline_s = time.monotonic() + _START_S
        while time.monotonic() < deadline_s:
            found = re.search(rf"{kind} (http\S+)", "".join(self.said))
            if found:
                return found[1]
            assert self.process.poll() is None, "".join(self.said)
            time.sleep(0.05)
        raise TimeoutError("".join(self.said))


@contextmanager
def command(*arguments: str, cwd: Path) -> Iterator[RunningCommand]:
    """Runs a `burst-rt` command until the end of the block, where it is interrupted."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "burst_rt.launch.main", *arguments],
        cwd=cwd, env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    said: list[str] = []
    assert process.stderr is not None
    reading = threading.Thread(target=lambda: said.extend(process.stderr or ()), daemon=True)
    reading.start()
    try:
        yield RunningCommand(process, said)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            kill_job(process)
            process.wait()
        reading.join(5)
        process.stderr.close()


def kill_rank(process: subprocess.Popen[str], pid: int) -> None:
    """Kills a rank of a job that this process has started."""
    assert pid in {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
    os.kill(pid, signal.SIGKILL)
