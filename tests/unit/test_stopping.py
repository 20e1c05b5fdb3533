"""Stopping a job after what it is doing: what a rank hears, what the launcher asks and for how
long, and who has the last word.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from burst_rt.job.reports import JOB_DIR_VARIABLE
from burst_rt.launch import stopping
from burst_rt.launch.signals import Stop, forward_signals
from burst_rt.launch.stopping import (
    SIGNALS,
    LastWord,
    StopRequests,
    ask_to_stop,
    leave_word,
    listen,
    read_word,
)

_SILENCE = [0.0] * len(SIGNALS)


@pytest.fixture(autouse=True)
def job_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(JOB_DIR_VARIABLE, str(tmp_path))
    # A shell ignores some of these signals in what it runs in its background, and so does nohup:
    # here every signal is handled as in a Python that was started by hand.
    before = {
        number: signal.signal(
            number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        )
        for number in SIGNALS
    }
    monkeypatch.setattr(stopping, "_ONE_WISH_S", 60.0)
    yield tmp_path
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_heard_by_all_ranks(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequests(offer=False) as requests:
        assert requests.votes() == _SILENCE
        assert requests.heard(_SILENCE) is None
        # Twice at once is one wish.
        signal.raise_signal(number)
        signal.raise_signal(number)
        # Three ranks of four have heard nothing.
        assert (
            requests.heard(
                [
                    vote + 3 * silence
                    for vote, silence in zip(requests.votes(), _SILENCE, strict=True)
                ]
            )
            is number
        )
    assert signal.getsignal(number) is before


def test_who_asks_again_later_means_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "_ONE_WISH_S", -1.0)
    with StopRequests(offer=False):
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_what_is_to_be_ignored_is_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with StopRequests(offer=False) as requests:
        signal.raise_signal(signal.SIGINT)
        assert requests.votes() == _SILENCE


def test_the_launcher_asks_who_offers(job_dir: Path) -> None:
    assert not ask_to_stop(job_dir, signal.SIGHUP)
    with StopRequests(offer=False):
        assert not ask_to_stop(job_dir, signal.SIGHUP)
    with StopRequests(offer=True) as requests:
        assert requests.votes() == _SILENCE
        assert ask_to_stop(job_dir, signal.SIGHUP)
        assert requests.heard(requests.votes()) is signal.SIGHUP
    assert not ask_to_stop(job_dir, signal.SIGHUP), "the offer was for a time"


def test_it_can_ask_though_the_folder_was_cleaned_since(job_dir: Path) -> None:
    """As temporary folders are, on some hosts, of what is some days old."""
    with StopRequests(offer=True) as requests:
        shutil.rmtree(job_dir)
        assert not ask_to_stop(job_dir, signal.SIGHUP)
        assert requests.votes() == _SILENCE
        assert ask_to_stop(job_dir, signal.SIGHUP)
        assert requests.heard(requests.votes()) is signal.SIGHUP
        assert leave_word(LastWord("stopped", 129))


def test_a_last_word_is_left_only_to_who_listens(
    job_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    word = LastWord("burst-rt: stopped\n\udc80", 130)
    assert not leave_word(word)
    assert read_word(job_dir) is None
    listen(job_dir)
    assert leave_word(word)
    assert read_word(job_dir) == word
    monkeypatch.setenv(JOB_DIR_VARIABLE, str(job_dir / "on another host"))
    assert not leave_word(word)
    monkeypatch.delenv(JOB_DIR_VARIABLE)
    assert not leave_word(word)


def test_ranks_that_were_asked_have_so_long_and_no_longer(
    job_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    now_s = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    monkeypatch.setattr(os, "write", lambda *_: 0)
    stop = Stop()
    told: list[str] = []
    # As much of mpirun and of a hub as is asked for.
    mpirun: Any = SimpleNamespace(send_signal=sent.append)
    hub: Any = SimpleNamespace(stopping=told.append)
    stop.attach(mpirun, job_dir, hub)
    (job_dir / "stops-when-asked").touch()
    stop.handle(signal.SIGHUP, None)
    now_s = 29.0
    assert (stop.due(), stop.asked, sent) == (False, True, [])
    now_s = 31.0
    assert (stop.due(), stop.asked, sent) == (True, False, [signal.SIGTERM])
    assert told == ["SIGHUP"], "before any rank ends: they are stopped, not lost"
    assert (stop.due(), sent) == (True, [signal.SIGTERM])


@pytest.mark.parametrize("offered", [True, False])
def test_a_batch_systems_notice_ends_no_launcher(
    offered: bool, job_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGUSR1: the ranks stop where they offer to, and else get it as their program expects it."""
    sent: list[int] = []
    monkeypatch.setattr(os, "write", lambda *_: 0)
    mpirun: Any = SimpleNamespace(send_signal=sent.append)
    with forward_signals() as stop:
        assert signal.getsignal(signal.SIGUSR1) == stop.handle
        stop.attach(mpirun, job_dir, None)
        if offered:
            (job_dir / "stops-when-asked").touch()
        stop.handle(signal.SIGUSR1, None)
    assert (stop.asked, stop.received) == ((True, signal.SIGUSR1) if offered else (False, None))
    assert sent == ([] if offered else [signal.SIGUSR1])
    assert not stop.due()


_PRELOADED = """
#include <signal.h>
static void ours(int number) { (void)number; }
__attribute__((constructor)) static void take(void) { signal(SIGHUP, ours); }
"""
_PROGRAM = """
import signal
import subprocess
import sys
from burst_rt.launch.signals import forward_signals
from burst_rt.launch.stopping import StopRequests
assert signal.getsignal(signal.SIGHUP) is None
with StopRequests(offer=False), forward_signals():
    pass
assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
"""


def test_a_signal_that_a_library_took_before_python_started(tmp_path: Path) -> None:
    """Python cannot put such a handler back; UCX has one for SIGHUP where it is preloaded."""
    source, library = tmp_path / "take.c", tmp_path / "libtake.so"
    source.write_text(_PRELOADED, encoding="utf-8")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    environment = dict(os.environ) | {"LD_PRELOAD": str(library)}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], env=environment, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
