"""Tiles in parts: where positions do not ascend along the columns, and under masks without spans.

The latter are of bounded size, with the cells that are seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch

from burst_rt.kernels.base import QKV, Places, Tile, some_of
from burst_rt.planning.masks import Mask, Piece, Relation, Shape
from burst_rt.planning.needs import ROWS_TOGETHER
from burst_rt.planning.problem import TileShape

__all__ = ["TileSlice", "ascending_groups", "in_order", "places_of_parts", "slices_of"]

# Maximum number of cells about which a mask without spans is asked at once, and minimum number of
# columns, which may exceed it. Parts, and the blocks of columns in a part, are cut at multiples of
# the rows that travel together, so that a block's columns have either all arrived or none.
_MOST_CELLS, _COLUMNS = 1 << 24, ROWS_TOGETHER


class TileSlice(NamedTuple):
    """Some heads of a tile, all its rows and some of its columns, with the cells they see."""

    heads: slice  # heads of q
    kv_heads: slice
    columns: slice
    tile: Tile  # its columns, and the score options of its heads
    cells: torch.Tensor  # bool `[batch, rows, columns]`: the heads see the same

    def of(self, qkv: QKV) -> QKV:
        return QKV(*(x for x in self.sides(*qkv) if x is not None))

    def sides(self, *tensors: torch.Tensor | None) -> Iterator[torch.Tensor | None]:
        """Views of the part, of tensors like q, k and v."""
        q, *kv = tensors
        yield None if q is None else q[:, :, self.heads]
        for x in kv:
            yield None if x is None else x[:, self.columns, self.kv_heads]

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """A view of the part, of a tensor `[batch, heads, rows]` or `[batch, rows, heads, ...]`."""
        return x[:, self.heads] if x.ndim == 3 else x[:, :, self.heads]


def ascending_groups(runs: tuple[range, ...]) -> list[tuple[range, ...]]:
    """Runs of positions in groups, in each of which the positions ascend.

    A ring's side is one group, and so is a side that all ranks gather. Striped shards that a
    hybrid's group gathers are several groups.
    """
    groups: list[list[range]] = []
    for run in filter(None, runs):
        if groups and groups[-1][-1][-1] < run[0]:
            groups[-1].append(run)
        else:
            groups.append([run])
    return [tuple(group) for group in groups]


def in_order(tile: Tile) -> Iterator[tuple[slice, Tile]]:
    """The columns of a tile, and the tile of these columns, where positions ascend along them."""
    groups, start = ascending_groups(tile.kv_positions), 0
    for number, runs in enumerate(groups):
        columns = slice(start, start + sum(map(len, runs)))
        start = columns.stop
        first, last = tile.first and number == 0, tile.last and number == len(groups) - 1
        yield columns, tile._replace(kv_positions=runs, first=first, last=last)


def places_of_parts(mask: Mask, places: Places, shape: TileShape) -> Iterator[Places]:
    """A tile's rows with the columns of each of its parts (`slices_of`); itself, if it has none.

    shape: batch and heads are the tile's; the lengths may be a larger tile's.
    """
    rows, columns = places
    if mask.has_spans:
        yield places
        return
    apart = shape.batch * shape.num_heads // shape.num_kv_heads
    for some in _columns_of_parts(mask, places, apart):
        yield rows, tuple(some_of(columns, some))


def _columns_of_parts(mask: Mask, places: Places, apart: int) -> list[slice]:
    """The columns of each part, without those that no row sees; of one part at least.

    apart: how many tables of cells a key/value head may have.
    """
    rows, columns = places
    q_len, kv_len = (sum(map(len, runs)) for runs in places)
    step = max(1, _MOST_CELLS // (apart * q_len * _COLUMNS)) * _COLUMNS
    parts = [slice(start, min(start + step, kv_len)) for start in range(0, kv_len, step)]

    def seen_by_a_row(part: slice) -> bool:
        runs = product(filter(len, rows), some_of(columns, part))
        return any(mask.relation(q, kv) is not Relation.EMPTY for q, kv in runs)

    return list(filter(seen_by_a_row, parts)) or parts[:1]


def slices_of(qkv: QKV, tile: Tile) -> Iterator[TileSlice]:
    """A tile in parts of bounded size, under a mask that gives booleans only.

    As many heads as fit are asked about together. Where they see the same, they are one part.
    """
    batch, q_len, num_heads, _ = qkv.q.shape
    kv_len, num_kv_heads = qkv.k.shape[1:3]
    group = num_heads // num_kv_heads
    every = Piece(0, q_len, 0, kv_len, Shape.MASKED, q_len * kv_len)
    sides = _columns_of_parts(tile.mask, (tile.q_positions, tile.kv_positions), batch * group)
    longest = max(columns.stop - columns.start for columns in sides)
    some = max(1, _MOST_CELLS // (batch * q_len * group * longest))
    for first in range(0, num_kv_heads, some):
        kv_heads = slice(first, min(first + some, num_kv_heads))
        heads = slice(kv_heads.start * group, kv_heads.stop * group)
        asked = tile._replace(first_head=tile.first_head + heads.start)
        for columns in sides:
            seen = asked.visible(every, every.rows, columns, qkv.q[:, :, heads])
            assert seen is not None
            cells = seen[(None,) * (4 - seen.ndim)].expand(batch, -1, -1, -1)
            head_tile = tile._replace(
                kv_positions=tuple(some_of(tile.kv_positions, columns)),
                first=tile.first and columns is sides[0],
                last=tile.last and columns is sides[-1],
                score_options=tile.score_options.of_heads(heads),
            )
            if cells.shape[1] == 1:
                yield TileSlice(heads, kv_heads, columns, head_tile, cells[:, 0])
                continue
            for number, head in enumerate(range(heads.start, heads.stop)):
                own = slice(head, head + 1), slice(head // group, head // group + 1)
                alone = head_tile._replace(score_options=tile.score_options.of_heads(own[0]))
                yield TileSlice(*own, columns, alone, cells[:, number])
