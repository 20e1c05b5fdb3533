"""Calls of attention, in the fourth of which one rank stops: `stopping_first.py HOW RANK`."""

from __future__ import annotations

import os
import signal
import sys

import torch

import burst_rt
from burst_rt.kernels import KERNELS


def main() -> None:
    how, victim = sys.argv[1], int(sys.argv[2])
    ctx = burst_rt.init(device="cpu", stall_s=2.0, timeout_s=4.0)
    layout = ctx.layout(16 * ctx.world_size)
    q = torch.randn(1, layout.shard_len, 2, 16)

    def call() -> None:
        burst_rt.burst_attention(q, q, q, causal=True, layout=layout)

    def stop(*_: object) -> None:
        print(f"rank {ctx.rank} stops", file=sys.stderr, flush=True)
        if how == "raise":
            raise ValueError("a mistake of the program")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        while True:  # mpirun lets stopped ranks go on before it ends them
            os.kill(os.getpid(), signal.SIGSTOP)

    for _ in range(3):
        call()
    if ctx.rank == victim and how != "end":
        type(KERNELS["cpu"]).forward = stop  # type: ignore[method-assign, assignment]
    call()
    ctx.close()


if __name__ == "__main__":
    main()
