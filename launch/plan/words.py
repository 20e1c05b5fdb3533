"""Options that are words: masks, and numbers of tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache, partial, reduce
from operator import and_, or_
from pathlib import Path

from burst_rt.errors import InputError
from burst_rt.planning.masks import Causal, Documents, Full, Mask, SlidingWindow
from burst_rt.planning.masks.positions import BY_NUMBER

__all__ = ["MASK_HELP", "fitting_mask", "parse_mask", "parse_tokens"]

# Masks joined by & and |, and bytes of a file of documents.
_MOST_MASKS, _MOST_BYTES = 64, 16 << 20

_NUMBERED = ", ".join(f"{word}:N" for word in BY_NUMBER)
MASK_HELP = (
    "Attention mask: full, causal, window:LEFT or window:LEFT,RIGHT (keys before and after the "
    "query's own, 4096 or 4K: a model's window of 8192 is window:8191), "
    f"{_NUMBERED} (chunked is causal), documents:FILE (causal; FILE has each document's number of "
    "tokens, such as 4096 28672, which add up to --seq). a&b allows what both allow, a|b what "
    "either allows; & binds tighter."
)


@lru_cache(maxsize=64)
def parse_mask(text: str) -> Mask:
    """The mask that a text such as "window:4K", "causal&prefix:1024" or "documents:FILE" names.

    Reads the file of `documents:FILE`: numbers with spaces, commas or lines between them. Raises
    InputError that says what is not understood.
    """
    if len(re.split("[&|]", text)) > _MOST_MASKS:
        raise InputError(
            f"--mask: expected at most {_MOST_MASKS} masks joined by & and |, got more"
        )
    return reduce(or_, (reduce(and_, map(_one, part.split("&"))) for part in text.split("|")))


def fitting_mask(text: str, seq_len: int, batch: int) -> Mask:
    """`parse_mask`, for a sequence of `seq_len` tokens. Raises InputError for other documents."""
    mask = parse_mask(text)
    misfit = mask.refuses(seq_len, seq_len, batch)
    if misfit is not None:
        raise InputError(f"--mask {text}: does not fit --seq and --batch: {misfit}")
    return mask


def parse_tokens(text: str, option: str = "--seq", least: int = 1) -> int:
    """A number of tokens such as 131072, 128K or 1M, at least `least`.

    Raises InputError that names the option.
    """
    match = re.fullmatch(r"(\d{1,15})([KM]?)", text.strip().upper())
    if match is None or int(match[1]) < least:
        raise InputError(
            f"{option}: expected a number of tokens such as 131072, 128K or 1M, at least {least}, "
            f"got {text[:40]!r}"
        )
    return int(match[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[match[2]]


def _window(text: str) -> Mask:
    left, comma, right = text.partition(",")
    if "," in right or (comma and not right):
        raise InputError(f"--mask window: expected LEFT or LEFT,RIGHT, got {text!r}")
    parse = partial(parse_tokens, option="--mask window", least=0)
    return SlidingWindow(parse(left), parse(right) if right else 0)


def _documents(text: str) -> Mask:
    path = Path(text)
    try:
        if path.exists() and not path.is_file():
            raise OSError("it is no file")
        if path.stat().st_size > _MOST_BYTES:
            raise OSError(f"it has more than {_MOST_BYTES:,} bytes")
        words = re.split(r"[\s,\[\]]+", path.read_text("utf-8-sig"))
    except (OSError, ValueError) as error:
        raise InputError(f"--mask: the file of documents cannot be read: {error}") from error
    lengths = [parse_tokens(word, f"--mask: {text}", least=0) for word in words if word]
    if not lengths:
        raise InputError(f"--mask: {text}: expected the tokens of each document, got nothing")
    return Causal() & Documents(lengths)


def _of_tokens(kind: Callable[[int], Mask], name: str) -> Callable[[str], Mask]:
    return lambda text: kind(parse_tokens(text, f"--mask {name}", least=0))


_PLAIN: dict[str, Mask] = {"full": Full(), "causal": Causal()}
_MASKS: dict[str, Callable[[str], Mask]] = {
    "window": _window,
    **{word: _of_tokens(make, word) for word, make in BY_NUMBER.items()},
    "documents": _documents,
}


def _one(text: str) -> Mask:
    name, colon, argument = text.strip().partition(":")
    if name in _PLAIN and not colon:
        return _PLAIN[name]
    if name in _MASKS and argument:
        try:
            return _MASKS[name](argument)
        except InputError as error:
            if error.message.startswith("--mask"):
                raise
            raise InputError(f"--mask {name}: {error.message}") from error
    known = ", ".join([*_PLAIN, *(f"{kind}:..." for kind in _MASKS)])
    raise InputError(f"--mask: expected {known}, joined by & and |, got {json.dumps(text)}")
