"""Strategies: how attention is spread over ranks; their names, and the choice by bytes.

A strategy turns a `Problem` into a `Program`: one graph for each rank and direction.

| strategy | forward sends | backward sends |
|---|---|---|
| `ring-kv` | K, V | K, V, dK, dV |
| `burst` | K, V | Q, dO, lse, delta, dQ |
| `ring-q` | Q, and the sums that out is made from | as `burst` |
| `auto` | as `ring-kv`, `direct` [1] or `ring-q` [2]: the fewest bytes | of both sides, too |
| `bidirectional` | K, V: one half each way round | as `auto`, one half each way round |
| `direct` | K, V: from the owner straight to each rank that needs them | as `auto`, the same way |
| `two-level:N` | K, V: inside nodes of N ranks, and between them | as `auto`, the same way |
| `all-to-all` | Q, K, V, out | Q, K, V, dO, lse, delta, dQ, dK, dV |
| `hybrid:N` | as `all-to-all` in groups of N ranks, as `auto` between them | the same |
| `burst-untiled` | as `burst`, without tiles in fast memory: to compare with | the same |
| `ring-naive` | K, then V; whole rows of scores: to compare with | K, then V, dV, then K, dK |

[1] `direct` only on one host, and for masks that are more than causal. [2] Only where queries are
so few that they and their sums are fewer bytes than keys and values.

A ring passes rows to the next rank, or, where a mask makes that fewer hops, to the rank before
("backwards"): under a window keys are needed by the next ranks, and queries need the keys of the
ranks before.

N may be left out. It is then the number of ranks of a host, where all hosts have as many; in
`hybrid` it is the largest divisor of that number that also divides the kv heads.

Neither torch nor MPI is imported, so that planning and simulating need no accelerator's software.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import gcd
from typing import NamedTuple

from burst_rt.errors import InputError
from burst_rt.planning.masks import Rule
from burst_rt.planning.problem import Problem
from burst_rt.planning.strategies.hops import num_blocks
from burst_rt.planning.strategies.hybrid import Hybrid, backward_hybrid, forward_hybrid
from burst_rt.planning.strategies.program import AGREE, Footprint, Program
from burst_rt.planning.strategies.ring import Ring, backward_ring, forward_ring, sends_single_blocks
from burst_rt.planning.strategies.ring_naive import RingNaive, ring_naive
from burst_rt.planning.strategies.routes import OneRing, Route, Straight, TwoLevel

__all__ = [
    "AGREE",
    "STRATEGIES",
    "Choice",
    "Footprint",
    "Hybrid",
    "Program",
    "Ring",
    "RingNaive",
    "check_name",
    "choose",
    "few_queries",
]

STRATEGIES = (
    "all-to-all",
    "auto",
    "bidirectional",
    "burst",
    "burst-untiled",
    "direct",
    "hybrid",
    "ring-kv",
    "ring-naive",
    "ring-q",
    "two-level",
)
# Names of strategies that take a number of ranks: "hybrid:4".
_SIZED = ("hybrid", "two-level")
# Names of the sides that may travel in the backward of a ring, and whether these are the queries.
_SIDES = {"ring-kv": False, "burst": True}


class Choice(NamedTuple):
    """The program taken, and what it was chosen from."""

    program: Program
    strategy: str  # the name of the strategy taken
    candidates: dict[str, int]  # bytes that all ranks together would send with each candidate
    kernel: str | None = None  # the tile kernel that belongs to the strategy, if there is one
    # the forecast time of each candidate, where forecasts were made
    seconds: Mapping[str, float] | None = None


def check_name(strategy: object, where: str = "burst_attention") -> tuple[str, int | None]:
    """A strategy's name and the number of ranks in it, if any. Raises InputError, about `where`."""
    name, colon, number = strategy.partition(":") if isinstance(strategy, str) else ("", "", "")
    if name not in STRATEGIES or (
        colon and (name not in _SIZED or not re.fullmatch(r"[1-9][0-9]{0,8}", number))
    ):
        known = [f"{known}[:N]" if known in _SIZED else known for known in STRATEGIES]
        raise InputError(
            f"{where}: strategy must be one of {known} (N: ranks, 1 or more), got {strategy!r}"
        )
    return name, int(number) if colon else None


def choose(problem: Problem, strategy: str, *, forward: bool, ranks_per_node: int = 1) -> Choice:
    """The program for one direction.

    A strategy may have several programs, which differ in the side that travels or in its route. The
    program that sends the fewest bytes is taken. Ties go to the first: `ring-kv` before `burst`,
    because it sends fewer messages, and rings before `direct`, because neighbours are near. Raises
    InputError for a strategy that this problem does not allow.
    """
    name, number = check_name(strategy)
    if name == "burst-untiled":
        return choose(problem, "burst", forward=forward)._replace(strategy=name, kernel="untiled")
    if not forward and not any(problem.needs_grad):
        # Sinks alone need a gradient. It follows from lse and delta, so no strategy has tiles or
        # messages.
        return Choice(backward_ring(problem, queries_travel=False), "ring-kv", {"ring-kv": 0})
    if name == "ring-q" and not forward:
        return choose(problem, "burst", forward=forward)
    programs = dict(_programs(problem, name, number, forward, ranks_per_node))
    candidates = {label: program.wire_bytes() for label, program in programs.items()}
    taken = name if name in programs else min(candidates, key=candidates.__getitem__)
    return Choice(programs[taken], taken, candidates)


def _programs(
    problem: Problem, name: str, size: int | None, forward: bool, ranks_per_node: int
) -> Iterator[tuple[str, Program]]:
    """The programs that a strategy may turn into, each with its name."""
    if name in ("all-to-all", "hybrid"):
        group = (
            problem.world_size
            if name == "all-to-all"
            else size or gcd(ranks_per_node, problem.num_kv_heads)
        )
        # One group does not need a ring: nothing travels.
        sides = _SIDES if group < problem.world_size else {"": False}
        for side, queries in {"": False}.items() if forward else sides.items():
            program = (
                forward_hybrid(problem, group)
                if forward
                else backward_hybrid(problem, group, queries_travel=queries)
            )
            yield _label(name if name == "all-to-all" else f"hybrid:{group}", side), program
        return
    if name == "ring-naive":
        yield name, ring_naive(problem, forward=forward)
        return
    for way, route in _routes(problem, name, size or ranks_per_node):
        sums = not forward or name == "ring-q"
        single = name != "bidirectional" and sends_single_blocks(problem, sums=sums)
        make = partial(_one_way, problem, route, single=single)
        if forward and name == "ring-q":
            yield name, make(forward_ring, queries_travel=True)
        elif forward:
            # The forward of `burst` is the forward of `ring-kv`; `auto` calls it so.
            yield way or name.replace("auto", "ring-kv"), make(forward_ring)
        else:
            for side, queries in _SIDES.items():
                yield _label(way, side), make(backward_ring, queries_travel=queries)
    if name == "auto" and forward and few_queries(problem):
        yield from _programs(problem, "ring-q", None, forward, ranks_per_node)


def _one_way(
    problem: Problem,
    route: Route | None,
    make: Callable[..., Ring],
    *,
    single: bool,
    queries_travel: bool = False,
) -> Ring:
    """A ring by a route; without one, round the ranks in the direction that takes fewer hops."""
    ring = make(problem, queries_travel=queries_travel, route=route, single_block=single)
    if route is not None or single or problem.mask.rule is not Rule.OWN or problem.world_size < 3:
        return ring
    back = OneRing(problem.world_size, (-1,) * num_blocks(problem))
    other = make(problem, queries_travel=queries_travel, route=back, single_block=single)
    return min(ring, other, key=Ring.reach)


def few_queries(problem: Problem) -> bool:
    """Whether all queries with their running states are fewer bytes than all keys and values.

    Never in self-attention.
    """
    of_q = problem.q_token_bytes + problem.out_sum_bytes + problem.row_bytes
    of_kv = problem.k_token_bytes + problem.v_token_bytes
    return problem.q_layout.seq_len * of_q < problem.kv_layout.seq_len * of_kv


def _routes(problem: Problem, name: str, size: int) -> Iterator[tuple[str, Route | None]]:
    if name == "two-level":
        yield f"two-level:{size}", TwoLevel(problem.world_size, size)
    elif name == "direct":
        yield name, Straight(problem.world_size)
    elif name == "bidirectional":
        blocks = range(num_blocks(problem))
        for first, label in ((1, "first half forward"), (-1, "first half backward")):
            yield (
                f"bidirectional ({label})",
                OneRing(
                    problem.world_size, tuple(-first if block % 2 else first for block in blocks)
                ),
            )
    else:
        yield "", None
        # Between nodes, a ring passes a row on once for all ranks of a node.
        if name == "auto" and problem.mask.rule is Rule.OWN and size >= problem.world_size:
            yield "direct", Straight(problem.world_size)


def _label(*words: str) -> str:
    return " with ".join(word for word in words if word)
