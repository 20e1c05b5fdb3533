"""The table of strategies: the meaning of each name, and the programs that it makes.

A strategy may have several programs, which differ in the side that travels or in its route;
`planning/choose.py` takes one of them. A new strategy is a row here, and where it has operations of
its own, a module that makes its programs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from math import gcd
from typing import NamedTuple

from burst_rt.errors import InputError
from burst_rt.planning.masks import Rule
from burst_rt.planning.problem import Problem
from burst_rt.planning.strategies.groups import most_slices
from burst_rt.planning.strategies.hops import num_blocks
from burst_rt.planning.strategies.hybrid import backward_hybrid, forward_hybrid
from burst_rt.planning.strategies.program import Program
from burst_rt.planning.strategies.ring import (
    Ring,
    backward_ring,
    forward_ring,
    sends_single_blocks,
)
from burst_rt.planning.strategies.ring_naive import ring_naive
from burst_rt.planning.strategies.routes import OneRing, Route, Straight, TwoLevel

__all__ = ["STRATEGIES", "TABLE", "Direction", "Strategy", "check_name", "few_queries"]

# Programs, each with its name.
_Programs = Iterator[tuple[str, Program]]
# Routes, each with its name; no route: round the ranks, in the direction that takes fewer hops.
_Routes = Iterable[tuple[str, Route | None]]
# Names of the sides that may travel in the backward of a ring, and whether these are the queries.
_SIDES = {"ring-kv": False, "burst": True}


class Direction(NamedTuple):
    """What programs are made for: one direction of a problem."""

    problem: Problem
    forward: bool
    ranks_per_node: int
    # The number in the strategy's name: ranks of a group ("hybrid:4"), or slices ("sliced:4").
    size: int | None = None

    @property
    def world_size(self) -> int:
        return self.problem.world_size


class Strategy(NamedTuple):
    """A row of the table."""

    programs: Callable[[Direction], _Programs]
    takes_size: bool = False  # whether the name may have a number: "hybrid:4"
    kernel: str | None = None  # the tile kernel that belongs to the strategy
    like: str | None = None  # another strategy, whose choice is taken under this row's kernel
    backward_like: str | None = None  # another strategy, whose backward is taken


def few_queries(problem: Problem) -> bool:
    """Whether all queries with their running states are fewer bytes than all keys and values.

    Never in self-attention.
    """
    of_q = problem.q_token_bytes + problem.out_sum_bytes + problem.row_bytes
    of_kv = problem.k_token_bytes + problem.v_token_bytes
    return problem.q_layout.seq_len * of_q < problem.kv_layout.seq_len * of_kv


def _ring_kv(d: Direction) -> _Programs:
    return _rings(d, "ring-kv", [("", None)])


def _burst(d: Direction) -> _Programs:
    """The forward of `burst` is the forward of `ring-kv`."""
    return _rings(d, "burst", [("", None)])


def _ring_q(d: Direction) -> _Programs:
    single = sends_single_blocks(d.problem, sums=True)
    yield "ring-q", _ring(d, None, queries_travel=True, single=single)


def _auto(d: Direction) -> _Programs:
    routes: list[tuple[str, Route | None]] = [("", None)]
    # Between nodes, a ring passes a row on once for all ranks of a node.
    if d.problem.mask.rule is Rule.OWN and d.ranks_per_node >= d.world_size:
        routes.append(("direct", Straight(d.world_size)))
    yield from _rings(d, "ring-kv", routes)
    if d.forward and few_queries(d.problem):
        yield from _ring_q(d)


def _direct(d: Direction) -> _Programs:
    return _rings(d, "direct", [("direct", Straight(d.world_size))])


def _two_level(d: Direction) -> _Programs:
    size = d.size or d.ranks_per_node
    name = f"two-level:{size}"
    return _rings(d, name, [(name, TwoLevel(d.world_size, size))])


def _bidirectional(d: Direction) -> _Programs:
    blocks = range(num_blocks(d.problem))
    routes = [
        (
            f"bidirectional ({label})",
            OneRing(d.world_size, tuple(-first if block % 2 else first for block in blocks)),
        )
        for first, label in ((1, "first half forward"), (-1, "first half backward"))
    ]
    return _rings(d, "bidirectional", routes, halves=True)


def _all_to_all(d: Direction) -> _Programs:
    return _hybrids(d, "all-to-all", d.world_size)


def _hybrid(d: Direction) -> _Programs:
    size = d.size or gcd(d.ranks_per_node, d.problem.num_kv_heads)
    return _hybrids(d, f"hybrid:{size}", size)


def _sliced(d: Direction) -> _Programs:
    """Between nodes; on one node, between its ranks."""
    nodes = d.world_size // d.ranks_per_node
    size = nodes if nodes > 1 else d.world_size
    slices = d.size or most_slices(d.problem, size)
    name, across = f"sliced:{slices}", size < d.world_size
    if d.forward:
        yield name, forward_hybrid(d.problem, size, slices, across)
        return
    for side, queries in (_SIDES if across else {"": False}).items():
        program = backward_hybrid(d.problem, size, slices, across, queries_travel=queries)
        yield _label(name, side), program


def _ring_naive(d: Direction) -> _Programs:
    yield "ring-naive", ring_naive(d.problem, forward=d.forward)


TABLE: dict[str, Strategy] = {
    "all-to-all": Strategy(_all_to_all),
    "auto": Strategy(_auto),
    "bidirectional": Strategy(_bidirectional),
    "burst": Strategy(_burst),
    "burst-untiled": Strategy(_burst, kernel="untiled", like="burst"),
    "direct": Strategy(_direct),
    "hybrid": Strategy(_hybrid, takes_size=True),
    "ring-kv": Strategy(_ring_kv),
    "ring-naive": Strategy(_ring_naive),
    "ring-q": Strategy(_ring_q, backward_like="burst"),
    "sliced": Strategy(_sliced, takes_size=True),
    "two-level": Strategy(_two_level, takes_size=True),
}
STRATEGIES = tuple(TABLE)


def check_name(strategy: object, where: str = "burst_attention") -> tuple[str, int | None]:
    """A strategy's name and the number in it, if any. Raises InputError, about `where`."""
    name, colon, number = strategy.partition(":") if isinstance(strategy, str) else ("", "", "")
    row = TABLE.get(name)
    if row is None or (colon and not (row.takes_size and re.fullmatch(r"[1-9][0-9]{0,8}", number))):
        known = [f"{name}[:N]" if row.takes_size else name for name, row in TABLE.items()]
        raise InputError(
            f"{where}: strategy must be one of {known} (N: ranks, or slices, 1 or more), got "
            f"{strategy!r}"
        )
    return name, int(number) if colon else None


def _rings(d: Direction, name: str, routes: _Routes, *, halves: bool = False) -> _Programs:
    """Rings in which keys travel in the forward, and either side in the backward.

    halves: whether the halves of a shard go different ways, so that it is two blocks.
    """
    single = not halves and sends_single_blocks(d.problem, sums=not d.forward)
    for route_name, route in routes:
        if d.forward:
            yield route_name or name, _ring(d, route, single=single)
            continue
        for side, queries in _SIDES.items():
            label = _label(route_name, side)
            yield label, _ring(d, route, queries_travel=queries, single=single)


def _ring(d: Direction, route: Route | None, *, queries_travel: bool = False, single: bool) -> Ring:
    """A ring by a route; without one, round the ranks in the direction that takes fewer hops."""
    make = forward_ring if d.forward else backward_ring
    ring = make(d.problem, queries_travel=queries_travel, route=route, single_block=single)
    if route is not None or single or d.problem.mask.rule is not Rule.OWN or d.world_size < 3:
        return ring
    back = OneRing(d.world_size, (-1,) * num_blocks(d.problem))
    other = make(d.problem, queries_travel=queries_travel, route=back, single_block=single)
    return min(ring, other, key=Ring.reach)


def _hybrids(d: Direction, name: str, size: int) -> _Programs:
    """All-to-all in groups of `size` ranks, with a ring between them."""
    if d.forward:
        yield name, forward_hybrid(d.problem, size)
        return
    # One group does not need a ring: nothing travels.
    for side, queries in (_SIDES if size < d.world_size else {"": False}).items():
        yield _label(name, side), backward_hybrid(d.problem, size, queries_travel=queries)


def _label(*words: str) -> str:
    return " with ".join(word for word in words if word)
