"""The ranks of a command, from `init` to their last word: one rank's failure is every rank's.

An error that all ranks raise is printed once, by rank 0 or by the launcher, and ends the job with
its exit code.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import burst_rt
from burst_rt.context import Context
from burst_rt.errors import ConfigError, InputError
from burst_rt.job.telling import tell
from burst_rt.launch.stopping import LastWord, leave_word
from burst_rt.runtime.joining import check_seconds

__all__ = ["StoppedBySignal", "job_world", "same_everywhere"]

# Seconds that other ranks wait before they exit if `init` failed: rank 0 prints the error first.
_SPEAKING_S = 1.0
_TIMEOUT = "BURST_RT_TIMEOUT_S"


class StoppedBySignal(Exception):
    """The ranks were asked to stop by a signal, and have stopped. The text says where and what to
    do next.
    """

    def __init__(self, number: signal.Signals, text: str) -> None:
        super().__init__(f"stopped by {number.name} {text}")
        self.number = number


def _timeout_s() -> float:
    text = os.environ.get(_TIMEOUT, "600")
    try:
        check_seconds(_TIMEOUT, float(text))
    except ValueError:  # an InputError is one, too
        raise ConfigError(
            f"{_TIMEOUT}: expected a positive, finite number of seconds, got {text!r}"
        ) from None
    return float(text)


@contextmanager
def job_world() -> Iterator[Context]:
    """The context of all ranks.

    BURST_RT_TIMEOUT_S in the environment is its `timeout_s`.

    The block's StoppedBySignal, ConfigError or InputError, which all ranks raise, is printed once
    and ends the job. A ConfigError of `init` does the same.
    """
    # The objects that torch has loaded are never garbage. A collection would walk over all of it,
    # on one rank while the others wait for it, and again and again at the end of the process.
    gc.freeze()
    try:
        world = burst_rt.init(timeout_s=_timeout_s())
    except ConfigError as error:
        # Without a world the ranks cannot agree on who prints. All of them raise the same error; a
        # rank that knows that it is not rank 0 leaves the printing to rank 0.
        if error.rank in (None, 0):
            sys.exit(_say(_complaint(error)))
        time.sleep(_SPEAKING_S)
        sys.exit(error.exit_code)
    with world:
        try:
            yield world
        except (ConfigError, InputError) as error:
            if error.__cause__ is not None and ": fn raised " in error.message:
                # Here it is no user's mistake: `together` made it of a defect's exception.
                traceback.print_exception(error.__cause__)
            _leave(world, _complaint(error))
        except StoppedBySignal as stopped:
            _leave(world, LastWord(f"burst-rt: {stopped}", 128 + stopped.number))


def same_everywhere(world: Context, what: str, value: str) -> None:
    """Raise ConfigError on every rank unless all ranks have the same `value`. Collective."""
    values = world.all_gather(value)
    for rank, other in enumerate(values):
        if other != values[0]:
            raise ConfigError(
                f"{what} differs between ranks: rank 0 has {values[0]}, rank {rank} has {other}."
            )


def _leave(world: Context, word: LastWord) -> NoReturn:
    # The launcher ends the job when the first rank leaves, so no rank leaves before rank 0 has
    # spoken.
    sys.exit(world.first(lambda: _say(word)))


def _say(word: LastWord) -> int:
    """Tell the launcher, or else whoever reads stderr; return the exit code that is left for the
    rank to give.
    """
    # To mpirun a rank's exit code means that the rank failed, which mpirun says at length.
    # Therefore the launcher gives the code instead.
    if leave_word(word):
        return 0
    tell(word.text)
    return word.exit_code


def _complaint(error: ConfigError | InputError) -> LastWord:
    # Mostly every rank fails alike, and the mistake is in the command: a rank's number would not
    # help.
    text = error.message.removeprefix(f"rank {error.peer}: ")
    return LastWord(f"burst-rt: {type(error).__name__}: {text}", error.exit_code)
