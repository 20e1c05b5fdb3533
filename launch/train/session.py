"""The world a job's command runs in, and how it ends before its time. For: `burst-rt train` and `burst-rt eval`."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import burst_rt
from burst_rt.context import Context
from burst_rt.errors import ConfigError, InputError
from burst_rt.launch.stopping import LastWord, leave_word

__all__ = ["Stopped", "job_world"]


class Stopped(Exception):
    """A run was asked to stop and has, on every rank, with a checkpoint after `step`."""

    def __init__(self, number: signal.Signals, step: int, folder: Path) -> None:
        super().__init__(f"stopped by {number.name} after step {step}")
        self.number = number
        self.folder = folder


@contextmanager
def job_world() -> Iterator[Context]:
    """The context of all ranks. Stopped, ConfigError or InputError of the block, which ranks raise alike, is said once and ends the job."""
    with burst_rt.init() as world:
        try:
            yield world
        except (ConfigError, InputError) as error:
            _leave(world, LastWord(f"burst-rt: {type(error).__name__}: {error}", error.exit_code))
        except Stopped as stopped:
            ranks = f" -n {world.world_size}" if world.world_size > 1 else ""
            resume = f"burst-rt train{ranks} --resume --out {shlex.quote(str(stopped.folder))}"
            _leave(world, LastWord(f"burst-rt: {stopped}; resume with: {resume}", 128 + stopped.number), to_launcher=True)


def _leave(world: Context, word: LastWord, *, to_launcher: bool = False) -> None:
    code = torch.zeros(1, dtype=torch.int64, device=world.device)
    if world.rank == 0:
        # To mpirun an exit code means that a rank failed, which it says at length; so the launcher is told apart from it.
        told = to_launcher and leave_word(word)
        if not told:
            print(word.text, file=sys.stderr, flush=True)
            code += word.exit_code
    # The launcher ends the job with the first rank that leaves: not before rank 0 has spoken.
    world.all_reduce(code)
    sys.exit(int(code.item()))
