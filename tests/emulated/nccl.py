"""NCCL's messages, CuPy's and torch's, from process to process of one host, over Unix sockets.

What is received arrives when it arrives, and streams that need it wait until then.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from emulated.cuda import BOOKS, Stream, current_device, stream_of

__all__ = ["install", "install_group"]

_ID_BYTES = 128  # NCCL_UNIQUE_ID_BYTES of nccl.h
_RANK = struct.Struct("i")


class _Part(NamedTuple):
    """A send or a receive of a group."""

    communicator: NcclCommunicator
    sends: bool
    address: int
    size: int
    peer: int
    stream: int


_group: list[_Part] = []


class _Message:
    """A message that is to arrive at an address."""

    def __init__(self, address: int, size: int) -> None:
        self.address, self.size, self.arrived = address, size, False


class NcclCommunicator:
    """See CuPy. Ranks meet in a folder, whose path is the unique id."""

    def __init__(self, size: int, unique_id: bytes, rank: int) -> None:
        self._folder, self._rank = unique_id.rstrip(b"\0").decode(), rank
        self.streams: set[Stream] = set()  # that have had messages
        self._to: dict[int, SimpleQueue[Any]] = {}
        self._from: dict[int, SimpleQueue[Any]] = {}
        self._accepted: dict[int, SimpleQueue[socket.socket]] = {
            peer: SimpleQueue() for peer in range(size)
        }
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{self._folder}-{rank}")
        self._listener.listen(size)
        os.rename(f"{self._folder}-{rank}", f"{self._folder}/{rank}")  # whoever sees it may connect
        _in_background(self._accept)
        while len(os.listdir(self._folder)) < size:
            time.sleep(0.01)

    def send(self, address: int, size: int, _: int, peer: int, stream: int) -> None:
        """See CuPy. A part of a group."""
        _group.append(_Part(self, True, address, size, peer, stream))

    def recv(self, address: int, size: int, _: int, peer: int, stream: int) -> None:
        """See CuPy. A part of a group."""
        _group.append(_Part(self, False, address, size, peer, stream))

    def check_async_error(self) -> None:
        """See CuPy."""

    def abort(self) -> None:
        """See CuPy."""
        for queue in (*self._to.values(), *self._from.values()):
            queue.put(None)
        self._listener.close()

    def destroy(self) -> None:
        """See CuPy. Waits for the work on the streams."""
        for stream in self.streams:
            stream.finish()
        self.abort()

    def send_now(self, address: int, size: int, peer: int) -> None:
        """Puts into a socket what is at the address."""
        if peer not in self._to:
            self._to[peer] = _in_background(_write, lambda: self._connect(peer))
        self._to[peer].put(ctypes.string_at(address, size))

    def receive_now(self, address: int, size: int, peer: int) -> _Message:
        """Has a message come to the address."""
        if peer not in self._from:
            self._from[peer] = _in_background(_read, self._accepted[peer].get)
        message = _Message(address, size)
        self._from[peer].put(message)
        return message

    def _connect(self, peer: int) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(f"{self._folder}/{peer}")
        connection.sendall(_RANK.pack(self._rank))
        return connection

    def _accept(self, _: SimpleQueue[Any]) -> None:
        while True:
            try:
                connection, _address = self._listener.accept()
            except OSError:  # closed
                return
            (peer,) = _RANK.unpack(connection.recv(_RANK.size, socket.MSG_WAITALL))
            self._accepted[peer].put(connection)


def _in_background(work: Callable[..., None], *args: Any) -> SimpleQueue[Any]:
    """Starts work in a thread; returns the queue that the thread reads."""
    queue: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=work, args=(*args, queue), daemon=True).start()
    return queue


def _write(connect: Callable[[], socket.socket], queue: SimpleQueue[Any]) -> None:
    # A peer that has left takes no more. Whoever reads from it notices.
    with connect() as connection, suppress(OSError):
        while (data := queue.get()) is not None:
            connection.sendall(data)


def _read(connect: Callable[[], socket.socket], queue: SimpleQueue[Any]) -> None:
    with connect() as connection:
        while (message := queue.get()) is not None:
            memory = memoryview((ctypes.c_char * message.size).from_address(message.address))
            arrived = 0
            while arrived < message.size:
                size = connection.recv_into(memory.cast("B")[arrived:])
                if not size:
                    return
                arrived += size
            with Stream.changed:
                message.arrived = True
                Stream.changed.notify_all()


class _Group:
    """A group of torch's NCCL, as far as `burst_rt.transport.torch_nccl.NcclGroup` names it."""

    def __init__(self, store: Any, name: str, rank: int, size: int, device: torch.device) -> None:
        key = f"emulated/{name}"
        if rank == 0:
            store.set(key, get_unique_id())
        self._communicator = NcclCommunicator(size, store.get(key), rank)
        self._device = device
        self.abort, self.shutdown = self._communicator.abort, self._communicator.destroy

    def send(self, tensors: list[torch.Tensor], peer: int, _: int) -> None:
        """See torch."""
        self._put(True, tensors[0], peer)

    def recv(self, tensors: list[torch.Tensor], peer: int, _: int) -> None:
        """See torch."""
        self._put(False, tensors[0], peer)

    def _put(self, sends: bool, x: torch.Tensor, peer: int) -> None:
        stream = torch.cuda.current_stream(self._device).cuda_stream
        _group.append(_Part(self._communicator, sends, x.data_ptr(), x.numel(), peer, stream))

    def _start_coalescing(self, _: torch.device) -> None:
        group_start()

    def _end_coalescing(self, _: torch.device) -> Any:
        group_end()
        return SimpleNamespace(wait=lambda: None)

    def _get_backend(self, _: torch.device) -> None:
        """See torch."""


def get_unique_id() -> bytes:
    """See CuPy."""
    # Beside the library, in a folder of the test that goes when it ends.
    folder = tempfile.mkdtemp(prefix="nccl-", dir=os.path.dirname(os.environ["EMULATED_LIBRARY"]))
    return folder.encode().ljust(_ID_BYTES, b"\0")


def group_start() -> None:
    """CuPy's groupStart."""
    _group.clear()


def group_end() -> None:
    """CuPy's groupEnd. A group is one piece of work: it is done once all has arrived."""
    group, device = _group.copy(), current_device()
    _group.clear()
    for handle in {handle for *_, handle in group}:
        _start(stream_of(device, handle), [part for part in group if part.stream == handle])


def _start(stream: Stream, parts: list[_Part]) -> None:
    for part in parts:
        span = [BOOKS.span(part.address, part.size)]
        reads, writes = (span, []) if part.sends else ([], span)
        BOOKS.use(stream.key, reads, writes, f"NCCL with {part.peer}")
        part.communicator.streams.add(stream)
    messages: list[_Message] = []

    def start() -> None:
        for part in parts:
            where = part.address, part.size, part.peer
            if part.sends:
                part.communicator.send_now(*where)
            else:
                messages.append(part.communicator.receive_now(*where))

    stream.put(start)
    stream.put(lambda: None, lambda: all(message.arrived for message in messages))


def install(nccl: Any) -> None:
    """Puts all this in the place of CuPy's."""
    nccl.NcclCommunicator, nccl.get_unique_id = NcclCommunicator, get_unique_id
    nccl.groupStart, nccl.groupEnd, nccl.get_version = group_start, group_end, lambda: 22900


def install_group(torch_nccl: Any) -> None:
    """Puts groups over NCCL in the place of torch's, for burst_rt's own messages."""
    torch_nccl.make_group, torch_nccl.version = _Group, lambda: 22900
