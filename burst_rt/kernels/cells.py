"""Which cells of a tile a mask shows, as tensors of booleans on the tile's device."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from burst_rt.errors import InputError
from burst_rt.planning.masks import MOST_SPANS, Function, Mask, Piece, Shape, positions_of, spans_of
from burst_rt.planning.masks.spans import Positions

__all__ = ["CellQuery", "ask", "function_in_words", "outside", "positions_at"]


class CellQuery(NamedTuple):
    """Rows and columns of a tile, of all batch rows and some heads. See `Cells`."""

    q: tuple[range, ...]  # positions of the rows
    kv: torch.Tensor  # positions of the columns, int64
    batch: int  # number of batch rows
    heads: range  # numbers of the query heads in the whole call

    def by_spans(self, mask: Mask) -> torch.Tensor:
        """See `Cells.by_spans`: `[batch or 1, 1, q, kv]`."""
        kv = self.kv
        spans = spans_of(mask, self.q[0]) if len(self.q) == 1 else mask.spans(self._host_q())
        starts, stops = (_sent(bound, kv.device) for bound in spans)
        if spans.width <= MOST_SPANS:
            # [batch, 1, q, 1] for each span of a row.
            starts, stops = (bound[:, None, :, :, None] for bound in (starts, stops))
            seen = torch.zeros((), dtype=torch.bool, device=kv.device)
            for number in range(spans.width):
                seen = seen | ((starts[..., number, :] <= kv) & (kv < stops[..., number, :]))
            return seen
        # Spans begin and end at columns; a cell is seen where more have begun than ended.
        edges = torch.zeros(*starts.shape[:2], len(kv) + 1, dtype=torch.int8, device=kv.device)
        for bound, sign in ((starts, 1), (stops, -1)):
            at = torch.searchsorted(kv, bound)
            edges.scatter_add_(2, at, torch.full_like(at, sign, dtype=torch.int8))
        return edges[..., :-1].cumsum(2, dtype=torch.int8).bool()[:, None]

    def allowed(self, mask: Mask) -> torch.Tensor:
        """See `Cells.allowed`."""
        q = positions_at(self.q, self.kv.device)
        seen: torch.Tensor = mask.allows(q[:, None], self.kv[None, :])
        return seen.unsqueeze(1) if seen.ndim == 3 else seen

    def asked(self, mask: Function) -> torch.Tensor:
        """See `Cells.asked`: four dimensions, each as asked or 1. Raises InputError as `ask`."""
        mover, device = mask.mover, self.kv.device
        if mover is None:
            q = positions_at(self.q, device)[None]
        else:
            q = _sent(mover.places(self._host_q()), device)  # [batch or 1, rows]
        batch = torch.arange(self.batch, device=device)
        heads = torch.arange(self.heads.start, self.heads.stop, device=device)
        answer = ask(
            mask, batch[:, None, None, None], heads[None, :, None, None], q[:, None, :, None],
            self.kv[None, None, None, :],
        )  # fmt: skip
        return answer[(None,) * (4 - answer.ndim)]

    def _host_q(self) -> Positions:
        return np.concatenate([positions_of(run) for run in self.q])


def positions_at(runs: Iterable[range], device: torch.device) -> torch.Tensor:
    """Positions as a tensor on a device."""
    return torch.cat([torch.arange(x.start, x.stop, x.step, device=device) for x in runs])


def _sent(array: Positions, device: torch.device) -> torch.Tensor:
    """An array on a device, contiguous. Does not wait for the device."""
    there = torch.from_numpy(np.array(array, order="C"))
    return there if device.type == "cpu" else there.pin_memory().to(device, non_blocking=True)


def ask(mask: Function, *cells: torch.Tensor) -> torch.Tensor:
    """The answers of a mask's function about cells (batch, head, q, kv), four tensors that
    broadcast.

    Raises InputError where the function raises, or where the answer is not a tensor of booleans on
    their device that broadcasts to their shape.
    """
    # torch's own broadcast_shapes loads sympy, half a second at the first call.
    shape = np.broadcast_shapes(*(x.shape for x in cells))
    try:
        answer = mask.function(*cells)
    except Exception as error:
        raise InputError(
            f"{function_in_words(mask)} raised {type(error).__name__}: {error}"
        ) from error
    if isinstance(answer, torch.Tensor):
        fits = len(shape) >= answer.ndim and all(
            here in (1, there)
            for here, there in zip(reversed(answer.shape), reversed(shape), strict=False)
        )
        if answer.dtype == torch.bool and answer.device == cells[0].device and fits:
            return answer
        got = f"{answer.dtype} of shape {list(answer.shape)} on {answer.device}"
    else:
        got = repr(answer)
    asked = ", ".join(str(list(x.shape)) for x in cells)
    raise InputError(
        f"{function_in_words(mask)} must return a tensor of booleans on {cells[0].device} "
        f"that broadcasts to {list(shape)} for (batch, head, q, kv) of shapes {asked}, got {got}"
    )


def function_in_words(mask: Function) -> str:
    """A mask's function, for errors."""
    return f"burst_attention: mask {mask!r}: the function"


# Most calls of a window are equal.
@lru_cache(maxsize=4)
def outside(shape: Shape, q_len: int, kv_len: int, dtype: torch.dtype) -> torch.Tensor:
    """The mask `[q, kv]` of an upper triangle, or a band: -inf outside it, else 0."""
    piece = Piece(0, q_len, 0, kv_len, shape, 0)
    q, kv = (torch.arange(length, device="cpu") for length in (q_len, kv_len))
    mask = torch.zeros(q_len, kv_len, dtype=dtype, device="cpu")
    return mask.masked_fill_(~piece.shows(q[:, None], kv), -torch.inf)
