"""Sequences that share their beginnings as one row, in which what they share is once.

A question with several answers is a tree: the question's tokens are computed once, and each answer
sees them and itself. Attention's part is the mask `PrefixTree`; here is the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, NoReturn

import numpy as np
import torch

from burst_rt.arguments import check_kinds, holds_values
from burst_rt.batches import IGNORED_LABEL
from burst_rt.errors import InputError
from burst_rt.planning.masks import Positions, PrefixTree
from burst_rt.planning.masks.positions import integer, integers

__all__ = ["TreeRow", "tree_row"]

_NAME = "tree_row"


@dataclass(frozen=True, kw_only=True, eq=False)
class TreeRow:
    """Sequences in one row. Tensors are `[1, tokens]`, on the CPU.

    input_ids: each token of each path once. position_ids: positions along the paths. shift_labels:
    the label of each token's successor on its path, -100 where there is none. loss_weights:
    float32, of each label: the sum of the weights of the sequences that have it.
    tree: the mask, without Causal().
    places: for each sequence, where its tokens are in the row: int64 `[tokens of the sequence]`.
    """

    input_ids: torch.Tensor = field(repr=False)
    position_ids: torch.Tensor = field(repr=False)
    shift_labels: torch.Tensor = field(repr=False)
    loss_weights: torch.Tensor = field(repr=False)
    tree: PrefixTree
    places: tuple[torch.Tensor, ...] = field(repr=False)

    def batch(self) -> dict[str, Any]:
        """The row as a batch, for `shard_batch` and `burst_rt.hf.shard`."""
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "shift_labels": self.shift_labels,
            "loss_weights": self.loss_weights,
            "prefix_tree": self.tree,
        }

    @check_kinds
    def spread(self, values: Sequence[torch.Tensor | Sequence[float]]) -> torch.Tensor:
        """Numbers of the sequences' tokens, such as advantages, as a row: float32 `[1, tokens]`.

        values: for each sequence one number for each of its tokens. Raises InputError where
        sequences share a token and differ in its number.
        """
        row = torch.full(self.input_ids.shape, torch.nan, device="cpu")
        if len(values) != len(self.places):
            _wrong("spread: values", f"those of {len(self.places)} sequences", f"{len(values)}")
        for number, (at, each) in enumerate(zip(self.places, values, strict=True)):
            numbers = _as_row(each)
            if numbers is None:
                got = type(each).__name__
                _wrong(f"spread: values of sequence {number}", f"{len(at)} real numbers", got)
            if numbers.shape != at.shape:
                _wrong(
                    f"spread: values of sequence {number}", f"{len(at)}", f"{tuple(numbers.shape)}"
                )
            there = row[0, at]
            if not bool((there.isnan() | (there == numbers)).all()):
                _wrong(
                    f"spread: values of sequence {number}",
                    "those of sequences before it, for the tokens that they share",
                    "others; share fewer tokens by tree_row(..., shared=...)",
                )
            row[0, at] = numbers
        return row


@check_kinds
def tree_row(
    sequences: Sequence[Any],
    labels: Sequence[Any] | None = None,
    *,
    weights: Sequence[float] | None = None,
    shared: Sequence[int] | None = None,
) -> TreeRow:
    """Sequences as one row, in which each shared beginning occurs once.

    sequences: token numbers of each, as tensors or lists. Those that share nothing are trees of
        their own in the row, as packed documents are.
    labels: for each sequence its own tokens, with -100 where a token has no loss; not shifted.
        None: the tokens themselves.
    weights: of each sequence's labels; None: 1. The weighted mean of the row's losses is that of
        all sequences' losses, one by one.
    shared: how many of its first tokens each sequence may share, such as the question's alone,
        where answers have losses of their own. None: all.

    The last shared token is in the row once for each branch, so each token has one successor and
    one label. Local. Raises InputError.

    Worked example: 1 2 3 4 and 1 2 3 5 become 1 2 | 3 4 | 3 5.
    """
    expected = "expected a vector of integers"
    tokens = [
        integers(f"{_NAME}: sequences[{i}]: {expected}", given) for i, given in enumerate(sequences)
    ]
    count = len(tokens)
    if not count:
        _wrong("sequences", "at least one", "none")
    for name, given in (("labels", labels), ("weights", weights), ("shared", shared)):
        if given is not None and len(given) != count:
            _wrong(name, f"one for each of {count} sequences", f"{len(given)}")
    for i, weight in enumerate(() if weights is None else weights):
        if not _is_finite(weight):
            _wrong(f"weights[{i}]", "a finite number", f"{weight!r}")
    for i, number in enumerate(() if shared is None else shared):
        if integer(number, 0) is None:
            _wrong(f"shared[{i}]", "a number of tokens, at least 0", f"{number!r}")
    targets = tokens if labels is None else list(map(_labels, range(count), tokens, labels))
    most = list(map(len, tokens)) if shared is None else list(map(int, shared))
    row = _Row(tokens, most)
    size = len(row.input_ids)
    position_ids, shift_labels = np.zeros(size, np.int64), np.full(size, IGNORED_LABEL)
    loss_weights = np.zeros(size, np.float32)
    for i, at in enumerate(row.places):
        position_ids[at] = np.arange(len(at))
        labelled = targets[i][1:] != IGNORED_LABEL
        shift_labels[at[:-1][labelled]] = targets[i][1:][labelled]
        loss_weights[at[:-1][labelled]] += 1.0 if weights is None else weights[i]
    ids, positions, shifted, weighed = (
        torch.from_numpy(x)[None] for x in (row.input_ids, position_ids, shift_labels, loss_weights)
    )
    return TreeRow(
        input_ids=ids,
        position_ids=positions,
        shift_labels=shifted,
        loss_weights=weighed,
        tree=row.tree(),
        places=tuple(map(torch.from_numpy, row.places)),
    )


class _Row:
    """The sequences laid out: each brings the tokens that no sequence before it has brought."""

    def __init__(self, tokens: list[Positions], most: list[int]) -> None:
        self.places: list[Positions] = [np.zeros(0, np.int64)] * len(tokens)
        # Where each run of new tokens begins, and what it goes on from.
        self._begins: list[int] = []
        self._above: list[int] = []
        runs, size, before = [], 0, -1
        # Neighbours in this order share the most.
        for i in sorted(range(len(tokens)), key=lambda i: _key(tokens[i], most[i])):
            common = 0
            if before >= 0:
                common = _common(tokens[before], tokens[i], min(most[before], most[i]))
            new = tokens[i][common:]
            at = np.arange(size, size + len(new))
            self.places[i] = np.concatenate([self.places[before][:common], at])
            above = int(self.places[i][common - 1]) if common else -1
            if len(new):
                runs.append(new)
            if len(new) and (above < 0 or above != size - 1):  # else the last run goes on
                self._begins.append(size)
                self._above.append(above)
            size, before = size + len(new), i
        self.input_ids: Positions = np.concatenate(runs)

    def tree(self) -> PrefixTree:
        """The mask. A node ends where a run begins, and after a token that a run goes on from."""
        above = dict(zip(self._begins, self._above, strict=True))
        cuts = sorted({*self._begins, *(at + 1 for at in self._above if at >= 0)} - {self._size})
        starts = np.array(cuts)
        # The token before a node on its path.
        last = np.array([above.get(start, start - 1) for start in cuts])
        parents = np.where(last < 0, -1, np.searchsorted(starts, last, side="right") - 1)
        return PrefixTree(np.diff(starts, append=self._size), parents)

    @property
    def _size(self) -> int:
        return len(self.input_ids)


def _key(tokens: Positions, most: int) -> tuple[list[int], list[int]]:
    return tokens[:most].tolist(), tokens[most:].tolist()


def _common(first: Positions, second: Positions, most: int) -> int:
    """How many tokens two sequences share: equal ones with equal successors."""
    size = min(len(first), len(second))
    differ = np.flatnonzero(first[:size] != second[:size])
    equal = int(differ[0]) if len(differ) else size
    # Where one of them ends, its last token has no successor, and any will do.
    return min(most, equal if equal == size else max(0, equal - 1))


def _as_row(values: Any) -> torch.Tensor | None:
    """The numbers as float32; None where they are no real numbers."""
    if isinstance(values, torch.Tensor) and (not holds_values(values) or values.is_complex()):
        return None
    try:
        return torch.as_tensor(values, dtype=torch.float32, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        return None


def _is_finite(weight: Any) -> bool:
    try:
        return isfinite(weight)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return False


def _labels(number: int, tokens: Positions, value: Any) -> Positions:
    labels = integers(f"{_NAME}: labels[{number}]: expected a vector of integers", value)
    if labels.shape != tokens.shape or not ((labels == tokens) | (labels == IGNORED_LABEL)).all():
        expected = f"the {len(tokens)} tokens of the sequence, or {IGNORED_LABEL}"
        _wrong(f"labels[{number}]", expected, f"{len(labels)} others")
    return labels


def _wrong(what: str, expected: str, got: str) -> NoReturn:
    raise InputError(f"{_NAME}: {what}: expected {expected}; got {got}")
