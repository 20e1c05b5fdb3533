"""Several contexts in one MPI job of 4: the world, two pairs (comm.Split), one rank alone, and some
that fail to start.

A rank for which all went well leaves a file named after it in the folder `args[0]`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from worlds import check

import burst_rt
from burst_rt.errors import ConfigError, ContractMismatch, InputError, PeerLost


def main() -> None:
    torch.set_num_threads(1)
    job = MPI.COMM_WORLD
    halves = job.Split(job.rank // 2)
    with (
        burst_rt.init(job, timeout_s=60) as world,
        burst_rt.init(halves, timeout_s=60) as pair,
        burst_rt.init(MPI.COMM_SELF) as alone,
    ):
        assert (world.world_size, pair.world_size, alone.world_size) == (4, 2, 1)
        for seed in range(3):
            check(world, seed)
            # The pairs attend to other data, and not equally often.
            for _ in range(1 + job.rank // 2):
                check(pair, 10 + seed + job.rank // 2)
            check(alone, 20 + job.rank)
        # The program's own messages on the communicator it gave are still its own.
        assert job.allreduce(1) == 4

        # A disagreement in one pair reaches neither the other nor the world.
        x = torch.zeros(1, 30, 2, 16, device=world.device)
        if job.rank < 2:
            with pytest.raises(ContractMismatch, match="strategy: "):
                burst_rt.burst_attention(
                    x, x, x, layout=pair.layout(60), strategy="burst" if job.rank else "ring-kv"
                )
        check(pair, 1)
        check(world, 1)
        with pytest.raises(InputError, match="must belong to one context"):
            burst_rt.burst_attention(x, x, x, layout=world.layout(60), kv_layout=pair.layout(60))

        refuse_bad_starts(job)
        check(world, 2)

        # A rank leaves one pair: who stays is told, by the rank's number in that pair. The other
        # contexts go on.
        if job.rank == 2:
            pair.close()
        elif job.rank == 3:
            with pytest.raises(PeerLost) as caught:
                check(pair, 1)
            assert caught.value.peer == 0
        else:
            check(pair, 1)
        check(world, 3)
        # Rank 3's broken context ends the job when it exits: all must have written by then.
        Path(sys.argv[1], str(job.rank)).touch()
        job.Barrier()


def refuse_bad_starts(job: MPI.Intracomm) -> None:
    for odd in range(4):
        for name, value in (("stall_s", 5.0), ("kernel", "naive"), ("check_finite", True)):
            # the types of init's options
            options: dict[str, Any] = {name: value} if job.rank == odd else {}
            with pytest.raises(ContractMismatch, match=f"{name}: .* on rank {odd}"):
                burst_rt.init(job, timeout_s=60, **options)
    anything: Any
    for anything in ("world", MPI.COMM_NULL, 3):
        with pytest.raises(ConfigError, match="comm must be an mpi4py intracommunicator, got"):
            burst_rt.init(anything)
    # What a rank gets that is in no group.
    with pytest.raises(ConfigError, match="COMM_NULL"):
        burst_rt.init(job.Split(MPI.UNDEFINED))


main()
