"""A decode on tensors: the rank's own block, and the merge of all ranks' blocks.

A block is the `Partial` of a rank's keys, as one stretch of the sums' type: acc, then m, then l.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch

from burst_rt.attention.execute.ring import SlotRun
from burst_rt.kernels import QKV, ScoreTerms, sum_dtype
from burst_rt.kernels.decode import Partial, Seen
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
        seen: Seen,
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
        self._acc, self._m, self._l = self._blocks(sum_dtype(qkv.q.dtype))
        self.out = self.fresh(batch, q_len, heads, self._shape[3], dtype=qkv.q.dtype)
        self.operations |= {Attend: self._attend, Merge: self._merge}

    def on_device(self) -> dict[int, torch.Tensor]:
        """See `SlotRun.on_device`. One tensor, of which every part is a piece."""
        sizes = [part.size_bytes for part in self._plan.slots]
        whole = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        pieces = whole.split(sizes)
        return {part.id: piece for part, piece in zip(self._plan.slots, pieces, strict=True)}

    def _blocks(self, wide: torch.dtype) -> Partial:
        """acc, m and l of all blocks, `[world, batch, heads, q_len, ...]`. Views of the slots.

        Block j is that of rank (rank + j) % world.
        """
        views, part = self.slots.views, self._plan.slots[0].id
        names = [(part, number) for number in range(len(Partial._fields))]
        if names[0] not in views:
            own, world = self.storage[part], self._program.world_size
            # The parts lie one after another, and so do the blocks.
            blocks = own.as_strided((world * own.numel(),), (1,)).view(wide).view(world, -1)
            rows = prod(self._shape[:3])
            acc, m, l = blocks.split_with_sizes([rows * self._shape[3], rows, rows], 1)  # noqa: E741
            for name, x, shape in zip(
                names, (acc, m, l), (self._shape, self._shape[:3], self._shape[:3]), strict=True
            ):
                views[name] = x.view(world, *shape)
        return Partial(*(views[name] for name in names))

    def _attend(self, _: Attend) -> None:
        into = Partial(self._acc[0], self._m[0], self._l[0])
        self._kernel.decode(self._qkv, self._seen, self._scale, self._terms.softcap, into)

    def _merge(self, _: Merge) -> None:
        acc, l, sinks = self._acc, self._l, self._terms.sinks  # noqa: E741
        if len(acc) == 1 and sinks is None:
            whole, total = acc[0], l[0]
        else:
            # The same strides on every rank, because with others `exp` may round otherwise.
            m = self._m.roll(self._rank, 0)  # by rank
            top = m.amax(0)
            if sinks is not None:
                top = torch.maximum(top, sinks[:, None])
            # exp(-inf - -inf) would be NaN: such a row has seen no key.
            top = top.clamp_min_(torch.finfo(top.dtype).min)
            weights = (m - top).exp_()
            total, whole = self._sum(l, weights), self._sum(acc, weights.unsqueeze(-1))
            if sinks is not None:
                total += torch.exp(sinks[:, None] - top)
        # A row that has seen no key has acc = 0 and l = 0.
        norm = total.clamp_min(torch.finfo(total.dtype).tiny).unsqueeze(-1)
        torch.div(whole, norm, out=self.out.transpose(1, 2))

    def _sum(self, blocks: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sum of all blocks. weights: by rank.

        Every rank does the same on the same numbers in one order, so all get the same bits.
        """
        by_rank = (blocks[(rank - self._rank) % len(blocks)] for rank in range(len(blocks)))
        (block, weight), *later = zip(by_rank, weights, strict=True)
        total: torch.Tensor = block * weight
        for block, weight in later:
            total.addcmul_(block, weight)
        return total
