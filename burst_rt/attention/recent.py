"""A dict of bounded size, for what is made once and used again."""

from __future__ import annotations

import threading
from typing import TypeVar

__all__ = ["Recent"]

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
