"""Numbers of tokens beyond which a model does something else, and small ones in their place.

A window, a chunk or a temperature changes nothing in a row that is shorter than its number. Whether
a model is over ranks what it is on one process shows on both sides of each number only, and real
numbers are too large to compare at. Therefore a comparison runs twice, the second time with small
numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedConfig

__all__ = ["Length", "lengths_beyond", "shorten_lengths"]

# Pattern of the names that configurations have for numbers of tokens, and of names that only look
# like one.
_LENGTH = re.compile(
    r"window|chunk|floor|positions?_emb|_positions$|local_attention|context|max_len|seq_len|span"
)
_OTHER = re.compile(r"layer|pattern|num_|vision|audio|image|video")

# A name and its number, such as ("sliding_window", 4096).
Length: TypeAlias = tuple[str, float]


def lengths_beyond(model: torch.nn.Module, tokens: int) -> list[Length]:
    """The numbers of a model's configuration that are larger than `tokens`, sorted."""
    lengths = {
        (name, value)
        for owner in _owners(model)
        for name, value in owner.items()
        if isinstance(name, str)
        and isinstance(value, (int, float))
        and tokens < value
        and _LENGTH.search(name)
        and not _OTHER.search(name)
    }
    return sorted(lengths)


@contextmanager
def shorten_lengths(
    model: torch.nn.Module, lengths: Sequence[Length], short: int
) -> Iterator[None]:
    """Replaces each of these lengths by a small number, in a model's configuration and layers.

    Afterwards the model is as it was, buffers included: some keep frequencies chosen by a length.
    """
    owners = [*_owners(model), *(vars(module) for module in model.modules())]
    changed = [
        (owner, name, value)
        for owner in owners
        for name, value in lengths
        if owner.get(name) == value
    ]
    buffers = [
        (module._buffers, name, x, None if x is None else x.clone())
        for module in model.modules()
        for name, x in module._buffers.items()
    ]
    try:
        for owner, name, value in changed:
            owner[name] = type(value)(short)
        yield
    finally:
        for owner, name, value in changed:
            owner[name] = value
        for names, name, x, contents in buffers:
            names[name] = x
            if x is not None and contents is not None:
                x.copy_(contents)


def _owners(model: torch.nn.Module) -> list[dict[Any, Any]]:
    """The configurations of a model's modules, and the dicts in them, as dicts."""
    owners: dict[int, dict[Any, Any]] = {}
    left: list[object] = [getattr(module, "config", None) for module in model.modules()]
    while left:
        config = left.pop()
        owner = vars(config) if isinstance(config, PreTrainedConfig) else config
        if isinstance(owner, dict) and id(owner) not in owners:
            owners[id(owner)] = owner
            left.extend(x for name, x in owner.items() if not _OTHER.search(str(name)))
    return list(owners.values())
