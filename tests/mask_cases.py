"""Calls under masks, as factors that tests combine.

`unit/test_masked_attention.py` takes a sample of them, and all pairs by `make test-all`;
`all_masks.py` takes the product (all pairs, where Triton's interpreter is the machine).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from covering import Pair, covering, pairs_of
from mask_truths import FUNCTIONS, MASKS, Sizes, truth_of
from spec import Attention, errors_of, reference
from tolerances import ERROR
from worlds import Case, attend_over_threads

from burst_rt.kernels import sum_dtype

__all__ = [
    "FACTORS",
    "Row",
    "all_pairs",
    "assert_right",
    "assert_row",
    "can_meet",
    "family_pairs",
]

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
        spread = self.strategy in ("all-to-all", "hybrid:", "sliced")
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
        "sliced",
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

# Strategies that come to a mask by the same code: plain rings, other routes, exchanges of heads.
_FAMILIES = (
    ("auto", "burst", "ring-kv", "ring-q"),
    ("bidirectional", "direct", "two-level:"),
    ("all-to-all", "hybrid:", "sliced"),
    ("ring-naive",),
    ("burst-untiled",),
)


@cache
def _possible(mask: str, lengths: tuple[int, int]) -> bool:
    return truth_of(mask, Sizes(*lengths, 1)) is not None


_ANY = Row("full", "auto", ("zigzag", "zigzag"), 4, (1, 1), torch.float32, "cpu")


def can_meet(pair: Pair) -> bool:
    """Whether there is a telling row with this pair."""
    values: list[Any] = list(_ANY)
    a, b, values[a], values[b] = pair
    return Row(*values).telling


def all_pairs(factors: Sequence[Sequence[Any]], *, kernel: bool = False) -> Iterator[Row]:
    """Rows in which every pair of two factors' values stands that is possible.

    kernel: only the pairs of the last factor, the kernel, with the others.
    """
    last = len(factors) - 1
    pairs = (pair for pair in pairs_of(factors) if pair[1] == last or not kernel)
    for row in covering(factors, filter(can_meet, pairs), lambda row: Row(*row).telling):
        yield Row(*row)


def family_pairs() -> Iterator[Row]:
    """Fewer rows: all pairs, but that a mask meets each family of strategies, not each strategy."""
    masks, _, *others = FACTORS

    def members(row: tuple[Any, ...]) -> list[Row]:
        rows = (Row(row[0], strategy, *row[2:]) for strategy in row[1])
        return [each for each in rows if each.telling]

    def can(pair: Pair) -> bool:
        a, b, x, y = pair
        if a == 1:
            return any(can_meet((a, b, name, y)) for name in x)
        return any(can_meet((a, b, x, name)) for name in y) if b == 1 else can_meet(pair)

    factors = [masks, _FAMILIES, *others]
    missing = dict.fromkeys(
        pair for pair in pairs_of(FACTORS) if pair[:2] != (0, 1) and can_meet(pair)
    )
    by_family = covering(factors, filter(can, pairs_of(factors)), lambda row: bool(members(row)))
    for number, row in enumerate(by_family):
        some = members(row)
        yield (taken := some[number % len(some)])
        for pair in pairs_of([[value] for value in taken]):
            missing.pop(pair, None)
    for row in covering(FACTORS, missing, lambda row: Row(*row).telling):
        yield Row(*row)


def assert_right(result: Attention, truth: Attention, dtype: torch.dtype) -> None:
    for name, error in errors_of(result, truth).items():
        assert error < ERROR[sum_dtype(dtype) if name == "lse" else dtype], (name, error)


def assert_row(row: Row) -> None:
    """Forward and backward of one call are right."""
    case = row.case()
    truth = reference(*case.inputs(), mask=truth_of(row.mask, row.sizes, case.heads))
    assert_right(attend_over_threads(row.world_size, case, kernel=row.kernel), truth, row.dtype)
