"""How a rank that cannot make its next call says so to the ranks that wait for it.

A rank may be in several groups (data parallel and context parallel). The wrong argument may be the
one that names the group. The error must reach the ranks that wait, in the group where they wait,
and no other call may take the error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import NoReturn, ParamSpec, TypeVar

import torch

from burst_rt.arguments import wrong_kind
from burst_rt.drivers import Backoff
from burst_rt.errors import BurstError
from burst_rt.runtime.process import process
from burst_rt.runtime.runtime import Runtime

__all__ = ["refuse", "refuse_kinds"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def refuse_kinds(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function, which refuses an argument that is not of the kind that its annotation says.

    Every rank that waits for this rank raises the InputError. Blocks then as `refuse` does.
    """

    @wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        # The compiler would trace the check.
        error = None if torch.compiler.is_compiling() else wrong_kind(function, args, kwargs)
        if error is not None:
            found = (getattr(given, "runtime", None) for given in (*args, *kwargs.values()))
            runtime = next((each for each in found if isinstance(each, Runtime)), None)
            refuse(function.__name__, error, runtime)
        return function(*args, **kwargs)

    return run


def refuse(call: str, error: BurstError, runtime: Runtime | None = None) -> NoReturn:
    """Raises the error on every rank that waits for this rank's next call. Never returns.

    Blocks until the other ranks reach that call, at most `timeout_s`. Raises at once where no other
    rank can be waiting. The other ranks may wait in another group than this rank's call names.
    runtime: where this rank was about to make the call; None where the runtime is not known, which
    means the runtime of several ranks that this thread made last.
    """
    shared = _shared_runtimes(runtime)
    alone = runtime is not None and runtime.world_size == 1
    if not shared or alone:
        raise error
    meant = runtime if runtime is not None and runtime in shared else shared[-1]
    if len(shared) == 1:
        meant.refuse(call, error)
    try:
        for member in shared:
            member.watch.say_refuses(meant=member is meant)
        backoff = Backoff()
        while backoff.waited_s < meant.timeout_s:
            _look(shared)
            where = _where_awaited(meant, shared)
            if where is not None:
                where.refuse(call, error)
            if _nobody_waits(meant):
                # The other ranks asked in all groups before they answered here. This rank answers
                # those questions before it goes on.
                _look(shared)
                break
            backoff.pause()
    finally:
        for member in shared:
            member.watch.stop_refusing()
    raise error


def _shared_runtimes(runtime: Runtime | None) -> list[Runtime]:
    """The usable runtimes of several ranks that this thread made, and the given one."""
    # Runtimes that other threads made are left out, because they are in calls of those threads.
    made = [member for member in process.made_for_here() if isinstance(member, Runtime)]
    known = dict.fromkeys([*made, *([runtime] if runtime is not None else [])])
    return [member for member in known if member.usable and member.world_size > 1]


def _look(shared: Sequence[Runtime]) -> None:
    """Reads the notices of all these groups. Never blocks.

    Answers the ranks that ask whether this rank cannot make its call either.
    """
    for member in shared:
        member.watch.look()


def _nobody_waits(meant: Runtime) -> bool:
    """Whether no other rank can make the call either, so that each rank raises its own error."""
    return len(set(meant.watch.left).union(meant.watch.refusing or ())) == meant.world_size - 1


def _where_awaited(meant: Runtime, shared: Sequence[Runtime]) -> Runtime | None:
    """The group whose ranks are to hear that this rank cannot make its call; None: not yet known.

    It is the group that the call names, once some rank waits there, or once no rank can make the
    call there. It is another group only if all other ranks of the named group that have not left
    wait there. If only some wait there, they may have gone on to a later call.
    """
    # A rank that could not make its call either, and waits now, waits in a later call.
    waiting = {
        member: member.waiting_here().difference(member.watch.refusing or ()) for member in shared
    }
    refusing, left = meant.watch.refusing or {}, set(meant.watch.left)
    refuse_here = {peer for peer, here in refusing.items() if here}
    if waiting[meant] or len(left | refuse_here) == meant.world_size - 1:
        return meant
    others = {
        place for rank, place in enumerate(meant.places) if rank != meant.rank and rank not in left
    }
    for member in shared:
        if member is not meant and others <= {member.places[rank] for rank in waiting[member]}:
            return member
    return None
