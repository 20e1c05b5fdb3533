"""Descriptors of processes, with and without what Python may lack for them."""

from __future__ import annotations

import os
import select
import signal
import subprocess

import pytest

from burst_rt.job.processes import open_process, signal_process


@pytest.fixture(params=["Python has them", "Python lacks them"])
def python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Pythons of conda, and of uv before 2026, lack them."""
    if request.param == "Python lacks them":
        monkeypatch.delattr(os, "pidfd_open")
        monkeypatch.delattr(signal, "pidfd_send_signal")


@pytest.mark.usefixtures("python")
def test_a_descriptor_tells_the_end_of_its_process_and_signals_it() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        descriptor = open_process(process.pid)
        assert not os.get_inheritable(descriptor)
        assert select.select([descriptor], [], [], 0.0)[0] == []
        signal_process(descriptor, signal.SIGTERM)
        assert select.select([descriptor], [], [], 30.0)[0] == [descriptor]
    assert process.returncode == -signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        signal_process(descriptor, signal.SIGTERM)
    os.close(descriptor)


@pytest.mark.usefixtures("python")
def test_a_process_that_is_gone_has_none() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    with pytest.raises(ProcessLookupError):
        open_process(process.pid)
