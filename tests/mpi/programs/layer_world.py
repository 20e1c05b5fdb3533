"""Every way to spread a layer, on the ranks of an MPI job. Rank 0 writes {strategy: every rank's
outcome} to the JSON file `args[0]`.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import torch
from layer_worlds import LayerCase, spread

import burst_rt
from burst_rt.launch.plan.layers import TENSOR_PARALLEL


def main() -> None:
    torch.set_num_threads(1)
    found = {}
    with burst_rt.init(timeout_s=60) as ctx:
        for strategy in (*TENSOR_PARALLEL, "burst", "all-to-all"):
            mine = json.dumps(spread(ctx, LayerCase(strategy))).encode()
            pending = ctx.runtime.collective(
                {"call": "outcomes"}, partial(ctx.runtime.control.allgather, mine)
            )
            found[strategy] = [json.loads(outcome) for outcome in pending.result()]
        if ctx.rank == 0:
            Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


main()
