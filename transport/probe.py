"""Does this MPI take device memory? Only a throw-away job tells: the query flag lies, and an MPI
that does not take it crashes.

`python -m burst_rt.transport.probe DEVICE` is a rank of that job: it passes device tensors round a
ring and checks them. `burst-rt doctor` starts it and remembers the answer per host, MPI library and
device, where `burst_rt.init` finds it; a job never probes by itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

__all__ = ["cache_folder", "remember", "remembered"]

_SIZES = (1, 4096, 1 << 20, 1 << 24)
_DEADLINE_S = 20.0


def remembered(library: str, device: str) -> bool | None:
    """What the last probe of this host, MPI library (its version string) and device name said; None
    if there was none.
    """
    try:
        return bool(
            json.loads(_path(library, device).read_text(encoding="utf-8"))["takes_device_memory"]
        )
    except (OSError, ValueError, KeyError):
        return None


def remember(library: str, device: str, answer: bool) -> None:
    """Writes the answer down, for jobs to come. A cache folder that cannot be written is no error:
    the next doctor probes again.
    """
    path = _path(library, device)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_text(
            json.dumps(
                {
                    "host": socket.gethostname(),
                    "library": library,
                    "device": device,
                    "takes_device_memory": answer,
                }
            )
        )
        fresh.replace(path)
    except OSError:
        return


def _path(library: str, device: str) -> Path:
    name = hashlib.blake2b(
        repr((socket.gethostname(), library, device)).encode(), digest_size=8
    ).hexdigest()
    return cache_folder() / f"mpi-device-memory-{name}.json"


def cache_folder() -> Path:
    """Where this user's jobs find what earlier ones have measured. It need not be there."""
    root = os.environ.get("XDG_CACHE_HOME") or Path(
        os.environ.get("HOME") or tempfile.gettempdir(), ".cache"
    )
    return Path(root) / "burst_rt"


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
