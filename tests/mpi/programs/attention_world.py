"""Attention of many kinds on all ranks of a job; over the transport `args[1]`; rank 0 writes what
came of it to the JSON file `args[0]`.

{"errors": {case: {result: [error, torch's own error]}}, "bytes": {case: [predicted, sent]} of all
ranks, "repeats": bool, "digests": {case with a named strategy: of the results' bits}}
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from mask_truths import FUNCTIONS, Sizes, truth_of
from spec import errors_of, reference, single_process
from worlds import Case, attend

import burst_rt
from burst_rt import Causal, Context, Documents, Mask
from burst_rt.transport import staged

CASES = {
    "full": Case(1000, heads=2, head_dim=64, lse_grad=False),
    "causal": Case(1000, heads=2, head_dim=64, mask=Causal(), lse_grad=False),
    "63 tokens, striped": Case(63, mask=Causal(), kind="striped", strategy="burst", lse_grad=False),
    "a prime, contiguous": Case(
        509,
        heads=4,
        kv_heads=2,
        mask=Causal(),
        kind="contiguous",
        strategy="ring-kv",
        lse_grad=False,
    ),
    "one kv head, three batch rows": Case(
        300, heads=4, kv_heads=1, head_dim=32, batch=3, mask=Causal(), lse_grad=False
    ),
    "few queries": Case(64, kv_len=500, mask=Causal(), strategy="burst", lse_grad=False),
    "few queries, which travel": Case(
        64,
        kv_len=500,
        heads=4,
        kv_heads=2,
        batch=2,
        mask=Causal(),
        strategy="ring-q",
        lse_grad=False,
    ),
    "few keys": Case(500, kv_len=64, mask=Causal(), kv_kind="striped", lse_grad=False),
}
_FUNCTION, _SIZES = "function of rows and heads", Sizes(40, 40, 2)
# Too small, or of a type, for torch's own error to mean something: the table of tolerances.
MORE_CASES = {
    "one token": Case(1, mask=Causal(), strategy="ring-kv"),
    "three tokens": Case(3, mask=Causal(), strategy="burst"),
    "bf16": Case(
        200, heads=4, kv_heads=2, batch=2, dtype=torch.bfloat16, mask=Causal(), strategy="burst"
    ),
    "fp16": Case(200, dtype=torch.float16, strategy="ring-kv"),
    "fp64": Case(200, dtype=torch.float64, mask=Causal()),
    "packed, balanced": Case(
        700,
        heads=4,
        kv_heads=2,
        mask=Causal() & Documents([40, 70, 30, 400, 100, 60]),
        kind="balanced",
        strategy="direct",
    ),
    "a function": Case(
        40, heads=4, kv_heads=2, batch=2, mask=FUNCTIONS[_FUNCTION].mask(_SIZES), strategy="burst"
    ),
    "a function, heads spread": Case(
        40, heads=60, batch=2, mask=FUNCTIONS[_FUNCTION].mask(_SIZES), strategy="all-to-all"
    ),
    "slices": Case(70, heads=120, batch=2, mask=Causal(), strategy="sliced:2"),
    "only v": Case(100, mask=Causal(), needs_grad=(False, False, True), strategy="burst"),
}


def main() -> None:
    torch.set_num_threads(1)
    errors: dict[str, dict[str, list[float]]] = {}
    sent: dict[str, list[int]] = {}
    digests: dict[str, str] = {}
    # Chunks smaller than most messages here, and not a multiple of anything.
    staged.CHUNK_BYTES = 10_007
    with burst_rt.init(timeout_s=60, transport=sys.argv[2]) as ctx:
        for name, case in (CASES | MORE_CASES).items():
            before = ctx.runtime.transport.bytes_sent
            result = attend(ctx, case)
            counts = torch.tensor(
                [_predicted(ctx, case), ctx.runtime.transport.bytes_sent - before]
            )
            sent[name] = ctx.all_reduce(counts).tolist()
            inputs = case.inputs()
            if ctx.rank == 0 and case.strategy != "auto":
                digests[name] = _digest(result)
            if ctx.rank == 0:
                seen: Mask | torch.Tensor | None = case.mask
                if case.mask is not None and not case.mask.has_spans:
                    seen = truth_of(_FUNCTION, _SIZES, case.heads)
                truth = reference(*inputs[:4], inputs.dlse if case.lse_grad else None, mask=seen)
                own = (
                    errors_of(single_process(*inputs[:4], mask=case.mask), truth)
                    if name in CASES
                    else {}
                )
                errors[name] = {
                    field: [error, own.get(field, 0.0)]
                    for field, error in errors_of(result, truth).items()
                }
        repeats = _repeats(ctx)
        if ctx.rank == 0:
            Path(sys.argv[1]).write_text(
                json.dumps(
                    {"errors": errors, "bytes": sent, "repeats": repeats, "digests": digests}
                ),
                encoding="utf-8",
            )


def _digest(result: Iterable[torch.Tensor | None]) -> str:
    bits = hashlib.sha256()
    for x in result:
        if x is not None:
            bits.update(x.detach().flatten().view(torch.uint8).numpy().tobytes())
    return bits.hexdigest()


def _predicted(ctx: Context, case: Case) -> int:
    layout, kv_layout = case.layouts(ctx)
    inputs = case.inputs()
    sides = (layout, kv_layout, kv_layout)
    q, k, v = (
        side.shard(x).to(ctx.device).requires_grad_(need)
        for side, x, need in zip(sides, inputs[:3], case.needs_grad, strict=True)
    )
    plans = burst_rt.explain(
        q, k, v, mask=case.mask, layout=layout, kv_layout=kv_layout, strategy=case.strategy
    )
    return plans.forward.bytes_sent() + (plans.backward.bytes_sent() if plans.backward else 0)


def _repeats(ctx: Context) -> bool:
    """Whether 20 runs give the same bits."""
    case = Case(211, heads=2, mask=Causal(), strategy="burst")
    first = attend(ctx, case)
    for _ in range(19):
        if not all(
            torch.equal(x, y)
            for x, y in zip(first, attend(ctx, case), strict=True)
            if x is not None and y is not None
        ):
            return False
    return True


main()
