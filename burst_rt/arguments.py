"""Arguments of public functions are of the kinds that their annotations say, or are refused.

What an argument's value must be, its function checks by itself. `check_kinds` is for local
functions; `burst_rt.runtime.refusing` has the decorator that tells the other ranks.
"""

from __future__ import annotations

import inspect
import numbers
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, wraps
from types import NoneType, UnionType
from typing import (
    Any,
    Literal,
    NamedTuple,
    ParamSpec,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

import torch

from burst_rt.errors import InputError

__all__ = ["check_kinds", "describe_value", "holds_values", "is_real", "wrong_kind"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def check_kinds(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function, which raises InputError for an argument of another kind. Never blocks."""

    @wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        # The compiler would trace the check.
        error = None if torch.compiler.is_compiling() else wrong_kind(function, args, kwargs)
        if error is not None:
            raise error
        return function(*args, **kwargs)

    return run


def wrong_kind(
    function: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object]
) -> InputError | None:
    """Why an argument is not of the kind that the function's annotation says, or None.

    Arguments that are missing, or too many, are left to Python. Annotations that name what is
    imported for types only are not looked at.
    """
    known, in_order = _kinds_of(function)
    for name, value in (*zip(in_order, args, strict=False), *kwargs.items()):
        kind = known.get(name)
        if kind is not None and not kind.fits(value):
            where = function.__qualname__.removesuffix(".__init__")
            return InputError(
                f"{where}: {name}: expected {kind.words}; got {_shown(value)}; "
                f"help({where}) says what it takes"
            )
    return None


def holds_values(x: torch.Tensor) -> bool:
    """Whether all numbers are here, as numbers: the tensor is dense, and has memory."""
    return x.layout == torch.strided and not (x.is_meta or x.is_nested or x.is_quantized)


def describe_value(x: object) -> str:
    """What was given in place of what is wanted, for the words of an error."""
    if not isinstance(x, torch.Tensor):
        return type(x).__name__
    if x.is_nested:  # it has no shape
        return f"a nested tensor of {x.dtype}"
    layout = "" if x.layout == torch.strided else f", {x.layout}"
    grad = ", which requires grad" if x.requires_grad else ""
    return f"{x.dtype} {tuple(x.shape)} on {x.device}{layout}{grad}"


def _shown(value: object) -> str:
    if not isinstance(value, (str, int, float, NoneType)):
        return describe_value(value)
    words = repr(value)
    return words if len(words) < 60 else f"{words[:57]}..."


_Test: TypeAlias = Callable[[object], bool]


class _Kind(NamedTuple):
    fits: _Test
    words: str  # the annotation


@lru_cache
def _kinds_of(function: Callable[..., Any]) -> tuple[dict[str, _Kind], tuple[str, ...]]:
    """What parameters are annotated with, and the names of those that may come by their place."""
    kinds, in_order = {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        annotation = parameter.annotation
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.kind is not parameter.KEYWORD_ONLY:
            in_order.append(name)
        if annotation is parameter.empty:  # self
            continue
        try:
            kind = eval(annotation, function.__globals__)
        except (NameError, TypeError):  # imported, or spelled, for type checkers only
            continue
        kinds[name] = _Kind(_test_of(kind), annotation)
    return kinds, tuple(in_order)


def _test_of(kind: Any) -> _Test:
    """The test of values for what an annotation means."""
    origin, inside = get_origin(kind), get_args(kind)
    if kind in _TESTS:
        return _TESTS[kind]
    if origin in (Union, UnionType):
        tests = [_test_of(each) for each in inside]
        return lambda value: any(test(value) for test in tests)
    if origin is Literal:
        return lambda value: isinstance(value, str) and value in inside
    if origin is Callable:
        takes, *_ = inside
        return lambda value: callable(value) and (takes is ... or _takes(value, len(takes)))
    if origin is tuple:
        return lambda value: isinstance(value, tuple) and len(value) == len(inside)
    if origin is Sequence:
        return _is_sequence
    kind = origin or kind
    return (lambda value: isinstance(value, kind)) if isinstance(kind, type) else lambda _: True


def _is_integer(value: object) -> bool:
    try:
        operator.index(value)  # type: ignore[arg-type]  # that is the question
    except (TypeError, RuntimeError):
        return False
    return not isinstance(value, bool)


def is_real(value: object) -> bool:
    """Whether it is a number that a float can be. A scalar tensor is none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def _is_sequence(value: object) -> bool:
    if isinstance(value, (str, bytes, Mapping)):
        return False
    if isinstance(value, torch.Tensor):
        return holds_values(value) and value.ndim > 0
    return hasattr(value, "__len__") and hasattr(value, "__getitem__") and _has_length(value)


def _has_length(value: Any) -> bool:
    try:
        len(value)
    except TypeError:  # a class, or an array without dimensions
        return False
    return True


def _takes(function: Callable[..., object], count: int) -> bool:
    """Whether a function can be called with so many arguments, as far as it says."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # a builtin that does not say what it takes
        return True
    return True


_TESTS: dict[Any, _Test] = {
    None: lambda value: value is None,
    NoneType: lambda value: value is None,
    object: lambda value: True,
    int: _is_integer,
    float: is_real,
    torch.Tensor: lambda x: isinstance(x, torch.Tensor) and not (x.is_nested or x.is_quantized),
}
