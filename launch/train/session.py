"""The world a job's command runs in, and the way its user hears of a mistake. For: `burst-rt train` and `burst-rt eval`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import burst_rt
from burst_rt.context import Context
from burst_rt.errors import ConfigError, InputError

__all__ = ["job_world"]


@contextmanager
def job_world() -> Iterator[Context]:
    """The context of all ranks. A ConfigError or InputError of the block, which ranks raise alike, is said once and ends the job."""
    with burst_rt.init() as world:
        try:
            yield world
        except (ConfigError, InputError) as error:
            if world.rank == 0:
                print(f"burst-rt: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            # The launcher ends the job with the first rank that leaves: not before rank 0 has spoken.
            world.all_reduce(torch.zeros(1, dtype=torch.int64, device=world.device))
            sys.exit(error.exit_code)
