"""Strategies: how attention is spread over ranks. A strategy turns a `Problem` into one graph per rank and direction.

| strategy | forward sends | backward sends |
|---|---|---|
| `ring-kv` | K, V | K, V, dK, dV |
| `burst` | K, V | Q, dO, lse, delta, dQ |
| `auto` | K, V | whichever of the two sends fewer bytes for this problem |

Pure Python: neither torch nor MPI, so that planning and simulating need only Python.
"""

from __future__ import annotations

from typing import NamedTuple

from burst_rt.attention.problem import Problem
from burst_rt.attention.strategies.ring import AGREE, Ring, backward_ring, forward_ring

__all__ = ["AGREE", "STRATEGIES", "Choice", "Ring", "choose"]

STRATEGIES = ("auto", "burst", "ring-kv")


class Choice(NamedTuple):
    """The ring taken, the strategy's name, and the bytes all ranks together would send with each candidate."""

    ring: Ring
    strategy: str
    candidates: dict[str, int]


def choose(problem: Problem, strategy: str, *, forward: bool) -> Choice:
    """The ring for one direction. `auto` takes the fewest bytes; ties go to `ring-kv`, whose messages are fewer."""
    if forward:
        ring = forward_ring(problem)
        return Choice(ring, strategy, {strategy: ring.wire_bytes()})
    rings = {"ring-kv": backward_ring(problem, queries_travel=False), "burst": backward_ring(problem, queries_travel=True)}
    candidates = {name: ring.wire_bytes() for name, ring in rings.items()}
    taken = min(candidates, key=candidates.__getitem__) if strategy == "auto" else strategy
    return Choice(rings[taken], taken, candidates)
