"""Mask functions that are not of transformers' own making, as masks over ranks.

A model may give `create_causal_mask` an `or_mask_function` or an `and_mask_function`. Such a
function is asked about places in the whole sequence, if all ranks have the same one. Its code says
whether they do: with the numbers it encloses, and the functions it calls.
"""

from __future__ import annotations

import hashlib
import types
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch

from burst_rt.errors import InputError
from burst_rt.planning.masks import Mask

__all__ = ["mask_of_function"]

# Packages in which a function's name says everything.
_LIBRARIES = ("builtins", "functools", "math", "operator", "torch")
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType)
_VALUES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, types.EllipsisType)


class _Unsaid(Exception):
    """Something that a function encloses does not say what it is; the message names it."""


def mask_of_function(function: Any, places: np.ndarray[Any, np.dtype[np.int64]] | None) -> Mask:
    """The cells that a mask function shows, computed cell by cell: slow, and exact.

    places: by which number the function knows each token of the whole batch, `[1 or batch,
    tokens]`; None: its index. Ranks compare the function's code in the call.

    Raises InputError where its code leaves open what it computes: it encloses a tensor, say, whose
    numbers are one rank's tokens.
    """
    named = f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"
    try:
        digest = hashlib.sha256("\n".join(_words(function, set())).encode()).hexdigest()[:32]
    except (_Unsaid, ValueError) as error:  # or a cell that is still empty
        raise InputError(
            "attn_implementation='burst_rt': expected causal, windowed, chunked or full masks of "
            f"transformers, or functions of places alone, got a mask function {named} with "
            f"{error}, which may count in one rank's tokens; enclose numbers alone, or call "
            "burst_attention in your attention layer, with a mask of your own"
        ) from None
    key = f"{named}, digest {digest}"
    if places is None:
        return _by_index(_Same(function, key))
    return Mask.from_function(partial(_ask, function, torch.from_numpy(places)), key=key)


class _Same:
    """Functions of one code are the same one, in every step."""

    def __init__(self, function: Any, key: str) -> None:
        self.function, self.key = function, key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.key == self.key

    def __hash__(self) -> int:
        return hash(self.key)


# A mask is planned for once, and masks are the same if their function is the same object.
@lru_cache(maxsize=16)
def _by_index(same: _Same) -> Mask:
    return Mask.from_function(partial(_ask, same.function, None), key=same.key)


def _ask(
    function: Callable[..., Any],
    places: torch.Tensor | None,
    batch: Any,
    head: Any,
    q: Any,
    kv: Any,
) -> torch.Tensor:
    if places is not None:
        numbers = places.to(q.device)
        row = batch if len(numbers) > 1 else torch.zeros_like(batch)
        q, kv = numbers[row, q], numbers[row, kv]
    # transformers makes a mask for one head, which all heads share.
    said = torch.as_tensor(function(batch, torch.zeros_like(head), q, kv))
    return said.to(q.device, torch.bool)


def _words(x: Any, known: set[int]) -> Iterator[str]:
    """All that decides what a function computes. known: the functions that were told before."""
    if isinstance(x, _VALUES):
        yield repr(x)
    elif isinstance(x, (tuple, list)):
        yield f"{type(x).__name__} of {len(x)}"
        for each in x:
            yield from _words(each, known)
    elif isinstance(x, types.CodeType):
        yield f"{x.co_argcount} {x.co_kwonlyargcount} {x.co_flags} {x.co_names} {x.co_code.hex()}"
        yield from _words(x.co_consts, known)
    elif isinstance(x, partial):
        yield from _words((x.func, x.args, tuple(sorted(x.keywords.items()))), known)
    elif isinstance(x, types.ModuleType) and _is_library(x.__name__):
        yield x.__name__
    elif isinstance(x, _NAMED) and _is_library(x.__module__) and "<" not in x.__qualname__:
        yield f"{x.__module__}.{x.__qualname__}"
    elif isinstance(x, types.FunctionType):
        yield from _words_of_function(x, known)
    else:
        raise _Unsaid(f"a {type(x).__module__}.{type(x).__qualname__}")


def _words_of_function(x: types.FunctionType, known: set[int]) -> Iterator[str]:
    """`_words` of its code, of what it encloses, and of the globals that it names."""
    if id(x) in known:
        return
    known.add(id(x))
    yield from _words(x.__code__, known)
    yield from _words(x.__defaults__, known)
    yield from _words(tuple(sorted((x.__kwdefaults__ or {}).items())), known)
    yield from _words(tuple(cell.cell_contents for cell in x.__closure__ or ()), known)
    for name in sorted(_names(x.__code__)):
        if name in x.__globals__:
            yield name
            yield from _words(x.__globals__[name], known)


def _is_library(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in _LIBRARIES


def _names(code: types.CodeType) -> set[str]:
    """The names of globals and attributes that code uses, and those of the functions in it."""
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))
