"""Two contexts of the same two ranks, each with a cache; each rank steps the cache of another one.

A rank for which it ended as promised leaves a file named after it in the folder `args[0]`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch
from mpi4py import MPI

import burst_rt
from burst_rt.errors import Stalled

_TIMEOUT_S = 3.0


def main() -> None:
    job = MPI.COMM_WORLD
    contexts = [burst_rt.init(job, timeout_s=_TIMEOUT_S) for _ in range(2)]
    caches = [
        burst_rt.KVCache(
            ctx, num_layers=1, batch=1, num_kv_heads=1, head_dim=8, capacity=64,
            dtype=torch.float32,
        )
        for ctx in contexts
    ]  # fmt: skip
    other = 1 - job.rank
    start_s = time.monotonic()
    with pytest.raises(Stalled, match=f"rank {other} has not entered it.* the same context"):
        caches[job.rank].step(20)
    assert _TIMEOUT_S <= time.monotonic() - start_s < 3 * _TIMEOUT_S
    assert [cache.lengths for cache in caches] == [(0,), (0,)]
    assert [ctx.stats().bytes_sent for ctx in contexts] == [0, 0]
    Path(sys.argv[1], str(job.rank)).touch()
    job.Barrier()  # broken contexts end the job when a rank exits


main()
