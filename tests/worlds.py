"""One attention call spread over ranks, with its results put together again.

The ranks are threads of this process, or processes of a job.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from spec import Attention, errors_of, reference
from tolerances import ERROR

import burst_rt
from burst_rt import Causal, Context, ContextLayout, Mask

__all__ = ["Case", "Inputs", "attend", "attend_over_threads", "check"]


class Inputs(NamedTuple):
    """Whole tensors, the same on every rank."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor


@dataclass(frozen=True)
class Case:
    """One attention call. None for a `kv_` field means the same as for the queries."""

    q_len: int
    kv_len: int | None = None
    heads: int = 2
    kv_heads: int | None = None
    head_dim: int = 16
    v_head_dim: int | None = None
    batch: int = 1
    dtype: torch.dtype = torch.float32
    mask: Mask | None = None
    kind: str = "zigzag"
    kv_kind: str | None = None
    strategy: str = "auto"
    scale: float | None = None
    softcap: float | None = None
    alibi: str = ""  # "heads" or "batch and heads"
    sinks: bool = False  # learned sinks
    lse_grad: bool = True
    needs_grad: tuple[bool, bool, bool] = (True, True, True)
    seed: int = 0

    def inputs(self) -> Inputs:
        """Standard normal numbers, rounded to the case's type (dlse: float32 or float64)."""
        generator = torch.Generator().manual_seed(self.seed)
        q_shape = (self.batch, self.q_len, self.heads, self.head_dim)
        kv_shape = (
            self.batch,
            self.kv_len or self.q_len,
            self.kv_heads or self.heads,
            self.head_dim,
        )
        v_dim = self.v_head_dim or self.head_dim
        q, dout, k, v = (
            torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)
            for shape in (q_shape, (*q_shape[:3], v_dim), kv_shape, (*kv_shape[:3], v_dim))
        )
        dlse = torch.randn(
            (self.batch, self.heads, self.q_len), generator=generator, dtype=torch.float64
        )
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        return Inputs(q, k, v, dout, dlse.to(wide))

    def of_heads(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Slopes between 0 and 1, and sinks like scores, in the type of the sums."""
        generator = torch.Generator().manual_seed(self.seed)
        rows = (self.batch, self.heads) if self.alibi == "batch and heads" else (self.heads,)
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        slopes = torch.rand(rows, generator=generator, dtype=wide)
        sinks = torch.randn(self.heads, generator=generator, dtype=wide)
        return slopes if self.alibi else None, sinks if self.sinks else None

    @property
    def truth(self) -> Attention:
        """What the spec says. Cases of other layouts and strategies share it."""
        return _truth(self.but(kind="zigzag", kv_kind=None, strategy="auto"))

    def but(self, **changes: Any) -> Case:  # any field's type
        """The same case with other values."""
        return replace(self, **changes)

    def layouts(self, ctx: Context) -> tuple[ContextLayout, ContextLayout]:
        """The layouts of queries and of keys."""
        mask = self.mask if self.kind == "balanced" else None
        layout = ctx.layout(self.q_len, self.kind, mask=mask)
        if self.kv_len in (None, self.q_len) and self.kv_kind in (None, self.kind):
            return layout, layout
        return layout, ctx.layout(self.kv_len or self.q_len, self.kv_kind or self.kind)


@lru_cache(maxsize=32)
def _truth(case: Case) -> Attention:
    slopes, sinks = case.of_heads()
    q, k, v, dout, dlse = case.inputs()
    return reference(
        q, k, v, dout, dlse if case.lse_grad else None, mask=case.mask, scale=case.scale,
        softcap=case.softcap, alibi_slopes=slopes, sinks=sinks,
    )  # fmt: skip


def attend(ctx: Context, case: Case, inputs: Inputs | None = None) -> Attention:
    """Runs this rank's part of forward and backward; returns the whole results on every rank.

    Collective: blocks for the other ranks.
    """
    whole = inputs or case.inputs()
    layout, kv_layout = case.layouts(ctx)
    sides = (layout, kv_layout, kv_layout)
    # Shards go to the context's device; what comes back is put together where it can be compared.
    shards = (side.shard(x).to(ctx.device) for side, x in zip(sides, whole[:3], strict=True))
    q, k, v = (x.requires_grad_(needed) for x, needed in zip(shards, case.needs_grad, strict=True))
    slopes, sinks = (None if x is None else x.to(ctx.device) for x in case.of_heads())
    if sinks is not None:
        sinks.requires_grad_(any(case.needs_grad))
    result = burst_rt.burst_attention(
        q, k, v, mask=case.mask, layout=layout, kv_layout=kv_layout, scale=case.scale,
        softcap=case.softcap, alibi_slopes=slopes, sinks=sinks, strategy=case.strategy,
        return_lse=True
    )  # fmt: skip
    assert isinstance(result, tuple)
    out, lse = result
    if any(case.needs_grad):
        loss = (out * layout.shard(whole.dout).to(ctx.device)).sum()
        if case.lse_grad:
            # Rows that see no key have lse = -inf, and no gradient.
            loss = (
                loss
                + (
                    lse.masked_fill(lse.isinf(), 0.0)
                    * layout.shard(whole.dlse, dim=2).to(ctx.device)
                ).sum()
            )
        loss.backward()
    grads = [
        None if x.grad is None else side.unshard(x.grad.cpu())
        for side, x in zip(sides, (q, k, v), strict=True)
    ]
    # A rank has its own share of the gradient of what all ranks hold.
    grads.append(None if sinks is None or sinks.grad is None else ctx.all_reduce(sinks.grad.cpu()))
    return Attention(
        layout.unshard(out.detach().cpu()),
        layout.unshard(lse.detach().cpu(), dim=2),
        *grads,
    )


def attend_over_threads(
    world_size: int, case: Case, **options: Any
) -> Attention:  # options: those of burst_rt.init
    """`attend` on ranks that are threads; checks that all ranks got the same whole results."""
    inputs = case.inputs()
    results = burst_rt.run_local(world_size, lambda ctx: attend(ctx, case, inputs), **options)
    for other in results[1:]:
        for x, y in zip(results[0], other, strict=True):
            assert (x is None) == (y is None)
            assert x is None or y is None or torch.equal(x, y)
    return results[0]


def check(ctx: Context, seed: int) -> None:
    """A small causal call, forward and backward, over the ranks of `ctx`, against the spec."""
    case = Case(60, mask=Causal(), seed=seed)
    errors = errors_of(attend(ctx, case), reference(*case.inputs(), mask=case.mask))
    assert max(errors.values()) < ERROR[torch.float32], errors
