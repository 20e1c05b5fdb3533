"""`python -m benchmarks masks --part tables`: what the host does for new masks.

Packed batches bring new documents every step. A plan's tables are then made again; its graph is
verified only if rows go a new way. All of it is the work of one thread of one process, and is timed
by that thread's processor time. Nothing is sent. The CPU's tables are in a plan; the Triton
kernels' are made when a tile is first worked.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from burst_rt.attention.planner import Plan, PlanKey, Planner
from burst_rt.kernels.base import Tile
from burst_rt.kernels.triton.parts import ascending_groups
from burst_rt.kernels.triton.tables import CutOfTile, lists_for, same_tables, spans_of_tile
from burst_rt.launch.measure.report import Cell, median, publish
from burst_rt.planning.choose import choose
from burst_rt.planning.layouts import BALANCED, make_layout
from burst_rt.planning.masks import BlockSparse, Causal, Documents, First, Mask, SlidingWindow
from burst_rt.planning.problem import Problem
from burst_rt.planning.worklist import column_spans, work_list

__all__ = ["measure"]

# Number of tokens, ranks and steps.
_FRESH = ((32_768, 2, 500), (131_072, 8, 100), (1 << 20, 64, 20))
_TOKENS, _RANKS = 1 << 20, 64
_TILE = 1 << 16
_BLOCK = 128  # tokens of a block of `BlockSparse`
# A GPU kernel's cut of a tile: for the forward, and for dk and dv.
_BY_ROWS = CutOfTile((128, 64), by_columns=False, several=(128, 64))
_BY_COLUMNS = CutOfTile((64, 128), by_columns=True, several=(64, 128))


def measure(repeats: int, out: Path | None, *, shrink: int = 1) -> None:
    """Times and prints three tables. Local. Takes some five minutes.

    repeats: masks of each row of the last two tables. shrink: divides tokens and steps.
    """
    publish(
        "planning a step with fresh documents",
        [_steps(tokens // shrink, ranks, -(-steps // shrink)) for tokens, ranks, steps in _FRESH],
        out,
        "forward and backward of rank 0, zigzag; processor time; the first steps are left out",
    )
    tokens = _TOKENS // shrink
    publish(
        f"a rank's own tables, {tokens:,} tokens, {_RANKS} ranks",
        [
            _own_tables(name, kind, tokens, repeats)
            for name in _MASKS
            for kind in ("zigzag", BALANCED, "striped")
        ],
        out,
        f"medians of {repeats} fresh masks, rank 1; a plan has the tables of both directions, and "
        "the rank's share of the graphs verified; Triton's are those of all tiles of the rank; "
        "processor time",
    )
    tokens = _TILE // shrink
    publish(
        f"one tile for the Triton kernels, {tokens:,} x {tokens:,}",
        [_tile(name, tokens, repeats) for name in _MASKS],
        out,
        f"medians of {repeats} fresh masks; lists in blocks of {_BY_ROWS.blocks} and "
        f"{_BY_COLUMNS.blocks}; processor time",
    )


def _documents(tokens: int, seed: int) -> Mask:
    chance, lengths, left = random.Random(seed), [], tokens
    while left:
        lengths.append(min(left, max(1, int(1024 * chance.lognormvariate(0, 1)))))
        left -= lengths[-1]
    return Causal() & Documents(lengths)


def _window(tokens: int, seed: int) -> Mask:
    return Causal() & (SlidingWindow(min(4096, tokens // 2) - seed % 64) | First(4))


def _blocks(tokens: int, seed: int) -> Mask:
    side = -(-tokens // _BLOCK)
    return Causal() & BlockSparse(np.random.default_rng(seed).random((side, side)) < 0.02, _BLOCK)


_MASKS: dict[str, Callable[[int, int], Mask]] = {
    "causal documents": _documents,
    "window and first tokens": _window,
    "2 % of blocks, causal": _blocks,
}
_seeds = count()
_T = TypeVar("_T")


def _problem(mask: Mask, tokens: int, ranks: int, kind: str) -> Problem:
    layout = make_layout(kind, tokens, ranks, mask if kind == BALANCED else None)
    return Problem(
        q_layout=layout,
        kv_layout=layout,
        mask=mask,
        batch=1,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        input_bytes=4,
        sum_bytes=4,
        needs_grad=(True, True, True),
    )


def _plans(planner: Planner, problem: Problem) -> list[Plan]:
    """The plans of forward and backward."""
    keys = (
        PlanKey(forward, problem, "auto", "cpu", torch.float32, torch.device("cpu"))
        for forward in (True, False)
    )
    return [planner.plan(key) for key in keys]


def _triton_tables(plan: Plan) -> None:
    """Makes the Triton kernels' tables for every tile of a plan, as its first call does.

    They are kept: a backward takes its forward's tables where the tiles are the same.
    """
    device = torch.device("cpu")
    for rows, runs in plan.choice.program.tiles(plan.rank):
        for columns in ascending_groups(runs):
            tile = Tile((), rows, columns, plan.key.problem.mask, scale=1.0, progress=lambda: None)
            tile = same_tables(tile)
            width = spans_of_tile(tile, device).width
            for cut in (_BY_ROWS,) if plan.key.forward else (_BY_COLUMNS, _BY_ROWS):
                lists_for(tile, cut, width, device)


def _steps(tokens: int, ranks: int, steps: int) -> dict[str, Cell]:
    planner, warm_up = Planner(0), max(2, steps // 25)
    plans_s, all_s = [], []
    for _ in range(warm_up + steps):
        problem = _problem(_documents(tokens, next(_seeds)), tokens, ranks, "zigzag")
        plans, plan_s = _timed(partial(_plans, planner, problem))
        plans_s.append(plan_s)
        all_s.append(plan_s + sum(_timed(partial(_triton_tables, plan))[1] for plan in plans))
    plans_s, all_s = (sorted(found[warm_up:]) for found in (plans_s, all_s))
    return {
        "tokens": tokens,
        "ranks": ranks,
        "steps": steps,
        "plans, the CPU's tables in them, ms": 1e3 * median(plans_s),
        "and Triton's tables, ms": 1e3 * median(all_s),
        "nine tenths below ms": 1e3 * all_s[9 * steps // 10],
        "longest ms": 1e3 * all_s[-1],
    }


def _own_tables(name: str, kind: str, tokens: int, repeats: int) -> dict[str, Cell]:
    took_s: dict[str, list[float]] = defaultdict(list)
    for _ in range(repeats):
        problems = []
        for _ in range(2):
            make = partial(_problem, _MASKS[name](tokens, next(_seeds)), tokens, _RANKS, kind)
            problem, layout_s = _timed(make)
            problems.append(problem)
            took_s["layout s"].append(layout_s)
        for forward, of in ((True, "forward s"), (False, "backward s")):
            took_s[of].append(_timed(partial(_graph, problems[0], forward))[1])
        plans, plan_s = _timed(partial(_plans, Planner(1), problems[1]))
        took_s["plan s"].append(plan_s)
        for plan, of in zip(plans, ("Triton's forward s", "Triton's backward s"), strict=True):
            took_s[of].append(_timed(partial(_triton_tables, plan))[1])
    return {"mask": name, "layout": kind, **{of: median(found) for of, found in took_s.items()}}


def _graph(problem: Problem, forward: bool) -> None:
    choose(problem, "auto", forward=forward).program.graph(1)


def _tile(name: str, tokens: int, repeats: int) -> dict[str, Cell]:
    took_s: dict[str, list[float]] = defaultdict(list)
    whole = (range(tokens),)
    for _ in range(repeats):
        mask = _MASKS[name](tokens, next(_seeds))
        spans, spans_s = _timed(partial(column_spans, mask, whole, whole))
        given_s = _timed(spans.for_kernels)[1]
        by_rows = partial(work_list, spans, *_BY_ROWS.blocks)
        by_columns = partial(work_list, spans, *_BY_COLUMNS.blocks, by_columns=True)
        took_s["spans ms"].append(spans_s + given_s)
        took_s["by rows ms"].append(_timed(by_rows)[1])
        took_s["by columns ms"].append(_timed(by_columns)[1])
    medians = {of: 1e3 * median(found) for of, found in took_s.items()}
    return {"mask": name, **medians, "all ms": sum(medians.values())}


def _timed(run: Callable[[], _T]) -> tuple[_T, float]:
    """A function's result, and the processor time in seconds that this thread spent in it."""
    started_s = time.thread_time()
    found = run()
    return found, time.thread_time() - started_s
