"""torch's own NCCL as a communicator: against a double that records the calls; against torch's real
process group, with gloo in NCCL's place; and against torch's own description of its NCCL, which a
torch without CUDA has too.
"""

from __future__ import annotations

import ast
import threading
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from burst_rt.errors import DeviceError
from burst_rt.transport.nccl import NcclTransport
from burst_rt.transport.torch_nccl import TorchCommunicator, with_backend

_CPU = torch.device("cpu")


class Recorder:
    """A process group of torch's."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.error = "SUCCESS"
        self.fail = ""

    def _call(self, *call: Any) -> None:
        self.calls.append(call)
        if call[0] == self.fail:
            raise dist.DistBackendError("NCCL error: unhandled cuda error")

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self._call("send", [x.data_ptr() for x in tensors], peer, tag)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self._call("recv", [x.data_ptr() for x in tensors], peer, tag)

    def _start_coalescing(self, device: torch.device) -> None:
        self._call("start", device)

    def _end_coalescing(self, device: torch.device) -> Any:
        self._call("end", device)
        return SimpleNamespace(wait=lambda: self._call("wait"))

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(get_error=lambda: SimpleNamespace(name=self.error))

    def abort(self) -> None:
        self._call("abort")

    def shutdown(self) -> None:
        self._call("shutdown")


def _over(group: Any, rank: int = 1, size: int = 3) -> NcclTransport:
    def on(stream: int, device: torch.device) -> AbstractContextManager[object]:
        if isinstance(group, Recorder):
            group.calls.append(("on", stream, device))
        return nullcontext()

    return NcclTransport(lambda: TorchCommunicator(group, _CPU, on), rank, size, 20.0, lambda: None)


def test_an_exchange_is_one_group_of_messages_that_the_stream_waits_for() -> None:
    group = Recorder()
    transport = _over(group)
    a, b, c = (torch.zeros(n, dtype=torch.uint8) for n in (8, 3, 5))
    transport.exchange([(a, 2), (b, 2)], [(c, 0)], stream=77)
    assert group.calls == [
        ("on", 77, _CPU),
        ("start", _CPU),
        ("send", [a.data_ptr()], 2, 0),
        ("send", [b.data_ptr()], 2, 0),
        ("recv", [c.data_ptr()], 0, 0),
        ("end", _CPU),
        ("wait",),
    ]
    assert (transport.bytes_sent, transport.bytes_received) == (11, 5)


@pytest.mark.parametrize("where", ["send", "end", "wait"])
def test_what_torch_says_is_passed_on(where: str) -> None:
    group = Recorder()
    group.fail = where
    some = torch.zeros(4, dtype=torch.uint8)
    with pytest.raises(DeviceError, match=r"messages with ranks \[2\]: NCCL error: unhandled cuda"):
        _over(group).exchange([(some, 2)], [], stream=1)
    assert ("end", _CPU) in group.calls  # a group left open would swallow every later call


def test_later_errors_and_ends() -> None:
    group = Recorder()
    transport = _over(group)
    transport.check()
    group.error = "REMOTE_ERROR"
    with pytest.raises(DeviceError, match="torch's NCCL reports REMOTE_ERROR"):
        transport.check()
    transport.cancel()
    assert group.calls == [("abort",)]
    other = Recorder()
    _over(other).close()
    assert other.calls == [("shutdown",)]


def test_the_real_process_group_takes_the_calls() -> None:
    """Two ranks over gloo, which has no groups of messages: all else is torch's own."""
    store: Any = getattr(dist, "HashStore")()  # noqa: B009  (untyped)
    got: dict[int, bytes] = {}

    class Gloo:
        """A real process group, whose messages are started at once and waited for together."""

        def __init__(self, rank: int) -> None:
            device = dist.ProcessGroupGloo.create_device(interface="lo")
            options: Any = getattr(dist.ProcessGroupGloo, "_Options")()  # noqa: B009  (untyped)
            options._devices = [device]
            backend = dist.ProcessGroupGloo(store, rank, 2, options)
            self.group = with_backend(backend, "GLOO", store, _CPU)
            self.works: list[Any] = []

        def send(self, *args: Any) -> None:
            self.works.append(self.group.send(*args))

        def recv(self, *args: Any) -> None:
            self.works.append(self.group.recv(*args))

        def _start_coalescing(self, device: torch.device) -> None:
            assert self.works == []

        def _end_coalescing(self, device: torch.device) -> Any:
            works, self.works = self.works, []
            return SimpleNamespace(wait=lambda: [work.wait() for work in works])

        def _get_backend(self, device: torch.device) -> Any:
            return self.group._get_backend(device)

    def run(rank: int) -> None:
        transport = _over(Gloo(rank), rank, 2)
        for number in range(3):
            mine = torch.full((5,), 10 * rank + number, dtype=torch.uint8)
            theirs = torch.zeros(5, dtype=torch.uint8)
            transport.exchange([(mine, 1 - rank)], [(theirs, 1 - rank)], stream=0)
            transport.check()
            got[rank] = got.get(rank, b"") + theirs.numpy().tobytes()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert got == {
        rank: b"".join(bytes([10 * (1 - rank) + number] * 5) for number in range(3))
        for rank in range(2)
    }


def test_torch_describes_its_nccl_as_it_is_used_here() -> None:
    stubs = Path(torch.__file__).parent / "_C" / "_distributed_c10d.pyi"
    classes = {
        node.name: node
        for node in ast.walk(ast.parse(stubs.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    }
    nccl = classes["ProcessGroupNCCL"]
    made = next(node for node in nccl.body if getattr(node, "name", "") == "__init__")
    assert isinstance(made, ast.FunctionDef)
    assert [arg.arg for arg in made.args.args] == ["self", "store", "rank", "size", "options"]
    options = next(node for node in nccl.body if getattr(node, "name", "") == "Options")
    assert isinstance(options, ast.ClassDef)
    assert ast.unparse(options.bases[0]) == "Backend.Options"  # has `_timeout`, which can be set
    assert "is_high_priority_stream: bool" in map(ast.unparse, options.body)
    assert any(
        isinstance(node, ast.FunctionDef)
        and node.name == "_timeout"
        and ast.unparse(node.decorator_list[0]) == "_timeout.setter"
        for each in classes["Backend"].body
        if isinstance(each, ast.ClassDef)
        for node in each.body
    )
    names = {node.name for node in classes["Backend"].body if isinstance(node, ast.FunctionDef)}
    assert {"abort", "shutdown", "get_error"} <= names
