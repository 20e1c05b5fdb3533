"""The world a job's command runs in, and how it ends before its time. For: `burst-rt train` and
`burst-rt eval`.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import torch

import burst_rt
from burst_rt.context import Context
from burst_rt.errors import ConfigError, InputError
from burst_rt.launch.stopping import LastWord, leave_word
from burst_rt.launch.train.folder import resume_command

__all__ = ["Stopped", "job_world"]

_SPEAKING_S = 1.0


class Stopped(Exception):
    """A run was asked to stop and has, on every rank, with a checkpoint after `step`."""

    def __init__(self, number: signal.Signals, step: int, folder: Path) -> None:
        super().__init__(f"stopped by {number.name} after step {step}")
        self.number = number
        self.folder = folder


@contextmanager
def job_world() -> Iterator[Context]:
    """The context of all ranks. Stopped, ConfigError or InputError of the block, which ranks raise
    alike, is said once and ends the job; so does a ConfigError of `init`.
    """
    try:
        world = burst_rt.init()
    except ConfigError as error:
        _leave_alone(error)
    with world:
        try:
            yield world
        except (ConfigError, InputError) as error:
            _leave(world, _complaint(error))
        except Stopped as stopped:
            resume = resume_command(world.world_size, stopped.folder)
            _leave(
                world, LastWord(f"burst-rt: {stopped}; resume with: {resume}", 128 + stopped.number)
            )


def _leave(world: Context, word: LastWord) -> NoReturn:
    code = torch.zeros(1, dtype=torch.int64, device=world.device)
    if world.rank == 0:
        code += _say(word)
    # The launcher ends the job with the first rank that leaves: not before rank 0 has spoken.
    world.all_reduce(code)
    sys.exit(int(code.item()))


def _leave_alone(error: ConfigError) -> NoReturn:
    """Where there is no world: ranks raise alike, and one that knows that it is not the first lets
    the first speak.
    """
    if error.rank in (None, 0):
        sys.exit(_say(_complaint(error)))
    time.sleep(_SPEAKING_S)
    sys.exit(error.exit_code)


def _complaint(error: ConfigError | InputError) -> LastWord:
    return LastWord(f"burst-rt: {type(error).__name__}: {error}", error.exit_code)


def _say(word: LastWord) -> int:
    """Tell the launcher, or else whoever reads; returns the exit code that is left for the rank to
    give.
    """
    # To mpirun an exit code means that a rank failed, which it says at length: the launcher gives
    # it instead.
    if leave_word(word):
        return 0
    print(word.text, file=sys.stderr, flush=True)
    return word.exit_code
