"""Whether this MPI takes device memory: a throw-away job tells, and its answer is remembered.

The library's query flag is wrong at times, and an MPI that does not take device memory crashes.
`python -m burst_rt.transport.probe DEVICE` is a rank of that job: it passes device tensors round a
ring and checks them. `burst-rt doctor` starts the job and remembers the answer by host, MPI library
and device. `burst_rt.init` looks the answer up; a job never probes by itself.
"""

from __future__ import annotations

import socket
import sys
import time
from typing import Any

from burst_rt.remembered import recall
from burst_rt.remembered import remember as keep

__all__ = ["last_answer", "note_answer"]

_KIND = "mpi-device-memory"
_SIZES = (1, 4096, 1 << 20, 1 << 24)
_DEADLINE_S = 20.0


def last_answer(library: str, device: str) -> bool | None:
    """The last probe's answer for this host, MPI library and device; None if there was no probe.

    `library` is the MPI library's version string, `device` the device's name.
    """
    answer: bool | None = recall(_KIND, _key(library, device), lambda x: isinstance(x, bool))
    return answer


def note_answer(library: str, device: str, answer: bool) -> None:
    """Writes the answer down for later jobs.

    A cache folder that cannot be written is not an error: the next `burst-rt doctor` probes again.
    """
    keep(_KIND, _key(library, device), answer)


def _key(library: str, device: str) -> dict[str, str]:
    return {"host": socket.gethostname(), "library": library, "device": device}


def _rank(device: str) -> None:
    """Runs one rank: sends to the next rank and receives from the one before.

    Raises, or crashes, where MPI does not take device memory. Blocks at most 20 s for each size.
    """
    import torch
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    synchronize: Any = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    for size in _SIZES:
        mine = torch.full((size,), world.rank, dtype=torch.uint8, device=device)
        other = torch.full_like(mine, 255)
        # MPI starts at once, though the device may not have written the tensors yet.
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
            raise ValueError(f"{size} bytes arrived with wrong values")
    if world.rank == 0:
        print(f"device memory is taken: {max(_SIZES):,} bytes on {device}")


if __name__ == "__main__":
    _rank(sys.argv[1])
