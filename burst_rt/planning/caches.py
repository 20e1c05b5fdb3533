"""Results that are kept for the problems and masks that come again, few where masks are large."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, Generic, ParamSpec, TypeVar

__all__ = ["KeptResults", "kept_results"]

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Size from which on a mask's tables are large, and how many results are kept for such masks: those
# of a step's forward and backward, and of the step before.
_LARGE_BYTES, _FEW = 1 << 20, 4


class KeptResults(Generic[_P, _R]):
    """A function whose latest results are kept; see `kept_results`."""

    def __init__(
        self, function: Callable[_P, _R], capacity: int, mask_of: Callable[..., Any]
    ) -> None:
        self._mask_of = mask_of
        self._many, self._few = (lru_cache(size)(function) for size in (capacity, _FEW))
        wraps(function)(self)

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        large = self._mask_of(*args, **kwargs).table_bytes > _LARGE_BYTES
        return (self._few if large else self._many)(*args, **kwargs)  # type: ignore[arg-type]

    def forget(self) -> None:
        """Lets go of all results."""
        self._many.cache_clear()
        self._few.cache_clear()


def kept_results(
    capacity: int, mask_of: Callable[..., Any]
) -> Callable[[Callable[_P, _R]], KeptResults[_P, _R]]:
    """Keeps the latest `capacity` results of a function, by its arguments, as `lru_cache` does; and
    four where a mask is large, since the arguments hold it.

    mask_of: the mask among the function's arguments.
    """

    def keep(function: Callable[_P, _R]) -> KeptResults[_P, _R]:
        return KeptResults(function, capacity, mask_of)

    return keep
