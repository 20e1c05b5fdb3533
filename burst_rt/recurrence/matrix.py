"""Recurrences whose state is a matrix a head: decayed linear attention, and delta rules.

For a token with query q, key k, value v, decay exp(g) and strength beta, on the state S `[K, V]`:

    linear attention    S <- exp(g) S + k v^T                              out = scale S^T q
    delta rule          S <- exp(g) S + beta k (v - (exp(g) S)^T k)^T      out = scale S^T q

Within a chunk, D[t, s] = exp(g_{s+1} + ... + g_t). Sums of g are taken in float64: float32 would
lose the small decays behind a large one. Sources: arXiv 2405.21060 (state spaces as linear
attention), 2412.06464 (gated delta rule), 2510.26692 (Kimi delta attention).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.nn.functional import threshold

from burst_rt.planning.recurrences import RecurrenceSizes, Rule
from burst_rt.planning.segments import StageFlops
from burst_rt.recurrence.base import SegmentTensors
from burst_rt.recurrence.chunked import ChunkedRecurrence, Reach
from burst_rt.recurrence.maps import FACTORS, LEAST, MATRICES, ROWS, Algebra, Chunks, Reader

__all__ = ["DeltaRule", "LinearAttention"]

Tensor = torch.Tensor
# exp of it is 0 in every floating type, and sums of it stay finite.
_LOWEST = -1e4


@dataclass(frozen=True)
class _MatrixState(ChunkedRecurrence):
    """The base of both: q, k, v, g and what else has tokens, `[batch, tokens, heads, ...]`.

    scale: of the results.
    """

    reader: ClassVar[Reader] = ROWS
    rule: ClassVar[Rule]
    scale: float = 1.0

    def state_shape(self, tokens: tuple[Tensor, ...], shared: tuple[Tensor, ...]) -> torch.Size:
        """See `Recurrence.state_shape`: `[batch, heads, K, V]`."""
        _, k, v, *_ = tokens
        return torch.Size((v.shape[0], v.shape[2], k.shape[3], v.shape[3]))

    def flops(self, tokens: tuple[Tensor, ...], shared: tuple[Tensor, ...]) -> StageFlops:
        """See `Recurrence.flops`."""
        _, heads, key_dim, value_dim = self.state_shape(tokens, shared)
        sizes = RecurrenceSizes(
            rule=self.rule, num_heads=heads, key_dim=key_dim, value_dim=value_dim, chunk=self.size
        )
        return sizes.stage_flops

    def out_like(self, tokens: tuple[Tensor, ...]) -> Tensor:
        """See `Recurrence.out_like`: v."""
        return tokens[2]

    def _cut(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, times the scale, k and v in chunks, each with v's heads."""
        heads = v.shape[2]
        q, k = _for_heads(q * self.scale, heads), _for_heads(k, heads)
        return ROWS.cut(q, self.size), ROWS.cut(k, self.size), ROWS.cut(v, self.size)


@dataclass(frozen=True)
class LinearAttention(_MatrixState):
    """See the module. Tokens: q, k, v, and g `[batch, tokens, heads]`.

    name: of the public function, which may be a state space's.
    """

    algebra: ClassVar[Algebra] = FACTORS
    rule: ClassVar[Rule] = "linear"
    name: str = "linear_attention"

    def chunks(self, segment: SegmentTensors) -> Chunks:
        """See `ChunkedRecurrence.chunks`."""
        *qkv, g = segment.tokens
        q, k, v = self._cut(*qkv)
        decays = _Decays(g, segment.begins, self.size, q.dtype)
        return Chunks(
            a=decays.through[..., None, None],
            b=(k * decays.until[..., None]).mT @ v,
            q=q * decays.since[..., None],
            o=((q @ k.mT) * decays.pairs) @ v,
        )


@dataclass(frozen=True)
class DeltaRule(_MatrixState):
    """See the module. Tokens: q, k, v, g, and beta `[batch, tokens, heads]`.

    g: `[batch, tokens, heads]`, or `[batch, tokens, heads, K]`: a decay for each key channel.
    normalised: q and k are divided by their lengths first.
    """

    name: ClassVar[str] = "gated_delta_rule"
    algebra: ClassVar[Algebra] = MATRICES
    rule: ClassVar[Rule] = "delta"
    normalised: bool = False

    def chunks(self, segment: SegmentTensors) -> Chunks:
        """See `ChunkedRecurrence.chunks`."""
        q, k, v, g, beta = segment.tokens
        if self.normalised:
            q, k = _normalised(q), _normalised(k)
        q, k, v = self._cut(q, k, v)
        beta = ROWS.cut(beta[..., None], self.size)
        decays = _Decays(g, segment.begins, self.size, q.dtype)
        if decays.by_channel:
            # The decays differ by channel, so they go into the products.
            shared = k[..., None, :, :] * decays.pairs
            overlap, seen = (torch.einsum("...tsk,...tk->...ts", shared, x) for x in (k, q))
            since, until, through = decays.since, decays.until, decays.through
        else:
            overlap, seen = (k @ k.mT) * decays.pairs, (q @ k.mT) * decays.pairs
            since, until = decays.since[..., None], decays.until[..., None]
            through = decays.through[..., None].expand(*decays.through.shape, k.shape[-1])
        # A token's new value is u - w S: its own, less what the state and the tokens before it in
        # the chunk already give for its key. Each needs those before it: a triangular system.
        # The solver takes the diagonal for ones, and reads nothing above it.
        system, later = beta * overlap, (k * until).mT
        u, w = (
            torch.linalg.solve_triangular(system, x, upper=False, unitriangular=True)
            for x in (beta * v, beta * k * since)
        )
        return Chunks(
            a=torch.diag_embed(through) - later @ w,
            b=later @ u,
            q=q * since - seen @ w,
            o=seen @ u,
        )


class _Decays:
    """The decays within chunks, 0 between documents; with one more axis, K, if `by_channel`.

    pairs: D. since: from the state before the chunk to a token. until: from a token to the state
    after the chunk. through: from the state before to the state after. See `Reach` for the shapes.
    """

    def __init__(self, g: Tensor, begins: Tensor | None, size: int, dtype: torch.dtype) -> None:
        self.by_channel, self._dtype = g.ndim == 4, dtype
        g, reach = g.double().clamp(min=_LOWEST), None
        if begins is not None:
            reach = Reach(ROWS, begins, size)
            # A decay at a document's first token meets no state.
            g = g.masked_fill(
                begins[:, :, None, None] if self.by_channel else begins[:, :, None], 0
            )
        axis = -2 if self.by_channel else -1
        sums = ROWS.cut(g, size).cumsum(axis)
        last = sums.narrow(axis, size - 1, 1)
        earlier = torch.ones(size, size, dtype=torch.bool, device=g.device).tril()
        one_document = earlier if reach is None else reach.pairs & earlier
        self.pairs: Tensor = _PairDecays.apply(  # type: ignore[no-untyped-call]
            sums, one_document[..., None] if self.by_channel else one_document, axis, dtype
        )
        self.since = self._exp(sums, None if reach is None else reach.since)
        self.until = self._exp(last - sums, None if reach is None else reach.until)
        self.through = self._exp(last.squeeze(axis), None if reach is None else reach.through)

    def _exp(self, exponents: Tensor, kept: Tensor | None) -> Tensor:
        decays: Tensor = threshold(exponents.to(self._dtype).exp(), LEAST, 0.0)
        if kept is None:
            return decays
        return decays * (kept[..., None] if self.by_channel else kept)


class _PairDecays(torch.autograd.Function):
    """exp(sums of t - sums of s) for each pair of tokens (t, s) of a chunk, where `kept`, else 0.

    As one function: its matrices are the largest of a chunk, and autograd would keep five of each.
    """

    @staticmethod
    def forward(ctx: Any, sums: Tensor, kept: Tensor, axis: int, dtype: torch.dtype) -> Tensor:
        pairs = (sums.unsqueeze(axis) - sums.unsqueeze(axis - 1)).to(dtype)
        # Before the exponential, which would overflow above the diagonal.
        pairs = threshold(pairs.masked_fill_(~kept, -torch.inf).exp_(), LEAST, 0.0, inplace=True)
        ctx.save_for_backward(pairs)
        ctx.axis, ctx.sums_dtype = axis, sums.dtype
        return pairs

    @staticmethod
    def backward(ctx: Any, dpairs: Tensor) -> tuple[Tensor, None, None, None]:
        (pairs,) = ctx.saved_tensors
        product = dpairs * pairs
        rows = product.sum(ctx.axis, dtype=ctx.sums_dtype)
        return rows - product.sum(ctx.axis - 1, dtype=ctx.sums_dtype), None, None, None


def _for_heads(x: Tensor, heads: int) -> Tensor:
    """x with each head once for every head of v that shares it."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], 2)


def _normalised(x: Tensor) -> Tensor:
    """x over its length, with the epsilon of transformers and flash-linear-attention."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
