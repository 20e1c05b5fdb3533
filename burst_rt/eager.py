"""Functions at which compiled programs break, since ranks meet in them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

__all__ = ["eager"]

_P = ParamSpec("_P")
_Result = TypeVar("_Result")


def eager(fn: Callable[_P, _Result]) -> Callable[_P, _Result]:
    """As `torch.compiler.disable`, which would import the compiler at once, for a second.

    Nothing that the function calls is compiled in pieces, either.
    """
    apart: list[Any] = []  # the function that the compiler lets alone, once there is a compiler

    @wraps(fn)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _Result:
        if "torch._dynamo" not in sys.modules:
            return fn(*args, **kwargs)
        if not apart:
            apart.append(torch.compiler.disable(fn))
        result: _Result = apart[0](*args, **kwargs)
        return result

    run._torchdynamo_disable = True  # type: ignore[attr-defined]  # the mark of torch.compiler.disable
    return run
