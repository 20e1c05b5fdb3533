"""What a mask is: which query sees which key, answered for whole ranges of positions at once.

Planning needs masks too, so this module does not import torch. A range of positions is a Python
`range` (start, stop, step), which covers runs of consecutive tokens and strided runs alike. For a
query range and a key range a mask answers EMPTY, FULL or PARTIAL (`relation`), cuts a PARTIAL tile
into pieces that a kernel can do (`pieces`), and gives the exact truth (`spans`, or else `allows`).

Where there are more or fewer keys than queries, the last query is at the position of the last key
(bottom-right alignment, as in flash-attn): query i is at position i + Skv - Sq. The planner shifts
query positions; masks know nothing of the shift.

A new mask needs `spans`, and all else follows from it. A mask that cannot give spans has
`relation` and `allows` instead, or is a function (`Mask.from_function`). If a mask does not define
`pieces`, a PARTIAL tile is computed under the mask itself. A mask's `repr` must say everything
about the mask: ranks compare masks by `repr`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import lru_cache, wraps
from inspect import get_annotations, isfunction
from typing import Any, ClassVar, NamedTuple, Protocol, Self, TypeVar

import numpy as np

from burst_rt.errors import InputError
from burst_rt.planning.masks.pieces import MOST_SPANS, Piece, Shape, split
from burst_rt.planning.masks.spans import (
    BEGIN,
    END,
    Positions,
    Spans,
    one_span,
)
from burst_rt.planning.numbers import UNNUMBERED, Numbers, is_tracing

__all__ = [
    "MASKS",
    "Cells",
    "Mask",
    "Relation",
    "Rule",
    "positions_of",
    "sees_few",
    "spans_of",
    "structured",
]

_Spans = TypeVar("_Spans", bound=Callable[..., Spans])

# Number of rows that are sampled to say whether a tile's rows see many spans each.
_SAMPLED_ROWS = 256


class Relation(Enum):
    """The part of a rectangle of queries x keys that a mask leaves: nothing, some of it, all of
    it.
    """

    EMPTY = "empty"
    PARTIAL = "partial"
    FULL = "full"


class Rule(Enum):
    """The rule by which a mask decides on every cell from the positions of query and key.

    Kernels have special code for some rules.
    """

    EVERYTHING = "everything"  # the query sees every key
    NOT_LATER = "not later"  # the query sees the keys at or before its position
    OWN = "own"  # only the mask itself can tell


class Cells(Protocol):
    """Some cells of a tile, of all batch rows and some heads, as a kernel asks masks about them.

    Every answer is a tensor of booleans that broadcasts to `[batch, heads, q, kv]`.
    """

    def by_spans(self, mask: Mask) -> Any:
        """The cells that are seen under a mask that has spans."""

    def allowed(self, mask: Mask) -> Any:
        """The cells that a mask allows by `Mask.allows`."""

    def asked(self, mask: Any) -> Any:
        """The answers of the function of a `Function`, whatever `within` shows."""


class _Structure(NamedTuple):
    """The words of `structured` about one function."""

    spans: Callable[..., Spans] | None = None
    steady: bool = False
    period: Callable[[Any], int] | None = None

    @classmethod
    def of(cls, spans: Callable[..., Spans]) -> _Structure:
        # functools.wraps copies attributes: a wrapper has words that nobody said of it.
        words: _Structure = getattr(spans, "structure", cls())
        return words if words.spans is spans else cls()


def structured(
    *, steady: bool = False, period: Callable[[Any], int] | None = None
) -> Callable[[_Spans], _Spans]:
    """Says what planning may rely on about the `spans` that it decorates.

    The words belong to the function: a subclass that writes other `spans` has said nothing about
    them. steady: see `Mask._steady`. period: of a mask; see `Mask._period`.
    The names of the two begin with an underscore so that a field of a user's mask cannot hide them.
    """

    def marked(spans: _Spans) -> _Spans:
        vars(spans).update(structure=_Structure(spans, steady, period))
        return spans

    return marked


def _kept_apart(spans: Callable[..., Spans]) -> Callable[..., Spans]:
    """The `spans` of somebody's mask, in any order, with those that overlap or touch merged."""

    @wraps(spans)
    def merged(self: Mask, q: Positions) -> Spans:
        found = spans(self, q)
        return found.merged() if isinstance(found, Spans) else found

    return merged


class Mask:
    """The (query, key) pairs that attend. Immutable, hashable, comparable.

    `a & b` allows what both allow, `a | b` what one of them allows.
    """

    # The number is not part of the mask's contents: it is neither compared, nor copied, nor sent.
    __slots__ = ("__dict__", "__weakref__", "_burst_rt_number")

    # The rule whose special code in kernels computes this mask. A class that sets no rule has OWN:
    # a rule is not inherited, because a subclass may allow something else.
    rule: ClassVar[Rule] = Rule.OWN
    # Whether `spans` defines the mask. False again if a subclass defines it otherwise.
    _spanned: ClassVar[bool] = False
    # By this number compiled programs know the mask; no other mask has it.
    _burst_rt_number: int
    # The subclasses that `&`, `|` and `from_function` make. They are defined with `made_by`, above
    # this module, which knows them by no other way.
    _made_by: ClassVar[dict[str, Callable[..., Mask]]] = {}

    def __new__(cls, *args: object, **options: object) -> Self:
        mask = super().__new__(cls)
        number = UNNUMBERED if is_tracing() else MASKS.give(mask)
        object.__setattr__(mask, "_burst_rt_number", number)
        return mask

    def __getstate__(self) -> object:
        state = super().__getstate__()
        if not isinstance(state, tuple):
            return state  # the state is another base class's, which knows better
        # Because there are slots: the fields, and what is in the slots.
        fields, slots = state
        own = {name: value for name, value in slots.items() if name != "_burst_rt_number"}
        return (fields, own) if own else fields

    def __init_subclass__(cls, *, made_by: str | None = None, **options: object) -> None:
        super().__init_subclass__(**options)
        if made_by is not None:
            Mask._made_by[made_by] = cls
        spans = cls.__dict__.get("spans")
        if spans is not None:
            cls._spanned = True
            # Our own need none of it, and say so by `structured`.
            if isfunction(spans) and _Structure.of(spans).spans is None:
                cls.spans = _kept_apart(spans)  # type: ignore[method-assign]
        elif {"allows", "relation", "pieces"} & set(cls.__dict__):
            cls._spanned = False
        if "rule" in cls.__dict__:
            return
        if "rule" in get_annotations(cls):
            raise InputError(
                f"{cls.__name__}: a field of a mask must not be named rule, which is a name of "
                "Mask itself; rename the field"
            )
        cls.rule = Rule.OWN

    @staticmethod
    def from_function(function: Any, within: Mask | None = None, key: str | None = None) -> Mask:
        """The cells that `within` shows and for which a function says True: `within & function`.

        function: takes (batch, head, q, kv), four int64 tensors that broadcast, as FlexAttention's
            mask_mod does, and returns booleans that broadcast to the same shape. batch and head are
            the numbers of batch row and query head in the whole call, kv is the key's position, q
            the query's position among the keys: its index + Skv - Sq, as for all masks, which for
            the first queries is below 0 where Sq > Skv. Under Documents(q_lengths, kv_lengths) in
            `within` the last query of a document is at the position of its last key. The function
            decides on each cell by itself, is on the device of the tensors that it is given, and
            may be called from several threads.
        within: a mask that has spans; the default is Full(). The function is asked only about tiles
            and parts of tiles in which `within` shows something, and rows are sent by what `within`
            shows.
        key: represents the function where ranks compare their masks. Without a key the ranks
            compare what the function says about 4,096 cells that are drawn from a seed. Functions
            that differ only in other cells are not detected: agreement is not a proof.

        Any function is computed exactly, but none fast: it is asked anew in every call, tile by
        tile, in parts of bounded size, and so for a few heads at a time where it tells heads apart.
        Masks are the same mask if they have the same function object, `within` and key; so a mask
        is made once, and not in every step. Raises InputError for other arguments. The function is
        tried on drawn cells before a call sends anything: where it raises there, or gives no such
        booleans, or other answers the second time, the call raises InputError on every rank. If
        it raises on a cell that was not tried, the call fails midway, as when a rank is lost.
        """
        return Mask._made_by["function"](function, within, key)

    @property
    def has_spans(self) -> bool:
        """Whether `spans` gives what this mask sees."""
        return self._spanned

    @property
    def batch(self) -> int:
        """Number of batch rows that the mask tells apart; 1: every batch row sees the same."""
        return 1

    @property
    def table_bytes(self) -> int:
        """Bytes of the tables that the mask holds; 0 where they grow with the tokens at most."""
        return 0

    def num_apart(self, batch: int, heads: int) -> int:
        """Number of these batch rows x heads that may each see something else."""
        return self.batch

    @property
    def mover(self) -> Mask | None:
        """The mask that gives queries their positions for the masks it is combined with; or
        None.
        """
        return None

    @property
    def by_index(self) -> bool:
        """True if the mask uses a query's index instead of the position that a mover gives it."""
        return False

    @property
    def _steady(self) -> bool:
        """Whether all queries between two `changes` see the same keys; see `structured`."""
        return _Structure.of(type(self).spans).steady

    @property
    def _period(self) -> int:
        """A number that says for which steps of a strided layout equally spaced positions look
        alike; see `structured`.

        For each step that divides it, whether the query at q sees the key at k follows from
        q // step, k // step, and whether k % step is larger than q % step. Every step divides 0,
        and only 1 divides 1, which says nothing.
        """
        period = _Structure.of(type(self).spans).period
        return 1 if period is None else period(self)

    @property
    def alike(self) -> Mask:
        """A typical mask that costs about as much; there are few of them, and forecasts are made
        for them.

        So packed batches, which bring a new mask with every step, need no new forecast.
        """
        return self

    @property
    def sent(self) -> Mask:
        """The mask by which rows are sent to ranks: it shows at least as much as this one."""
        return self

    @property
    def layouts(self) -> tuple[Any, Any] | None:
        """The layouts of queries and keys that this mask is for; None for a mask that fits any
        layout.
        """
        return None

    def refuses(self, q_len: int, kv_len: int, batch: int) -> str | None:
        """Why the mask does not fit a call of these sizes (tokens of whole sequences), or None."""
        if self.batch in (1, batch):
            return None
        return f"{self!r} is for {self.batch} batch rows, and q has {batch}"

    def bound(self, q_len: int, kv_len: int) -> Mask:
        """This mask for sequences of these lengths; the mask itself, if the lengths add nothing."""
        return self

    def places(self, q: Positions) -> Positions:
        """The positions that a mover gives to queries, for the masks it is combined with by `&`.

        int64 `[batch, rows]`.
        """
        raise NotImplementedError

    def spans(self, q: Positions) -> Spans:
        """The keys that queries at these positions see. q: int64 `[rows]`."""
        raise NotImplementedError

    def outline(self, q: Positions) -> Spans:
        """Spans outside of which nothing is seen: `spans`, where the mask has them."""
        return self.spans(q) if self.has_spans else one_span(BEGIN, END, like=q)

    def changes(self, q: Positions) -> np.ndarray[Any, np.dtype[np.bool_]] | bool:
        """The queries at which steady masks, if the mask is one or consists of some, may show other
        keys than to the query before.

        q: int64 `[rows]`. Returns booleans `[rows]`; False: nowhere.
        """
        return False

    def by_label(self) -> tuple[Mask, Mask] | None:
        """This mask as `labelled & others`, where `labelled` has `labels`; None for a mask without
        labels.
        """
        return None

    def labels(self, q: Positions) -> Positions:
        """A number for each query; those with equal numbers see the same keys. q: int64 `[rows]`.

        Only masks that `by_label` returns have labels.
        """
        raise NotImplementedError

    def seen_together(self, q: Positions, firsts: Positions, end: int) -> Spans:
        """The keys before `end` that groups of queries see together: `[1, groups, width]`.

        q: positions, int64 `[rows]`. firsts: the first row of each group, ascending from 0. No row
        but a first one has a change (`changes`). A key counts if any batch row sees it.
        """
        if self._steady:
            return self.spans(q[firsts]).together(np.arange(len(firsts)), end)
        return self.spans(q).together(firsts, end)

    def columns(self, q: range, kv: range) -> Spans:
        """The columns of these keys that queries at these positions see; see `Spans.columns`."""
        return spans_of(self, q).columns(kv)

    def seen_cells(self, cells: Cells) -> Any:
        """The cells of a tile that are seen: booleans that broadcast to `[batch, heads, q, kv]`."""
        return cells.by_spans(self) if self.has_spans else cells.allowed(self)

    def relation(self, q: range, kv: range) -> Relation:
        """EMPTY, PARTIAL or FULL for two non-empty ranges of positions.

        FULL and EMPTY must be right; PARTIAL is allowed for any pair of ranges.
        """
        if not self.has_spans:
            raise NotImplementedError  # only the mask's own `relation` could tell
        starts, stops = self.columns(q, kv)
        seen = (stops - starts).sum(-1)
        if seen.max() == 0:
            return Relation.EMPTY
        return Relation.FULL if seen.min() == len(kv) else Relation.PARTIAL

    def allows(self, q_position: Any, kv_position: Any) -> Any:
        """True where the query sees the key.

        Takes two ints, or two integer tensors that broadcast. The answer of a mask that tells batch
        rows apart has the batch in front. An author who writes this method uses operators only.
        """
        is_tensor = hasattr(q_position, "new_tensor")
        q, kv = (
            # An empty list has lost its shape.
            np.asarray(x.tolist() if is_tensor else x, np.int64).reshape(np.shape(x))
            for x in (q_position, kv_position)
        )
        seen = self.spans(q.reshape(-1)).sees(kv, like=q)
        if is_tensor:
            seen = (q_position == q_position).new_tensor(seen)
        return seen[0] if self.batch == 1 else seen

    def pieces(self, q: range, kv: range) -> tuple[Piece, ...]:
        """The non-empty part of a tile as pieces that do not overlap.

        Empty ranges have no pieces.
        """
        if not q or not kv:
            return ()
        relation = self.relation(q, kv)
        if relation is Relation.EMPTY:
            return ()
        shape, num_cells = Shape.RECTANGLE, len(q) * len(kv)
        if relation is Relation.PARTIAL:
            if self.has_spans and sees_few(self, q):
                return split(self.columns(q, kv))
            shape, sample = Shape.MASKED, _sampled(q)
            num_cells = spans_of(self, sample).num_cells(kv) * len(q) // len(sample)
        return (Piece(0, len(q), 0, len(kv), shape, num_cells),)

    def __and__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            raise InputError(f"mask & other: expected another Mask, got {type(other).__name__}")
        if other.rule is Rule.EVERYTHING or self == other:
            return self
        return other if self.rule is Rule.EVERYTHING else Mask._made_by["&"](self, other)

    def __or__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            raise InputError(f"mask | other: expected another Mask, got {type(other).__name__}")
        if self.rule is Rule.EVERYTHING or self == other:
            return self
        return other if other.rule is Rule.EVERYTHING else Mask._made_by["|"](self, other)


def positions_of(positions: range) -> Positions:
    """A range as an array."""
    return np.arange(positions.start, positions.stop, positions.step, dtype=np.int64)


@lru_cache(maxsize=16)
def spans_of(mask: Mask, *q: range) -> Spans:
    """`Mask.outline` of ranges of positions. Cached, because planning asks many times."""
    return mask.outline(np.concatenate([positions_of(run) for run in q]))


def sees_few(mask: Mask, q: range) -> bool:
    """Whether queries at a range of positions see few spans each, by a sample of them.

    mask: one that has spans.
    """
    return spans_of(mask, _sampled(q)).width <= MOST_SPANS


def _sampled(q: range) -> range:
    return q[:: -(-len(q) // _SAMPLED_ROWS)]


# All live masks, by number.
MASKS: Numbers[Mask] = Numbers(2**40)
