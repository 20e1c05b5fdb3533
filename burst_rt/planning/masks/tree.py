"""Sequences that share their beginnings: a tree of runs of tokens in one row."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property
from math import log2
from typing import Any, NamedTuple

import numpy as np

from burst_rt.errors import InputError
from burst_rt.planning.masks.base import Mask, structured
from burst_rt.planning.masks.pairs import Both
from burst_rt.planning.masks.positions import Chunked, integers, is_count
from burst_rt.planning.masks.spans import END, Positions, Spans, apart

__all__ = ["PrefixTree", "branches_of"]

# Maximum number of nodes whose lengths `repr` tells.
_TOLD = 8


class _Limit(NamedTuple):
    """How far back along its path a query sees."""

    name: str  # "window" or "chunks"
    size: int

    def first(self, positions: Positions) -> Positions:
        """The first position that queries at these positions of their paths see."""
        if self.name == "chunks":
            return positions // self.size * self.size
        return positions - self.size


class PrefixTree(Mask):
    """A query sees the keys of its own node and of all nodes above. `Causal() & PrefixTree(...)`
    is a batch of sequences that share their beginnings: each leaf's path is one sequence.

    lengths: tokens of each node, in the order of the row. parents: the number of the node above,
        which comes earlier in the row; -1: there is none. A row may have several trees.
    tokens: tokens of the row. Those after the last node are padding, which sees nothing and which
        nobody sees. None: there is no padding.

    All rows of a batch have this tree. Raises InputError for other arguments.

    Worked example: two answers of 3 and 4 tokens to one question of 10 are
    `PrefixTree([10, 3, 4], [-1, 0, 0])`.
    """

    def __init__(self, lengths: Any, parents: Any, *, tokens: int | None = None) -> None:
        self._lengths, self._parents = (
            integers(f"PrefixTree: {name}: expected a vector of integers", value)
            for name, value in (("lengths", lengths), ("parents", parents))
        )
        number = len(self._lengths)
        if len(self._parents) != number or (self._lengths < 0).any() or not self._lengths.any():
            raise InputError(
                "PrefixTree: expected a parent for each node, and lengths of at least 0, not all "
                f"of them 0; got {number} lengths from {int(self._lengths.min())} on and "
                f"{len(self._parents)} parents"
            )
        late = (self._parents < -1) | (self._parents >= np.arange(number))
        if late.any():
            at = int(late.argmax())
            raise InputError(
                "PrefixTree: parents: expected the number of an earlier node, or -1 for none, got "
                f"{int(self._parents[at])} for node {at}"
            )
        self._bounds = np.concatenate([[0], np.cumsum(self._lengths)])
        self._tokens = int(self._bounds[-1]) if tokens is None else tokens
        if not is_count(self._tokens, int(self._bounds[-1])):
            raise InputError(
                f"PrefixTree: tokens: expected at least the {int(self._bounds[-1])} of the nodes, "
                f"got {tokens!r}"
            )
        self._limit: _Limit | None = None
        # The position of each node's first token on its path.
        self._depths = np.zeros(number, np.int64)
        for node, parent in enumerate(self._parents.tolist()):
            if parent >= 0:
                self._depths[node] = self._depths[parent] + self._lengths[parent]
        self._starts, self._stops, self._begins = self._runs()
        parts = (self._lengths, self._parents, np.array([self._tokens]))
        self._digest = hashlib.sha256(
            b"".join(len(part).to_bytes(8, "little") + part.tobytes() for part in parts)
        ).hexdigest()[:32]

    def _runs(self) -> tuple[Positions, Positions, Positions]:
        """What each node's tokens see: `[nodes + 1, width]`, starts, stops and the positions on
        the path of the starts. The last row is that of padding.
        """
        paths: list[list[int]] = []
        for node, parent in enumerate(self._parents.tolist()):
            own = [node] if self._lengths[node] else []
            paths.append([*(paths[parent] if parent >= 0 else ()), *own])
        runs = [apart(self._bounds[:-1][path], self._bounds[1:][path]) for path in paths]
        width = max(len(starts) for starts, _ in runs)
        table = np.full((2, len(runs) + 1, width), END)
        for node, bounds in enumerate(runs):
            table[:, node, : len(bounds[0])] = bounds
        starts, stops = table
        lengths = np.where(starts == END, 0, stops - starts)
        return starts, stops, np.cumsum(lengths, axis=1) - lengths

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other._key == self._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[str, _Limit | None]:
        return self._digest, self._limit

    def __repr__(self) -> str:
        words = f"{len(self._lengths)} nodes, {self._tokens} tokens, digest {self._digest}"
        if len(self._lengths) <= _TOLD:
            words = f"{self._lengths.tolist()}, {self._parents.tolist()}, tokens={self._tokens}"
        limit = f".{self._limit.name}({self._limit.size})" if self._limit else ""
        return f"PrefixTree({words}){limit}"

    @property
    def tokens(self) -> int:
        """Tokens of the row, padding included."""
        return self._tokens

    @property
    def padded(self) -> bool:
        """Whether any token is padding."""
        return self._tokens > int(self._bounds[-1])

    @cached_property
    def branches(self) -> Mapping[int, int]:
        """Where paths do not follow the row: by the place in the row of a token whose predecessor
        on its path is not the token before it, the place of that predecessor; -1 where a tree, or
        padding, begins later in the row.
        """
        branches: dict[int, int] = {}
        lasts: list[int] = []  # the last token of the path to each node
        bounds = self._bounds.tolist()
        for begin, end, parent in zip(bounds[:-1], bounds[1:], self._parents.tolist(), strict=True):
            before = lasts[parent] if parent >= 0 else -1
            lasts.append(end - 1 if end > begin else before)
            if end > begin and before != begin - 1:
                branches[begin] = before
        if self.padded:
            branches[bounds[-1]] = -1
        return branches

    @cached_property
    def unlimited(self) -> PrefixTree:
        """This tree without a window or chunks."""
        if self._limit is None:
            return self
        return PrefixTree(self._lengths, self._parents, tokens=self._tokens)

    def window(self, left: int) -> PrefixTree:
        """This tree, in which a query sees at most `left` tokens before it on its path."""
        return self._limited("window", left, 0)

    def chunks(self, size: int) -> PrefixTree:
        """This tree, in which a query sees its own chunk of its path: positions in [0, size), and
        so on.
        """
        return self._limited("chunks", size, 1)

    def _limited(self, name: str, size: int, least: int) -> PrefixTree:
        if not is_count(size, least) or self._limit:
            raise InputError(
                f"PrefixTree.{name}: expected a number of at least {least}, of a tree without "
                f"another limit, got {size!r} for {self!r}"
            )
        tree = PrefixTree(self._lengths, self._parents, tokens=self._tokens)
        tree._limit = _Limit(name, int(size))
        return tree

    def path_positions(self, q: Positions) -> Positions:
        """The position of each token on its path, from 0; of padding, 0. q: int64 `[rows]`."""
        node = self._nodes(q)
        starts, depths = (np.append(x, 0) for x in (self._bounds[:-1], self._depths))
        return np.where(node == len(self._lengths), 0, q - starts[node] + depths[node])

    @property
    def alike(self) -> Mask:
        """Chunks of one length, a power of two, with about as many cells under a causal mask."""
        mean = 1 + float(self.path_positions(np.arange(self._bounds[-1])).mean())
        if self._limit:
            mean = min(mean, self._limit.size)
        return Chunked(1 << round(log2(2 * mean)))

    def refuses(self, q_len: int, kv_len: int, batch: int) -> str | None:
        """See `Mask.refuses`: the tree must have as many tokens as the call has keys."""
        if kv_len != self._tokens or q_len > kv_len:
            return f"{self!r} is for {self._tokens} keys, and not for {q_len} queries of {kv_len}"
        return super().refuses(q_len, kv_len, batch)

    @property
    def _steady(self) -> bool:
        return self._limit is None

    @structured()
    def spans(self, q: Positions) -> Spans:
        """The runs of the query's path."""
        node = self._nodes(q)
        starts, stops = self._starts[None, node], self._stops[None, node]
        if self._limit is None:
            return Spans(starts, stops)
        # How many tokens of each run lie before the limit.
        hidden = self._limit.first(self.path_positions(q))[:, None] - self._begins[node]
        return Spans(np.where(starts == END, END, starts + hidden.clip(0)), stops).packed()

    def changes(self, q: Positions) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """See `Mask.changes`: where another node begins."""
        node = self._nodes(q)
        return np.append(False, node[1:] != node[:-1])[: len(q)]

    def _nodes(self, q: Positions) -> Positions:
        """The node of each token; for padding, the number of nodes."""
        node = np.searchsorted(self._bounds, q, side="right") - 1
        return np.where(node < 0, len(self._lengths), np.minimum(node, len(self._lengths)))


def branches_of(mask: Mask) -> Mapping[int, int]:
    """`PrefixTree.branches` of the tree by which a mask is limited; none without a tree."""
    if isinstance(mask, Both):
        return branches_of(mask.first) or branches_of(mask.second)
    return mask.branches if isinstance(mask, PrefixTree) else {}
