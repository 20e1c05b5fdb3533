"""Running a hybrid: the ring works on tensors gathered over the group, which are made from and cut
into pieces that go to one member each.

A piece is one member's tokens with one member's heads: of a rank's own tensors (local: its tokens,
all heads) the heads of the member it goes to or comes from; of a gathered tensor (whole: the
group's tokens, its own heads) that member's tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import torch

from burst_rt.attention.execute.ring import BackwardRun, ForwardRun, Run, dense
from burst_rt.attention.planner import Plan
from burst_rt.planning.strategies import Hybrid, Ring, on_query_side

__all__ = ["HybridBackwardRun", "HybridForwardRun"]

# Where tokens and heads stand in a tensor, if not at 1 and 2 as in [batch, tokens, heads,
# head_dim].
_TOKEN_DIM = {"lse": 2, "rows": 3}
_HEAD_DIM = {"lse": 1}


class _Spread(Run):
    """What both directions share. `local`: this rank's tensors; `whole`: the gathered ones, as
    blocks where the ring takes them so.
    """

    def __init__(self, *args: Any) -> None:  # those of ForwardRun or BackwardRun
        self.local: dict[str, torch.Tensor] = {}
        self.whole: dict[str, list[torch.Tensor]] = {}
        super().__init__(*args)
        self.ops |= {"pack": self._pack, "unpack": self._unpack, "keep": self._keep}

    def place(self, plan: Plan) -> tuple[Ring, int]:
        program = plan.choice.program
        assert isinstance(program, Hybrid)
        self.hybrid, self.world_rank = program, plan.rank
        group, self.number = divmod(plan.rank, program.group_size)
        return program.ring, group

    def bind_input(self, name: str, whole: torch.Tensor) -> None:
        """What is bound is the gathered tensor; it is filled before the ring begins."""
        self.local[name] = dense(whole)
        batch, _, heads, head_dim = self.shape(name)
        self.whole[name] = []
        for index, (start, stop) in enumerate(self.bounds(queries=on_query_side(name))):
            self.whole[name].append(
                self.fresh(batch, stop - start, heads, head_dim, dtype=whole.dtype)
            )
            self.bind_part(name, index, self.whole[name][-1])

    def _heads(self, name: str, member: int) -> torch.Tensor:
        """A member's heads of this rank's own tensor."""
        dim = _HEAD_DIM.get(name, 2)
        share = self.local[name].shape[dim] // self.hybrid.group_size
        return self.local[name].narrow(dim, member * share, share)

    def _tokens(self, name: str, member: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """A member's tokens of a gathered tensor, block by block: (first and last + 1 in the
        member's shard, view).
        """
        rank = self.rank * self.hybrid.group_size + member
        dim, blocks = _TOKEN_DIM.get(name, 1), self.whole[name]
        starts = [start for start, _ in self._runs(name)]
        at = 0
        for run, first, length in self.hybrid.places(name, rank):
            block, offset = (blocks[run], 0) if len(blocks) > 1 else (blocks[0], starts[run])
            yield at, at + length, block.narrow(dim, offset + first, length)
            at += length

    def _runs(self, name: str) -> list[tuple[int, int]]:
        """Where the group's blocks stand in its shard."""
        blocks = (self.problem.q_blocks if on_query_side(name) else self.problem.kv_blocks)[
            self.rank
        ]
        ends = [0, *accumulate(map(len, blocks))]
        return list(pairwise(ends))

    def _wire(self, name: str, part: int, owner: int) -> torch.Tensor:
        """A message's memory as a piece of the tokens of rank `owner`."""
        problem, length = self.problem, self.hybrid.shard_len(name, owner)
        heads = problem.num_heads if on_query_side(name) else problem.num_kv_heads
        shapes = {"lse": (problem.batch, heads, length), "rows": (2, problem.batch, heads, length)}
        dtype = self.wide if name in shapes else self.plan.key.dtype
        return (
            self.storage[part]
            .view(dtype)
            .view(shapes.get(name, (problem.batch, length, heads, problem.head_dim)))
        )

    def _pack(self, name: str, gather: bool, member: int, part: int) -> None:
        if gather:
            self._wire(name, part, self.world_rank).copy_(self._heads(name, member))
            return
        wire = self._wire(name, part, self._rank_of(member))
        for start, stop, view in self._tokens(name, member):
            wire.narrow(_TOKEN_DIM.get(name, 1), start, stop - start).copy_(view)

    def _unpack(self, name: str, gather: bool, member: int, part: int) -> None:
        if not gather:
            self._heads(name, member).copy_(self._wire(name, part, self.world_rank))
            return
        wire = self._wire(name, part, self._rank_of(member))
        for start, stop, view in self._tokens(name, member):
            view.copy_(wire.narrow(_TOKEN_DIM.get(name, 1), start, stop - start))

    def _keep(self, name: str, gather: bool) -> None:
        """The piece of the rank's own tokens and heads goes nowhere."""
        own = self._heads(name, self.number)
        for start, stop, view in self._tokens(name, self.number):
            here = own.narrow(_TOKEN_DIM.get(name, 1), start, stop - start)
            view.copy_(here) if gather else here.copy_(view)

    def _rank_of(self, member: int) -> int:
        return self.rank * self.hybrid.group_size + member


class HybridForwardRun(_Spread, ForwardRun):
    """See `ForwardRun`; `state` is of the group's queries and this rank's heads."""

    def __init__(self, *args: Any) -> None:  # those of ForwardRun
        super().__init__(*args)
        self.whole |= {"out": [self.state.out], "lse": [self.state.lse]}
        q = self.local["q"]
        batch, length, heads, _ = q.shape
        self.out = self.local["out"] = self.fresh(*q.shape, dtype=q.dtype)
        self.lse = self.local["lse"] = self.fresh(batch, heads, length, dtype=self.wide)


class HybridBackwardRun(_Spread, BackwardRun):
    """See `BackwardRun`; `sums` are of the group's tokens and this rank's heads."""

    def __init__(self, *args: Any) -> None:  # those of BackwardRun
        super().__init__(*args)
        batch, length, heads, _ = self.local["q"].shape
        self.local["rows"] = self.fresh(2, batch, heads, length, dtype=self.wide)
        self.whole["rows"] = [
            self.tensors[self.part_id("rows", part)]
            for part in range(len(self.bounds(queries=True)))
        ]
        for name in self.sums:
            self.whole[name] = [self.sums[name]]
            x = self.local[name[1:]]
            self.local[name] = self.fresh(*x.shape, dtype=x.dtype)

    def grads(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """See `BackwardRun.grads`."""
        dq, dk, dv = (self.local.get(name) for name in ("dq", "dk", "dv"))
        return dq, dk, dv

    def make_delta(self, part: int) -> None:
        """Of the rank's own queries and all heads, before they are gathered."""
        rows = self.local["rows"]
        self.delta(0, rows.shape[3], rows)
