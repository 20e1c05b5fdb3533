"""The world as data x context: ranks of one context group share a sequence, different groups take
different sequences.

For: one mesh of two axes, made of contexts. Not for: tensor or pipeline parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import burst_rt
from burst_rt.context import Context
from burst_rt.launch.train.config import mesh_shape

__all__ = ["Mesh", "open_mesh"]


@dataclass(frozen=True)
class Mesh:
    """`world` reduces gradients, `context` runs attention; this rank's group is the `data_index`-th
    of `data_size`.
    """

    world: Context
    context: Context
    data_index: int
    data_size: int

    def share_of(self, count: int) -> range:
        """Which of `count` sequences this rank's group takes: every `data_size`-th."""
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
    # Only a job of several ranks gets here, and only it needs an MPI library.
    from mpi4py import MPI

    group = MPI.COMM_WORLD.Split(color=world.rank // context_size, key=world.rank)
    try:
        with burst_rt.init(comm=group) as context:
            yield Mesh(world, context, data_index=world.rank // context_size, data_size=data_size)
    finally:
        group.Free()
