"""What a transport and a control group must do. Nothing here moves a byte.

A transport carries the messages of task graphs: raw bytes, non-blocking, counted. A control group
carries the few small things ranks must agree on (call contracts, errors, farewells); it has a
communicator of its own, so it can never be confused with data.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy.typing as npt

__all__ = [
    "TRANSPORTS",
    "Completed",
    "ControlGroup",
    "Memory",
    "Notice",
    "NoticeKind",
    "OrderedTransport",
    "Pending",
    "PendingBytes",
    "PendingInts",
    "Transport",
]


# The bytes of one message: a contiguous memoryview of host memory, or a contiguous torch uint8
# tensor of a device (any, so that this package needs no torch).
Memory: TypeAlias = Any

# What a user may ask for by name.
TRANSPORTS = ("auto", "local", "mpi", "nccl", "staged")


class Completed(NamedTuple):
    """A finished send or receive, by the handle its start returned."""

    handle: int


class Transport(Protocol):
    """Moves messages between the ranks of one context. One thread uses it at a time; no method
    blocks.

    Buffers are contiguous bytes that stay alive and untouched until their handle completes:
    memoryviews, or device tensors where the transport takes device memory (see
    `runtime/machine.py`). Messages with the same peer and tag match in the order they are started.
    """

    rank: int
    size: int
    bytes_sent: int
    bytes_received: int

    def isend(self, buffer: Memory, peer: int, tag: int) -> int:
        """Starts sending all of `buffer` and returns a handle."""

    def irecv(self, buffer: Memory, peer: int, tag: int) -> int:
        """Starts receiving exactly `len(buffer)` bytes and returns a handle."""

    def poll(self) -> list[Completed]:
        """Makes progress and returns what has completed since the last poll. A message of the wrong
        size raises ProtocolError.
        """

    def cancel(self) -> None:
        """Gives up on everything under way. Memory of messages under way may still be touched: the
        caller keeps it.
        """

    def close(self) -> None:
        """Releases the transport; nothing may be under way."""


class OrderedTransport(Protocol):
    """Moves messages between the ranks of one context on a stream of the device, which orders them:
    the host only starts them.

    Messages with the same peer match in the order they are started; tags do not exist. One thread
    starts messages; a second may watch: `entered_s`, `check` and `cancel` are for any thread.
    entered_s: since when (`time.perf_counter`) a thread is in `exchange`, or None.
    """

    rank: int
    size: int
    bytes_sent: int
    bytes_received: int
    entered_s: float | None

    def exchange(
        self, sends: Sequence[tuple[Memory, int]], recvs: Sequence[tuple[Memory, int]], stream: int
    ) -> None:
        """Starts messages (device bytes, peer) that progress together, as one group on the
        stream. Does not wait for them; but two ranks may have to connect first, which has no
        deadline."""

    def check(self) -> None:
        """Raises DeviceError if what was started has failed since. Never blocks."""

    def cancel(self) -> None:
        """Aborts everything under way; the transport cannot be used any more. What was to be
        received is not."""

    def close(self) -> None:
        """Releases the transport; nothing may be under way."""


class NoticeKind(IntEnum):
    """Why a rank writes to another outside any collective."""

    ALIVE = 1  # I am inside a call and still computing: the id of my task
    LEFT = 2  # I have closed my context and will enter no further call: my exit code, and my error
    ENTERED = 3  # I wait for you to enter a call: its number
    REFUSES = (
        4  # I cannot make my next call; do you wait for it in this context? Number of the question
    )
    # neither can I: number of your question; "here" where I was about to make mine in this context
    REFUSES_TOO = 5


class Notice(NamedTuple):
    """A small unsolicited word from `peer`. `NoticeKind` says what `value` and `text` are."""

    peer: int
    kind: NoticeKind
    value: int
    text: str = ""


class Pending(Protocol):
    """A collective under way."""

    def test(self) -> bool:
        """Makes progress; True once the result can be read. Never blocks."""


class PendingInts(Pending, Protocol):
    """A reduction under way."""

    def result(self) -> list[int]:
        """The reduced values; only after `test` was True."""


class PendingBytes(Pending, Protocol):
    """A gather under way."""

    def result(self) -> list[bytes]:
        """Every rank's bytes, in rank order; only after `test` was True."""


class ControlGroup(Protocol):
    """Small collectives and notices between the ranks of one context. No method blocks.

    All ranks start the same collectives in the same order, one at a time: a gather may be two of
    the library's, between which no other may come.
    """

    rank: int
    size: int
    # of each rank: which process or thread it is, the same in all groups of a job
    places: Sequence[object]

    def allreduce_max(self, values: Sequence[int]) -> PendingInts:
        """Elementwise maximum of 64-bit integers over the ranks."""

    def allreduce_sum(self, array: npt.NDArray[Any]) -> Pending:
        """Elementwise sum over the ranks, in place, in the array's own type (float32, float64 or
        int64: not every MPI adds bfloat16 correctly); the same bits on every rank and in every run.
        """

    def allgather(self, payload: bytes) -> PendingBytes:
        """Every rank's bytes (any lengths) on every rank."""

    def notify(self, peer: int, kind: NoticeKind, value: int = 0, text: str = "") -> None:
        """Writes to a peer that may read it at any later time, or never. Of a long text the
        beginning arrives.
        """

    def notices(self) -> list[Notice]:
        """What peers have written since the last call."""

    def close(self) -> None:
        """Releases the group."""
