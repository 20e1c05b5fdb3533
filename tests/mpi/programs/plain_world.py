"""Rank program: steps of plain torch models over the job's ranks, eager and compiled, in all
layouts. Each rank prints "fine" where they are those of one process.
"""

from __future__ import annotations

import torch
from plain_models import Decoder, encoder, errors_between, inputs, over_ranks, plain
from tolerances import ERROR
from torch.utils.checkpoint import checkpoint

import burst_rt

_TOKENS = 13


def main() -> None:
    with burst_rt.init(device="cpu", timeout_s=120) as ctx:
        for make in (Decoder, encoder):
            torch.manual_seed(0)
            model, x = make().double(), inputs(_TOKENS)
            expected = plain(model, x, lambda model, x: model(x))
            ways = {
                "eager": lambda model, x: model(x),
                "checkpointed": lambda model, x: checkpoint(model, x, use_reentrant=False),
                "compiled": lambda model, x: torch.compile(
                    model, backend="aot_eager", fullgraph=True
                )(x),
            }
            for kind in ("zigzag", "contiguous", "striped"):
                for name, way in ways.items():
                    if name == "compiled" and kind != "zigzag":
                        continue  # the layout is data to the program
                    found = over_ranks(ctx, ctx.layout(_TOKENS, kind), model, x, way)
                    errors = errors_between(found, expected)
                    assert max(errors) < ERROR[torch.float64], (make, kind, name, errors)
        print(f"rank {ctx.rank} is fine")


if __name__ == "__main__":
    main()
