"""Running a hybrid: the ring works on gathered tensors, and members exchange pieces of them.

A rank's `local` tensors hold the rank's tokens and all heads. A rank's `whole` (gathered) tensors
hold the tokens of the group and the rank's own heads. A piece is the tokens of one member with the
heads of one member. A piece of a local tensor is the heads of the member that the piece goes to or
comes from. A piece of a whole tensor is that member's tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from burst_rt.attention.execute.ring import BackwardRun, Binding, ForwardRun, Run, RunTypes, dense
from burst_rt.attention.planner import Plan
from burst_rt.kernels import Gradients, ScoreOptions
from burst_rt.planning.operations import Delta
from burst_rt.planning.roles import GRADIENTS, INPUTS, Role
from burst_rt.planning.strategies import Hybrid, Ring
from burst_rt.planning.strategies.hybrid import Keep, Pack, Unpack

__all__ = ["RUNS"]

# The dimensions of tokens and heads, for tensors that are not [batch, tokens, heads, head_dim],
# where tokens are dimension 1 and heads dimension 2.
_TOKEN_DIM = {Role.LSE: 2, Role.ROWS: 3}
_HEAD_DIM = {Role.LSE: 1}


class _Spread(Run):
    """The base of both directions: local and gathered tensors, and the pieces that members
    exchange.

    `local`: this rank's own tensors. `whole`: the gathered tensors, cut into blocks where the ring
    takes blocks.
    """

    def __init__(self, binding: Binding) -> None:
        self.local: dict[Role, torch.Tensor] = {}
        self.whole: dict[Role, list[torch.Tensor]] = {}
        super().__init__(binding)
        self.operations |= {Pack: self._pack, Unpack: self._unpack, Keep: self._keep}

    def place(self, plan: Plan) -> tuple[Ring, int]:
        program = plan.choice.program
        assert isinstance(program, Hybrid)
        self.hybrid, self.world_rank = program, plan.rank
        group, self.number = divmod(plan.rank, program.group_size)
        self.first_head = self.number * program.ring.problem.num_heads
        return program.ring, group

    def options_of_heads(self, score_options: ScoreOptions) -> ScoreOptions:
        """See `Run.options_of_heads`; these are the options of this member's heads."""
        share = self.ring.problem.num_heads
        return score_options.of_heads(slice(self.number * share, (self.number + 1) * share))

    def bind_input(self, role: Role, whole: torch.Tensor) -> None:
        """Binds a gathered tensor instead of the input; tasks fill it before the ring begins."""
        self.local[role] = dense(whole)
        batch, _, heads, head_dim = self.shape(role)
        self.whole[role] = []
        for index, (start, stop) in enumerate(self.bounds(queries=role.queries)):
            # Tokens first, as blocks travel: what is bound and sent is this very memory.
            gathered = self.fresh(stop - start, batch, heads, head_dim, dtype=whole.dtype)
            gathered = gathered.transpose(0, 1)
            self.whole[role].append(gathered)
            self.bind_part(role, index, gathered)

    def _heads(self, role: Role, member: int) -> torch.Tensor:
        """A member's heads of this rank's own tensor."""
        dim = _HEAD_DIM.get(role, 2)
        share = self.local[role].shape[dim] // self.hybrid.group_size
        return self.local[role].narrow(dim, member * share, share)

    def _tokens(self, role: Role, member: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """A member's tokens of a gathered tensor, block by block: (start, stop, view).

        start and stop are token numbers in the member's shard.
        """
        rank = self.rank * self.hybrid.group_size + member
        dim, blocks = _TOKEN_DIM.get(role, 1), self.whole[role]
        bounds = self.bounds(queries=role.queries)
        at = 0
        for run in self.hybrid.places(role, rank):
            # Results are whole, whichever side travels in blocks.
            number = next(i for i, (_, end) in enumerate(bounds) if run.start < end)
            block, first = (
                (blocks[number], bounds[number][0]) if len(blocks) > 1 else (blocks[0], 0)
            )
            of_run = slice(run.start - first, run[-1] + 1 - first, run.step)
            yield at, at + len(run), block[(slice(None),) * dim + (of_run,)]
            at += len(run)

    def _wire(self, role: Role, part: int, owner: int) -> torch.Tensor:
        """A message's memory, viewed as a piece with the tokens of rank `owner`."""
        problem, length = self.problem, self.hybrid.shard_len(role, owner)
        heads = problem.num_heads if role.queries else problem.num_kv_heads
        shapes = {
            Role.LSE: (problem.batch, heads, length),
            Role.ROWS: (2, problem.batch, heads, length),
        }
        head_dim = problem.v_head_dim if role.values else problem.head_dim
        shape = shapes.get(role, (problem.batch, length, heads, head_dim))
        dtype = self.wide if role in shapes else self.plan.key.dtype
        return self.storage[part].view(dtype).view(shape)

    def _pack(self, op: Pack) -> None:
        role = op.tensor
        if op.gather:
            wire = self._wire(role, op.part, self.world_rank)
            wire.copy_(self._heads(role, op.member))
            return
        wire = self._wire(role, op.part, self._rank_of(op.member))
        for start, stop, view in self._tokens(role, op.member):
            wire.narrow(_TOKEN_DIM.get(role, 1), start, stop - start).copy_(view)

    def _unpack(self, op: Unpack) -> None:
        role = op.tensor
        if not op.gather:
            wire = self._wire(role, op.part, self.world_rank)
            self._heads(role, op.member).copy_(wire)
            return
        wire = self._wire(role, op.part, self._rank_of(op.member))
        for start, stop, view in self._tokens(role, op.member):
            view.copy_(wire.narrow(_TOKEN_DIM.get(role, 1), start, stop - start))

    def _keep(self, op: Keep) -> None:
        """Copies the piece of the rank's own tokens and heads, which is sent to nobody."""
        own = self._heads(op.tensor, self.number)
        for start, stop, view in self._tokens(op.tensor, self.number):
            here = own.narrow(_TOKEN_DIM.get(op.tensor, 1), start, stop - start)
            view.copy_(here) if op.gather else here.copy_(view)

    def _rank_of(self, member: int) -> int:
        return self.rank * self.hybrid.group_size + member


class HybridForwardRun(_Spread, ForwardRun):
    """One forward call; see `ForwardRun`. `state` holds the group's queries and this rank's heads.

    `out` and `lse` are of this rank's queries and all heads.
    """

    def __init__(self, binding: Binding) -> None:
        super().__init__(binding)
        self.whole |= {Role.OUT: [self.state.out], Role.LSE: [self.state.lse]}
        q, head_dim = self.local[Role.Q], self.problem.v_head_dim
        batch, length, heads, _ = q.shape
        self.out = self.local[Role.OUT] = self.fresh(batch, length, heads, head_dim, dtype=q.dtype)
        self.lse = self.local[Role.LSE] = self.fresh(batch, heads, length, dtype=self.wide)


class HybridBackwardRun(_Spread, BackwardRun):
    """One backward call; see `BackwardRun`. `sums` hold the group's tokens and this rank's heads.

    `grads()` are of this rank's tokens and all heads.
    """

    def __init__(self, binding: Binding) -> None:
        super().__init__(binding)
        batch, length, heads, _ = self.local[Role.Q].shape
        self.local[Role.ROWS] = self.fresh(2, batch, heads, length, dtype=self.wide)
        self.whole[Role.ROWS] = [
            self.tensors[self.part_id(Role.ROWS, part)]
            for part in range(len(self.bounds(queries=True)))
        ]
        for role, given in zip(GRADIENTS, INPUTS, strict=True):
            if role in self.sums:
                self.whole[role] = [self.sums[role]]
                x = self.local[given]
                self.local[role] = self.fresh(*x.shape, dtype=x.dtype)

    def grads(self) -> Gradients:
        """See `BackwardRun.grads`."""
        return Gradients(*map(self.local.get, GRADIENTS))

    def make_delta(self, op: Delta) -> None:
        """Writes lse and delta of the rank's own queries and all heads, before the gathering."""
        rows = self.local[Role.ROWS]
        self.delta(0, rows.shape[3], rows)


RUNS = RunTypes(HybridForwardRun, HybridBackwardRun)
