"""Running a hybrid: the ring works on gathered tensors, and members exchange pieces of them.

A rank's `local` tensors hold the rank's tokens and all heads. A rank's `whole` (gathered) tensors
hold the tokens of the group and the rank's own heads. A piece is the tokens of one member with the
heads of one member. A piece of a local tensor is the heads of the member that the piece goes to or
comes from. A piece of a whole tensor is that member's tokens. Where heads go in slices, there is a
whole tensor for each slice, and a piece has the heads of one slice.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from burst_rt.attention.execute.ring import BackwardRun, Binding, ForwardRun, Run, RunTypes, dense
from burst_rt.attention.planner import Plan
from burst_rt.kernels import Gradients, ScoreOptions, State
from burst_rt.planning.operations import BackwardTile, Delta, FinishRows, ForwardTile, Tensors
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

    `local`: this rank's own tensors. `whole`: the gathered tensors, slice by slice, cut into blocks
    where the ring takes blocks. `slice`: the slice of the queries that is bound, or computed.
    """

    def __init__(self, binding: Binding) -> None:
        self.local: dict[Role, torch.Tensor] = {}
        self.whole: dict[Role, list[list[torch.Tensor]]] = {}
        self.slice = 0
        super().__init__(binding)
        self.operations |= {Pack: self._pack, Unpack: self._unpack, Keep: self._keep}

    def place(self, plan: Plan) -> tuple[Ring, int]:
        program = plan.choice.program
        assert isinstance(program, Hybrid)
        self.hybrid, self.world_rank = program, plan.rank
        group, self.number = program.place(plan.rank)
        return program.ring, group

    def options_of_heads(self, score_options: ScoreOptions) -> ScoreOptions:
        """See `Run.options_of_heads`; these are the options of the first slice's heads."""
        share, slices = self.ring.problem.num_heads, self.hybrid.slices
        firsts = range(self.number * slices * share, (self.number + 1) * slices * share, share)
        self._slices = [(at, score_options.of_heads(slice(at, at + share))) for at in firsts]
        self.first_head, options = self._slices[0]
        return options

    def take_up(self, number: int) -> None:
        """Makes a slice the one that is bound, or computed."""
        self.slice = number
        self.first_head, self.score_options = self._slices[number]

    def part_id(self, role: Role, index: int) -> int:
        """See `Run.part_id`: of the slice that is taken up."""
        return self.plan.part_ids[f"{role}{self.hybrid.mark(self.slice, role)}", index]

    def take_up_of(self, role: Role, tensors: Tensors) -> None:
        """Takes up the slice that one of an operation's tensors belongs to."""
        if self.hybrid.slices > 1:
            part = self.plan.program_graph.parts[dict(tensors)[role]]
            self.take_up(int(part.buffer.rpartition(".")[2]))

    def slices_of(self, role: Role) -> Iterator[int]:
        """Takes up the slices one after another, of which a tensor has some, and says which."""
        for number in range(self.hybrid.slices):
            of_tensor = self.hybrid.slice_of(role, number)
            if not number or of_tensor != self.hybrid.slice_of(role, number - 1):
                self.take_up(number)
                yield of_tensor
        self.take_up(0)

    def bind_input(self, role: Role, whole: torch.Tensor) -> None:
        """Binds gathered tensors instead of the input; tasks fill them before the ring begins."""
        self.local[role] = dense(whole)
        batch, _, heads, head_dim = self.shape(role)
        self.whole[role] = []
        for _ in self.slices_of(role):
            blocks = []
            for index, (start, stop) in enumerate(self.bounds(queries=role.queries)):
                # Tokens first, as blocks travel: what is bound and sent is this very memory.
                gathered = self.fresh(stop - start, batch, heads, head_dim, dtype=whole.dtype)
                blocks.append(gathered.transpose(0, 1))
                self.bind_part(role, index, blocks[-1])
            self.whole[role].append(blocks)

    def _heads(self, op: Pack | Unpack | Keep, member: int) -> torch.Tensor:
        """A slice of a member's heads of this rank's own tensor."""
        dim, local = _HEAD_DIM.get(op.tensor, 2), self.local[op.tensor]
        slices = self.hybrid.num_slices(op.tensor)
        share = local.shape[dim] // (self.hybrid.group_size * slices)
        return local.narrow(dim, (member * slices + op.slice) * share, share)

    def _tokens(
        self, op: Pack | Unpack | Keep, member: int
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        """A member's tokens of a slice of a gathered tensor, block by block: (start, stop, view).

        start and stop are token numbers in the member's shard.
        """
        role, rank = op.tensor, self._rank_of(member)
        dim, blocks = _TOKEN_DIM.get(role, 1), self.whole[role][op.slice]
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
            wire.copy_(self._heads(op, op.member))
            return
        wire = self._wire(role, op.part, self._rank_of(op.member))
        for start, stop, view in self._tokens(op, op.member):
            wire.narrow(_TOKEN_DIM.get(role, 1), start, stop - start).copy_(view)

    def _unpack(self, op: Unpack) -> None:
        role = op.tensor
        if not op.gather:
            wire = self._wire(role, op.part, self.world_rank)
            self._heads(op, op.member).copy_(wire)
            return
        wire = self._wire(role, op.part, self._rank_of(op.member))
        for start, stop, view in self._tokens(op, op.member):
            view.copy_(wire.narrow(_TOKEN_DIM.get(role, 1), start, stop - start))

    def _keep(self, op: Keep) -> None:
        """Copies the piece of the rank's own tokens and heads, which is sent to nobody."""
        own = self._heads(op, self.number)
        for start, stop, view in self._tokens(op, self.number):
            here = own.narrow(_TOKEN_DIM.get(op.tensor, 1), start, stop - start)
            view.copy_(here) if op.gather else here.copy_(view)

    def _rank_of(self, member: int) -> int:
        return self.hybrid.rank_of(self.rank, member)


class HybridForwardRun(_Spread, ForwardRun):
    """One forward call; see `ForwardRun`. `states` hold the group's queries, and a slice of this
    rank's heads each.

    `out` and `lse` are of this rank's queries and all heads.
    """

    def __init__(self, binding: Binding) -> None:
        super().__init__(binding)
        self.whole |= {
            Role.OUT: [[state.out] for state in self.states],
            Role.LSE: [[state.lse] for state in self.states],
        }
        q, head_dim = self.local[Role.Q], self.problem.v_head_dim
        batch, length, heads, _ = q.shape
        self.out = self.local[Role.OUT] = self.fresh(batch, length, heads, head_dim, dtype=q.dtype)
        self.lse = self.local[Role.LSE] = self.fresh(batch, heads, length, dtype=self.wide)

    def bind_state(self, acc: torch.Tensor) -> None:
        """Makes the running state of each slice. The first has the memory that is there."""
        in_place = acc is self.out
        self.states: list[State] = []
        for number in self.slices_of(Role.STATE):
            if number:
                self.out = self.fresh(*self.shape(Role.OUT), dtype=self.out.dtype)
                self.lse = self.fresh(*self.shape(Role.LSE), dtype=self.wide)
                acc = self.out if in_place else self.fresh(*acc.shape, dtype=self.wide)
            super().bind_state(acc)
            self.states.append(self.state)

    def _forward(self, op: ForwardTile) -> None:
        self.take_up_of(Role.STATE, op.adds)
        self.state = self.states[self.slice]
        super()._forward(op)

    def _finish(self, op: FinishRows) -> None:
        """Finishes all slices; each has a task for it, and no query of any sees a key."""
        for number, state in enumerate(self.states):
            self.take_up(number)
            self.state = state
            super()._finish(op)


class HybridBackwardRun(_Spread, BackwardRun):
    """One backward call; see `BackwardRun`. `sums` hold the group's tokens and this rank's heads.

    `grads()` are of this rank's tokens and all heads.
    """

    def __init__(self, binding: Binding) -> None:
        super().__init__(binding)
        batch, length, heads, _ = self.local[Role.Q].shape
        self.local[Role.ROWS] = self.fresh(2, batch, heads, length, dtype=self.wide)
        self.whole[Role.ROWS] = [
            [
                self.tensors[self.part_id(Role.ROWS, part)]
                for part in range(len(self.bounds(queries=True)))
            ]
            for _ in self.slices_of(Role.ROWS)
        ]
        for role, given in zip(GRADIENTS, INPUTS, strict=True):
            if role in self.sums:
                x = self.local[given]
                self.local[role] = self.fresh(*x.shape, dtype=x.dtype)

    def bind_rows(self) -> None:
        """See `BackwardRun.bind_rows`: of each slice."""
        for _ in self.slices_of(Role.ROWS):
            super().bind_rows()

    def bind_sums(self, role: Role) -> None:
        """See `BackwardRun.bind_sums`: of each slice."""
        self.whole[role] = []
        for _ in self.slices_of(role):
            super().bind_sums(role)
            self.whole[role].append([self.sums[role]])

    def _backward(self, op: BackwardTile) -> None:
        self.take_up_of(Role.Q, op.reads)
        super()._backward(op)

    def grads(self) -> Gradients:
        """See `BackwardRun.grads`."""
        return Gradients(*map(self.local.get, GRADIENTS))

    def make_delta(self, op: Delta) -> None:
        """Writes lse and delta of the rank's own queries and all heads, before the gathering."""
        rows = self.local[Role.ROWS]
        self.delta(0, rows.shape[3], rows)


RUNS = RunTypes(HybridForwardRun, HybridBackwardRun)
