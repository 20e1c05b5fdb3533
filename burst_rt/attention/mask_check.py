"""Whether a mask keeps its contract, on a small sample of the positions it will be asked about.

The planner calls a user's mask for `relation`, and kernels call the mask for `allows`, in the
middle of a call that other ranks are in. So mistakes of the mask are looked for here, before
anything is sent. The sample proves nothing about positions outside the sample. `function_check.py`
does the same for functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from burst_rt.errors import InputError
from burst_rt.planning import masks
from burst_rt.planning.masks import (
    Both,
    Either,
    Function,
    Mask,
    Piece,
    Relation,
    Shape,
    Spans,
    positions_of,
)
from burst_rt.planning.numbers import UNNUMBERED

__all__ = ["check_mask", "simple_masks"]

# Number of positions of each sampled range.
_SAMPLE = 5
_INSIDE = (
    ". A mask with arguments cannot be made inside a compiled function: make it outside, and use "
    "it inside"
)


def check_mask(mask: Mask, q_len: int, kv_len: int, *, batch: int = 1, shared: bool = True) -> None:
    """Raises InputError where the mask does not fit the call or breaks the contract of `Mask`.

    Results are cached, so checking the same mask again is cheap. q_len, kv_len: tokens of the whole
    sequences; the last query is at the position of the last key. batch: rows of the batch. shared:
    whether other ranks will compare this mask with their own by `repr`.
    """
    if type(mask).__hash__ is None:
        raise InputError(
            f"burst_attention: a mask must be hashable, got {type(mask).__name__}, which is not; "
            "make the class a frozen dataclass"
        )
    _ask(mask, "hash()", hash, mask)
    misfit = _ask(mask, "refuses", mask.refuses, q_len, kv_len, batch)
    if misfit is not None:
        raise InputError(f"burst_attention: mask {misfit}")
    for part in simple_masks(mask.bound(q_len, kv_len)):
        # Tests of this package check its own masks; `Mask` itself is none of them.
        if type(part) is Mask or not type(part).__module__.startswith(f"{masks.__name__}."):
            _check(part, q_len, kv_len, shared)


def simple_masks(mask: Mask) -> Iterator[Mask]:
    """The masks that `&`, `|` and `from_function` have made the mask from."""
    if isinstance(mask, (Both, Either)) and type(mask) in (Both, Either):
        yield from simple_masks(mask.first)
        yield from simple_masks(mask.second)
    else:
        yield mask
    if isinstance(mask, Function):
        yield from simple_masks(mask.within)


@lru_cache(maxsize=256)
def _check(mask: Mask, q_len: int, kv_len: int, shared: bool) -> None:
    text = _ask(mask, "repr()", repr, mask)
    if shared and (not isinstance(text, str) or " at 0x" in text):
        raise InputError(
            f"{_name(mask)}: repr() must show every parameter of the mask, because ranks compare "
            f"masks by repr(); got {text!r}. Make the class a frozen dataclass, which has such a "
            "repr"
        )
    for q in _ranges(kv_len - q_len, kv_len):
        if mask.has_spans:
            _check_spans(mask, q)
        for kv in _ranges(0, kv_len) if mask.batch == 1 else ():
            _check_ranges(mask, q, kv)


def _check_spans(mask: Mask, q: range) -> None:
    spans = _ask(mask, "spans", mask.spans, positions_of(q))
    arrays = isinstance(spans, Spans) and all(isinstance(bound, np.ndarray) for bound in spans)
    if not arrays or not all(
        bound.dtype == np.int64 and bound.ndim == 3 and bound.shape[:2] == (mask.batch, len(q))
        for bound in spans
    ):
        raise InputError(
            f"{_name(mask)}: spans of {len(q)} positions must return a burst_rt.Spans of two int64 "
            f"arrays [{mask.batch}, {len(q)}, spans], got {spans!r}"
        )
    starts, stops = spans
    if starts.shape != stops.shape or (starts > stops).any():
        raise InputError(
            f"{_name(mask)}: every span must have a start and a stop, which is not before it; got "
            f"{spans!r} for q {q}"
        )


def _check_ranges(mask: Mask, q: range, kv: range) -> None:
    relation = _ask(mask, "relation", mask.relation, q, kv)
    if not isinstance(relation, Relation):
        raise InputError(
            f"{_name(mask)}: relation must return a burst_rt.Relation, got {relation!r} for q {q} "
            f"and kv {kv}"
        )
    allowed = _allowed(mask, q, kv)
    seen = {Relation.EMPTY: 0, Relation.FULL: len(q) * len(kv)}.get(relation, len(allowed))
    if len(allowed) != seen:
        raise InputError(
            f"{_name(mask)}: relation returned {relation.name} for q {q} and kv {kv}, but allows "
            f"is true for {len(allowed)} of the {len(q) * len(kv)} pairs; return PARTIAL where "
            "neither FULL nor EMPTY is certain"
        )
    if mask.has_spans:
        rows, columns = positions_of(q), positions_of(kv)
        seen_cells = np.argwhere(mask.spans(rows).sees(columns, like=rows[:, None])[0])
        if {(i, j) for i, j in seen_cells.tolist()} != allowed:
            raise InputError(
                f"{_name(mask)}: spans and allows must say the same; they differ for q {q} and kv "
                f"{kv}"
            )
    pieces = _ask(mask, "pieces", mask.pieces, q, kv)
    if not isinstance(pieces, tuple) or not all(isinstance(piece, Piece) for piece in pieces):
        raise InputError(
            f"{_name(mask)}: pieces must return a tuple of Pieces, got {pieces!r} for q {q} and kv "
            f"{kv}"
        )
    covered = [cell for piece in pieces for cell in _cells(piece, allowed)]
    if sorted(covered) != sorted(allowed):
        raise InputError(
            f"{_name(mask)}: pieces for q {q} and kv {kv} must cover the pairs for which allows "
            f"is true, each pair once, and no others; got {pieces!r}"
        )


def _cells(piece: Piece, allowed: set[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The (row, column) pairs of a tile that a piece covers."""
    for i in range(piece.q_start, piece.q_stop):
        for j in range(piece.kv_start, piece.kv_stop):
            row, column = i - piece.q_start, j - piece.kv_start
            if piece.shows(row, column) and (piece.shape is not Shape.MASKED or (i, j) in allowed):
                yield i, j


def _allowed(mask: Mask, q: range, kv: range) -> set[tuple[int, int]]:
    """The (row, column) pairs that the mask allows; called with tensors, as kernels call it."""
    # On the CPU, whatever the program has made torch's default device.
    rows, columns = (torch.tensor(list(positions), device="cpu") for positions in (q, kv))
    rows, columns = rows[:, None], columns[None, :]
    answer = _ask(mask, "allows", mask.allows, rows, columns)
    shape = (len(q), len(kv))
    if (
        not isinstance(answer, torch.Tensor)
        or answer.dtype != torch.bool
        or not _broadcasts(answer, shape)
    ):
        got = (
            f"{answer.dtype} of shape {tuple(answer.shape)}"
            if isinstance(answer, torch.Tensor)
            else repr(answer)
        )
        asked = f"{list(rows.shape)} and {list(columns.shape)}"
        raise InputError(
            f"{_name(mask)}: allows must return a tensor of booleans that broadcasts to "
            f"{list(shape)} for positions of shapes {asked}, got {got}"
        )
    return {(i, j) for i, j in answer.expand(shape).nonzero().tolist()}


def _broadcasts(answer: torch.Tensor, shape: tuple[int, int]) -> bool:
    try:
        answer.expand(shape)
    except RuntimeError:
        return False
    return True


def _ranges(start: int, stop: int) -> list[range]:
    """Three sampled ranges: the first positions, some in the middle, and the last positions."""
    start = max(0, start)
    starts = (start, (start + stop) // 2, max(start, stop - _SAMPLE))
    parts = dict.fromkeys(range(at, min(at + _SAMPLE, stop)) for at in starts)
    return list(filter(None, parts))


def _ask(
    mask: Mask, what: str, method: Any, *arguments: Any
) -> Any:  # the class may not be what it says
    try:
        return method(*arguments)
    except Exception as error:
        # A compiler makes the object before the graph runs, and sets its fields afterwards: the
        # number, too.
        inside = getattr(mask, "_burst_rt_number", UNNUMBERED) == UNNUMBERED
        raise InputError(
            f"{_name(mask)}: {what} raised {type(error).__name__}: {error}"
            f"{_INSIDE if inside else ''}"
        ) from error


def _name(mask: Mask) -> str:
    return f"burst_attention: mask {type(mask).__name__}"
