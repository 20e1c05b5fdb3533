"""GPUs over NCCL, point to point: each exchange is one group of work on a stream.

A communicator is CuPy's (`CupyCommunicator`) or torch's own (`torch_nccl.py`). Only host work
happens here: the stream orders everything. NCCL's communicators start and end blocking and have no
deadline of their own, so threads start and end them, and the caller waits for the thread with a
deadline. A communicator that hangs is aborted (`cancel`), which also ends its kernels.

Two ranks connect in their first exchange, which blocks the host without a deadline too. Neighbours
in the ring do so while the ranks join (`first_pairs`). Others do so in the call that first needs
them, which is watched (`entered_s`): a connection takes device memory that a ring has no use for.
They do not connect in the background: there NCCL's work would come between that of the program's
own communicators, in another order on each rank, and ranks could wait for each other for ever.

CuPy's `nccl` module is an argument, so that tests can record the calls. Nothing here imports CuPy
or needs a GPU.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from burst_rt.errors import ConfigError, DeviceError, Stalled
from burst_rt.transport.base import Memory

__all__ = [
    "Communicator",
    "CupyCommunicator",
    "Nccl",
    "NcclTransport",
    "first_pairs",
    "unique_id_bytes",
]

# ncclUint8 of nccl.h: messages are bytes.
_UINT8 = 1
_CLOSE_DEADLINE_S = 5.0
# CuPy's NcclError is a RuntimeError. CuPy's table of results ends at 6; for a result of 7 or more
# CuPy raises KeyError while it makes the NcclError.
_ERRORS = (RuntimeError, KeyError)
_IN_PROGRESS = 7
_ROOM = "; the ranks were to connect, for which NCCL takes device memory that torch has not taken"


class Nccl(Protocol):
    """The part of `cupy.cuda.nccl` that is used."""

    def NcclCommunicator(self, size: int, unique_id: bytes, rank: int, /) -> Any:
        """Joins a communicator. Blocks until all ranks have joined, without a deadline."""

    def get_unique_id(self) -> bytes:
        """A new id; one rank makes it and gives it to all."""

    def groupStart(self) -> None:
        """Begins a group: its sends and receives progress together."""

    def groupEnd(self) -> None:
        """Ends a group and starts it."""


def unique_id_bytes(nccl: Nccl) -> bytes:
    """A fresh unique id, for the control group to hand on.

    Raises DeviceError with NCCL's message.
    """
    try:
        return nccl.get_unique_id()
    except _ERRORS as error:
        raise DeviceError(
            f"NCCL could not make an id for its communicator: {_said(error)}"
        ) from error


def first_pairs(rank: int, size: int) -> list[tuple[int, int]]:
    """The rounds in which neighbours connect: in each, the ranks to send to and to receive from.

    Every round fits on all ranks: the rank that this one sends to receives in the same round.
    """
    shifts = sorted({1, size - 1} - {0, size})
    return [((rank + shift) % size, (rank - shift) % size) for shift in shifts]


class Communicator(Protocol):
    """A communicator of NCCL's. A failing call raises one of `_ERRORS`, with NCCL's message."""

    def exchange(
        self, sends: Sequence[tuple[Memory, int]], recvs: Sequence[tuple[Memory, int]], stream: int
    ) -> None:
        """Starts messages as one group on the stream; see `OrderedTransport.exchange`."""

    def check(self) -> None:
        """Raises if what was started has failed since. Never blocks."""

    def abort(self) -> None:
        """Ends everything under way. May block."""

    def destroy(self) -> None:
        """Releases the communicator. May block."""


class CupyCommunicator:
    """CuPy's. Joining blocks until all ranks have joined, without a deadline."""

    def __init__(self, nccl: Nccl, unique_id: bytes, rank: int, size: int) -> None:
        self._nccl = nccl
        self._communicator = nccl.NcclCommunicator(size, unique_id, rank)

    def exchange(
        self, sends: Sequence[tuple[Memory, int]], recvs: Sequence[tuple[Memory, int]], stream: int
    ) -> None:
        """See `Communicator.exchange`."""
        self._nccl.groupStart()
        try:
            for buffer, peer in sends:
                self._communicator.send(buffer.data_ptr(), buffer.numel(), _UINT8, peer, stream)
            for buffer, peer in recvs:
                self._communicator.recv(buffer.data_ptr(), buffer.numel(), _UINT8, peer, stream)
        finally:
            # A group left open would swallow every later call.
            self._nccl.groupEnd()

    def check(self) -> None:
        """See `Communicator.check`."""
        try:
            self._communicator.check_async_error()
        except KeyError as error:
            if error.args != (_IN_PROGRESS,):
                raise

    def abort(self) -> None:
        """See `Communicator.abort`."""
        self._communicator.abort()

    def destroy(self) -> None:
        """See `Communicator.destroy`. NCCL waits for the work on the streams, and for the other
        ranks of this host.
        """
        self._communicator.destroy()


class NcclTransport:
    """See `OrderedTransport`. A context has one communicator for each device."""

    def __init__(
        self,
        make: Callable[[], Communicator],
        rank: int,
        size: int,
        timeout_s: float,
        enter_device: Callable[[], None],
        connect: Callable[[NcclTransport], None] = lambda _: None,
    ) -> None:
        """Joins the communicator and connects the neighbours in the ring. Collective.

        Blocks until all ranks have joined, at most `timeout_s`, then raises Stalled. Raises
        DeviceError with NCCL's message.

        make: joins the communicator; may block for ever. enter_device: makes this rank's device
        current in the calling thread. connect: exchanges something with the `first_pairs` and waits
        for the messages.
        """
        self.rank = rank
        self.size = size
        self.bytes_sent = 0
        self.bytes_received = 0
        self.entered_s: float | None = None
        # Held while a communicator is asked or taken away: a destroyed one must not be asked.
        self._ending = threading.Lock()
        self._enter_device = enter_device
        # Called before ranks connect in a call: frees device memory for NCCL.
        self.make_room: Callable[[], None] = lambda: None
        self._met: set[int] = set()  # the ranks that this one is connected with
        self._communicator: Communicator | None = None
        self._join(make, timeout_s, connect)
        self.bytes_sent = self.bytes_received = 0

    def exchange(
        self, sends: Sequence[tuple[Memory, int]], recvs: Sequence[tuple[Memory, int]], stream: int
    ) -> None:
        """See `OrderedTransport.exchange`.

        `Memory` is a contiguous torch uint8 tensor on this rank's device. Raises DeviceError with
        NCCL's message, ConfigError after `cancel` or `close`.
        """
        # The thread that watches may end the communicator at any time.
        communicator = self._communicator
        if communicator is None:
            raise ConfigError(
                f"rank {self.rank}: this NCCL communicator was aborted or closed; start the job "
                "again",
                rank=self.rank,
            )
        self.entered_s = time.perf_counter()
        connects = len(self._met) < self.size - 1 and not self._met.issuperset(
            peer for _, peer in (*sends, *recvs)
        )
        try:
            if connects:
                self.make_room()
            communicator.exchange(sends, recvs, stream)
            self.bytes_sent += sum(buffer.numel() for buffer, _ in sends)
            self.bytes_received += sum(buffer.numel() for buffer, _ in recvs)
        except _ERRORS as error:
            peers = sorted({peer for _, peer in (*sends, *recvs)})
            why = (
                f"rank {self.rank}: NCCL could not start messages with ranks {peers}: "
                f"{_said(error)}{_ROOM if connects else ''}"
            )
            raise DeviceError(why, rank=self.rank) from error
        finally:
            self.entered_s = None
        if connects:
            self._met.update(peer for _, peer in (*sends, *recvs))

    def check(self) -> None:
        """See `OrderedTransport.check`."""
        with self._ending:
            if self._communicator is None:
                return
            try:
                self._communicator.check()
            except _ERRORS as error:
                why = f"rank {self.rank}: NCCL failed while moving data: {_said(error)}"
                raise DeviceError(why, rank=self.rank) from error

    def cancel(self) -> None:
        """See `OrderedTransport.cancel`. Blocks at most 5 s."""
        self._end("abort")

    def close(self) -> None:
        """See `OrderedTransport.close`. Blocks at most 5 s."""
        self._end("destroy")

    def _end(self, how: str) -> None:
        with self._ending:
            communicator, self._communicator = self._communicator, None
        if communicator is None:
            return

        def end() -> None:
            # NCCL makes the thread's former device current again. In a new thread that is the first
            # device, and NCCL would take memory there.
            with suppress(RuntimeError):
                self._enter_device()
            getattr(communicator, how)()

        thread = threading.Thread(target=end, name=f"burst_rt nccl {how} {self.rank}", daemon=True)
        thread.start()
        thread.join(_CLOSE_DEADLINE_S)

    def _join(
        self,
        make: Callable[[], Communicator],
        timeout_s: float,
        connect: Callable[[NcclTransport], None],
    ) -> None:
        failed: list[BaseException] = []
        given_up = False

        def join() -> None:
            try:
                self._enter_device()
                communicator = make()
                if given_up:  # the caller has stopped waiting and does not know of it
                    communicator.abort()
                    return
                self._communicator = communicator
                connect(self)
            except Exception as error:  # noqa: BLE001  (whatever CuPy raises: it is handed to the caller below)
                failed.append(error)

        # The thread is a daemon: before there is a communicator, NCCL cannot be told to give up.
        thread = threading.Thread(target=join, name=f"burst_rt nccl rank {self.rank}", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if not thread.is_alive() and not failed:
            return
        given_up = True
        joined = self._communicator is not None
        self.cancel()
        if failed:
            what = "connect with the other ranks" if joined else "make a communicator"
            why = f"rank {self.rank}: NCCL could not {what}: {_said(failed[0])}"
            raise DeviceError(why, rank=self.rank) from failed[0]
        what = (
            "the ranks to connect with each other"
            if joined
            else f"all {self.size} ranks to join its communicator"
        )
        raise Stalled(
            f"rank {self.rank}: NCCL waited {timeout_s:g} s for {what}. "
            "Set NCCL_DEBUG=INFO to see more; check that the ranks reach each other "
            "(NCCL_SOCKET_IFNAME)",
            rank=self.rank, elapsed_s=timeout_s,
        )  # fmt: skip


def _said(error: BaseException) -> str:
    """The message of an error of CuPy's."""
    return f"result {error} of nccl.h" if isinstance(error, KeyError) else str(error)
