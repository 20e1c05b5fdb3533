"""RingAttention without tiles: K goes round and each rank keeps whole rows of scores; V goes round.

This is the baseline of the BurstAttention paper (arXiv 2403.09347, section 4), the ring of
"Sequence Parallelism" (arXiv 2105.13120). It is here to be compared with. A rank holds n x N scores
a head, in the type of the sums, so that memory grows with the square of the sequence.

* forward: K round: scores; softmax of whole rows; V round: out. Sends K, V: 2 s E / g a hop.
* backward: K round: the probabilities again, from lse; V round with dV: dV, and dS over the
  probabilities; K round with dK: dQ, dK.
  Sends K, V, K, dV, dK: (3 s + 2 a) E / g a hop.

The letters are explained in `hybrid.py`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import ClassVar

from burst_rt.planning.operations import FinishRows, TileOperation
from burst_rt.planning.problem import Problem
from burst_rt.planning.roles import Role
from burst_rt.planning.strategies.hops import num_blocks
from burst_rt.planning.strategies.program import Footprint
from burst_rt.planning.strategies.ring import Ring, forward_ring
from burst_rt.planning.strategies.ring_builder import RingBuilder
from burst_rt.planning.strategies.routes import OneRing
from burst_rt.scheduler import HOST_LANES, Cost, Graph, GraphBuilder, Lane, Transfer

__all__ = [
    "Blank", "Probabilities", "Products", "RingNaive", "ScoreGradients", "Scores", "Softmax",
    "Weigh", "ring_naive",
]  # fmt: skip


class Scores(TileOperation):
    """Writes the scores of a tile into whole rows of scores."""

    name = "scores"
    flops = (2, 0)


class Weigh(TileOperation):
    """Adds the values of a tile, weighted by whole rows of probabilities."""

    name = "weigh"
    flops = (0, 2)


class Probabilities(TileOperation):
    """Writes the probabilities of a tile into whole rows."""

    name = "probabilities"
    flops = (2, 0)


class ScoreGradients(TileOperation):
    """Adds dv of a tile, and makes gradients of scores from its probabilities."""

    name = "score gradients"
    flops = (0, 4)


class Products(TileOperation):
    """Adds dq and dk of a tile."""

    name = "products"
    flops = (4, 0)


@dataclass(frozen=True)
class Blank:
    """Fills whole rows of scores with the value for "no key seen"."""

    name: ClassVar[str] = "blank"


@dataclass(frozen=True)
class Softmax:
    """Turns whole rows of scores into probabilities, unnormalised."""

    name: ClassVar[str] = "softmax"


@dataclass(frozen=True)
class RingNaive:
    """A `Program`: rounds of the ring one after another, with the scores between them."""

    problem: Problem
    forward: bool
    rounds: tuple[Ring, ...]

    @property
    def queries_travel(self) -> bool:
        return False

    @property
    def ring_size(self) -> int:
        return self.problem.world_size

    @property
    def wiring(self) -> Hashable:
        """See `Program.wiring`."""
        return self.forward, tuple(ring.wiring for ring in self.rounds)

    def graph(self, rank: int, lanes: tuple[Lane, ...] = HOST_LANES) -> Graph:
        """See `Program.graph`."""
        g = GraphBuilder(rank, self.problem.world_size, lanes)
        first, *rest = (RingBuilder(ring, rank, g) for ring in self.rounds)
        first.agree()
        scores = first.resident_sums[Role.SCORES]
        if not self.forward:
            first.deltas()
        if any(self.problem.q_runs[rank]):
            g.compute("blank", Blank(), writes=[scores], cost=Cost(0, self.score_bytes(rank)))
        tag = first.go_round()
        if self.forward and any(self.problem.q_runs[rank]):
            # The scores are read for the maximum, read and written for the exponential, read for
            # the sum.
            cost = Cost(0, 4 * self.score_bytes(rank))
            g.compute(
                "softmax",
                Softmax(),
                accumulates=[scores, rest[0].resident_sums[Role.STATE]],
                cost=cost,
            )
        for builder in rest:
            tag = builder.go_round(tag)
        if self.forward and any(self.problem.q_runs[rank]):
            cost = Cost(0, 3 * self.problem.q_layout.shard_len(rank) * self.problem.out_sum_bytes)
            g.compute(
                "finish", FinishRows(), accumulates=[rest[0].resident_sums[Role.STATE]], cost=cost
            )
        return g.build()

    def messages(self, rank: int) -> Iterator[Transfer]:
        """See `Program.messages`."""
        tag = 0
        for ring in self.rounds:
            yield from ring.messages(rank, tag)
            tag += ring.num_tags

    def forget(self) -> None:
        """See `Program.forget`."""
        for ring in self.rounds:
            ring.forget()

    def tiles(self, rank: int) -> Iterator[tuple[tuple[range, ...], tuple[range, ...]]]:
        """See `Program.tiles`: none, because no kernel computes whole rows of scores."""
        return iter(())

    def wire_bytes(self) -> int:
        """Bytes that all ranks together send."""
        return sum(ring.wire_bytes() for ring in self.rounds)

    @cached_property
    def columns(self) -> tuple[tuple[int, ...], ...]:
        """The column at which a block's keys begin in a row of scores, by owner and block."""
        starts, at = [], 0
        for bounds in self.rounds[0].travelling_bounds:
            starts.append(tuple(at + start for start, _ in bounds))
            at += bounds[-1][1]
        return tuple(starts)

    def footprint(self, rank: int) -> Footprint:
        """See `Program.footprint`: scores of whole rows among the sums."""
        # For `Ring` none of these rounds is a forward, so its footprint lacks the running state.
        # The state is as large as in any forward.
        inner = self.rounds[-1].footprint(rank)
        sums = forward_ring(self.problem).footprint(rank).sums if self.forward else inner.sums
        return Footprint(sums + self.score_bytes(rank), 2 * inner.copies, inner.tile)

    def score_bytes(self, rank: int) -> int:
        """Bytes of the whole rows of scores of a rank's queries."""
        problem = self.problem
        return (
            problem.batch
            * problem.num_heads
            * problem.q_layout.shard_len(rank)
            * problem.kv_layout.seq_len
            * problem.sum_bytes
        )

    def __str__(self) -> str:
        return "; then ".join(map(str, self.rounds)) + "; whole rows of scores are kept"


@lru_cache(maxsize=8)
def ring_naive(problem: Problem, *, forward: bool) -> RingNaive:
    """The program of one direction of `ring-naive`. Gradients that are not needed are neither
    summed nor sent.
    """
    needs_q, needs_k, needs_v = problem.needs_grad
    route = OneRing(problem.world_size, (1,) * num_blocks(problem))
    k, v = ((Role.K, problem.k_token_bytes),), ((Role.V, problem.v_token_bytes),)
    keys_travel = partial(Ring, problem=problem, queries_travel=False, route=route)
    if forward:
        rounds = [
            keys_travel(
                operation=Scores, bundle=k, resident_roles=(Role.Q,), resident_sums=(Role.SCORES,)
            ),
            keys_travel(
                operation=Weigh,
                bundle=v,
                resident_roles=(Role.SCORES,),
                resident_sums=(Role.STATE,),
            ),
        ]
        return RingNaive(problem, True, tuple(rounds))
    rounds = [
        keys_travel(
            operation=Probabilities,
            bundle=k,
            resident_roles=(Role.Q, Role.ROWS),
            resident_sums=(Role.SCORES,),
        ),
        keys_travel(
            operation=ScoreGradients,
            bundle=v,
            sums=((Role.DV, problem.v_sum_bytes),) if needs_v else (),
            resident_roles=(Role.DOUT, Role.ROWS),
            resident_sums=(Role.SCORES,),
        ),
    ]
    if needs_k or needs_q:
        rounds.append(
            keys_travel(
                operation=Products,
                bundle=k,
                sums=((Role.DK, problem.k_sum_bytes),) if needs_k else (),
                resident_roles=(Role.Q, Role.SCORES),
                resident_sums=(Role.DQ,) if needs_q else (),
            )
        )
    return RingNaive(problem, False, tuple(rounds))
