"""Ranks as processes of a `torch.distributed` group: messages over stream sockets.

A message starts once its receive is posted: the receiver says so to the sender (READY), who sends
the bytes (DATA) straight from memory to memory. Thus no message waits for another one's receive,
and nothing is kept for future receives.

Data, collectives and notices each have connections of their own.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Sequence
from enum import IntEnum
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from burst_rt.errors import ProtocolError
from burst_rt.transport.base import UNKNOWN_CODE, Completion, Memory, Notice, NoticeKind
from burst_rt.transport.links import Links

__all__ = ["SocketControl", "SocketTransport"]

_T = TypeVar("_T")

_INT = np.dtype("<i8")
# Seconds to wait for the farewell of a rank that has never written a notice: it comes on a new
# connection, maybe later than the end of its other connections.
_LAST_WORDS_S = 1.0
# Kinds of notices after which a rank may stop looking at its links, and seconds for which it waits
# until the kernel has such a notice.
_LAST_NOTICES = (NoticeKind.LEFT, NoticeKind.ENDED, NoticeKind.REFUSES_TOO)
_NOTICE_S = 0.05
# Seconds that a rank that leaves may take to write its farewells.
_FAREWELL_S = 1.0
# Maximum size of a notice's text in bytes, as with MPI.
_TEXT_BYTES = 480


class _Kind(IntEnum):
    """Frames of the data transport. Their number is the message's tag."""

    READY = 1  # "I have posted a receive"; payload: its size in bytes
    DATA = 2  # payload: the message
    MISFIT = 3  # "my message has another size"; payload: its size


class SocketTransport:
    """See `Transport`. Takes any tag."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.bytes_sent = 0
        self.bytes_received = 0
        self.max_tag = None
        self._next_handle = 0
        # Keyed by peer and tag, in the order of posting.
        self._sends: dict[tuple[int, int], deque[tuple[int, Memory]]] = defaultdict(deque)
        self._recvs: dict[tuple[int, int], deque[tuple[int, Memory]]] = defaultdict(deque)
        self._ready: dict[tuple[int, int], deque[int]] = defaultdict(deque)  # sizes
        self._done: list[Completion] = []
        self._links: Links

    def open(self, links: Links) -> None:
        """Gives the transport its links, whose receiver it is. To be called once, at first."""
        self._links = links

    def isend(self, buffer: Memory, peer: int, tag: int) -> int:
        """See `Transport.isend`."""
        handle = self._new_handle()
        self._sends[peer, tag].append((handle, buffer))
        self._match(peer, tag)
        return handle

    def irecv(self, buffer: Memory, peer: int, tag: int) -> int:
        """See `Transport.irecv`."""
        handle = self._new_handle()
        self._recvs[peer, tag].append((handle, buffer))
        self._links.send(peer, _Kind.READY, tag, _ints([len(buffer)]))
        return handle

    def poll(self) -> list[Completion]:
        """See `Transport.poll`."""
        self._links.poll()
        done, self._done = self._done, []
        return done

    def cancel(self) -> None:
        """See `Transport.cancel`. Ends the connections: the transport cannot be used any more."""
        self._links.close()

    def close(self) -> None:
        """See `Transport.close`."""
        self._links.close()

    def room(self, peer: int, kind: int, number: int, size: int) -> memoryview:
        """See `Receiver.room`."""
        if kind != _Kind.DATA:
            return memoryview(bytearray(size))
        _, buffer = self._recvs[peer, number][0]
        return memoryview(buffer)

    def arrived(self, peer: int, kind: int, number: int, memory: memoryview) -> None:
        """See `Receiver.arrived`."""
        if kind == _Kind.READY:
            self._ready[peer, number].append(int(np.frombuffer(memory, _INT)[0]))
            self._match(peer, number)
            return
        handle, buffer = _take(self._recvs, (peer, number))
        if kind == _Kind.MISFIT:
            got = int(np.frombuffer(memory, _INT)[0])
            raise ProtocolError(
                f"rank {self.rank}: expected {len(buffer)} bytes from rank {peer}, got {got}",
                rank=self.rank,
                peer=peer,
            )
        self.bytes_received += len(buffer)
        self._done.append(Completion(handle))

    def _new_handle(self) -> int:
        self._next_handle += 1
        return self._next_handle

    def _match(self, peer: int, tag: int) -> None:
        """Starts the messages whose receives are posted."""
        key = peer, tag
        while key in self._sends and key in self._ready:
            (handle, buffer), size = _take(self._sends, key), _take(self._ready, key)
            if size == len(buffer):
                sent = partial(self._sent, handle, size)
                self._links.send(peer, _Kind.DATA, tag, memoryview(buffer), sent)
            else:
                sent = partial(self._sent, handle, 0)
                self._links.send(peer, _Kind.MISFIT, tag, _ints([len(buffer)]), sent)

    def _sent(self, handle: int, size: int) -> None:
        self.bytes_sent += size
        self._done.append(Completion(handle))


class _Frames:
    """Takes frames of any size."""

    def room(self, peer: int, kind: int, number: int, size: int) -> memoryview:
        return memoryview(bytearray(size))


class _Inbox(_Frames):
    """Keeps frames until they are asked for."""

    def __init__(self) -> None:
        self.frames: dict[tuple[int, int, int], memoryview] = {}  # keyed by peer, kind and number

    def arrived(self, peer: int, kind: int, number: int, memory: memoryview) -> None:
        self.frames[peer, kind, number] = memory


class _Notices(_Frames):
    """Keeps notices in the order of arrival."""

    def __init__(self) -> None:
        self.notices: list[Notice] = []
        self.left: set[int] = set()

    def arrived(self, peer: int, kind: int, number: int, memory: memoryview) -> None:
        text = bytes(memory).decode(errors="replace")
        self.notices.append(Notice(peer, NoticeKind(kind), number, text))
        if kind in (NoticeKind.LEFT, NoticeKind.ENDED):
            self.left.add(peer)


class _Where(NamedTuple):
    """Where a collective takes place."""

    links: Links
    inbox: _Inbox
    rank: int
    size: int
    number: int  # the collective's number in its group


class _Collective:
    """A collective in progress, in rounds. A rank's frames of round k are of kind k."""

    def __init__(self, where: _Where) -> None:
        self._links, self._inbox, self._rank, self._size, self._number = where
        self._round = 0
        self._awaited: set[int] = set()  # peers whose frame of this round is to come
        self._ended = False
        self._go_on()

    def test(self) -> bool:
        # A rank that has heard everything stays until the others can hear all that it said.
        if not self._ended or self._links.unsent:
            self._links.poll()
            self._go_on()
        return self._ended and not self._links.unsent

    def _go_on(self) -> None:
        """Takes the frames that have arrived, and begins each next round whose frames are
        complete.
        """
        while not self._ended:
            for peer in list(self._awaited):
                frame = self._inbox.frames.pop((peer, self._round - 1, self._number), None)
                if frame is None:
                    return
                self._awaited.remove(peer)
                self._take(peer, frame)
            awaited = self._begin(self._round)
            self._ended = awaited is None
            self._awaited = set(awaited or ())
            self._round += 1

    def _send(self, peer: int, payload: memoryview | bytes) -> None:
        self._links.send(peer, self._round, self._number, payload)

    def _begin(self, number: int) -> list[int] | None:
        """Sends what this rank says in a round. The peers that it hears in this round; None after
        the last round.
        """
        raise NotImplementedError

    def _take(self, peer: int, frame: memoryview) -> None:
        """Takes a peer's frame of this round."""
        raise NotImplementedError


class _Spreading(_Collective):
    """In round k each rank hears the rank 2^k before it, and so after log2(size) rounds all ranks.

    (Dissemination, as in Hensgen, Finkel and Manber, 1988.)
    """

    def _begin(self, number: int) -> list[int] | None:
        steps = _steps(self._size)
        if number == len(steps):
            return None
        step = steps[number]
        self._send((self._rank + step) % self._size, self._said(step))
        return [(self._rank - step) % self._size]

    def _said(self, step: int) -> memoryview | bytes:
        raise NotImplementedError


class _Maximum(_Spreading):
    """Elementwise maximum. That a rank may be heard twice makes no difference to a maximum."""

    def __init__(self, values: Sequence[int], where: _Where) -> None:
        self._values = np.array(values, _INT)
        super().__init__(where)

    def _said(self, step: int) -> memoryview | bytes:
        return self._values.tobytes()

    def _take(self, peer: int, frame: memoryview) -> None:
        np.maximum(self._values, np.frombuffer(frame, _INT), out=self._values)

    def result(self) -> list[int]:
        return [int(x) for x in self._values]


class _Gather(_Spreading):
    """Gathers the byte strings of all ranks. Before round k a rank has the strings of the 2^k ranks
    up to itself.
    """

    def __init__(self, payload: bytes, where: _Where) -> None:
        self._parts = [payload]  # this rank's part, then that of the rank before it, and so on
        super().__init__(where)

    def _said(self, step: int) -> memoryview | bytes:
        parts = self._parts[: self._size - step]
        return b"".join((_ints([len(parts), *map(len, parts)]), *parts))

    def _take(self, peer: int, frame: memoryview) -> None:
        at = _INT.itemsize
        (count,) = np.frombuffer(frame[:at], _INT)
        lengths = np.frombuffer(frame[at : at * int(count + 1)], _INT)
        at *= int(count + 1)
        for length in lengths.tolist():
            self._parts.append(bytes(frame[at : at + length]))
            at += length

    def result(self) -> list[bytes]:
        return [self._parts[(self._rank - rank) % self._size] for rank in range(self._size)]


class _Sum(_Collective):
    """Elementwise sum. Each rank adds up one part of the array, in the order of ranks."""

    def __init__(self, array: npt.NDArray[Any], where: _Where) -> None:
        self._flat = array.reshape(-1)
        edges = [len(self._flat) * rank // where.size for rank in range(where.size + 1)]
        self._part_of = [slice(a, b) for a, b in pairwise(edges)]
        own = self._flat[self._part_of[where.rank]].copy()
        self._heard: dict[int, npt.NDArray[Any]] = {where.rank: own}
        super().__init__(where)

    def _begin(self, number: int) -> list[int] | None:
        others = [peer for peer in range(self._size) if peer != self._rank]
        result = self._part_of[self._rank]
        if number == 2:
            return None
        if number == 1:
            self._flat[result] = self._heard[0]
            for peer in range(1, self._size):
                self._flat[result] += self._heard[peer]
        for peer in others:
            part = result if number else self._part_of[peer]
            self._send(peer, self._flat[part].tobytes())
        return others

    def _take(self, peer: int, frame: memoryview) -> None:
        values = np.frombuffer(frame, self._flat.dtype)
        if self._round == 1:
            self._heard[peer] = values
        else:
            self._flat[self._part_of[peer]] = values


class SocketControl:
    """See `ControlGroup`. Use `open` first."""

    def __init__(self, rank: int, size: int, places: Sequence[object]) -> None:
        self.rank = rank
        self.size = size
        self.places = places
        self.collectives, self.notices_in = _Inbox(), _Notices()
        self._num_collectives = 0
        self._links: tuple[Links, Links]
        self._closed = False

    def open(self, collectives: Links, notices: Links) -> None:
        """Gives the group its links.

        The ends of the ranks 1, 2, 4 and so on away are noticed even where they never write a
        notice. Those ranks tell the others.
        """
        self._links = collectives, notices
        for step in _steps(self.size):
            notices.connect((self.rank + step) % self.size)

    def allreduce_max(self, values: Sequence[int]) -> _Maximum:
        """See `ControlGroup.allreduce_max`."""
        return _Maximum(values, self._next())

    def allreduce_sum(self, array: npt.NDArray[Any]) -> _Sum:
        """See `ControlGroup.allreduce_sum`."""
        return _Sum(array, self._next())

    def allgather(self, payload: bytes) -> _Gather:
        """See `ControlGroup.allgather`."""
        return _Gather(payload, self._next())

    def notify(self, peer: int, kind: NoticeKind, value: int = 0, text: str = "") -> None:
        """See `ControlGroup.notify`."""
        links = self._links[1]
        links.send(peer, kind, value, text.encode()[:_TEXT_BYTES])
        # Earlier notices may have found connections that were still opening.
        links.poll()
        if kind in _LAST_NOTICES and links.unsent:
            links.flush(_NOTICE_S)

    def notices(self) -> list[Notice]:
        """See `ControlGroup.notices`.

        A rank whose connection ended without a farewell was killed: for such a rank there is a
        LEFT.
        """
        if self._closed:
            return []
        self._links[1].poll()
        box = self.notices_in
        links = self._links[1]
        for peer, when in links.ended.items():
            if peer in box.left:
                continue
            late = time.perf_counter() - when > _LAST_WORDS_S
            if peer in links.read_out or (late and not links.hears(peer)):
                box.left.add(peer)
                text = "its connection ended without a word (was it killed?)"
                box.notices.append(Notice(peer, NoticeKind.LEFT, UNKNOWN_CODE, text))
        found, box.notices = box.notices, []
        return found

    def close(self) -> None:
        """See `ControlGroup.close`. Blocks at most 2 s while last words are written."""
        if self._closed:
            return
        self._closed = True
        for links in self._links:
            try:
                links.flush(_FAREWELL_S)
            finally:
                links.close()

    def _next(self) -> _Where:
        self._num_collectives += 1
        number = self._num_collectives
        return _Where(self._links[0], self.collectives, self.rank, self.size, number)


def _take(queues: dict[tuple[int, int], deque[_T]], key: tuple[int, int]) -> _T:
    """The first of a queue. An empty queue is not kept."""
    queue = queues[key]
    first = queue.popleft()
    if not queue:
        del queues[key]
    return first


def _steps(size: int) -> list[int]:
    """1, 2, 4 and so on, below `size`."""
    return [1 << k for k in range((size - 1).bit_length())]


def _ints(values: Sequence[int]) -> bytes:
    return np.array(values, _INT).tobytes()
