"""What goes another way on a GPU, shown by stand-ins: no machine of these tests has one."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import burst_rt.hf
from burst_rt.errors import DeviceError
from burst_rt.runtime.process import Process


def _nothing(*_: Any) -> float:
    return 1e-4


@pytest.mark.parametrize("room", [True, False])
def test_weights_on_the_host_are_compared_on_the_gpu(
    room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = sys.modules[burst_rt.hf.prepare.__module__]
    moved: list[str] = []

    def move(self: torch.nn.Module, device: object) -> torch.nn.Module:
        moved.append(str(device))
        if len(moved) == 1 and not room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self

    def refuse(name: str, error: Exception, _: object) -> None:
        raise error

    monkeypatch.setattr(torch.nn.Module, "to", move)
    monkeypatch.setattr(prepare, "_batches", lambda *_: {"rows": {}})
    monkeypatch.setattr(prepare, "_check_logits", _nothing)
    monkeypatch.setattr(prepare, "refuse", refuse)
    ctx: Any = SimpleNamespace(device=torch.device("cuda:1"), runtime=None)
    if room:
        prepare._compare(torch.nn.Linear(2, 2), ctx, loss=False)
    else:
        with pytest.raises(DeviceError, match="cuda:1 has no room for the model"):
            prepare._compare(torch.nn.Linear(2, 2), ctx, loss=False)
    assert moved == ["cuda:1", "cpu"]


class _Member:
    def __init__(self) -> None:
        self.rank, self.closed = 0, False
        self.broken: BaseException | None = None

    def close(self, code: int = 0, error: str = "") -> None:
        """Nothing."""


def test_a_thread_that_made_no_runtime_works_for_those_of_the_process() -> None:
    """Autograd runs the backwards of a GPU in a thread of its own."""
    process, ranks, of_thread = Process(), [_Member(), _Member()], _Member()
    for member in ranks:
        process.open.add(member)
        process.add_here(member)
    found: list[list[object]] = []

    def backward() -> None:
        found.append([*process.made_for_here()])

    def rank() -> None:
        process.add_here(of_thread)
        backward()

    # A rank that is a thread has its own alone, and others know nothing of it.
    for work in (backward, rank, backward):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert found == [ranks, [of_thread], ranks]
    assert [*process.made_for_here()] == [*ranks]
