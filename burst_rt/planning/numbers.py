"""Numbers for objects that a compiled program cannot hold.

A compiled program is given the number instead of the object, each time it runs, as an input like
any other.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["UNNUMBERED", "Numbers", "is_tracing"]

# The number of an object that a compiler makes while it traces: the object is not an input, so it
# needs no number of its own.
UNNUMBERED = 0


def _never() -> bool:
    return False


# Says whether a compiler is tracing. `attention/autograd.py` sets it, because there is no torch
# here.
is_tracing: Callable[[], bool] = _never

_T = TypeVar("_T")


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
