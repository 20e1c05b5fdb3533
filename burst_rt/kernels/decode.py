"""Decode on one rank: a few queries of each sequence against the rank's keys, by torch's operators.

The result is a `Partial`: out and lse of the rows, heads first, and dense, so that it can be sent
as it is. Query heads that share a kv head are rows of one matrix, so each key is read once. Only
the keys between the first and the last that any row sees are read, and keys are cast in parts of
bounded size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from burst_rt.planning.masks.spans import Spans

__all__ = ["Partial", "SeenColumns", "decode_plainly", "fold_heads", "lowest", "parts_of_columns"]

_T = TypeVar("_T")

# Maximum number of bytes of the keys, values and scores of a part, if they are copied.
_PART_BYTES = 1 << 24


def lowest(x: torch.Tensor) -> float:
    """The lowest finite number of a tensor's type."""
    return torch.finfo(x.dtype).min


class Partial(NamedTuple):
    """The partial result of some keys for the rows of a decode; float32 or, for float64 inputs,
    float64. Dense.

    A row that has seen no key has out = 0 and the lowest finite lse. Then no sum of weights is 0.
    """

    out: torch.Tensor  # the mean of v by softmax, `[batch, heads, q_len, v's head_dim]`
    lse: torch.Tensor  # log of the sum of exp(score), `[batch, heads, q_len]`

    def start(self) -> None:
        """Makes every row one that has seen no key."""
        self.out.zero_()
        self.lse.fill_(lowest(self.lse))

    def rows(self, at: slice) -> Partial:
        """The same of some batch rows."""
        return Partial(self.out[at], self.lse[at])

    def grouped(self, num_kv_heads: int) -> Partial:
        """Views with the rows of each kv head together: out `[batch, kv heads, rows, d]`."""
        batch, heads, q_len, channels = self.out.shape
        rows = (batch, num_kv_heads, heads // num_kv_heads * q_len)
        return Partial(self.out.view(*rows, channels), self.lse.view(rows))

    def fold(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Folds the partial result of other keys for the rows into this one."""
        more = lse - self.lse
        # The weights are not exp(lse - both): a large lse is rounded, and the two would not add up
        # to 1.
        old, new = torch.sigmoid(-more), torch.sigmoid(more)
        self.out.mul_(old.unsqueeze(-1)).addcmul_(out, new.unsqueeze(-1))
        torch.logaddexp(self.lse, lse, out=self.lse)


def fold_heads(q: torch.Tensor, num_kv_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """[B, n, H, D] -> [B, kv heads, H / kv heads * n, D] in a type: the rows of each kv head."""
    return q.to(dtype).transpose(1, 2).reshape(q.shape[0], num_kv_heads, -1, q.shape[3])


class SeenColumns:
    """The columns of a rank that the rows of a decode see. One object serves all layers of a step.

    spans: by columns, whose number is `num_columns`. Kernels' tables of them are kept: see `once`.
    """

    def __init__(self, spans: Spans, num_columns: int) -> None:
        self.spans = spans
        self.num_columns = num_columns
        self._made: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """The value that `make` returns; made once for each key."""
        if key not in self._made:
            self._made[key] = make()
        made: _T = self._made[key]
        return made

    def row(self, number: int) -> SeenColumns:
        """The same of one batch row."""
        return self.once(
            ("row", number), lambda: SeenColumns(self.spans.row(number), self.num_columns)
        )

    @cached_property
    def hulls(self) -> list[tuple[int, int]]:
        """The first column and the end (last + 1) of the columns that each batch row of the spans
        sees.

        (0, 0) where nothing is seen.
        """
        starts, stops = (bound.reshape(len(bound), -1) for bound in self.spans)
        starts, stops = np.maximum(starts, 0), np.minimum(stops, self.num_columns)
        some = starts < stops
        first = np.where(some, starts, self.num_columns).min(1)
        last = np.where(some, stops, 0).max(1)
        both = zip(first.tolist(), last.tolist(), strict=True)
        return [(a, b) if a < b else (0, 0) for a, b in both]

    def hidden(self, columns: range, device: torch.device) -> torch.Tensor | None:
        """The columns among these that the rows do not see: bool `[batch or 1, rows, columns]`, or
        None.

        None: every row sees all of them.
        """
        return self.once((columns, device), lambda: _hidden(self.spans, columns, device))


def _hidden(seen: Spans, columns: range, device: torch.device) -> torch.Tensor | None:
    whole = (seen.starts <= columns.start) & (seen.stops >= columns.stop)
    if whole.any(-1).all():
        return None
    starts, stops = (torch.from_numpy(np.ascontiguousarray(x)).to(device) for x in seen)
    at = torch.arange(columns.start, columns.stop, device=device)
    hidden = torch.ones((*seen.starts.shape[:2], len(columns)), dtype=torch.bool, device=device)
    for number in range(seen.width):
        hidden &= (at < starts[..., number, None]) | (at >= stops[..., number, None])
    return hidden


def parts_of_columns(first: int, last: int, column_bytes: int) -> Iterator[range]:
    """The columns in parts of bounded size. column_bytes: what one of them takes."""
    step = max(1, _PART_BYTES // column_bytes)
    for start in range(first, last, step):
        yield range(start, min(start + step, last))


def decode_plainly(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    seen: SeenColumns,
    scale: float,
    softcap: float | None,
    into: Partial,
) -> None:
    """See `Kernel.decode`. By matrix products, in the type of the sums, on any device."""
    q, k, v = qkv
    (batch, q_len, heads, _), kv_heads, work = q.shape, k.shape[2], into.lse.dtype
    into.start()
    hulls = [hull for hull in seen.hulls if hull != (0, 0)]
    if not hulls:
        return
    group, rows, sums = heads // kv_heads, fold_heads(q, kv_heads, work), into.grouped(kv_heads)
    channels = k.shape[3] + v.shape[3]
    column_bytes = batch * (kv_heads * channels + 2 * heads * q_len) * work.itemsize
    first, last = min(a for a, _ in hulls), max(b for _, b in hulls)
    for columns in parts_of_columns(first, last, column_bytes):
        length = len(columns)
        keys, values = (x[:, columns.start : columns.stop].to(work).transpose(1, 2) for x in (k, v))
        s = rows @ keys.mT * scale
        if softcap is not None:
            s = s.div_(softcap).tanh_().mul_(softcap)
        hidden = seen.hidden(columns, q.device)
        if hidden is not None:
            s.view(batch, kv_heads, group, q_len, length).masked_fill_(
                hidden[:, None, None], -torch.inf
            )
            # Columns that no row of a sequence sees may hold anything, and 0 * NaN is NaN.
            values = values.masked_fill(hidden.all(1)[:, None, :, None], 0.0)
        # Where all scores are -inf, p is 0, and not NaN.
        top = s.amax(-1, keepdim=True).clamp_min_(lowest(s))
        p = s.sub_(top).exp_()
        total = p.sum(-1, keepdim=True).clamp_min_(1.0)  # the largest p of a row is 1, or all are 0
        sums.fold((p @ values).div_(total), top.add_(total.log()).squeeze(-1))
