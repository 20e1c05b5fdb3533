"""Watching the other ranks: who has left, who is alive, and how to wait for them.

A wait must neither burn a core nor outlive its deadline.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from burst_rt.errors import BurstError, DeviceError, PeerLost, Stalled
from burst_rt.job.clock import RunningClock
from burst_rt.transport import ControlGroup, NoticeKind, Pending
from burst_rt.transport.base import UNKNOWN_CODE

__all__ = ["Backoff", "SharedWatch", "Watch"]

# Seconds for which messages of a rank that has failed may still be in transit: it may have done all
# of its part in the call before.
_LEAVE_GRACE_S = 1.0
# Seconds for which a wait polls without sleeping, because a sleeping poll costs 0.6 ms and a hot
# poll 3 us. Later the wait polls with growing sleeps.
_HOT_S = 1e-3
_FIRST_SLEEP_S = 20e-6
_LONGEST_SLEEP_S = 500e-6


class Backoff:
    """The pauses between the polls of one wait."""

    def __init__(self) -> None:
        self.started_s = time.perf_counter()
        self.clock = RunningClock()
        self._sleep_s = _FIRST_SLEEP_S

    def pause(self) -> bool:
        """Pauses: yields the core in the first 1 ms of the wait, and sleeps up to 0.5 ms later.

        Returns whether it slept. Only then need notices and deadlines be looked at, and only after
        another poll: a sleep may take longer than it should, and what is awaited comes meanwhile.
        """
        if time.perf_counter() - self.started_s < _HOT_S:
            os.sched_yield()
            return False
        time.sleep(self._sleep_s)
        self._sleep_s = min(2 * self._sleep_s, _LONGEST_SLEEP_S)
        self.clock.read()
        return True

    def elapsed_s(self) -> float:
        """Seconds since the wait began, for the record."""
        return time.perf_counter() - self.started_s

    @property
    def waited_s(self) -> float:
        """Seconds until the last pause in which this process ran, for deadlines."""
        return self.clock.elapsed_s


@dataclass(frozen=True)
class Absent:
    """Ranks that have not entered a call. `str()` gives "rank 2 has" or "ranks 1, 2 have"."""

    ranks: list[int]

    def __str__(self) -> str:
        names = ", ".join(map(str, self.ranks))
        return f"rank {names} has" if len(self.ranks) == 1 else f"ranks {names} have"

    @property
    def only(self) -> int | None:
        """The absent rank, where exactly one is absent; else None."""
        return self.ranks[0] if len(self.ranks) == 1 else None


class _Left(NamedTuple):
    """How a rank has left."""

    noticed_s: float  # by `time.perf_counter`
    code: int  # its exit code
    error: str = ""  # in words
    last_call: int = 0  # the number of the last call that it has made, where it ended well


class Watch:
    """This rank's knowledge of the other ranks, from their notices. Each context has one watch.

    Only `wait_for` blocks. All dictionaries are by rank.
    """

    def __init__(self, control: ControlGroup) -> None:
        self.control = control
        # The first five dictionaries are replaced, and never changed: another thread may be
        # reading them.

        self.left: dict[int, _Left] = {}
        # When a rank last said that it computes, and the task that it computes.
        self.alive: dict[int, tuple[float, int]] = {}
        # The number of the last call that a rank said it waits in.
        self.entered: dict[int, int] = {}
        # The error in words of a rank that waits there because it could not make an earlier call.
        self.errors: dict[int, str] = {}
        # Ranks that cannot make their next call, like this rank, and whether they meant to make it
        # in this group. None while this rank can make its next call.
        self.refusing: dict[int, bool] | None = None
        self._refusing = threading.Lock()  # to be held where `refusing` is replaced
        self._here = False  # whether this rank, when refusing, meant to make its call here
        self._asked = 0  # how often this rank has asked who waits for it
        self._asking: dict[int, int] = {}  # the last question of each rank that asked
        self._curious: set[int] = set()  # ranks to tell which call this rank waits in
        self._told: dict[int, int] = {}  # the last call that each rank was told of
        # Ranks that cannot make their next call, and the call that they were told of first.
        self._refusers: dict[int, int | None] = {}

    def look(self) -> None:
        """Reads the notices that have come, and answers questions. Never blocks."""
        for notice in self.control.notices():
            now, peer = time.perf_counter(), notice.peer
            if notice.kind is NoticeKind.LEFT:
                self._note_left(peer, _Left(now, notice.value, notice.text))
            elif notice.kind is NoticeKind.ENDED:
                self._note_left(peer, _Left(now, 0, last_call=notice.value))
            elif notice.kind is NoticeKind.ALIVE:
                self.alive = self.alive | {peer: (now, notice.value)}
            elif notice.kind is NoticeKind.ENTERED:
                self._curious.add(peer)
                self.errors = self.errors | {peer: notice.text}
                self.entered = self.entered | {peer: notice.value}
            elif notice.kind is NoticeKind.REFUSES:
                self._curious.add(peer)
                self._refusers[peer] = None
                self._asking[peer] = notice.value
            elif self.refusing is not None and notice.value == self._asked:
                self._refuses_too(peer, here=notice.text == "here")
        if self.refusing is not None:
            for peer, question in self._asking.items():
                self.control.notify(
                    peer, NoticeKind.REFUSES_TOO, question, "here" if self._here else ""
                )
            self._asking.clear()

    def lost(self, number: float, awaited: Collection[int] = ()) -> BurstError | None:
        """The error for a rank that has left and is lost to call `number`, or None.

        PeerLost, or DeviceError where the rank failed with a DeviceError. A rank counts as lost 1 s
        after it left, because its last messages may still be on their way. A rank that ended well
        after this call is not lost to it, however late what others sent may be: it has made its
        part. awaited: ranks that may have ended without their part in call `number`.
        """
        now = time.perf_counter()
        for peer, (since_s, code, _, last_call) in self.left.items():
            gone = code or last_call < number or peer in awaited
            if gone and now - since_s > _LEAVE_GRACE_S:
                return self._lost(peer)
        return None

    def require_all(self) -> None:
        """Raises PeerLost (or DeviceError) if any rank has left: then no new call can be entered.

        Never blocks.
        """
        self.look()
        for peer in self.left:
            raise self._lost(peer)

    def say_alive(self, task: int) -> None:
        """Tells every other rank that this rank is computing the task with this number.

        Does not wait. All are told, and not the neighbours only: a rank may wait for a neighbour
        that waits for this rank.
        """
        for peer in self._others():
            self.control.notify(peer, NoticeKind.ALIVE, task)

    def say_left(self, code: int, error: str = "", last_call: int = 0) -> None:
        """Tells every other rank that this rank enters no further call. Does not wait.

        code: this rank's exit code. error: why this rank leaves, in words. last_call: the number of
        the last call that it has made; what matters where it ends well.
        """
        for peer in self._others():
            if code:
                self.control.notify(peer, NoticeKind.LEFT, code, error)
            else:
                self.control.notify(peer, NoticeKind.ENDED, last_call)

    def say_refuses(self, *, meant: bool) -> None:
        """Tells every other rank that this rank cannot make its next call. Does not wait.

        The notice is a question, too: ranks that wait for this rank here answer, and so do ranks
        that cannot make a call either. Until `stop_refusing` this rank answers such questions when
        it looks. meant: whether this rank meant to make the call in this group.
        """
        with self._refusing:
            self.refusing, self._here = {}, meant
        self._asked += 1
        for peer in self._others():
            self.control.notify(peer, NoticeKind.REFUSES, self._asked)

    def stop_refusing(self) -> None:
        """Ends what `say_refuses` began."""
        with self._refusing:
            self.refusing = None

    def _note_left(self, peer: int, how: _Left) -> None:
        # A rank that failed says so at once, and once more when it closes its context.
        if peer not in self.left:
            self.left = self.left | {peer: how}

    def _refuses_too(self, peer: int, *, here: bool) -> None:
        with self._refusing:
            if self.refusing is not None:
                self.refusing = self.refusing | {peer: here}

    def say_entered(self, number: int, waited_s: float, timeout_s: float, error: str = "") -> None:
        """Tells other ranks that this rank waits for them to enter call `number`. Does not wait.

        At first only the ranks that want to know are told, and all ranks after half of `timeout_s`.
        error: what this rank brings to that call, in words.
        """
        for peer in list(self._curious) if waited_s < timeout_s / 2 else self._others():
            if self._told.get(peer) != number:
                self._told[peer] = number
                self.control.notify(peer, NoticeKind.ENTERED, number, error)
        self._curious.clear()
        for peer, told in list(self._refusers.items()):
            # It may have asked while this rank was about to leave the call before the one that it
            # refuses: it hears of the next call, too.
            if told is not None and told != number:
                del self._refusers[peer]
            else:
                self._refusers[peer] = number
                self._curious.add(peer)

    def ask(self, peers: Iterable[int], number: int) -> None:
        """Asks peers which call they wait in, where they do. Does not wait; asks once a call.

        number: of the call that this rank is in.
        """
        self._curious.update(peers)
        self.say_entered(number, 0.0, math.inf)

    def leave(self, code: int, error: str = "", last_call: int = 0) -> None:
        """Says that this rank has left (`say_left`), and closes the control group."""
        self.say_left(code, error, last_call)
        self.control.close()

    def absent(self, number: int) -> Absent:
        """The ranks that have not said that they wait in call `number`."""
        return Absent([peer for peer in self._others() if self.entered.get(peer) != number])

    def wait_for(
        self,
        pending: Pending,
        timeout_s: float,
        what: str,
        number: int | None = None,
        bringing: str = "",
    ) -> None:
        """Blocks until `pending` is done. Raises Stalled after `timeout_s`.

        Raises PeerLost or DeviceError when a rank has left. number: of the call that `pending`
        opens; None where `pending` opens no call. bringing: the error that this rank brings to it,
        in words.
        """
        backoff, slept = Backoff(), False
        while not pending.test():
            if slept:
                self.look()
                if number is not None:
                    self.say_entered(number, backoff.waited_s, timeout_s, bringing)
            error = self.lost(math.inf if number is None else number)
            if error:
                raise error
            if backoff.waited_s > timeout_s:
                missing = self.absent(number) if number is not None else Absent([])
                raise Stalled(
                    f"rank {self.control.rank}: waited {timeout_s:g} s for the other ranks to "
                    f"enter {what}"
                    f"{f' (call {number}): {missing} not entered it' if missing.ranks else ''}. "
                    "If ranks do long work between calls (write a checkpoint), raise timeout_s in "
                    "burst_rt.init, or BURST_RT_TIMEOUT_S for commands of burst-rt; for the wait "
                    "in burst_rt.init itself, raise join_s. Ranks with several contexts must make "
                    "a call with the same context",
                    rank=self.control.rank,
                    peer=missing.only,
                    elapsed_s=backoff.waited_s,
                )
            slept = backoff.pause()

    def _others(self) -> list[int]:
        return [peer for peer in range(self.control.size) if peer != self.control.rank]

    def _lost(self, peer: int) -> BurstError:
        _, code, error, _ = self.left[peer]
        # If a device failed, all ranks raise the same class: no rank can go on, and no rank is to
        # blame.
        kind = DeviceError if code == DeviceError.exit_code else PeerLost
        if code == UNKNOWN_CODE:
            how = f"failed (exit code not known): {error}"
        elif code == 0:
            how = "closed its context or ended normally"
        else:
            how = f"failed (exit code {code})" + (f" with {error}" if error else "")
        return kind(
            f"rank {self.control.rank}: rank {peer} {how}, and cannot take part in this call. Look "
            f"at the error of rank {peer} first; every rank must make the same calls",
            rank=self.control.rank,
            peer=peer,
        )


class SharedWatch(Watch):
    """A `Watch` that a second thread uses, too: it reads and writes notices under a lock.

    Contexts with one thread do without the lock.
    """

    def __init__(self, control: ControlGroup) -> None:
        super().__init__(control)
        self._lock = threading.RLock()

    def look(self) -> None:
        """See `Watch.look`."""
        with self._lock:
            super().look()

    def say_alive(self, task: int) -> None:
        """See `Watch.say_alive`."""
        with self._lock:
            super().say_alive(task)

    def say_left(self, code: int, error: str = "", last_call: int = 0) -> None:
        """See `Watch.say_left`."""
        with self._lock:
            super().say_left(code, error, last_call)

    def say_refuses(self, *, meant: bool) -> None:
        """See `Watch.say_refuses`."""
        with self._lock:
            super().say_refuses(meant=meant)

    def stop_refusing(self) -> None:
        """See `Watch.stop_refusing`."""
        with self._lock:
            super().stop_refusing()

    def say_entered(self, number: int, waited_s: float, timeout_s: float, error: str = "") -> None:
        """See `Watch.say_entered`."""
        with self._lock:
            super().say_entered(number, waited_s, timeout_s, error)

    def ask(self, peers: Iterable[int], number: int) -> None:
        """See `Watch.ask`."""
        with self._lock:
            super().ask(peers, number)

    def leave(self, code: int, error: str = "", last_call: int = 0) -> None:
        """See `Watch.leave`."""
        with self._lock:
            super().leave(code, error, last_call)
