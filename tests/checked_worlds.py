"""The ranks of a job for the checks of transports: how messages go, how ends are made."""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from typing import Any, Protocol

from burst_rt.transport import ControlGroup, Transport, meeting

__all__ = ["DEADLINE_S", "CheckedWorld", "this_world"]

DEADLINE_S = 20.0


class CheckedWorld(Protocol):
    """The ranks of a job. Every method is collective, but for `tell` and `hear`."""

    rank: int
    size: int

    def transport(self) -> Transport:
        """A new transport over all ranks."""

    def control(self) -> ControlGroup:
        """A new control group over all ranks."""

    def barrier(self) -> None:
        """Waits for all ranks."""

    def tell(self, peer: int) -> None:
        """Sends a word to a peer."""

    def hear(self, peer: int) -> None:
        """Waits for a peer's word."""

    def progress(self) -> None:
        """Moves whatever has arrived."""


class _Mpi:
    def __init__(self) -> None:
        from mpi4py import MPI

        self._world = MPI.COMM_WORLD
        self.rank, self.size = self._world.rank, self._world.size

    def transport(self) -> Transport:
        from burst_rt.transport.mpi import MpiTransport, duplicate

        return MpiTransport(duplicate(self._world, DEADLINE_S))

    def control(self) -> ControlGroup:
        from burst_rt.transport.mpi import MpiControl, duplicate

        return MpiControl(duplicate(self._world, DEADLINE_S))

    def barrier(self) -> None:
        self._world.Barrier()

    def tell(self, peer: int) -> None:
        self._world.send("a word", peer)

    def hear(self, peer: int) -> None:
        self._world.recv(source=peer)

    def progress(self) -> None:
        self._world.Iprobe()


class _Torch:
    def __init__(self) -> None:
        import torch.distributed as dist

        if "a host each" in sys.argv:
            # Ranks that do not know that they share a host meet over TCP.
            rank = os.environ["RANK"]
            setattr(meeting, "this_host", lambda: f"host-{rank}")  # noqa: B010  (it exports none)
        dist.init_process_group("gloo")
        self._dist: Any = dist  # torch has no types for some of these
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._heard: defaultdict[int, int] = defaultdict(int)
        group: Any = dist.group.WORLD
        self.store: Any = group.get_group_store()

    def transport(self) -> Transport:
        return self._meet()[0]

    def control(self) -> ControlGroup:
        return self._meet()[1]

    def _meet(self) -> tuple[Transport, ControlGroup]:
        ends = meeting.meet(self.store, self.rank, self.size, DEADLINE_S)
        self.barrier()  # no end is to be closed while others still meet
        return ends

    def barrier(self) -> None:
        self._dist.barrier()

    def tell(self, peer: int) -> None:
        self.store.add(f"told {self.rank} {peer}", 1)

    def hear(self, peer: int) -> None:
        self._heard[peer] += 1
        deadline_s = time.monotonic() + DEADLINE_S
        while self.store.add(f"told {peer} {self.rank}", 0) < self._heard[peer]:
            assert time.monotonic() < deadline_s
            time.sleep(0.001)

    def progress(self) -> None:
        """The kernel does."""


def this_world() -> CheckedWorld:
    """The ranks of the job that this process is in."""
    return _Torch() if "TORCHELASTIC_RUN_ID" in os.environ else _Mpi()
