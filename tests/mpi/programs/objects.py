"""Rank program: plain data between ranks that are processes, by `Context.all_gather`, `together`
and `first`.

A rank for which all went well leaves a file named after it in the folder `args[0]`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import burst_rt
from burst_rt.errors import ConfigError, InputError


def main() -> None:
    torch.set_num_threads(1)
    with burst_rt.init(timeout_s=60) as ctx:
        last = ctx.world_size - 1
        # More than a piece of a message, from one rank alone.
        value = {"rank": ctx.rank, "bytes": bytes(range(256)) * 20_000 * (ctx.rank == last)}
        gathered = ctx.all_gather(value)
        assert [said["rank"] for said in gathered] == list(range(ctx.world_size))
        assert [len(said["bytes"]) for said in gathered] == [0] * last + [5_120_000]
        assert gathered[last]["bytes"][:256] == bytes(range(256))

        def fail() -> None:
            if ctx.rank == last:
                raise FileNotFoundError(2, "No such file", "book.txt")

        with pytest.raises(ConfigError, match=rf"^rank {last}: .*book\.txt.*accessible") as caught:
            ctx.together(fail)
        assert caught.value.peer == last
        assert ctx.together(lambda: ctx.rank) == ctx.rank
        assert ctx.first(lambda: ["rank", ctx.rank]) == ["rank", 0]
        with pytest.raises(InputError, match=r"^rank 0: first: fn raised ZeroDivisionError"):
            ctx.first(lambda: 1 // 0)
        with pytest.raises(InputError, match=f"^rank {last}: all_gather: expected plain data"):
            ctx.all_gather(torch.zeros(1) if ctx.rank == last else None)
        assert ctx.all_reduce(torch.ones(1)).item() == ctx.world_size  # the context is usable
        Path(sys.argv[1], str(ctx.rank)).touch()


if __name__ == "__main__":
    main()
