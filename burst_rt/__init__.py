"""burst_rt: exact attention over sequences too long for one device.

    import burst_rt
    ctx = burst_rt.init()
    layout = ctx.layout(seq_len)
    mine = [layout.shard(x) for x in (q, k, v)]
    out = burst_rt.burst_attention(*mine, causal=True, layout=layout)

Public names are loaded when first used, so `import burst_rt.scheduler` needs neither torch nor MPI.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from burst_rt.job import parent as _parent  # noqa: F401  (notes now which process started this one)
from burst_rt.version import __version__ as __version__

if TYPE_CHECKING:
    from burst_rt import errors, telemetry
    from burst_rt.attention.api import BurstAttention, Explanation, burst_attention, explain
    from burst_rt.attention.autograd import BurstAttentionFunction
    from burst_rt.attention.call import Call, make_call
    from burst_rt.attention.checkpointing import checkpoint, keep_attention
    from burst_rt.attention.sharding import ContextLayout, LayerCosts
    from burst_rt.batches import ShardedBatch, shard_batch
    from burst_rt.context import Context, init
    from burst_rt.linear_loss import linear_cross_entropy
    from burst_rt.local import run_local
    from burst_rt.losses import cross_entropy
    from burst_rt.over_ranks import over_ranks
    from burst_rt.planning.masks import (
        BlockSparse,
        Causal,
        Chunked,
        Documents,
        First,
        Full,
        Mask,
        Prefix,
        PrefixTree,
        Relation,
        SlidingWindow,
        Spans,
    )
    from burst_rt.runtime.connections import LocalRank
    from burst_rt.runtime.differentiable import differentiable
    from burst_rt.runtime.gradients import average_gradients
    from burst_rt.runtime.mean import mean_over_ranks
    from burst_rt.runtime.pipeline import Pipeline
    from burst_rt.runtime.stats import Stats
    from burst_rt.runtime.sums import sum_over_ranks
    from burst_rt.serving.cache import KVCache
    from burst_rt.serving.step import Step
    from burst_rt.trees import TreeRow, tree_row

_HOME = {
    "BlockSparse": "planning.masks",
    "BurstAttention": "attention.api",
    "BurstAttentionFunction": "attention.autograd",
    "Call": "attention.call",
    "Causal": "planning.masks",
    "Chunked": "planning.masks",
    "Context": "context",
    "ContextLayout": "attention.sharding",
    "Documents": "planning.masks",
    "Explanation": "attention.api",
    "First": "planning.masks",
    "Full": "planning.masks",
    "KVCache": "serving.cache",
    "LayerCosts": "attention.sharding",
    "LocalRank": "runtime.connections",
    "Mask": "planning.masks",
    "Pipeline": "runtime.pipeline",
    "Prefix": "planning.masks",
    "PrefixTree": "planning.masks",
    "Relation": "planning.masks",
    "SlidingWindow": "planning.masks",
    "ShardedBatch": "batches",
    "Spans": "planning.masks",
    "Stats": "runtime.stats",
    "Step": "serving.step",
    "TreeRow": "trees",
    "average_gradients": "runtime.gradients",
    "burst_attention": "attention.api",
    "checkpoint": "attention.checkpointing",
    "cross_entropy": "losses",
    "differentiable": "runtime.differentiable",
    "explain": "attention.api",
    "init": "context",
    "keep_attention": "attention.checkpointing",
    "linear_cross_entropy": "linear_loss",
    "make_call": "attention.call",
    "mean_over_ranks": "runtime.mean",
    "over_ranks": "over_ranks",
    "run_local": "local",
    "shard_batch": "batches",
    "sum_over_ranks": "runtime.sums",
    "tree_row": "trees",
}

_MODULES = ("errors", "telemetry")
# Names that only this file uses.
_HIDDEN = {"TYPE_CHECKING", "annotations", "import_module"}

__all__ = [
    "BlockSparse", "BurstAttention", "BurstAttentionFunction", "Call", "Causal", "Chunked",
    "Context", "ContextLayout", "Documents", "Explanation", "First", "Full", "KVCache",
    "LayerCosts", "LocalRank", "Mask", "Pipeline", "Prefix", "PrefixTree", "Relation",
    "ShardedBatch", "SlidingWindow", "Spans", "Stats", "Step", "TreeRow",
    "average_gradients", "burst_attention", "checkpoint", "cross_entropy", "differentiable",
    "errors", "explain", "init", "keep_attention", "linear_cross_entropy", "make_call",
    "mean_over_ranks", "over_ranks", "run_local", "shard_batch", "sum_over_ranks", "telemetry",
    "tree_row",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f"burst_rt.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'burst_rt' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"burst_rt.{_HOME[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__} - _HIDDEN)
