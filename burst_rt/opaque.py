"""Dataclasses that wrappers of a module's forward (FSDP2) hand on as they are."""

from __future__ import annotations

from typing import TypeVar

__all__ = ["opaque"]

_Class = TypeVar("_Class", bound=type)


def opaque(cls: _Class) -> _Class:
    """Hides that a class is a dataclass, for classes whose objects are arguments of a module's
    forward.

    FSDP2's mixed precision walks through these arguments, and rebuilds each dataclass from its
    fields (torch 2.13, `torch.distributed.utils._apply_to_tensors`).
    """
    del cls.__dataclass_fields__  # type: ignore[attr-defined]
    return cls
