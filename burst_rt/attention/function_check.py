"""Whether functions of masks keep to `Mask.from_function`, and what ranks compare of them.

A function is asked about cells that are drawn from a seed over the whole of a call, before anything
is sent. This finds mistakes and proves nothing; it decides nothing about what is computed.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from burst_rt.attention.mask_check import simple_masks
from burst_rt.errors import InputError
from burst_rt.kernels.cells import ask, function_in_words
from burst_rt.planning.masks import Function, Mask

__all__ = ["cells_said"]

_DRAWN = 4096
# Number of the drawn positions of each side that are asked about together, as kernels do.
_TOGETHER = 5


def cells_said(mask: Mask, sizes: tuple[int, int, int, int], device: torch.device) -> str:
    """The answers of the mask's functions about drawn cells, in words that ranks compare; ""
    without any.

    Functions with a key are asked too, but the key represents their answers. sizes: batch rows,
    query heads, queries and keys of the whole call. Raises InputError for a function that breaks
    its contract.
    """
    words = ""
    for part in simple_masks(mask):
        if isinstance(part, Function):
            digest = _digest(part, sizes, device)
            words += "" if part.key is not None else f", {_DRAWN} cells {digest}"
    return words


def _digest(mask: Function, sizes: tuple[int, int, int, int], device: torch.device) -> str:
    generator = np.random.default_rng(0)
    batch, head, q, kv = (
        torch.from_numpy(generator.integers(0, size, _DRAWN)).to(device) for size in sizes
    )
    q += sizes[3] - sizes[2]  # positions among the keys
    answer, again = (ask(mask, batch, head, q, kv).expand(_DRAWN) for _ in range(2))
    if not torch.equal(answer, again):
        raise InputError(
            f"{function_in_words(mask)} must say the same each time, got other answers "
            "about the same cells"
        )
    shapes = ((-1, 1, 1, 1), (-1, 1, 1), (-1, 1), (-1,))
    indices = [
        x[:_TOGETHER].reshape(shape) for x, shape in zip((batch, head, q, kv), shapes, strict=True)
    ]
    alone = [x.reshape(-1) for x in torch.broadcast_tensors(*indices)]
    together = ask(mask, *indices).expand([_TOGETHER] * 4)
    singly = [bool(ask(mask, *(x[i] for x in (batch, head, q, kv)))) for i in range(_TOGETHER)]
    same = torch.equal(together.reshape(-1), ask(mask, *alone).expand(alone[0].shape))
    if not same or singly != answer[:_TOGETHER].tolist():
        raise InputError(
            f"{function_in_words(mask)} must decide on each cell by itself, got other answers "
            "about cells that were asked about together"
        )
    return hashlib.sha256(np.packbits(answer.cpu().numpy()).tobytes()).hexdigest()[:32]
