"""Rings: one side of the attention is resident; the other side travels, and so do its sums.

The idea in plain torch, for a forward without a mask (docs/how.md has it, and a test runs it):

    import torch
    import torch.distributed as dist


    def ring_attention(q, k, v):  # [tokens, head_dim]: this rank's equal share of the sequence
        rank, world = dist.get_rank(), dist.get_world_size()
        out, lse = torch.zeros_like(q), q.new_full((len(q), 1), -torch.inf)
        for hop in range(world):
            if hop < world - 1:  # the next block travels while this one is computed with
                slot = torch.empty_like(k), torch.empty_like(v)
                ops = [dist.P2POp(dist.isend, x, (rank + 1) % world) for x in (k, v)]
                ops += [dist.P2POp(dist.irecv, x, (rank - 1) % world) for x in slot]
                requests = dist.batch_isend_irecv(ops)
            scores = q @ k.T / q.shape[-1] ** 0.5
            merged = torch.logaddexp(lse, scores.logsumexp(-1, keepdim=True))
            out = (lse - merged).exp() * out + (scores - merged).exp() @ v
            lse = merged
            if hop < world - 1:
                for request in requests:
                    request.wait()
                k, v = slot
        return out, lse

One builder (`ring_builder.py`) makes four graphs:

* forward: K, V travel; a query's running state is resident;
* forward of `ring-q` (the pass-Q of arXiv 2411.01783): Q travels with its running state; K, V are
  resident;
* backward of `ring-kv` (RingAttention, arXiv 2310.01889): K, V travel with dK, dV; dQ is resident;
* backward of `burst` (BurstAttention, arXiv 2403.09347, algorithm 2): Q, dO, lse, delta travel with
  dQ; dK, dV are resident.

`hops.py` says which rows are where at each hop. While the tiles of a hop run, one exchange passes
the bundle on and receives the next bundle into another slot. A tile is one travelling block against
the whole resident shard.

The owner keeps its own contribution to the sums of its block. Sums travel block by block, each as
soon as its last tile is done, so that a rank's first tiles of a hop do not wait for all tiles of
the previous rank.
Under the full mask, for which positions do not matter, a shard travels as one block where no sums
travel or its tokens are few: half the tasks, and larger tiles. lse and delta of a block, and m
and l of a state, travel whole, because they are few bytes.

The mask decides in two ways. Which rows each rank needs (`Ring.needed`) shapes the graphs: rings
with equal `wiring` have equal graphs, except for pieces and costs. The pieces of tiles and their
costs are data in the tasks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property

from burst_rt.planning.caches import kept_results
from burst_rt.planning.masks import Rule, Shape
from burst_rt.planning.operations import BackwardTile, ForwardTile
from burst_rt.planning.problem import Problem, TileShape
from burst_rt.planning.roles import GRADIENTS, Role
from burst_rt.planning.strategies.hops import num_blocks, num_tokens
from burst_rt.planning.strategies.program import Footprint
from burst_rt.planning.strategies.ring_builder import RingBuilder
from burst_rt.planning.strategies.rounds import Round
from burst_rt.planning.strategies.routes import OneRing, Route
from burst_rt.scheduler import HOST_LANES, Graph, GraphBuilder, Lane

__all__ = ["Ring", "backward_ring", "forward_ring", "sends_single_blocks"]

# Maximum number of tokens of a shard that travels as one block with its sums: with so few, a tile
# takes less time than the overhead of a task.
_FEW_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Ring(Round):
    """One ring: a round of its own. A `Program`."""

    def graph(self, rank: int, lanes: tuple[Lane, ...] = HOST_LANES) -> Graph:
        """See `Program.graph`."""
        g = GraphBuilder(rank, self.problem.world_size, lanes)
        builder = RingBuilder(self, rank, g)
        builder.agree()
        if not self.forward:
            builder.deltas()
        builder.go_round()
        return builder.g.build()

    @property
    def ring_size(self) -> int:
        return self.problem.world_size

    def __str__(self) -> str:
        if not self.adds:
            return "nothing travels"
        back = isinstance(self.route, OneRing) and set(self.route.directions) == {-1}
        return ", ".join(_roles((*self.bundle, *self.sums))) + " travel" + ", backwards" * back

    @cached_property
    def wiring(self) -> Hashable:
        """See `Program.wiring`: lengths of what travels, bytes, and rows that ranks need."""
        has_residents = tuple(any(runs) for runs in self.resident)
        return (
            self.operation, self.queries_travel, self.bundle, self.sums, self.resident_roles,
            self.resident_sums, self.route, self.problem.sink_bytes, self.travelling_bounds,
            has_residents, self.needed,
        )  # fmt: skip

    def footprint(self, rank: int) -> Footprint:
        """See `Program.footprint`.

        Messages must be contiguous: a rank's own blocks are copied if batch > 1. Copies of strided
        inputs are not counted.
        """
        sums, spared = self._sum_bytes(rank)
        copies = 0
        if self.problem.batch > 1:
            bundle = sum(size for role, size in self.bundle if not role.pairs)
            sent = (block for block, rows in enumerate(self.bundles[rank]) if any(rows))
            copies = sum(self.block_len(rank, block) * bundle for block in sent)
        return Footprint(sums, copies, self._largest_tile(rank), spared)

    def _sum_bytes(self, rank: int) -> tuple[int, int]:
        """`Footprint.sums` and `Footprint.spared`."""
        problem = self.problem
        q_len, kv_len = num_tokens(problem.q_runs[rank]), num_tokens(problem.kv_runs[rank])
        # Where outputs have the sums' type, an output is the sum itself.
        in_place = problem.input_bytes == problem.sum_bytes
        if self.forward:
            return q_len * (problem.row_bytes + (0 if in_place else problem.out_sum_bytes)), 0
        needs_q, needs_k, needs_v = problem.needs_grad
        wide = 0
        if not in_place:
            wide = q_len * problem.q_sum_bytes * needs_q + kv_len * (
                problem.k_sum_bytes * needs_k + problem.v_sum_bytes * needs_v
            )
        return q_len * problem.row_bytes + wide + problem.sink_bytes, wide

    def _largest_tile(self, rank: int) -> TileShape:
        problem = self.problem
        blocks = [
            (owner, block)
            for owner, needed in enumerate(self.needed)
            for block, rows in enumerate(needed)
            if rows[rank]
        ]
        longest = max((self.block_len(*block) for block in blocks), default=0)
        stays = num_tokens(self.resident[rank])
        shapes = {piece.shape for block in blocks for piece in self.pieces(*block, rank)}
        masked = Shape.MASKED in shapes
        return TileShape(
            problem.batch,
            problem.num_heads,
            problem.num_kv_heads,
            max(problem.head_dim, problem.v_head_dim),
            *((longest, stays) if self.queries_travel else (stays, longest)),
            problem.mask.num_apart(problem.batch, problem.num_heads) if masked else 0,
            Shape.BAND in shapes,
            problem.scores,
            problem.head_dim - problem.v_head_dim,
        )


@kept_results(8, lambda problem, *_, **options: problem.mask)
def forward_ring(
    problem: Problem,
    route: Route | None = None,
    *,
    queries_travel: bool = False,
    single_block: bool = False,
) -> Ring:
    """The forward. K, V travel: 2 tensors of E / g elements a hop.

    queries_travel: instead of them Q travels with its running state (acc, m, l), which a rank that
    has no keys for it passes on as it came. route: None takes the plain ring. single_block: see
    `sends_single_blocks`.
    """
    q_side = ((Role.Q, problem.q_token_bytes),)
    kv_side = ((Role.K, problem.k_token_bytes), (Role.V, problem.v_token_bytes))
    state = ((Role.ACC, problem.out_sum_bytes), (Role.ML, problem.row_bytes))
    return Ring(
        problem=problem,
        operation=ForwardTile,
        queries_travel=queries_travel,
        bundle=q_side if queries_travel else kv_side,
        sums=state if queries_travel else (),
        resident_roles=_roles(kv_side if queries_travel else q_side),
        resident_sums=() if queries_travel else (Role.STATE,),
        route=route or _plain(problem, single_block),
        single_block=single_block,
    )


@kept_results(16, lambda problem, *_, **options: problem.mask)
def backward_ring(
    problem: Problem,
    *,
    queries_travel: bool,
    route: Route | None = None,
    single_block: bool = False,
) -> Ring:
    """The backward of `burst` (queries travel) or of `ring-kv`.

    Gradients that are not needed are neither summed nor sent. route and single_block: as in
    `forward_ring`.
    """
    q_side = (
        (Role.Q, problem.q_token_bytes),
        (Role.DOUT, problem.out_token_bytes),
        (Role.ROWS, problem.row_bytes),
    )
    kv_side = ((Role.K, problem.k_token_bytes), (Role.V, problem.v_token_bytes))
    sizes = (problem.q_sum_bytes, problem.k_sum_bytes, problem.v_sum_bytes)
    sums = tuple(
        (role, size)
        for role, size, needed in zip(GRADIENTS, sizes, problem.needs_grad, strict=True)
        if needed
    )
    q_sums = tuple((role, size) for role, size in sums if role.queries)
    kv_sums = tuple((role, size) for role, size in sums if not role.queries)
    travels, stays = ((q_side, q_sums), (kv_side, kv_sums))[:: 1 if queries_travel else -1]
    return Ring(
        problem=problem,
        operation=BackwardTile,
        queries_travel=queries_travel,
        bundle=travels[0],
        sums=travels[1],
        resident_roles=_roles(stays[0]),
        resident_sums=_roles(stays[1]),
        route=route or _plain(problem, single_block),
        single_block=single_block,
    )


def sends_single_blocks(problem: Problem, *, sums: bool) -> bool:
    """Whether a shard is better sent as one block. sums: whether sums travel.

    True if every rank needs every block, and no sums travel or every shard has few tokens.
    """
    return problem.mask.rule is Rule.EVERYTHING and (
        not sums
        or all(
            num_tokens(shard) <= _FEW_TOKENS
            for shards in (problem.q_runs, problem.kv_runs)
            for shard in shards
        )
    )


def _plain(problem: Problem, single_block: bool) -> Route:
    return OneRing(problem.world_size, (1,) * num_blocks(problem, single_block))


def _roles(tensors: Iterable[tuple[Role, int]]) -> tuple[Role, ...]:
    return tuple(role for role, _ in tensors)
