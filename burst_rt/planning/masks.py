"""Masks: which query sees which key, answered for whole ranges of positions at once.

Pure Python: planning needs masks too. A range of positions is a Python `range` (start, stop, step),
which covers runs of consecutive tokens and strided runs alike. For a query range and a key range a
mask answers EMPTY, FULL or PARTIAL (`relation`), cuts a PARTIAL tile into pieces that a kernel can
do (`pieces`), and gives the exact truth for positions (`allows`).

Where there are more or fewer keys than queries, the last query stands at the last key (bottom-right
alignment, as in flash-attn): query i is at position i + Skv - Sq. The planner shifts query
positions; masks know nothing of the shift.

A new mask needs `relation` and `allows`. Without `pieces` of its own, a PARTIAL tile is computed
under the boolean mask itself. A mask's `repr` must say everything about the mask: ranks compare
masks by `repr`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from inspect import get_annotations
from typing import Any, ClassVar, NamedTuple, Self

from burst_rt.errors import InputError
from burst_rt.planning import numbers
from burst_rt.planning.numbers import Numbers

__all__ = ["MASKS", "Both", "Causal", "Full", "Mask", "Piece", "Relation", "Rule"]


class Relation(Enum):
    """What a mask leaves of a rectangle of queries x keys: nothing, some of it, all of it."""

    EMPTY = "empty"
    PARTIAL = "partial"
    FULL = "full"


class Piece(NamedTuple):
    """A part of a tile that a kernel can do in one go.

    Rows are counted from the start of the q-block, columns from the start of the kv-block. Without
    diagonal and masked, every cell is seen.
    """

    q_start: int
    q_stop: int  # one after the last row
    kv_start: int
    kv_stop: int  # one after the last column
    diagonal: bool  # row i of the piece sees columns j <= i
    masked: bool  # `Mask.allows` says which cells are seen
    num_cells: int  # how many cells are seen; an upper bound if masked

    @property
    def rows(self) -> slice:
        """The piece's rows of the tile."""
        return slice(self.q_start, self.q_stop)

    @property
    def columns(self) -> slice:
        """The piece's columns of the tile."""
        return slice(self.kv_start, self.kv_stop)


class Rule(Enum):
    """How a mask decides on every cell by the positions of query and key.

    Kernels have code of their own for some rules.
    """

    EVERYTHING = "everything"  # the query sees every key
    NOT_LATER = "not later"  # the query sees the keys that stand at or before it
    OWN = "own"  # only the mask itself can tell


class Mask:
    """Which (query, key) pairs attend. Immutable, hashable, comparable.

    `a & b` allows what both allow.
    """

    # The number is no part of the mask's contents: it is neither compared, nor copied, nor sent.
    __slots__ = ("__dict__", "__weakref__", "_burst_rt_number")

    # Which code of the kernels' own gives this mask. A class that sets no rule has OWN: a rule is
    # not inherited, because a subclass may allow something else.
    rule: ClassVar[Rule] = Rule.OWN
    # By this number compiled programs know the mask; no other mask has it.
    _burst_rt_number: int

    def __new__(cls, *args: object, **options: object) -> Self:
        mask = super().__new__(cls)
        number = numbers.UNNUMBERED if numbers.is_tracing() else MASKS.give(mask)
        object.__setattr__(mask, "_burst_rt_number", number)
        return mask

    def __getstate__(self) -> object:
        state = super().__getstate__()
        if not isinstance(state, tuple):
            return state  # of another base class, which knows better
        # Because there are slots: the fields, and what is in the slots.
        fields, slots = state
        own = {name: value for name, value in slots.items() if name != "_burst_rt_number"}
        return (fields, own) if own else fields

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if "rule" in cls.__dict__:
            return
        if "rule" in get_annotations(cls):
            raise InputError(
                f"{cls.__name__}: a field of a mask cannot be called rule, which is a name of "
                "Mask's; give it another name"
            )
        cls.rule = Rule.OWN

    def relation(self, q: range, kv: range) -> Relation:
        """EMPTY, PARTIAL or FULL for two non-empty ranges of positions.

        FULL and EMPTY must be right; PARTIAL is allowed for any pair of ranges.
        """
        raise NotImplementedError

    def allows(self, q_position: Any, kv_position: Any) -> Any:
        """True where the query sees the key.

        Takes two ints, or two integer tensors that broadcast, and uses operators only.
        """
        raise NotImplementedError

    def pieces(self, q: range, kv: range) -> tuple[Piece, ...]:
        """The non-empty part of a tile as pieces that do not overlap.

        Empty ranges have no pieces.
        """
        if not q or not kv:
            return ()
        relation = self.relation(q, kv)
        if relation is Relation.EMPTY:
            return ()
        masked = relation is Relation.PARTIAL
        return (Piece(0, len(q), 0, len(kv), False, masked, len(q) * len(kv)),)

    def __and__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            raise InputError(f"mask & other: expected another Mask, got {type(other).__name__}")
        if isinstance(other, Full) or self == other:
            return self
        return other if isinstance(self, Full) else Both(self, other)


@dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key."""

    rule = Rule.EVERYTHING

    def relation(self, q: range, kv: range) -> Relation:
        """Always FULL."""
        return Relation.FULL

    def allows(self, q_position: Any, kv_position: Any) -> Any:
        """Always true."""
        return (q_position == q_position) & (kv_position == kv_position)


@dataclass(frozen=True)
class Causal(Mask):
    """A query sees the key at its own position and all keys before it."""

    rule = Rule.NOT_LATER

    def relation(self, q: range, kv: range) -> Relation:
        """Compares the first and last positions."""
        if kv[0] > q[-1]:
            return Relation.EMPTY
        return Relation.FULL if kv[-1] <= q[0] else Relation.PARTIAL

    def allows(self, q_position: Any, kv_position: Any) -> Any:
        """key <= query."""
        return kv_position <= q_position

    def pieces(self, q: range, kv: range) -> tuple[Piece, ...]:
        """For ranges with the same step: at most one full rectangle, then one triangle.

        Worked example: q = range(4, 8), kv = range(2, 8). Row i sees columns j <= i + 2. All rows
        see columns 0 and 1 (a rectangle of 4 x 2); rows with j - 2 <= i see the columns j from 2 on
        (a triangle of 4 x 4).
        """
        if not q or not kv or q.step != kv.step or self.relation(q, kv) is not Relation.PARTIAL:
            return super().pieces(q, kv)
        # Row i sees column j when kv[0] + j * step <= q[0] + i * step.
        shift = (q.start - kv.start) // q.step
        first_row, first_column = max(0, -shift), max(0, shift)
        pieces = []
        if first_column:
            pieces.append(
                Piece(
                    first_row,
                    len(q),
                    0,
                    first_column,
                    False,
                    False,
                    (len(q) - first_row) * first_column,
                )
            )
        rows = len(q) - first_row
        columns = min(len(kv) - first_column, rows)
        num_cells = columns * (columns + 1) // 2 + (rows - columns) * columns
        pieces.append(
            Piece(first_row, len(q), first_column, first_column + columns, True, False, num_cells)
        )
        return tuple(pieces)


@dataclass(frozen=True)
class Both(Mask):
    """Allows what two masks both allow; made by `a & b`."""

    first: Mask
    second: Mask

    def relation(self, q: range, kv: range) -> Relation:
        """EMPTY if either mask says EMPTY, FULL if both say FULL."""
        relations = {self.first.relation(q, kv), self.second.relation(q, kv)}
        if Relation.EMPTY in relations:
            return Relation.EMPTY
        return Relation.FULL if relations == {Relation.FULL} else Relation.PARTIAL

    def allows(self, q_position: Any, kv_position: Any) -> Any:
        """True where both masks allow the pair."""
        return self.first.allows(q_position, kv_position) & self.second.allows(
            q_position, kv_position
        )


# Every mask there is, by its number.
MASKS: Numbers[Mask] = Numbers(2**40)
