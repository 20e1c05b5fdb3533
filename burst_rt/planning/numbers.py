"""Numbers for objects that a compiled program cannot hold: it is given the number instead, each
time it runs, as an input like any other.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["UNNUMBERED", "Numbers", "is_tracing"]

# Of an object that a compiler makes while it traces: it is no input, and has no number of its own.
UNNUMBERED = 0


def _never() -> bool:
    return False


# Whether a compiler is tracing. `attention/autograd.py` says how to ask; here there is no torch.
is_tracing: Callable[[], bool] = _never

_T = TypeVar("_T")


class Numbers(Generic[_T]):
    """Numbers for objects of one kind, from `first` on. An object is found as long as somebody
    holds it.

    first: far from the sizes of tensors, and from the numbers of other kinds: a compiler takes
    inputs that are equal when it looks for the same.
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
        """The object, if it is still there."""
        return self._objects.get(number)
