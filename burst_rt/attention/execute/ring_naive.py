"""Running `ring-naive`: whole rows of scores are kept between the rounds.

The scores are `[batch, heads, own queries, all keys]` in the dtype of the sums.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from burst_rt.attention.execute.ring import BackwardRun, Binding, ForwardRun, Run, RunTypes
from burst_rt.attention.planner import Plan
from burst_rt.kernels.naive import dense_scores, per_group, per_head
from burst_rt.planning.operations import FinishRows, TileOperation
from burst_rt.planning.roles import Role
from burst_rt.planning.strategies import Ring, RingNaive
from burst_rt.planning.strategies.ring_naive import (
    Blank,
    Probabilities,
    Products,
    ScoreGradients,
    Scores,
    Softmax,
    Weigh,
)

__all__ = ["RUNS"]


class _Rows(Run):
    """The base of both directions: the scores, and the pieces of a tile in them."""

    def __init__(self, binding: Binding) -> None:
        super().__init__(binding)
        batch, heads, length = self.shape(Role.LSE)
        self.scores = self.fresh(
            batch, heads, length, self.problem.kv_layout.seq_len, dtype=self.wide
        )
        self.tensors[self.part_id(Role.SCORES, 0)] = self.scores

    def place(self, plan: Plan) -> tuple[Ring, int]:
        program = plan.choice.program
        assert isinstance(program, RingNaive)
        self.program = program
        return program.rounds[0], plan.rank

    def parts(self, op: TileOperation) -> Iterator[tuple[torch.Tensor, slice, slice]]:
        """The scores of each piece, its queries in the shard and its keys in the block."""
        keys = self.ring.block_len(op.owner, op.block)
        whole = self.scores.narrow(3, self.program.columns[op.owner][op.block], keys)
        for piece in op.pieces:
            yield whole[:, :, piece.rows, piece.columns], piece.rows, piece.columns

    def fill(
        self, op: TileOperation, q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        """Writes the scores of a block's keys; with lse, the probabilities."""
        tile = self.tile(op)
        for piece, (here, rows, _) in zip(op.pieces, self.parts(op), strict=True):
            scores, _ = dense_scores(q, k, tile, piece, self.wide, self.wide)
            here.copy_(scores if lse is None else torch.exp(scores - lse[:, :, rows, None]))


class RingNaiveForwardRun(_Rows, ForwardRun):
    """One forward call; see `ForwardRun`."""

    def __init__(self, binding: Binding) -> None:
        super().__init__(binding)
        self.operations |= {
            Blank: self._blank,
            Scores: self._scores,
            Softmax: self._softmax,
            Weigh: self._weigh,
            FinishRows: self._end,
        }

    def _blank(self, _: Blank) -> None:
        self.scores.fill_(-torch.inf)

    def _scores(self, op: Scores) -> None:
        x = self.reads(op)
        self.fill(op, x[Role.Q], x[Role.K], None)

    def _softmax(self, _: Softmax) -> None:
        """Turns scores into unnormalised probabilities; `State.finish` divides by their sum."""
        state = self.state
        state.start(self.score_options.sinks)
        top = torch.maximum(state.m, self.scores.amax(-1))
        # In a row that sees no key, exp(-inf - -inf) would be NaN.
        safe = torch.where(top == -torch.inf, 0.0, top)
        self.scores.sub_(safe[..., None]).exp_()
        state.l.mul_(torch.exp(state.m - safe)).add_(self.scores.sum(-1))
        state.m.copy_(top)

    def _weigh(self, op: Weigh) -> None:
        v = per_head(self.reads(op)[Role.V], self.problem.num_heads, self.wide)
        for p, rows, columns in self.parts(op):
            self.state.acc[:, rows].add_((p @ v[:, :, columns]).transpose(1, 2))

    def _end(self, _: FinishRows) -> None:
        self.state.finish()


class RingNaiveBackwardRun(_Rows, BackwardRun):
    """One backward call; see `BackwardRun`."""

    def __init__(self, binding: Binding) -> None:
        super().__init__(binding)
        self.operations |= {
            Blank: self._blank,
            Probabilities: self._probabilities,
            ScoreGradients: self._score_gradients,
            Products: self._products,
        }

    def _blank(self, _: Blank) -> None:
        self.scores.zero_()

    def _probabilities(self, op: Probabilities) -> None:
        x = self.reads(op)
        self.fill(op, x[Role.Q], x[Role.K], x[Role.ROWS][0])

    def _score_gradients(self, op: ScoreGradients) -> None:
        """dv += p^T dout, then p becomes ds = p * (dout v^T - delta) * scale."""
        x, dv = self.reads(op), self.sums_at(op).get(Role.DV)
        heads, kv_heads = self.problem.num_heads, self.problem.num_kv_heads
        dout, v = (per_head(x[role], heads, self.wide) for role in (Role.DOUT, Role.V))
        lse, delta = x[Role.ROWS][..., None]
        cap, tile = self.score_options.softcap, self.tile(op)
        for p, rows, columns in self.parts(op):
            if dv is not None:
                dv[:, columns] += per_group(p.mT @ dout[:, :, rows], kv_heads)
            gradient = (dout[:, :, rows] @ v[:, :, columns].mT).sub_(delta[:, :, rows])
            if cap is not None:
                # The score comes from its probability. A probability of 0 has no gradient.
                s = torch.log(p) + lse[:, :, rows]
                bias = tile.bias(rows, columns, self.wide)
                t = (s if bias is None else s - bias).div_(cap)
                gradient.mul_(torch.where(p == 0, 0.0, 1.0 - t.square_()))
            p.mul_(gradient).mul_(self.scale)

    def _products(self, op: Products) -> None:
        """dq += ds k, dk += ds^T q."""
        x, sums = self.reads(op), self.sums_at(op)
        heads, kv_heads = self.problem.num_heads, self.problem.num_kv_heads
        q, k = (per_head(x[role], heads, self.wide) for role in (Role.Q, Role.K))
        for ds, rows, columns in self.parts(op):
            if Role.DQ in sums:
                sums[Role.DQ][:, rows] += (ds @ k[:, :, columns]).transpose(1, 2)
            if Role.DK in sums:
                sums[Role.DK][:, columns] += per_group(ds.mT @ q[:, :, rows], kv_heads)


RUNS = RunTypes(RingNaiveForwardRun, RingNaiveBackwardRun)
