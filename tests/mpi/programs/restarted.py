"""Rank 1 is killed until the job has been restarted twice."""

from __future__ import annotations

import os
import signal

import burst_rt

times = int(os.environ["BURST_RT_RESTARTS"])
with burst_rt.init(device="cpu") as ctx:
    if times < 2 and ctx.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ctx.all_gather(None)
    if ctx.rank == 0:
        print(f"well after {times} restarts", flush=True)
