"""Rings: one side of the attention stays at home, the other travels, and so do the sums that belong to it.

One builder makes three graphs:

* forward: K, V travel; a query's running state stays at home;
* backward of `ring-kv` (RingAttention, arXiv 2310.01889): K, V travel with dK, dV; dQ stays at home;
* backward of `burst` (BurstAttention, arXiv 2403.09347, algorithm 2): Q, dO, lse, delta travel with dQ; dK, dV stay at home.

Everything makes W-1 hops. At hop h a rank holds what rank - h owns, and while its tiles run, one exchange passes the bundle on and receives
the next into the other slot. A tile is one travelling block against the whole shard at home. The owner keeps its own contribution at home;
the first rank after it that has one starts the travelling sum; the last hop brings the sum home. Sums travel block by block, each as soon
as its last tile is done, so that a rank's first tiles of a hop do not wait for all of the previous rank's.

Not sent: a block that no rank further on computes with, a sum that nobody has started, an empty block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from burst_rt.attention.masks import Piece
from burst_rt.attention.problem import Problem
from burst_rt.scheduler import HOST_LANES, Buffer, Cost, Graph, GraphBuilder, Lane, Op, Part

__all__ = ["AGREE", "Ring", "backward_ring", "forward_ring"]

# Every graph opens with this task; nothing is sent before it is done.
AGREE = Op("agree")

# Tags of one hop: 0 for the bundle, 1 + b for the sums of block b.
_TAGS_PER_HOP = 16


@dataclass(frozen=True)
class Ring:
    """One ring: what travels, what stays, and what a tile does.

    `bundle` and `sums` are the travelling tensors, as (name, bytes a token); `home` the tensors that stay; `home_sums` what a tile adds
    into at home. `queries_travel` tells which side is which.
    """

    problem: Problem
    forward: bool
    queries_travel: bool
    bundle: tuple[tuple[str, int], ...]
    sums: tuple[tuple[str, int], ...]
    home: tuple[str, ...]
    home_sums: tuple[str, ...]

    def graph(self, rank: int, lanes: tuple[Lane, ...] = HOST_LANES) -> Graph:
        """The graph of one rank. The lanes are those of its machine: HOST_LANES, DEVICE_LANES or NCCL_LANES."""
        return _RankBuilder(self, rank, lanes).build()

    @property
    def travelling(self) -> tuple[tuple[range, ...], ...]:
        """Blocks of the travelling side, by owner."""
        return self.problem.q_blocks if self.queries_travel else self.problem.kv_blocks

    @property
    def resident(self) -> tuple[tuple[range, ...], ...]:
        """Blocks of the side at home, by rank."""
        return self.problem.kv_blocks if self.queries_travel else self.problem.q_blocks

    def pieces(self, travelling: range, rank: int) -> tuple[Piece, ...]:
        """What a rank has to compute with a travelling block; on the side at home counted along its shard."""
        found: list[Piece] = []
        first = 0
        for resident in self.resident[rank]:
            q, kv = (travelling, resident) if self.queries_travel else (resident, travelling)
            for piece in self.problem.mask.pieces(q, kv):
                here = _moved(piece, 0, first) if self.queries_travel else _moved(piece, first, 0)
                found.append(_joined(found.pop(), here) if found and _touch(found[-1], here) else here)
            first += len(resident)
        return tuple(found)

    @cached_property
    def reach(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """By owner and block: (first, last) hop from 1 on at which a rank computes with it; (W, 0) when none does."""
        world = self.problem.world_size
        reach = []
        for owner, blocks in enumerate(self.travelling):
            row = []
            for block in blocks:
                hops = [h for h in range(1, world) if self.pieces(block, (owner + h) % world)]
                row.append((hops[0], hops[-1]) if hops else (world, 0))
            reach.append(tuple(row))
        return tuple(reach)

    def wire_bytes(self) -> int:
        """Bytes that all ranks together send: each block its bundle over `last` hops, its sums over the hops from `first` to home."""
        world = self.problem.world_size
        bundle, sums = sum(size for _, size in self.bundle), sum(size for _, size in self.sums)
        return sum(
            len(block) * (bundle * last + (sums * (world - first) if last else 0))
            for blocks, row in zip(self.travelling, self.reach, strict=True)
            for block, (first, last) in zip(blocks, row, strict=True)
        )


class _RankBuilder:
    """Builds one rank's graph of a ring. Buffers are named after their tensors; slots carry the slot number: k0, k1."""

    def __init__(self, ring: Ring, rank: int, lanes: tuple[Lane, ...]) -> None:
        problem = ring.problem
        self.ring, self.rank, self.world = ring, rank, problem.world_size
        self.g = GraphBuilder(rank, self.world, lanes)
        own = [len(block) for block in ring.travelling[rank]]
        largest = [max(len(blocks[b]) for blocks in ring.travelling) for b in range(len(own))]
        self.agreed = self.g.buffer("agreed")
        self.home = {name: self.g.buffer(name, initialised=True) for name in ring.home}
        self.home_sums = {name: self.g.buffer(name, initialised=True) for name in ring.home_sums}
        self.own = {name: self.g.buffer(name, parts=len(own), size_bytes=_each(own, size), initialised=True) for name, size in ring.bundle}
        self.own_sums = {name: self.g.buffer(name, parts=len(own), initialised=True) for name, _ in ring.sums}
        self.slots = [
            {
                name: self.g.buffer(f"{name}{i}", parts=len(own), size_bytes=_each(largest, size))
                for name, size in (*ring.bundle, *ring.sums)
            }
            for i in range(2)
        ]
        # (hop, block) -> pieces of every tile there is, in order.
        self.tiles = {
            (hop, block): pieces
            for hop in range(self.world)
            for block, positions in enumerate(ring.travelling[self._owner(hop)])
            if (pieces := ring.pieces(positions, rank))
        }

    def build(self) -> Graph:
        self.g.compute("agree", AGREE, writes=[self.agreed], lane="control")
        if not self.ring.forward:
            self._deltas()
        for hop in range(self.world):
            self._pass_bundle(hop)
            for block in range(len(self.ring.travelling[self._owner(hop)])):
                self._tile(hop, block)
                if hop:
                    self._pass_sums(hop, block)
        for block in range(len(self.ring.travelling[self.rank])):
            self._bring_home(block)
        if self.ring.forward and not self.tiles and any(self.ring.resident[self.rank]):
            self.g.compute("finish", Op("finish"), accumulates=[self.home_sums["state"]])
        return self.g.build()

    def _owner(self, hop: int) -> int:
        return (self.rank - hop) % self.world

    def _deltas(self) -> None:
        """delta = rowsum(dO * O) of the rank's own queries, once, before anything uses it."""
        rows = self.own["rows"] if self.ring.queries_travel else self.home["rows"]
        blocks = self.ring.problem.q_blocks[self.rank]
        lengths = [len(block) for block in blocks] if self.ring.queries_travel else [sum(map(len, blocks))]
        for part, length in enumerate(lengths):
            if length:
                self.g.compute(f"delta {part}", Op("delta", (part,)), accumulates=[rows[part]])

    def _bundle_at(self, hop: int) -> dict[str, Buffer]:
        return self.slots[hop % 2] if hop else self.own

    def _travels(self, owner: int, block: int, to_hop: int) -> bool:
        """Whether the bundle of a block goes on to the rank `to_hop` hops from its owner."""
        return bool(self.ring.travelling[owner][block]) and to_hop <= self.ring.reach[owner][block][1]

    def _pass_bundle(self, hop: int) -> None:
        """Sends what is here at this hop on, and receives what the next hop needs."""
        here, coming = self._owner(hop), self._owner(hop + 1)
        sends = self._messages(here, self._bundle_at(hop), self.rank + 1, lambda b: self._travels(here, b, hop + 1))
        recvs = self._messages(coming, self.slots[(hop + 1) % 2], self.rank - 1, lambda b: self._travels(coming, b, hop + 1))
        if hop + 1 < self.world and (sends or recvs):
            self.g.exchange(f"hop {hop}", sends=sends, recvs=recvs, tag=hop * _TAGS_PER_HOP, reads=[self.agreed])

    def _messages(self, owner: int, buffers: dict[str, Buffer], peer: int, wanted: Callable[[int], bool]) -> list[tuple[Part, int, int]]:
        blocks = self.ring.travelling[owner]
        return [
            (buffers[name][b], peer % self.world, len(block) * size)
            for b, block in enumerate(blocks)
            if wanted(b)
            for name, size in self.ring.bundle
        ]

    def _started(self, owner: int, block: int, hop: int) -> bool:
        """Whether the travelling sum of a block exists on the rank `hop` hops from its owner, once that rank's tiles are done."""
        return bool(self.ring.travelling[owner][block]) and self.ring.reach[owner][block][0] <= hop

    def _pass_sums(self, hop: int, block: int) -> None:
        """Sends a block's sums on (at the last hop: home) once its tiles are done, and receives those the next hop adds to."""
        here, coming = self._owner(hop), self._owner(hop + 1)
        sends = [
            (self.slots[hop % 2][name][block], (self.rank + 1) % self.world, len(self.ring.travelling[here][block]) * size)
            for name, size in self.ring.sums
            if self._started(here, block, hop)
        ]
        recvs = [
            (self.slots[(hop + 1) % 2][name][block], (self.rank - 1) % self.world, len(self.ring.travelling[coming][block]) * size)
            for name, size in self.ring.sums
            if self._started(coming, block, hop)
        ]
        if sends or recvs:
            self.g.exchange(f"sum {hop}.{block}", sends=sends, recvs=recvs, tag=hop * _TAGS_PER_HOP + 1 + block, reads=[self.agreed])

    def _tile(self, hop: int, block: int) -> None:
        """The tile between the travelling block here at this hop and the shard at home."""
        ring, owner = self.ring, self._owner(hop)
        sums = self.slots[hop % 2] if hop else self.own_sums
        moving = ring.travelling[owner][block]
        if hop and moving and ring.reach[owner][block][0] == hop:
            for name, _ in ring.sums:
                self.g.compute(f"zero {name}{block}", Op("zero", (sums[name][block].id,)), writes=[sums[name][block]])
        pieces = self.tiles.get((hop, block))
        if pieces is None:
            return
        bundle = self._bundle_at(hop)
        reads = {name: bundle[name][block] for name, _ in ring.bundle} | {name: b[0] for name, b in self.home.items()}
        adds = {name: sums[name][block] for name, _ in ring.sums} | {name: b[0] for name, b in self.home_sums.items()}
        names = (tuple((n, p.id) for n, p in reads.items()), tuple((n, p.id) for n, p in adds.items()))
        ends = ((hop, block) == next(iter(self.tiles)), (hop, block) == next(reversed(self.tiles)))
        moved, stays = f"{owner}.{block}", f"{self.rank}"
        q, kv = (moved, stays) if ring.queries_travel else (stays, moved)
        self.g.compute(
            f"hop {hop} q{q} kv{kv}",
            Op("forward", (owner, block, pieces, *ends, *names)) if ring.forward else Op("backward", (owner, block, pieces, *names)),
            reads=reads.values(),
            accumulates=adds.values(),
            cost=self._cost(pieces),
        )

    def _cost(self, pieces: tuple[Piece, ...]) -> Cost:
        problem = self.ring.problem
        per_cell = problem.forward_flops_per_cell if self.ring.forward else problem.backward_flops_per_cell
        rows, columns = sum(p.q_stop - p.q_start for p in pieces), sum(p.kv_stop - p.kv_start for p in pieces)
        return Cost(sum(p.num_cells for p in pieces) * per_cell, rows * problem.q_token_bytes + columns * 2 * problem.kv_token_bytes)

    def _bring_home(self, block: int) -> None:
        """Adds the sums that arrived with the last hop to the owner's own."""
        if not self._started(self.rank, block, self.world - 1):
            return
        for name, _ in self.ring.sums:
            own, arrived = self.own_sums[name][block], self.slots[self.world % 2][name][block]
            self.g.compute(f"home {name}{block}", Op("add", (own.id, arrived.id)), reads=[arrived], accumulates=[own])


@lru_cache(maxsize=64)
def forward_ring(problem: Problem) -> Ring:
    """K, V travel: 2 tensors of E / g elements a hop."""
    kv = problem.kv_token_bytes
    return Ring(problem, True, False, bundle=(("k", kv), ("v", kv)), sums=(), home=("q",), home_sums=("state",))


@lru_cache(maxsize=128)
def backward_ring(problem: Problem, *, queries_travel: bool) -> Ring:
    """The backward of `burst` (queries travel) or of `ring-kv`. Gradients that are not needed are neither summed nor sent."""
    q, kv, rows = problem.q_token_bytes, problem.kv_token_bytes, problem.row_bytes
    q_side = (("q", q), ("dout", q), ("rows", rows))
    kv_side = (("k", kv), ("v", kv))
    needs_q, needs_k, needs_v = problem.needs_grad
    q_sums = (("dq", problem.q_sum_bytes),) if needs_q else ()
    kv_sums = tuple((name, problem.kv_sum_bytes) for name, needed in (("dk", needs_k), ("dv", needs_v)) if needed)
    if queries_travel:
        return Ring(problem, False, True, q_side, q_sums, home=_names(kv_side), home_sums=_names(kv_sums))
    return Ring(problem, False, False, kv_side, kv_sums, home=_names(q_side), home_sums=_names(q_sums))


def _moved(piece: Piece, rows: int, columns: int) -> Piece:
    """The same piece counted from further on."""
    q_start, q_stop, kv_start, kv_stop = piece[:4]
    return piece._replace(q_start=q_start + rows, q_stop=q_stop + rows, kv_start=kv_start + columns, kv_stop=kv_stop + columns)


def _touch(a: Piece, b: Piece) -> bool:
    """Whether two full rectangles, the second further on, are one."""
    if a.diagonal or a.masked or b.diagonal or b.masked:
        return False
    if a[:2] == b[:2]:
        return a.kv_stop == b.kv_start
    return a[2:4] == b[2:4] and a.q_stop == b.q_start


def _joined(a: Piece, b: Piece) -> Piece:
    return a._replace(q_stop=b.q_stop, kv_stop=b.kv_stop, num_cells=a.num_cells + b.num_cells)


def _names(tensors: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    return tuple(name for name, _ in tensors)


def _each(lengths: list[int], token_bytes: int) -> list[int]:
    return [n * token_bytes for n in lengths]
