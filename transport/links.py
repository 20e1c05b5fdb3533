"""One-way stream sockets between the ranks of a group: within a host Unix sockets, else TCP.

Nothing here waits, except `Links.flush`. A rank opens a connection to a peer when it first sends to
the peer, and never reads from it. Thus a rank can end at any time: the bytes that it has sent
arrive, because no unread bytes make the kernel drop them. A connection that ends tells that its
peer has ended.

A connection begins with the group's secret and the sender's rank. After that come frames: kind,
number, length, and as many bytes as the length says.
"""

from __future__ import annotations

import errno
import os
import secrets
import select
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol

from burst_rt.errors import ProtocolError

__all__ = ["SECRET_BYTES", "Door", "Links", "Place", "Receiver", "this_host"]

SECRET_BYTES = 16
_HEADER = struct.Struct("<qqq")  # kind, number, length
_RANK = struct.Struct("<q")
# Size of a socket's send buffer. If the kernel allows so much, a transfer needs fewer calls of
# `poll`.
_BUFFER_BYTES = 4 << 20
_AHEAD_BYTES = 1 << 16
# Maximum size of a payload that is sent with its header in one piece: a copy costs less than a
# second piece.
_COPIED_BYTES = 4096
_BACKLOG = 4096
# Maximum number of connections that have not greeted yet. Beyond it the oldest one is closed:
# strangers do not greet.
_LEAST_UNGREETED = 256
_LATER = (BlockingIOError, InterruptedError)


class Place(NamedTuple):
    """Where a rank can be reached: the doors of its links, one for each use."""

    host: str  # see `this_host`
    unix: Sequence[str]  # names of abstract Unix sockets
    tcp: Sequence[tuple[str, int]]  # addresses and ports; empty where the group has one host


def this_host() -> str:
    """Names the network that this process sees as its own host: Unix sockets reach all of it.

    Two containers of one machine are two hosts unless they share their network.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot}:{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


class Door:
    """A listening socket of this rank. Closed with its `Links`."""

    def __init__(self, address: str | None = None) -> None:
        """address: listens on TCP at this address; None: on a Unix socket of a random name."""
        if address is None:
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.name = f"burst_rt-{secrets.token_hex(16)}"
            self.socket.bind("\0" + self.name)
        else:
            self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            self.name = address
            self.socket.bind((address, 0))
        self.socket.listen(_BACKLOG)
        self.socket.setblocking(False)

    @property
    def port(self) -> int:
        """The TCP port."""
        return int(self.socket.getsockname()[1])


class Receiver(Protocol):
    """The receiver of the frames of a `Links`."""

    def room(self, peer: int, kind: int, number: int, size: int) -> memoryview:
        """Memory of exactly `size` bytes for a frame that has begun to arrive."""

    def arrived(self, peer: int, kind: int, number: int, memory: memoryview) -> None:
        """Takes a frame that has arrived in whole; `memory` is what `room` gave."""


@dataclass(slots=True)
class _Outgoing:
    """The connection to a peer, and what is still to be written to it."""

    socket: socket.socket
    connected: bool
    queue: deque[tuple[memoryview, Callable[[], None] | None]]
    watched: bool | None = None  # whether the poll looks for room to write; None: for nothing


@dataclass(slots=True)
class _Incoming:
    """The connection from a peer, and the bytes that are awaited next."""

    socket: socket.socket
    target: memoryview
    filled: int = 0
    peer: int = -1  # unknown before the greeting
    frame: tuple[int, int] | None = None  # kind and number, while its payload arrives


class Links:
    """The connections of one rank for one use. One thread uses them at a time.

    doors: where other ranks connect to this rank. places: of all ranks, in the order of ranks; this
    use is number `use` of their doors. secret: the group's.
    """

    def __init__(
        self,
        rank: int,
        doors: Sequence[Door],
        places: Sequence[Place],
        use: int,
        secret: bytes,
        receiver: Receiver,
    ) -> None:
        # Peers whose connection has ended, and when (`time.perf_counter`).
        self.ended: dict[int, float] = {}
        self.read_out: set[int] = set()  # peers that have ended, and all they sent has been taken
        self._rank = rank
        self._places = places
        self._use = use
        self._greeting = secret + _RANK.pack(rank)
        self._receiver = receiver
        self._doors = {door.socket.fileno(): door.socket for door in doors}
        self._outgoing: dict[int, _Outgoing] = {}
        self._peer_of: dict[int, int] = {}  # keyed by descriptor of an outgoing connection
        self._incoming: dict[int, _Incoming] = {}  # keyed by descriptor
        self._unopened: set[int] = set()  # peers whose door was full
        self._spent: list[socket.socket] = []
        self._ahead = memoryview(bytearray(_AHEAD_BYTES))
        self._epoll = select.epoll()
        _open.add(self)
        for descriptor in self._doors:
            self._epoll.register(descriptor, select.EPOLLIN)

    @property
    def unsent(self) -> list[int]:
        """The peers for which there are bytes that the kernel has not taken yet."""
        return [peer for peer, link in self._outgoing.items() if link.queue]

    def send(
        self,
        peer: int,
        kind: int,
        number: int,
        payload: memoryview | bytes = b"",
        sent: Callable[[], None] | None = None,
    ) -> None:
        """Sends a frame after all earlier frames to this peer. Does not wait.

        sent: called, here or in `poll`, once the kernel has the whole frame; `payload` stays
        untouched until then. `sent` may not send. Frames to a peer that has ended are forgotten.
        """
        link = self._outgoing.get(peer) or self.connect(peer)
        if link is None:
            return
        header = _HEADER.pack(kind, number, len(payload))
        if len(payload) <= _COPIED_BYTES and sent is None:
            link.queue.append((memoryview(header + bytes(payload)), None))
        else:
            link.queue.append((memoryview(header), None if len(payload) else sent))
            if len(payload):
                link.queue.append((memoryview(payload), sent))
        if link.connected and not link.watched:
            self._write(peer, link)

    def poll(self) -> None:
        """Moves what can be moved, and hands frames to the receiver. Never blocks.

        Raises ProtocolError for bytes that no rank sends, and what the receiver raises.
        """
        if self._epoll.closed:
            return
        for peer in list(self._unopened):
            self._unopened.discard(peer)
            self._open(peer, self._outgoing[peer])
        for descriptor, events in self._epoll.poll(0):
            if descriptor in self._incoming:
                self._read(self._incoming[descriptor])
            elif descriptor in self._peer_of:
                self._look(self._peer_of[descriptor], events)
            elif descriptor in self._doors:
                self._accept(self._doors[descriptor])
        # Closed only now: a new socket must not get a number that the list above still tells of.
        while self._spent:
            self._spent.pop().close()

    def flush(self, within_s: float) -> None:
        """Blocks until the kernel has all that was sent, at most `within_s`."""
        deadline_s = time.perf_counter() + within_s
        while self.unsent:
            if time.perf_counter() > deadline_s:
                return
            self.poll()
            time.sleep(0.0002)

    def close(self) -> None:
        """Ends all connections. Bytes that the kernel has already taken still arrive. Calls after
        the first do nothing.
        """
        self._epoll.close()
        outgoing = [link.socket for link in self._outgoing.values()]
        incoming = [link.socket for link in self._incoming.values()]
        for end in (*outgoing, *incoming, *self._doors.values(), *self._spent):
            end.close()
        self._outgoing, self._incoming, self._doors, self._peer_of = {}, {}, {}, {}
        self._unopened.clear()

    def hears(self, peer: int) -> bool:
        """Whether a connection from this peer is open."""
        return any(link.peer == peer for link in self._incoming.values())

    def connect(self, peer: int) -> _Outgoing | None:
        """Opens the connection to a peer, unless the peer has ended. Does not wait.

        `send` does so by itself. From now on both sides notice when the other one ends.
        """
        if peer in self.ended or self._epoll.closed:
            return None
        near = self._is_near(peer)
        end = socket.socket(socket.AF_UNIX if near else socket.AF_INET, socket.SOCK_STREAM)
        end.setblocking(False)
        if near:
            # TCP finds its own sizes, unless it is told one.
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        else:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = _Outgoing(end, False, deque([(memoryview(self._greeting), None)]))
        self._outgoing[peer] = link
        self._peer_of[end.fileno()] = peer
        self._open(peer, link)
        return self._outgoing.get(peer)

    def _is_near(self, peer: int) -> bool:
        return self._places[peer].host == self._places[self._rank].host

    def _open(self, peer: int, link: _Outgoing) -> None:
        place = self._places[peer]
        near = self._is_near(peer)
        failed = link.socket.connect_ex(
            "\0" + place.unix[self._use] if near else place.tcp[self._use]
        )
        if failed == errno.EAGAIN:
            self._unopened.add(peer)  # more ranks want to connect than the kernel lets wait
        elif failed == errno.EINPROGRESS:
            self._watch(link, for_room=True)
        elif failed:
            self._lose(peer)
        else:
            link.connected = True
            self._write(peer, link)

    def _look(self, peer: int, events: int) -> None:
        """Goes on with a connection to a peer that has room, or that has ended."""
        link = self._outgoing[peer]
        if events & (select.EPOLLERR | select.EPOLLHUP | select.EPOLLRDHUP):
            self._lose(peer)
            return
        link.connected = True
        self._write(peer, link)

    def _write(self, peer: int, link: _Outgoing) -> None:
        """Writes until the kernel refuses."""
        queue = link.queue
        try:
            while queue:
                taken = link.socket.sendmsg(
                    [piece for piece, _ in islice(queue, 4)], (), socket.MSG_NOSIGNAL
                )
                while queue and taken >= len(queue[0][0]):
                    piece, sent = queue.popleft()
                    taken -= len(piece)
                    if sent is not None:
                        sent()
                if taken:
                    piece, sent = queue[0]
                    queue[0] = piece[taken:], sent
        except _LATER:
            pass
        except OSError:
            self._lose(peer)
            return
        except BaseException:
            # Ctrl-C may come between a write and its note. Bytes that are written twice would be
            # misread.
            self._lose(peer)
            raise
        self._watch(link, for_room=bool(queue))

    def _watch(self, link: _Outgoing, *, for_room: bool) -> None:
        if link.watched == for_room:
            return
        events = select.EPOLLRDHUP | (select.EPOLLOUT if for_room else 0)
        if link.watched is None:
            self._epoll.register(link.socket.fileno(), events)
        else:
            self._epoll.modify(link.socket.fileno(), events)
        link.watched = for_room

    def _lose(self, peer: int) -> None:
        self.ended.setdefault(peer, time.perf_counter())
        link = self._outgoing.pop(peer, None)
        self._unopened.discard(peer)
        if link is not None:
            del self._peer_of[link.socket.fileno()]
            self._let_go(link.socket)

    def _accept(self, door: socket.socket) -> None:
        while True:
            try:
                end, _ = door.accept()
            except OSError:
                return  # no connection waits, or no descriptors are left and it keeps waiting
            end.setblocking(False)
            strangers = [link for link in self._incoming.values() if link.peer < 0]
            if len(strangers) >= max(_LEAST_UNGREETED, 2 * len(self._places)):
                self._shut(strangers[0])
            greeting = memoryview(bytearray(len(self._greeting)))
            self._incoming[end.fileno()] = link = _Incoming(end, greeting)
            self._epoll.register(end.fileno(), select.EPOLLIN)
            self._read(link)

    def _read(self, link: _Incoming) -> None:
        """Reads until nothing is there. Small frames are read several at a time."""
        ahead = self._ahead
        size = space = 0
        while size == space:
            direct = len(link.target) - link.filled >= len(ahead)
            memory = link.target[link.filled :] if direct else ahead
            space = len(memory)
            try:
                size = link.socket.recv_into(memory)
            except _LATER:
                return
            except OSError:
                size = 0
            if not size:
                self._shut(link)
                return
            if direct:
                link.filled += size
                if link.filled == len(link.target) and not self._go_on(link):
                    return
                continue
            at = 0
            while at < size:
                step = min(len(link.target) - link.filled, size - at)
                link.target[link.filled : link.filled + step] = ahead[at : at + step]
                link.filled, at = link.filled + step, at + step
                while link.filled == len(link.target):
                    if not self._go_on(link):
                        return

    def _go_on(self, link: _Incoming) -> bool:
        """Takes what is complete, and sets what is awaited next. False where the link is shut."""
        target, link.filled = link.target, 0
        if link.peer < 0:
            greeted = secrets.compare_digest(target[:SECRET_BYTES], self._greeting[:SECRET_BYTES])
            (peer,) = _RANK.unpack(target[SECRET_BYTES:])
            if not greeted or not 0 <= peer < len(self._places):
                self._shut(link)  # not of this group
                return False
            link.peer = peer
        elif link.frame is None:
            kind, number, size = _HEADER.unpack(target)
            if size < 0:
                raise ProtocolError(
                    f"rank {self._rank}: rank {link.peer} sent a frame of {size} bytes",
                    rank=self._rank,
                    peer=link.peer,
                )
            link.frame = kind, number
            link.target = self._receiver.room(link.peer, kind, number, size)
            return True
        else:
            (kind, number), link.frame = link.frame, None
            self._receiver.arrived(link.peer, kind, number, target)
        link.target = memoryview(bytearray(_HEADER.size))
        return True

    def _shut(self, link: _Incoming) -> None:
        if link.peer >= 0:
            self.ended.setdefault(link.peer, time.perf_counter())
            self.read_out.add(link.peer)
        del self._incoming[link.socket.fileno()]
        self._let_go(link.socket)

    def _let_go(self, end: socket.socket) -> None:
        with suppress(FileNotFoundError):  # it was not watched yet
            self._epoll.unregister(end.fileno())
        self._spent.append(end)


def _forked() -> None:
    """For a child of this process (a data loader's worker): the child lets go of the parent's
    connections, which must end with the parent.
    """
    for links in list(_open):
        links.close()


# Links that may have connections.
_open: weakref.WeakSet[Links] = weakref.WeakSet()
os.register_at_fork(after_in_child=_forked)
