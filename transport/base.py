"""The `Transport` and `ControlGroup` protocols, and notices; nothing here moves a byte.

A transport carries the messages of task graphs: raw bytes, non-blocking, counted. A control group
carries the few small things on which ranks must agree (call contracts, errors, farewells); it has
its own communicator, so it can never be confused with data.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy.typing as npt

__all__ = [
    "KINDS",
    "TRANSPORTS",
    "UNKNOWN_CODE",
    "Completion",
    "ControlGroup",
    "Meeting",
    "Memory",
    "Notice",
    "NoticeKind",
    "OrderedTransport",
    "Pending",
    "PendingBytes",
    "PendingInts",
    "Transport",
    "TransportKind",
    "Wire",
]


# The bytes of one message: a contiguous memoryview of host memory, or a contiguous torch uint8
# tensor on a device. The type is Any because this package needs no torch.
Memory: TypeAlias = Any

# How the ranks of a group meet: as threads of one process, as processes of an MPI job, or through
# the store of a torch.distributed group. Where they meet they also have a transport of host memory.
Meeting: TypeAlias = Literal["threads", "mpi", "store"]
# What carries messages: the transport of host memory, which some MPIs let take device memory; NCCL
# of CuPy; or NCCL of torch.
Wire: TypeAlias = Literal["host", "nccl", "torch-nccl"]


class TransportKind(NamedTuple):
    """A transport that a user may ask for by name, on three axes."""

    meeting: Meeting | None = None  # how its ranks have met; None: in any way
    wire: Wire = "host"  # what carries messages between GPUs; between CPUs the host does
    staged: bool = False  # whether graphs are lowered: copies, and messages of host chunks


KINDS: dict[str, TransportKind] = {
    "local": TransportKind(meeting="threads"),
    "mpi": TransportKind(meeting="mpi"),
    "nccl": TransportKind(wire="nccl"),
    "staged": TransportKind(staged=True),
    "torch": TransportKind(meeting="store", wire="torch-nccl"),
}
# The names that a user may ask for.
TRANSPORTS = ("auto", *KINDS)


class Completion(NamedTuple):
    """A send or receive that has finished."""

    handle: int  # handle that `isend` or `irecv` returned


class Transport(Protocol):
    """Moves messages between the ranks of one context. No method blocks.

    One thread uses a transport at a time. Buffers are contiguous bytes: memoryviews, or device
    tensors where the transport takes device memory (see `runtime/machine.py`). A buffer stays alive
    and untouched until its handle completes. Messages with the same peer and tag match in the order
    they are started.
    """

    rank: int
    size: int
    bytes_sent: int
    bytes_received: int

    @property
    def max_tag(self) -> int | None:
        """The largest tag of a message; None: any."""

    def isend(self, buffer: Memory, peer: int, tag: int) -> int:
        """Starts sending all of `buffer` and returns a handle."""

    def irecv(self, buffer: Memory, peer: int, tag: int) -> int:
        """Starts receiving exactly `len(buffer)` bytes and returns a handle."""

    def poll(self) -> list[Completion]:
        """Makes progress and returns what has completed since the last poll.

        Raises ProtocolError for a received message of the wrong size.
        """

    def cancel(self) -> None:
        """Gives up on everything under way.

        The memory of messages under way may still be read or written: the caller keeps it.
        """

    def close(self) -> None:
        """Releases the transport; nothing may be under way."""


class OrderedTransport(Protocol):
    """Moves messages between the ranks of one context on a stream of the device.

    The stream orders the messages; the host only starts them. Messages with the same peer match in
    the order they are started; there are no tags. One thread starts messages. A second thread may
    watch: any thread may read `entered_s` and call `check` and `cancel`.
    """

    rank: int
    size: int
    bytes_sent: int
    bytes_received: int
    # since when (`time.perf_counter`) a thread is in `exchange`; None: no thread is
    entered_s: float | None

    def exchange(
        self, sends: Sequence[tuple[Memory, int]], recvs: Sequence[tuple[Memory, int]], stream: int
    ) -> None:
        """Starts messages (device bytes, peer) that progress together, as one group on the stream.

        Does not wait for the messages. But two ranks that exchange for the first time may have to
        connect, which blocks until the other rank comes and has no deadline.
        """

    def check(self) -> None:
        """Raises DeviceError if what was started has failed since. Never blocks."""

    def cancel(self) -> None:
        """Aborts everything under way; the transport cannot be used any more. May block for
        seconds.

        The expected bytes have not been received.
        """

    def close(self) -> None:
        """Releases the transport; nothing may be under way. May block for seconds."""


# Takes the place of an exit code, which is 0 to 255, if nobody knows it.
UNKNOWN_CODE = -1


class NoticeKind(IntEnum):
    """Why a rank writes to another outside any collective.

    Each kind says what `Notice.value` and `Notice.text` are.
    """

    # "I am inside a call and still computing." value: the id of the task.
    ALIVE = 1
    # "I have failed and will enter no further call." value: exit code, or UNKNOWN_CODE where the
    # transport saw the end of a rank that said nothing; text: error.
    LEFT = 2
    # "I wait for you to enter a call." value: the number of the call.
    ENTERED = 3
    # "I cannot make my next call. Do you wait for it in this context?" value: the question's
    # number.
    REFUSES = 4
    # "I cannot make mine either." value: the number of the peer's question; text: "here" if this
    # context is where the call was to be made.
    REFUSES_TOO = 5
    # "I have closed my context and will enter no further call." value: the number of the last call
    # that I have made.
    ENDED = 6


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
        """The reduced values. May be read only after `test` was True."""


class PendingBytes(Pending, Protocol):
    """A gather under way."""

    def result(self) -> list[bytes]:
        """Every rank's bytes, in rank order. May be read only after `test` was True."""


class ControlGroup(Protocol):
    """Small collectives and notices between the ranks of one context. No method blocks.

    All ranks start the same collectives in the same order, one at a time: a gather may consist of
    two collectives of the library, and no other collective may come between them.
    """

    rank: int
    size: int
    # The process or thread of each rank. A place is the same in all groups of a job.
    places: Sequence[object]

    def allreduce_max(self, values: Sequence[int]) -> PendingInts:
        """Elementwise maximum of 64-bit integers over the ranks."""

    def allreduce_sum(self, array: npt.NDArray[Any]) -> Pending:
        """Elementwise sum over the ranks of a contiguous array, in place and in its own type.

        The type is float32, float64 or int64: not every MPI adds bfloat16 correctly. The sum has
        the same bits on every rank and in every run.
        """

    def allgather(self, payload: bytes) -> PendingBytes:
        """Every rank's bytes (any lengths) on every rank."""

    def notify(self, peer: int, kind: NoticeKind, value: int = 0, text: str = "") -> None:
        """Writes to a peer, which may read the notice at any later time, or never.

        A long text is cut: its beginning arrives.
        """

    def notices(self) -> list[Notice]:
        """The notices that peers have written since the last call."""

    def close(self) -> None:
        """Releases the group."""
