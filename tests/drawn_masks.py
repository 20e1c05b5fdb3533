"""Masks that are drawn, with the cells that are seen, from plain loops."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
from mask_truths import Sizes, cells_of

from burst_rt import (
    BlockSparse,
    Causal,
    Chunked,
    Documents,
    First,
    Mask,
    Prefix,
    SlidingWindow,
)

__all__ = ["DrawnMask", "drawn_mask"]

_MOST_HEADS = 20


class DrawnMask(NamedTuple):
    mask: Mask
    cells: torch.Tensor  # bool, broadcasts to `[batch, heads, Sq, Skv]`


def _function(chance: random.Random, q_len: int, kv_len: int) -> DrawnMask:
    a, b, c = (chance.randrange(5) for _ in range(3))
    most = chance.randrange(1, 7)

    def function(batch: Any, head: Any, q: Any, kv: Any) -> Any:
        return (a * q + b * kv + c * head) % 7 < most

    cells = [
        [[(a * (i + kv_len - q_len) + b * j + c * h) % 7 < most for j in range(kv_len)]
         for i in range(q_len)]
        for h in range(_MOST_HEADS)
    ]  # fmt: skip
    return DrawnMask(Mask.from_function(function), torch.tensor(cells)[None])


def _leaf(chance: random.Random, q_len: int, kv_len: int, batch: int) -> DrawnMask:
    if chance.random() < 0.15:
        return _function(chance, q_len, kv_len)

    def lengths() -> list[int]:
        cuts = sorted(chance.randrange(kv_len + 1) for _ in range(chance.randrange(12)))
        return [b - a for a, b in zip([0, *cuts], [*cuts, kv_len], strict=True)]

    def table() -> list[list[bool]]:
        return [[chance.random() < 0.3 for _ in range(blocks[1])] for _ in range(blocks[0])]

    block = chance.choice([4, 16])
    blocks = -(-q_len // block), -(-kv_len // block)
    rows = range(batch)
    masks = [
        Causal(),
        SlidingWindow(chance.randrange(-1, kv_len), chance.randrange(-1, 9)),
        First(chance.randrange(12)),
        Prefix(chance.randrange(kv_len)),
        Prefix(tuple(chance.randrange(kv_len) for _ in rows)),
        Chunked(1 + chance.randrange(kv_len)),
        BlockSparse(table(), block),
        BlockSparse([table() for _ in rows], block),
    ]
    if q_len <= kv_len:
        masks += [Documents(lengths()), *[Documents([lengths() for _ in rows])] * 3]
    mask = chance.choice(masks)
    return DrawnMask(mask, cells_of(mask, Sizes(q_len, kv_len, batch))[:, None])


def drawn_mask(
    chance: random.Random, q_len: int, kv_len: int, batch: int, depth: int = 2
) -> DrawnMask:
    """A mask, or several that `&` and `|` combine."""
    if not depth or chance.random() < 0.4:
        return _leaf(chance, q_len, kv_len, batch)
    a, b = (drawn_mask(chance, q_len, kv_len, batch, depth - 1) for _ in range(2))
    if chance.random() < 0.6:
        return DrawnMask(a.mask & b.mask, a.cells & b.cells)
    return DrawnMask(a.mask | b.mask, a.cells | b.cells)
