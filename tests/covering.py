"""Samples of products of parameters: few rows, in which every two values of two parameters meet.

Most faults need one value, or two that meet. The rows of the whole product that the sample leaves
out are marked `long`: `make test-all` runs them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations, product
from typing import Any, TypeAlias

import pytest

__all__ = ["Pair", "covering", "drawn", "first_of", "pairs_of", "sample_of", "sampled"]

Pair: TypeAlias = tuple[int, int, Any, Any]  # two factors, and a value of each
_Row: TypeAlias = tuple[Any, ...]


def pairs_of(factors: Sequence[Sequence[Any]]) -> Iterator[Pair]:
    """All pairs of two factors' values; of a row, where each factor is one value."""
    for a, b in combinations(range(len(factors)), 2):
        for x, y in product(factors[a], factors[b]):
            yield a, b, x, y


def covering(
    factors: Sequence[Sequence[Any]],
    pairs: Iterable[Pair] | None = None,
    possible: Callable[[_Row], bool] = lambda row: True,
) -> Iterator[_Row]:
    """Rows that are possible, in which every pair stands (default: all pairs of two factors).

    pairs: each must stand in some possible row. Values are hashable.

    Greedy: of many drawn rows, each with a pair that is missing, the one with most missing pairs.
    """
    chance = random.Random(0)
    # A dict, for its order: the same rows every time.
    missing = dict.fromkeys(pairs_of(factors) if pairs is None else pairs)
    while missing:
        best: _Row = ()
        most: list[Pair] = []
        for a, b, x, y in chance.choices(list(missing), k=30):
            values = [chance.choice(factor) for factor in factors]
            values[a], values[b] = x, y
            new = [pair for pair in pairs_of([[value] for value in values]) if pair in missing]
            if len(new) > len(most) and possible(tuple(values)):
                best, most = tuple(values), new
        if most:
            yield best
            for pair in most:
                del missing[pair]


def sample_of(rows: Iterable[_Row]) -> set[_Row]:
    """Some of the rows, in which every pair stands that stands in any of them."""
    whole = list(rows)
    pairs = dict.fromkeys(pair for row in whole for pair in pairs_of([[value] for value in row]))
    factors = [list(dict.fromkeys(column)) for column in zip(*whole, strict=True)]
    return set(covering(factors, pairs, set(whole).__contains__))


def sampled(*always: _Row, **parameters: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test by all rows, of which those beyond a covering sample are `long`.

    always: rows that stay, where code is reached by more than two values together.
    """
    rows = list(product(*parameters.values()))
    sample = sample_of(rows)
    assert set(always) <= set(rows)
    sample.update(always)
    names = [" ".join(map(_name_of, row)) for row in rows]
    marks = [() if row in sample else pytest.mark.long for row in rows]
    each = zip(rows, names, marks, strict=True)
    return pytest.mark.parametrize(
        list(parameters), [pytest.param(*row, id=name, marks=mark) for row, name, mark in each]
    )


def first_of(values: Iterable[Any], number: int, *always: Any) -> list[Any]:
    """Parameters of a test by drawn cases, of which those beyond the first are `long`.

    always: values that stay all the same.
    """
    return [
        pytest.param(value, marks=() if place < number or value in always else pytest.mark.long)
        for place, value in enumerate(values)
    ]


def drawn(
    few: int, many: int, *strategies: Any, **named: Any
) -> Callable[[Callable[..., None]], Any]:
    """A test by cases that Hypothesis draws, the same each time: a few, and many as `long`."""

    def decorate(check: Callable[..., None]) -> Any:
        @pytest.mark.parametrize("cases", [few, pytest.param(many, marks=pytest.mark.long)])
        def test(cases: int) -> None:
            from hypothesis import given, settings  # most who import this module draw nothing

            few_or_many = settings(max_examples=cases, deadline=None, derandomize=True)
            of_drawn: Any = given(*strategies, **named)
            few_or_many(of_drawn(check))()

        test.__doc__ = check.__doc__
        return test

    return decorate


def _name_of(value: Any) -> str:
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value)
