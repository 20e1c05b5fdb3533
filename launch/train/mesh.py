"""The ranks of a run as data x context: groups that share a sequence, and groups of groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import burst_rt
from burst_rt.context import Context
from burst_rt.job import launched
from burst_rt.launch.train.config import mesh_shape

__all__ = ["Mesh", "open_mesh"]


@dataclass(frozen=True)
class Mesh:
    """The world as data x context: the ranks of one context group share a sequence, and different
    groups take different sequences.
    """

    # Reduces gradients.
    world: Context
    # Runs attention.
    context: Context
    # The number of this rank's group, of `data_size` groups.
    data_index: int
    data_size: int

    def share_of(self, count: int) -> range:
        """The sequences, among `count`, that this rank's group takes: every `data_size`-th."""
        return range(self.data_index, count, self.data_size)


@contextmanager
def open_mesh(world: Context, context_parallel: int | None) -> Iterator[Mesh]:
    """Split `world` into context groups of neighbouring ranks, for as long as the block runs.
    Collective: blocks until all arrive.
    """
    data_size, context_size = mesh_shape(world.world_size, context_parallel)
    if data_size == 1:
        yield Mesh(world, world, data_index=0, data_size=1)
        return
    data_index = world.rank // context_size
    with (
        _neighbours(data_size, context_size, world.rank) as chosen,
        burst_rt.init(**chosen) as context,
    ):
        yield Mesh(world, context, data_index=data_index, data_size=data_size)


@contextmanager
def _neighbours(data_size: int, context_size: int, rank: int) -> Iterator[dict[str, Any]]:
    """This rank's group of neighbours, as `burst_rt.init` takes it, until the end of the block.

    Collective over the job, whose ranks are processes of MPI or of torchrun.
    """
    # Only a job of several ranks gets here, and only such a job needs an MPI library, or a group.
    if launched.mpi_ranks() == 1 and launched.torchrun_ranks() > 1:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        dist.init_process_group("gloo")
        try:
            shape, names = (data_size, context_size), ("data", "context")
            yield {"group": init_device_mesh("cpu", shape, mesh_dim_names=names)["context"]}
        finally:
            dist.destroy_process_group()
        return
    from mpi4py import MPI

    group = MPI.COMM_WORLD.Split(color=rank // context_size, key=rank)
    try:
        yield {"comm": group}
    finally:
        group.Free()
