"""Calls under masks, as factors that tests combine.

`unit/test_masked_attention.py` takes all pairs of them, and `all_masks.py` the product (all pairs,
where Triton's interpreter is the machine).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations, product
from typing import Any, NamedTuple, TypeAlias

import torch
from mask_truths import FUNCTIONS, MASKS, Sizes, truth_of
from spec import Attention, errors_of, reference
from tolerances import ERROR
from worlds import Case, attend_over_threads

from burst_rt.kernels import sum_dtype

__all__ = ["FACTORS", "Row", "all_pairs", "assert_right", "assert_row", "can_meet"]

_BATCH = 2
_MADE = {name: entry.mask for name, entry in (MASKS | FUNCTIONS).items()}


class Row(NamedTuple):
    """One case of the covering array."""

    mask: str
    strategy: str
    kinds: tuple[str, str]
    world_size: int
    lengths: tuple[int, int]
    dtype: torch.dtype
    kernel: str

    @property
    def possible(self) -> bool:
        """Whether there is such a mask for these lengths, and such a layout for the mask."""
        q_len, kv_len = self.lengths
        balanced = q_len == kv_len and self.mask in MASKS  # functions have no spans to balance
        return (balanced or "balanced" not in self.kinds) and _possible(self.mask, self.lengths)

    @property
    def telling(self) -> bool:
        """Whether there is such a call, and it is not the same as one by another strategy: a hybrid
        of several groups, two levels of several nodes, and anything but "auto" on several ranks.
        """
        grouped = self.strategy.endswith(":")
        alone = self.world_size != 4 if grouped else self.world_size == 1
        return self.possible and (self.strategy == "auto" or not alone)

    @property
    def sizes(self) -> Sizes:
        return Sizes(*self.lengths, _BATCH)

    def case(self) -> Case:
        world = self.world_size
        named = self.strategy.endswith(":")
        # Nodes of two ranks where that is possible, else one node.
        strategy = f"{self.strategy}{2 if world == 4 else world}" if named else self.strategy
        spread = self.strategy in ("all-to-all", "hybrid:")
        kv_heads = world if spread else 2
        return Case(
            *self.lengths,
            heads=2 * kv_heads,
            kv_heads=kv_heads,
            batch=_BATCH,
            dtype=self.dtype,
            mask=_MADE[self.mask](self.sizes),
            kind=self.kinds[0],
            kv_kind=self.kinds[1],
            strategy=strategy,
        )


FACTORS: tuple[list[Any], ...] = (
    list(_MADE),
    [
        "auto",
        "burst",
        "burst-untiled",
        "ring-kv",
        "ring-q",
        "bidirectional",
        "direct",
        "all-to-all",
        "two-level:",
        "hybrid:",
        "ring-naive",
    ],
    [
        ("zigzag", "zigzag"),
        ("contiguous", "contiguous"),
        ("striped", "zigzag"),
        ("balanced", "balanced"),
    ],
    [1, 2, 3, 4, 5],
    [(63, 63), (24, 61), (61, 24), (3, 3), (1, 40)],
    [torch.float32, torch.bfloat16, torch.float64],
    ["cpu", "naive"],
)


@cache
def _possible(mask: str, lengths: tuple[int, int]) -> bool:
    return truth_of(mask, Sizes(*lengths, 1)) is not None


_Pair: TypeAlias = tuple[int, int, Any, Any]  # two factors, and a value of each
_ANY = Row("full", "auto", ("zigzag", "zigzag"), 4, (1, 1), torch.float32, "cpu")


def can_meet(pair: _Pair) -> bool:
    """Whether there is a telling row with this pair."""
    values: list[Any] = list(_ANY)
    a, b, values[a], values[b] = pair
    return Row(*values).telling


def all_pairs(factors: Sequence[Sequence[Any]], *, kernel: bool = False) -> Iterator[Row]:
    """Rows in which every pair of two factors' values stands that is possible.

    kernel: only the pairs of the last factor, the kernel, with the others.

    Greedy: of many drawn rows, each with a pair that is missing, the one with most missing pairs.
    """
    chance, numbers = random.Random(0), range(len(factors))
    pairs = (
        (a, b, x, y)
        for a, b in combinations(numbers, 2)
        for x, y in product(factors[a], factors[b])
        if b == len(factors) - 1 or not kernel
    )
    # A dict, for its order: the same rows every time.
    missing: dict[_Pair, None] = dict.fromkeys(filter(can_meet, pairs))
    while missing:
        best: Row | None = None
        most: list[_Pair] = []
        for a, b, x, y in chance.choices(list(missing), k=30):
            values = [chance.choice(factor) for factor in factors]
            values[a], values[b] = x, y
            row = Row(*values)
            new = [pair for pair in _pairs_of(row) if pair in missing]
            if len(new) > len(most) and row.telling:
                best, most = row, new
        if best is not None:
            yield best
            for pair in most:
                del missing[pair]


def _pairs_of(row: Row) -> Iterator[_Pair]:
    return ((a, b, row[a], row[b]) for a, b in combinations(range(len(row)), 2))


def assert_right(result: Attention, truth: Attention, dtype: torch.dtype) -> None:
    for name, error in errors_of(result, truth).items():
        assert error < ERROR[sum_dtype(dtype) if name == "lse" else dtype], (name, error)


def assert_row(row: Row) -> None:
    """Forward and backward of one call are right."""
    case = row.case()
    truth = reference(*case.inputs(), mask=truth_of(row.mask, row.sizes, case.heads))
    assert_right(attend_over_threads(row.world_size, case, kernel=row.kernel), truth, row.dtype)
