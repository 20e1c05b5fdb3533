"""Ranks that fail together: an action that may fail on some of them, and bytes that only rank 0 can
read.

For: the seams of the job (files, options), where one rank's failure must become every rank's
failure instead of a hang.
Not for: the hot path. Everything here rests on `Context.all_reduce`, so every rank must make the
same calls in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor

from burst_rt.context import Context
from burst_rt.errors import BurstError, ConfigError, InputError

__all__ = ["on_first", "same_everywhere", "share_bytes", "share_tensors", "together"]

T = TypeVar("T")

# What an action may fail with; index + 1 travels. Anything else is a defect and ends the job as
# such.
_CLASSES: tuple[type[BurstError], ...] = (ConfigError, InputError)


def together(context: Context, action: Callable[[], T]) -> T:
    """Run `action` on this rank and return its result, or raise on every rank if it failed on any.

    A BurstError of the caller's (ConfigError, InputError) keeps its class, an OSError becomes a
    ConfigError; the message is that of the lowest failing rank. Blocks until every rank arrives, at
    most the context's `timeout_s`.
    """
    result: T | None = None
    error: BurstError | None = None
    try:
        result = action()
    except _CLASSES as raised:
        error = raised
    except OSError as raised:
        error = ConfigError(f"{raised}; make the file or folder accessible, then run again.")
    codes = torch.zeros(context.world_size, dtype=torch.int64, device=context.device)
    if error is not None:
        codes[context.rank] = 1 + next(
            index for index, cls in enumerate(_CLASSES) if isinstance(error, cls)
        )
    context.all_reduce(codes)
    if not codes.any():
        # Only an action that returned leaves its code at zero, so this is its result (None may be
        # one).
        return result  # type: ignore[return-value]
    failing = int(codes.nonzero()[0].item())
    message = share_bytes(
        context, os.fsencode(str(error)) if context.rank == failing else None, source=failing
    )
    raise _CLASSES[int(codes[failing].item()) - 1](os.fsdecode(message), rank=failing) from error


def on_first(context: Context, action: Callable[[], T]) -> T | None:
    """Run `action` on rank 0 only, return its result there and None elsewhere, or raise on every
    rank if it failed.
    """
    return together(context, lambda: action() if context.rank == 0 else None)


def share_bytes(context: Context, content: bytes | None, *, source: int = 0) -> bytes:
    """Give every rank the `content` of rank `source` (None elsewhere). Blocks until every rank
    arrives.
    """
    content = content if context.rank == source else None
    size = torch.tensor([len(content or b"")], dtype=torch.int64, device=context.device)
    context.all_reduce(size)
    # Sums of one rank's values and zeros: the values themselves.
    values = torch.zeros(int(size.item()), dtype=torch.int64, device=context.device)
    if content:
        values.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    if values.numel():
        context.all_reduce(values)
    return bytes(values.tolist())


@torch.no_grad()
def share_tensors(context: Context, tensors: Iterable[Tensor]) -> None:
    """Overwrite each tensor (fp32) with rank 0's. Blocks until every rank arrives."""
    for tensor in tensors:
        if context.rank != 0:
            tensor.zero_()
        context.all_reduce(tensor.detach())


def same_everywhere(context: Context, what: str, value: str) -> None:
    """Raise ConfigError on every rank unless `value` is rank 0's on all of them. Blocks until every
    rank arrives.
    """
    reference = share_bytes(context, value.encode()).decode()

    def compare() -> None:
        if value != reference:
            raise ConfigError(
                f"{what} differs between ranks: rank 0 has {reference}, rank {context.rank} has "
                f"{value}."
            )

    together(context, compare)
