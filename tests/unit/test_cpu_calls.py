"""Which calls of the fused kernel a tile becomes: all that is seen, each cell once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from covering import drawn
from hypothesis import strategies as st

from burst_rt import Causal
from burst_rt.kernels.cpu_calls import KernelCall, PartSize, kernel_calls
from burst_rt.planning.masks import Piece, Shape
from burst_rt.planning.masks.pieces import split
from burst_rt.planning.masks.spans import Spans


def _cells(shape: Shape, rows: int, columns: int, step: int = 0) -> torch.Tensor:
    box = torch.ones(rows, columns, dtype=torch.bool)
    if shape is Shape.STAIRS:
        level = torch.arange(max(rows, columns)) // step
        return level[:columns] <= level[:rows, None]
    if shape is Shape.BAND:
        return box.triu().tril(columns - rows)
    return {Shape.RECTANGLE: box, Shape.LOWER: box.tril(), Shape.UPPER: box.triu()}[shape]


@st.composite
def _piece(draw: st.DrawFn) -> Piece:
    """A piece of any shape but the mask's own, at any place."""
    shape = draw(st.sampled_from([shape for shape in Shape if shape is not Shape.MASKED]))
    rows, extra = draw(st.integers(1, 90)), draw(st.integers(0, 60))
    step = draw(st.integers(1, 20)) if shape is Shape.STAIRS else 0
    if shape is Shape.STAIRS:
        rows = step * draw(st.integers(2, 7))
    columns = {Shape.RECTANGLE: extra + 1, Shape.BAND: rows + extra}.get(shape, rows)
    if shape is Shape.LOWER:
        rows += extra
    top, left = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    box = (top, top + rows, left, left + columns)
    return Piece(*box, shape, 0, step)


def _cells_of(call: KernelCall) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    for one in call.block_by_block():
        rows, columns = (x.stop - x.start for x in (one.rows, one.columns))
        yield one.rows, one.columns, _cells(one.shape, rows, columns)


@drawn(
    300,
    1000,
    _piece(),
    st.builds(
        PartSize,
        st.sampled_from([7, 32, 1000]),
        st.sampled_from([5, 64, 1000]),
        st.just(1),
        edge=st.sampled_from([0, 1, 4, 8]),
        largest=st.sampled_from([0, 40, 1000]),
        strips=st.booleans(),
    ),
    st.booleans(),
    st.sampled_from([3, 64]),
)
def test_calls_are_what_is_seen_each_once(
    piece: Piece, part: PartSize, batched: bool, strip: int
) -> None:
    truth = torch.zeros(200, 200, dtype=torch.int64)
    truth[piece.rows, piece.columns] += _cells(
        piece.shape, piece.q_stop - piece.q_start, piece.kv_stop - piece.kv_start, piece.step
    )
    found = torch.zeros_like(truth)
    begun = torch.zeros(200, dtype=torch.bool)  # rows that a call has had
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("burst_rt.kernels.cpu_calls.STRIP", strip)
        parts = kernel_calls.__wrapped__(
            (piece,), part, batched
        )  # kept ones may be of other strips
        found_calls = [(rows, call) for rows, calls in parts for call in calls]
    for rows, one in found_calls:
        assert batched or one.num_blocks == 1
        blocks = [*_cells_of(one)]
        here = torch.zeros(200, dtype=torch.int64)
        for some, columns, cells in blocks:
            assert rows.start <= some.start < some.stop <= rows.stop
            found[some, columns] += cells
            here[some] += 1
        # Blocks of a call share no rows, and columns only where the call says so.
        assert here.max() == 1
        shared = torch.zeros(200, dtype=torch.int64)
        for _, columns, _ in blocks:
            shared[columns] += 1
        assert one.overlaps or shared.max() == 1
        assert bool((begun[here > 0] != one.first).all())
        begun |= here > 0
    assert found.equal(truth)
    assert begun.equal(truth.any(1))


@drawn(40, 100,
    step=st.integers(64, 130), rows=st.integers(1, 900), ahead=st.integers(-100, 300),
    begun=st.integers(0, 63), first=st.sampled_from([0, 17]), most=st.sampled_from([300, 2000]),
)  # fmt: skip
def test_stairs_are_found_and_hold_what_is_seen(
    step: int, rows: int, ahead: int, begun: int, first: int, most: int
) -> None:
    """Rows that see whole blocks of columns, as between two ranks of a cache."""
    stops = ((np.arange(rows) + begun) // step * step + ahead).clip(first, most)
    starts = np.full_like(stops, first)
    truth = torch.arange(2000) < torch.from_numpy(stops)[:, None]
    truth &= torch.arange(2000) >= first
    found = torch.zeros(rows, 2000, dtype=torch.int64)
    pieces = split(Spans(starts[None, :, None], stops[None, :, None]))
    for piece in pieces:
        row = torch.arange(piece.q_stop - piece.q_start)[:, None]
        column = torch.arange(piece.kv_stop - piece.kv_start)
        cells = (
            truth[piece.rows, piece.columns]
            if piece.shape is Shape.MASKED
            else piece.shows(row, column)
        )
        found[piece.rows, piece.columns] += cells
        if piece.shape is Shape.STAIRS:
            assert piece.num_cells == int(cells.sum())
            levels = sum(level.num_cells for level in piece.levels())
            assert levels == piece.num_cells
    assert found.equal(truth.long())
    whole_levels = (rows + begun) // step - (begun > 0)
    if whole_levels > 2 and ahead >= first and most == 2000:
        assert any(piece.step == step for piece in pieces)


def test_alike_blocks_are_one_call() -> None:
    """The picture in the module's text, with 1 row a small triangle; and a causal document of 1,000
    rows.
    """
    for size, edge, expected in ((4, 1, [4, 2, 1]), (1000, 128, [7, 1, 3, 1, 1, 1, 1])):
        (piece,) = Causal().pieces(range(size), range(size))
        ((_, calls),) = kernel_calls((piece,), PartSize(4096, 4096, 1, edge, largest=1024), True)
        assert [call.num_blocks for call in calls] == expected
