"""Whether a mask keeps its contract, on a small sample of the positions it will be asked about.

A mask of the user's own is asked `relation` by the planner and `allows` by kernels, in the middle of
a call that other ranks are in. What it does wrong is found here, before anything is sent. The sample
proves nothing about positions that are not in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch

from burst_rt.attention.masks import Mask, Piece, Relation
from burst_rt.errors import InputError

__all__ = ["check_mask"]

# Positions of each sampled range.
_SAMPLE = 5


def check_mask(mask: Mask, q_len: int, kv_len: int) -> None:
    """Raises InputError where methods of the mask fail or contradict each other. Cheap when asked again.

    q_len, kv_len: tokens of the whole sequences; the last query stands at the last key.
    """
    if type(mask).__hash__ is None:
        raise InputError(f"burst_attention: a mask must be hashable (a frozen dataclass, say), and {type(mask).__name__} is not")
    _ask(mask, "hash()", hash, mask)
    _check(mask, q_len, kv_len)


@lru_cache(maxsize=256)
def _check(mask: Mask, q_len: int, kv_len: int) -> None:
    text = _ask(mask, "repr()", repr, mask)
    if not isinstance(text, str) or " at 0x" in text:
        raise InputError(
            f"{_name(mask)}: repr() must say everything about the mask, because ranks compare masks by it; got {text!r}. A frozen "
            "dataclass has such a repr"
        )
    for q in _ranges(kv_len - q_len, kv_len):
        for kv in _ranges(0, kv_len):
            _check_ranges(mask, q, kv)


def _check_ranges(mask: Mask, q: range, kv: range) -> None:
    relation = _ask(mask, "relation", mask.relation, q, kv)
    if not isinstance(relation, Relation):
        raise InputError(f"{_name(mask)}: relation must return a burst_rt.Relation, got {relation!r} for q {q} and kv {kv}")
    allowed = _allowed(mask, q, kv)
    seen = {Relation.EMPTY: 0, Relation.FULL: len(q) * len(kv)}.get(relation, len(allowed))
    if len(allowed) != seen:
        raise InputError(
            f"{_name(mask)}: relation says {relation.name} for q {q} and kv {kv}, and allows is true for {len(allowed)} of the "
            f"{len(q) * len(kv)} pairs; FULL and EMPTY must be right"
        )
    pieces = _ask(mask, "pieces", mask.pieces, q, kv)
    if not isinstance(pieces, tuple) or not all(isinstance(piece, Piece) for piece in pieces):
        raise InputError(f"{_name(mask)}: pieces must return a tuple of Pieces, got {pieces!r} for q {q} and kv {kv}")
    covered = [cell for piece in pieces for cell in _cells(piece, allowed)]
    if sorted(covered) != sorted(allowed):
        raise InputError(f"{_name(mask)}: pieces of q {q} and kv {kv} are not the pairs that allows is true for, each once: {pieces!r}")


def _cells(piece: Piece, allowed: set[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The (row, column) pairs of a tile that a piece stands for."""
    for i in range(piece.q_start, piece.q_stop):
        for j in range(piece.kv_start, piece.kv_stop):
            if (not piece.diagonal or j - piece.kv_start <= i - piece.q_start) and (not piece.masked or (i, j) in allowed):
                yield i, j


def _allowed(mask: Mask, q: range, kv: range) -> set[tuple[int, int]]:
    """The (row, column) pairs that the mask allows, by what it says of integers, and of tensors as kernels ask it."""
    pairs = {(i, j) for i, a in enumerate(q) for j, b in enumerate(kv) if _ask(mask, "allows", lambda x, y: bool(mask.allows(x, y)), a, b)}
    rows, columns = torch.tensor(list(q))[:, None], torch.tensor(list(kv))[None, :]
    answer = _ask(mask, "allows", mask.allows, rows, columns)
    shape = (len(q), len(kv))
    if not isinstance(answer, torch.Tensor) or answer.dtype != torch.bool or _broadcast(answer, shape) is None:
        got = f"{answer.dtype} of shape {tuple(answer.shape)}" if isinstance(answer, torch.Tensor) else repr(answer)
        raise InputError(
            f"{_name(mask)}: allows of positions {list(rows.shape)} and {list(columns.shape)} must give booleans {list(shape)}, got {got}"
        )
    if {(int(i), int(j)) for i, j in answer.expand(shape).nonzero()} != pairs:
        raise InputError(f"{_name(mask)}: allows says one thing of integers and another of tensors, for q {q} and kv {kv}")
    return pairs


def _broadcast(answer: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor | None:
    try:
        return answer.expand(shape)
    except RuntimeError:
        return None


def _ranges(start: int, stop: int) -> list[range]:
    """The first positions, the last ones, and some from everywhere."""
    start = max(0, start)
    every = range(start, stop, max(1, (stop - start) // _SAMPLE))
    return [part for part in {range(start, min(stop, start + _SAMPLE)), range(max(start, stop - _SAMPLE), stop), every} if part]


def _ask(mask: Mask, what: str, method: Any, *arguments: Any) -> Any:  # of a class that may not be what it says
    try:
        return method(*arguments)
    except Exception as error:
        raise InputError(f"{_name(mask)}: {what} raised {type(error).__name__}: {error}") from error


def _name(mask: Mask) -> str:
    return f"burst_attention: mask {type(mask).__name__}"
