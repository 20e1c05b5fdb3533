"""One rank's graph of a ring: the tasks of all hops, in the order in which they are to be done.

A rank's bundle goes on while the tiles of a hop run; sums go on block by block, each as soon as its
tile is done; sums that return to their owner are added one hop later, so that no tile waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

from burst_rt.planning.masks import Piece, Shape
from burst_rt.planning.needs import Rows, num_rows, union_of
from burst_rt.planning.operations import Add, Delta, FinishRows, MergeRows
from burst_rt.planning.problem import Problem
from burst_rt.planning.roles import Role
from burst_rt.planning.strategies.hops import num_tokens
from burst_rt.planning.strategies.program import AGREE
from burst_rt.planning.strategies.rounds import Round
from burst_rt.scheduler import Buffer, Cost, GraphBuilder, Part

__all__ = ["RingBuilder", "dsinks", "tile_cost"]

# Width of the edge of a causal mask, in keys: about the size of a kernel's blocks.
_EDGE = 512


class RingBuilder:
    """Adds one rank's part of a round to a graph.

    Buffers are named after their tensors; a slot's name ends with the slot's number: k0, k1. Rings
    of one graph share the buffers of the same name.

    rank: this rank's number in the ring. ranks: the numbers of the ring's ranks in the world of the
    graph; None: the same numbers. mark: what the names of a tensor's buffers end with. A part
    "turn", where the graph has one, makes the tiles of its rings run in turn.
    """

    def __init__(
        self,
        ring: Round,
        rank: int,
        g: GraphBuilder,
        ranks: Sequence[int] | None = None,
        mark: Callable[[Role], str] = lambda _: "",
    ) -> None:
        problem = ring.problem
        self.ring, self.rank, self.world, self.route = ring, rank, problem.world_size, ring.route
        self.g, self.ranks, self.mark = g, ranks or range(problem.world_size), mark
        self.turn = [*g.buffers["turn"].parts] if "turn" in g.buffers else []
        self.blocks = range(ring.num_blocks)
        lengths = [ring.block_len(rank, block) for block in self.blocks]
        # By block: the tokens of the longest block of any owner. Slots hold them all in turn.
        self.longest = [
            max(ring.block_len(owner, block) for owner in range(self.world))
            for block in self.blocks
        ]
        self.agreed = self._buffer("agreed")
        self.resident = {
            name: self._buffer(f"{name}{mark(name)}", initialised=True)
            for name in ring.resident_roles
        }
        self.resident_sums = {
            name: self._buffer(f"{name}{mark(name)}", initialised=True)
            for name in ring.resident_sums
        }
        self.owner_bundle = {
            name: self._buffer(
                f"{name}{mark(name)}",
                parts=len(lengths),
                size_bytes=_bytes(lengths, size),
                initialised=True,
            )
            for name, size in ring.bundle
        }
        self.owner_sums = {
            name: self._buffer(f"{name}{mark(name)}", parts=len(lengths), initialised=True)
            for name, _ in ring.sums
        }

        self.slots = [self._slots(ring.bundle, str(i)) for i in range(self.route.num_slots)]
        self.sum_slots = [self._slots(ring.sums, str(i)) for i in range(2)]
        # This rank's blocks whose sums are back and not added yet, with the hop after which they
        # came back.
        self.returned: list[tuple[int, int]] = []
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
        parts = len(self.longest)
        return {
            role: self._buffer(
                f"{role}{name}{self.mark(role)}",
                parts=parts,
                size_bytes=_bytes(self.longest, size),
            )
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
        rows = self.owner_bundle[Role.ROWS] if travel else self.resident[Role.ROWS]
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
        """Adds all hops, and brings the sums back to their owners.

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
            # Sums that came back before this hop's tiles: the tiles need not wait for them.
            self._add_returned(before=hop)
        self._add_returned(before=self.world)
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
            state, queries = [*self.owner_sums.values()], ring.problem.q_runs[self.rank]
        else:
            state, queries = [self.resident_sums[Role.STATE]], ring.resident[self.rank]
        if any(queries) and (ring.queries_travel or not self.tiles):
            cost = Cost(0, num_tokens(queries) * ring.problem.out_sum_bytes)
            self.g.compute("finish", FinishRows(), accumulates=state, cost=cost)

    def _owner(self, hop: int, block: int) -> int:
        return self.route.owner(self.rank, hop, block)

    def _bundle_at(self, hop: int) -> dict[Role, Buffer]:
        return self.slots[self.route.slot(hop)] if hop else self.owner_bundle

    def _pass_bundle(self, source: int, target: int, hop: int, tag: int) -> None:
        """Sends the bundle of hop `source` to the rank that needs it at hop `target`.

        Receives the bundle that this rank needs at hop `target`. hop: whose tiles run meanwhile.
        """
        sends, recvs = [], []
        for block in self.blocks:
            leaving, coming = self._owner(source, block), self._owner(target, block)
            to = self.route.holder(leaving, target, block)
            rows = (leaving, block, self.ring.bundles[leaving][block][target])
            sends += self._messages(self.ring.bundle, self._bundle_at(source), rows, to)
            by = self.route.holder(coming, source, block)
            rows = (coming, block, self.ring.bundles[coming][block][target])
            recvs += self._messages(self.ring.bundle, self._bundle_at(target), rows, by)
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
        to = self.ranks[peer]
        return [
            (part, to, size, offset) for part, size, offset in self._extents(tensors, buffers, rows)
        ]

    # In step with `Round._sum_messages`, which tells the same messages for the verifier, and from
    # the block's side. Who changes one changes the other: a program in which they differ is refused
    # before anything is sent.
    def _pass_sums(self, hop: int, block: int, tag: int) -> None:
        """Sends a block's sums on, or back to their owner, once the tile is done.

        Receives the sums that the next hop adds to, and the sums of this rank's block if they come
        back.
        """
        ring, done, coming = self.ring, self._owner(hop, block), self._owner(hop + 1, block)
        sends, recvs = [], []
        if sum_hop := ring.sum_hops[done][block].get(hop):
            to = done if sum_hop.returns_to_owner else self.route.holder(done, hop + 1, block)
            rows = (done, block, ring.sum_rows[done][block][hop])
            sends += self._messages(ring.sums, self.sum_slots[hop % 2], rows, to)
        sum_hop = ring.sum_hops[coming][block].get(hop)
        if sum_hop and not sum_hop.returns_to_owner:
            rows = (coming, block, ring.sum_rows[coming][block][hop])
            by = self.route.holder(coming, hop, block)
            recvs += self._messages(ring.sums, self.sum_slots[(hop + 1) % 2], rows, by)
        sum_hop = ring.sum_hops[self.rank][block].get(hop)
        if sum_hop and sum_hop.returns_to_owner:
            rows = (self.rank, block, ring.sum_rows[self.rank][block][hop])
            by = self.route.holder(self.rank, hop, block)
            recvs += self._messages(ring.sums, self._returns_at(hop), rows, by)
            self.returned.append((hop, block))
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
        """Adds the tile of the block that this rank has at this hop and the resident shard."""
        ring, owner = self.ring, self._owner(hop, block)
        sums = self.sum_slots[hop % 2] if hop else self.owner_sums
        pieces = self.tiles.get((hop, block))
        if pieces is None:
            return
        bundle = self._bundle_at(hop)
        reads = {name: bundle[name][block] for name, _ in ring.bundle}
        reads |= {name: buffer[0] for name, buffer in self.resident.items()}
        adds = {name: sums[name][block] for name, _ in ring.sums}
        adds |= {name: buffer[0] for name, buffer in self.resident_sums.items()}
        # Sums that begin with this tile: nothing is in them yet.
        sum_hop = ring.sum_hops[owner][block].get(hop)
        new = [sums[name][block] for name, _ in ring.sums] if sum_hop and sum_hop.starts else []
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
            accumulates=[*(part for part in adds.values() if part not in new), *self.turn],
            cost=self._cost(pieces, zeroed_bytes),
            hop=hop,
            looks_at=self._looks_at(hop, block, pieces, () if new else ring.sums) if hop else (),
        )

    def _looks_at(
        self,
        hop: int,
        block: int,
        pieces: tuple[Piece, ...],
        sums: tuple[tuple[Role, int], ...],
    ) -> list[tuple[Part, int, int]]:
        """The bytes that the tile of a block that came here needs of the block's slots.

        sums: those that came with the block.
        """
        ring = self.ring
        of_pieces = [p[:2] if ring.queries_travel else p[2:4] for p in pieces]
        rows = (self._owner(hop, block), block, union_of(of_pieces) or ((0, 0),))
        return self._extents(ring.bundle, self._bundle_at(hop), rows) + self._extents(
            sums, self.sum_slots[hop % 2], rows
        )

    def _extents(
        self,
        tensors: tuple[tuple[Role, int], ...],
        buffers: dict[Role, Buffer],
        rows: tuple[int, int, Rows],
    ) -> list[tuple[Part, int, int]]:
        """Where some rows (owner, block, rows) are in the parts of a block."""
        return [
            (buffers[rows_of.role][rows[1]], rows_of.size_bytes, rows_of.offset)
            for rows_of in self.ring.row_ranges(tensors, *rows)
        ]

    def _cost(self, pieces: tuple[Piece, ...], zeroed_bytes: int) -> Cost:
        problem = self.ring.problem
        of_q, of_v = self.ring.operation.flops
        per_head = of_q * problem.head_dim + of_v * problem.v_head_dim
        per_cell = per_head * problem.num_heads * problem.batch
        kv = problem.k_token_bytes + problem.v_token_bytes
        cost = tile_cost(pieces, per_cell, problem.q_token_bytes, kv)
        return cost._replace(size_bytes=cost.size_bytes + zeroed_bytes)

    def _returns_at(self, hop: int) -> dict[Role, Buffer]:
        """The parts in which sums that come back after a hop are received.

        After the last hop nothing else is on its way, and the slot of the next hop is free. Before
        that, other sums may be on their way. Sums that came back are added one hop later, so two
        buffers take turns.
        """
        if hop == self.world - 1:
            return self.sum_slots[self.world % 2]
        return self._slots(self.ring.sums, f" returned {hop % 2}")

    def _add_returned(self, *, before: int) -> None:
        """Adds the sums that came back before a hop to the owner's contribution."""
        for hop, block in [(at, block) for at, block in self.returned if at < before]:
            self.returned.remove((hop, block))
            rows = self.ring.sum_rows[self.rank][block][hop]
            if self.ring.forward and self.ring.sums:
                self._merge_returned(block, rows, self._returns_at(hop))
                continue
            came = (self.rank, block, rows)
            for name, size in self.ring.sums:
                total, arrived = self.owner_sums[name][block], self._returns_at(hop)[name][block]
                cost = Cost(0, 3 * num_rows(rows) * size)
                self.g.compute(
                    f"add {name}{block}",
                    Add(name, block, total.id, arrived.id, rows),
                    reads=[arrived],
                    accumulates=[total],
                    cost=cost,
                    looks_at=self._extents(((name, size),), self._returns_at(hop), came),
                )

    def _merge_returned(self, block: int, rows: Rows, slots: dict[Role, Buffer]) -> None:
        """Merges a running state that came back into the owner's."""
        state = [self.owner_sums[role][block] for role, _ in self.ring.sums]
        arrived = {role: slots[role][block] for role, _ in self.ring.sums}
        size = sum(size for _, size in self.ring.sums)
        self.g.compute(
            f"merge state{block}",
            MergeRows(block, _ids(arrived), rows),
            reads=arrived.values(),
            accumulates=state,
            cost=Cost(0, 3 * num_rows(rows) * size),
            looks_at=self._extents(self.ring.sums, slots, (self.rank, block, rows)),
        )


def tile_cost(pieces: Sequence[Piece], per_cell: int, row_bytes: int, column_bytes: int) -> Cost:
    """What a tile costs, of which a mask leaves these pieces. per_cell: operations for a cell.

    row_bytes, column_bytes: bytes of a query, and of a key and its value.
    """
    rows = num_rows(union_of(p[:2] for p in pieces))
    columns = num_rows(union_of(p[2:4] for p in pieces))
    cells = sum(p.num_cells for p in pieces)
    masked = sum(p.num_cells for p in pieces if p.shape is not Shape.RECTANGLE)
    # Triangles and stairs have an edge, along which blocks are computed in part; bands have two.
    edge = 0
    for p in pieces:
        if p.shape not in (Shape.RECTANGLE, Shape.MASKED):
            length = min(p.q_stop - p.q_start, p.kv_stop - p.kv_start)
            edge += (1 + (p.shape is Shape.BAND)) * length * min(length, _EDGE)
    moved = rows * row_bytes + columns * column_bytes
    return Cost(cells * per_cell, moved, masked * per_cell, edge * per_cell)


def dsinks(g: GraphBuilder, problem: Problem) -> list[Part]:
    """The part that the deltas of a rank's queries add to; none where no gradient is needed."""
    if not problem.scores.sinks_need_grad:
        return []
    return list(g.buffer(Role.DSINKS, initialised=True).parts)


def _ids(parts: Mapping[Role, Part]) -> tuple[tuple[Role, int], ...]:
    return tuple((role, part.id) for role, part in parts.items())


def _bytes(lengths: list[int], token_bytes: int) -> list[int]:
    return [n * token_bytes for n in lengths]
