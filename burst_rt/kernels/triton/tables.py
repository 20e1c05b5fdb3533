"""Tables of tiles on the device: what rows see, and lists of work. Made once and kept.

Tables are data that many calls use again: all layers of a model, all steps with the same mask. They
are kept by mask, positions, block sizes and device, up to a number of bytes; those used longest ago
go first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from burst_rt.kernels.base import Places, Tile
from burst_rt.kernels.decode import SeenColumns
from burst_rt.kernels.triton.configs import CELLS, COMPRESSED, takes_more
from burst_rt.planning.masks import Mask, in_place_of, positions_of
from burst_rt.planning.worklist import (
    MOST_VECTORS,
    ColumnSpans,
    WorkList,
    bounds_of,
    column_spans,
    ordered_work,
    work_list,
)

__all__ = [
    "CutOfTile", "DecodeTable", "Lists", "SpanTable", "bytes_of_tables", "cells_table", "lists_for",
    "lists_of", "ordered_lists", "positions_of_tile", "same_tables", "spans_of_tile",
    "table_of_decode",
]  # fmt: skip

# Maximum size and number of the tables that are kept, on all devices together.
_MOST_BYTES = 256 << 20
_MOST_TABLES = 8192
# Number of int32 elements to whose multiples tables are aligned, which is 16 bytes: kernels are
# compiled for such addresses.
_ALIGNED = 4

_L = TypeVar("_L", "Lists", WorkList)


class SpanTable(NamedTuple):
    """A table of the columns that the rows of a tile see."""

    bounds: torch.Tensor  # int32, `ColumnSpans.bounds` compressed where there are many; or cells
    width: int  # WIDTH of `work.py`
    host: ColumnSpans | None = None  # None for cells


class Lists(NamedTuple):
    """The work of a tile; the fields of `WorkList`, or of `OrderedWork` with its lasts as runs."""

    lines: torch.Tensor
    runs: torch.Tensor
    masked: bool
    single: bool
    by_row: int  # 1 where each batch row has lines and spans of its own, else 0


class CutOfTile(NamedTuple):
    """A kernel's cut of a tile into blocks of rows x columns."""

    blocks: tuple[int, int]
    by_columns: bool  # as `work_list` takes it
    several: tuple[int, int]  # the blocks of calls that take more registers

    def lists(self, width: int, make: Callable[[tuple[int, int]], _L]) -> Iterator[_L]:
        """The lists that are made, one or two; the last is the one to take.

        width: WIDTH of `work.py`. make: gives the list for blocks.
        """
        if takes_more(width, single=True):
            yield make(self.several)
            return
        found = make(self.blocks)
        yield found
        if not found.single and self.several != self.blocks:
            yield make(self.several)


class DecodeTable(NamedTuple):
    """A table of the columns that the rows of a decode see."""

    seen: torch.Tensor  # int32, p_seen of `decode_kernel`
    width: int  # WIDTH of `work.py`
    longest: int  # the most columns between the first and the last that a batch row sees
    by_row: int  # 1 where each batch row has spans of its own, else 0


class _Uploaded(NamedTuple):
    """Arrays on a device, and from when on they are there."""

    views: list[torch.Tensor]  # flat, int32
    whole: torch.Tensor  # the tensor of which they are views
    copied: torch.cuda.Event | None  # None on a CPU
    stream: int  # the stream of the copy


class _Kept(NamedTuple):
    """A table with its memory."""

    table: Any  # SpanTable, Lists, DecodeTable, or positions of rows and columns
    uploaded: _Uploaded

    @property
    def size_bytes(self) -> int:
        """Bytes that the table takes on its device."""
        return self.uploaded.whole.nbytes


class _Tables:
    """Tables by key. The one used longest ago is dropped first. Several threads may use it."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()
        self._size_bytes = 0
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> _Kept | None:
        """The table under a key."""
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
            return kept

    def keep(self, key: Hashable, kept: _Kept) -> None:
        """Keeps a table under a key, and drops the one that another thread may have made."""
        with self._lock:
            before = self._kept.pop(key, None)
            self._size_bytes += kept.size_bytes - (before.size_bytes if before else 0)
            self._kept[key] = kept
            while len(self._kept) > 1 and (
                self._size_bytes > _MOST_BYTES or len(self._kept) > _MOST_TABLES
            ):
                self._size_bytes -= self._kept.popitem(last=False)[1].size_bytes

    def items(self) -> list[tuple[Hashable, _Kept]]:
        """All keys and tables, the one used longest ago first."""
        with self._lock:
            return list(self._kept.items())


_tables = _Tables()


def same_tables(tile: Tile) -> Tile:
    """The tile whose tables a tile uses; the same one for as many tiles as possible."""
    q, kv = in_place_of(tile.mask, tile.q_positions, tile.kv_positions)
    return tile if kv is tile.kv_positions else tile._replace(q_positions=q, kv_positions=kv)


def spans_of_tile(tile: Tile, device: torch.device) -> SpanTable:
    """The columns that the rows of a tile see, on a device. Does not wait for the device.

    Raises InternalError if the positions of the tile's columns do not ascend.
    """

    def make() -> _Kept:
        found = column_spans(tile.mask, tile.q_positions, tile.kv_positions)
        uploaded = _upload([found.for_kernels()], device)
        (bounds,) = uploaded.views
        return _Kept(SpanTable(bounds, _width_of(found), found), uploaded)

    table: SpanTable = _kept(("spans", *_key(tile, device)), device, make)
    return table


def cells_table(cells: torch.Tensor, block_columns: int) -> SpanTable:
    """The table of cells where a mask has no spans. cells: bool `[batch, rows, columns]`."""
    batch, rows, columns = cells.shape
    padded = -(-columns // block_columns) * block_columns
    table = torch.zeros(batch, padded, rows, dtype=torch.int8, device=cells.device)
    table[:, :columns] = cells.transpose(1, 2)
    return SpanTable(table, CELLS)


def lists_of(
    tile: Tile, blocks: tuple[int, int], device: torch.device, *, by_columns: bool
) -> Lists:
    """The work of a tile in blocks of rows x columns, on a device. See `work_list`.

    Does not wait for the device.
    """

    def make() -> _Kept:
        spans = spans_of_tile(tile, device).host
        assert spans is not None
        found = work_list(spans, *blocks, by_columns=by_columns, full=tile.mask.has_spans)
        return _kept_lists(found, device)

    key = ("lists", *_key(tile, device), blocks, by_columns)
    table: Lists = _kept(key, device, make)
    return table


def lists_for(tile: Tile, cut: CutOfTile, width: int, device: torch.device) -> Lists:
    """The work of a tile in the blocks that it is cut into, on a device. See `CutOfTile.lists`.

    Does not wait for the device.
    """

    def make(blocks: tuple[int, int]) -> Lists:
        return lists_of(tile, blocks, device, by_columns=cut.by_columns)

    *_, taken = cut.lists(width, make)
    return taken


def ordered_lists(tile: Tile, blocks: tuple[int, int], device: torch.device) -> Lists | None:
    """The work of a tile for blocks of columns that take turns, on a device. See `ordered_work`.

    Does not wait for the device.
    """

    def make() -> _Kept:
        spans = spans_of_tile(tile, device).host
        assert spans is not None
        work = ordered_work(spans, *blocks)
        if work is None:
            return _Kept(None, _upload([], device))
        uploaded = _upload([work.lines, work.lasts], device)
        lines, lasts = uploaded.views
        by_row = int(len(work.lines) > 1)
        return _Kept(Lists(lines, lasts, work.masked, False, by_row), uploaded)

    table: Lists | None = _kept(("ordered", *_key(tile, device), blocks), device, make)
    return table


def positions_of_tile(tile: Tile, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The positions of a tile's rows and columns, int32, on a device. Does not wait for it."""

    def make() -> _Kept:
        sides = (tile.q_positions, tile.kv_positions)
        found = [np.concatenate([positions_of(run) for run in runs]) for runs in sides]
        uploaded = _upload([side.astype(np.int32) for side in found], device)
        rows, columns = uploaded.views
        return _Kept((rows, columns), uploaded)

    key = ("positions", tile.q_positions, tile.kv_positions, device)
    table: tuple[torch.Tensor, torch.Tensor] = _kept(key, device, make)
    return table


def table_of_decode(seen: SeenColumns, device: torch.device) -> DecodeTable:
    """The columns that the rows of a decode see, on a device: one table for all layers of a step.

    Does not wait for the device.
    """

    def make() -> _Kept:
        hulls = np.array(seen.hulls, np.int32)
        columns = seen.spans.columns(range(seen.num_columns))
        spans = ColumnSpans(bounds_of(columns), seen.num_columns)
        both = np.concatenate((hulls.reshape(-1), spans.for_kernels().reshape(-1)))
        uploaded = _upload([both], device)
        longest = int((hulls[:, 1] - hulls[:, 0]).max())
        (table,) = uploaded.views
        return _Kept(DecodeTable(table, _width_of(spans), longest, int(len(hulls) > 1)), uploaded)

    table: DecodeTable = _on_stream(seen.once(("table", device), make), device)
    return table


def bytes_of_tables(
    mask: Mask, places: Iterable[Places], cuts: Sequence[CutOfTile], *, positions: bool,
    ordered: tuple[int, int] | None = None,
) -> int:  # fmt: skip
    """Bytes of the tables of some tiles, or of parts of tiles where the mask has no spans.

    cuts: of each kernel. positions: whether there are tables of positions. ordered: the blocks of
    `ordered_lists`, if there are such.
    """
    each = set(places)
    sizes = [sum(map(len, runs)) for sides in each for runs in sides] if positions else []
    for alike in {in_place_of(mask, *sides) for sides in each}:
        sizes += _sizes_of_tables(mask, alike, cuts, ordered)
    return sum(-(-size // _ALIGNED) * _ALIGNED * np.dtype(np.int32).itemsize for size in sizes)


def _sizes_of_tables(
    mask: Mask, places: Places, cuts: Iterable[CutOfTile], ordered: tuple[int, int] | None
) -> list[int]:
    """Number of int32 elements of each table of a tile, except the tables of positions."""
    spans, whole = column_spans(mask, *places), mask.has_spans
    arrays = [spans.for_kernels()]
    if ordered and whole and spans.width == 1 and (in_turn := ordered_work(spans, *ordered)):
        arrays += [in_turn.lines, in_turn.lasts]
    for cut in cuts:

        def make(blocks: tuple[int, int], columns: bool = cut.by_columns) -> WorkList:
            return work_list(spans, *blocks, by_columns=columns, full=whole)

        for found in cut.lists(_width_of(spans) if whole else CELLS, make):
            arrays += [found.lines, found.runs]
    return [array.size for array in arrays]


def _width_of(spans: ColumnSpans) -> int:
    """WIDTH of `work.py`."""
    return spans.width if spans.width <= MOST_VECTORS else COMPRESSED


def _kept_lists(work: WorkList, device: torch.device) -> _Kept:
    uploaded = _upload([work.lines, work.runs], device)
    lines, runs = uploaded.views
    by_row = int(len(work.lines) > 1)
    return _Kept(Lists(lines, runs, work.masked, work.single, by_row), uploaded)


def _key(tile: Tile, device: torch.device) -> tuple[Hashable, ...]:
    return tile.mask, tile.q_positions, tile.kv_positions, device


def _kept(key: Hashable, device: torch.device, make: Callable[[], _Kept]) -> Any:
    """The table under a key, made where there is none, for kernels of the current stream."""
    kept = _tables.get(key)
    if kept is None:
        kept = make()
        _tables.keep(key, kept)
    return _on_stream(kept, device)


def _on_stream(kept: _Kept, device: torch.device) -> Any:
    """The table, once the current stream waits for its copy."""
    _, whole, copied, copied_on = kept.uploaded
    if copied is not None:
        stream = torch.cuda.current_stream(device)
        if stream.cuda_stream != copied_on:
            stream.wait_event(copied)
            # The memory is not given to others while kernels of this stream may read it.
            whole.record_stream(stream)
    return kept.table


def _upload(
    arrays: Sequence[np.ndarray[Any, np.dtype[np.int32]]], device: torch.device
) -> _Uploaded:
    """Copies arrays to a device in one go. Does not wait for the device."""
    starts, size = [], 0
    for array in arrays:
        starts.append(size)
        size += -(-array.size // _ALIGNED) * _ALIGNED
    packed = np.zeros(size, np.int32)
    for start, array in zip(starts, arrays, strict=True):
        packed[start : start + array.size] = array.reshape(-1)
    whole, copied, stream = torch.from_numpy(packed), None, 0
    if device.type == "cuda":
        # From pinned memory, which torch keeps until the copy is done, the host need not wait.
        whole = whole.pin_memory().to(device, non_blocking=True)
        current = torch.cuda.current_stream(device)
        copied, stream = current.record_event(), current.cuda_stream
    views = [whole[a : a + x.size] for a, x in zip(starts, arrays, strict=True)]
    return _Uploaded(views, whole, copied, stream)
