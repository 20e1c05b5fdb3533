"""Rank program on emulated GPUs whose Triton kernels the interpreter runs (`emulated.triton`).

Every call is made three times, the last two by launches that were kept, where they can be. Then
come steps with other documents each, where there is room for few tables. Rank 0 writes `{case:
{"errors": the largest ones, "launches": [by Triton's own way, kept] of each turn}}` to the JSON
file `args[0]`, and `launches` of all kernels under "decode".
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from mask_truths import FUNCTIONS, Sizes, truth_of
from spec import errors_of, reference, relative_error
from worlds import Case, attend

import burst_rt
from burst_rt import Causal, Documents, SlidingWindow
from burst_rt.kernels.triton import kernel, start, tables

_FUNCTION, _SIZES = "function of rows and heads", Sizes(40, 40, 2)
_PLAIN = Case(230, heads=4, kv_heads=2, mask=Causal())
_CASES = {
    "bf16": _PLAIN.but(dtype=torch.bfloat16, head_dim=64, batch=2, strategy="burst"),
    "fp16": _PLAIN.but(dtype=torch.float16, strategy="ring-kv"),
    "fp32, few queries": _PLAIN.but(q_len=40, kv_len=300, strategy="ring-q"),
    "window": _PLAIN.but(mask=SlidingWindow(50, 0), strategy="bidirectional", softcap=5.0),
    "slopes and sinks": _PLAIN.but(alibi="batch and heads", sinks=True, strategy="all-to-all"),
    "packed": _PLAIN.but(
        q_len=300, mask=Causal() & Documents([40, 70, 30, 100, 60]), kind="balanced",
        strategy="direct", dtype=torch.bfloat16,
    ),
    "a function": Case(
        40, heads=4, kv_heads=2, batch=2, mask=FUNCTIONS[_FUNCTION].mask(_SIZES), strategy="burst"
    ),
    "roles": _PLAIN.but(
        q_len=300, dtype=torch.bfloat16, head_dim=128, strategy="burst"
    ),  # of warps, in Gluon
    "v of another head_dim": _PLAIN.but(head_dim=48, v_head_dim=32, strategy="two-level:1"),
}  # fmt: skip
counts: Counter[str] = Counter()


def _counted(name: str, at: str) -> Any:
    plain = getattr(start, at)

    def call(*args: Any) -> Any:
        result = plain(*args)
        counts[name] += result is not False
        return result

    return mock.patch.object(kernel, at, call)


def main() -> None:
    found: dict[str, Any] = {}

    def measure(ctx: burst_rt.Context, name: str, case: Case) -> None:
        counts.clear()
        result = attend(ctx, case)
        of_case = found.setdefault(name, {"errors": {}, "launches": []})
        of_case["launches"].append([counts["own way"], counts["kept"]])
        if ctx.rank == 0:
            for field, error in errors_of(result, _truth(case)).items():
                of_case["errors"][field] = max(error, of_case["errors"].get(field, 0.0))

    with burst_rt.init(timeout_s=300) as ctx:
        with _counted("own way", "start"), _counted("kept", "restart"):
            for name, case in _CASES.items():
                for turn in range(3 if ctx.world_size == 1 else 2):
                    # Without it a rank alone starts kernels on the caller's stream.
                    ctx.attention.poison = turn == 0
                    measure(ctx, name, case)
            with mock.patch.object(tables, "_MOST_TABLES", 3):
                for step in range(4):
                    mask = Causal() & Documents([100 + step, 60, 40 - step])
                    measure(ctx, "other documents", _PLAIN.but(q_len=200, mask=mask))
        errors = {"out": _decode(ctx)}
        from emulated.triton import launched  # Triton, in whose place it steps, comes first

        found["decode"] = {"errors": errors, "launches": dict(launched)}
        if ctx.rank == 0:
            Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


def _decode(ctx: burst_rt.Context) -> float:
    """A prompt, and a token after it: the token's error."""
    tokens, noise = 60, torch.Generator().manual_seed(0)
    whole = torch.randn(3, 1, tokens, 4, 16, generator=noise)
    cache = burst_rt.KVCache(
        ctx, num_layers=1, batch=1, num_kv_heads=4, head_dim=16, capacity=64, dtype=whole.dtype
    )

    def attend(some: torch.Tensor) -> torch.Tensor:
        step = cache.step(some.shape[2])
        q, k, v = (step.cut(x).to(ctx.device) for x in some)
        out = step.attend(0, q, k, v)
        step.commit()
        return out.cpu()

    attend(whole[:, :, :-1])
    q, k, v = whole
    seen = reference(q, k, v, torch.zeros_like(q), mask=Causal()).out[:, -1:]
    return relative_error(attend(whole[:, :, -1:]), seen)


def _truth(case: Case) -> Any:
    if case.mask is None or case.mask.has_spans:
        return case.truth
    return reference(*case.inputs(), mask=truth_of(_FUNCTION, _SIZES, case.heads))


main()
