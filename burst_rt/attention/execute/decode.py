"""A decode on tensors: the rank's own block, and the merge of all ranks' blocks.

A block is the `Partial` of a rank's keys, as one stretch of the sums' type: acc, then m, then l.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch

from burst_rt.attention.execute.ring import SlotRun
from burst_rt.kernels import QKV, ScoreTerms, sum_dtype
from burst_rt.kernels.decode import Partial
from burst_rt.planning.masks.spans import Spans
from burst_rt.planning.strategies.decode import Attend, Merge
from burst_rt.runtime.machine import Machine

if TYPE_CHECKING:
    from burst_rt.attention.decode import DecodePlan

__all__ = ["DecodeRun"]


class DecodeRun(SlotRun):
    """One decode. After the run `out` `[batch, q_len, heads, v's head_dim]` holds the result."""

    def __init__(
        self,
        plan: DecodePlan,
        machine: Machine,
        qkv: QKV,
        seen: Spans,
        *,
        scale: float,
        terms: ScoreTerms,
        poison: bool,
    ) -> None:
        super().__init__(plan, machine, poison=poison)
        self._kernel, self._program, self._rank = plan.kernel, plan.program, plan.rank
        self._qkv, self._seen, self._scale, self._terms = qkv, seen, scale, terms
        batch, q_len, heads, _ = qkv.q.shape
        self._shape = (batch, heads, q_len, qkv.v.shape[3])
        wide = sum_dtype(qkv.q.dtype)
        own = self.storage[plan.slots[0].id]
        # The parts lie one after another, and so do the blocks.
        blocks = own.as_strided((plan.program.world_size * own.numel(),), (1,))
        self._blocks = blocks.view(wide).view(plan.program.world_size, -1)
        self.out = self.fresh(batch, q_len, heads, self._shape[3], dtype=qkv.q.dtype)
        self.operations |= {Attend: self._attend, Merge: self._merge}

    def on_device(self) -> dict[int, torch.Tensor]:
        """See `SlotRun.on_device`. One tensor, of which every part is a piece."""
        sizes = [part.size_bytes for part in self._plan.slots]
        whole = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        pieces = whole.split(sizes)
        return {part.id: piece for part, piece in zip(self._plan.slots, pieces, strict=True)}

    def _split(self, blocks: torch.Tensor) -> Partial:
        """acc, m and l of some blocks, `[blocks, batch, heads, q_len, ...]`. Views."""
        rows = prod(self._shape[:3])
        acc, m, l = blocks.split_with_sizes([rows * self._shape[3], rows, rows], 1)  # noqa: E741
        shape = (len(blocks), *self._shape)
        return Partial(acc.view(shape), m.view(shape[:4]), l.view(shape[:4]))

    def _attend(self, _: Attend) -> None:
        acc, m, l = self._split(self._blocks[:1])  # noqa: E741
        into = Partial(acc[0], m[0], l[0])
        self._kernel.decode(self._qkv, self._seen, self._scale, self._terms.softcap, into)

    def _merge(self, _: Merge) -> None:
        # Block j is that of rank (rank + j) % world. Every rank copies the blocks to the order of
        # ranks and then does the same on the same numbers, so all get the same bits.
        acc, m, l = self._split(self._blocks.roll(self._rank, 0))  # noqa: E741
        sinks, top = self._terms.sinks, m.amax(0)
        if sinks is not None:
            top = torch.maximum(top, sinks[:, None])
        # exp(-inf - -inf) would be NaN: such a row has seen no key.
        top = top.clamp_min_(torch.finfo(top.dtype).min)
        weights = torch.exp(m - top)
        total = _sum(l * weights)
        if sinks is not None:
            total = total + torch.exp(sinks[:, None] - top)
        norm = total.masked_fill_(total == 0, 1.0).unsqueeze(-1)
        whole = _sum(acc * weights.unsqueeze(-1)).div_(norm)
        self.out.copy_(whole.transpose(1, 2))


def _sum(parts: torch.Tensor) -> torch.Tensor:
    """The sum over the first dimension, one after another. Overwrites parts[0]."""
    total = parts[0]
    for part in parts[1:]:
        total += part
    return total
