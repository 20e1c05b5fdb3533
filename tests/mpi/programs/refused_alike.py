"""Each public function with a wrong argument on one rank, and on all. What rank r saw goes to
`args[0]`/r.json: {"call", "argument", "odd", "outcomes"}, where outcomes are those of all ranks.

An outcome is "fine", or the class of the error. "told" functions count with the next call.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from wrong_arguments import GoodCall, good_calls

import burst_rt
from burst_rt import Context
from burst_rt.errors import BurstError

_LIST = runpy.run_path(str(Path(__file__).resolve().parents[3] / "docs" / "who_raises.py"))
# In a step the layers' calls are made without agreement: one rank alone breaks the context.
_ALL_ONLY = ("Step.attend",)


def _outcome(ctx: Context, call: GoodCall, kind: str, given: dict[str, Any]) -> str:
    try:
        call.function(**given)
        if kind == _LIST["TOLD"]:
            ctx.all_gather("the next call")
    except BurstError as error:
        return type(error).__name__
    return "fine"


def main() -> None:
    kinds = {name: _LIST["kind_of"](function) for name, function in _LIST["functions"]()}
    seen: list[dict[str, Any]] = []
    with burst_rt.init(device="cpu", timeout_s=60, stall_s=20) as ctx:
        torch.manual_seed(0)
        for call in good_calls(ctx):
            odd_ranks = [None] if call.of in _ALL_ONLY else [None, *range(ctx.world_size)]
            for argument in call.arguments:
                for odd in odd_ranks:
                    given = dict(call.arguments)
                    if odd in (None, ctx.rank):
                        given[argument] = object()
                    outcome = _outcome(ctx, call, kinds[call.of], given)
                    outcomes = ctx.all_gather(outcome)
                    seen.append({
                        "call": call.of, "argument": argument, "odd": odd, "kind": kinds[call.of],
                        "outcomes": outcomes,
                    })  # fmt: skip
        Path(sys.argv[1], f"{ctx.rank}.json").write_text(json.dumps(seen), encoding="utf-8")


if __name__ == "__main__":
    main()
