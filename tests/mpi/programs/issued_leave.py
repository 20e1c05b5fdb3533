"""Rank 1 fails (`args[0]`: how) after its call was issued; rank 0 waits for its device as
`.item()` does, and would for ever."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from issued import context_of, exchange_graph

import burst_rt
from burst_rt.runtime.joining import join

how = sys.argv[1]
joined = join(None, None, "cpu", "auto", 60.0)
ctx, device, wire = context_of(joined.control, 60.0)
device.held.add("network")
pipeline = ctx.pipeline(lambda rank: exchange_graph(rank, ctx.world_size))
buffers = {name: torch.zeros(8, dtype=torch.uint8) for name in ("mine", "theirs")}
pipeline.run(buffers=buffers, ops={"work": lambda: None})
if ctx.rank == 1:
    time.sleep(0.5)
    Path("left_at").write_text(str(time.time()), encoding="utf-8")
    try:
        raise burst_rt.errors.DeviceError("the leaver's own error", rank=1)
    except burst_rt.errors.DeviceError as error:
        if how == "dies":
            raise
        # A program may catch its error and do something else; only the other ranks can know that
        # the job is at its end.
        with ctx.runtime._exclusive:
            ctx.runtime._break(error)
if wire.cancelled.wait(60):
    time.sleep(60)
print("the device has ended")
