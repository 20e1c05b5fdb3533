"""The releases of transformers that are known here, and what they call what is used of them.

`burst_rt.hf` uses more of transformers than its public interface: the names of a forward's
arguments, the steps of `generate`, the functions that masks are made of. A later release may have
other names. That is told as such, and not as a mistake of the caller.
"""

from __future__ import annotations

import inspect
from typing import Any

import transformers

from burst_rt.errors import ConfigError, InputError
from burst_rt.version import __version__

__all__ = ["KNOWN_RELEASES", "cache_name", "check_release", "unknown_release", "wrong_cache_name"]

# Versions of transformers with which the tests of `burst_rt.hf` pass.
KNOWN_RELEASES = ("5.23", "5.24")
# Names of a forward's argument for its cache: until 5.23, and since 5.24, which also takes the
# older name. (5.23 calls it cache_params in models without attention, and its `generate` then runs
# the whole text again in a second turn.)
_OLDER = "past_key_values"
_CACHE_NAMES = (_OLDER, "cache")
# Steps of `generate` that are wrapped while a model has a cache over ranks, and their arguments
# that are used.
_STEPS = {
    "prepare_inputs_for_generation": ("input_ids", "next_sequence_length"),
    "_get_stopping_criteria": (),
    "_prefill": ("input_ids", "generation_config", "model_kwargs"),
}


def unknown_release(what: str, expected: str, got: str) -> ConfigError:
    """The error for something that transformers has under another name, or not at all."""
    return ConfigError(
        f"{what}: expected {expected}, got {got} of transformers {transformers.__version__}, a "
        f"release that burst_rt {__version__} does not know: it is tested with "
        f"{' and '.join(KNOWN_RELEASES)}; install one of these (pip install "
        f"'transformers=={KNOWN_RELEASES[-1]}.*'), or a newer burst_rt"
    )


def cache_name(model: Any) -> str:
    """The argument by which a model's forward takes its cache.

    Raises InputError for none, and ConfigError where the release is not known.
    """
    parameters = inspect.signature(model.forward).parameters
    known = next((name for name in _CACHE_NAMES if name in parameters), None)
    if known is None:
        expected = f"a forward with an argument {' or '.join(_CACHE_NAMES)}"
        got = f"{type(model).__name__}.forward with {', '.join(parameters)}"
        if transformers.__version__.startswith(KNOWN_RELEASES[-1]):
            raise InputError(f"hf.Cache: expected {expected}, got {got}; generate on one process")
        raise unknown_release("hf.Cache", expected, got)
    return known


def wrong_cache_name(model: Any, name: str) -> str | None:
    """Why a forward must not get its cache by this name, in words.

    5.23 takes `cache` in silence, among keywords that it hands on, and makes a cache of its own.
    """
    taken = cache_name(model)
    if name in (taken, _OLDER):
        return None
    return (
        f"expected the cache as {taken}=, as transformers {transformers.__version__} calls it, got "
        f"{name}="
    )


def check_release(model: Any) -> None:
    """Raises ConfigError if `generate` does not consist of the known steps.

    Raises InputError for a model without a cache.
    """
    cache_name(model)
    for step, wanted in _STEPS.items():
        method = getattr(type(model), step, None)
        accepted = inspect.signature(method).parameters if method else {}
        takes_any = any(x.kind is inspect.Parameter.VAR_KEYWORD for x in accepted.values())
        if method is None or not (takes_any or accepted.keys() >= set(wanted)):
            raise unknown_release(
                "hf.Cache",
                f"a method {step} with arguments {', '.join(wanted)}",
                f"one with {', '.join(accepted)}" if method else "none",
            )
