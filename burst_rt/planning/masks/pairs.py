"""The algebra of masks: two masks as one, by `&` and `|`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from math import gcd
from operator import and_
from typing import Any

import numpy as np

from burst_rt.errors import InputError
from burst_rt.planning.masks.base import Cells, Mask, Relation, structured
from burst_rt.planning.masks.spans import Positions, Spans, beside, intersect, unite

__all__ = ["Both", "Either"]

# Maximum number of masks made by `|` and combined by `&` of which all combinations are looked at.
_MOST_EITHER = 3


@dataclass(frozen=True)
class _Pair(Mask):
    """Two masks as one."""

    first: Mask
    second: Mask

    def __post_init__(self) -> None:
        movers = [part.mover for part in (self.first, self.second) if part.mover]
        if len(movers) == 2 and movers[0] != movers[1]:
            raise InputError(
                f"{movers[0]!r} and {movers[1]!r}: both say where queries stand in their "
                "documents; combine the lengths into one Documents"
            )
        batches = {self.first.batch, self.second.batch} - {1}
        if len(batches) == 2:
            raise InputError(
                f"{type(self).__name__}: {self.first!r} and {self.second!r} are for different "
                f"numbers of batch rows, {self.first.batch} and {self.second.batch}"
            )

    @property
    def has_spans(self) -> bool:
        """See `Mask.has_spans`: both masks do."""
        return self.first.has_spans and self.second.has_spans

    @property
    def batch(self) -> int:
        """See `Mask.batch`."""
        return max(self.first.batch, self.second.batch)

    @property
    def table_bytes(self) -> int:
        """See `Mask.table_bytes`."""
        return self.first.table_bytes + self.second.table_bytes

    def num_apart(self, batch: int, heads: int) -> int:
        """See `Mask.num_apart`."""
        return max(part.num_apart(batch, heads) for part in (self.first, self.second))

    @property
    def mover(self) -> Mask | None:
        """See `Mask.mover`."""
        return self.first.mover or self.second.mover

    @property
    def by_index(self) -> bool:
        """See `Mask.by_index`."""
        return self.first.by_index or self.second.by_index

    @property
    def alike(self) -> Mask:
        """See `Mask.alike`."""
        return self._of(self.first.alike, self.second.alike)

    @property
    def sent(self) -> Mask:
        """See `Mask.sent`."""
        return self._of(self.first.sent, self.second.sent)

    def refuses(self, q_len: int, kv_len: int, batch: int) -> str | None:
        """See `Mask.refuses`."""
        sizes = (q_len, kv_len, batch)
        return self.first.refuses(*sizes) or self.second.refuses(*sizes)

    def bound(self, q_len: int, kv_len: int) -> Mask:
        """See `Mask.bound`."""
        return self._of(self.first.bound(q_len, kv_len), self.second.bound(q_len, kv_len))

    def changes(self, q: Positions) -> np.ndarray[Any, np.dtype[np.bool_]] | bool:
        """See `Mask.changes`."""
        return self.first.changes(q) | self.second.changes(q)

    def _of(self, first: Mask, second: Mask) -> Mask:
        """The same combination of two other masks; this mask itself, if they are its own two."""
        same = first is self.first and second is self.second
        return self if same else type(self)(first, second)


def _common_period(pair: _Pair) -> int:
    """See `Mask._period`: what holds for both masks."""
    return gcd(pair.first._period, pair.second._period)


class Both(_Pair, made_by="&"):
    """Allows what two masks both allow; made by `a & b`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mover is not None and (self.by_index or not self.has_spans):
            raise InputError(
                f"{self.first!r} & {self.second!r}: Documents(q_lengths, kv_lengths) combines with "
                "masks that have spans, and not with BlockSparse; write `spans` for a mask of your "
                "own, and give a function all other masks as `within`"
            )

    @structured(period=_common_period)
    def spans(self, q: Positions) -> Spans:
        """See `Mask.spans`."""
        mover = self.mover
        if mover is None:
            return intersect(self.first.spans(q), self.second.spans(q))
        # A mover moves all that it is combined with by `&`, and what is within that.
        deep = any(part.mover and not isinstance(part, _Pair) for part in self._parts())
        return _moved(self, q, mover.places(q), deep=deep)

    def seen_together(self, q: Positions, firsts: Positions, end: int) -> Spans:
        """See `Mask.seen_together`. Rows are looked at where the masks' structure will not do."""
        parts = list(self._parts())
        few = sum(isinstance(part, Either) for part in parts) <= _MOST_EITHER
        for part in parts if few and self.mover is None else ():
            if not (part._steady or isinstance(part, Either)):
                continue
            others = reduce(and_, (other for other in parts if other is not part))
            if isinstance(part, Either):
                masks = ((one & others) for one in (part.first, part.second))
                return unite(*(mask.seen_together(q, firsts, end) for mask in masks))
            # Where both tell batch rows apart, what any row sees of each says too little.
            if 1 in (part.batch, others.batch):
                return intersect(*(x.seen_together(q, firsts, end) for x in (part, others)))
        return super().seen_together(q, firsts, end)

    def by_label(self) -> tuple[Mask, Mask] | None:
        """See `Mask.by_label`: the first of the masks that has labels, and all others."""
        parts = list(self._parts())
        for part in parts:
            if part.by_label():
                return part, reduce(and_, (other for other in parts if other is not part))
        return None

    def _parts(self) -> Iterator[Mask]:
        """All masks that this one combines by `&`."""
        for part in (self.first, self.second):
            yield from part._parts() if isinstance(part, Both) else (part,)

    def outline(self, q: Positions) -> Spans:
        """See `Mask.outline`."""
        if self.has_spans:
            return self.spans(q)
        return intersect(self.first.outline(q), self.second.outline(q))

    def seen_cells(self, cells: Cells) -> Any:
        """See `Mask.seen_cells`."""
        if self.has_spans:
            return cells.by_spans(self)
        return self.first.seen_cells(cells) & self.second.seen_cells(cells)

    def relation(self, q: range, kv: range) -> Relation:
        """EMPTY if either mask says EMPTY, FULL if both say FULL."""
        if self.mover:
            return super().relation(q, kv)
        relations = {self.first.relation(q, kv), self.second.relation(q, kv)}
        if Relation.EMPTY in relations:
            return Relation.EMPTY
        return Relation.FULL if relations == {Relation.FULL} else Relation.PARTIAL

    def allows(self, q_position: Any, kv_position: Any) -> Any:
        """True where both masks allow the pair."""
        if self.has_spans:
            return super().allows(q_position, kv_position)
        asked = (q_position, kv_position)
        return self.first.allows(*asked) & self.second.allows(*asked)


class Either(_Pair, made_by="|"):
    """Allows what one of two masks allows; made by `a | b`."""

    @structured(period=_common_period)
    def spans(self, q: Positions) -> Spans:
        """See `Mask.spans`."""
        return unite(self.first.spans(q), self.second.spans(q))

    def seen_together(self, q: Positions, firsts: Positions, end: int) -> Spans:
        """See `Mask.seen_together`."""
        parts = (self.first, self.second)
        return unite(*(part.seen_together(q, firsts, end) for part in parts))

    def outline(self, q: Positions) -> Spans:
        """See `Mask.outline`."""
        return unite(self.first.outline(q), self.second.outline(q))

    def seen_cells(self, cells: Cells) -> Any:
        """See `Mask.seen_cells`."""
        if self.has_spans:
            return cells.by_spans(self)
        return self.first.seen_cells(cells) | self.second.seen_cells(cells)

    def relation(self, q: range, kv: range) -> Relation:
        """FULL if either mask says FULL, EMPTY if both say EMPTY."""
        relations = {self.first.relation(q, kv), self.second.relation(q, kv)}
        if Relation.FULL in relations:
            return Relation.FULL
        return Relation.EMPTY if relations == {Relation.EMPTY} else Relation.PARTIAL

    def allows(self, q_position: Any, kv_position: Any) -> Any:
        """True where either mask allows the pair."""
        if self.has_spans:
            return super().allows(q_position, kv_position)
        asked = (q_position, kv_position)
        return self.first.allows(*asked) | self.second.allows(*asked)


def _moved(mask: Mask, q: Positions, places: Positions, *, deep: bool) -> Spans:
    """The keys that queries see in a mask that is combined by `&` with a mover, or that contains
    the mover.

    q: int64 `[rows]`, where the mover itself has them. places: `[batch or 1, rows]`, where all
    other masks have them. deep: whether the masks joined with the mover by `|` do, too.
    """
    if isinstance(mask, Both) or (deep and isinstance(mask, Either)):
        join = intersect if isinstance(mask, Both) else unite
        return join(*(_moved(part, q, places, deep=deep) for part in (mask.first, mask.second)))
    if mask.mover is not None:
        return mask.spans(q)
    if len(places) == 1:
        return mask.spans(places[0])
    rows = [mask.spans(row) for row in places]
    return beside([spans.row(number) for number, spans in enumerate(rows)], axis=0)
