"""How even a layout is, and others would be: the largest rank's number over the mean; 1.0 is even.

Tokens are what everything but attention costs by. Cells are attention's work. A rank's cells are
the cells of its queries where keys travel, and the cells of its keys where queries travel. In
all-to-all every rank computes all cells for its share of the heads: cells are even, whatever the
layout is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from burst_rt.errors import InputError
from burst_rt.planning.balance import load_of
from burst_rt.planning.layouts import BALANCED, KINDS, Layout, make_layout
from burst_rt.planning.strategies import Program

__all__ = ["Evenness", "evenness", "evenness_in_words"]


class Evenness(NamedTuple):
    """The largest rank's tokens and cells over the mean."""

    tokens: float
    cells: float


def evenness(program: Program, q_layout: Layout, kv_layout: Layout) -> Evenness:
    """The evenness of the ranks in a program, if queries and keys were spread by these layouts.

    Only the queries' tokens are counted. Raises InputError as `load_of` does.
    """
    load = load_of(program.problem.mask, q_layout.seq_len, kv_layout.seq_len)
    costs, runs = (
        (load.columns, kv_layout.runs) if program.queries_travel else (load.rows, q_layout.runs)
    )
    cells = [sum(int(costs[r.start : r.stop : r.step].sum()) for r in own) for own in runs]
    group = len(cells) // program.ring_size
    by_group = [sum(cells[first : first + group]) for first in range(0, len(cells), group)]
    tokens = list(map(q_layout.shard_len, range(q_layout.world_size)))
    return Evenness(_largest_over_mean(tokens), _largest_over_mean(by_group))


def evenness_in_words(programs: Sequence[Program]) -> str:
    """The evenness of the layout of some programs of one problem, and of other layouts, in
    words.
    """
    problem = programs[0].problem
    q_layout, kv_layout = problem.q_layout, problem.kv_layout
    about = f"layout {q_layout.kind}: largest rank over mean: "

    def numbers(q_layout: Layout, kv_layout: Layout) -> str:
        by_program = [evenness(program, q_layout, kv_layout) for program in programs]
        words = (
            f"{even.cells:.2f} {'forward' if program.forward else 'backward'}"
            for program, even in zip(programs, by_program, strict=True)
        )
        return f"tokens {by_program[0].tokens:.2f}, cells {', '.join(words)}"

    def other(kind: str) -> str:
        mask = problem.mask if kind == BALANCED else None
        layouts = (make_layout(kind, x.seq_len, x.world_size, mask) for x in (q_layout, kv_layout))
        return f"{kind}: {numbers(*layouts)}"

    # A balanced layout is for as many queries as keys.
    kinds = (*KINDS, BALANCED) if q_layout.seq_len == kv_layout.seq_len else KINDS
    try:
        others = [other(kind) for kind in kinds if kind != q_layout.kind]
        return f"{about}{numbers(q_layout, kv_layout)}\n  {'; '.join(others)}"
    except InputError as error:
        return f"{about}not known: {error.message.removeprefix('layout: ')}"


def _largest_over_mean(numbers: list[int]) -> float:
    return max(numbers) * len(numbers) / sum(numbers) if any(numbers) else 1.0
