"""The problem that a group of ranks solves, whose members share the heads, and that of a slice."""

from __future__ import annotations

from dataclasses import replace

from burst_rt.errors import InputError
from burst_rt.planning.layouts import Layout, blocks_of, one_range, stretches
from burst_rt.planning.problem import Problem

__all__ = ["most_slices", "of_groups", "of_slice"]

_Runs = tuple[tuple[range, ...], ...]
# With more slices less of the first and of the last is exposed, and tiles are smaller.
_MOST_SLICES = 4


def of_slice(problem: Problem, slices: int) -> Problem:
    """The problem of one of the slices into which a member's heads are cut.

    Slices of fewer kv heads than slices share a kv head. Raises InputError where `slices` does not
    divide the heads.
    """
    heads, kv_heads = problem.num_heads, problem.num_kv_heads
    if not _divide(heads, kv_heads, slices):
        raise InputError(
            f"sliced: {slices} slices must divide the query heads of a rank, and divide its kv "
            f"heads or be a multiple of them, got {heads} query heads and {kv_heads} kv heads a "
            "rank; name another number of slices ('sliced:N'), or take 'all-to-all'"
        )
    return replace(
        problem, num_heads=heads // slices, num_kv_heads=kv_heads // min(slices, kv_heads)
    )


def most_slices(problem: Problem, size: int) -> int:
    """The largest number of slices, up to four, that divides the heads of each of `size` members;
    1 where there is none, and for one member, which sends nothing.
    """
    heads, kv_heads = problem.num_heads // size, problem.num_kv_heads // size
    if size == 1 or not kv_heads:
        return 1
    return max(n for n in range(1, _MOST_SLICES + 1) if _divide(heads, kv_heads, n))


def _divide(heads: int, kv_heads: int, slices: int) -> bool:
    """Whether all slices have as many query heads, and whole kv heads or the same share of one."""
    even = kv_heads % slices == 0 or slices % kv_heads == 0
    return even and heads % slices == 0


def of_groups(problem: Problem, size: int, across: bool = False) -> Problem:
    """The problem that the members with the same number in their groups solve together.

    Groups of `size` ranks take the place of ranks; each member has a part of the heads. across:
    whether a group has a rank of each of `size` nodes; else its ranks are neighbours. Raises
    InputError where groups or heads do not divide.
    """
    world, heads, kv_heads = problem.world_size, problem.num_heads, problem.num_kv_heads
    if size < 1 or world % size:
        raise InputError(
            f"all-to-all: the size of a group must divide the number of ranks, got groups of "
            f"{size} and {world} ranks; name a divisor of {world}: 'hybrid:N'"
        )
    if kv_heads % size:
        raise InputError(
            f"all-to-all: the {size} ranks of a group share the heads, so {size} must divide the "
            f"number of kv heads, got {kv_heads} kv heads (and {heads} query heads); use smaller "
            "groups ('hybrid:N'), or a ring"
        )
    layouts = [
        Layout(
            f"{layout.kind} in groups of {size}",
            layout.seq_len,
            world // size,
            _group_runs(_by_group(layout.runs, size, across), size),
            layout.digest,
        )
        for layout in (problem.q_layout, problem.kv_layout)
    ]
    q_layout, kv_layout = layouts
    return replace(
        problem,
        q_layout=q_layout,
        kv_layout=kv_layout,
        num_heads=heads // size,
        num_kv_heads=kv_heads // size,
        # The members sum the sinks' gradient over their own queries, before heads are spread.
        scores=problem.scores._replace(sinks_need_grad=False),
    )


def _by_group(runs: _Runs, size: int, across: bool) -> _Runs:
    """The runs of all ranks, group after group."""
    groups = len(runs) // size
    return tuple(own for first in range(groups) for own in runs[first::groups]) if across else runs


def _group_runs(runs: _Runs, size: int) -> _Runs:
    """The runs of each group's members in order of position, joined where they touch.

    One group of all ranks has all positions in one run. Where there are several groups, the two
    blocks of a group (see `blocks_of`) are not joined with each other, so that gradient sums can
    travel block by block.
    """
    if size == len(runs):
        return ((range(sum(len(run) for own in runs for run in own)),),)
    groups = []
    for first in range(0, len(runs), size):
        members = [run for own in runs[first : first + size] for run in own if run]
        members.sort(key=lambda run: run.start)
        parts = blocks_of(tuple(members) or (range(0),), 2)
        groups.append(tuple(one_range(runs) for part in parts for runs in stretches(part)))
    return tuple(groups)
