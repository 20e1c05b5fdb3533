"""What a tile kernel is. A kernel computes one tile: a block that travels against the whole shard
at home, on whichever side.

Tensors are views of that block or shard, BSHD: q, dout, dq `[batch, q_len, heads, head_dim]`; k, v,
dk, dv `[batch, kv_len, kv_heads, head_dim]`; lse and delta `[batch, heads, q_len]`. Query head h
uses kv head h // (heads / kv_heads). Sums (state, dq, dk, dv) and rows are float32 for 16- and
32-bit inputs, float64 for float64.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import NamedTuple, Protocol

import torch

from burst_rt.planning.masks import Mask, Piece, Relation
from burst_rt.planning.problem import TileShape

__all__ = ["PARTIALS", "Kernel", "State", "Tile", "Work", "delta_rows", "fold", "sum_dtype"]


# What the sum over a row's tiles may be made of: parts that are rounded nowhere, or parts that a
# kernel has rounded to the inputs' 16 bits.
PARTIALS = ("exact", "16bit")
# Rows of a shard that are worked on at once where that takes temporary memory.
_SOME_ROWS = 1024


class State(NamedTuple):
    """The running forward state of a shard of queries (online softmax, Milakov & Gimelshein 2018),
    unnormalised, and where it ends.

    acc `[batch, q_len, heads, head_dim]` = sum of exp(score - m) * v; m, l `[batch, heads, q_len]`:
    the largest score so far and the sum of exp(score - m). A row that has seen no key has acc = 0,
    m = -inf, l = 0. A kernel may keep m in a unit of its own: the tiles of one call are all done by
    one kernel. out (like acc, in the inputs' type; may be acc itself) and lse (like m) are written
    once, at the end.
    """

    acc: torch.Tensor
    m: torch.Tensor
    l: torch.Tensor  # noqa: E741  (the field's name for it)
    out: torch.Tensor
    lse: torch.Tensor

    def start(self) -> None:
        """No key seen yet."""
        self.acc.zero_()
        self.m.fill_(-torch.inf)
        self.l.zero_()

    def finish(self) -> None:
        """Writes out = acc / l (0 where no key was seen) and lse = m + log(l) (-inf there)."""
        norm = torch.where(self.l == 0, 1.0, self.l).transpose(1, 2).unsqueeze(-1)
        if self.out.dtype == self.acc.dtype:
            torch.div(self.acc, norm, out=self.out)
        else:
            # Some rows at a time: the quotient is a temporary.
            parts = (x.split(_SOME_ROWS, 1) for x in (self.out, self.acc, norm))
            for row, acc, n in zip(*parts, strict=True):
                row.copy_(acc / n)
        torch.add(self.m, torch.log(self.l), out=self.lse)


class Tile(NamedTuple):
    """What is to be computed: the pieces that the mask leaves of a tile, positions of its rows and
    columns, the mask, the softmax scale.

    Positions are runs, in local order (a shard has one run a block); a kernel that evaluates the
    mask itself may go by them alone. `progress` is called between parts of a long tile so that
    transfers move on. first, last: the first tile of a forward call (nothing is in the state yet,
    not even zeros) and the last (whose kernel also finishes the state, all rows of it).
    """

    pieces: tuple[Piece, ...]
    q_positions: tuple[range, ...]
    kv_positions: tuple[range, ...]
    mask: Mask
    scale: float
    progress: Callable[[], None]
    first: bool = False
    last: bool = False

    def relation(self, rows: slice, columns: slice) -> Relation:
        """What the mask leaves of these rows and columns of the tile, by their positions alone."""
        runs = product(_some_of(self.q_positions, rows), _some_of(self.kv_positions, columns))
        relations = {self.mask.relation(q, kv) for q, kv in runs}
        return relations.pop() if len(relations) == 1 else Relation.PARTIAL

    def visible(
        self, piece: Piece, rows: slice, columns: slice, device: torch.device
    ) -> torch.Tensor | None:
        """Which cells of these rows and columns of a piece are seen: bool `[q, kv]`, or None for
        all of them.
        """
        if piece.masked:
            q, kv = (
                _positions(self.q_positions, rows, device),
                _positions(self.kv_positions, columns, device),
            )
            seen: torch.Tensor = self.mask.allows(q[:, None], kv[None, :])
            return seen
        if piece.diagonal:
            q = torch.arange(rows.start - piece.q_start, rows.stop - piece.q_start, device=device)
            kv = torch.arange(
                columns.start - piece.kv_start, columns.stop - piece.kv_start, device=device
            )
            return kv[None, :] <= q[:, None]
        return None


class Work(NamedTuple):
    """What one direction of a call asks of its kernel on this rank.

    ring_size: of its `Program`; tiles: the pieces of each; partials: one of `PARTIALS`.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    mask: Mask
    forward: bool = True
    ring_size: int = 1
    tiles: tuple[tuple[Piece, ...], ...] = ()
    partials: str = "exact"


class Kernel(Protocol):
    """A tile kernel. Never called with an empty range."""

    name: str

    def refuses(self, work: Work) -> str | None:
        """Why it cannot do this work (the first reason there is), or None."""

    def repeatable(self, forward: bool) -> bool:
        """Whether the same inputs give the same bits every time. "auto" takes no kernel of which
        that is not true.
        """

    def remarks(self, work: Work) -> tuple[str, ...]:
        """What a user should know of this kernel doing this work; `explain` tells."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, state: State
    ) -> None:
        """Folds the pieces into the rows of `state` they cover; before the first tile it starts it,
        after the last it finishes it.
        """

    def delta(
        self,
        dout: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        dlse: torch.Tensor | None,
        rows: torch.Tensor,
    ) -> None:
        """Writes what `backward` needs of each query, `rows` `[2, batch, heads, q_len]`: lse, +inf
        where it is -inf (a row that saw no key: its probabilities exp(score - lse), and so its
        gradients, are then 0), and delta = rowsum(dout * out) - dlse (0 there).
        """

    def backward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        dout: torch.Tensor,
        lse: torch.Tensor,
        delta: torch.Tensor,
        tile: Tile,
        dq: torch.Tensor | None,
        dk: torch.Tensor | None,
        dv: torch.Tensor | None,
    ) -> None:
        """Adds the gradients of the tile's pieces to the sums (None: not needed).

        `lse` is of the whole row, +inf where a row sees no key at all (so that its probabilities
        are 0); `delta` = rowsum(dout * out) - dlse.
        """

    def scratch_bytes(self, forward: bool, dtype: torch.dtype, tile: TileShape) -> int:
        """The most memory one call allocates for tiles of up to that shape; what a mask of the
        user's own takes is a guess.
        """


def delta_rows(
    dout: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
    rows: torch.Tensor,
) -> None:
    """`Kernel.delta` in torch's own operators."""
    top, delta = rows
    top.copy_(lse)
    top.masked_fill_(top == -torch.inf, torch.inf)
    for a in range(0, dout.shape[1], _SOME_ROWS):
        some = slice(a, a + _SOME_ROWS)
        product = dout[:, some].to(delta.dtype) * out[:, some].to(delta.dtype)
        delta[:, :, some] = product.sum(-1).transpose(1, 2)
    if dlse is not None:
        delta.sub_(dlse)
        # A row that sees no key has no gradient, whatever comes for its lse (of logaddexp(-inf,
        # -inf), say, NaN).
        delta.masked_fill_(top == torch.inf, 0.0)


def fold(
    out: torch.Tensor,
    lse: torch.Tensor,
    acc: torch.Tensor,
    m: torch.Tensor,
    l: torch.Tensor,  # noqa: E741
) -> None:
    """Folds a normalised part, out `[batch, q, heads, d]` and lse `[batch, heads, q]`, into the
    running state with weight exp(lse - m).
    """
    m_new = torch.maximum(m, lse)
    # exp(-inf - -inf) would be NaN: such a row has seen nothing
    safe = torch.where(m_new == -torch.inf, 0.0, m_new)
    old, new = torch.exp(m - safe), torch.exp(lse - safe)
    acc.mul_(_rows(old)).addcmul_(out, _rows(new))
    l.mul_(old).add_(new)
    m.copy_(m_new)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type sums are kept in: float64 for float64 inputs, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[B, H, S] -> [B, S, H, 1]."""
    return x.transpose(1, 2).unsqueeze(-1)


def _positions(runs: tuple[range, ...], rows: slice, device: torch.device) -> torch.Tensor:
    return torch.cat(
        [torch.arange(run.start, run.stop, run.step, device=device) for run in _some_of(runs, rows)]
    )


def _some_of(runs: tuple[range, ...], rows: slice) -> list[range]:
    """Some of the positions, which are counted through all runs; a run that has none of them is
    left out.
    """
    found, first = [], 0
    for run in runs:
        part = run[max(rows.start - first, 0) : max(rows.stop - first, 0)]
        found += [part] if part else []
        first += len(run)
    return found
