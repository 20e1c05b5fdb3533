"""The `Kernel` protocol, the records of tensors that it takes, and the running state of a row.

A kernel computes one tile: a block that travels against the whole shard at home, whichever side
travels.

Tensors are views of that block or shard, BSHD: q, dq `[batch, q_len, heads, head_dim]`; dout, out
the same with v's head_dim; k, dk `[batch, kv_len, kv_heads, head_dim]`; v, dv the same with v's
head_dim; lse and delta `[batch, heads, q_len]`. Query head h uses kv head h // (heads / kv_heads).
Sums (state, dq, dk, dv) and rows are float32 for 16- and 32-bit inputs, float64 for float64. The
gradients of a call's only tile may have the inputs' type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from burst_rt.kernels.cells import CellQuery, positions_at
from burst_rt.kernels.decode import Partial, SeenColumns, decode_plainly
from burst_rt.planning.masks import Mask, Piece, Relation, Shape
from burst_rt.planning.problem import ScoreFlags, TileShape

__all__ = [
    "DTYPES", "PARTIALS", "QKV", "Gradients", "Kept", "Kernel", "PairOfRows", "Places", "Results",
    "ScoreOptions", "State", "Tile", "Upstream", "Work", "fold", "some_of", "sum_dtype",
    "write_from_sums",
]  # fmt: skip

# Names of the parts that the sum over a row's tiles may be made of. "exact": parts that are not
# rounded. "16bit": a kernel may have rounded the parts to the inputs' 16 bits.
PARTIALS = ("exact", "16bit")
# Types that inputs may have.
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Number of rows of a shard that are worked on at once where the work takes temporary memory.
_SOME_ROWS = 1024


class QKV(NamedTuple):
    """Queries, and the keys and values that they attend to."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def detach(self) -> QKV:
        """The same tensors, apart from autograd."""
        return QKV(*(x.detach() for x in self))


class Results(NamedTuple):
    """The results of a forward, and the gradients that came for them."""

    out: torch.Tensor  # `[batch, q_len, heads, v's head_dim]`
    lse: torch.Tensor  # -inf in a row that saw no key
    dout: torch.Tensor  # shaped like out
    dlse: torch.Tensor | None  # shaped like lse; None: no gradient came

    def detach(self) -> Results:
        """The same tensors, apart from autograd."""
        dlse = None if self.dlse is None else self.dlse.detach()
        return Results(self.out.detach(), self.lse.detach(), self.dout.detach(), dlse)


class Upstream(NamedTuple):
    """Inputs of the backward with one row per query; `Kernel.delta` wrote lse and delta."""

    dout: torch.Tensor  # shaped like out
    # lse over all keys of the row; +inf if it sees no key, so that its probabilities are 0
    lse: torch.Tensor
    delta: torch.Tensor  # rowsum(dout * out) - dlse
    # The output of a call of one tile whose lse got no gradient: delta is then rowsum(dout * out).
    out: torch.Tensor | None = None


class ScoreOptions(NamedTuple):
    """The values of a call's score options, apart from scaling; None: the option is off.

    A scaled score s of query i and key j becomes softcap * tanh(s / softcap), then slope * |i - j|
    is taken from it, then the mask hides it. Kernels get tensors of the type of the sums.
    """

    softcap: float | None = None
    alibi_slopes: torch.Tensor | None = None  # `[batch, heads]`
    # `[heads]`: the score of a key that every query of the head sees, and whose value is 0.
    # Kernels meet sinks in the state only, and so in lse.
    sinks: torch.Tensor | None = None

    @property
    def flags(self) -> ScoreFlags:
        """Which options are on."""
        return ScoreFlags(*(value is not None for value in self))

    def bound(self, dtype: torch.dtype, batch: int) -> ScoreOptions:
        """The user's options as kernels take them, for inputs of a type; detached from autograd."""
        cap, slopes, sinks = self
        wide = sum_dtype(dtype)
        if slopes is not None:
            slopes = slopes.detach().to(wide).expand(batch, -1).contiguous()
        if sinks is not None:
            sinks = sinks.detach().to(wide).contiguous()
        return ScoreOptions(cap, slopes, sinks)

    def of_heads(self, heads: slice) -> ScoreOptions:
        """The same for some of the query heads."""
        cap, slopes, sinks = self
        return ScoreOptions(
            cap,
            None if slopes is None else slopes[:, heads].contiguous(),
            None if sinks is None else sinks[heads],
        )


class Gradients(NamedTuple):
    """The gradients of q, k and v, each shaped like its tensor. None: not needed."""

    dq: torch.Tensor | None
    dk: torch.Tensor | None
    dv: torch.Tensor | None


class State(NamedTuple):
    """The running forward state of a shard of queries, and the results made from it at the end.

    Online softmax (Milakov & Gimelshein 2018), not normalised. A row that has seen no key has acc =
    0, m = -inf, l = 0; with a sink it has acc = 0, m = sink, l = 1, as if it had seen the sink's
    key. A kernel may keep m in its own unit (`Kernel.m_scale`); in `fold`, `finish` and on the wire
    m is a score.
    """

    # sum of exp(score - m) * v, `[batch, q_len, heads, v's head_dim]`
    acc: torch.Tensor
    # the largest score so far, `[batch, heads, q_len]`
    m: torch.Tensor
    # sum of exp(score - m), `[batch, heads, q_len]`
    l: torch.Tensor  # noqa: E741  (the field's name for it)
    # shaped like acc, in the inputs' type; may be acc itself; written once, at the end
    out: torch.Tensor
    # shaped like m; written once, at the end
    lse: torch.Tensor

    def start(self, sinks: torch.Tensor | None = None) -> None:
        """Makes every row one that has seen no key but its head's sink, if there are sinks."""
        self.acc.zero_()
        if sinks is None:
            self.m.fill_(-torch.inf)
            self.l.zero_()
        else:
            self.m.copy_(sinks[:, None])
            self.l.fill_(1.0)

    def at(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of acc, m and l at some of the queries."""
        return self.acc[:, rows], self.m[:, :, rows], self.l[:, :, rows]

    def finish(self) -> None:
        """Writes out = acc / l (0 where no key was seen) and lse = m + log(l) (-inf there)."""
        norm = torch.where(self.l == 0, 1.0, self.l).transpose(1, 2).unsqueeze(-1)
        if self.out.dtype == self.acc.dtype:
            torch.div(self.acc, norm, out=self.out)
        else:
            # Some rows at a time, because the quotient is a temporary.
            parts = (x.split(_SOME_ROWS, 1) for x in (self.out, self.acc, norm))
            for row, acc, n in zip(*parts, strict=True):
                row.copy_(acc / n)
        torch.add(self.m, torch.log(self.l), out=self.lse)


class Kept(NamedTuple):
    """What a kernel may keep of one task, of one scale and softcap, from call to call."""

    entries: dict[object, Any]  # the kernel's own, kept as long as the plan
    stream: int  # the handle of the current stream, which is one of the current device


class Tile(NamedTuple):
    """A tile to compute.

    A position tuple has the runs of its side, in local order. A kernel that evaluates
    the mask itself may use the positions and ignore the pieces.
    """

    pieces: tuple[Piece, ...]  # pieces that the mask leaves of the tile
    q_positions: tuple[range, ...]  # positions of the rows
    kv_positions: tuple[range, ...]  # positions of the columns
    mask: Mask
    scale: float  # scale of the softmax
    # Called between parts of a long tile, so that transfers move on.
    progress: Callable[[], None]
    # Whether it is the first tile of a forward: the state then holds nothing, not even zeros.
    first: bool = False
    # Whether it is the last tile of a forward: the kernel then also finishes all rows of the state.
    # A tile of a backward is first and last, where the kernel is to write gradients, or neither.
    last: bool = False
    first_head: int = 0  # the number in the whole call of the tile's first query head
    score_options: ScoreOptions = ScoreOptions()
    kept: Kept | None = None  # None: nothing is kept
    # The side, "q" or "kv", whose gradients' sums hold nothing yet, not even zeros (`starts_sums`).
    new_sums: str = ""
    in_order: bool = True  # whether sums must be added up in the same order every time

    @property
    def only(self) -> bool:
        """Whether it is the only tile of its call."""
        return self.first and self.last

    def relation(self, rows: slice, columns: slice) -> Relation:
        """The relation of these rows and columns of the tile under the mask, by their positions
        alone.
        """
        runs = product(some_of(self.q_positions, rows), some_of(self.kv_positions, columns))
        relations = {self.mask.relation(q, kv) for q, kv in runs}
        return relations.pop() if len(relations) == 1 else Relation.PARTIAL

    def visible(
        self, piece: Piece, rows: slice, columns: slice, queries: torch.Tensor
    ) -> torch.Tensor | None:
        """The cells of these rows and columns of a piece that are seen.

        queries: the tile's, or more or fewer tokens of them. bool `[q, kv]`, or `[batch or 1, heads
        or 1, q, kv]` where the mask tells batch rows or heads apart; None if all cells are seen.
        """
        device = queries.device
        if piece.shape is Shape.MASKED:
            kv = positions_at(some_of(self.kv_positions, columns), device)
            heads = range(self.first_head, self.first_head + queries.shape[2])
            runs = tuple(some_of(self.q_positions, rows))
            seen: torch.Tensor = self.mask.seen_cells(CellQuery(runs, kv, queries.shape[0], heads))
            seen = seen.expand(*seen.shape[:-2], rows.stop - rows.start, len(kv))
            return seen[0, 0] if seen.shape[:-2] == (1, 1) else seen
        if piece.shape is Shape.RECTANGLE:
            return None
        q = torch.arange(rows.start - piece.q_start, rows.stop - piece.q_start, device=device)
        kv = torch.arange(
            columns.start - piece.kv_start, columns.stop - piece.kv_start, device=device
        )
        shown: torch.Tensor = piece.shows(q[:, None], kv)
        return shown

    def bias(self, rows: slice, columns: slice, dtype: torch.dtype) -> torch.Tensor | None:
        """The terms added to scores of these rows and columns: `[batch, heads, q, kv]` or None."""
        slopes = self.score_options.alibi_slopes
        if slopes is None:
            return None
        q = positions_at(some_of(self.q_positions, rows), slopes.device)
        kv = positions_at(some_of(self.kv_positions, columns), slopes.device)
        distance = (q[:, None] - kv).abs_().to(dtype)
        return distance * -slopes[..., None, None].to(dtype)


# The positions of a tile's rows and of its columns, by runs.
Places = tuple[tuple[range, ...], tuple[range, ...]]


class Work(NamedTuple):
    """The requirements of one direction of a call on its kernel, on this rank."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    mask: Mask
    forward: bool = True
    ring_size: int = 1  # `Program.ring_size`
    tiles: tuple[tuple[Piece, ...], ...] = ()  # the pieces of each tile
    places: Places | None = None  # where all the tiles are; None where they are at several places
    grouped: bool = False  # whether several query heads share keys and values
    partials: str = "exact"  # one of `PARTIALS`
    scores: ScoreFlags = ScoreFlags()
    v_head_dim: int = 0  # 0: head_dim
    deterministic: bool = True  # whether the same inputs must give the same bits every time

    @property
    def head_dims(self) -> tuple[int, int]:
        """The head dimension of q and k, and the one of v."""
        return self.head_dim, self.v_head_dim or self.head_dim


# The two rows of each query that `Kernel.delta` writes, as one tensor or as two.
PairOfRows: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]


class Kernel(Protocol):
    """A tile kernel. No method is called with an empty range.

    Kernels derive from this class, which does what most of them do alike.
    """

    name: str
    # Whether `backward` takes sums that hold nothing yet (`Tile.new_sums`).
    starts_sums: bool = False
    # Factor of the scores in the m of a state into which the kernel folds tiles.
    m_scale: float = 1.0

    def refuses(self, work: Work) -> str | None:
        """The first reason why the kernel cannot do this work, or None."""

    def repeatable(self, forward: bool) -> bool:
        """Whether the same inputs give the same bits every time: True, if not overridden.

        "auto" takes only kernels that say True, unless bits need not repeat (`Work`).
        """
        return True

    def writes_results(self, work: Work, tile: TileShape) -> bool:
        """Whether `forward` leaves acc, m and l of the state of a call's only tile alone.

        Arguments and default: those of `writes_gradients`.
        """
        return False

    def writes_gradients(self, work: Work, tile: TileShape) -> bool:
        """Whether `backward` can write the gradients of a call's only tile, without wider sums.

        False, if not overridden. work: with this one tile. tile: how large it is.
        """
        return False

    def remarks(self, work: Work) -> tuple[str, ...]:
        """Remarks for the user about this kernel doing this work; `explain` shows it.

        Nothing, if not overridden.
        """
        return ()

    def forward(self, qkv: QKV, tile: Tile, state: State) -> None:
        """Folds the pieces into the rows of `state` that they cover.

        Starts the state (`State.start`) before the first tile and finishes it after the last. With
        the only tile of its call, a kernel that `writes_results` may get a state whose acc is out,
        and whose m and l are lse.
        """

    def delta(self, results: Results, rows: PairOfRows, kept: Kept | None = None) -> None:
        """Writes what `backward` needs of each query to `rows`: two of `[batch, heads, q_len]`.

        rows[0] is lse, or +inf where lse is -inf. Such a row saw no key; with +inf its
        probabilities exp(score - lse), and so its gradients, are 0. rows[1] is delta = rowsum(dout
        * out) - dlse, or 0 where lse is -inf. If not overridden, torch's own operators compute it
        in the type of the sums.
        """
        out, lse, dout, dlse = results
        top, delta = rows
        top.copy_(lse)
        top.masked_fill_(top == -torch.inf, torch.inf)
        for a in range(0, dout.shape[1], _SOME_ROWS):
            some = slice(a, a + _SOME_ROWS)
            product = dout[:, some].to(delta.dtype) * out[:, some].to(delta.dtype)
            delta[:, :, some] = product.sum(-1).transpose(1, 2)
        if dlse is not None:
            delta.sub_(dlse)
            # A row that sees no key has no gradient, whatever dlse holds for it; the gradient of
            # logaddexp(-inf, -inf), for example, is NaN.
            delta.masked_fill_(top == torch.inf, 0.0)

    def backward(self, qkv: QKV, upstream: Upstream, tile: Tile, grads: Gradients) -> None:
        """Adds the gradients of the tile's pieces to the sums in `grads`.

        If it is the only tile of its call (`Tile.only`), `grads` hold nothing yet, not even zeros,
        may have the inputs' type, and are written everywhere. Only kernels that can do so
        (`writes_gradients`) get such a tile.
        """

    def decode(
        self, qkv: QKV, seen: SeenColumns, scale: float, softcap: float | None, into: Partial
    ) -> None:
        """Writes out and lse of a few queries: not folded into what `into` holds.

        seen: which columns of k and v each query sees. k and v may have any strides but the last,
        which is 1, and no columns at all. Before the first column that any query of a sequence
        sees, and after the last, they may hold anything; between the two, numbers. If not
        overridden, torch's own operators compute it in the type of the sums.
        """
        decode_plainly(qkv, seen, scale, softcap, into)

    def table_bytes(self, work: Work, places: Iterable[Places], tile: TileShape) -> int:
        """Bytes on the device of the tables by which tiles at these places are worked.

        tile: the largest of them. Tables are kept for calls to come. 0, if not overridden. Takes as
        long as making the tables.
        """
        return 0

    def scratch_bytes(self, forward: bool, dtype: torch.dtype, tile: TileShape) -> int:
        """The most memory in bytes that one call allocates for tiles of up to that shape.

        The memory that a mask of the user's own takes is a guess.
        """


def write_from_sums(grads: Gradients, add: Callable[[Gradients], object]) -> None:
    """Writes gradients of any type from sums of float32: `add` adds to these."""
    sums = Gradients(
        *(None if x is None else torch.zeros_like(x, dtype=torch.float32) for x in grads)
    )
    add(sums)
    for x, total in zip(grads, sums, strict=True):
        if x is not None and total is not None:
            x.copy_(total)


def fold(
    out: torch.Tensor,
    lse: torch.Tensor,
    state: State,
    rows: slice,
    *,
    weight: torch.Tensor | None = None,
    first: bool = False,
) -> None:
    """Folds a part into some rows of the running state, with weight exp(lse - m).

    The part is out `[batch, rows, heads, d]` and lse `[batch, heads, rows]`.

    weight: None for a normalised part. Where the part is another state's acc and m, weight is that
        state's l.
    first: whether the part is the first of these rows. It is then normalised, and overwrites what
        the state holds for the rows.
    """
    acc, m, l = state.at(rows)  # noqa: E741
    if first:
        acc.copy_(out)
        m.copy_(lse)
        l.copy_(m > -torch.inf)
        return
    # With heads last, as a CPU's lse lies in memory, and as acc takes its weights.
    m, l, lse = (x.transpose(1, 2) for x in (m, l, lse))  # noqa: E741
    m_new = torch.maximum(lse, m)
    # exp(-inf - -inf) would be NaN: such a row has seen no key.
    safe = m_new.clamp_min(torch.finfo(m_new.dtype).min)
    old, new = torch.exp(m - safe), torch.exp(lse - safe)
    acc.mul_(old.unsqueeze(-1)).addcmul_(out, new.unsqueeze(-1))
    l.mul_(old).add_(new if weight is None else new.mul_(weight.transpose(1, 2)))
    m.copy_(m_new)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that sums are kept in: float64 for float64 inputs, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def some_of(runs: tuple[range, ...], rows: slice) -> list[range]:
    """Some of the positions, counted through all runs. Runs without any of them are left out."""
    groups, first = [], 0
    for run in runs:
        part = run[max(rows.start - first, 0) : max(rows.stop - first, 0)]
        groups += [part] if part else []
        first += len(run)
    return groups
