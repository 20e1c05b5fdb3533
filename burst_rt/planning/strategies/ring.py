"""Rings: one side of the attention stays at home; the other side travels, and so do its sums.

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

One builder makes four graphs:

* forward: K, V travel; a query's running state stays at home;
* forward of `ring-q` (the pass-Q of arXiv 2411.01783): Q travels with its running state; K, V stay
  at home;
* backward of `ring-kv` (RingAttention, arXiv 2310.01889): K, V travel with dK, dV; dQ stays at
  home;
* backward of `burst` (BurstAttention, arXiv 2403.09347, algorithm 2): Q, dO, lse, delta travel with
  dQ; dK, dV stay at home.

`hops.py` says which rows are where at each hop. While the tiles of a hop run, one exchange passes
the bundle on and receives the next bundle into another slot. A tile is one travelling block against
the whole shard at home.

The owner keeps its own contribution at home. Sums travel block by block, each as soon as its last
tile is done, so that a rank's first tiles of a hop do not wait for all tiles of the previous rank.
Under the full mask, for which positions do not matter, a shard travels as one block where no sums
travel or its tokens are few: half the tasks, and larger tiles. lse and delta of a block, and m
and l of a state, travel whole, because they are few bytes.

The mask decides in two ways. Which rows each rank needs (`Ring.needed`) shapes the graphs: rings
with equal `way` have equal graphs, except for pieces and costs. The pieces of tiles and their costs
are data in the tasks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import count
from typing import Any, NamedTuple

from burst_rt.planning.masks import Piece, Rule, Shape
from burst_rt.planning.needs import Needed, Rows, num_rows
from burst_rt.planning.operations import (
    Add,
    BackwardTile,
    Delta,
    Finish,
    ForwardTile,
    Merge,
    TileOperation,
)
from burst_rt.planning.problem import Problem, TileShape
from burst_rt.planning.roles import GRADIENTS, Role
from burst_rt.planning.strategies.hops import Hops, num_blocks, num_tokens
from burst_rt.planning.strategies.program import AGREE, Footprint
from burst_rt.planning.strategies.routes import OneRing, Route
from burst_rt.scheduler import HOST_LANES, Buffer, Cost, Graph, GraphBuilder, Lane, Part, Transfer

__all__ = ["Ring", "RingBuilder", "backward_ring", "dsinks", "forward_ring", "travels_whole"]

# Maximum number of tokens of a shard that travels as one block with its sums: with so few, a tile
# takes less time than the overhead of a task.
_FEW_TOKENS = 64
# Width of the edge of a causal mask, in keys: about the size of a kernel's blocks.
_EDGE = 512


class _Stretch(NamedTuple):
    """Consecutive rows of a tensor as bytes of its part."""

    role: Role
    size_bytes: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class Ring(Hops):
    """One ring: what travels, what stays, and what a tile does. A `Program`."""

    operation: type[TileOperation]  # the operation of a tile
    bundle: tuple[tuple[Role, int], ...]  # the tensors that travel, with their bytes a token
    sums: tuple[tuple[Role, int], ...] = ()  # the sums that travel, with their bytes a token
    home: tuple[Role, ...]  # the tensors that stay
    home_sums: tuple[Role, ...]  # the sums at home that a tile adds to

    def graph(self, rank: int, lanes: tuple[Lane, ...] = HOST_LANES) -> Graph:
        """See `Program.graph`."""
        g = GraphBuilder(rank, self.problem.world_size, lanes)
        builder = RingBuilder(self, rank, g)
        builder.agree()
        if not self.forward:
            builder.deltas()
        builder.go_round()
        return builder.g.build()

    def messages(self, rank: int, tag: int = 0) -> Iterator[Transfer]:
        """See `Program.messages`. tag: the first one, of `num_tags`."""
        tags = count(tag)
        for hop in range(self.problem.world_size):
            for source, target in self.route.passes(hop):
                yield from self._bundle_messages(rank, source, target, next(tags))
            if hop:
                for block in range(self.num_blocks):
                    yield from self._sum_messages(rank, hop, block, next(tags))

    def _bundle_messages(self, rank: int, source: int, target: int, tag: int) -> Iterator[Transfer]:
        """Messages of the bundles that a rank has at hop `source`, or gets for hop `target`."""
        for block in range(self.num_blocks):
            here, there = self.holders[source][block], self.holders[target][block]
            for owner in {here.index(rank), there.index(rank)}:
                rows = self.bundles[owner][block][target]
                for each in self.stretches(self.bundle, owner, block, rows):
                    yield Transfer(here[owner], there[owner], tag, each.size_bytes)

    def _sum_messages(self, rank: int, hop: int, block: int, tag: int) -> Iterator[Transfer]:
        """Messages of the sums of blocks numbered `block` that `rank` sends or receives after
        `hop`.
        """
        here = self.holders[hop][block]
        onward = self.holders[(hop + 1) % len(self.holders)][block]
        for owner in {rank, here.index(rank), onward.index(rank)}:
            leg = self.legs[owner][block].get(hop)
            to = owner if leg and leg.home else onward[owner]
            if leg and rank in (here[owner], to):
                rows = self.sum_rows[owner][block][hop]
                for each in self.stretches(self.sums, owner, block, rows):
                    yield Transfer(here[owner], to, tag, each.size_bytes)

    @property
    def num_tags(self) -> int:
        """Number of tags of all ranks' messages."""
        hops = range(self.problem.world_size)
        return sum(len(self.route.passes(hop)) for hop in hops) + self.num_blocks * (len(hops) - 1)

    @property
    def ring_size(self) -> int:
        return self.problem.world_size

    def __str__(self) -> str:
        if not self.adds:
            return "nothing travels"
        back = isinstance(self.route, OneRing) and set(self.route.directions) == {-1}
        return ", ".join(_roles((*self.bundle, *self.sums))) + " travel" + ", backwards" * back

    @property
    def forward(self) -> bool:
        return self.operation is ForwardTile

    @property
    def adds(self) -> bool:
        """Whether tiles add to anything. Nothing has tiles if only sinks need a gradient."""
        return bool(self.sums or self.home_sums)

    @cached_property
    def needed(self) -> Needed:
        """See `Hops.needed`."""
        nothing = ((),) * self.problem.world_size
        return super().needed if self.adds else self._by_block(lambda owner, block: nothing)

    @cached_property
    def way(self) -> Hashable:
        """Everything that the graphs depend on: lengths of what travels, bytes, and rows that ranks
        need.
        """
        at_home = tuple(any(runs) for runs in self.resident)
        return (
            self.operation, self.queries_travel, self.bundle, self.sums, self.home, self.home_sums,
            self.route, self.problem.sink_bytes, self.travelling_bounds, at_home, self.needed,
        )  # fmt: skip

    def wire_bytes(self) -> int:
        """Bytes that all ranks together send."""
        sent, rows_in = 0, cache(num_rows)  # many messages have the same rows
        for owner, blocks in enumerate(self.bundles):
            for block, bundles in enumerate(blocks):
                length = self.block_len(owner, block)
                sums = self.sum_rows[owner][block].values()
                for tensors, messages in ((self.bundle, bundles), (self.sums, sums)):
                    # As `stretches` has them.
                    in_rows = sum(size for role, size in tensors if not role.pairs)
                    whole = sum(size for role, size in tensors if role.pairs)
                    sent += in_rows * sum(map(rows_in, messages))
                    sent += whole * length * sum(map(bool, messages))
        return sent

    def stretches(
        self, tensors: tuple[tuple[Role, int], ...], owner: int, block: int, rows: Rows
    ) -> list[_Stretch]:
        """The parts of a block's tensors that are sent along with some rows."""
        whole = ((0, self.block_len(owner, block)),) if rows else ()
        return [
            _Stretch(role, (stop - start) * size, start * size)
            for role, size in tensors
            for start, stop in (whole if role.pairs else rows)
        ]

    def footprint(self, rank: int) -> Footprint:
        """See `Program.footprint`.

        Messages must be contiguous: own blocks are copied if batch > 1. Copies of strided inputs
        are not counted.
        """
        problem = self.problem
        q_len, kv_len = num_tokens(problem.q_runs[rank]), num_tokens(problem.kv_runs[rank])
        # Where outputs have the sums' type, an output is the sum itself.
        in_place = problem.input_bytes == problem.sum_bytes
        wide = 0
        if self.forward:
            sums = q_len * (problem.row_bytes + (0 if in_place else problem.out_sum_bytes))
        else:
            needs_q, needs_k, needs_v = problem.needs_grad
            if not in_place:
                wide = q_len * problem.q_sum_bytes * needs_q + kv_len * (
                    problem.k_sum_bytes * needs_k + problem.v_sum_bytes * needs_v
                )
            sums = q_len * problem.row_bytes + wide + problem.sink_bytes
        bundle = sum(size for role, size in self.bundle if not role.pairs)
        blocks = range(self.num_blocks)
        copies = sum(
            self.block_len(rank, block) * bundle
            for block in blocks
            if any(self.bundles[rank][block])
        )
        here = [
            (owner, block)
            for owner in range(problem.world_size)
            for block in blocks
            if self.needed[owner][block][rank]
        ]
        longest = max((self.block_len(*block) for block in here), default=0)
        lengths = (longest, kv_len) if self.queries_travel else (q_len, longest)
        pieces = [piece for block in here for piece in self.pieces(*block, rank)]
        shapes = {piece.shape for piece in pieces}
        tile = TileShape(
            problem.batch,
            problem.num_heads,
            problem.num_kv_heads,
            max(problem.head_dim, problem.v_head_dim),
            *lengths,
            problem.mask.num_apart(problem.batch, problem.num_heads)
            if Shape.MASKED in shapes
            else 0,
            Shape.BAND in shapes,
            problem.scores,
        )
        return Footprint(sums, copies if problem.batch > 1 else 0, tile, spared=wide)


class RingBuilder:
    """Adds one rank's part of a ring to a graph.

    Buffers are named after their tensors; a slot's name ends with the slot's number: k0, k1. Rings
    of one graph share the buffers of the same name.

    rank: this rank's number in the ring. ranks: the numbers of the ring's ranks in the world of the
    graph; None: the same numbers.
    """

    def __init__(
        self,
        ring: Ring,
        rank: int,
        g: GraphBuilder,
        ranks: Sequence[int] | None = None,
    ) -> None:
        problem = ring.problem
        self.ring, self.rank, self.world, self.route = ring, rank, problem.world_size, ring.route
        self.g, self.ranks = g, ranks or range(problem.world_size)
        self.blocks = range(ring.num_blocks)
        own = [ring.block_len(rank, block) for block in self.blocks]
        largest = [
            max(ring.block_len(owner, block) for owner in range(self.world))
            for block in self.blocks
        ]
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

        self.largest = largest
        self.slots = [self._slots(ring.bundle, str(i)) for i in range(self.route.num_slots)]
        self.sum_slots = [self._slots(ring.sums, str(i)) for i in range(2)]
        # Blocks whose sums have arrived at home and are not added yet, with the hop after which
        # they arrived.
        self.came_home: list[tuple[int, int]] = []
        # (hop, block) -> pieces, for every tile that may see something, in order.
        self.tiles = {
            (hop, block): ring.pieces(owner, block, rank)
            for hop in range(self.world)
            for block in self.blocks
            if ring.needed[owner := self._owner(hop, block)][block][rank]
        }

    def _buffer(self, name: str, **options: Any) -> Buffer:  # as in GraphBuilder.buffer
        return self.g.buffers[name] if name in self.g.buffers else self.g.buffer(name, **options)

    def _slots(self, tensors: tuple[tuple[Role, int], ...], name: str) -> dict[Role, Buffer]:
        """Buffers that hold a block of any owner."""
        parts = len(self.largest)
        return {
            role: self._buffer(f"{role}{name}", parts=parts, size_bytes=_each(self.largest, size))
            for role, size in tensors
        }

    def agree(self) -> None:
        """Adds the task that every graph opens with."""
        self.g.compute("agree", AGREE, writes=[self.agreed], lane="control")

    def deltas(self) -> None:
        """Adds delta = rowsum(dO * O) of the rank's own queries, once, before anything uses it.

        The gradient of the sinks follows from lse and delta.
        """
        sinks = dsinks(self.g, self.ring.problem)
        travel = self.ring.queries_travel
        rows = self.own[Role.ROWS] if travel else self.home[Role.ROWS]
        lengths = (
            [self.ring.block_len(self.rank, block) for block in self.blocks]
            if travel
            else [num_tokens(self.ring.resident[self.rank])]
        )
        for part, length in enumerate(lengths):
            if length:
                cost = Cost(0, 2 * length * self.ring.problem.out_token_bytes)
                self.g.compute(
                    f"delta {part}", Delta(part), accumulates=[rows[part], *sinks], cost=cost
                )

    def go_round(self, tag: int = 0) -> int:
        """Adds all hops, and brings the sums home.

        The tags of messages begin at `tag`, and ascend. Every rank counts the same tags, with or
        without a message for them. Returns the first free one.
        """
        tags = count(tag)
        for hop in range(self.world):
            for source, target in self.route.passes(hop):
                self._pass_bundle(source, target, hop, next(tags))
            for block in self.blocks:
                self._tile(hop, block)
                if hop:
                    self._pass_sums(hop, block, next(tags))
            # Sums that came home before this hop's tiles: the tiles need not wait for them.
            self._add_home(before=hop)
        self._add_home(before=self.world)
        if self.ring.forward:
            self._finish()
        return next(tags)

    def _finish(self) -> None:
        """Adds the task that writes out and lse, where no tile does.

        Where queries travel, the states of the rank's own queries are complete when the last of
        them is back.
        """
        ring = self.ring
        if ring.queries_travel:
            state, queries = [*self.own_sums.values()], ring.problem.q_runs[self.rank]
        else:
            state, queries = [self.home_sums[Role.STATE]], ring.resident[self.rank]
        if any(queries) and (ring.queries_travel or not self.tiles):
            cost = Cost(0, num_tokens(queries) * ring.problem.out_sum_bytes)
            self.g.compute("finish", Finish(), accumulates=state, cost=cost)

    def _owner(self, hop: int, block: int) -> int:
        return self.route.owner(self.rank, hop, block)

    def _bundle_at(self, hop: int) -> dict[Role, Buffer]:
        return self.slots[self.route.slot(hop)] if hop else self.own

    def _pass_bundle(self, source: int, target: int, hop: int, tag: int) -> None:
        """Sends the bundle of hop `source` to the rank that needs it at hop `target`.

        Receives the bundle that this rank needs at hop `target`. hop: whose tiles run meanwhile.
        """
        sends, recvs = [], []
        for block in self.blocks:
            here, coming = self._owner(source, block), self._owner(target, block)
            to, by = (
                self.route.holder(here, target, block),
                self.route.holder(coming, source, block),
            )
            sends += self._messages(
                self.ring.bundle,
                self._bundle_at(source),
                (here, block, self.ring.bundles[here][block][target]),
                to,
            )
            recvs += self._messages(
                self.ring.bundle,
                self._bundle_at(target),
                (coming, block, self.ring.bundles[coming][block][target]),
                by,
            )
        if sends or recvs:
            name = f"hop {source}" if target == source + 1 else f"hop {source} to {target}"
            self.g.exchange(
                name,
                sends=sends,
                recvs=recvs,
                tag=tag,
                reads=[self.agreed],
                hop=hop,
            )

    def _messages(
        self,
        tensors: tuple[tuple[Role, int], ...],
        buffers: dict[Role, Buffer],
        rows: tuple[int, int, Rows],
        peer: int,
    ) -> list[tuple[Part, int, int, int]]:
        """The messages of some rows (owner, block, rows), to or from a rank of the ring."""
        block = rows[1]
        return [
            (buffers[each.role][block], self.ranks[peer], each.size_bytes, each.offset)
            for each in self.ring.stretches(tensors, *rows)
        ]

    def _pass_sums(self, hop: int, block: int, tag: int) -> None:
        """Sends a block's sums on, or home, once the tile is done.

        Receives the sums that the next hop adds to, and this rank's own where they come home.
        """
        ring, here, coming = self.ring, self._owner(hop, block), self._owner(hop + 1, block)
        sends, recvs = [], []
        if leg := ring.legs[here][block].get(hop):
            to = here if leg.home else self.route.holder(here, hop + 1, block)
            rows = (here, block, ring.sum_rows[here][block][hop])
            sends += self._messages(ring.sums, self.sum_slots[hop % 2], rows, to)
        leg = ring.legs[coming][block].get(hop)
        if leg and not leg.home:
            rows = (coming, block, ring.sum_rows[coming][block][hop])
            by = self.route.holder(coming, hop, block)
            recvs += self._messages(ring.sums, self.sum_slots[(hop + 1) % 2], rows, by)
        leg = ring.legs[self.rank][block].get(hop)
        if leg and leg.home:
            rows = (self.rank, block, ring.sum_rows[self.rank][block][hop])
            by = self.route.holder(self.rank, hop, block)
            recvs += self._messages(ring.sums, self._home_at(hop), rows, by)
            self.came_home.append((hop, block))
        if sends or recvs:
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
        leg = ring.legs[owner][block].get(hop)
        new = [sums[name][block] for name, _ in ring.sums] if leg and leg.starts else []
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
        of_q, of_v = self.ring.operation.flops
        per_head = of_q * problem.head_dim + of_v * problem.v_head_dim
        per_cell = per_head * problem.num_heads * problem.batch
        rows = sum(p.q_stop - p.q_start for p in pieces)
        columns = sum(p.kv_stop - p.kv_start for p in pieces)
        cells = sum(p.num_cells for p in pieces)
        masked = sum(p.num_cells for p in pieces if p.shape is not Shape.RECTANGLE)
        # Triangles, bands and stairs have an edge, along which blocks are computed in part.
        edged = (p for p in pieces if p.shape not in (Shape.RECTANGLE, Shape.MASKED))
        edges = (min(p.q_stop - p.q_start, p.kv_stop - p.kv_start) for p in edged)
        edge = sum(length * min(length, _EDGE) for length in edges)
        kv = problem.k_token_bytes + problem.v_token_bytes
        moved = rows * problem.q_token_bytes + columns * kv + zeroed_bytes
        return Cost(cells * per_cell, moved, masked * per_cell, edge * per_cell)

    def _home_at(self, hop: int) -> dict[Role, Buffer]:
        """The parts in which sums that come home after a hop are received.

        After the last hop nothing else is on its way, and the slot of the next hop is free. Before
        that, other sums may be on their way. Sums that came home are added one hop later, so two
        buffers take turns.
        """
        if hop == self.world - 1:
            return self.sum_slots[self.world % 2]
        return self._slots(self.ring.sums, f" home {hop % 2}")

    def _add_home(self, *, before: int) -> None:
        """Adds the sums that came home before a hop to the owner's own sums."""
        for hop, block in [each for each in self.came_home if each[0] < before]:
            self.came_home.remove((hop, block))
            rows = self.ring.sum_rows[self.rank][block][hop]
            if self.ring.forward and self.ring.sums:
                self._merge_home(block, rows, self._home_at(hop))
                continue
            for name, size in self.ring.sums:
                own, arrived = self.own_sums[name][block], self._home_at(hop)[name][block]
                cost = Cost(0, 3 * num_rows(rows) * size)
                self.g.compute(
                    f"home {name}{block}",
                    Add(name, block, own.id, arrived.id, rows),
                    reads=[arrived],
                    accumulates=[own],
                    cost=cost,
                )

    def _merge_home(self, block: int, rows: Rows, home: dict[Role, Buffer]) -> None:
        """Merges a running state that came home into the owner's own."""
        own = [self.own_sums[role][block] for role, _ in self.ring.sums]
        arrived = {role: home[role][block] for role, _ in self.ring.sums}
        size = sum(size for _, size in self.ring.sums)
        self.g.compute(
            f"home state{block}",
            Merge(block, _ids(arrived), rows),
            reads=arrived.values(),
            accumulates=own,
            cost=Cost(0, 3 * num_rows(rows) * size),
        )


@lru_cache(maxsize=8)
def forward_ring(
    problem: Problem,
    route: Route | None = None,
    *,
    queries_travel: bool = False,
    whole: bool = False,
) -> Ring:
    """The forward. K, V travel: 2 tensors of E / g elements a hop.

    queries_travel: in their place Q travels with its running state (acc, m, l), which a rank that
    has no keys for it passes on as it came. route: None takes the plain ring. whole: see
    `travels_whole`.
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
        home=_roles(kv_side if queries_travel else q_side),
        home_sums=() if queries_travel else (Role.STATE,),
        route=route or _plain(problem, whole),
        whole=whole,
    )


@lru_cache(maxsize=16)
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
    return Ring(
        problem=problem,
        operation=BackwardTile,
        queries_travel=queries_travel,
        bundle=travels[0],
        sums=travels[1],
        home=_roles(stays[0]),
        home_sums=_roles(stays[1]),
        route=route or _plain(problem, whole),
        whole=whole,
    )


def dsinks(g: GraphBuilder, problem: Problem) -> list[Part]:
    """The part that the deltas of a rank's queries add to; none where no gradient is needed."""
    if not problem.scores.sinks_need_grad:
        return []
    return list(g.buffer(Role.DSINKS, initialised=True).parts)


def travels_whole(problem: Problem, *, sums: bool) -> bool:
    """Whether a shard is better sent as one block. sums: whether sums travel.

    True if every rank needs every block, and no sums travel or every shard has few tokens.
    """
    return problem.mask.rule is Rule.EVERYTHING and (
        not sums
        or all(
            num_tokens(own) <= _FEW_TOKENS
            for runs in (problem.q_runs, problem.kv_runs)
            for own in runs
        )
    )


def _plain(problem: Problem, whole: bool) -> Route:
    return OneRing(problem.world_size, (1,) * num_blocks(problem, whole))


def _roles(tensors: Iterable[tuple[Role, int]]) -> tuple[Role, ...]:
    return tuple(role for role, _ in tensors)


def _ids(parts: Mapping[Role, Part]) -> tuple[tuple[Role, int], ...]:
    return tuple((role, part.id) for role, part in parts.items())


def _each(lengths: list[int], token_bytes: int) -> list[int]:
    return [n * token_bytes for n in lengths]
