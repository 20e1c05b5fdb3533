"""Spans of columns and lists of work against tables of booleans from plain loops, for drawn masks,
layouts and block sizes.
"""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from mask_truths import MASKS, Sizes, truth_of

from burst_rt import (
    BlockSparse,
    Causal,
    Chunked,
    Documents,
    First,
    Full,
    Mask,
    Prefix,
    SlidingWindow,
)
from burst_rt.errors import InternalError
from burst_rt.planning.layouts import KINDS, make_layout
from burst_rt.planning.masks import Positions, Spans, in_place_of
from burst_rt.planning.masks.spans import END, one_span
from burst_rt.planning.worklist import (
    MOST_VECTORS,
    ColumnSpans,
    WorkList,
    _compressed,
    column_spans,
    ordered_work,
    work_list,
)

_EMPTY, _FULL, _PARTIAL = 0, 1, 2


class _Tile(NamedTuple):
    """A drawn tile, and its cells as booleans `[batch, rows, columns]`."""

    spans: ColumnSpans
    cells: torch.Tensor
    told: str


def _drawn(seed: int) -> _Tile:
    """Two masks together or one, for rows of one rank and columns of another."""
    rng = random.Random(seed)
    kv_len = rng.choice((5, 16, 27))
    sizes = Sizes(rng.choice((kv_len, kv_len, max(1, kv_len - 7), kv_len + 4)), kv_len, 3)
    name, other = rng.choice(list(MASKS)), rng.choice(list(MASKS))
    truth, truths = truth_of(name, sizes), truth_of(other, sizes)
    if truth is None or truths is None:
        return _drawn(seed + 1000)
    mask, second = MASKS[name].mask(sizes), MASKS[other].mask(sizes)
    how = rng.choice(("", "&", "|"))
    if how == "|":
        mask, truth = mask | second, truth | truths
    # Where queries stand elsewhere for one of two masks, `&` is another mask than both.
    elif how == "&" and mask.mover is None and second.mover is None:
        mask, truth = mask & second, truth & truths
    world = rng.choice((1, 2, 3))
    q_runs, kv_runs = (
        rng.choice((_runs_of_a_rank, _some_runs))(rng, length, world)
        for length in (sizes.q_len, sizes.kv_len)
    )
    # The whole side, or a block of it, as it travels.
    q, kv = (rng.choice((runs, *((run,) for run in runs))) for runs in (q_runs, kv_runs))
    if not any(map(len, q)) or not any(map(len, kv)):
        return _drawn(seed + 1000)
    shift = sizes.kv_len - sizes.q_len
    positions = tuple(range(run.start + shift, run.stop + shift, run.step) for run in q)
    rows, columns = ([i for run in side for i in run] for side in (q, kv))
    told = f"{mask!r}, {sizes}, rows {q}, columns {kv}"
    spans = column_spans(mask.bound(*sizes[:2]), positions, kv)
    return _Tile(spans, truth[:, rows][:, :, columns], told)


def _runs_of_a_rank(rng: random.Random, length: int, world: int) -> tuple[range, ...]:
    return make_layout(rng.choice(sorted(KINDS)), length, world).runs[rng.randrange(world)]


def _some_runs(rng: random.Random, length: int, world: int) -> tuple[range, ...]:
    """Up to six runs, as a balanced layout may have, some of them with steps."""
    edges = [0, *sorted(rng.choices(range(length + 1), k=6)), length]
    runs = [range(a, b, rng.choice((1, 1, 2))) for a, b in pairwise(edges)]
    return tuple(rng.sample(runs, 1) if world == 1 else filter(lambda _: rng.random() < 0.8, runs))


def _cells(spans: ColumnSpans) -> torch.Tensor:
    columns = np.arange(spans.num_columns)
    starts, stops = (spans.bounds[:, side, :, :, None] for side in (0, 1))
    seen = (starts <= columns) & (columns < stops)
    assert seen.sum(1).max(initial=0) <= 1, "spans of a row overlap"
    return torch.from_numpy(seen.any(1))


def _cells_of_lists(spans: ColumnSpans) -> torch.Tensor:
    """The cells of what kernels get of many spans a row."""
    batch, _, _, rows = spans.bounds.shape
    found = _compressed(spans.bounds)
    assert found.dtype == np.int32
    if spans.width > MOST_VECTORS:
        assert np.array_equal(spans.for_kernels(), found)
    cells = torch.zeros(batch, rows, spans.num_columns, dtype=torch.bool)
    for b, row in np.ndindex(batch, rows):
        own = found[b * rows :]
        first, last = own[row]
        assert (own[first:last, 1] > own[first:last, 0]).all()
        assert (own[first + 1 : last, 0] >= own[first : last - 1, 1]).all()
        for start, stop in own[first:last]:
            cells[b, row, start:stop] = True
    return cells


def _listed(found: WorkList, batch: int, across: int) -> torch.Tensor:
    """Every line's blocks: int `[batch, lines, blocks]`."""
    blocks = torch.zeros(batch, found.lines.shape[1], across, dtype=torch.int64)
    for row in range(batch):
        lines = found.lines[row % len(found.lines)]
        assert sorted(lines[:, 0]) == list(range(len(lines)))
        for number, whole, cut, end in lines:
            for run in range(whole, end):
                first, last = found.runs[run]
                assert 0 <= first < last <= across
                assert not blocks[row, number, first:last].any(), "a block stands in two runs"
                blocks[row, number, first:last] = _FULL if run < cut else _PARTIAL
    return blocks


def _expected(spans: ColumnSpans, cells: torch.Tensor, m: int, n: int) -> torch.Tensor:
    """Blocks by their cells, one after the other."""
    starts, stops = spans.bounds[:, 0], spans.bounds[:, 1]
    batch, rows, columns = cells.shape
    found = torch.zeros(batch, -(-rows // m), -(-columns // n), dtype=torch.int64)
    for b, i, j in np.ndindex(*found.shape):
        block = cells[b, i * m : (i + 1) * m, j * n : (j + 1) * n]
        at = (b % len(starts), slice(None), slice(i * m, (i + 1) * m))
        by_one = ((starts[at] <= j * n) & (stops[at] >= (j + 1) * n)).any(0).all()
        found[b, i, j] = (_FULL if by_one else _PARTIAL) if block.any() else _EMPTY
        assert not by_one or (block.all() and block.shape[1] == n)
    return found


@pytest.mark.parametrize("seed", range(100))
def test_spans_and_lists_are_what_the_cells_say(seed: int) -> None:
    tile = _drawn(seed)
    rng = random.Random(seed)
    seen = _cells(tile.spans).expand(tile.cells.shape)
    assert torch.equal(seen, tile.cells), tile.told
    assert tile.spans.bounds.dtype == np.int32
    width = tile.spans.width
    assert width in (1, 2, 4) or width > MOST_VECTORS
    assert torch.equal(_cells_of_lists(tile.spans).expand(tile.cells.shape), tile.cells), tile.told
    m, n = rng.choice((1, 2, 4, 7, 16)), rng.choice((1, 2, 4, 7, 16))
    expected = _expected(tile.spans, tile.cells, m, n)
    for by_columns in (False, True):
        found = work_list(tile.spans, m, n, by_columns=by_columns)
        blocks = expected.transpose(1, 2) if by_columns else expected
        assert torch.equal(_listed(found, len(expected), blocks.shape[2]), blocks), tile.told
        assert found.masked == bool((expected == _PARTIAL).any())
        assert found.lines.dtype == found.runs.dtype == np.int32
        for row, lines in enumerate(found.lines):
            work = (blocks[row][lines[:, 0]] > 0).sum(-1).tolist()
            assert work == sorted(work, reverse=True)
        assert found.single == bool(np.diff(found.lines[..., 1:]).max() <= 1)
        cut = work_list(tile.spans, m, n, by_columns=by_columns, full=False)
        assert torch.equal(
            _listed(cut, len(expected), blocks.shape[2]), torch.where(blocks > 0, _PARTIAL, 0)
        )


def test_the_worked_example() -> None:
    found = work_list(column_spans(Causal(), (range(5),), (range(5),)), 2, 2)
    assert found.lines.tolist() == [[[2, 0, 1, 2], [1, 2, 3, 4], [0, 4, 4, 5]]]
    assert found.runs.tolist() == [[0, 2], [2, 3], [0, 1], [1, 2], [0, 1], [0, 0]]


@pytest.mark.parametrize("seed", range(100))
def test_ordered_work_is_what_the_cells_say(seed: int) -> None:
    tile = _drawn(seed)
    rng = random.Random(seed)
    m, n = rng.choice((1, 2, 4, 7, 16)), rng.choice((1, 2, 4, 7, 16))
    expected = _expected(tile.spans, tile.cells, m, n)
    found = ordered_work(tile.spans, m, n)
    gaps = [
        bool((np.diff(np.flatnonzero(line)) > 1).any())
        for batch in expected
        for line in (*batch, *batch.T)
    ]
    assert (found is None) == any(gaps), tile.told
    if found is None:
        return
    assert found.lines.dtype == found.lasts.dtype == np.int32
    partial = False
    for row, blocks in enumerate(expected):
        lines, lasts = (x[row % len(x)] for x in (found.lines, found.lasts))
        for column, (first, whole, cut, end) in enumerate(lines):
            seen = np.flatnonzero(blocks[:, column])
            assert seen.tolist() == list(range(first, end)), tile.told
            full = blocks[:, column] == _FULL
            assert full[whole:cut].all(), tile.told
            # No longer run is full, where all that are not in this one are compared.
            runs = "".join("1" if each else "0" for each in full).split("0")
            assert cut - whole == max(map(len, runs)), tile.told
            partial |= (first, end) != (whole, cut)
        for number, last in enumerate(lasts):
            seen = np.flatnonzero(blocks[number])
            assert last == (seen[-1] if len(seen) else -1), tile.told
    assert found.masked == partial


def test_the_worked_example_of_ordered_work() -> None:
    found = ordered_work(column_spans(Causal(), (range(5),), (range(5),)), 2, 2)
    assert found is not None
    assert found.lines.tolist() == [[[0, 1, 3, 3], [1, 2, 3, 3], [2, 2, 2, 3]]]
    assert found.lasts.tolist() == [[0, 1, 2]]


def test_rows_that_see_the_same_share_their_spans() -> None:
    """The worked example of `_compressed`; then a table of blocks for a thousand times as many."""
    bounds = np.array([[[[0, 0, 3], [5, 5, 0]], [[2, 2, 4], [6, 6, 0]]]], np.int32)
    found = _compressed(bounds)
    assert found.tolist() == [[3, 5], [3, 5], [5, 6], [0, 2], [5, 6], [3, 4]]
    mask = BlockSparse(np.random.default_rng(0).random((16, 128)) < 0.3, 64)
    spans = column_spans(mask, (range(1024),), (range(8192),))
    assert spans.width > 16
    assert len(spans.for_kernels()) <= 1024 + 16 * spans.width


def test_lengths_that_blocks_divide_have_nothing_to_compare() -> None:
    found = work_list(column_spans(Full(), (range(7),), (range(8),)), 4, 4)
    assert not found.masked
    assert found.lines.tolist() == [[[0, 0, 1, 1], [1, 1, 2, 2]]]
    assert found.runs.tolist() == [[0, 2], [0, 2], [0, 0]]


def test_what_is_not_seen_is_in_no_list() -> None:
    spans = column_spans(Causal(), (range(4),), (range(9, 12),))
    assert spans.width == 1
    found = work_list(spans, 2, 2)
    assert found.lines.tolist() == [[[0, 0, 0, 0], [1, 0, 0, 0]]]
    assert found.runs.tolist() == [[0, 0]]
    assert found.single


def test_spans_that_miss_the_tile_take_no_place() -> None:
    """Eight spans a row, of which a tile of two blocks holds one."""
    mask = BlockSparse([[True, False] * 8] * 16, 4)
    assert column_spans(mask, (range(64),), (range(64),)).width == 8
    assert column_spans(mask, (range(64),), (range(8, 16),)).width == 1
    assert column_spans(mask, (range(64),), (range(5, 64, 8), range(64, 64))).width == 1


def test_a_large_table_of_blocks_is_counted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = column_spans(SlidingWindow(9), (range(50),), (range(50),))
    whole = [work_list(spans, 4, 2, by_columns=by) for by in (False, True)]
    monkeypatch.setattr("burst_rt.planning.worklist._SOME_BLOCKS", 60)
    for by_columns, expected in zip((False, True), whole, strict=True):
        found = work_list(spans, 4, 2, by_columns=by_columns)
        assert np.array_equal(found.lines, expected.lines)
        assert np.array_equal(found.runs, expected.runs)


@pytest.mark.parametrize(
    "columns", [(range(9, -1, -1),), (range(5), range(4, 9)), (range(5, 9), range(5))]
)
def test_columns_that_do_not_ascend_are_an_internal_error(columns: tuple[range, ...]) -> None:
    mask: Mask = Causal()
    with pytest.raises(InternalError, match="columns must stand at ascending positions"):
        column_spans(mask, (range(4),), columns)


def _of_step(step: int) -> list[Mask]:
    """Masks whose numbers are multiples of a step, or nearly; for 24 queries and 30 keys."""
    rng = np.random.default_rng(step)
    found: list[Mask] = [Full(), Causal(), SlidingWindow(-1, -1), Prefix((step, 3 * step))]
    for number in (2 * step, 2 * step - 1):
        table = rng.random((-(-24 // number), -(-30 // number))) < 0.5
        found += [
            First(number), Chunked(number), SlidingWindow(number), SlidingWindow(number, step),
            SlidingWindow(number, 1), BlockSparse(table, number).bound(24, 30),
            Prefix(number), Documents([number, 30 - number]),
        ]  # fmt: skip
    return found + [Causal() & mask for mask in found] + [found[4] | found[5]]


@pytest.mark.parametrize("step", [2, 3, 6])
def test_positions_that_stand_for_others_show_the_same(step: int) -> None:
    moved = set()
    for mask in _of_step(step):
        for of_q, of_kv in np.ndindex(step, step):
            q = (range(6 + of_q, 18, step), range(18 + of_q, 30, step))
            kv = (range(of_kv, 30, step),)
            places = in_place_of(mask, q, kv)
            there, here = column_spans(mask, *places), column_spans(mask, q, kv)
            assert np.array_equal(there.bounds, here.bounds), (mask, q, kv)
            if places != (q, kv):
                moved.add(mask)
    assert len(moved) == 19  # those whose numbers are multiples, alone and with `Causal`


class _Odd(Causal):
    """Every other key, up to the query."""

    def spans(self, q: Positions) -> Spans:
        keys = np.arange(1, 64, 2)
        starts = np.where(keys <= q[:, None], keys, END)[None]
        return Spans(starts, np.where(starts == END, END, starts + 1))


class _Near(Causal):
    """The keys beside the query, said without spans."""

    def allows(self, q_position: Any, kv_position: Any) -> Any:  # ints or tensors
        return abs(q_position - kv_position) <= 1

    def outline(self, q: Positions) -> Spans:
        return one_span(q - 1, q + 2, like=q)


def test_a_subclass_that_sees_otherwise_has_no_period() -> None:
    q, kv = (range(3, 64, 4),), (range(2, 64, 4),)
    assert in_place_of(_Near(), q, kv) == (q, kv)
    assert in_place_of(Causal(), q, kv) != (q, kv)
    assert in_place_of(_Odd(), q, kv) == (q, kv)
    assert in_place_of(_Odd() | First(4), q, kv) == (q, kv)


@pytest.mark.parametrize("name", MASKS)
def test_the_spans_of_a_row_are_in_order(name: str) -> None:
    """Hopper's forward hides what lies between a span and the next."""
    sizes = Sizes(60, 60, 2)
    for rows in ((range(60),), (range(10), range(50, 60)), (range(1, 60, 4),)):
        bounds = column_spans(MASKS[name].mask(sizes), rows, rows).bounds
        starts, stops = bounds[:, 0], bounds[:, 1]
        filled = starts < stops
        assert (filled[:, :-1] | ~filled[:, 1:]).all()  # empty spans come last
        assert (stops[:, :-1] <= starts[:, 1:])[filled[:, 1:]].all()
