"""The NCCL transport against a double that records the calls: what is called, in which order, with which arguments, and what fails how."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from burst_rt.errors import ConfigError, DeviceError, Stalled
from burst_rt.transport.nccl import NcclTransport, unique_id_bytes

_ID = tuple(range(-64, 64))


class Recorder:
    """`cupy.cuda.nccl` and its communicator in one."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fail: dict[str, Exception] = {}
        self.joining = threading.Event()
        self.joining.set()

    def get_unique_id(self) -> tuple[int, ...]:
        return _ID

    def NcclCommunicator(self, size: int, unique_id: tuple[int, ...], rank: int) -> Recorder:
        self.joining.wait(20)
        self._call("join", size, unique_id, rank)
        return self

    def _call(self, name: str, *args: Any) -> None:
        self.calls.append((name, *args))
        if name in self.fail:
            raise self.fail[name]

    def groupStart(self) -> None:
        self._call("groupStart")

    def groupEnd(self) -> None:
        self._call("groupEnd")

    def send(self, *args: int) -> None:
        self._call("send", *args)

    def recv(self, *args: int) -> None:
        self._call("recv", *args)

    def abort(self) -> None:
        self._call("abort")

    def destroy(self) -> None:
        self._call("destroy")


def joined(nccl: Recorder, **options: Any) -> NcclTransport:  # NcclTransport's own
    transport = NcclTransport(nccl, unique_id_bytes(nccl), 1, 3, options.pop("timeout_s", 20.0), lambda: None)
    assert nccl.calls.pop() == ("join", 3, _ID, 1)  # the id survived the way over bytes
    return transport


def test_an_exchange_is_one_group_of_bytes_on_the_stream() -> None:
    nccl = Recorder()
    transport = joined(nccl)
    a, b, c = (torch.zeros(n, dtype=torch.uint8) for n in (8, 3, 5))
    transport.exchange([(a, 2), (b, 2)], [(c, 0)], stream=77)
    assert nccl.calls == [
        ("groupStart",),
        ("send", a.data_ptr(), 8, 1, 2, 77),
        ("send", b.data_ptr(), 3, 1, 2, 77),
        ("recv", c.data_ptr(), 5, 1, 0, 77),
        ("groupEnd",),
    ]
    assert (transport.bytes_sent, transport.bytes_received) == (11, 5)
    assert transport.capabilities.ordered
    assert transport.capabilities.device_memory


def test_a_group_is_ended_whatever_happens_in_it() -> None:
    nccl = Recorder()
    transport = joined(nccl)
    nccl.fail["recv"] = RuntimeError("ncclInvalidArgument")
    with pytest.raises(RuntimeError, match="ncclInvalidArgument"):
        transport.exchange([], [(torch.zeros(4, dtype=torch.uint8), 0)], stream=1)
    assert nccl.calls[-1] == ("groupEnd",)


def test_joining_has_a_deadline() -> None:
    nccl = Recorder()
    nccl.joining.clear()
    with pytest.raises(Stalled, match="all 3 ranks") as caught:
        NcclTransport(nccl, unique_id_bytes(nccl), 1, 3, 0.2, lambda: None)
    assert caught.value.rank == 1
    nccl.joining.set()


def test_what_nccl_says_is_passed_on() -> None:
    nccl = Recorder()
    nccl.fail["join"] = RuntimeError("ncclUnhandledCudaError: invalid device")
    with pytest.raises(DeviceError, match="invalid device"):
        NcclTransport(nccl, unique_id_bytes(nccl), 0, 2, 20.0, lambda: None)


def test_the_device_is_entered_in_the_thread_that_joins() -> None:
    nccl = Recorder()
    threads: list[str] = []
    NcclTransport(nccl, unique_id_bytes(nccl), 0, 2, 20.0, lambda: threads.append(threading.current_thread().name))
    assert threads == ["burst_rt nccl rank 0"]


def test_closing_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("burst_rt.transport.nccl._CLOSE_DEADLINE_S", 0.2)
    nccl, over = Recorder(), threading.Event()
    transport = joined(nccl)
    monkeypatch.setattr(nccl, "destroy", lambda: over.wait(20))
    started_s = time.monotonic()
    transport.close()
    assert 0.2 <= time.monotonic() - started_s < 10
    over.set()


@pytest.mark.parametrize("end", ["cancel", "close"])
def test_an_ended_transport_refuses(end: str) -> None:
    nccl = Recorder()
    transport = joined(nccl)
    for _ in range(2):
        getattr(transport, end)()
    assert nccl.calls == [("abort",) if end == "cancel" else ("destroy",)]
    with pytest.raises(ConfigError, match="aborted or closed"):
        transport.exchange([], [], stream=1)
