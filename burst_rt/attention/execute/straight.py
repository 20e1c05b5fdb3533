"""The straight way of a call of one tile: its kernels go to the caller's stream, one after another.

Nothing is sent and nobody is waited for, so there is no driver, no engine and no event. Memory is
the caller's stream's own: torch's allocator hands it on in that stream's order. `ring.py` has the
way of all other calls; it gives the same results.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from burst_rt.attention.execute.ring import dense, placed_tile
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
from burst_rt.planning.operations import TileOperation
from burst_rt.planning.strategies import Ring
from burst_rt.scheduler import Task

__all__ = ["StraightBackward", "StraightForward"]

# What is done, in order: tasks, each with what puts it onto the caller's stream.
Steps = tuple[tuple[Task, Callable[[], None]], ...]


class _Shared(NamedTuple):
    """What calls of one plan share that have one scale and softcap, and come from one stream."""

    tasks: tuple[Task, ...]
    tile: Tile
    kept: tuple[Kept, ...]  # by task
    shape: tuple[int, int, int, int]  # out's
    rows_shape: tuple[int, int, int]  # lse's
    wide: torch.dtype  # type of the sums


class StraightForward:
    """One forward call: `out` and `lse` hold its results once `steps` are done.

    out: `[batch, tokens, heads, v's head_dim]` in q's dtype. lse: `[batch, heads, tokens]`. scale:
    None: 1 / sqrt(head_dim). stream: the handle of the caller's stream.
    """

    def __init__(
        self, plan: Plan, scale: float | None, qkv: QKV, score_options: ScoreOptions, stream: int
    ) -> None:
        (task,), tile, _, shape, rows_shape, wide = _shared(plan, scale, score_options, stream)
        dtype, device = plan.key.dtype, plan.key.device
        self.out = out = torch.empty(shape, dtype=dtype, device=device)
        self.lse = lse = torch.empty(rows_shape, dtype=wide, device=device)
        acc, m, total = out, lse, lse
        if not plan.writes_results:
            if dtype != wide:
                acc = torch.empty(shape, dtype=wide, device=device)
            m, total = torch.empty((2, *rows_shape), dtype=wide, device=device)
        state = State(acc, m, total, out, lse)
        self.steps: Steps = ((task, partial(plan.kernel.forward, _dense(qkv), tile, state)),)


class StraightBackward:
    """One backward call: `grads()` returns dq, dk and dv once `steps` are done.

    Arguments: those of `StraightForward`.
    """

    def __init__(
        self, plan: Plan, scale: float | None, qkv: QKV, results: Results,
        score_options: ScoreOptions, stream: int,
    ) -> None:  # fmt: skip
        shared = _shared(plan, scale, score_options, stream)
        self._dtype, device, kernel = plan.key.dtype, plan.key.device, plan.kernel
        dout = dense(results.dout)
        rows = torch.empty((2, *shared.rows_shape), dtype=shared.wide, device=device).unbind()
        # What a tile adds to is zeroed; what it writes is not.
        only = plan.writes_gradients
        make, dtype = (torch.empty, self._dtype) if only else (torch.zeros, shared.wide)
        needs_q, needs_k, needs_v = plan.key.problem.needs_grad
        q, k, v = qkv
        self._sums = sums = Gradients(
            make(q.shape, dtype=dtype, device=device) if needs_q else None,
            make(k.shape, dtype=dtype, device=device) if needs_k else None,
            make(v.shape, dtype=dtype, device=device) if needs_v else None,
        )
        out = results.out if results.dlse is None else None
        upstream = Upstream(dout, rows[0], rows[1], out)
        self.steps: Steps = (
            (
                shared.tasks[0],
                partial(kernel.delta, results._replace(dout=dout), rows, shared.kept[0]),
            ),
            (
                shared.tasks[1],
                partial(kernel.backward, _dense(qkv), upstream, shared.tile, sums),
            ),
        )

    def grads(self) -> Gradients:
        """dq, dk and dv in the inputs' dtype; None where one is not needed."""
        return Gradients(*[None if x is None else x.to(self._dtype) for x in self._sums])


def _dense(qkv: QKV) -> QKV:
    q, k, v = qkv
    return QKV(dense(q), dense(k), dense(v))


def _shared(plan: Plan, scale: float | None, score_options: ScoreOptions, stream: int) -> _Shared:
    """What is kept with the plan, with the tile as this call has it."""
    softcap, slopes, sinks = score_options
    key = ("straight", scale, softcap, stream)
    shared: _Shared | None = plan.kept.get(key)
    if shared is None:
        shared = plan.keep(key, _make_shared(plan, scale, softcap, stream))
    if slopes is None and sinks is None:
        return shared
    bound = score_options.bound(plan.key.dtype, plan.key.problem.batch)
    return shared._replace(tile=shared.tile._replace(score_options=bound))


def _make_shared(plan: Plan, scale: float | None, softcap: float | None, stream: int) -> _Shared:
    ring = plan.choice.program
    assert isinstance(ring, Ring)
    problem, tasks = ring.problem, tuple(t for t in plan.graph.tasks if t.lane == "compute")
    op = tasks[-1].op
    assert isinstance(op, TileOperation)
    factor = 1.0 / math.sqrt(problem.head_dim) if scale is None else scale
    kept = tuple(Kept({}, stream) for _ in tasks)
    only = plan.key.forward or plan.writes_gradients
    tile = placed_tile(
        ring, plan.rank, op, scale=factor, progress=_nothing, score_options=ScoreOptions(softcap),
        kept=kept[-1], in_order=plan.key.deterministic,
    )._replace(first=only, last=only)  # fmt: skip
    q_len = sum(map(len, tile.q_positions))
    return _Shared(
        tasks, tile, kept, (problem.batch, q_len, problem.num_heads, problem.v_head_dim),
        (problem.batch, problem.num_heads, q_len), sum_dtype(plan.key.dtype),
    )  # fmt: skip


def _nothing() -> None:
    """The progress of a tile beside which nothing moves."""
