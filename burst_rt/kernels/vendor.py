"""What kernels of others have in common that give their results in the inputs' 16 bits.

Where a single call is all there is (a world of one, one rectangle or one square under the
diagonal), this is the rounding that every result has at its end, and nothing is lost. Where the
results of several calls are added up, each is rounded before it is added; that is done only where
the user has said partials="16bit".
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from burst_rt.kernels.base import (
    QKV,
    Gradients,
    Kept,
    Kernel,
    PairOfRows,
    Places,
    Results,
    State,
    Tile,
    Upstream,
    Work,
    fold,
    write_from_sums,
)
from burst_rt.kernels.triton import TritonKernel
from burst_rt.planning.masks import Full, Mask, Piece, Shape
from burst_rt.planning.problem import TileShape

__all__ = [
    "PartOfTile", "VendorKernel", "calls_of_pieces", "most_calls", "refuses_partials",
    "remarks_on_partials",
]  # fmt: skip

_own = TritonKernel()

# Number of bytes that these kernels load at a time: tensors with another start or step are copied
# first.
_ALIGNED_BYTES = 16


class PartOfTile(NamedTuple):
    """The part of a tile that one call of a vendor's kernel computes.

    Row i of m sees the columns from i + n - m - left to i + n - m + right, n of them in all, as
    FlashAttention counts them.
    """

    rows: slice
    columns: slice
    left: int | None = None  # None: no bound
    right: int | None = None
    # Where sequences end that do not see each other, in each batch row, or in all alike. Rows and
    # columns are alike. (): there is one sequence.
    ends: tuple[tuple[int, ...], ...] = ()


class VendorKernel(Kernel):
    """The base of kernels that give their result in the inputs' 16 bits."""

    name: str
    # The kind of device that tensors must be on; tests with doubles of the vendors' functions set
    # another.
    device_type = "cuda"

    def refuses(self, work: Work) -> str | None:
        """See `Kernel.refuses`."""
        if work.device.type != self.device_type:
            return (
                f"the {self.name} kernel takes {self.device_type.upper()} tensors, got "
                f"{work.device}"
            )
        if work.dtype not in (torch.bfloat16, torch.float16):
            return f"the {self.name} kernel takes bfloat16 and float16, got {work.dtype}"
        reason = self._other_inputs(work) or self._missing(work.device)
        return reason or refuses_partials(self.name, work, self._most_calls(work))

    def calls(
        self, pieces: tuple[Piece, ...], mask: Mask, places: Places | None
    ) -> Sequence[PartOfTile]:
        """The calls that compute a tile. places: of its rows and columns, if they are known."""
        return calls_of_pieces(pieces)

    def _most_calls(self, work: Work) -> int:
        return most_calls(self.calls(pieces, work.mask, work.places) for pieces in work.tiles)

    def writes_results(self, work: Work, tile: TileShape) -> bool:
        """See `Kernel.writes_results`: where a single call does all of the tile."""
        (pieces,) = work.tiles
        rows = [call.rows for call in self.calls(pieces, work.mask, work.places)]
        return not work.scores.sinks and rows == [slice(0, tile.q_len)]

    def writes_gradients(self, work: Work, tile: TileShape) -> bool:
        """See `Kernel.writes_gradients`: where a single call does all of the tile."""
        (pieces,) = work.tiles
        calls = self.calls(pieces, work.mask, work.places)
        return _covers(calls, tile.q_len, tile.kv_len)

    def remarks(self, work: Work) -> tuple[str, ...]:
        """See `Kernel.remarks`: whether partials are in 16 bits; whether results are repeatable."""
        remarks = remarks_on_partials(work, self._most_calls(work))
        if not self._repeats(work):
            remarks += ("its sums differ in the last bits from run to run",)
        return remarks

    def _repeats(self, work: Work) -> bool:
        """Whether the work is done with the same bits every time."""
        return self.repeatable(work.forward)

    def forward(self, qkv: QKV, tile: Tile, state: State) -> None:
        """See `Kernel.forward`."""
        calls = self._calls_of_tile(tile)
        alone = tile.first and tile.last and tile.score_options.sinks is None
        if alone and [call.rows for call in calls] == [slice(0, qkv.q.shape[1])]:
            # Nothing is added up: the call's result is the tile's result.
            out, lse = self._call_forward(_part(qkv, calls[0]), calls[0], tile, state)
            if out is not state.out:
                state.out.copy_(out)
                state.lse.copy_(lse)
        else:
            if tile.first:
                state.start(tile.score_options.sinks)
            for call in calls:
                part = self._call_forward(_part(qkv, call), call, tile, None)
                fold(*part, state, call.rows)
            if tile.last:
                state.finish()
        tile.progress()

    def delta(self, results: Results, rows: PairOfRows, kept: Kept | None = None) -> None:
        """See `Kernel.delta`: by the project's own kernel, where torch has many to launch."""
        dout = results.dout
        if _has_own_delta(dout.device, dout.dtype, dout.shape[3]):
            _own.delta(results, rows, kept)
        else:
            super().delta(results, rows, kept)

    def backward(self, qkv: QKV, upstream: Upstream, tile: Tile, grads: Gradients) -> None:
        """See `Kernel.backward`."""
        upstream = self._taken(upstream)
        calls = self._calls_of_tile(tile)
        writes = tile.only and _covers(calls, qkv.q.shape[1], qkv.k.shape[1])

        def run(into: Gradients) -> None:
            for call in calls:
                rows, columns = call.rows, call.columns
                rows_in = Upstream(
                    _aligned(upstream.dout[:, rows]),
                    upstream.lse[:, :, rows].contiguous(),
                    upstream.delta[:, :, rows],
                    None if upstream.out is None else _aligned(upstream.out[:, rows]),
                )
                whole = into if writes else None
                made = self._call_backward(_part(qkv, call), rows_in, call, tile, whole)
                for x, at, grad in zip(into, (rows, columns, columns), made, strict=True):
                    if x is None or grad is x:
                        continue
                    if writes:
                        x.copy_(grad)
                    else:
                        x[:, at].add_(grad)

        if tile.only and not writes:
            write_from_sums(grads, run)
        else:
            run(grads)
        tile.progress()

    def scratch_bytes(self, forward: bool, dtype: torch.dtype, tile: TileShape) -> int:
        """See `Kernel.scratch_bytes`. It grows with the tile.

        It counts copies of inputs that are not aligned and a part's results. The backward also
        counts the stand-in for O with the temporaries that make it, and what FlashAttention takes
        for itself: the float32 dq, and the dk, dv of every query head. The sum has not been
        measured yet.
        """
        token = tile.batch * tile.head_dim * dtype.itemsize
        q, kv = token * tile.q_len * tile.num_heads, token * tile.kv_len * tile.num_kv_heads
        if forward:
            return 2 * q + 2 * kv
        of_all_heads = (
            token * tile.kv_len * tile.num_heads if tile.num_heads > tile.num_kv_heads else 0
        )
        return 2 * q + 2 * kv + 4 * q + q + 2 * kv + 4 * q // dtype.itemsize + 2 * of_all_heads

    def _calls_of_tile(self, tile: Tile) -> Sequence[PartOfTile]:
        """The tile's calls; kept with the plan."""
        calls: Sequence[PartOfTile] | None = tile.kept and tile.kept.entries.get("calls")
        if calls is None:
            calls = self.calls(tile.pieces, tile.mask, (tile.q_positions, tile.kv_positions))
            if tile.kept is not None:
                tile.kept.entries["calls"] = calls
        return calls

    def _other_inputs(self, work: Work) -> str | None:
        """Why the kernel has not the scores, the head_dims or the pieces of some work, or None."""
        raise NotImplementedError

    def _missing(self, device: torch.device) -> str | None:
        """Why the kernel cannot run here, or None."""
        raise NotImplementedError

    def _taken(self, upstream: Upstream) -> Upstream:
        """Upstream as `_call_backward` takes it."""
        return upstream

    def _call_forward(
        self, qkv: QKV, call: PartOfTile, tile: Tile, into: State | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """out `[batch, q, heads, d]` in 16 bits and lse `[batch, heads, q]` of one call.

        into: if given, its out and lse may be written and returned.
        """
        raise NotImplementedError

    def _call_backward(
        self, qkv: QKV, upstream: Upstream, call: PartOfTile, tile: Tile, into: Gradients | None
    ) -> Sequence[torch.Tensor]:
        """dq, dk and dv of one call, shaped like q, k and v.

        into: if given, its tensors may be written and returned.
        """
        raise NotImplementedError


def calls_of_pieces(pieces: tuple[Piece, ...]) -> list[PartOfTile]:
    """The pieces as rectangles, and squares under the diagonal. Stairs are rectangles.

    Where a triangle has more rows than columns, the rows below its square see all columns.
    """
    calls: list[PartOfTile] = []
    for piece in pieces:
        rows, columns = piece.rows, piece.columns
        if piece.shape is Shape.STAIRS:
            calls += calls_of_pieces(tuple(piece.levels()))
            continue
        if piece.shape is Shape.RECTANGLE:
            calls.append(PartOfTile(rows, columns))
            continue
        size = min(rows.stop - rows.start, columns.stop - columns.start)
        # Vendors align the diagonal of a part that is not square at different corners.
        square = slice(rows.start, rows.start + size), slice(columns.start, columns.start + size)
        calls.append(PartOfTile(*square, right=0))
        if rows.start + size < rows.stop:
            calls.append(PartOfTile(slice(rows.start + size, rows.stop), columns))
    return calls


def _covers(calls: Sequence[PartOfTile], q_len: int, kv_len: int) -> bool:
    """Whether a single call does all rows and columns of a tile."""
    whole = slice(0, q_len), slice(0, kv_len)
    return [(call.rows, call.columns) for call in calls] == [whole]


def most_calls(tiles: Iterable[Sequence[PartOfTile]]) -> int:
    """The most calls that compute one tile. Tiles of a rank alone are of different heads."""
    return max(map(len, tiles), default=0)


def refuses_partials(name: str, work: Work, num_calls: int) -> str | None:
    """Why a kernel that gives the results of its calls in 16 bits may not do this work, or None.

    num_calls: the most calls for one tile.
    """
    if work.partials != "exact" or _whole(work, num_calls):
        return None
    return (
        f"the {name} kernel rounds each partial result to {_bare(work.dtype)}, and here "
        f"{'sinks' if _sunk(work) else 'several partial results'} are added up; "
        "burst_rt.init(partials='16bit') allows that"
    )


def remarks_on_partials(work: Work, num_calls: int) -> tuple[str, ...]:
    """The remark of such a kernel (`Kernel.remarks`) if it rounds partial results."""
    if _whole(work, num_calls):
        return ()
    return (f"partials are 16-bit: each partial result is rounded to {_bare(work.dtype)}",)


def _whole(work: Work, num_calls: int) -> bool:
    """Whether single calls do all the work, so that nothing is added up."""
    return not _sunk(work) and work.ring_size == 1 and num_calls == 1


def _sunk(work: Work) -> bool:
    """Whether sinks are added to what a call returns; in the backward they are in lse."""
    return work.forward and work.scores.sinks


@functools.cache
def _has_own_delta(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    return _own.refuses(Work(device, dtype, head_dim, Full())) is None


def _part(qkv: QKV, call: PartOfTile) -> QKV:
    """A call's part of a tile's inputs."""
    q, k, v = qkv
    columns = call.columns
    return QKV(_aligned(q[:, call.rows]), _aligned(k[:, columns]), _aligned(v[:, columns]))


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x, copied unless it begins and steps at multiples of 16 bytes."""
    step = _ALIGNED_BYTES // x.itemsize
    if x.data_ptr() % _ALIGNED_BYTES or any(stride % step for stride in x.stride()[:-1]):
        x = x.clone(memory_format=torch.contiguous_format)
    return x


def _bare(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
