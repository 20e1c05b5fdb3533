"""A table of bad calls, each with every rank in turn as the odd one out, and of masks that no rank
can make (then odd is None). What rank r saw goes to `args[0]`/r.json.
With `args[1]` and `args[2]`: so many calls drawn from the table by a seed, instead of all of it.

One entry a case and odd rank: {"case", "odd", "expected", "error", "peer", "message", "elapsed_s",
"bytes", "usable"}.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from bad_masks import DIFFERENT, MISFITS, UNMADE

import burst_rt
from burst_rt import Causal, Context, ContextLayout, Documents, Full, Mask
from burst_rt.errors import BurstError
from burst_rt.scheduler import Graph, GraphBuilder

TOKENS = 24
Call = Callable[["Rank"], object]


@dataclass
class Unhashable(Mask):
    """Not frozen, so without a hash."""

    keys: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Silent(Mask):
    """Without methods of its own."""


@dataclass(frozen=True)
class Broken(Mask):
    """The causal mask, but for one method, which raises."""

    method: str

    def _fail(self, method: str) -> None:
        if method == self.method:
            raise RuntimeError("no answer")

    def relation(self, q: range, kv: range) -> burst_rt.Relation:
        self._fail("relation")
        return Causal().relation(q, kv)

    def allows(self, q_position: Any, kv_position: Any) -> Any:
        self._fail("allows")
        return kv_position <= q_position

    def __hash__(self) -> int:
        self._fail("hash")
        return 0

    def __repr__(self) -> str:
        self._fail("repr")
        return "Broken()"


def neighbours(rank: int, world_size: int) -> Graph:
    """Each rank sends 8 bytes to the next."""
    g = GraphBuilder(rank, world_size)
    send = g.buffer("out", size_bytes=8, initialised=True)
    g.exchange(
        "pass on",
        sends=[(send, (rank + 1) % world_size)],
        recvs=[(g.buffer("in", size_bytes=8), (rank - 1) % world_size)],
        tag=0,
    )
    return g.build()


class Rank:
    """What a call may use: contexts, layouts and good tensors of this rank. `strict` checks that
    inputs are finite.
    """

    def __init__(self, strict: Context, ctx: Context) -> None:
        self.strict, self.ctx = strict, ctx
        self.layout = ctx.layout(TOKENS)
        self.out = self.good(grad=True)
        self.spoiled = self.changed_before_backward()
        self.pipe = ctx.pipeline(lambda rank: neighbours(rank, ctx.world_size))

    def qkv(
        self,
        *,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 8,
        batch: int = 1,
        grad: bool = False,
    ) -> list[torch.Tensor]:
        shapes = [(batch, self.layout.shard_len, h, head_dim) for h in (heads, kv_heads, kv_heads)]
        return [torch.randn(shape).requires_grad_(grad) for shape in shapes]

    def attend(
        self, tensors: list[torch.Tensor] | None = None, /, **changes: Any
    ) -> torch.Tensor:  # anything, some of it wrong
        """A good call, but for the changes."""
        q, k, v = tensors or self.qkv()
        arguments: dict[str, Any] = {"q": q, "k": k, "v": v, "layout": self.layout} | changes
        out: torch.Tensor
        out, *_ = burst_rt.burst_attention(
            arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments
        )
        return out

    def balanced(self, *lengths: int) -> ContextLayout:
        """The layout for packed documents."""
        return self.ctx.layout(TOKENS, "balanced", mask=Causal() & Documents(lengths))

    def good(self, *, grad: bool = False) -> torch.Tensor:
        return burst_rt.burst_attention(*self.qkv(grad=grad), layout=self.layout)

    def changed(self, name: str, change: Callable[[torch.Tensor], object]) -> object:
        """A good call, but for one tensor."""
        tensors = dict(zip("qkv", self.qkv(), strict=True))
        return self.attend(**{name: change(tensors[name])})

    def not_finite(self, name: str, value: float) -> object:
        layout = self.strict.layout(TOKENS)
        tensors = self.qkv()
        tensors["qkv".index(name)][0, 0, 0, 0] = value
        return self.attend(tensors, layout=layout)

    def of(self, *, dtype: torch.dtype = torch.float32, **sizes: Any) -> object:  # those of qkv
        """A good call of other sizes or another type than the other ranks'."""
        return self.attend([x.to(dtype) for x in self.qkv(**sizes)])

    def longer(self) -> object:
        layout = self.ctx.layout(2 * TOKENS)
        x = torch.zeros(1, layout.shard_len, 4, 8)
        return self.attend([x, x[:, :, :2], x[:, :, :2]], layout=layout)

    def needing(self, names: str) -> object:
        return self.attend(
            [x.requires_grad_(name in names) for name, x in zip("qkv", self.qkv(), strict=True)]
        )

    def transformed(self) -> object:
        q, k, v = self.qkv()
        return torch.func.grad(lambda q: self.attend([q, k, v]).sum())(q)

    def changed_before_backward(self) -> torch.Tensor:
        q, k, v = self.qkv(grad=True)
        inner = q * 1
        out = self.attend([inner, k, v])
        with torch.no_grad():
            inner.zero_()
        return out

    def buffers(self) -> dict[str, torch.Tensor]:
        return {"out": torch.zeros(8, dtype=torch.uint8), "in": torch.zeros(8, dtype=torch.uint8)}

    def passed_on(self) -> None:
        self.pipe.run(buffers=self.buffers(), ops={})

    def sent_and_received(self) -> object:
        both = torch.zeros(8, dtype=torch.uint8)
        return self.pipe.run(buffers={"out": both, "in": both}, ops={})

    def negative(self) -> object:
        return self.ctx.all_reduce(torch._neg_view(torch.zeros(2)))

    def backward(self) -> None:
        self.out.sum().backward(retain_graph=True)


def fine(r: Rank) -> object:
    return r.attend()


# Name -> what the odd rank does, while the others make a good call; words of the InputError.
INPUT: dict[str, tuple[Call, str]] = {
    "q without heads": (lambda r: r.changed("q", lambda x: x[:, :, 0]), "q must be a dense tensor"),
    "k with five dimensions": (
        lambda r: r.changed("k", lambda x: x[None]),
        "k must be a dense tensor",
    ),
    "sparse v": (lambda r: r.changed("v", lambda x: x.to_sparse()), "v must be a dense tensor"),
    "integer q": (
        lambda r: r.changed("q", lambda x: x.long()),
        "q must be float64, float32, bfloat16 or float16, got torch.int64",
    ),
    "boolean v": (lambda r: r.changed("v", lambda x: x > 0), "got torch.bool"),
    "complex k": (lambda r: r.changed("k", lambda x: x.to(torch.complex64)), "got torch.complex64"),
    "k of another type than q": (
        lambda r: r.changed("k", lambda x: x.double()),
        "k must have q's dtype torch.float32, got torch.float64",
    ),
    "bf16 v": (
        lambda r: r.changed("v", lambda x: x.bfloat16()),
        "v must have q's dtype torch.float32, got torch.bfloat16",
    ),
    "q on another device": (
        lambda r: r.changed("q", lambda x: x.to("meta")),
        "q must be on cpu, the context's device, got meta",
    ),
    "v on another device": (lambda r: r.changed("v", lambda x: x.to("meta")), "v must be on cpu"),
    "no q": (lambda r: r.attend(q=None), "q must be a torch.Tensor, got NoneType"),
    "a numpy k": (
        lambda r: r.changed("k", lambda x: x.numpy()),
        "k must be a torch.Tensor, got ndarray",
    ),
    "a list for v": (
        lambda r: r.changed("v", lambda x: x.tolist()),
        "v must be a torch.Tensor, got list",
    ),
    "heads that do not divide": (
        lambda r: r.attend(r.qkv(heads=3)),
        "the number of q's heads must be a multiple of the number of k's heads, got 3 and 2",
    ),
    "more kv heads than heads": (
        lambda r: r.attend(r.qkv(kv_heads=8)),
        "multiple of the number of k's heads, got 4 and 8",
    ),
    "v of other heads than k": (
        lambda r: r.changed("v", lambda x: x[:, :, :1]),
        "v must have k's 2 heads, got 1",
    ),
    "k of another head_dim": (
        lambda r: r.changed("k", lambda x: x[..., :4]),
        "k must have q's head_dim 8, got 4",
    ),
    "zero heads": (
        lambda r: r.changed("q", lambda x: x[:, :, :0]),
        "q must have a batch size, a number of heads and a head_dim of at least 1, got shape",
    ),
    "zero kv heads": (
        lambda r: r.attend(r.qkv(kv_heads=0)),
        "k must have a batch size, a number of heads and a head_dim of at least 1",
    ),
    "zero head_dim": (
        lambda r: r.attend(r.qkv(head_dim=0)),
        "q must have a batch size, a number of heads and a head_dim of at least 1",
    ),
    "zero batch rows": (
        lambda r: r.attend(r.qkv(batch=0)),
        "q must have a batch size, a number of heads and a head_dim of at least 1",
    ),
    "k of another batch size": (
        lambda r: r.changed("k", lambda x: torch.cat((x, x))),
        "k must have q's batch size 1, got 2",
    ),
    "a q too long": (
        lambda r: r.changed("q", lambda x: torch.cat((x, x), 1)),
        "tokens, heads, head_dim] (layout: zigzag), got (1, ",
    ),
    "a k too short": (
        lambda r: r.changed("k", lambda x: x[:, 1:]),
        "cut the model's inputs with burst_rt.shard_batch or layout.shard",
    ),
    "the whole sequence": (
        lambda r: r.changed("v", lambda x: torch.zeros(1, TOKENS + 1, 2, 8)),
        f"got (1, {TOKENS + 1}, 2, 8)",
    ),
    "a layout of another length": (
        lambda r: r.attend(layout=r.ctx.layout(3 * TOKENS)),
        f"of {3 * TOKENS} tokens",
    ),
    "a kv_layout of another length": (
        lambda r: r.attend(kv_layout=r.ctx.layout(3 * TOKENS)),
        "(kv_layout: zigzag)",
    ),
    "a kv_layout of another context": (
        lambda r: r.attend(kv_layout=r.strict.layout(TOKENS)),
        "layout and kv_layout must belong to one context",
    ),
    "no layout": (
        lambda r: r.attend(layout=None),
        "layout must come from ctx.layout(...), got NoneType",
    ),
    "a length for a layout": (
        lambda r: r.attend(layout=TOKENS),
        "layout must come from ctx.layout(...), got int",
    ),
    "a word for a layout": (lambda r: r.attend(layout="zigzag"), "got str"),
    "a word for a kv_layout": (
        lambda r: r.attend(kv_layout="zigzag"),
        "kv_layout must come from ctx.layout(...), got str",
    ),
    "the inner layout": (
        lambda r: r.attend(layout=r.layout.map),
        "layout must come from ctx.layout(...), got Layout",
    ),
    "a module without layout": (
        lambda r: burst_rt.BurstAttention()(*r.qkv()),
        "BurstAttention: layout is missing",
    ),
    "an unknown kind of layout": (lambda r: r.ctx.layout(TOKENS, "spiral"), "kind must be one of"),
    "a balanced layout without a mask": (
        lambda r: r.ctx.layout(TOKENS, "balanced"),
        "kind 'balanced' needs mask, the burst_rt.Mask that calls will have",
    ),
    "a layout for other documents": (
        lambda r: r.ctx.layout(TOKENS, "auto", mask=Documents([TOKENS, 1])),
        f"mask does not fit seq_len {TOKENS}: ",
    ),
    "a mask for zigzag": (
        lambda r: r.ctx.layout(TOKENS, "zigzag", mask=Causal()),
        "kind 'zigzag' does not depend on a mask",
    ),
    "a layout of no tokens": (
        lambda r: r.ctx.layout(0),
        "seq_len must be an integer of at least 1 token, got 0",
    ),
    "causal given twice": (
        lambda r: r.attend(causal=True, mask=Causal()),
        "give mask or causal=True, not both",
    ),
    "causal as a word": (
        lambda r: r.attend(causal="yes"),
        "causal must be True or False, got 'yes'",
    ),
    "causal as a number": (lambda r: r.attend(causal=1), "causal must be True or False, got 1"),
    "scale nan": (
        lambda r: r.attend(scale=math.nan),
        "scale must be None or a finite number above 0, got nan",
    ),
    "scale inf": (lambda r: r.attend(scale=math.inf), "got inf"),
    "scale 0": (lambda r: r.attend(scale=0), "finite number above 0, got 0"),
    "scale below 0": (lambda r: r.attend(scale=-0.5), "finite number above 0, got -0.5"),
    "scale as a word": (lambda r: r.attend(scale="0.1"), "got '0.1'"),
    "scale as a flag": (lambda r: r.attend(scale=True), "got True"),
    "scale as a tensor": (lambda r: r.attend(scale=torch.tensor(0.1)), "got tensor(0.1"),
    "softcap 0": (lambda r: r.attend(softcap=0.0), "softcap must be None or a finite number above"),
    "softcap below 0": (lambda r: r.attend(softcap=-50), "finite number above 0, got -50"),
    "softcap nan": (lambda r: r.attend(softcap=math.nan), "finite number above 0, got nan"),
    "softcap inf": (lambda r: r.attend(softcap=math.inf), "finite number above 0, got inf"),
    "softcap as a word": (lambda r: r.attend(softcap="50"), "finite number above 0, got '50'"),
    "softcap as a flag": (lambda r: r.attend(softcap=True), "finite number above 0, got True"),
    "softcap as a tensor": (lambda r: r.attend(softcap=torch.tensor(50.0)), "got tensor(50."),
    "a softcap too small for float32": (
        lambda r: r.attend(softcap=1e-44),
        "softcap, and scale / softcap, must be finite and above 0 in torch.float32",
    ),
    "slopes of the wrong length": (
        lambda r: r.attend(alibi_slopes=torch.ones(2)),
        "alibi_slopes must be a dense tensor of shape (4,) or (1, 4), a number for each of q's",
    ),
    "slopes of another batch size": (
        lambda r: r.attend(alibi_slopes=torch.ones(2, 4)),
        "got torch.strided of shape (2, 4)",
    ),
    "a slope for all heads": (lambda r: r.attend(alibi_slopes=torch.tensor(0.5)), "of shape ()"),
    "a list of slopes": (
        lambda r: r.attend(alibi_slopes=[0.5] * 4),
        "alibi_slopes must be a torch.Tensor of shape (4,) or (1, 4), got list",
    ),
    "slopes that are whole numbers": (
        lambda r: r.attend(alibi_slopes=torch.ones(4, dtype=torch.int32)),
        "alibi_slopes must be float64, float32, bfloat16 or float16, got torch.int32",
    ),
    "sparse slopes": (
        lambda r: r.attend(alibi_slopes=torch.ones(4).to_sparse()),
        "got torch.sparse_coo of shape (4,)",
    ),
    "slopes on another device": (
        lambda r: r.attend(alibi_slopes=torch.ones(4, device="meta")),
        "alibi_slopes must be on cpu, q's device, got meta",
    ),
    "slopes that need gradients": (
        lambda r: r.attend(alibi_slopes=torch.ones(4, requires_grad=True)),
        "alibi_slopes must not require grad",
    ),
    "slopes under documents that move queries": (
        lambda r: r.attend(
            alibi_slopes=torch.ones(4),
            mask=burst_rt.Documents(q_lengths=[10, 14], kv_lengths=[14, 10]),
        ),
        "alibi_slopes go by the distance in the whole sequence",
    ),
    "sinks of the wrong length": (
        lambda r: r.attend(sinks=torch.zeros(2)),
        "sinks must be a dense tensor of shape (4,), a number for each of q's heads",
    ),
    "sinks for each batch row": (
        lambda r: r.attend(sinks=torch.zeros(1, 4)),
        "got torch.strided of shape (1, 4)",
    ),
    "a number for sinks": (lambda r: r.attend(sinks=1.0), "sinks must be a torch.Tensor of shape"),
    "boolean sinks": (lambda r: r.attend(sinks=torch.ones(4) > 0), "got torch.bool"),
    "sinks on another device": (
        lambda r: r.attend(sinks=torch.zeros(4, device="meta")),
        "sinks must be on cpu, q's device, got meta",
    ),
    "nan in sinks, asked to check": (
        lambda r: r.attend(layout=r.strict.layout(TOKENS), sinks=torch.full((4,), math.nan)),
        "sinks must hold finite values",
    ),
    "inf in slopes, asked to check": (
        lambda r: r.attend(layout=r.strict.layout(TOKENS), alibi_slopes=torch.full((4,), math.inf)),
        "alibi_slopes must hold finite values",
    ),
    "dropout": (
        lambda r: r.attend(dropout_p=0.1),
        "dropout_p must be 0, got 0.1: attention is exact here",
    ),
    "dropout as a word": (lambda r: r.attend(dropout_p="no"), "dropout_p must be 0, got 'no'"),
    "an unknown strategy": (
        lambda r: r.attend(strategy="ring"),
        "strategy must be one of ['all-to-all', 'auto', 'bidirectional'",
    ),
    "no strategy": (lambda r: r.attend(strategy=None), "got None"),
    "a list of strategies": (lambda r: r.attend(strategy=["burst"]), "got ['burst']"),
    "a word for a mask": (
        lambda r: r.attend(mask="causal"),
        "mask must be a burst_rt.Mask such as burst_rt.Causal(), got str",
    ),
    "a mask's class": (lambda r: r.attend(mask=Causal), "got type"),
    "a boolean tensor for a mask": (lambda r: r.attend(mask=torch.ones(2, 2) > 0), "got Tensor"),
    "a mask without a hash": (lambda r: r.attend(mask=Unhashable()), "a mask must be hashable"),
    "return_lse as a number": (
        lambda r: r.attend(return_lse=1),
        "return_lse must be True or False, got 1",
    ),
    "a sequence beyond every machine": (lambda r: r.ctx.layout(2**70), "seq_len must be"),
    "a nested q": (
        lambda r: r.changed("q", lambda x: torch.nested.nested_tensor([x[0], x[0, 1:]])),
        "q must be a dense tensor",
    ),
    "a mask that raises when asked": (
        lambda r: r.attend(mask=Broken("relation")),
        "Broken: relation raised RuntimeError: no answer",
    ),
    "a mask that raises when hashed": (
        lambda r: r.attend(mask=Broken("hash")),
        "Broken: hash() raised RuntimeError: no answer",
    ),
    "a mask that raises when printed": (
        lambda r: r.attend(mask=Broken("repr")),
        "Broken: repr() raised RuntimeError: no answer",
    ),
    "a mask that raises at positions": (
        lambda r: r.attend(mask=Broken("allows")),
        "Broken: allows raised RuntimeError: no answer",
    ),
    "a mask without methods": (
        lambda r: r.attend(mask=Silent()),
        "Silent: relation raised NotImplementedError",
    ),
    "a mask that does not say what it is": (
        lambda r: r.attend(mask=Mask()),
        "mask Mask: repr() must show every parameter",
    ),
    "a transform of torch.func": (lambda r: r.transformed(), "torch.func"),
    "what the backward needs, changed": (
        lambda r: r.spoiled.sum().backward(),
        "modified by an inplace operation",
    ),
    "no layout, of another context's call": (
        lambda r: r.attend(layout=None),
        "layout must come from ctx.layout(...), got NoneType",
    ),
    "a layout of another context's call": (
        lambda r: r.attend(layout=r.ctx.layout(3 * TOKENS)),
        f"of {3 * TOKENS} tokens",
    ),
    "a bad layout, of another context's call": (
        lambda r: r.ctx.layout(TOKENS, "spiral"),
        "kind must be one of",
    ),
    "a pipeline without buffers": (
        lambda r: r.pipe.run(buffers=None, ops={}),  # type: ignore[arg-type]
        "buffers must be a mapping",
    ),
    "a pipeline without operations": (
        lambda r: r.pipe.run(buffers=r.buffers(), ops=None),  # type: ignore[arg-type]
        "ops must be a mapping",
    ),
    "a pipeline that sends what it receives": (
        lambda r: r.sent_and_received(),
        "in[0] and out[0] share memory",
    ),
    "all_reduce of a negative view": (lambda r: r.negative(), "a negative view"),
    "nan in k, asked to check": (
        lambda r: r.not_finite("k", math.nan),
        "k must hold finite values",
    ),
    "inf in v, asked to check": (
        lambda r: r.not_finite("v", math.inf),
        "v must hold finite values",
    ),
    "unshard of a list": (
        lambda r: r.layout.unshard([1]),  # type: ignore[arg-type]
        "layout.unshard: expected a tensor, got list",
    ),
    "unshard of another length": (
        lambda r: r.layout.unshard(torch.zeros(1, 1)),
        "layout.unshard: expected",
    ),
    "unshard of a tensor without values": (
        lambda r: r.layout.unshard(r.qkv()[0].to("meta")),
        "dense tensor that holds values",
    ),
    "unshard of what needs gradients": (
        lambda r: r.layout.unshard(r.qkv(grad=True)[0]),
        "pass x.detach()",
    ),
    "all_reduce of bf16": (
        lambda r: r.ctx.all_reduce(torch.zeros(2, dtype=torch.bfloat16)),
        "got torch.bfloat16",
    ),
    "all_reduce of a number": (lambda r: r.ctx.all_reduce(3.0), "got float"),  # type: ignore[arg-type]
}
# Where the others do something else than a forward.
OTHERS: dict[str, Call] = {
    "what the backward needs, changed": lambda r: r.backward(),
    **{name: lambda r: r.passed_on() for name in INPUT if name.startswith("a pipeline")},
}
# Name -> what the odd rank does, what the others do, each good on its own; words of the
# ContractMismatch.
MISMATCH: dict[str, tuple[Call, Call, str]] = {
    "another type": (lambda r: r.of(dtype=torch.float64), fine, "dtype: "),
    "another batch size": (lambda r: r.of(batch=2), fine, "batch: "),
    "more heads": (lambda r: r.of(heads=8), fine, "heads: "),
    "fewer kv heads": (lambda r: r.of(kv_heads=1), fine, "heads: "),
    "another head_dim": (lambda r: r.of(head_dim=16), fine, "head_dim: "),
    "another length": (lambda r: r.longer(), fine, "layout: "),
    "another layout": (
        lambda r: r.attend(layout=r.ctx.layout(TOKENS, "striped")),
        fine,
        "layout: ",
    ),
    "a layout that other documents lead to": (
        lambda r: r.attend(layout=r.balanced(TOKENS - 1, 1)),
        lambda r: r.attend(layout=r.balanced(1, TOKENS - 1)),
        "layout: balanced",
    ),
    "another kv_layout": (
        lambda r: r.attend(kv_layout=r.ctx.layout(TOKENS, "contiguous")),
        fine,
        "kv_layout: ",
    ),
    "another mask": (lambda r: r.attend(mask=Causal()), lambda r: r.attend(mask=Full()), "mask: "),
    "causal on one rank": (lambda r: r.attend(causal=True), fine, "mask: "),
    "another scale": (lambda r: r.attend(scale=0.5), lambda r: r.attend(scale=0.25), "scale: "),
    "a scale on one rank": (lambda r: r.attend(scale=0.5), fine, "scale: "),
    "another head_dim of v": (
        lambda r: r.changed("v", lambda x: x[..., :4]),
        fine,
        "head_dim: ",
    ),
    "another softcap": (
        lambda r: r.attend(softcap=30.0),
        lambda r: r.attend(softcap=50.0),
        "softcap: ",
    ),
    "a softcap on one rank": (lambda r: r.attend(softcap=50.0), fine, "softcap: "),
    "slopes on one rank": (
        lambda r: r.attend(alibi_slopes=torch.ones(4)),
        fine,
        "alibi_slopes: ",
    ),
    "slopes for each batch row on one rank": (
        lambda r: r.attend(alibi_slopes=torch.ones(1, 4)),
        lambda r: r.attend(alibi_slopes=torch.ones(4)),
        "alibi_slopes: ",
    ),
    "sinks on one rank": (lambda r: r.attend(sinks=torch.zeros(4)), fine, "sinks: "),
    "sinks of another type": (
        lambda r: r.attend(sinks=torch.zeros(4, dtype=torch.bfloat16)),
        lambda r: r.attend(sinks=torch.zeros(4)),
        "sinks: ",
    ),
    "sinks that need gradients on one rank": (
        lambda r: r.attend(sinks=torch.zeros(4, requires_grad=True)),
        lambda r: r.attend(sinks=torch.zeros(4)),
        "needs_grad (sinks): ",
    ),
    "another strategy": (
        lambda r: r.attend(strategy="burst"),
        lambda r: r.attend(strategy="ring-kv"),
        "strategy: ",
    ),
    "lse on one rank": (lambda r: r.attend(return_lse=True), fine, "return_lse: "),
    "gradients of q on one rank": (lambda r: r.needing("q"), fine, "needs_grad (q, k, v): "),
    "no gradient of v": (
        lambda r: r.needing("qk"),
        lambda r: r.needing("qkv"),
        "needs_grad (q, k, v): ",
    ),
    "unshard instead": (lambda r: r.layout.unshard(r.qkv()[0]), fine, "call: "),
    "all_reduce instead": (lambda r: r.ctx.all_reduce(torch.zeros(1)), fine, "call: "),
    "backward instead": (lambda r: r.backward(), fine, "call: "),
    "forward instead of backward": (fine, lambda r: r.backward(), "call: "),
    "unshard of other shapes": (
        lambda r: r.layout.unshard(r.qkv(heads=6)[0]),
        lambda r: r.layout.unshard(r.qkv()[0]),
        "other dims: ",
    ),
    "all_reduce of other shapes": (
        lambda r: r.ctx.all_reduce(torch.zeros(3)),
        lambda r: r.ctx.all_reduce(torch.zeros(2)),
        "shape: ",
    ),
}


def under(make: Callable[[], Mask]) -> Call:
    """A call under a mask."""
    return lambda r: r.attend(mask=make())


INPUT |= {name: (under(make), words) for name, (make, words) in MISFITS.items()}
MISMATCH |= {name: (under(a), under(b), "mask: ") for name, (a, b) in DIFFERENT.items()}
# There the others call in the context that checks: the odd rank's own, or not the one that it, too,
# made last.
_IN_STRICT = {
    name for name in INPUT if name.endswith(("asked to check", "of another context's call"))
}


def main() -> None:
    torch.set_num_threads(1)
    entries = []
    # The context made last is the one meant where an argument that should name a context does not.
    with (
        burst_rt.init(timeout_s=20, check_finite=True) as strict,
        burst_rt.init(timeout_s=20) as ctx,
    ):
        r = Rank(strict, ctx)
        for name, odd in drawn(
            [(name, odd) for name in (*INPUT, *MISMATCH) for odd in range(ctx.world_size)]
            + [(name, None) for name in UNMADE]
        ):
            if odd is None:
                make, words = UNMADE[name]
                entries.append(try_case(r, name, odd, "InputError", under(make), fine, words))
            elif name in INPUT:
                bad, words = INPUT[name]
                others: Call = (
                    (lambda r: r.attend(layout=r.strict.layout(TOKENS)))
                    if name in _IN_STRICT
                    else OTHERS.get(name, fine)
                )
                entries.append(try_case(r, name, odd, "InputError", bad, others, words))
            else:
                bad, others, words = MISMATCH[name]
                entries.append(try_case(r, name, odd, "ContractMismatch", bad, others, words))
        r.backward()
        Path(sys.argv[1], f"{ctx.rank}.json").write_text(json.dumps(entries), encoding="utf-8")


def drawn(cases: list[tuple[str, int | None]]) -> list[tuple[str, int | None]]:
    if len(sys.argv) < 4:
        return cases
    return random.Random(int(sys.argv[3])).choices(cases, k=int(sys.argv[2]))


def try_case(
    r: Rank, name: str, odd: int | None, expected: str, bad: Call, others: Call, words: str
) -> dict[str, object]:
    sent = [ctx.runtime.transport.bytes_sent for ctx in (r.ctx, r.strict)]
    entry: dict[str, object] = {
        "case": name,
        "odd": odd,
        "expected": expected,
        "error": None,
        "words": words,
    }
    started_s = time.perf_counter()
    try:
        (bad if odd in (None, r.ctx.rank) else others)(r)
    except BurstError as error:
        entry |= {"error": type(error).__name__, "peer": error.peer, "message": str(error)}
    entry["elapsed_s"] = time.perf_counter() - started_s
    entry["bytes"] = [
        ctx.runtime.transport.bytes_sent - before
        for ctx, before in zip((r.ctx, r.strict), sent, strict=True)
    ]
    entry["usable"] = bool(torch.isfinite(r.good()).all())
    return entry


main()
