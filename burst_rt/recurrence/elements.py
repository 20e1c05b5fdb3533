"""Recurrences whose state has a decay for each element: Mamba-1's selective scan, and linear ones.

    selective scan       S <- exp(dt A) S + dt x B        out = S C        state `[D, N]`
    linear recurrence    S <- exp(log_a) S + x            out = S          state `[D]`

Within a chunk the tokens go one after another, all chunks at once: nothing is divided by a decay,
so decays of any size are exact. Sources: arXiv 2312.00752 (Mamba), 2402.19427 (RG-LRU).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from burst_rt.planning.recurrences import RecurrenceSizes
from burst_rt.planning.segments import StageFlops
from burst_rt.recurrence.base import SegmentTensors
from burst_rt.recurrence.chunked import ChunkedRecurrence
from burst_rt.recurrence.maps import ELEMENTS, FACTORS, Algebra, Chunks, Reader

__all__ = ["LinearRecurrence", "SelectiveScan"]

Tensor = torch.Tensor


@dataclass(frozen=True)
class _ElementState(ChunkedRecurrence):
    """The base of both: the state is `[batch, D, N]`, the result `[batch, tokens, D]`."""

    algebra: ClassVar[Algebra] = FACTORS
    reader: ClassVar[Reader] = ELEMENTS

    def out_like(self, tokens: tuple[Tensor, ...]) -> Tensor:
        """See `Recurrence.out_like`: x."""
        return tokens[0]

    def flops(self, tokens: tuple[Tensor, ...], shared: tuple[Tensor, ...]) -> StageFlops:
        """See `Recurrence.flops`."""
        _, channels, size = self.state_shape(tokens, shared)
        sizes = RecurrenceSizes(rule="scan", num_heads=channels, key_dim=size, chunk=self.size)
        return sizes.stage_flops

    def _scanned(self, a: Tensor, b: Tensor, c: Tensor, begins: Tensor | None) -> Chunks:
        """The chunks from each token's factor, what it adds, and how it reads: `[batch, tokens, D
        or 1, N]`.
        """
        if begins is not None:
            a = a.masked_fill(begins[:, :, None, None], 0.0)
        missing = -a.shape[1] % self.size
        if missing:  # tokens that change nothing
            a = torch.cat([a, a.new_ones(a.shape[0], missing, *a.shape[2:])], 1)
        a, b, c = (ELEMENTS.cut(x, self.size) for x in (a, b, c))
        products, sums = _Scanned.apply(a, b)  # type: ignore[no-untyped-call]
        return Chunks(
            a=products[:, :, -1].clone(),  # nothing else of them is kept
            b=sums[:, :, -1].clone(),  # states take its place
            q=products * c,
            o=(sums * c).sum(-1),
        )


class _Scanned(torch.autograd.Function):
    """What each token of a chunk has of the state before the chunk, and of the chunk's own tokens.

    `apply(a, b)` -> products of the factors a, and sums, `[chunks, batch, size, D, N]` as a and b.
    As one function: autograd would keep each token's tensors, and copies of all of them.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        products, sums = a.clone(), b.clone()
        for i in range(1, a.shape[2]):
            products[:, :, i].mul_(products[:, :, i - 1])
            sums[:, :, i].addcmul_(a[:, :, i], sums[:, :, i - 1])
        ctx.save_for_backward(a, products, sums)
        return products, sums

    @staticmethod
    def backward(ctx: Any, dproducts: Tensor, dsums: Tensor) -> tuple[Tensor, Tensor]:
        a, products, sums = ctx.saved_tensors
        da, db = dproducts.clone(), dsums.clone()
        for i in range(a.shape[2] - 1, 0, -1):
            # da has the gradient of the product until it has the factor's.
            da[:, :, i - 1].addcmul_(a[:, :, i], da[:, :, i])
            db[:, :, i - 1].addcmul_(a[:, :, i], db[:, :, i])
            da[:, :, i].mul_(products[:, :, i - 1]).addcmul_(db[:, :, i], sums[:, :, i - 1])
        return da, db


@dataclass(frozen=True)
class SelectiveScan(_ElementState):
    """See the module. Tokens: x and dt `[batch, tokens, D]`, B and C `[batch, tokens, N]`.

    Shared: A `[D, N]`.
    """

    name: ClassVar[str] = "selective_scan"

    def state_shape(self, tokens: tuple[Tensor, ...], shared: tuple[Tensor, ...]) -> torch.Size:
        """See `Recurrence.state_shape`."""
        x, _, b, _ = tokens
        return torch.Size((x.shape[0], x.shape[2], b.shape[2]))

    def chunks(self, segment: SegmentTensors) -> Chunks:
        """See `ChunkedRecurrence.chunks`."""
        x, dt, b, c = segment.tokens
        (a,) = segment.shared
        factors = (dt[..., None] * a).exp()
        added = (dt * x)[..., None] * b[:, :, None]
        return self._scanned(factors, added, c[:, :, None], segment.begins)


@dataclass(frozen=True)
class LinearRecurrence(_ElementState):
    """See the module. Tokens: x and log_a `[batch, tokens, D]`. The state has N = 1."""

    name: ClassVar[str] = "linear_recurrence"

    def state_shape(self, tokens: tuple[Tensor, ...], shared: tuple[Tensor, ...]) -> torch.Size:
        """See `Recurrence.state_shape`."""
        batch, _, channels = tokens[0].shape
        return torch.Size((batch, channels, 1))

    def chunks(self, segment: SegmentTensors) -> Chunks:
        """See `ChunkedRecurrence.chunks`."""
        x, log_a = segment.tokens
        one = torch.ones_like(x[:, :, :1, None])
        return self._scanned(log_a.exp()[..., None], x[..., None], one, segment.begins)
