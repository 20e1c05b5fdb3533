"""Ranks as MPI processes and host memory: mpi4py, non-blocking requests.

Nothing here waits, except `duplicate`: every request is tested. Data and control each have a
communicator that was duplicated from the caller's, so that no message of this project can match a
message of the program's. Sizes are checked on arrival, because MPI accepts a message that is too
short without an error. Memory that MPI may still read or write is kept (`_in_use`), whoever lets go
of an object of this module, and whenever.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from burst_rt.errors import ConfigError, ProtocolError, Stalled
from burst_rt.job.clock import RunningClock
from burst_rt.transport.base import Completion, Memory, Notice, NoticeKind
from burst_rt.transport.start import who_is_missing

__all__ = ["MpiControl", "MpiTransport", "duplicate", "numbers_in_job"]

_NOTICE_TAG = 1
# A notice: kind, value, length of the text, text. 512 bytes are few enough for every MPI to send
# them at once (eagerly).
_NOTICE = struct.Struct("=qqq")
_NOTICE_BYTES = 512
# Maximum size of a piece. Counts are 32-bit before MPI 4 and in parts of Open MPI 5, so larger
# messages go in pieces, which match in order.
_PIECE_BYTES = 1 << 30
# Objects that hold memory MPI has been given and has not done with, by id. Without this table an
# error on the way would free the memory, and a late message would overwrite whatever lies there by
# then.
_in_use: dict[int, object] = {}


def duplicate(comm: MPI.Intracomm, timeout_s: float) -> MPI.Intracomm:
    """A communicator with the same ranks and a message space of its own. Collective.

    Blocks until all ranks have called it, at most `timeout_s`, then raises Stalled. Raises
    ConfigError if `comm` is not an intracommunicator.
    """
    if comm == MPI.COMM_NULL or comm.Is_inter():
        raise ConfigError(
            "init: comm must be an mpi4py intracommunicator, got COMM_NULL or an intercommunicator"
        )
    new, request = comm.Idup()
    _in_use[id(new)] = (new, request)
    clock = RunningClock()
    while not request.Test():
        if clock.read() > timeout_s:
            raise Stalled(
                f"rank {comm.rank} of {comm.size} waited {timeout_s:g} s in burst_rt.init for the "
                "other ranks of the job (join_s). "
                f"{who_is_missing()}",
                rank=comm.rank,
                elapsed_s=timeout_s,
            )
        time.sleep(0.0005)
    del _in_use[id(new)]
    return new


def numbers_in_job(comm: MPI.Intracomm) -> list[int]:
    """The numbers in MPI_COMM_WORLD of a communicator's ranks.

    The list is empty if `comm` is not an intracommunicator.
    """
    if comm == MPI.COMM_NULL or comm.Is_inter():
        return []
    group, everyone = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    try:
        return list(group.Translate_ranks(None, everyone))
    finally:
        group.Free()
        everyone.Free()


class MpiTransport:
    """See `Transport`. Owns `comm` (see `duplicate`)."""

    def __init__(self, comm: MPI.Intracomm, *, piece_bytes: int = _PIECE_BYTES) -> None:
        self.rank = comm.rank
        self.size = comm.size
        self.bytes_sent = 0
        self.bytes_received = 0
        self._comm = comm
        self._piece_bytes = piece_bytes
        tag_ub = comm.Get_attr(MPI.TAG_UB)
        self.max_tag = int(tag_ub) if tag_ub is not None else 32767
        self._next_handle = 0
        # Two parallel lists: the requests, and for each request its handle, its peer, its size in
        # bytes, and whether it sends. A request keeps its buffer alive.
        self._requests: list[MPI.Request] = []
        self._about: list[tuple[int, int, int, bool]] = []
        # MPI writes one of these for each request that has finished. There are as many as there
        # ever were requests at once.
        self._statuses: list[MPI.Status] = []
        self._num_left: dict[int, int] = {}
        _in_use[id(self)] = self

    def isend(self, buffer: Memory, peer: int, tag: int) -> int:
        """See `Transport.isend`."""
        return self._start(True, buffer, peer, tag)

    def irecv(self, buffer: Memory, peer: int, tag: int) -> int:
        """See `Transport.irecv`."""
        return self._start(False, buffer, peer, tag)

    def poll(self) -> list[Completion]:
        """See `Transport.poll`."""
        if not self._requests:
            return []
        try:
            finished = MPI.Request.Testsome(self._requests, self._statuses)
        except MPI.Exception as error:
            raise ProtocolError(
                f"rank {self.rank}: MPI failed while moving data: {error}", rank=self.rank
            ) from error
        if not finished:
            return []
        done = []
        for status, index in zip(self._statuses, finished, strict=False):
            handle, peer, expected, outgoing = self._about[index]
            if outgoing:
                self.bytes_sent += expected
            else:
                size = status.Get_count(MPI.BYTE)
                if size != expected:
                    raise ProtocolError(
                        f"rank {self.rank}: expected {expected} bytes from rank {peer}, got {size}",
                        rank=self.rank,
                        peer=peer,
                    )
                self.bytes_received += size
            self._num_left[handle] -= 1
            if not self._num_left[handle]:
                del self._num_left[handle]
                done.append(Completion(handle))
        gone = set(finished)
        self._requests = [r for i, r in enumerate(self._requests) if i not in gone]
        self._about = [a for i, a in enumerate(self._about) if i not in gone]
        return done

    def cancel(self) -> None:
        """See `Transport.cancel`.

        MPI cannot cancel a send: its request and memory are kept until the process ends.
        """
        if MPI.Is_finalized():  # the program may do so
            return
        for request, (_, _, _, outgoing) in zip(self._requests, self._about, strict=True):
            # After an error some requests are freed already.
            if request and not outgoing:
                request.Cancel()

    def close(self) -> None:
        """See `Transport.close`."""
        if not self._requests and self._comm and not MPI.Is_finalized():
            self._comm.Free()
            del _in_use[id(self)]

    def _start(self, outgoing: bool, buffer: Memory, peer: int, tag: int) -> int:
        if tag > self.max_tag:
            raise ConfigError(
                f"a plan uses message tag {tag}; this MPI allows tags up to {self.max_tag}; use "
                "an MPI with a larger MPI_TAG_UB"
            )
        handle = self._next_handle
        self._next_handle += 1
        start = self._comm.Isend if outgoing else self._comm.Irecv
        # An empty message is one empty piece, because its arrival counts too.
        size, most = len(buffer), self._piece_bytes
        pieces = (
            [buffer] if size <= most else [buffer[at : at + most] for at in range(0, size, most)]
        )
        for piece in pieces:
            self._requests.append(start((piece, MPI.BYTE), peer, tag))
            self._about.append((handle, peer, len(piece), outgoing))
        self._num_left[handle] = len(pieces)
        while len(self._statuses) < len(self._requests):
            self._statuses.append(MPI.Status())
        return handle


class _Rounds:
    """A collective under way, in as many rounds as its size takes, one round after the other.

    Every rank makes the same number of rounds.
    """

    def __init__(self) -> None:
        _in_use[id(self)] = self
        self._request = self._next()

    def test(self) -> bool:
        while self._request is not None and self._request.Test():
            self._request = self._next()
            if self._request is None:
                del _in_use[id(self)]
        return self._request is None

    def _next(self) -> MPI.Request | None:
        """Starts the next round; None after the last."""
        raise NotImplementedError


class _Reduction(_Rounds):
    """An allreduce of flat arrays. `send` is None where `recv` holds the values to be sent."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        send: npt.NDArray[Any] | None,
        recv: npt.NDArray[Any],
        op: MPI.Op,
        most_bytes: int,
    ) -> None:
        self._comm, self._send, self._recv, self._op = comm, send, recv, op
        self._at, self._most = 0, max(1, most_bytes // recv.itemsize)
        super().__init__()

    def _next(self) -> MPI.Request | None:
        if self._at and self._at >= len(self._recv):
            return None
        part = slice(self._at, self._at + self._most)
        self._at += self._most
        return self._comm.Iallreduce(
            MPI.IN_PLACE if self._send is None else self._send[part], self._recv[part], self._op
        )

    def result(self) -> list[int]:
        return [int(x) for x in self._recv]


class _Gather(_Rounds):
    """An allgather of byte strings: first the lengths, then the bytes."""

    def __init__(self, comm: MPI.Intracomm, payload: bytes, most_bytes: int) -> None:
        self._comm = comm
        self._payload = memoryview(payload)
        self._at, self._most = 0, max(1, most_bytes // comm.size)
        self._lengths = np.full(comm.size, -1, dtype=np.int64)
        self._parts = [bytearray() for _ in range(comm.size)]
        self._counts: list[int] = []
        self._landing = np.empty(0, dtype=np.uint8)
        super().__init__()

    def _next(self) -> MPI.Request | None:
        if self._lengths[0] < 0:
            return self._comm.Iallgather(
                np.array([len(self._payload)], dtype=np.int64), self._lengths
            )
        start = 0
        for part, count in zip(self._parts, self._counts, strict=False):
            part += self._landing[start : start + count].data
            start += count
        if self._at >= self._lengths.max():
            self._landing = np.empty(0, dtype=np.uint8)
            return None
        self._counts = [min(self._most, max(0, int(n) - self._at)) for n in self._lengths]
        self._landing = np.empty(sum(self._counts), dtype=np.uint8)
        piece = self._payload[self._at : self._at + self._most]
        self._at += self._most
        return self._comm.Iallgatherv([piece, MPI.BYTE], [self._landing, self._counts, MPI.BYTE])

    def result(self) -> list[bytes]:
        return [bytes(part) for part in self._parts]


class MpiControl:
    """See `ControlGroup`. Owns `comm` (see `duplicate`)."""

    def __init__(self, comm: MPI.Intracomm, *, piece_bytes: int = _PIECE_BYTES) -> None:
        self.rank = comm.rank
        self.size = comm.size
        self.places: Sequence[object] = numbers_in_job(comm)
        self._comm = comm
        self._piece_bytes = piece_bytes
        self._box = bytearray(_NOTICE_BYTES)
        self._inbox = comm.Recv_init([self._box, MPI.BYTE], MPI.ANY_SOURCE, _NOTICE_TAG)
        self._inbox.Start()
        self._outgoing: list[tuple[MPI.Request, bytes]] = []
        _in_use[id(self)] = self

    def allreduce_max(self, values: Sequence[int]) -> _Reduction:
        """See `ControlGroup.allreduce_max`."""
        send = np.array(values, dtype=np.int64)
        recv = np.empty_like(send)
        return _Reduction(self._comm, send, recv, MPI.MAX, self._piece_bytes)

    def allreduce_sum(self, array: npt.NDArray[Any]) -> _Reduction:
        """See `ControlGroup.allreduce_sum`."""
        return _Reduction(self._comm, None, array.reshape(-1), MPI.SUM, self._piece_bytes)

    def allgather(self, payload: bytes) -> _Gather:
        """See `ControlGroup.allgather`."""
        return _Gather(self._comm, payload, self._piece_bytes)

    def notify(self, peer: int, kind: NoticeKind, value: int = 0, text: str = "") -> None:
        """See `ControlGroup.notify`.

        A notice is small enough to leave at once (eagerly), so that a rank about to exit can still
        write one.
        """
        if MPI.Is_finalized():  # the program may do so: nobody can be told anything
            return
        self._outgoing = [(request, box) for request, box in self._outgoing if not request.Test()]
        written = text.encode()[: _NOTICE_BYTES - _NOTICE.size]
        box = _NOTICE.pack(int(kind), value, len(written)) + written
        self._outgoing.append((self._comm.Isend([box, MPI.BYTE], peer, _NOTICE_TAG), box))

    def notices(self) -> list[Notice]:
        """See `ControlGroup.notices`."""
        arrived = []
        status = MPI.Status()
        while self._inbox and self._inbox.Test(status):  # there is none once closed
            kind, value, length = _NOTICE.unpack_from(self._box)
            text = self._box[_NOTICE.size : _NOTICE.size + length].decode(errors="replace")
            arrived.append(Notice(status.Get_source(), NoticeKind(kind), value, text))
            self._inbox.Start()
        return arrived

    def close(self) -> None:
        """See `ControlGroup.close`.

        The communicator itself is left to MPI_Finalize: peers may still write farewells to it.
        """
        if not self._inbox or MPI.Is_finalized():
            return
        self._inbox.Cancel()
        self._inbox.Wait()
        self._inbox.Free()
        if all(request.Test() for request, _ in self._outgoing):
            del _in_use[id(self)]
