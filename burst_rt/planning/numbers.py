"""Numbers by which compiled programs know masks and layouts, objects that they cannot hold.

A compiled program is given the number instead of the object, each time it runs, as an input like
any other.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["UNNUMBERED", "Numbers", "is_tracing", "set_tracing_check"]

# The number of an object that a compiler makes while it traces: the object is not an input, so it
# needs no number of its own.
UNNUMBERED = 0

_T = TypeVar("_T")


def _never() -> bool:
    return False


_check: Callable[[], bool] = _never


def set_tracing_check(check: Callable[[], bool]) -> None:
    """Sets what says whether a compiler is tracing; planning has no torch that it could ask."""
    global _check
    _check = check


def is_tracing() -> bool:
    """Whether a compiler is tracing. False while no check is set."""
    return _check()


class Numbers(Generic[_T]):
    """Numbers for objects of one kind, from `first` on.

    An object can be found as long as somebody holds it. `first` is far from the sizes of tensors
    and from the numbers of other kinds, because a compiler takes two inputs for the same input if
    they are equal when it looks.
    """

    def __init__(self, first: int) -> None:
        self._next = itertools.count(first)
        self._objects: weakref.WeakValueDictionary[int, _T] = weakref.WeakValueDictionary()

    def give(self, thing: _T) -> int:
        """A number that no other object has had."""
        number = next(self._next)
        self._objects[number] = thing
        return number

    def find(self, number: int) -> _T | None:
        """The object with a number, or None if the object is gone."""
        return self._objects.get(number)
