"""Running `ring-naive`: whole rows of scores, `[batch, heads, own queries, all keys]` in the type
of the sums, kept between the rounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from burst_rt.attention.execute.ring import BackwardRun, ForwardRun, Names, Run
from burst_rt.attention.planner import Plan
from burst_rt.kernels.naive import dense_scores, per_group, per_head
from burst_rt.planning.masks import Piece
from burst_rt.planning.strategies import Ring, RingNaive

__all__ = ["RingNaiveBackwardRun", "RingNaiveForwardRun"]


class _Rows(Run):
    """What both directions share."""

    def __init__(self, *args: Any) -> None:  # those of ForwardRun or BackwardRun
        super().__init__(*args)
        batch, heads, length = self.shape("lse")
        self.scores = self.fresh(
            batch, heads, length, self.problem.kv_layout.seq_len, dtype=self.wide
        )
        self.tensors[self.part_id("scores", 0)] = self.scores

    def place(self, plan: Plan) -> tuple[Ring, int]:
        program = plan.choice.program
        assert isinstance(program, RingNaive)
        self.program = program
        return program.rounds[0], plan.rank

    def parts(
        self, owner: int, block: int, pieces: tuple[Piece, ...]
    ) -> Iterator[tuple[torch.Tensor, slice, slice]]:
        """The scores of each piece, its queries and its keys (of the block)."""
        whole = self.scores.narrow(
            3, self.program.columns[owner][block], len(self.problem.kv_blocks[owner][block])
        )
        for piece in pieces:
            rows, columns = slice(piece.q_start, piece.q_stop), slice(piece.kv_start, piece.kv_stop)
            yield whole[:, :, rows, columns], rows, columns

    def fill(
        self,
        owner: int,
        block: int,
        pieces: tuple[Piece, ...],
        q: torch.Tensor,
        k: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """Scores of a block's keys, or with lse the probabilities."""
        tile = self.tile(owner, block, pieces)
        for piece, (here, rows, _) in zip(pieces, self.parts(owner, block, pieces), strict=True):
            scores = dense_scores(q, k, tile, piece, self.wide, self.wide)
            here.copy_(scores if lse is None else torch.exp(scores - lse[:, :, rows, None]))


class RingNaiveForwardRun(_Rows, ForwardRun):
    """See `ForwardRun`."""

    def __init__(self, *args: Any) -> None:  # those of ForwardRun
        super().__init__(*args)
        self.ops |= {
            "blank": self._blank,
            "scores": self._scores,
            "softmax": self._softmax,
            "weigh": self._weigh,
            "finish": self._end,
        }

    def _blank(self) -> None:
        self.scores.fill_(-torch.inf)

    def _scores(
        self, owner: int, block: int, pieces: tuple[Piece, ...], _new: bool, reads: Names, _: Names
    ) -> None:
        x = self.at(reads, owner, block)
        self.fill(owner, block, pieces, x["q"], x["k"], None)

    def _softmax(self) -> None:
        """Unnormalised: `State.finish` divides."""
        self.state.start()
        torch.amax(self.scores, -1, out=self.state.m)
        # A row that sees no key: exp(-inf - -inf) would be NaN.
        self.scores.sub_(
            torch.where(self.state.m == -torch.inf, 0.0, self.state.m)[..., None]
        ).exp_()
        torch.sum(self.scores, -1, out=self.state.l)

    def _weigh(
        self, owner: int, block: int, pieces: tuple[Piece, ...], _new: bool, reads: Names, _: Names
    ) -> None:
        v = per_head(self.at(reads, owner, block)["v"], self.problem.num_heads, self.wide)
        for p, rows, columns in self.parts(owner, block, pieces):
            self.state.acc[:, rows].add_((p @ v[:, :, columns]).transpose(1, 2))

    def _end(self) -> None:
        self.state.finish()


class RingNaiveBackwardRun(_Rows, BackwardRun):
    """See `BackwardRun`."""

    def __init__(self, *args: Any) -> None:  # those of BackwardRun
        super().__init__(*args)
        self.ops |= {
            "blank": self._blank,
            "probabilities": self._probabilities,
            "score gradients": self._score_gradients,
            "products": self._products,
        }

    def _blank(self) -> None:
        self.scores.zero_()

    def _probabilities(
        self, owner: int, block: int, pieces: tuple[Piece, ...], _new: bool, reads: Names, _: Names
    ) -> None:
        x = self.at(reads, owner, block)
        self.fill(owner, block, pieces, x["q"], x["k"], x["rows"][0])

    def _score_gradients(
        self,
        owner: int,
        block: int,
        pieces: tuple[Piece, ...],
        new: bool,
        reads: Names,
        adds: Names,
    ) -> None:
        """dv += p^T dout, then p becomes ds = p * (dout v^T - delta) * scale."""
        x, dv = self.at(reads, owner, block), self.sums_at(adds, owner, block, new).get("dv")
        dout, v = (per_head(x[name], self.problem.num_heads, self.wide) for name in ("dout", "v"))
        delta = x["rows"][1][..., None]
        for p, rows, columns in self.parts(owner, block, pieces):
            if dv is not None:
                dv[:, columns] += per_group(p.mT @ dout[:, :, rows], self.problem.num_kv_heads)
            p.mul_((dout[:, :, rows] @ v[:, :, columns].mT).sub_(delta[:, :, rows])).mul_(
                self.scale
            )

    def _products(
        self,
        owner: int,
        block: int,
        pieces: tuple[Piece, ...],
        new: bool,
        reads: Names,
        adds: Names,
    ) -> None:
        """dq += ds k, dk += ds^T q."""
        x, sums = self.at(reads, owner, block), self.sums_at(adds, owner, block, new)
        q, k = (per_head(x[name], self.problem.num_heads, self.wide) for name in ("q", "k"))
        for ds, rows, columns in self.parts(owner, block, pieces):
            if "dq" in sums:
                sums["dq"][:, rows] += (ds @ k[:, :, columns]).transpose(1, 2)
            if "dk" in sums:
                sums["dk"][:, columns] += per_group(
                    ds.mT @ q[:, :, rows], self.problem.num_kv_heads
                )
