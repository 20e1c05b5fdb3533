"""Packed batches: several documents in one sequence, each of which sees only itself."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from math import log2
from typing import Any, NamedTuple

import numpy as np

from burst_rt.errors import InputError
from burst_rt.planning.masks.base import Mask, Relation, structured
from burst_rt.planning.masks.positions import Chunked, integers, is_count
from burst_rt.planning.masks.spans import END, Positions, Spans

__all__ = ["Documents"]

_PADDING = -1
_MOST_TOKENS = 1 << 48  # maximum length of a sequence
# Maximum number of documents, and of batch rows, whose lengths `repr` tells.
_TOLD = 8


class _Row(NamedTuple):
    """The documents of one batch row, in order; padding is a run like a document."""

    q: Positions  # `[documents + 1]`: where each begins among the queries, and the number of them
    kv: Positions  # the same among the keys
    seen: np.ndarray[Any, np.dtype[np.bool_]]  # `[documents]`: False for padding


class Documents(Mask):
    """A query sees the keys of its own document. `Causal() & Documents(...)` is a packed batch.

    Give one of these, as a list, a numpy array or a tensor of integers:

    lengths: tokens of each document, in order. A list of lists: one list for each batch row.
    cu_seqlens: the same as cumulative sums that begin with 0, as flash-attn takes them.
    ids: a document's number for each token, `[tokens]` or `[batch, tokens]`. -1 is padding, which
        sees nothing and which nobody sees. A number that returns after another is refused.
    position_ids: positions that restart with each document, `[tokens]` or `[batch, tokens]`. A
        step other than 1 begins a document, as in Hugging Face's packing.
    q_lengths and kv_lengths: where queries and keys differ in number, tokens of each document among
        the queries and among the keys. In each document the last query is at the position of the
        last key, also for the masks combined with this one by `&`; as in flash-attn's varlen.

    All tokens of the sequence must be in the lengths, before it is cut over ranks. Raises
    InputError for anything else.
    """

    def __init__(
        self,
        lengths: Any = None,
        kv_lengths: Any = None,
        *,
        q_lengths: Any = None,
        cu_seqlens: Any = None,
        ids: Any = None,
        position_ids: Any = None,
    ) -> None:
        if lengths is not None and kv_lengths is not None and q_lengths is None:
            lengths, q_lengths = None, lengths  # Documents(q_lengths, kv_lengths)
        given = {
            "lengths": lengths, "q_lengths": q_lengths, "kv_lengths": kv_lengths,
            "cu_seqlens": cu_seqlens, "ids": ids, "position_ids": position_ids,
        }  # fmt: skip
        names = [name for name, value in given.items() if value is not None]
        if names == ["q_lengths", "kv_lengths"]:
            rows = _by_both(q_lengths, kv_lengths)
        elif names in (["lengths"], ["cu_seqlens"], ["ids"], ["position_ids"]):
            (name,) = names
            rows = _MAKERS[name](name, given[name])
        else:
            raise InputError(
                "Documents: expected lengths, cu_seqlens, ids, position_ids, or q_lengths and "
                f"kv_lengths, got {' and '.join(names) or 'none of them'}"
            )
        self._rows = tuple(rows)
        self._moves = "q_lengths" in names
        _check_totals("queries", [int(row.q[-1]) for row in rows])
        _check_totals("keys", [int(row.kv[-1]) for row in rows])
        parts = [part.tobytes() for row in rows for part in row]
        self._digest = hashlib.sha256(
            b"".join(len(part).to_bytes(8, "little") + part for part in parts)
            + bytes([self._moves])
        ).hexdigest()[:32]

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other._digest == self._digest

    def __hash__(self) -> int:
        return hash(self._digest)

    def __repr__(self) -> str:
        if max(len(self._rows), *(len(row.seen) for row in self._rows)) <= _TOLD:
            # Ranks compare masks by these words: with all lengths, one sees what differs.
            kv = _in_words(self._rows, [row.kv for row in self._rows])
            if not self._moves:
                return f"Documents({kv})"
            q = _in_words(self._rows, [row.q for row in self._rows])
            return f"Documents(q_lengths={q}, kv_lengths={kv})"
        counts = [int(row.seen.sum()) for row in self._rows]
        tokens = self._rows[0].kv[-1]
        named = f"{counts[0]}" if len(counts) == 1 else f"{counts} by batch row"
        queries = f", {self._rows[0].q[-1]} queries" if self._moves else ""
        return f"Documents({named}, {tokens} tokens{queries}, digest {self._digest})"

    @property
    def batch(self) -> int:
        """See `Mask.batch`."""
        return len(self._rows)

    @property
    def mover(self) -> Mask | None:
        """See `Mask.mover`: with q_lengths and kv_lengths."""
        return self if self._moves else None

    @property
    def alike(self) -> Mask:
        """Documents of one length, a power of two, with about as many cells; where queries and keys
        differ, as many documents as a power of two, each with its part of both.
        """
        if self._moves:
            rows = self._rows
            cells = sum(int((np.diff(row.q) * np.diff(row.kv))[row.seen].sum()) for row in rows)
            q_len, kv_len = int(rows[0].q[-1]), int(rows[0].kv[-1])
            count = 1 << round(log2(max(1.0, q_len * kv_len * len(rows) / max(1, cells))))
            parts = np.arange(min(count, q_len, kv_len) + 1)
            q, kv = (np.diff(parts * length // parts[-1]) for length in (q_len, kv_len))
            return Documents(q, kv)
        lengths = np.concatenate([np.diff(row.kv)[row.seen] for row in self._rows])
        mean = float((lengths**2).sum() / max(1, lengths.sum()))
        return Chunked(1 << round(log2(max(1.0, mean))))

    def refuses(self, q_len: int, kv_len: int, batch: int) -> str | None:
        """See `Mask.refuses`: the documents must have as many tokens as the call."""
        q_tokens, kv_tokens = int(self._rows[0].q[-1]), int(self._rows[0].kv[-1])
        if kv_tokens != kv_len:
            return f"{self!r} has {kv_tokens} keys, and kv_layout has {kv_len} tokens"
        if self._moves and q_tokens != q_len:
            return f"{self!r} has {q_tokens} queries, and layout has {q_len} tokens"
        if q_len > kv_len and not self._moves:
            return (
                f"{self!r} is for {kv_tokens} tokens, and there are {q_len} queries: give "
                "q_lengths and kv_lengths"
            )
        return super().refuses(q_len, kv_len, batch)

    def places(self, q: Positions) -> Positions:
        """See `Mask.places`: in each document the last query is at the position of the last key."""
        return np.stack(
            [
                index + row.kv[document + 1] - row.q[document + 1]
                for row, index, document in self._found(q)
            ]
        )

    @structured(steady=True)
    def spans(self, q: Positions) -> Spans:
        """The keys of the query's document."""
        by_row = [_keys(row, document) for row, _, document in self._found(q)]
        return Spans(*(np.stack(bounds)[..., None] for bounds in zip(*by_row, strict=True)))

    @property
    def padding(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Number of padding tokens before the first document of each batch row."""
        return np.array([0 if row.seen[0] else row.kv[1] for row in self._rows])

    @property
    def padded(self) -> bool:
        """Whether any token is padding."""
        return not all(row.seen.all() for row in self._rows)

    @property
    def counts(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Number of documents in each batch row; padding does not count."""
        return np.array([row.seen.sum() for row in self._rows])

    def begins(self, q: Positions) -> Positions:
        """`[batch, queries]`: where the document of each query begins among the keys."""
        return np.stack([row.kv[document] for row, _, document in self._found(q)])

    def chunks(self, size: int, places: Any) -> Documents:
        """These documents, each cut into chunks: tokens whose place is in [0, size), and so on.

        places: integers, `[tokens]` or `[batch, tokens]`, that ascend by 1 within a document, such
        as position_ids. Raises InputError for others. It does not apply to documents with
        q_lengths.

        Worked example: documents of 3 and 5 tokens at places 0 1 2, 0 1 2 3 4 have chunks of 2, 1,
        2, 2 and 1 tokens where size is 2.
        """
        places = np.atleast_2d(_integers("chunks: places", places))
        tokens, rows = int(self._rows[0].kv[-1]), {len(self._rows), len(places)} - {1}
        if not is_count(size, 1) or places.shape[1] != tokens or len(rows) > 1 or self._moves:
            raise InputError(
                "Documents.chunks: expected documents by lengths, a size of at least 1, and a "
                f"place for each of {tokens} tokens in {len(self._rows)} rows, got {size!r} and "
                f"places of shape {places.shape} for {self!r}"
            )
        ids = np.empty((max(rows, default=1), tokens), np.int64)
        for number, labels in enumerate(ids):
            row, place = self._rows[number % len(self._rows)], places[number % len(places)]
            begins = np.zeros(tokens, bool)
            begins[row.kv[:-1]] = True
            seen = np.repeat(row.seen, np.diff(row.kv))
            leaps = (np.diff(place) != 1) & ~begins[1:] & seen[1:]
            if leaps.any():
                at = int(leaps.argmax()) + 1
                raise InputError(
                    "Documents.chunks: expected places that ascend by 1 within a document, got "
                    f"{int(place[at])} after {int(place[at - 1])} at token {at} of row {number}"
                )
            begins[1:] |= np.diff(place // size) != 0
            labels[:] = np.where(seen, np.cumsum(begins), _PADDING)
        return Documents(ids=ids)

    def changes(self, q: Positions) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """See `Mask.changes`: where another document begins, in any batch row."""
        changed = np.zeros(len(q), bool)
        for _, _, document in self._found(q):
            changed[1:] |= document[1:] != document[:-1]
        return changed

    def relation(self, q: range, kv: range) -> Relation:
        """Compares the documents of the first and last positions."""
        relations = {self._relation(row, q, kv) for row in self._rows}
        return relations.pop() if len(relations) == 1 else Relation.PARTIAL

    def _relation(self, row: _Row, q: range, kv: range) -> Relation:
        first, last = (self._document(row, position) for position in (q[0], q[-1]))
        if first < 0:  # before all documents
            return Relation.EMPTY if last < 0 else Relation.PARTIAL
        if kv[-1] < row.kv[first] or kv[0] >= row.kv[last + 1]:
            return Relation.EMPTY
        one = first == last and row.seen[first]
        full = one and row.kv[first] <= kv[0] and kv[-1] < row.kv[first + 1]
        return Relation.FULL if full else Relation.PARTIAL

    def _document(self, row: _Row, position: int) -> int:
        return int(np.searchsorted(row.q, position - self._shift, side="right")) - 1

    @cached_property
    def _shift(self) -> int:
        """A query's position less its place in `_Row.q`."""
        return int(self._rows[0].kv[-1] - self._rows[0].q[-1])

    def _found(self, q: Positions) -> list[tuple[_Row, Positions, Positions]]:
        """The documents of each batch row, each query's place in `_Row.q`, and each query's
        document.

        The document is -1 if the query is before all documents.
        """
        index = q - self._shift
        each = np.broadcast_to(index, (len(self._rows), index.shape[-1]))
        return [
            (row, here, np.searchsorted(row.q, here, side="right") - 1)
            for row, here in zip(self._rows, each, strict=True)
        ]


def _in_words(rows: Sequence[_Row], all_bounds: Sequence[Positions]) -> str:
    """The lengths of the documents, as `Documents` takes them; the lengths of padding are named."""
    told = []
    for row, bounds in zip(rows, all_bounds, strict=True):
        lengths = zip(np.diff(bounds).tolist(), row.seen.tolist(), strict=True)
        told.append(", ".join(f"{n}" if seen else f"{n} padding" for n, seen in lengths))
    return f"[{told[0]}]" if len(told) == 1 else f"[{', '.join(f'[{row}]' for row in told)}]"


def _row(q: Positions, kv: Positions) -> _Row:
    """A batch row without padding. Documents without a token are left out."""
    kept = np.append(True, (np.diff(q) > 0) | (np.diff(kv) > 0))
    q, kv = q[kept], kv[kept]
    return _Row(q, kv, np.ones(len(q) - 1, bool))


def _check_totals(side: str, totals: list[int]) -> None:
    if len(set(totals)) > 1 or 0 in totals:
        raise InputError(
            f"Documents: every batch row must have the same number of {side}, at least 1, got "
            f"{totals}"
        )


def _keys(row: _Row, document: Positions) -> tuple[Positions, Positions]:
    starts, stops = row.kv[:-1], row.kv[1:]
    # The last entry is for queries before all documents (-1), which occur where another mask moves
    # queries.
    nothing = np.append(~row.seen | (starts == stops), True)
    starts, stops = (np.where(nothing, END, np.append(x, END)) for x in (starts, stops))
    return starts[document], stops[document]


def _integers(name: str, value: Any) -> Positions:
    """The argument as an array of one or two dimensions."""
    expected = f"Documents: {name} must be integers, a vector or one vector for each batch row"
    return integers(expected, value, (1, 2))


def _vectors(name: str, value: Any) -> list[Positions]:
    """A vector for each batch row; the vectors may differ in length."""
    first: Any = value[0] if isinstance(value, (list, tuple)) and value else 0
    # A tensor of one number has __len__, too.
    if hasattr(first, "__len__") and getattr(first, "ndim", True):
        rows = [_integers(name, row) for row in value]
        wrong = next((row for row in rows if row.ndim > 1), None)
        if wrong is None:
            return rows
        raise InputError(
            f"Documents: {name} must be a vector, or one vector for each batch row, got a row of "
            f"shape {wrong.shape}"
        )
    return list(np.atleast_2d(_integers(name, value)))


def _bounds_of(name: str, value: Any) -> list[Positions]:
    """Cumulative sums of lengths, by batch row."""
    bounds = []
    for lengths in _vectors(name, value):
        for wrong, at in ((lengths.min(), lengths.argmin()), (lengths.max(), lengths.argmax())):
            if not 0 <= wrong <= _MOST_TOKENS:
                raise InputError(
                    f"Documents: {name} must be at least 0 and at most 2**48, got {int(wrong)} for "
                    f"document {int(at)}"
                )
        bounds.append(np.concatenate([[0], np.cumsum(lengths)]))
    return bounds


def _by_both(q_lengths: Any, kv_lengths: Any) -> list[_Row]:
    q, kv = _bounds_of("q_lengths", q_lengths), _bounds_of("kv_lengths", kv_lengths)
    q_counts = [len(row) - 1 for row in q]
    kv_counts = [len(row) - 1 for row in kv]
    if q_counts != kv_counts:
        raise InputError(
            "Documents: q_lengths and kv_lengths must name as many documents, got "
            f"{q_counts} and {kv_counts}, by batch row"
        )
    return list(map(_row, q, kv))


def _by_lengths(name: str, value: Any) -> list[_Row]:
    return [_row(b, b) for b in _bounds_of(name, value)]


def _by_sums(name: str, value: Any) -> list[_Row]:
    rows = []
    for sums in _vectors(name, value):
        if len(sums) < 2 or sums[0] != 0 or (np.diff(sums) < 0).any():
            raise InputError(
                f"Documents: {name} must begin with 0 and never fall, with one number more than "
                f"there are documents, got {sums[:8].tolist()}{' ...' if len(sums) > 8 else ''}"
            )
        if sums[-1] > _MOST_TOKENS:
            raise InputError(f"Documents: {name} must be at most 2**48, got {int(sums[-1])}")
        rows.append(_row(sums, sums))
    return rows


def _by_ids(name: str, value: Any) -> list[_Row]:
    rows = []
    for number, ids in enumerate(np.atleast_2d(_integers(name, value))):
        if ids.min() < _PADDING:
            raise InputError(
                f"Documents: {name} must be at least 0, or -1 for padding, got {int(ids.min())}"
            )
        firsts = np.flatnonzero(np.diff(ids, prepend=ids[0] - 1))
        named = ids[firsts]
        documents, counts = np.unique(named[named != _PADDING], return_counts=True)
        if (counts > 1).any():
            again = int(documents[counts > 1][0])
            raise InputError(
                f"Documents: {name} of batch row {number}: document {again} returns after another "
                "one; a document's tokens must stand together"
            )
        bounds = np.append(firsts, len(ids))
        rows.append(_Row(bounds, bounds, named != _PADDING))
    return rows


def _by_positions(name: str, value: Any) -> list[_Row]:
    rows = []
    for places in np.atleast_2d(_integers(name, value)):
        bounds = np.append(np.flatnonzero(np.diff(places, prepend=places[0] - 2) != 1), len(places))
        rows.append(_row(bounds, bounds))
    return rows


_MAKERS = {
    "lengths": _by_lengths,
    "cu_seqlens": _by_sums,
    "ids": _by_ids,
    "position_ids": _by_positions,
}
