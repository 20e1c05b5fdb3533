"""Rings: one side of the attention stays at home; the other side travels, and so do its sums.

One builder makes three graphs:

* forward: K, V travel; a query's running state stays at home;
* backward of `ring-kv` (RingAttention, arXiv 2310.01889): K, V travel with dK, dV; dQ stays at
  home;
* backward of `burst` (BurstAttention, arXiv 2403.09347, algorithm 2): Q, dO, lse, delta travel with
  dQ; dK, dV stay at home.

Everything makes W-1 hops along a `Route`: the ring of all ranks, or another way round. While the
tiles of a hop run, one exchange passes the bundle on and receives the next bundle into another
slot. A tile is one travelling block against the whole shard at home.

The owner keeps its own contribution at home. The first rank after the owner that has a contribution
starts the travelling sum, and the last hop brings the sum home. Sums travel block by block, each as
soon as its last tile is done, so that a rank's first tiles of a hop do not wait for all tiles of
the previous rank. Shards of a few tokens under the full mask, for which positions do not matter,
travel as one block: half the messages and tasks.

Three things are not sent: a block that no rank further on computes with, a sum that no rank has
started, an empty block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from burst_rt.planning.masks import Piece, Rule
from burst_rt.planning.operations import (
    Add,
    BackwardTile,
    Delta,
    Finish,
    ForwardTile,
    Probabilities,
    Products,
    ScoreGradients,
    Scores,
    TileOperation,
    Weigh,
)
from burst_rt.planning.problem import Problem, TileShape
from burst_rt.planning.roles import GRADIENTS, Role
from burst_rt.planning.strategies.program import AGREE, Footprint
from burst_rt.planning.strategies.routes import OneRing, Route
from burst_rt.planning.strategies.sinks import own_share, share_bytes_sent, sum_shares
from burst_rt.scheduler import HOST_LANES, Buffer, Cost, Graph, GraphBuilder, Lane, Part

__all__ = ["Ring", "RingBuilder", "backward_ring", "forward_ring", "travels_whole"]

_T = TypeVar("_T")

# How wide the edge of a causal mask is, in keys: about the size of a kernel's blocks.
_EDGE = 512
# The most tokens of a shard that travels as one block: with so few, a tile takes less time than the
# overhead of a task.
_FEW_TOKENS = 64
# Floating-point operations of a tile for one (query, key) pair, head and batch row, in units of
# head_dim and of v's head_dim: 2 for each matrix product.
_FLOPS: dict[type[TileOperation], tuple[int, int]] = {
    ForwardTile: (2, 2),
    BackwardTile: (6, 4),
    Scores: (2, 0),
    Weigh: (0, 2),
    Probabilities: (2, 0),
    ScoreGradients: (0, 4),
    Products: (4, 0),
}


@dataclass(frozen=True, kw_only=True)
class Ring:
    """One ring: what travels, what stays, and what a tile does. A `Program`."""

    problem: Problem
    operation: type[TileOperation]  # what a tile does
    queries_travel: bool  # whether the query side travels; else keys and values do
    bundle: tuple[tuple[Role, int], ...]  # the tensors that travel, with their bytes a token
    sums: tuple[tuple[Role, int], ...] = ()  # the sums that travel, with their bytes a token
    home: tuple[Role, ...]  # the tensors that stay
    home_sums: tuple[Role, ...]  # the sums at home that a tile adds to
    route: Route  # which way round
    whole: bool = False  # whether a shard travels as one block

    def graph(self, rank: int, lanes: tuple[Lane, ...] = HOST_LANES) -> Graph:
        """See `Program.graph`."""
        builder = RingBuilder(self, rank, GraphBuilder(rank, self.problem.world_size, lanes))
        builder.agree()
        if not self.forward:
            builder.deltas()
        builder.go_round()
        return builder.g.build()

    @property
    def ring_size(self) -> int:
        return self.problem.world_size

    def __str__(self) -> str:
        return ", ".join(_roles((*self.bundle, *self.sums))) + " travel"

    @property
    def forward(self) -> bool:
        return self.operation is ForwardTile

    @cached_property
    def travelling(self) -> tuple[tuple[range, ...], ...]:
        """Blocks of the travelling side, by owner."""
        blocks = self.problem.q_blocks if self.queries_travel else self.problem.kv_blocks
        return tuple((range(sum(map(len, own))),) for own in blocks) if self.whole else blocks

    @cached_property
    def resident(self) -> tuple[tuple[range, ...], ...]:
        """Blocks of the side at home, by rank."""
        return self.problem.kv_blocks if self.queries_travel else self.problem.q_blocks

    @cached_property
    def travelling_bounds(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """By owner: (first token, last + 1) of each travelling block in its owner's shard."""
        return tuple(
            tuple(pairwise(accumulate(map(len, blocks), initial=0))) for blocks in self.travelling
        )

    @cached_property
    def resident_bounds(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """By rank: the bounds of the shard at home, which is one part."""
        return tuple(((0, sum(map(len, blocks))),) for blocks in self.resident)

    def pieces(self, travelling: range, rank: int) -> tuple[Piece, ...]:
        """What a rank has to compute with a travelling block.

        On the side at home rows or columns are counted along the whole shard.
        """
        found: list[Piece] = []
        first = 0
        for resident in self.resident[rank]:
            q, kv = (travelling, resident) if self.queries_travel else (resident, travelling)
            for piece in self.problem.mask.pieces(q, kv):
                here = _moved(piece, 0, first) if self.queries_travel else _moved(piece, first, 0)
                found.append(
                    _joined(found.pop(), here) if found and _touch(found[-1], here) else here
                )
            first += len(resident)
        return tuple(found)

    @cached_property
    def wanted(self) -> tuple[tuple[frozenset[int], ...], ...]:
        """By owner and block: the hops at which the bundle must be there.

        The rank at such a hop computes with the bundle, or passes it on to a rank that does.
        """
        return self._by_block(self._wanted)

    def _wanted(self, owner: int, number: int, block: range) -> frozenset[int]:
        hops: set[int] = set()
        for hop in reversed(range(1, self.problem.world_size)):
            if not hops.isdisjoint(self.route.onward(hop)) or self.pieces(
                block, self.route.holder(owner, hop, number)
            ):
                hops.add(hop)
        return frozenset(hops)

    @cached_property
    def starts(self) -> tuple[tuple[int, ...], ...]:
        """By owner and block: the first hop at which a rank computes with the block.

        At this hop the block's sum starts. W where no rank computes with the block.
        """
        return self._by_block(self._start)

    def _start(self, owner: int, number: int, block: range) -> int:
        for hop in range(1, self.problem.world_size):
            if self.pieces(block, self.route.holder(owner, hop, number)):
                return hop
        return self.problem.world_size

    def _by_block(self, of: Callable[[int, int, range], _T]) -> tuple[tuple[_T, ...], ...]:
        """`of(owner, number, block)` of all travelling blocks, by owner and block."""
        found = []
        for owner, blocks in enumerate(self.travelling):
            found.append(tuple(of(owner, number, block) for number, block in enumerate(blocks)))
        return tuple(found)

    def wire_bytes(self) -> int:
        """Bytes that all ranks together send.

        A bundle is sent for every hop that wants it; a sum from the first hop that adds to it until
        it is home.
        """
        world = self.problem.world_size
        bundle = sum(size for _, size in self.bundle)
        sums = sum(size for _, size in self.sums)
        shares = share_bytes_sent(self.problem) if self.operation is BackwardTile else 0
        return shares + sum(
            len(block) * (bundle * len(wanted) + sums * (world - start))
            for row in zip(self.travelling, self.wanted, self.starts, strict=True)
            for block, wanted, start in zip(*row, strict=True)
        )

    def footprint(self, rank: int) -> Footprint:
        """See `Program.footprint`.

        What travels must be contiguous: own blocks are copied where batch > 1. Copies of strided
        inputs are not counted.
        """
        problem = self.problem
        q_len, kv_len = (
            sum(map(len, problem.q_blocks[rank])),
            sum(map(len, problem.kv_blocks[rank])),
        )
        # Where outputs have the sums' type, an output is the sum itself.
        in_place = problem.input_bytes == problem.sum_bytes
        if self.forward:
            sums = q_len * (problem.row_bytes + (0 if in_place else problem.out_sum_bytes))
        else:
            needs_q, needs_k, needs_v = problem.needs_grad
            wide = q_len * problem.q_sum_bytes * needs_q + kv_len * (
                problem.k_sum_bytes * needs_k + problem.v_sum_bytes * needs_v
            )
            sums = q_len * problem.row_bytes + (0 if in_place else wide) + problem.sink_bytes
        bundle = sum(size for role, size in self.bundle if role is not Role.ROWS)
        copies = sum(
            len(block) * bundle
            for block, wanted in zip(self.travelling[rank], self.wanted[rank], strict=True)
            if wanted
        )
        block = max(len(b) for blocks in self.travelling for b in blocks)
        lengths = (block, kv_len) if self.queries_travel else (q_len, block)
        travelling = (b for blocks in self.travelling for b in blocks)
        pieces = [piece for b in travelling for piece in self.pieces(b, rank)]
        masked = any(piece.masked for piece in pieces)
        flipped = any(piece.upper for piece in pieces)
        tile = TileShape(
            problem.batch,
            problem.num_heads,
            problem.num_kv_heads,
            max(problem.head_dim, problem.v_head_dim),
            *lengths,
            problem.mask.batch if masked else 0,
            flipped,
            problem.scores,
        )
        return Footprint(sums, copies if problem.batch > 1 else 0, tile)


class RingBuilder:
    """Adds one rank's part of a ring to a graph.

    Buffers are named after their tensors; a slot's name ends with the slot's number: k0, k1. Rings
    of one graph share the buffers of the same name. Messages have tags from first_tag up to below
    end_tag.

    rank: this rank's number in the ring. ranks: the numbers of the ring's ranks in the world of the
    graph; None: the same numbers.
    """

    def __init__(
        self,
        ring: Ring,
        rank: int,
        g: GraphBuilder,
        ranks: Sequence[int] | None = None,
        first_tag: int = 0,
    ) -> None:
        problem = ring.problem
        self.ring, self.rank, self.world, self.route = ring, rank, problem.world_size, ring.route
        self.g, self.ranks = g, ranks or range(problem.world_size)
        own = [len(block) for block in ring.travelling[rank]]
        # Every owner has the same number of blocks.
        largest = [max(map(len, blocks)) for blocks in zip(*ring.travelling, strict=True)]
        # Tags of one hop: 0 for the bundle, 1 + b for the sums of block b.
        self.tags_per_hop = 1 + len(own)
        self.first_tag, self.end_tag = first_tag, first_tag + self.world * self.tags_per_hop
        self.agreed = self._buffer("agreed")
        self.home = {name: self._buffer(name, initialised=True) for name in ring.home}
        self.home_sums = {name: self._buffer(name, initialised=True) for name in ring.home_sums}
        self.own = {
            name: self._buffer(name, parts=len(own), size_bytes=_each(own, size), initialised=True)
            for name, size in ring.bundle
        }
        self.own_sums = {
            name: self._buffer(name, parts=len(own), initialised=True) for name, _ in ring.sums
        }

        def slots(tensors: tuple[tuple[Role, int], ...], number: int) -> dict[Role, Buffer]:
            return {
                name: self._buffer(
                    f"{name}{number}", parts=len(own), size_bytes=_each(largest, size)
                )
                for name, size in tensors
            }

        self.slots = [slots(ring.bundle, i) for i in range(self.route.num_slots)]
        self.sum_slots = [slots(ring.sums, i) for i in range(2)]
        # (hop, block) -> pieces, for every tile that is not empty, in order.
        self.tiles = {
            (hop, block): pieces
            for hop in range(self.world)
            for block in range(len(own))
            if (pieces := ring.pieces(ring.travelling[self._owner(hop, block)][block], rank))
        }

    def _buffer(self, name: str, **options: Any) -> Buffer:  # those of GraphBuilder.buffer
        return self.g.buffers[name] if name in self.g.buffers else self.g.buffer(name, **options)

    def agree(self) -> None:
        """Adds the task that every graph opens with."""
        self.g.compute("agree", AGREE, writes=[self.agreed], lane="control")

    def deltas(self) -> None:
        """Adds delta = rowsum(dO * O) of the rank's own queries, once, before anything uses it.

        Adds the gradient of the sinks too, which follows from delta.
        """
        share = own_share(self.g, self.ring.problem)
        travel = self.ring.queries_travel
        rows = self.own[Role.ROWS] if travel else self.home[Role.ROWS]
        lengths = (
            list(map(len, self.ring.travelling[self.rank]))
            if travel
            else [sum(map(len, self.ring.resident[self.rank]))]
        )
        for part, length in enumerate(lengths):
            if length:
                cost = Cost(0, 2 * length * self.ring.problem.out_token_bytes)
                self.g.compute(
                    f"delta {part}", Delta(part), accumulates=[rows[part], *share], cost=cost
                )
        # No exchange of a ring has the first tag: bundles and sums belong to hops from 1 on.
        sum_shares(self.g, self.ring.problem, self.agreed, self.first_tag)

    def go_round(self) -> None:
        """Adds all hops, and brings the sums home."""
        for hop in range(self.world):
            for onward in self.route.onward(hop):
                self._pass_bundle(hop, onward)
            for block in range(len(self.ring.travelling[self.rank])):
                self._tile(hop, block)
                if hop:
                    self._pass_sums(hop, block)
        for block in range(len(self.ring.travelling[self.rank])):
            self._bring_home(block)
        if self.ring.forward and not self.tiles and any(self.ring.resident[self.rank]):
            cost = Cost(
                0, sum(map(len, self.ring.resident[self.rank])) * self.ring.problem.out_sum_bytes
            )
            self.g.compute("finish", Finish(), accumulates=[self.home_sums[Role.STATE]], cost=cost)

    def _owner(self, hop: int, block: int) -> int:
        return self.route.owner(self.rank, hop, block)

    def _bundle_at(self, hop: int) -> dict[Role, Buffer]:
        return self.slots[self.route.slot(hop)] if hop else self.own

    def _pass_bundle(self, hop: int, onward: int) -> None:
        """Sends the bundle of this hop to the ranks that need it at hop `onward`.

        Receives the bundle that this rank needs at hop `onward`.
        """
        sends, recvs = [], []
        for block in range(len(self.ring.travelling[self.rank])):
            here, coming = self._owner(hop, block), self._owner(onward, block)
            if onward in self.ring.wanted[here][block]:
                sends += self._messages(self.ring.bundle, self._bundle_at(hop), here, block, onward)
            if onward in self.ring.wanted[coming][block]:
                recvs += self._messages(
                    self.ring.bundle, self._bundle_at(onward), coming, block, hop
                )
        if sends or recvs:
            name = f"hop {hop}" if onward == hop + 1 else f"hop {hop} to {onward}"
            self.g.exchange(
                name,
                sends=sends,
                recvs=recvs,
                tag=self.first_tag + onward * self.tags_per_hop,
                reads=[self.agreed],
                hop=hop,
            )

    def _messages(
        self,
        tensors: tuple[tuple[Role, int], ...],
        buffers: dict[Role, Buffer],
        owner: int,
        block: int,
        peer_hop: int,
    ) -> list[tuple[Part, int, int]]:
        """The messages of a block's tensors, to or from the rank that has it at `peer_hop`."""
        peer, length = (
            self.ranks[self.route.holder(owner, peer_hop, block)],
            len(self.ring.travelling[owner][block]),
        )
        return [(buffers[name][block], peer, length * size) for name, size in tensors]

    def _started(self, owner: int, block: int, hop: int) -> bool:
        """Whether a block's travelling sum exists once the tiles of a hop are done.

        The sum is on the rank that has the block at that hop.
        """
        return self.ring.starts[owner][block] <= hop

    def _pass_sums(self, hop: int, block: int) -> None:
        """Sends a block's sums on once its tiles are done; at the last hop, sends them home.

        Receives the sums that the next hop adds to.
        """
        sums, here, coming = self.ring.sums, self._owner(hop, block), self._owner(hop + 1, block)
        sends = (
            self._messages(sums, self.sum_slots[hop % 2], here, block, hop + 1)
            if self._started(here, block, hop)
            else []
        )
        recvs = (
            self._messages(sums, self.sum_slots[(hop + 1) % 2], coming, block, hop)
            if self._started(coming, block, hop)
            else []
        )
        if sends or recvs:
            tag = self.first_tag + hop * self.tags_per_hop + 1 + block
            self.g.exchange(
                f"sum {hop}.{block}",
                sends=sends,
                recvs=recvs,
                tag=tag,
                reads=[self.agreed],
                hop=hop,
            )

    def _tile(self, hop: int, block: int) -> None:
        """Adds the tile between the block that is here at this hop and the shard at home."""
        ring, owner = self.ring, self._owner(hop, block)
        sums = self.sum_slots[hop % 2] if hop else self.own_sums
        pieces = self.tiles.get((hop, block))
        if pieces is None:
            return
        bundle = self._bundle_at(hop)
        reads = {name: bundle[name][block] for name, _ in ring.bundle}
        reads |= {name: whole[0] for name, whole in self.home.items()}
        adds = {name: sums[name][block] for name, _ in ring.sums}
        adds |= {name: whole[0] for name, whole in self.home_sums.items()}
        # Sums that begin with this tile: nothing is in them yet.
        new = (
            [sums[name][block] for name, _ in ring.sums]
            if hop and ring.starts[owner][block] == hop
            else []
        )
        operation = ring.operation(
            owner=owner,
            block=block,
            pieces=pieces,
            reads=_ids(reads),
            adds=_ids(adds),
            starts_sums=bool(new),
            first=(hop, block) == next(iter(self.tiles)),
            last=(hop, block) == next(reversed(self.tiles)),
        )
        moved, stays = f"{owner}.{block}", f"{self.rank}"
        q, kv = (moved, stays) if ring.queries_travel else (stays, moved)
        zeroed_bytes = sum(part.size_bytes for part in new)
        self.g.compute(
            f"hop {hop} q{q} kv{kv}",
            operation,
            reads=reads.values(),
            writes=new,
            accumulates=[part for part in adds.values() if part not in new],
            cost=self._cost(pieces, zeroed_bytes),
            hop=hop,
        )

    def _cost(self, pieces: tuple[Piece, ...], zeroed_bytes: int) -> Cost:
        problem = self.ring.problem
        of_q, of_v = _FLOPS[self.ring.operation]
        per_head = of_q * problem.head_dim + of_v * problem.v_head_dim
        per_cell = per_head * problem.num_heads * problem.batch
        rows = sum(p.q_stop - p.q_start for p in pieces)
        columns = sum(p.kv_stop - p.kv_start for p in pieces)
        cells = sum(p.num_cells for p in pieces)
        masked = sum(p.num_cells for p in pieces if not p.whole)
        triangles = (p for p in pieces if p.diagonal or p.upper)
        edges = (min(p.q_stop - p.q_start, p.kv_stop - p.kv_start) for p in triangles)
        edge = sum(length * min(length, _EDGE) for length in edges)
        kv = problem.k_token_bytes + problem.v_token_bytes
        moved = rows * problem.q_token_bytes + columns * kv + zeroed_bytes
        return Cost(cells * per_cell, moved, masked * per_cell, edge * per_cell)

    def _bring_home(self, block: int) -> None:
        """Adds the sums that arrived with the last hop to the owner's own sums."""
        if not self._started(self.rank, block, self.world - 1):
            return
        for name, size in self.ring.sums:
            own, arrived = self.own_sums[name][block], self.sum_slots[self.world % 2][name][block]
            cost = Cost(0, 3 * len(self.ring.travelling[self.rank][block]) * size)
            self.g.compute(
                f"home {name}{block}",
                Add(own.id, arrived.id),
                reads=[arrived],
                accumulates=[own],
                cost=cost,
            )


@lru_cache(maxsize=64)
def forward_ring(problem: Problem, route: Route | None = None, *, whole: bool = False) -> Ring:
    """The forward. K, V travel: 2 tensors of E / g elements a hop.

    route: None takes the plain ring. whole: see `travels_whole`.
    """
    return Ring(
        problem=problem,
        operation=ForwardTile,
        queries_travel=False,
        bundle=((Role.K, problem.k_token_bytes), (Role.V, problem.v_token_bytes)),
        home=(Role.Q,),
        home_sums=(Role.STATE,),
        route=route or _plain(problem, problem.kv_blocks, whole),
        whole=whole,
    )


@lru_cache(maxsize=128)
def backward_ring(
    problem: Problem, *, queries_travel: bool, route: Route | None = None, whole: bool = False
) -> Ring:
    """The backward of `burst` (queries travel) or of `ring-kv`.

    Gradients that are not needed are neither summed nor sent. route and whole: as in
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
    q_sums = tuple(each for each in sums if each[0].queries)
    kv_sums = tuple(each for each in sums if not each[0].queries)
    travels, stays = ((q_side, q_sums), (kv_side, kv_sums))[:: 1 if queries_travel else -1]
    blocks = problem.q_blocks if queries_travel else problem.kv_blocks
    return Ring(
        problem=problem,
        operation=BackwardTile,
        queries_travel=queries_travel,
        bundle=travels[0],
        sums=travels[1],
        home=_roles(stays[0]),
        home_sums=_roles(stays[1]),
        route=route or _plain(problem, blocks, whole),
        whole=whole,
    )


def travels_whole(problem: Problem) -> bool:
    """Whether a shard is better sent as one block.

    True if every shard has few tokens, every rank needs every block, and nothing goes by positions.
    """
    anywhere = problem.mask.rule is Rule.EVERYTHING and not problem.scores.alibi_slopes
    return anywhere and all(
        sum(map(len, own)) <= _FEW_TOKENS
        for blocks in (problem.q_blocks, problem.kv_blocks)
        for own in blocks
    )


def _plain(problem: Problem, blocks: tuple[tuple[range, ...], ...], whole: bool) -> Route:
    return OneRing(problem.world_size, (1,) * (1 if whole else len(blocks[0])))


def _moved(piece: Piece, rows: int, columns: int) -> Piece:
    """The same piece, counted from an earlier start: rows and columns are added."""
    q_start, q_stop, kv_start, kv_stop = piece[:4]
    return piece._replace(
        q_start=q_start + rows,
        q_stop=q_stop + rows,
        kv_start=kv_start + columns,
        kv_stop=kv_stop + columns,
    )


def _touch(a: Piece, b: Piece) -> bool:
    """Whether two full rectangles, the second further on, form one rectangle."""
    if not a.whole or not b.whole:
        return False
    if a[:2] == b[:2]:
        return a.kv_stop == b.kv_start
    return a[2:4] == b[2:4] and a.q_stop == b.q_start


def _joined(a: Piece, b: Piece) -> Piece:
    return a._replace(q_stop=b.q_stop, kv_stop=b.kv_stop, num_cells=a.num_cells + b.num_cells)


def _roles(tensors: Iterable[tuple[Role, int]]) -> tuple[Role, ...]:
    return tuple(role for role, _ in tensors)


def _ids(parts: Mapping[Role, Part]) -> tuple[tuple[Role, int], ...]:
    return tuple((role, part.id) for role, part in parts.items())


def _each(lengths: list[int], token_bytes: int) -> list[int]:
    return [n * token_bytes for n in lengths]
