"""Several contexts in one job of torchrun's, 4 ranks: all, both axes of a mesh of 2 x 2, a group of
one, and some that fail to start.

A rank for which all went well leaves a file named after it in the folder `args[0]`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from worlds import check

import burst_rt
from burst_rt.errors import ContractMismatch, InputError, PeerLost


def main() -> None:
    torch.set_num_threads(1)
    # Before there is any group of the program's: the processes find each other by themselves.
    with burst_rt.init(timeout_s=60) as early:
        assert early.world_size == 4
        check(early, 0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    rank = dist.get_rank()
    alone = [dist.new_group([each]) for each in range(4)][rank]
    with (
        burst_rt.init(timeout_s=60) as world,
        burst_rt.init(group=mesh["cp"], timeout_s=60) as cp,
        burst_rt.init(group=mesh["dp"].get_group(), timeout_s=60) as dp,
        burst_rt.init(group=alone) as single,
    ):
        sizes = [ctx.world_size for ctx in (world, cp, dp, single)]
        assert sizes == [4, 2, 2, 1]
        assert [world.rank, cp.rank, dp.rank, single.rank] == [rank, rank % 2, rank // 2, 0]
        for seed in range(3):
            check(world, seed)
            # The axes attend to other data, and not equally often.
            for _ in range(1 + rank // 2):
                check(cp, 10 + seed + rank // 2)
            for _ in range(1 + rank % 2):
                check(dp, 20 + seed + rank % 2)
            check(single, 30 + rank)
        # The program's own collectives are still its own.
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total == 4

        # A disagreement in one group reaches no other, and an argument that is wrong on one rank is
        # an error where the others wait.
        x = torch.zeros(1, 30, 2, 16, device=world.device)
        if rank < 2:
            with pytest.raises(ContractMismatch, match="strategy: "):
                burst_rt.burst_attention(
                    x, x, x, layout=cp.layout(60), strategy="burst" if rank else "ring-kv"
                )
        check(cp, 1)
        wrong: Any = 7 if rank == 2 else dp.layout(60)
        if rank % 2 == 0:
            with pytest.raises(InputError, match="layout"):
                burst_rt.burst_attention(x, x, x, layout=wrong)
        check(dp, 1)
        check(world, 1)
        for odd in range(4):
            options: dict[str, Any] = {"stall_s": 5.0} if rank == odd else {}
            with pytest.raises(ContractMismatch, match=f"stall_s: .* on rank {odd}"):
                burst_rt.init(timeout_s=60, **options)
        check(world, 2)

        # A rank leaves one group: who stays is told. The other contexts go on.
        if rank == 2:
            cp.close()
        elif rank == 3:
            with pytest.raises(PeerLost) as caught:
                check(cp, 1)
            assert caught.value.peer == 0
        else:
            check(cp, 1)
        check(world, 3)
        # Rank 3's broken context ends the job when it exits: all must have written by then.
        Path(sys.argv[1], str(rank)).touch()
        dist.barrier()


main()
