"""Dicts of bounded size, for what is made once and used again."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, TypeVar

__all__ = ["KeptEntries", "Recent"]

_K = TypeVar("_K")
_V = TypeVar("_V")


class Recent(dict[_K, _V]):
    """A dict that keeps the `capacity` entries that were `put` last. Two threads may use it."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self._lock = threading.Lock()

    def put(self, key: _K, value: _V) -> None:
        """Stores an entry, or makes one that is there the latest; the oldest ones go."""
        with self._lock:
            self.pop(key, None)
            self[key] = value
            while len(self) > self.capacity:
                del self[next(iter(self))]


# Any: the entries of a type are found by that type alone.
class KeptEntries(dict[type, Recent[object, Any]]):
    """Entries of several types: for each type a `Recent` of `capacity`, made on first use.

    The owner of a `KeptEntries` need not know the types. Two threads may use it.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity

    if TYPE_CHECKING:

        def __getitem__(self, kind: type[_V], /) -> Recent[object, _V]: ...

    def __missing__(self, kind: type[_V], /) -> Recent[object, _V]:
        return self.setdefault(kind, Recent(self.capacity))
