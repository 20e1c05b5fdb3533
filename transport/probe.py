"""Does this MPI take device memory? Only a throw-away job tells: the query flag lies, and an MPI
that does not take it crashes.

`python -m burst_rt.transport.probe DEVICE` is a rank of that job: it passes device tensors round a
ring and checks them. `burst-rt doctor` starts it and remembers the answer per host, MPI library and
device, where `burst_rt.init` finds it; a job never probes by itself.
"""

from __future__ import annotations

import socket
import sys
import time
from typing import Any

from burst_rt.remembered import recall
from burst_rt.remembered import remember as keep

__all__ = ["remember", "remembered"]

_KIND = "mpi-device-memory"
_SIZES = (1, 4096, 1 << 20, 1 << 24)
_DEADLINE_S = 20.0


def remembered(library: str, device: str) -> bool | None:
    """What the last probe of this host, MPI library (its version string) and device name said; None
    if there was none.
    """
    answer = recall(_KIND, _key(library, device))
    return answer if isinstance(answer, bool) else None


def remember(library: str, device: str, answer: bool) -> None:
    """Writes the answer down, for jobs to come. A cache folder that cannot be written is no error:
    the next doctor probes again.
    """
    keep(_KIND, _key(library, device), answer)


def _key(library: str, device: str) -> dict[str, str]:
    return {"host": socket.gethostname(), "library": library, "device": device}


def _rank(device: str) -> None:
    """One rank: sends to the next and receives from the one before; raises, or crashes, where
    device memory is not taken.
    """
    import torch
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    synchronize: Any = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    for size in _SIZES:
        mine = torch.full((size,), world.rank, dtype=torch.uint8, device=device)
        other = torch.full_like(mine, 255)
        # MPI starts when told to, whatever the device is still doing.
        synchronize()
        before = (world.rank - 1) % world.size
        requests = [
            world.Irecv([other, MPI.BYTE], source=before),
            world.Isend([mine, MPI.BYTE], dest=(world.rank + 1) % world.size),
        ]
        deadline_s = time.monotonic() + _DEADLINE_S
        while not MPI.Request.Testall(requests):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{size} bytes have not arrived within {_DEADLINE_S:g} s")
            time.sleep(0.001)
        synchronize()
        if not bool((other == before).all()):
            raise ValueError(f"{size} bytes arrived wrong")
    if world.rank == 0:
        print(f"device memory is taken: {max(_SIZES):,} bytes on {device}")


if __name__ == "__main__":
    _rank(sys.argv[1])
