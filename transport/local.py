"""Ranks as threads of one process: for tests, notebooks and trying things out.

This is also the simplest statement of what a transport does. `LocalWorld(n)` is shared by n
threads; `world.transport(r)` and `world.control(r)` are rank r's ends. A message moves when both
sides have started it (rendezvous); the thread that came second copies the bytes.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from burst_rt.errors import InputError, ProtocolError
from burst_rt.transport.base import Completion, Memory, Notice, NoticeKind

__all__ = ["LocalControl", "LocalTransport", "LocalWorld"]

_T = TypeVar("_T")
# Ranks are threads: more would be a mistake.
_MOST_RANKS = 4096

_streams = threading.local()


class LocalWorld:
    """The state that the threads share. No method waits for another rank.

    One lock guards all of it. A thread holds the lock for look-ups only, never while it copies
    bytes.
    """

    def __init__(self, size: int, origin: object = None) -> None:
        if not 1 <= size <= _MOST_RANKS:
            raise InputError(f"LocalWorld: size must be 1 to {_MOST_RANKS} ranks, got {size}")
        self.size = size
        self.origin = id(self) if origin is None else origin  # the same for all duplicates
        self._lock = threading.Lock()
        self._sends: dict[tuple[int, int, int], deque[tuple[LocalTransport, int, Memory]]] = (
            defaultdict(deque)
        )
        self._recvs: dict[tuple[int, int, int], deque[tuple[LocalTransport, int, Memory]]] = (
            defaultdict(deque)
        )
        self._rounds: dict[int, dict[int, Any]] = {}
        self._readers_left: dict[int, int] = {}
        self._notices: list[deque[Notice]] = [deque() for _ in range(size)]
        # Duplicates by number: the worlds that some ranks have taken and others have not yet, with
        # the ranks that have. The second field is the number of each rank's next duplicate.
        self._duplicates: dict[int, tuple[LocalWorld, set[int]]] = {}
        self._next_duplicate = [0] * size

    def duplicate(self, rank: int) -> LocalWorld:
        """A world of the same ranks whose messages never meet messages of this world.

        Every rank's nth request gives the same world.
        """
        with self._lock:
            number = self._next_duplicate[rank]
            self._next_duplicate[rank] += 1
            world, takers = self._duplicates.setdefault(
                number, (LocalWorld(self.size, self.origin), set())
            )
            takers.add(rank)
            if len(takers) == self.size:
                del self._duplicates[number]
            return world

    def transport(self, rank: int) -> LocalTransport:
        """Rank's end of the data transport."""
        return LocalTransport(self, rank)

    def control(self, rank: int) -> LocalControl:
        """Rank's end of the control group."""
        return LocalControl(self, rank)

    def post(
        self, outgoing: bool, key: tuple[int, int, int], entry: tuple[LocalTransport, int, Memory]
    ) -> None:
        """Posts one side of a message, and moves the message if the other side is there.

        `key` is (source, destination, tag).
        """
        mine, theirs = (self._sends, self._recvs) if outgoing else (self._recvs, self._sends)
        with self._lock:
            if not theirs[key]:
                mine[key].append(entry)
                return
            other = theirs[key].popleft()
        send, recv = (entry, other) if outgoing else (other, entry)
        if len(send[2]) == len(recv[2]):
            _copy(send[2], recv[2])
        for end in (send, recv):
            end[0].landed(end[1], len(send[2]))

    def join(self, number: int, rank: int, payload: object) -> None:
        """Puts a rank's payload into collective round `number`."""
        with self._lock:
            self._rounds.setdefault(number, {})[rank] = payload
            self._readers_left.setdefault(number, self.size)

    def is_full(self, number: int) -> bool:
        """Whether all ranks have joined the round."""
        with self._lock:
            return len(self._rounds[number]) == self.size

    def leave(self, number: int) -> list[Any]:
        """All payloads of a full round, in rank order. The last reader removes the round."""
        with self._lock:
            payloads = [self._rounds[number][r] for r in range(self.size)]
            self._readers_left[number] -= 1
            if not self._readers_left[number]:
                del self._rounds[number], self._readers_left[number]
            return payloads

    def write(self, to: int, notice: Notice) -> None:
        """Delivers a notice."""
        self._notices[to].append(notice)

    def read(self, rank: int) -> list[Notice]:
        """Takes a rank's notices."""
        box = self._notices[rank]
        return [box.popleft() for _ in range(len(box))]

    def withdraw(self, transport: LocalTransport) -> None:
        """Takes back everything that a transport has posted and no peer has matched."""
        with self._lock:
            for table in (self._sends, self._recvs):
                for key, box in table.items():
                    table[key] = deque(entry for entry in box if entry[0] is not transport)


def _copy(source: Memory, target: Memory) -> None:
    """Copies bytes. Blocks until they have arrived."""
    if isinstance(target, memoryview):
        target[:] = source
        return
    import torch  # only ranks on a device get here, and they have it

    # Both sides say that their memory is ready, and expect the other side's memory to be ready when
    # the message has landed. Each thread copies on its own stream. torch hands out its streams from
    # a small pool, from which the ranks' compute streams come too; a stream of another priority
    # cannot be one of theirs.
    streams = _streams.__dict__
    stream = streams.get(str(target.device))
    if stream is None:
        stream = streams[str(target.device)] = torch.cuda.Stream(target.device, priority=-1)
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
    stream.synchronize()


class LocalTransport:
    """See `Transport`. Thread-safe towards its peers."""

    def __init__(self, world: LocalWorld, rank: int) -> None:
        self.rank = rank
        self.size = world.size
        self.bytes_sent = 0
        self.bytes_received = 0
        self.max_tag = None
        self._world = world
        self._next_handle = 0
        self._expected: dict[int, tuple[int, int, bool]] = {}
        self._landed: deque[tuple[int, int]] = deque()

    def isend(self, buffer: Memory, peer: int, tag: int) -> int:
        """See `Transport.isend`."""
        return self._start(True, buffer, peer, tag)

    def irecv(self, buffer: Memory, peer: int, tag: int) -> int:
        """See `Transport.irecv`."""
        return self._start(False, buffer, peer, tag)

    def poll(self) -> list[Completion]:
        """See `Transport.poll`."""
        done = []
        while self._landed:
            handle, size = self._landed.popleft()
            if handle not in self._expected:
                continue  # cancelled
            peer, expected, outgoing = self._expected.pop(handle)
            if size != expected and not outgoing:
                raise ProtocolError(
                    f"rank {self.rank}: expected {expected} bytes from rank {peer}, got {size}",
                    rank=self.rank,
                    peer=peer,
                )
            if outgoing:
                self.bytes_sent += size
            else:
                self.bytes_received += size
            done.append(Completion(handle))
        return done

    def cancel(self) -> None:
        """See `Transport.cancel`."""
        self._world.withdraw(self)
        self._expected.clear()

    def close(self) -> None:
        """See `Transport.close`."""
        self.cancel()

    def landed(self, handle: int, size_bytes: int) -> None:
        """Notes that a message of this transport has moved; called by the thread that moved it."""
        self._landed.append((handle, size_bytes))

    def _start(self, outgoing: bool, buffer: Memory, peer: int, tag: int) -> int:
        handle = self._next_handle
        self._next_handle += 1
        self._expected[handle] = (peer, len(buffer), outgoing)
        key = (self.rank, peer, tag) if outgoing else (peer, self.rank, tag)
        self._world.post(outgoing, key, (self, handle, buffer))
        return handle


class _Round(Generic[_T]):
    """A collective under way in a LocalWorld."""

    def __init__(self, world: LocalWorld, number: int, finish: Callable[[list[Any]], _T]) -> None:
        self._world = world
        self._number = number
        self._finish = finish
        self._result: list[_T] = []

    def test(self) -> bool:
        if not self._result and self._world.is_full(self._number):
            self._result.append(self._finish(self._world.leave(self._number)))
        return bool(self._result)

    def result(self) -> _T:
        return self._result[0]


class LocalControl:
    """See `ControlGroup`."""

    def __init__(self, world: LocalWorld, rank: int) -> None:
        self.rank = rank
        self.size = world.size
        self.places: Sequence[object] = [(world.origin, rank) for rank in range(world.size)]
        self._world = world
        self._num_rounds = 0

    def allreduce_max(self, values: Sequence[int]) -> _Round[list[int]]:
        """See `ControlGroup.allreduce_max`."""
        return self._join(
            list(values), lambda rows: [max(column) for column in zip(*rows, strict=True)]
        )

    def allreduce_sum(self, array: npt.NDArray[Any]) -> _Round[None]:
        """See `ControlGroup.allreduce_sum`."""

        def finish(arrays: list[npt.NDArray[Any]]) -> None:
            array[...] = arrays[0]
            for other in arrays[1:]:
                np.add(array, other, out=array)

        return self._join(array.copy(), finish)

    def allgather(self, payload: bytes) -> _Round[list[bytes]]:
        """See `ControlGroup.allgather`."""
        return self._join(payload, lambda payloads: payloads)

    def notify(self, peer: int, kind: NoticeKind, value: int = 0, text: str = "") -> None:
        """See `ControlGroup.notify`."""
        self._world.write(peer, Notice(self.rank, kind, value, text))

    def notices(self) -> list[Notice]:
        """See `ControlGroup.notices`."""
        return self._world.read(self.rank)

    def close(self) -> None:
        """See `ControlGroup.close`."""

    def _join(self, payload: object, finish: Callable[[list[Any]], _T]) -> _Round[_T]:
        number = self._num_rounds
        self._num_rounds += 1
        self._world.join(number, self.rank, payload)
        return _Round(self._world, number, finish)
