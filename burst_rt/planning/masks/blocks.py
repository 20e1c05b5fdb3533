"""Masks from a table of blocks."""

from __future__ import annotations

import hashlib
from copy import copy
from functools import cached_property
from math import gcd
from typing import Any

import numpy as np

from burst_rt.errors import InputError
from burst_rt.planning.masks.base import Mask, Relation, structured
from burst_rt.planning.masks.positions import Full, integer
from burst_rt.planning.masks.spans import END, Positions, Spans

__all__ = ["BlockSparse", "SameKeys"]

# Maximum block length, longer than any sequence.
_LARGEST_BLOCK = 1 << 48


class BlockSparse(Mask):
    """A query sees the keys of the blocks that a table names.

    table: booleans `[query blocks, key blocks]`, or `[batch, query blocks, key blocks]`; a list, a
        numpy array or a tensor. Query i and key j see each other where table[i // block, j //
        block]. i is the query's index, whether or not there are as many keys.
    block: tokens of a block; the last block of a side may be shorter.

    Raises InputError for anything else. `Causal() & BlockSparse(...)` cuts the blocks on the
    diagonal.
    """

    def __init__(self, table: Any, block: int) -> None:
        try:
            array = np.asarray(table.cpu().numpy() if hasattr(table, "new_tensor") else table)
        except (ValueError, TypeError, RuntimeError):
            # Rows of different lengths; a tensor of a type, or in a form, that numpy does not have.
            array = np.empty((), object)
        if array.dtype != bool or array.ndim not in (2, 3) or not array.size:
            raise InputError(
                "BlockSparse: table must be booleans [query blocks, key blocks], or one such table "
                f"for each batch row, got {type(table).__name__} of shape {array.shape} and type "
                f"{array.dtype}"
            )
        size = integer(block, 1)
        if size is None or size > _LARGEST_BLOCK:
            raise InputError(
                "BlockSparse: block must be a number of tokens of at least 1 and at most 2**48, "
                f"got {block!r}"
            )
        self._table = array.reshape(-1, *array.shape[-2:]).copy()
        self._block = size
        self._shift = 0  # a query's position less its index
        self._digest = hashlib.sha256(
            repr((self._table.shape, size)).encode() + self._table.tobytes()
        ).hexdigest()[:32]

    def __eq__(self, other: object) -> bool:
        return (
            type(other) is type(self)
            and other._digest == self._digest
            and other._shift == self._shift
        )

    def __hash__(self) -> int:
        return hash((self._digest, self._shift))

    def __repr__(self) -> str:
        batch, rows, columns = self._table.shape
        tables = f", {batch} batch rows" if batch > 1 else ""
        return f"BlockSparse({rows} x {columns} of {self._block}{tables}, digest {self._digest})"

    @property
    def batch(self) -> int:
        """See `Mask.batch`."""
        return len(self._table)

    @property
    def table_bytes(self) -> int:
        """See `Mask.table_bytes`: the table, and its runs once they are known."""
        runs: Spans | tuple[()] = self.__dict__.get("_runs", ())
        return int(self._table.nbytes + sum(bounds.nbytes for bounds in runs))

    @property
    def by_index(self) -> bool:
        """See `Mask.by_index`: yes."""
        return True

    def refuses(self, q_len: int, kv_len: int, batch: int) -> str | None:
        """See `Mask.refuses`: the table must have a block for every token, and no more."""
        _, rows, columns = self._table.shape
        for side, blocks, tokens in (("query", rows, q_len), ("key", columns, kv_len)):
            if blocks != -(-tokens // self._block):
                return (
                    f"{self!r} has {blocks} {side} blocks, and {tokens} tokens make "
                    f"{-(-tokens // self._block)}"
                )
        return super().refuses(q_len, kv_len, batch)

    def bound(self, q_len: int, kv_len: int) -> Mask:
        """See `Mask.bound`: positions of queries become indices by the lengths."""
        if q_len == kv_len:
            return self
        mask = copy(self)
        mask._shift = kv_len - q_len
        return mask

    def changes(self, q: Positions) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """See `Mask.changes`: where another row of the table begins."""
        block = self.labels(q)
        changed: np.ndarray[Any, np.dtype[np.bool_]] = np.diff(block, prepend=block[:1]) != 0
        return changed

    def by_label(self) -> tuple[Mask, Mask] | None:
        """See `Mask.by_label`: itself, and every key. A subclass may have other spans."""
        return (self, Full()) if self._steady else None

    def labels(self, q: Positions) -> Positions:
        """See `Mask.labels`: the rows of the table."""
        return (q - self._shift) // self._block

    @structured(steady=True, period=lambda mask: gcd(mask._block, mask._shift))
    def spans(self, q: Positions) -> Spans:
        """The runs of blocks that the query's row of the table names."""
        block = self.labels(q)
        return Spans(*(bounds[:, block] for bounds in self._runs))

    def relation(self, q: range, kv: range) -> Relation:
        """Reads the blocks that hold the first to the last position."""
        first_row, last_row = self.labels(np.array([q[0], q[-1]]))
        columns = slice(kv[0] // self._block, kv[-1] // self._block + 1)
        named = self._table[:, first_row : last_row + 1, columns]
        first = named[:, :1]  # it mostly decides, and the whole table would take long
        if any(some.any() and not some.all() for some in (first, named)):
            return Relation.PARTIAL
        return Relation.FULL if first.any() else Relation.EMPTY

    @cached_property
    def _runs(self) -> Spans:
        """The spans of each row of the table: `[batch, query blocks, width]`."""
        batch, rows, columns = self._table.shape
        # Nothing outside the table is named.
        changed = np.empty((batch, rows, columns + 1), bool)
        changed[..., :1], changed[..., -1:] = self._table[..., :1], self._table[..., -1:]
        np.not_equal(self._table[..., 1:], self._table[..., :-1], out=changed[..., 1:-1])
        edges = np.flatnonzero(changed)
        ends = np.searchsorted(edges, np.arange(1, batch * rows + 1) * (columns + 1))
        # In each row, runs start and stop in turn.
        of_row = np.diff(ends, prepend=0) // 2
        there = np.arange(max(1, int(of_row.max()))) < of_row[:, None]
        bounds = [np.full(there.shape, END) for _ in range(2)]
        for side, bound in enumerate(bounds):
            bound[there] = edges[side::2] % (columns + 1) * self._block
        return Spans(*(bound.reshape(batch, rows, -1) for bound in bounds))


class SameKeys(BlockSparse):
    """Every query sees the keys that are True; no padding, say.

    seen: booleans `[1, keys]` or `[batch, 1, keys]`, as `BlockSparse` takes them.
    """

    def __init__(self, seen: Any) -> None:
        super().__init__(seen, 1)

    def __repr__(self) -> str:
        return super().__repr__().replace("BlockSparse", "SameKeys")

    def refuses(self, q_len: int, kv_len: int, batch: int) -> str | None:
        """See `Mask.refuses`: there must be a boolean for every key."""
        keys = self._table.shape[2]
        if keys != kv_len:
            return f"{self!r} is for {keys} keys, and there are {kv_len}"
        return Mask.refuses(self, q_len, kv_len, batch)

    def labels(self, q: Positions) -> Positions:
        """See `Mask.labels`: the only row of the table."""
        return np.zeros_like(q)
