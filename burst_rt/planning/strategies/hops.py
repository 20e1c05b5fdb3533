"""Hops: where the blocks of a travelling side are, step by step, and which of their rows.

Everything makes W-1 hops along a `Route`. A shard travels as two blocks of one or more runs of
positions, or as one (`ring.sends_single_blocks`). A row is sent as far as the last rank that
computes with it, and no farther; see `planning/needs.py`. The sums of a block travel from the first
rank after the owner that adds to them to the last, which returns them to the owner; on a route that
does not carry sums, every rank returns its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import NamedTuple, TypeAlias, TypeVar

from burst_rt.errors import InternalError
from burst_rt.planning.layouts import Block, blocks_of, one_range, stretches
from burst_rt.planning.masks import Piece, Rule, Shape
from burst_rt.planning.needs import Needed, Rows, union_of
from burst_rt.planning.problem import Problem
from burst_rt.planning.strategies.routes import Route

__all__ = ["Hops", "SumHop", "num_blocks", "num_tokens"]

_T = TypeVar("_T")
# Positions that follow each other, and the runs that they are, by number among all runs of a side.
# A mask leaves fewer pieces of them than of their runs.
_Stretches: TypeAlias = "tuple[tuple[range, slice], ...]"


class SumHop(NamedTuple):
    """What becomes of a block's sums at the rank that does the block's tile of a hop."""

    starts: bool  # whether the tile starts the sums
    returns_to_owner: bool  # whether they go to the owner from there; else to the next hop


@dataclass(frozen=True, kw_only=True)
class Hops:
    """How one side travels past the other side, which is resident."""

    problem: Problem
    queries_travel: bool  # whether the query side travels; else keys and values do
    route: Route  # the order in which blocks visit the ranks
    single_block: bool = False  # whether a shard travels as one block

    @cached_property
    def travelling(self) -> tuple[tuple[Block, ...], ...]:
        """Blocks of the travelling side, by owner. Every owner has as many; some may be empty."""
        runs = self.problem.q_runs if self.queries_travel else self.problem.kv_runs
        return tuple(blocks_of(shard, self.num_blocks) for shard in runs)

    @property
    def num_blocks(self) -> int:
        """Number of blocks as which a shard travels."""
        return num_blocks(self.problem, self.single_block)

    @cached_property
    def resident(self) -> tuple[tuple[range, ...], ...]:
        """Runs of the resident side, by rank."""
        return self.problem.kv_runs if self.queries_travel else self.problem.q_runs

    @cached_property
    def travelling_bounds(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The bounds (first token, last + 1) of each travelling block in its owner's shard, by
        owner.
        """
        return tuple(
            tuple(pairwise(accumulate(map(num_tokens, blocks), initial=0)))
            for blocks in self.travelling
        )

    @cached_property
    def resident_bounds(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The bounds of the resident shard, which is one part, by rank."""
        return tuple(((0, num_tokens(runs)),) for runs in self.resident)

    def block_len(self, owner: int, block: int) -> int:
        """Number of tokens in a travelling block."""
        start, stop = self.travelling_bounds[owner][block]
        return stop - start

    @cached_property
    def _stretches(self) -> tuple[tuple[tuple[_Stretches, ...], ...], tuple[_Stretches, ...]]:
        """Those of travelling blocks, by owner and block, and of resident shards, by rank."""
        at, has_spans = 0, self.problem.mask.has_spans

        def next_ones(runs: Block) -> _Stretches:
            nonlocal at
            ranges = []
            # A mask without spans only says whether anything of a range is seen: short ranges.
            for touching in stretches(runs) if has_spans else [(run,) for run in runs]:
                ranges.append((one_range(touching), slice(at, at + len(touching))))
                at += len(touching)
            return tuple(ranges)

        moving = tuple(tuple(map(next_ones, blocks)) for blocks in self.travelling)
        at = 0
        return moving, tuple(map(next_ones, self.resident))

    def forget(self) -> None:
        """See `Program.forget`."""
        for name in ("needed", "needed_at", "holders", "bundles", "sum_hops", "sum_rows"):
            vars(self).pop(name, None)
        self.problem.forget()

    def tiles(self, rank: int) -> Iterator[tuple[Block, Block]]:
        """See `Program.tiles`."""
        for owner, blocks in enumerate(self.travelling):
            for block, moving in enumerate(blocks):
                if self.needed[owner][block][rank]:
                    sides = (moving, self.resident[rank])
                    yield sides if self.queries_travel else sides[::-1]

    def pieces(self, owner: int, block: int, rank: int) -> tuple[Piece, ...]:
        """The pieces that a rank has to compute with a travelling block.

        Rows and columns are counted along the block and along the whole resident shard.
        """
        moving, staying = self.travelling[owner][block], self.resident[rank]
        problem, queries_travel = self.problem, self.queries_travel
        if problem.mask.rule is Rule.EVERYTHING:
            lengths = (num_tokens(moving), num_tokens(staying))
            rows, columns = lengths if queries_travel else reversed(lengths)
            full = Piece(0, rows, 0, columns, Shape.RECTANGLE, rows * columns)
            return (full,) if rows and columns else ()
        travelling, residents = self._stretches
        meet = problem.needs.met if queries_travel else problem.needs.met.T
        needed = self.needed[owner][block][rank]
        pieces: list[Piece] = []
        start = 0
        for moved, numbers in travelling[owner][block]:
            first = 0
            for stays, others in residents[rank]:
                q, kv, rows, columns = (
                    (moved, stays, start, first) if queries_travel else (stays, moved, first, start)
                )
                for of_both in problem.pieces(q, kv) if meet[numbers, others].any() else ():
                    for piece in _arrived(_moved(of_both, rows, columns), needed, queries_travel):
                        touching = bool(pieces) and _touch(pieces[-1], piece)
                        pieces.append(_joined(pieces.pop(), piece) if touching else piece)
                first += len(stays)
            start += len(moved)
        return tuple(pieces)

    @cached_property
    def needed(self) -> Needed:
        """The rows of a block that a rank computes with, by owner, block and rank."""
        if self.problem.mask.rule is Rule.EVERYTHING:
            has_residents = [any(runs) for runs in self.resident]

            def of(owner: int, block: int) -> tuple[Rows, ...]:
                length = self.block_len(owner, block)
                return tuple(
                    ((0, length),) if length and any_at else () for any_at in has_residents
                )

            return self._by_block(of)
        needs = self.problem.needs
        return needs.queries if self.queries_travel else needs.keys

    @cached_property
    def holders(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """The rank that has a block, by hop, block and owner. Raises InternalError."""
        ranks, blocks = range(self.problem.world_size), range(self.num_blocks)
        holders = tuple(
            tuple(
                tuple(self.route.holder(owner, hop, block) for owner in ranks) for block in blocks
            )
            for hop in ranks
        )
        if any(len(set(by_owner)) < len(ranks) for at_hop in holders for by_owner in at_hop):
            raise InternalError(f"{self.route} has two blocks at one rank")
        return holders

    @cached_property
    def needed_at(self) -> Needed:
        """The rows of a block that its holder computes with, by owner, block and hop."""

        def of(owner: int, block: int) -> tuple[Rows, ...]:
            needed = self.needed[owner][block]
            return tuple(needed[at[block][owner]] for at in self.holders)

        return self._by_block(of)

    def reach(self) -> int:
        """Maximum number of hops that each token travels, added up over all tokens."""
        hops = range(self.problem.world_size - 1, 0, -1)
        return sum(
            self.block_len(owner, block) * next((hop for hop in hops if rows[hop]), 0)
            for owner, blocks in enumerate(self.needed_at)
            for block, rows in enumerate(blocks)
        )

    @cached_property
    def bundles(self) -> tuple[tuple[tuple[Rows, ...], ...], ...]:
        """The rows of a bundle that must be there, by owner, block and hop; none at hop 0.

        The rank at that hop computes with them, or passes them on to a rank that does.
        """
        world = self.problem.world_size
        passes = [step for hop in range(world) for step in self.route.passes(hop)]
        onward = sorted(((to, hop) for hop, to in passes if hop), reverse=True)

        def of(owner: int, block: int) -> tuple[Rows, ...]:
            rows = [(), *self.needed_at[owner][block][1:]]
            for to, hop in onward:
                if rows[to] and rows[to] != rows[hop]:
                    rows[hop] = union_of((*rows[hop], *rows[to])) if rows[hop] else rows[to]
            return tuple(rows)

        return self._by_block(of)

    @cached_property
    def sum_hops(self) -> tuple[tuple[dict[int, SumHop], ...], ...]:
        """The hops at which the sums of a block are in transit, by owner and block."""
        world = self.problem.world_size

        def of(owner: int, block: int) -> dict[int, SumHop]:
            needed = self.needed_at[owner][block]
            adding = [hop for hop in range(1, world) if needed[hop]]
            if not self.route.carries_sums or len(adding) < 2:
                return dict.fromkeys(adding, SumHop(starts=True, returns_to_owner=True))
            first, last = adding[0], adding[-1]
            on = SumHop(starts=False, returns_to_owner=False)
            hops = dict.fromkeys(range(first, last + 1), on)
            hops[first], hops[last] = on._replace(starts=True), on._replace(returns_to_owner=True)
            return hops

        return self._by_block(of)

    def _by_block(self, of: Callable[[int, int], _T]) -> tuple[tuple[_T, ...], ...]:
        """The value `of(owner, block)` for all travelling blocks, by owner and block."""
        blocks = range(self.num_blocks)
        return tuple(
            tuple(of(owner, block) for block in blocks) for owner in range(self.problem.world_size)
        )

    @cached_property
    def sum_rows(self) -> tuple[tuple[dict[int, Rows], ...], ...]:
        """The rows of a block's sums that leave after the tile of a hop, by owner, block and hop of
        `sum_hops`.

        Sums that go along with their block hold the rows that any rank adds to.
        """

        def of(owner: int, block: int) -> dict[int, Rows]:
            hops, needed = self.sum_hops[owner][block], self.needed_at[owner][block]
            if self.route.carries_sums:
                return dict.fromkeys(hops, union_of(chain(*set(needed[1:]))))
            return {hop: needed[hop] for hop in hops}

        return self._by_block(of)


def num_blocks(problem: Problem, single_block: bool = False) -> int:
    """Number of blocks as which a shard travels: two, unless it is a single block or nothing
    travels.
    """
    return 1 if single_block or problem.world_size == 1 else 2


def num_tokens(runs: Iterable[range]) -> int:
    """Number of positions in all runs together."""
    return sum(map(len, runs))


def _moved(piece: Piece, rows: int, columns: int) -> Piece:
    """The same piece, counted from an earlier start: rows and columns are added."""
    q_start, q_stop, kv_start, kv_stop = piece[:4]
    return piece._replace(
        q_start=q_start + rows,
        q_stop=q_stop + rows,
        kv_start=kv_start + columns,
        kv_stop=kv_stop + columns,
    )


def _arrived(piece: Piece, arrived: Rows, queries_travel: bool) -> Iterator[Piece]:
    """The piece; of a piece under the mask, the parts whose rows, or columns, have arrived.

    Kernels read all rows and columns of a piece under the mask. `num_cells` of a part is its share
    by length, and not counted: it may be 0 where cells are seen.
    """
    if piece.shape is not Shape.MASKED:
        yield piece
        return
    start, stop = piece[:2] if queries_travel else piece[2:4]
    parts = [(max(a, start), min(b, stop)) for a, b in arrived if a < stop and start < b]
    total, done, cells = sum(b - a for a, b in parts), 0, 0
    for a, b in parts:
        done += b - a
        share = piece.num_cells * done // total - cells
        cells += share
        part = piece._replace(num_cells=share)
        yield (
            part._replace(q_start=a, q_stop=b)
            if queries_travel
            else part._replace(kv_start=a, kv_stop=b)
        )


def _touch(a: Piece, b: Piece) -> bool:
    """Whether two full rectangles, the second further on, form one rectangle."""
    if a.shape is not Shape.RECTANGLE or b.shape is not Shape.RECTANGLE:
        return False
    if a[:2] == b[:2]:
        return a.kv_stop == b.kv_start
    return a[2:4] == b[2:4] and a.q_stop == b.q_start


def _joined(a: Piece, b: Piece) -> Piece:
    return a._replace(q_stop=b.q_stop, kv_stop=b.kv_stop, num_cells=a.num_cells + b.num_cells)
