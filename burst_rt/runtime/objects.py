"""Plain data between ranks: gather it, fail together, let rank 0 do something for all.

For the few small things beside a training step: a path, a loss, an error. Everything travels on the
control group, in MessagePack and never as a pickle, so a rank cannot be made to run what it
receives. Tensors of a step go through `collectives.py` or a library.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import torch

from burst_rt import errors
from burst_rt.drivers import raw_bytes
from burst_rt.errors import BurstError, ConfigError, DeviceError, InputError
from burst_rt.runtime.runtime import Runtime

__all__ = ["all_gather", "bytes_of", "first", "together"]

_T = TypeVar("_T")
# Types of plain data. A subclass is refused: it would arrive as its base class.
_SCALARS = (type(None), bool, int, float, str, bytes)
# Errors of the system that come again with every start; others (a full disk, a network's) may pass.
_MISTAKES = (
    errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EEXIST,
    errno.EROFS, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTEMPTY, errno.EINVAL,
)  # fmt: skip


def all_gather(
    runtime: Runtime, value: object, about: Mapping[str, str] | None = None
) -> list[Any]:
    """Every rank's value, in rank order; blocks and raises as `Context.all_gather` does.

    about: what the ranks compare first, in words. "call" among them replaces the call's name.
    """
    words = {"call": "all_gather", **(about or {})}
    try:
        payload = _packed(value, words["call"])
    except InputError as error:
        runtime.refuse(words["call"], error)
    return _gathered(runtime, words, payload)


def together(runtime: Runtime, fn: Callable[[], _T]) -> _T:
    """Runs `fn` on every rank. See `Context.together`."""
    with _until_all_are_here(runtime, "together"):
        try:
            result = _inside(runtime, fn)
        except Exception as error:  # noqa: BLE001  (whatever fn raises: the other ranks wait for this one)
            runtime.refuse("together", _as_typed(error, "together"))
        runtime.agree({"call": "together"})
    return result


def first(runtime: Runtime, fn: Callable[[], _T]) -> _T:
    """Runs `fn` on rank 0 alone. See `Context.first`."""
    payload = b""
    with _until_all_are_here(runtime, "first"):
        if runtime.rank == 0:
            try:
                payload = _packed(_inside(runtime, fn), "first")
            except Exception as error:  # noqa: BLE001  (as above)
                runtime.refuse("first", _as_typed(error, "first"))
        result: _T = _gathered(runtime, {"call": "first"}, payload, only=0)[0]
    return result


def _inside(runtime: Runtime, fn: Callable[[], _T]) -> _T:
    runtime.depth += 1
    try:
        return fn()
    finally:
        runtime.depth -= 1


@contextmanager
def _until_all_are_here(runtime: Runtime, call: str) -> Iterator[None]:
    """Inside, an error that reached a rank in the middle of its `fn` is brought once more.

    A rank whose `fn` fails early meets ranks that are in a call that `fn` makes. They raise the
    error there, and come to the end of `together` or `first` afterwards, whatever their `fn` makes
    of the error. So this rank waits for them there: else they would take its next call for it.
    Each round blocks at most `timeout_s`.
    """
    runtime.deepest = 0
    try:
        yield
    except BurstError as error:
        while runtime.usable and runtime.deepest > runtime.depth:
            runtime.deepest = 0
            try:
                runtime.refuse(call, error)
            except BurstError as common:
                error = common
        raise error from error.__cause__


def bytes_of(x: torch.Tensor) -> memoryview:
    """A tensor's values in row-major order, on the host. Waits for a device."""
    return raw_bytes(x.detach().cpu().contiguous())


def _gathered(
    runtime: Runtime, words: Mapping[str, str], payload: bytes, only: int | None = None
) -> list[Any]:
    """The values of every rank, or the one of rank `only`."""
    pending = runtime.collective(words, lambda: runtime.control.allgather(payload))
    said = pending.result()
    return [msgspec.msgpack.decode(raw) for raw in (said if only is None else [said[only]])]


def _packed(value: object, call: str) -> bytes:
    """The value in MessagePack. Raises InputError for anything but plain data."""
    try:
        odd = _odd_part(value)
        if odd is None:
            return msgspec.msgpack.encode(value)
        got = f"got {odd}"
    except (ValueError, OverflowError, TypeError, RecursionError) as error:
        # A number of more than 64 bits, text that is not Unicode, a list that holds itself.
        got = f"got what has no such form ({error})"
    raise InputError(
        f"{call}: expected plain data (None, bool, int of 64 bits, float, str, bytes, and "
        f"lists, tuples and dicts of these), {got}; give x.tolist() of a tensor, and str() of a "
        "path"
    )


def _odd_part(value: object) -> str | None:
    """The type of the first part that is no plain data."""
    kind = type(value)
    if kind in _SCALARS:
        return None
    if isinstance(value, dict) and kind is dict:
        keys = (f"a key of {type(key).__name__}" for key in value if type(key) not in _SCALARS)
        return next(keys, None) or _first_odd(value.values())
    if isinstance(value, (list, tuple)) and kind in (list, tuple):
        return _first_odd(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def _first_odd(parts: Iterable[object]) -> str | None:
    return next((odd for part in parts if (odd := _odd_part(part))), None)


def _as_typed(error: Exception, call: str) -> BurstError:
    """The error that every rank can raise in place of the one that fn raised."""
    if isinstance(error, BurstError):
        kinds = (kind for kind in type(error).__mro__ if kind.__name__ in errors.__all__)
        known: type[BurstError] = next(kinds)
        return error if known is type(error) else _caused(known(error.message), error)
    if isinstance(error, OSError) and error.errno in _MISTAKES:
        text = f"{error}; make the file or folder accessible, then run again."
        return _caused(ConfigError(text), error)
    if isinstance(error, OSError):
        text = f"{error}; look at the disk and at the network to it, and at the space left there"
        return _caused(DeviceError(text), error)
    return _caused(InputError(f"{call}: fn raised {type(error).__name__}: {error}"), error)


def _caused(typed: BurstError, error: Exception) -> BurstError:
    typed.__cause__ = error
    return typed
