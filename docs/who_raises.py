"""Prints which public functions refuse a wrong argument on every rank; docs/errors.md shows it.

A docstring says it: "Collective", or "every rank that waits for this one" where no rank waits
unless an argument is wrong. All other functions are local.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import burst_rt
from burst_rt import recurrence, telemetry

__all__ = ["COLLECTIVE", "LOCAL", "TOLD", "functions", "kind_of", "page"]

COLLECTIVE = "all ranks call it; all raise the same error"
TOLD = "local; if an argument is wrong, the other ranks raise the error in their next call"
LOCAL = "local; only the rank that calls it raises"

# Classes whose objects only functions of burst_rt make, or whose constructors check nothing.
_MADE = {
    "Call", "Context", "ContextLayout", "Explanation", "BurstAttentionFunction", "LayerCosts",
    "LocalRank", "Mask", "Pipeline", "Relation", "ShardedBatch", "Spans", "Stats", "Step",
    "TokenMeter", "TreeRow", "RecurrenceExplanation", "RecurrencePlan",
}  # fmt: skip
# Methods that a user calls with arguments.
_METHODS = {
    "BurstAttention": ("forward",),
    "Context": ("layout", "all_reduce", "all_gather", "together", "first", "pipeline"),
    "ContextLayout": ("shard", "unshard", "positions"),
    "KVCache": ("reserve", "truncate", "reorder", "copy", "step"),
    "Mask": ("from_function", "__and__"),
    "Pipeline": ("run",),
    "PrefixTree": ("window",),
    "ShardedBatch": ("window",),
    "Step": ("attend",),
    "TreeRow": ("spread",),
}


def functions() -> Iterator[tuple[str, Any]]:
    """Every public function that takes a user's arguments, by its name in `burst_rt`."""
    for prefix, room in (("", burst_rt), ("recurrence.", recurrence), ("telemetry.", telemetry)):
        for name in sorted(set(room.__all__) - {"errors", "telemetry", "keep_attention"}):
            made = getattr(room, name)
            if name not in _MADE and inspect.signature(made).parameters:
                yield prefix + name, made
            for method in _METHODS.get(name, ()):
                yield f"{prefix}{name}.{method}", getattr(made, method)


def kind_of(function: Any) -> str:
    """`COLLECTIVE`, `TOLD` or `LOCAL`, as the function's docstring says."""
    said = " ".join((inspect.getdoc(function) or "").split())
    if "Collective" in said:
        return COLLECTIVE
    return TOLD if "every rank that waits for this one" in said else LOCAL


def page() -> str:
    """The list in Markdown."""
    by_kind: dict[str, list[str]] = defaultdict(list)
    for name, function in functions():
        by_kind[kind_of(function)].append(f"`{name}`")
    lines = ["| what | functions |", "|---|---|"]
    return "\n".join(
        [
            *lines,
            *(f"| {kind} | {', '.join(by_kind[kind])} |" for kind in (COLLECTIVE, TOLD, LOCAL)),
        ]
    )


if __name__ == "__main__":
    print(page())
