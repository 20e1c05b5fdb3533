"""Masks by a function of the user's own; made by `Mask.from_function`, whose text says what it is.

Nothing is sampled to decide what is computed: plans go by `within` alone, and kernels ask the
function about every cell of the parts that `within` leaves.
"""

from __future__ import annotations

from typing import Any

from burst_rt.errors import InputError
from burst_rt.planning.masks.base import Cells, Mask, Relation, Rule
from burst_rt.planning.masks.positions import Full
from burst_rt.planning.masks.spans import Positions, Spans

__all__ = ["Function"]


class Function(Mask, made_by="function"):
    """See `Mask.from_function`."""

    def __init__(self, function: Any, within: Mask | None = None, key: str | None = None) -> None:
        where = "Mask.from_function"
        if not callable(function):
            raise InputError(
                f"{where}: expected a function of (batch, head, q, kv), got {function!r}"
            )
        if within is not None and not (isinstance(within, Mask) and within.has_spans):
            raise InputError(
                f"{where}: within must be a mask that has spans, such as burst_rt.Causal(), got "
                f"{within!r}; combine other masks with the result by & and |"
            )
        if key is not None and not (isinstance(key, str) and key):
            raise InputError(f"{where}: key must be a string that is not empty, got {key!r}")
        self.function, self.within, self.key = function, within or Full(), key

    def __eq__(self, other: object) -> bool:
        return (
            type(other) is type(self)
            and other.function is self.function
            and other.within == self.within
            and other.key == self.key
        )

    def __hash__(self) -> int:
        return hash((id(self.function), self.within, self.key))

    def __repr__(self) -> str:
        # A key represents the function, whatever its name. An address must not appear: ranks
        # compare these words.
        named = getattr(self.function, "__qualname__", type(self.function).__qualname__)
        told = named if self.key is None else f"key={self.key!r}"
        return f"from_function({told}, within={self.within!r})"

    @property
    def batch(self) -> int:
        """See `Mask.batch`: what `within` tells apart; the function may tell more apart."""
        return self.within.batch

    @property
    def table_bytes(self) -> int:
        """See `Mask.table_bytes`."""
        return self.within.table_bytes

    def num_apart(self, batch: int, heads: int) -> int:
        """See `Mask.num_apart`: every batch row and head."""
        return batch * heads

    @property
    def sent(self) -> Mask:
        """See `Mask.sent`; this is `within`."""
        return self.within

    @property
    def mover(self) -> Mask | None:
        """See `Mask.mover`."""
        return self.within.mover

    @property
    def by_index(self) -> bool:
        """See `Mask.by_index`."""
        return self.within.by_index

    def refuses(self, q_len: int, kv_len: int, batch: int) -> str | None:
        """See `Mask.refuses`."""
        return self.within.refuses(q_len, kv_len, batch)

    def bound(self, q_len: int, kv_len: int) -> Mask:
        """See `Mask.bound`."""
        within = self.within.bound(q_len, kv_len)
        return self if within is self.within else Function(self.function, within, self.key)

    def outline(self, q: Positions) -> Spans:
        """See `Mask.outline`: the spans of `within`."""
        return self.within.spans(q)

    def relation(self, q: range, kv: range) -> Relation:
        """EMPTY where `within` says so, else PARTIAL."""
        empty = self.within.relation(q, kv) is Relation.EMPTY
        return Relation.EMPTY if empty else Relation.PARTIAL

    def seen_cells(self, cells: Cells) -> Any:
        """See `Mask.seen_cells`."""
        said = cells.asked(self)
        return said if self.within.rule is Rule.EVERYTHING else cells.by_spans(self.within) & said

    def allows(self, q_position: Any, kv_position: Any) -> Any:
        """Raises InputError: functions are asked with batch row and head, by `seen_cells`."""
        raise InputError(
            f"{self!r}: allows knows neither batch row nor head; call the function itself"
        )
