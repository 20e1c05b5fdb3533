"""How a rank that cannot make its next call says so to the ranks that wait for it.

A rank may be in several groups (data parallel beside context parallel), and a wrong argument may be
what would have told in which of them the call was meant. The error must reach the ranks that wait,
in the group where they wait, and no other call may take it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from burst_rt.drivers import Backoff
from burst_rt.errors import BurstError
from burst_rt.runtime.process import process
from burst_rt.runtime.runtime import Runtime

__all__ = ["refuse"]


def refuse(call: str, error: BurstError, runtime: Runtime | None = None) -> NoReturn:
    """Raises the error on every rank that waits for this rank's next call, also where those ranks
    wait in another group than this rank meant.

    runtime: where this rank was about to make the call; None where that is not known, which means
    the one that this thread made last. Blocks until the others have come to that call, at most
    `timeout_s`; returns at once where no other rank can be waiting.
    """
    # The runtimes of other threads are in calls of those threads.
    made = [member for member in process.made_here() if isinstance(member, Runtime)]
    known = dict.fromkeys([*made, *([runtime] if runtime is not None else [])])
    shared = [each for each in known if each.usable and each.world_size > 1]
    if not shared:
        raise error
    # `made` has the last one last; where that is not usable, any is as good.
    meant = next((each for each in (runtime, *made[-1:]) if each in shared), shared[0])
    if len(shared) == 1:
        meant.refuse(call, error)
    try:
        for each in shared:
            each.watch.say_refuses(here=each is meant)
        backoff = Backoff()
        while backoff.elapsed_s() < meant.timeout_s:
            _look(shared)
            where = _where_awaited(meant, shared)
            if where is not None:
                where.refuse(call, error)
            if _nobody_waits(meant):
                # The others have asked everywhere before they answered here: what they ask is
                # answered before this rank goes on.
                _look(shared)
                break
            backoff.pause()
    finally:
        for each in shared:
            each.watch.stop_refusing()
    raise error


def _look(shared: Sequence[Runtime]) -> None:
    """Reads the notices of all these groups; answers those who ask whether this rank, too, cannot
    make its call.
    """
    for each in shared:
        each.watch.look()


def _nobody_waits(meant: Runtime) -> bool:
    """Whether no other rank can make the call either: the ranks meant different calls, and each
    raises its own error.
    """
    return len(set(meant.watch.left).union(meant.watch.refusing or ())) == meant.world_size - 1


def _where_awaited(meant: Runtime, shared: Sequence[Runtime]) -> Runtime | None:
    """The group in which the others are to hear of a call that this rank cannot make; None as long
    as that is not known.

    It is the one that was meant, once somebody waits there, or nobody can make the call there. It
    is another only where all the ranks of the one that was meant wait: others may well have gone on
    to a later call there.
    """
    # Who could not make its call either and waits now, waits in the one after it.
    waiting = {each: each.waiting_here().difference(each.watch.refusing or ()) for each in shared}
    refusing, left = meant.watch.refusing or {}, set(meant.watch.left)
    refuse_here = {peer for peer, here in refusing.items() if here}
    if waiting[meant] or len(left | refuse_here) == meant.world_size - 1:
        return meant
    others = {
        place for rank, place in enumerate(meant.places) if rank != meant.rank and rank not in left
    }
    for each in shared:
        if each is not meant and others <= {each.places[rank] for rank in waiting[each]}:
            return each
    return None
