"""Good calls of the public functions, and values that are wrong in nearly every place.

`unit/test_wrong_arguments.py` puts each value in the place of each argument, on one rank.
`mpi/programs/refused_alike.py` gives a wrong argument on one rank of several, and on all.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

import burst_rt
from burst_rt import (
    BlockSparse,
    Causal,
    Chunked,
    Context,
    Documents,
    First,
    Full,
    KVCache,
    LayerCosts,
    Mask,
    Prefix,
    PrefixTree,
    SlidingWindow,
    recurrence,
)
from burst_rt.recurrence import RecurrenceSizes
from burst_rt.scheduler import Graph, GraphBuilder, Op

__all__ = ["WRONG", "GoodCall", "OwnError", "good_calls"]

TOKENS = 8


class OwnError(Exception):
    """What a function that a test gives raises: it is its own, and may pass through."""


class GoodCall(NamedTuple):
    """A call that works. of: the public function, as `burst_rt` names it."""

    of: str
    function: Callable[..., Any]
    arguments: dict[str, Any]
    about: str = ""


def _raises(*args: object, **kwargs: object) -> None:
    raise OwnError


def _ragged() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once a process that these are new
        return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])


def _nested(depth: int) -> list[Any]:
    inner: list[Any] = []
    for _ in range(depth):
        inner = [inner]
    return inner


# Made anew for each call: iterators are used up.
WRONG: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "an empty list": list,
    "[None]": lambda: [None],
    "a list of words": lambda: ["x"],
    "a ragged list": lambda: [[1, 2], [3]],
    "a list below 0": lambda: [-1, 2],
    "a list of NaN": lambda: [math.nan],
    "a deep list": lambda: _nested(50),
    "an empty dict": dict,
    "a dict": lambda: {"a": 1},
    "a tuple of three": lambda: (1, 2, 3),
    "a set": lambda: {1},
    "a range": lambda: range(5),
    "an iterator": lambda: iter([1]),
    "a word": lambda: "x",
    "no word": lambda: "",
    "half a surrogate pair": lambda: "\ud800",
    "bytes": lambda: b"x",
    "0": lambda: 0,
    "3": lambda: 3,
    "-1": lambda: -1,
    "10**30": lambda: 10**30,
    "2**63": lambda: 2**63,
    "1.5": lambda: 1.5,
    "NaN": lambda: math.nan,
    "infinity": lambda: math.inf,
    "True": lambda: True,
    "an object": object,
    "a class": lambda: dict,
    "a module": lambda: torch.nn.Linear(2, 2),
    "named parameters": lambda: torch.nn.Linear(2, 2).named_parameters(),
    "a function of none": lambda: lambda: 1,
    "a function of anything": lambda: lambda *args, **kwargs: None,
    "a function that raises": lambda: _raises,
    "a dtype": lambda: torch.float32,
    "a device": lambda: torch.device("cpu"),
    "a mask": Causal,
    "an array": lambda: np.zeros((1, TOKENS)),
    "an array of objects": lambda: np.array([object()]),
    "a scalar": lambda: torch.tensor(1.0),
    "an integer scalar": lambda: torch.tensor(1),
    "an empty tensor": lambda: torch.empty(0),
    "a tensor of six dimensions": lambda: torch.zeros(2, 3, 4, 5, 6, 7),
    "a meta tensor": lambda: torch.empty(1, TOKENS, 2, 8, device="meta"),
    "meta labels": lambda: torch.empty(1, TOKENS, device="meta", dtype=torch.int64),
    "a sparse tensor": lambda: torch.eye(TOKENS)[:1].to_sparse(),
    "a complex tensor": lambda: torch.zeros(1, TOKENS, 2, 8, dtype=torch.complex64),
    "complex labels": lambda: torch.zeros(1, TOKENS, dtype=torch.complex64),
    "NaN everywhere": lambda: torch.full((1, TOKENS), math.nan),
    "integers": lambda: torch.zeros(1, TOKENS, 2, 8, dtype=torch.int64),
    "booleans": lambda: torch.zeros(1, TOKENS, dtype=torch.bool),
    "8-bit floats": lambda: torch.zeros(1, TOKENS, 2, 8).to(torch.float8_e4m3fn),
    "a nested tensor": _ragged,
    "what requires grad": lambda: torch.zeros(1, TOKENS, 2, 8, requires_grad=True),
}


def good_calls(ctx: Context) -> Iterator[GoodCall]:
    """A call of each public function, with all of its arguments."""
    yield from _attention(ctx)
    yield from _masks()
    yield from _context(ctx)
    yield from _training(ctx)
    yield from _serving(ctx)
    yield from _recurrences(ctx)
    yield GoodCall("telemetry.step", burst_rt.telemetry.step, {"number": 1})
    yield GoodCall("telemetry.span", burst_rt.telemetry.span, {"name": "optimizer"})


def _attention(ctx: Context) -> Iterator[GoodCall]:
    layout = ctx.layout(TOKENS)
    q, k, v = (torch.randn(1, layout.shard_len, 2, 8) for _ in range(3))
    options: dict[str, Any] = {
        "layout": layout, "kv_layout": None, "mask": None, "causal": False, "scale": None,
        "softcap": None, "alibi_slopes": None, "sinks": None, "dropout_p": 0.0,
        "strategy": "auto", "return_lse": False,
    }  # fmt: skip
    qkv = {"q": q, "k": k, "v": v}
    yield GoodCall("burst_attention", burst_rt.burst_attention, qkv | options)
    yield GoodCall("explain", burst_rt.explain, qkv | options)
    yield GoodCall("make_call", burst_rt.make_call, qkv | options | {"needs_grad": None})
    fixed = {"layout", "mask", "causal", "scale", "softcap", "strategy"}
    yield GoodCall(
        "BurstAttention.forward",
        lambda **given: burst_rt.BurstAttention(**given)(q, k, v),
        {name: value for name, value in options.items() if name in fixed},
        "options",
    )
    yield GoodCall(
        "BurstAttention.forward",
        burst_rt.BurstAttention(layout).forward,
        qkv | dict.fromkeys(("layout", "kv_layout", "alibi_slopes", "sinks")),
    )
    around = {"ctx": ctx, "layout": layout, "mask": None, "strategy": "auto"}
    yield GoodCall("over_ranks", burst_rt.over_ranks, around)
    yield GoodCall("checkpoint", burst_rt.checkpoint, {"function": list, "use_reentrant": False})


def _masks() -> Iterator[GoodCall]:
    yield GoodCall("SlidingWindow", SlidingWindow, {"left": 2, "right": 0})
    yield GoodCall("Prefix", Prefix, {"length": 2})
    yield GoodCall("First", First, {"count": 2})
    yield GoodCall("Chunked", Chunked, {"size": 2})
    yield GoodCall("Documents", Documents, {"lengths": [3, 5], "kv_lengths": None})
    yield GoodCall("Documents", Documents, {"ids": [0, 0, 1]}, "ids")
    yield GoodCall("Documents", Documents, {"cu_seqlens": [0, 3, 8]}, "sums")
    yield GoodCall("Documents", Documents, {"position_ids": [0, 1, 0]}, "positions")
    yield GoodCall("BlockSparse", BlockSparse, {"table": [[True]], "block": 8})
    tree = {"lengths": [3, 5], "parents": [-1, 0], "tokens": None}
    yield GoodCall("PrefixTree", PrefixTree, tree)
    yield GoodCall("PrefixTree.window", PrefixTree([3, 5], [-1, 0]).window, {"left": 2})
    yield GoodCall(
        "Mask.from_function",
        Mask.from_function,
        {"function": lambda batch, head, q, kv: q >= kv, "within": None, "key": None},
    )
    yield GoodCall("Mask.__and__", Causal().__and__, {"other": Full()})


def _context(ctx: Context) -> Iterator[GoodCall]:
    documents = Documents([3, 5])
    sizes = {"heads": (2, 2), "head_dim": 8, "dtype": torch.float32}
    plain: dict[str, Any] = {
        "seq_len": TOKENS, "kind": "zigzag", "mask": None, "heads": None, "head_dim": None,
        "dtype": None, "recurrences": (), "token_cells": None,
    }  # fmt: skip
    yield GoodCall("Context.layout", ctx.layout, plain)
    whole = plain | sizes | {"kind": "whole", "mask": documents, "token_cells": 1.0}
    yield GoodCall("Context.layout", ctx.layout, whole, "whole")
    recurrences = [RecurrenceSizes(rule="delta", num_heads=2)]
    auto = plain | sizes | {"kind": "auto", "mask": documents, "recurrences": recurrences}
    yield GoodCall("Context.layout", ctx.layout, auto, "auto")
    rule: dict[str, Any] = {"rule": "delta", "num_heads": 2, "key_dim": 1}
    yield GoodCall("recurrence.RecurrenceSizes", RecurrenceSizes, rule)
    layout = ctx.layout(TOKENS)
    x = torch.randn(1, TOKENS, 4)
    yield GoodCall("ContextLayout.shard", layout.shard, {"x": x, "dim": 1})
    mine = layout.shard(x)
    yield GoodCall("ContextLayout.unshard", layout.unshard, {"x": mine, "dim": 1})
    yield GoodCall("ContextLayout.positions", layout.positions, {"rank": 0})
    yield GoodCall("Context.all_reduce", ctx.all_reduce, {"x": torch.zeros(2)})
    yield GoodCall("Context.all_gather", ctx.all_gather, {"value": 3})
    yield GoodCall("Context.together", ctx.together, {"fn": lambda: 1})
    yield GoodCall("Context.first", ctx.first, {"fn": lambda: 1})

    def build(rank: int) -> Graph:
        g = GraphBuilder(rank, ctx.world_size, lanes=ctx.lanes)
        g.compute("do", Op("f", ()), writes=[g.buffer("x", size_bytes=8)])
        return g.build()

    yield GoodCall("Context.pipeline", ctx.pipeline, {"build": build})
    yield GoodCall(
        "Context.pipeline",
        lambda graph: ctx.pipeline(lambda rank: build(rank) if graph == "good" else graph),
        {"graph": "good"},
        "its graph",
    )
    pipeline = ctx.pipeline(build)
    run: dict[str, Any] = {"buffers": {}, "ops": {"f": lambda: None}}
    yield GoodCall("Pipeline.run", pipeline.run, run)
    yield GoodCall(
        "Pipeline.run",
        lambda op: pipeline.run(buffers={}, ops={"f": op}),
        {"op": lambda: None},
        "an operation",
    )


def _training(ctx: Context) -> Iterator[GoodCall]:
    ids = torch.zeros(1, TOKENS, dtype=torch.int64)
    given: dict[str, Any] = {"layout": "auto", "costs": None, "check": True}
    yield GoodCall(
        "shard_batch", burst_rt.shard_batch, {"batch": {"input_ids": ids}, "ctx": ctx} | given
    )
    packed = {"input_ids": ids, "cu_seq_lens_q": torch.tensor([0, 3, TOKENS])}
    yield GoodCall(
        "shard_batch",
        lambda **costs: burst_rt.shard_batch(packed, ctx, "whole", costs=LayerCosts(**costs)),
        {"heads": None, "head_dim": None, "dtype": None, "token_cells": None},
        "LayerCosts",
    )
    whole = {
        "input_ids": ids, "labels": ids, "loss_weights": ids, "attention_mask": ids + 1,
        "position_ids": ids, "token_type_ids": ids, "mm_token_type_ids": ids,
    }  # fmt: skip
    batches = (
        ("a batch", whole),
        ("bounds", packed | {"cu_seq_lens_k": packed["cu_seq_lens_q"]}),
        ("embeddings", {"inputs_embeds": torch.zeros(1, TOKENS, 4), "shift_labels": ids}),
        ("a tree", {"input_ids": ids, "prefix_tree": PrefixTree([3, 5], [-1, 0])}),
    )
    for about, batch in batches:
        yield GoodCall(
            "shard_batch", lambda **given: burst_rt.shard_batch(given, ctx), dict(batch), about
        )
    mine = burst_rt.shard_batch({"input_ids": ids, "labels": ids}, ctx)
    yield GoodCall("ShardedBatch.window", mine.window, {"left": 2, "right": 0})
    labels = mine.shift_labels
    assert labels is not None
    tokens = (1, labels.shape[1])
    in_ctx: dict[str, Any] = {"labels": labels, "weights": None, "group": ctx, "count": None}
    logits = torch.randn(*tokens, 5)
    yield GoodCall("cross_entropy", burst_rt.cross_entropy, {"logits": logits} | in_ctx)
    yield GoodCall(
        "linear_cross_entropy",
        burst_rt.linear_cross_entropy,
        {
            "hidden": torch.randn(*tokens, 4), "weight": torch.randn(5, 4), "bias": None,
            "scale": 1.0, "softcap": None, "label_smoothing": 0.0, "z_loss": 0.0,
            "ignore_index": -100,
        } | in_ctx,
    )  # fmt: skip
    values = {"values": torch.randn(3), "weights": None, "group": ctx, "count": None}
    yield GoodCall("mean_over_ranks", burst_rt.mean_over_ranks, values)
    yield GoodCall("sum_over_ranks", burst_rt.sum_over_ranks, {"x": torch.randn(3), "group": ctx})
    parameters = [torch.nn.Parameter(torch.ones(2))]
    yield GoodCall(
        "average_gradients",
        burst_rt.average_gradients,
        {"parameters": parameters, "group": ctx},
    )
    yield GoodCall(
        "differentiable",
        lambda forward, backward: burst_rt.differentiable(forward, backward)(logits),
        {"forward": lambda x: (x * 2, ()), "backward": lambda kept, grad: grad},
    )
    rows = [[1, 2, 3], [1, 2, 4]]
    tree = {"sequences": rows, "labels": rows, "weights": [1.0, 1.0], "shared": [1, 1]}
    yield GoodCall("tree_row", burst_rt.tree_row, tree)
    row = burst_rt.tree_row(rows)
    yield GoodCall("TreeRow.spread", row.spread, {"values": rows})
    yield GoodCall(
        "TreeRow.spread", lambda first: row.spread([first, rows[0]]), {"first": rows[0]}, "one"
    )


def _serving(ctx: Context) -> Iterator[GoodCall]:
    made: dict[str, Any] = {
        "ctx": ctx, "num_layers": 1, "batch": 1, "num_kv_heads": 2, "head_dim": 8, "capacity": 64,
        "dtype": torch.float32, "v_head_dim": None, "block": 4,
    }  # fmt: skip
    yield GoodCall("KVCache", KVCache, made)
    cache = KVCache(**made)

    def step(**given: Any) -> None:
        cache.reset()
        cache.step(**given)

    def attend(**given: Any) -> None:
        cache.reset()
        cache.step(2, sharded=False).attend(**given)

    yield GoodCall("KVCache.reserve", lambda capacity: cache.reserve(capacity), {"capacity": 64})
    yield GoodCall("KVCache.truncate", cache.truncate, {"lengths": 0})
    yield GoodCall("KVCache.reorder", cache.reorder, {"rows": [0]})
    copied = {"row": 0, "source": cache, "source_row": 0, "tokens": None}
    yield GoodCall("KVCache.copy", cache.copy, copied)
    given = {"tokens": 2, "padding": None, "sharded": None, "about": ""}
    yield GoodCall("KVCache.step", step, given)
    q = torch.randn(1, 2, 2, 8)
    of_layer = {
        "layer": 0, "q": q, "k": q, "v": q, "mask": None, "scale": None, "softcap": None,
        "sinks": None, "strategy": "auto",
    }  # fmt: skip
    yield GoodCall("Step.attend", attend, of_layer)


def _recurrences(ctx: Context) -> Iterator[GoodCall]:
    layout = ctx.layout(TOKENS, "contiguous")
    tokens = layout.shard_len
    q, k, v = (torch.randn(1, tokens, 2, 8) for _ in range(3))
    g = -torch.rand(1, tokens, 2)
    x, log_a = torch.randn(1, tokens, 4), -torch.rand(1, tokens, 4)
    b, c = (torch.randn(1, tokens, 3) for _ in range(2))
    tensors: dict[str, dict[str, Any]] = {
        "causal_conv1d": {"x": x, "weight": torch.randn(4, 3), "bias": None, "activation": None},
        "gated_delta_rule": {
            "q": q, "k": k, "v": v, "g": g, "beta": g.exp(), "scale": None, "use_qk_l2norm": False,
        },
        "linear_attention": {"q": q, "k": k, "v": v, "g": g, "scale": None},
        "state_space": {"x": v, "dt": g.exp(), "A": -torch.rand(2), "B": k, "C": q, "D": None},
        "selective_scan": {
            "x": x, "dt": log_a.exp(), "A": -torch.rand(4, 3), "B": b, "C": c, "D": None,
        },
        "linear_recurrence": {"x": x, "log_a": log_a},
    }  # fmt: skip
    rest = {
        "layout": layout, "documents": None, "initial_state": None, "return_state": False,
    }  # fmt: skip
    for name, own in tensors.items():
        yield GoodCall(f"recurrence.{name}", getattr(recurrence, name), own | rest)
    rule = recurrence.gated_delta_rule
    yield GoodCall(
        "recurrence.explain_recurrence",
        lambda function, **given: recurrence.explain_recurrence(function, **given),
        {"function": rule} | tensors["gated_delta_rule"] | {"layout": layout},
    )
