"""The probe for MPI with device memory: a job that tells by ending well or badly, and an answer
that is remembered.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from burst_rt.launch.checks import probe_device_mpi
from burst_rt.launch.mpirun import find_launcher
from burst_rt.transport.probe import last_answer, note_answer


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_an_answer_is_remembered_for_this_library_and_device() -> None:
    assert last_answer("an MPI", "a GPU") is None
    for answer in (True, False):
        note_answer("an MPI", "a GPU", answer)
        assert last_answer("an MPI", "a GPU") is answer
    assert last_answer("another MPI", "a GPU") is None
    assert last_answer("an MPI", "another GPU") is None


def test_a_cache_that_cannot_be_used_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "burst_rt").write_text("in the way")
    note_answer("an MPI", "a GPU", True)
    assert last_answer("an MPI", "a GPU") is None


def test_memory_that_mpi_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory stands in for a device's."""
    from mpi4py import MPI

    # UCX writes its log to standard output, among what ranks print.
    monkeypatch.setenv("UCX_LOG_LEVEL", "info")
    answer = probe_device_mpi(find_launcher(), "cpu", "a CPU")
    assert answer == "device memory is taken: 16,777,216 bytes on cpu"
    assert last_answer(MPI.Get_library_version().strip(), "a CPU") is True


def test_memory_that_mpi_does_not_take() -> None:
    """Memory without an address: the ranks of the probe fail, and nobody else does."""
    from mpi4py import MPI

    answer = probe_device_mpi(find_launcher(), "meta", "no memory")
    assert answer.startswith("MPI does not take it; messages go through pinned host memory")
    assert last_answer(MPI.Get_library_version().strip(), "no memory") is False
