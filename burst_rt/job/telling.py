"""How an error that ends a rank is printed: where the user's program made it, once, in one name.

An error of burst_rt carries the frames of burst_rt's own that found it, which tell a user nothing.
So the last frame printed is the public function's. An error that one rank made is raised on every
rank: that rank prints it whole, the others in a line. `BURST_RT_TRACEBACK=full` prints all frames
on all ranks. Standard library only: `burst-rt run` imports this module before the program.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType

from burst_rt.errors import BurstError, DeviceError, InternalError, PeerLost, Stalled
from burst_rt.job import launched

__all__ = [
    "FIRST_WORD_S", "OF_ONE_RANK", "in_full", "in_one_line", "is_of_another", "named_once",
    "shorten_text", "tell",
]  # fmt: skip

# Names of the errors that a rank raises for itself, whichever rank they name. All ranks raise the
# others.
OF_ONE_RANK = tuple(x.__name__ for x in (PeerLost, Stalled, DeviceError, InternalError))
# Seconds for which a rank that ends by another rank's error lets that rank be the first to end.
FIRST_WORD_S = 0.5
# Names of the packages whose frames may lie between two of burst_rt's frames.
_BETWEEN = {"torch"} | set(sys.stdlib_module_names) - {"__main__"}


def tell(text: str, end: str = "\n") -> None:
    """Writes to standard error. Does nothing where nobody can read it any more: its pipe's reader
    or its terminal is gone, and how the job ends does not depend on that.
    """
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            print(text, end=end, file=sys.stderr, flush=True)


def is_of_another(error: BaseException | None) -> bool:
    """Whether this rank raises an error that another rank has made, as all ranks do."""
    return (
        isinstance(error, BurstError)
        and _is_a_rank()
        and type(error).__name__ not in OF_ONE_RANK
        and None not in (error.rank, error.peer)
        and error.rank != error.peer
    )


def in_one_line(error: BaseException) -> str:
    """The line that this rank prints about another rank's error or end; "" for errors that it
    prints whole.
    """
    if _full() or not isinstance(error, BurstError) or error.rank is None:
        return ""
    if not is_of_another(error) and not (isinstance(error, PeerLost) and _is_a_rank()):
        return ""
    name = f"{type(error).__module__}.{type(error).__name__}"
    with shorten_text(error):
        user = [tb for tb in _walk(error.__traceback__) if not _is_ours(tb.tb_frame)]
    where = f" (at {user[-1].tb_frame.f_code.co_filename}:{user[-1].tb_lineno})" if user else ""
    told = named_once(name, " ".join(error.message.split()), error.rank)
    return f"burst-rt: rank {error.rank}: {told}{where}"


def in_full(error: BurstError) -> str:
    """The text that the rank that made an error prints: a sentence, then where the program made
    it.
    """
    trace = "".join(traceback.format_exception(error))
    if error.rank is None or not _is_a_rank():
        return trace
    name = f"{type(error).__module__}.{type(error).__name__}"
    told = named_once(name, " ".join(error.message.split()), error.rank)
    return f"burst-rt: rank {error.rank}: {told}\n{trace}"


def named_once(kind: str, message: str, rank: int | None) -> str:
    """An error of this rank in words, for a sentence that names the rank already.

    Messages begin with the rank that made the error ("rank 0: q must be ...").
    """
    made = re.match(r"rank (\d+): ", message)
    if made is None or rank is None:
        return f"{kind}: {message}"
    whose = "" if rank == int(made[1]) else f"rank {made[1]}'s "
    return f"{whose}{kind}: {message[made.end() :]}"


@contextmanager
def shorten_text(error: BaseException) -> Iterator[None]:
    """Inside, the traceback ends in the first of burst_rt's frames that found the error, and a
    cause that burst_rt met in itself is left out.

    Errors of a device and of burst_rt itself stay as they are: their frames are worth a report.
    """
    as_it_is = not isinstance(error, BurstError) or isinstance(error, (DeviceError, InternalError))
    if as_it_is or _full():
        yield
        return
    before = error.__traceback__, error.__cause__, error.__suppress_context__
    error.__traceback__ = _to_the_public_call(error.__traceback__)
    caused = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if caused is None or all(_is_inside(tb.tb_frame) for tb in _walk(caused.__traceback__)):
        error.__cause__ = None
    try:
        yield
    finally:
        error.__traceback__, error.__cause__, error.__suppress_context__ = before


def _to_the_public_call(trace: TracebackType | None) -> TracebackType | None:
    entries = list(_walk(trace))
    end = len(entries)
    while end and _is_inside(entries[end - 1].tb_frame):
        end -= 1
    inside = entries[end:]
    ours = next((n for n, tb in enumerate(inside) if _is_ours(tb.tb_frame)), len(inside) - 1)
    kept: TracebackType | None = None
    for tb in reversed(entries[: end + ours + 1]):
        kept = TracebackType(kept, tb.tb_frame, tb.tb_lasti, tb.tb_lineno)
    return kept


def _walk(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_ours(frame: FrameType) -> bool:
    return _package(frame) == "burst_rt"


def _is_inside(frame: FrameType) -> bool:
    package = _package(frame)
    return package == "burst_rt" or package in _BETWEEN


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _is_a_rank() -> bool:
    return launched.rank() is not None or launched.torchrun_ranks() > 1


def _full() -> bool:
    return os.environ.get("BURST_RT_TRACEBACK") == "full"
