"""Dicts of bounded size, for what is made once and used again."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any, TypeVar

__all__ = ["MOST_TABLE_BYTES", "KeptEntries", "Recent"]

# Maximum size of the tables of masks that the plans of one context hold, and as much for its calls.
MOST_TABLE_BYTES = 256 << 20

_K = TypeVar("_K")
_V = TypeVar("_V")


class Recent(dict[_K, _V]):
    """A dict that keeps the `capacity` entries that were `put` last. Two threads may use it.

    most_bytes: what values hold together, as they say in `table_bytes`; but the latest one is kept.
    """

    def __init__(self, capacity: int, most_bytes: float = math.inf) -> None:
        super().__init__()
        self.capacity = capacity
        self._most_bytes = most_bytes
        self._lock = threading.Lock()

    def put(self, key: _K, value: _V) -> None:
        """Stores an entry, or makes one that is there the latest; the oldest ones go."""
        with self._lock:
            self.pop(key, None)
            self[key] = value
            while len(self) > self.capacity:
                del self[next(iter(self))]
            if getattr(value, "table_bytes", 0):
                self._limit_tables()

    def _limit_tables(self) -> None:
        # They are measured now: a mask makes a part of its tables on first use.
        sizes = {key: getattr(value, "table_bytes", 0) for key, value in self.items()}
        holders = [key for key, size in sizes.items() if size]
        for key in holders[:-1]:
            if sum(sizes.values()) <= self._most_bytes:
                return
            del self[key], sizes[key]


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
        return self.setdefault(kind, Recent(self.capacity, MOST_TABLE_BYTES))
