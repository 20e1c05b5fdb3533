"""Watching the other ranks: who has left, who is alive, and how to wait without burning a core or outliving a deadline."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable

from burst_rt.errors import BurstError, DeviceError, PeerLost, Stalled
from burst_rt.transport import ControlGroup, NoticeKind, Pending

__all__ = ["Backoff", "SharedWatch", "Watch"]

# A rank that has left may have done all its part of the call already; what it sent is still on its way this long.
_LEAVE_GRACE_S = 1.0
# Poll hot first (a sleeping poll costs 0.6 ms where a hot one costs 3 us), then with growing sleeps.
_HOT_S = 300e-6
_FIRST_SLEEP_S = 20e-6
_LONGEST_SLEEP_S = 500e-6


class Backoff:
    """Spaces the polls of one wait."""

    def __init__(self) -> None:
        self.started_s = time.perf_counter()
        self._sleep_s = _FIRST_SLEEP_S

    @property
    def hot(self) -> bool:
        """Whether the wait is so young that only what it waits for needs a look."""
        return time.perf_counter() - self.started_s < _HOT_S

    def pause(self) -> None:
        """Lets time pass: yields the core while hot, sleeps up to 0.5 ms later."""
        if self.hot:
            os.sched_yield()
        else:
            time.sleep(self._sleep_s)
            self._sleep_s = min(2 * self._sleep_s, _LONGEST_SLEEP_S)

    def elapsed_s(self) -> float:
        """Seconds since the wait began."""
        return time.perf_counter() - self.started_s


class Watch:
    """What this rank knows of the others, from their notices. One per context."""

    def __init__(self, control: ControlGroup) -> None:
        self.control = control
        # Never changed, but replaced: another thread may be reading them.
        self.left: dict[int, tuple[float, int]] = {}  # peer -> (when noticed, exit code it gave)
        self.alive: dict[int, tuple[float, int]] = {}  # peer -> (when it last said so, its task)

    def look(self) -> None:
        """Reads notices. Never blocks."""
        for notice in self.control.notices():
            now = time.perf_counter()
            if notice.kind is NoticeKind.LEFT:
                # A rank that failed says so at once, and once more when it closes its context.
                self.left = {notice.peer: (now, notice.value)} | self.left
            else:
                self.alive = self.alive | {notice.peer: (now, notice.value)}

    def lost(self, awaited: Iterable[int] | None = None) -> BurstError | None:
        """PeerLost (DeviceError where that is what it had), once a rank has left for longer than its last messages may take.

        awaited: the ranks whose messages are open (None: all). One that ended well and owes nothing is no loss to a call under way.
        """
        now = time.perf_counter()
        for peer, (since, code) in self.left.items():
            if now - since > _LEAVE_GRACE_S and (code or awaited is None or peer in awaited):
                return self._lost(peer, code)
        return None

    def require_all(self) -> None:
        """Raises PeerLost if any rank has left already: a new call cannot be entered."""
        self.look()
        for peer, (_, code) in self.left.items():
            raise self._lost(peer, code)

    def say_alive(self, peers: Iterable[int], task: int) -> None:
        """Tells peers that this rank is computing."""
        for peer in peers:
            self.control.notify(peer, NoticeKind.ALIVE, task)

    def say_left(self, code: int) -> None:
        """Tells every other rank that this one enters no further call, and with which exit code. Does not wait."""
        for peer in range(self.control.size):
            if peer != self.control.rank:
                self.control.notify(peer, NoticeKind.LEFT, code)

    def leave(self, code: int) -> None:
        """`say_left`, and closes the control group."""
        self.say_left(code)
        self.control.close()

    def wait_for(self, pending: Pending, timeout_s: float, what: str) -> None:
        """Blocks until `pending` is done. Raises Stalled after `timeout_s`, PeerLost when a rank has left."""
        backoff = Backoff()
        while not pending.test():
            self.look()
            error = self.lost()
            if error:
                raise error
            if backoff.elapsed_s() > timeout_s:
                raise Stalled(
                    f"rank {self.control.rank}: waited {timeout_s:g} s for the other ranks to enter {what}. "
                    "If they do long work between calls (a checkpoint), raise timeout_s in burst_rt.init",
                    rank=self.control.rank,
                    elapsed_s=backoff.elapsed_s(),
                )
            backoff.pause()

    def _lost(self, peer: int, code: int) -> BurstError:
        # A device that failed is everybody's error, of the same class: no rank can go on, and none is to blame.
        kind = DeviceError if code == DeviceError.exit_code else PeerLost
        how = "closed its context or ended normally" if code == 0 else f"failed (exit code {code})"
        return kind(
            f"rank {self.control.rank}: rank {peer} {how}, and cannot take part in this call. Look at that rank's own error first; "
            "every rank must make the same calls",
            rank=self.control.rank,
            peer=peer,
        )


class SharedWatch(Watch):
    """A `Watch` that a second thread uses too: it reads and writes notices under a lock, which
    contexts with one thread do without."""

    def __init__(self, control: ControlGroup) -> None:
        super().__init__(control)
        self._lock = threading.RLock()

    def look(self) -> None:
        """See `Watch.look`."""
        with self._lock:
            super().look()

    def say_alive(self, peers: Iterable[int], task: int) -> None:
        """See `Watch.say_alive`."""
        with self._lock:
            super().say_alive(peers, task)

    def say_left(self, code: int) -> None:
        """See `Watch.say_left`."""
        with self._lock:
            super().say_left(code)

    def leave(self, code: int) -> None:
        """See `Watch.leave`."""
        with self._lock:
            super().leave(code)
