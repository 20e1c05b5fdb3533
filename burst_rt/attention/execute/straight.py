"""The straight way of a call of one tile: its kernels go to the caller's stream, one after another.

Nothing is sent and nobody is waited for, so there is no driver, no engine and no event. Memory is
the caller's stream's own: torch's allocator hands it on in that stream's order. `ring.py` has the
way of all other calls; it gives the same results.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from burst_rt.attention.execute.ring import dense, tile_of
from burst_rt.attention.planner import Plan
from burst_rt.kernels import (
    QKV,
    Gradients,
    Kept,
    Results,
    ScoreOptions,
    State,
    Tile,
    Upstream,
    sum_dtype,
)
from burst_rt.planning.strategies import Ring
from burst_rt.scheduler import Task

__all__ = ["StraightBackward", "StraightForward"]

# What is done, in order: tasks, each with what puts it onto the caller's stream.
Steps = list[tuple[Task, Callable[[], None]]]


class _Shared(NamedTuple):
    """What the calls of one plan share that have one scale and softcap."""

    tasks: tuple[Task, ...]
    tile: Tile
    entries: tuple[dict[object, Any], ...]  # of each task, for its kernel
    rows_shape: tuple[int, int, int]  # of lse
    wide: torch.dtype  # type of the sums


class _Straight:
    """The base of both directions. stream: the handle of the caller's stream."""

    def __init__(
        self, plan: Plan, scale: float | None, qkv: QKV, score_options: ScoreOptions, stream: int
    ) -> None:
        softcap, slopes, sinks = score_options
        shared: _Shared | None = plan.kept.get((scale, softcap))
        if shared is None:
            shared = plan.keep((scale, softcap), _shared(plan, scale))
        if slopes is not None or sinks is not None:
            score_options = score_options.bound(plan.key.dtype, plan.key.problem.batch)
        self.shared, self.stream = shared, stream
        self.qkv = QKV(*map(dense, qkv))
        self.tile = shared.tile._replace(
            score_options=score_options, kept=Kept(shared.entries[-1], stream)
        )
        self.kernel, self.dtype, self.device = plan.kernel, plan.key.dtype, plan.key.device


class StraightForward(_Straight):
    """One forward call: `out` and `lse` hold its results once `steps` are done.

    out: `[batch, tokens, heads, v's head_dim]` in q's dtype. lse: `[batch, heads, tokens]`.
    """

    def __init__(
        self, plan: Plan, scale: float | None, qkv: QKV, score_options: ScoreOptions, stream: int
    ) -> None:
        super().__init__(plan, scale, qkv, score_options, stream)
        rows_shape, wide = self.shared.rows_shape, self.shared.wide
        shape = (*qkv.q.shape[:3], qkv.v.shape[3])
        self.out = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.lse = torch.empty(rows_shape, dtype=wide, device=self.device)
        acc, m, total = self.out, self.lse, self.lse
        if not plan.writes_results:
            if self.dtype != wide:
                acc = torch.empty(shape, dtype=wide, device=self.device)
            m, total = torch.empty((2, *rows_shape), dtype=wide, device=self.device)
        state = State(acc, m, total, self.out, self.lse)
        (task,) = self.shared.tasks
        self.steps: Steps = [(task, partial(self.kernel.forward, self.qkv, self.tile, state))]


class StraightBackward(_Straight):
    """One backward call: `grads()` returns dq, dk and dv once `steps` are done."""

    def __init__(
        self, plan: Plan, scale: float | None, qkv: QKV, results: Results,
        score_options: ScoreOptions, stream: int,
    ) -> None:  # fmt: skip
        super().__init__(plan, scale, qkv, score_options, stream)
        wide = self.shared.wide
        dout = dense(results.dout)
        rows = torch.empty((2, *self.shared.rows_shape), dtype=wide, device=self.device).unbind()
        only = plan.writes_gradients  # else what the tile adds to is zeroed
        make, dtype = (torch.empty, self.dtype) if only else (torch.zeros, wide)
        self._sums = Gradients(
            *(
                make(x.shape, dtype=dtype, device=self.device) if needed else None
                for x, needed in zip(qkv, plan.key.problem.needs_grad, strict=True)
            )
        )
        tile = self.tile._replace(first=only, last=only)
        kept = Kept(self.shared.entries[0], stream)
        delta, backward = self.shared.tasks
        self.steps: Steps = [
            (delta, partial(self.kernel.delta, results._replace(dout=dout), rows, kept)),
            (
                backward,
                partial(self.kernel.backward, self.qkv, Upstream(dout, *rows), tile, self._sums),
            ),
        ]

    def grads(self) -> Gradients:
        """dq, dk and dv in the inputs' dtype; None where one is not needed."""
        return Gradients(*(None if x is None else x.to(self.dtype) for x in self._sums))


def _shared(plan: Plan, scale: float | None) -> _Shared:
    ring = plan.choice.program
    assert isinstance(ring, Ring)
    problem, tasks = ring.problem, tuple(t for t in plan.graph.tasks if t.lane == "compute")
    tile = tile_of(
        ring, plan.rank, tasks[-1].op, 1.0 / math.sqrt(problem.head_dim) if scale is None else scale
    )
    q_len = sum(map(len, tile.q_positions))
    return _Shared(
        tasks, tile, tuple({} for _ in tasks), (problem.batch, problem.num_heads, q_len),
        sum_dtype(plan.key.dtype),
    )  # fmt: skip
