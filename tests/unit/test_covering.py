"""Samples of products: every two values of two parameters meet, and the rest is `long`."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from covering import covering, first_of, sample_of, sampled

_FACTORS: list[list[object]] = [[1, 2, 3, 4], ["a", "b", "c"], [None, (1, 2)], [0.5, 0.25, 0.125]]


def _pairs(rows: object) -> set[tuple[object, ...]]:
    return {
        (a, b, row[a], row[b])
        for row in rows  # type: ignore[attr-defined]
        for a, b in combinations(range(len(row)), 2)
    }


def test_every_pair_is_covered_by_few_rows_the_same_each_time() -> None:
    rows = list(covering(_FACTORS))
    assert _pairs(rows) == _pairs(product(*_FACTORS))
    assert len(rows) == len(set(rows))
    assert 12 <= len(rows) <= 18  # of 72; 4 x 3 pairs of the two longest
    assert rows == list(covering(_FACTORS))


def test_a_sample_of_some_rows_has_their_pairs_and_no_other() -> None:
    some = [row for row in product(*_FACTORS) if row[0] != 1 or row[1] == "a"]
    sample = sample_of(some)
    assert sample < set(some)
    assert _pairs(sample) == _pairs(some)


def test_what_the_sample_leaves_out_is_long() -> None:
    number, letter, *_ = _FACTORS
    mark = sampled(number=number, letter=letter, half=[True, False])
    names, rows = mark.args
    assert names == ["number", "letter", "half"]
    assert [row.values for row in rows] == list(product(number, letter, [True, False]))
    assert rows[0].id == "1 a True"
    short = [row.values for row in rows if not row.marks]
    assert _pairs(short) == _pairs(row.values for row in rows)
    assert len(short) == 12
    assert {mark.name for row in rows for mark in row.marks} == {"long"}
    left_out = next(row.values for row in rows if row.marks)
    (kept,) = (
        row
        for row in sampled(left_out, number=number, letter=letter, half=[True, False]).args[1]
        if row.values == left_out
    )
    assert not kept.marks


@pytest.mark.parametrize("case", ["short", pytest.param("long", marks=pytest.mark.long)])
def test_long_cases_are_left_out_unless_asked_for(
    case: str, request: pytest.FixtureRequest
) -> None:
    asked = "long" in request.config.option.markexpr
    assert case == "short" or asked
    some_long = any(item.get_closest_marker("long") for item in request.session.items)
    assert asked or not some_long


def test_drawn_cases_beyond_the_first_are_long() -> None:
    values = first_of(range(5), 2, 3)
    assert [value.values for value in values] == [(number,) for number in range(5)]
    assert [bool(value.marks) for value in values] == [False, False, True, False, True]
