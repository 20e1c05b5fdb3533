"""Sockets of many ranks that connect at the same moment."""

from __future__ import annotations

import os
import resource

from burst_rt.transport.links import Door, Links, Place

_RANKS = 400


class _Inbox:
    def __init__(self) -> None:
        self.heard: set[int] = set()

    def room(self, peer: int, kind: int, number: int, size: int) -> memoryview:
        return memoryview(bytearray(size))

    def arrived(self, peer: int, kind: int, number: int, memory: memoryview) -> None:
        self.heard.add(peer)


def test_all_ranks_may_connect_before_any_has_said_who_it_is() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    secret, door, inbox = os.urandom(16), Door("127.0.0.1"), _Inbox()
    places = [Place(f"host{rank}", ["x"], [("127.0.0.1", door.port)]) for rank in range(_RANKS)]
    first = Links(0, [door], places, 0, secret, inbox)
    others = [Links(rank, [], places, 0, secret, _Inbox()) for rank in range(1, _RANKS)]
    try:
        for links in others:
            links.send(0, 1, 1, b"a part of a sum")
        for _ in range(50):
            for links in (first, *others):
                links.poll()
        assert len(inbox.heard) == _RANKS - 1
        assert not any(0 in links.ended for links in others)
    finally:
        for links in (first, *others):
            links.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
