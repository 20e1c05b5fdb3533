"""Masks that are spans: each against plain loops, `&` and `|` against booleans, and bad ones."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from covering import drawn
from hypothesis import strategies as st
from mask_truths import MASKS, Sizes, cells_of, truth_of

from burst_rt import (
    BlockSparse,
    Causal,
    Chunked,
    Context,
    Documents,
    First,
    Full,
    Mask,
    Prefix,
    SlidingWindow,
    Spans,
    burst_attention,
    run_local,
)
from burst_rt.attention.mask_check import check_mask
from burst_rt.errors import InputError
from burst_rt.planning.masks import Piece, Relation, Shape, pieces, spans_of
from burst_rt.planning.masks.spans import END

_SIZES = [Sizes(24, 24, 1), Sizes(40, 40, 3), Sizes(17, 33, 2), Sizes(33, 17, 1), Sizes(1, 6, 1)]


@pytest.mark.parametrize("sizes", _SIZES, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_what_it_says(name: str, sizes: Sizes) -> None:
    truth = truth_of(name, sizes)
    mask = MASKS[name].mask(sizes)
    if truth is None:
        assert mask.refuses(*sizes)
        return
    assert mask.refuses(*sizes) is None
    assert cells_of(mask, sizes).equal(truth)
    bound, shift = mask.bound(sizes.q_len, sizes.kv_len), sizes.kv_len - sizes.q_len
    chance = np.random.default_rng(0)
    for _ in range(60):
        q, kv = (
            range(sizes_len)[chance.integers(sizes_len) :: chance.integers(1, 4)][
                : chance.integers(1, 12)
            ]
            for sizes_len in (sizes.q_len, sizes.kv_len)
        )
        part = truth[:, list(q)][:, :, list(kv)]
        at = range(q.start + shift, q.stop + shift, q.step)
        relation = bound.relation(at, kv)
        assert relation is not Relation.EMPTY or not part.any(), (q, kv)
        assert relation is not Relation.FULL or part.all(), (q, kv)
        cells = -(-int(part.sum()) // len(part)) if bound.batch > 1 else int(part[0].sum())
        assert spans_of(bound, at).num_cells(kv) == cells
        assert sum(piece.num_cells for piece in bound.pieces(at, kv)) == cells


_LEAVES = st.one_of(
    st.builds(SlidingWindow, st.integers(-1, 12), st.integers(-1, 12)),
    st.builds(First, st.integers(0, 24)),
    st.builds(Prefix, st.integers(0, 24)),
    st.builds(Chunked, st.integers(1, 24)),
    st.just(Causal()),
    st.builds(
        lambda cuts: Documents(np.diff([0, *sorted(cuts), 24])), st.lists(st.integers(0, 24))
    ),
    st.lists(st.booleans(), min_size=36, max_size=36).map(
        lambda flags: BlockSparse(np.array(flags).reshape(6, 6), 4)
    ),
)
_TREES = st.recursive(
    _LEAVES,
    lambda masks: st.one_of(
        st.tuples(masks, masks, st.just(True)), st.tuples(masks, masks, st.just(False))
    ),
    max_leaves=6,
)


def _built(tree: Any) -> tuple[Mask, torch.Tensor]:
    """The mask of a tree, and its cells from the cells of its leaves."""
    sizes = Sizes(24, 24, 1)
    if isinstance(tree, Mask):
        return tree, cells_of(tree, sizes)[0]
    (a, a_cells), (b, b_cells) = _built(tree[0]), _built(tree[1])
    return (a & b, a_cells & b_cells) if tree[2] else (a | b, a_cells | b_cells)


@drawn(100, 300, _TREES)
def test_and_and_or_are_those_of_booleans(tree: Any) -> None:
    mask, cells = _built(tree)
    assert cells_of(mask, Sizes(24, 24, 1))[0].equal(cells)
    starts, stops = mask.spans(np.arange(24))
    filled = starts < stops
    # Sorted, apart, and what is left over comes last.
    assert (starts[..., 1:][filled[..., 1:]] > stops[..., :-1][filled[..., 1:]]).all()
    assert (filled[..., :-1] >= filled[..., 1:]).all()
    assert (starts[~filled] == END).all()
    for q, kv in ((range(0, 24, 3), range(5, 20)), (range(9, 14), range(0, 24, 2))):
        part = cells[list(q)][:, list(kv)]
        relation = mask.relation(q, kv)
        assert relation is not Relation.EMPTY or not part.any()
        assert relation is not Relation.FULL or part.all()


@drawn(100, 300, _TREES, st.integers(0, 23), st.integers(1, 24))
def test_spans_that_meet_a_stretch_of_keys_are_those_that_count(
    tree: Any, start: int, length: int
) -> None:
    mask, cells = _built(tree)
    stop = min(start + length, 24)
    there = mask.spans(np.arange(24)).meeting(start, stop)
    seen = there.sees(np.arange(start, stop), np.arange(24)[:, None])
    assert np.array_equal(seen[0], cells[:, start:stop].numpy())
    most = ((there.starts < stop) & (there.stops > start)).sum(-1).max()
    assert there.width == max(1, most)


# Masks, and what they show of key j to a query of batch row b that stands at p.
_Shows: TypeAlias = Callable[[int, int, int], bool]
_MOVED: tuple[tuple[Mask, _Shows], ...] = (
    (Causal(), lambda b, p, j: j <= p),
    (SlidingWindow(3, 1), lambda b, p, j: -1 <= p - j <= 3),
    (First(2), lambda b, p, j: j < 2),
    (Chunked(4), lambda b, p, j: p // 4 == j // 4),
    (Prefix(5), lambda b, p, j: j < 5 or j <= p),
    (Prefix((0, 6)), lambda b, p, j: j < 6 * b or j <= p),
)
_LENGTHS = st.tuples(st.integers(0, 8), st.integers(0, 10))


@drawn(
    100,
    300,
    st.recursive(
        st.sampled_from([0, 1, 2, 3, 4, 5]),
        lambda inner: st.tuples(inner, inner, st.sampled_from("&|m")),
        max_leaves=5,
    ),
    st.lists(_LENGTHS, min_size=1, max_size=2),
    st.booleans(),
)
def test_documents_with_queries_of_their_own_move_every_mask_beside_them(
    tree: Any, lengths: list[tuple[int, int]], first: bool
) -> None:
    """Masks and documents for one batch row or for each; "m": documents within, too."""
    mover = Documents([[q, 8 - q] for q, _ in lengths], [[kv, 10 - kv] for _, kv in lengths])

    def place(b: int, i: int) -> tuple[bool, int]:
        """Which document query i is in, and where it stands."""
        q, kv = lengths[b % len(lengths)]
        return i >= q, i + (kv - q if i < q else 10 - 8)

    def own(b: int, i: int, j: int) -> bool:
        return (j >= lengths[b % len(lengths)][1]) == place(b, i)[0]

    def built(tree: Any) -> tuple[Mask, _Shows]:  # by batch row, query, key
        if isinstance(tree, int):
            mask, shows = _MOVED[tree]
            return mask, lambda b, i, j: shows(b, place(b, i)[1], j)
        (x, in_x), (y, in_y) = built(tree[0]), built(tree[1])
        if tree[2] == "&":
            return x & y, lambda b, i, j: in_x(b, i, j) and in_y(b, i, j)
        if tree[2] == "|":
            return x | y, lambda b, i, j: in_x(b, i, j) or in_y(b, i, j)
        return (x & mover) | y, lambda b, i, j: (in_x(b, i, j) and own(b, i, j)) or in_y(b, i, j)

    inner, shows = built(tree)
    mask = mover & inner if first else inner & mover
    found = cells_of(mask, Sizes(8, 10, 2))
    for b, i, j in product(range(2), range(8), range(10)):
        assert bool(found[b % len(found), i, j]) == (own(b, i, j) and shows(b, i, j))


def test_queries_before_all_keys_see_none_of_other_documents() -> None:
    """Of a document with more queries than keys the first ones stand at places below 0."""
    mover = Documents([5, 3], [2, 9])
    for other in (Documents([1, 10]), Documents([11]), Documents(ids=[-1] + [5] * 10)):
        alone = cells_of(other, Sizes(11, 11, 1))[0]
        found = cells_of(mover & other, Sizes(8, 11, 1))[0]
        assert not found[:3].any()
        assert found[3:5].equal(alone[:2] & (torch.arange(11) < 2))
        assert found[5:].equal(alone[8:] & (torch.arange(11) >= 2))


def test_documents_within_an_or_do_not_move_what_stands_beside_them() -> None:
    either = Documents([4, 4], [8, 8]) | Causal()
    sizes = Sizes(8, 16, 1)
    hides_nothing = SlidingWindow(100, 100)
    assert cells_of(either & hides_nothing, sizes).equal(cells_of(either, sizes))
    assert cells_of(hides_nothing & either, sizes).equal(cells_of(either, sizes))


def _cells(piece: Piece, mask: Mask, q: range, kv: range) -> torch.Tensor:
    """Bool `[rows, columns]` of the tile: what a kernel computes for the piece."""
    cells = torch.zeros(len(q), len(kv), dtype=torch.bool)
    shape = piece.q_stop - piece.q_start, piece.kv_stop - piece.kv_start
    part = torch.ones(shape, dtype=torch.bool)
    if piece.shape is Shape.LOWER:
        part = part.tril()
    elif piece.shape is Shape.UPPER:
        assert shape[0] == shape[1]
        part = part.triu()
    elif piece.shape is Shape.BAND:
        part = part.triu().tril(shape[1] - shape[0])
    elif piece.shape is Shape.MASKED:
        rows, columns = (torch.tensor([*x]) for x in (q[piece.rows], kv[piece.columns]))
        part = mask.allows(rows[:, None], columns[None, :])
    cells[piece.rows, piece.columns] = part
    return cells


@drawn(100, 300, _TREES, st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 3, 64]))
def test_pieces_are_what_is_seen_each_once(
    tree: Any, q_step: int, kv_step: int, few_rows: int
) -> None:
    mask, cells = _built(tree)
    q, kv = range(0, 24, q_step), range(kv_step - 1, 24, kv_step)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "_FEW_ROWS", few_rows)
        patch.setattr(pieces, "_MASKED_ROWS", 7)
        found = mask.pieces(q, kv)
    seen = [_cells(piece, mask, q, kv) for piece in found]
    times = torch.zeros(len(q), len(kv), dtype=torch.int64)
    for part in seen:
        times += part
    assert times.equal(cells[list(q)][:, list(kv)].long())
    assert [piece.num_cells for piece in found] == [int(part.sum()) for part in seen]


@pytest.mark.parametrize(
    ("mask", "kinds"),
    [
        (SlidingWindow(99), {Shape.LOWER: 1, Shape.BAND: 1}),
        (Causal() & Documents([300, 500, 200]), {Shape.LOWER: 3}),
        (Prefix(400), {Shape.LOWER: 1, Shape.RECTANGLE: 2}),
        (Causal() & Chunked(250), {Shape.LOWER: 4}),
        (Documents([10] * 100), {Shape.MASKED: 2}),
        (SlidingWindow(20), {Shape.LOWER: 1, Shape.BAND: 1}),
    ],
    ids=str,
)
def test_masks_in_rectangles_and_triangles(mask: Mask, kinds: dict[Shape, int]) -> None:
    found = mask.pieces(range(1000), range(1000))
    assert Counter(piece.shape for piece in found) == kinds, found
    seen = int(cells_of(mask, Sizes(1000, 1000, 1)).sum())
    assert sum(piece.num_cells for piece in found) == seen


def test_wide_windows_are_triangles(monkeypatch: pytest.MonkeyPatch) -> None:
    """On either side of a rectangle, for each run of rows as long as the window."""
    monkeypatch.setattr(pieces, "WIDEST_BAND", 90)
    kinds = {Shape.LOWER: 11, Shape.UPPER: 10, Shape.RECTANGLE: 10}
    test_masks_in_rectangles_and_triangles(SlidingWindow(99), kinds)


def test_streaming_llm_in_spans() -> None:
    mask = Causal() & (First(4) | SlidingWindow(3))
    starts, stops = mask.spans(np.array([2, 6, 7, 9]))
    assert np.maximum(starts, 0)[0, :, 0].tolist() == [0, 0, 0, 0]
    assert stops[0, :, 0].tolist() == [3, 7, 8, 4]  # they touch until query 7
    assert (starts[0, :, 1].tolist(), stops[0, :, 1].tolist()) == (
        [END] * 3 + [6],
        [END] * 3 + [10],
    )


@pytest.mark.parametrize("beside", [None, Causal(), SlidingWindow(3) | First(2)], ids=repr)
@pytest.mark.parametrize("name", MASKS)
def test_no_queries_see_nothing(name: str, beside: Mask | None) -> None:
    mask = MASKS[name].mask(Sizes(24, 24, 2))
    if not mask.has_spans:
        return
    none = np.empty(0, np.int64)
    for each in [mask] if beside is None else [mask & beside, mask | beside]:
        assert each.spans(none).starts.shape[:2] in ((1, 0), (each.batch, 0))
        seen = each.allows(torch.empty(0, 1, dtype=torch.int64), torch.arange(24)[None])
        assert seen.shape[-2:] == (0, 24)


@pytest.mark.parametrize("name", MASKS)
def test_equal_masks_are_one_mask(name: str) -> None:
    sizes = Sizes(24, 24, 2)
    mask, again = MASKS[name].mask(sizes), MASKS[name].mask(sizes)
    assert mask == again == copy.deepcopy(mask) == pickle.loads(pickle.dumps(mask))
    assert hash(mask) == hash(again)
    assert repr(mask) == repr(again)
    assert len(repr(mask)) < 400


def test_a_subclass_that_says_otherwise_has_no_spans() -> None:
    class Earlier(Causal):
        def allows(self, q_position: Any, kv_position: Any) -> Any:
            return kv_position < q_position

        def relation(self, q: range, kv: range) -> Relation:
            return Relation.PARTIAL

        def pieces(self, q: range, kv: range) -> tuple[Piece, ...]:
            return Mask.pieces(self, q, kv)

    class Named(SlidingWindow):
        """Nothing new."""

    class Wider(Earlier):
        def spans(self, q: Any) -> Any:
            return SlidingWindow(9).spans(q)

    kinds = (Causal(), Earlier(), Named(3), Wider(), Causal() & Earlier())
    assert [mask.has_spans for mask in kinds] == [True, False, True, True, False]
    layouts: list[torch.Tensor] = []

    def run(ctx: Context) -> None:
        layout = ctx.layout(40)
        q, k, v = (torch.randn(1, layout.shard_len, 2, 16) for _ in range(3))
        _, lse = burst_attention(q, k, v, mask=Earlier(), layout=layout, return_lse=True)
        layouts.append(layout.unshard(lse, dim=2))

    run_local(2, run)
    # The first query sees nothing; under Causal it would see itself.
    assert [float(lse[0, 0, 0]) for lse in layouts] == [-torch.inf] * 2


@dataclass(frozen=True)
class Own(Mask):
    """What a user writes: spans alone."""

    width: int
    wrong: str = ""

    def spans(self, q: Any) -> Any:
        starts, stops = (q - self.width)[None, :, None], (q + 1)[None, :, None]
        if self.wrong == "pieces":  # out of order, twice, touching, overlapping, and empty
            cuts = (3, 0, 3, 5, 5), (1, 2, 1, 0, 4)
            starts = np.concatenate([(q - each)[None, :, None] for each in cuts[0]], axis=2)
            stops = np.concatenate([(q + 1 - each)[None, :, None] for each in cuts[1]], axis=2)
            starts, stops = np.minimum(starts, stops), stops
        if self.wrong == "type":
            starts = starts.astype(np.int32)
        if self.wrong == "rows":
            starts, stops = starts[:, :1], stops[:, :1]
        return (starts, stops) if self.wrong == "tuple" else Spans(starts, stops)

    def allows(self, q_position: Any, kv_position: Any) -> Any:
        if self.wrong == "other":
            return kv_position <= q_position
        return super().allows(q_position, kv_position)


def test_a_mask_of_ones_own_needs_spans_alone() -> None:
    def run(ctx: Context) -> list[torch.Tensor]:
        layout = ctx.layout(90)
        x = torch.randn(1, 90, 2, 16, generator=torch.Generator().manual_seed(0))
        shard = layout.shard(x)
        masks = (Own(7), SlidingWindow(7), Own(5, "pieces"), SlidingWindow(5))
        return [burst_attention(shard, shard, shard, mask=mask, layout=layout) for mask in masks]

    for mine, window, merged, one in run_local(3, run):
        assert mine.equal(window)
        assert merged.equal(one)


def test_spans_of_ones_own_are_merged() -> None:
    """Random spans in any order, some empty: as many cells, and apart afterwards."""
    rng = np.random.default_rng(0)
    starts = rng.integers(0, 30, (1, 40, 6))
    stops = starts + rng.integers(0, 9, (1, 40, 6))
    merged, kv = Spans(starts, stops).merged(), np.arange(40)
    seen = ((starts[..., None] <= kv) & (kv < stops[..., None])).any(2)
    assert np.array_equal(merged.sees(kv[None], like=kv[:, None]), seen)
    filled = merged.starts < merged.stops
    assert (~filled | (merged.stops != END)).all()
    assert (merged.starts[..., 1:] > merged.stops[..., :-1])[filled[..., 1:]].all()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("type", r"two int64 arrays \[1, 5, spans\]"),
        ("rows", r"two int64 arrays \[1, 5, spans\]"),
        ("tuple", r"must return a burst_rt\.Spans"),
        ("other", "spans and allows must say the same"),
    ],
)
def test_wrong_spans_are_found(wrong: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        check_mask(Own(3, wrong), 90, 90)


def test_places_of_documents_reach_masks_of_ones_own() -> None:
    """In each document the last query stands at the last key, for any mask with spans."""
    documents = Documents([2, 2], [3, 3])
    sizes = Sizes(4, 6, 1)
    assert cells_of(Own(9) & documents, sizes).equal(cells_of(Causal() & documents, sizes))
    rows = Documents([[2, 2], [1, 3]], [[3, 3], [4, 2]])
    both = [cells_of(mask & rows, Sizes(4, 6, 2)) for mask in (Own(9), Causal())]
    assert both[0].equal(both[1])


@pytest.mark.parametrize("far", [2**48, 2**63 - 1, 2**63, 2**70])
def test_numbers_beyond_every_sequence(far: int) -> None:
    sizes = Sizes(9, 9, 1)
    causal, full = cells_of(Causal(), sizes), cells_of(Full(), sizes)
    assert cells_of(SlidingWindow(far), sizes).equal(causal)
    assert cells_of(SlidingWindow(far, far), sizes).equal(full)
    for mask in (Prefix(far), First(far), Chunked(far), Prefix((far,))):
        assert cells_of(mask, sizes)[0].equal(full[0])


def test_integers_of_numpy_are_integers() -> None:
    assert SlidingWindow(_odd(np.int64(3))) == SlidingWindow(3)
    assert Prefix(_odd([np.int32(3), 4])) == Prefix((3, 4))
    assert Documents([torch.tensor([3, 5]), torch.tensor([8])]) == Documents([[3, 5], [8]])
    assert Documents([3, 0, 5]) == Documents([3, 5])


def test_the_base_class_is_no_mask() -> None:
    for mask in (Mask(), Causal() & Mask()):
        with pytest.raises(InputError, match=r"mask Mask: repr\(\) must show"):
            check_mask(mask, 9, 9)


def test_masks_that_differ_say_so() -> None:
    masks = [
        Documents([3, 5]),
        Documents([5, 3]),
        Documents([[3, 5], [5, 3]]),
        Documents(ids=[0, 0, 0, -1, -1, -1, -1, -1]),
        Documents([3, 5], [3, 5]),
        BlockSparse([[True, False]], 4),
        BlockSparse([[True], [False]], 4),
        BlockSparse([[True, False]], 8),
        SlidingWindow(3),
        SlidingWindow(3, 3),
        Full(),
    ]
    assert len(set(masks)) == len({repr(mask) for mask in masks}) == len(masks)


def test_ways_to_name_documents() -> None:
    expected = Documents([3, 1, 4])
    for same in (
        Documents(cu_seqlens=torch.tensor([0, 3, 4, 8], dtype=torch.int32)),
        Documents(ids=[5, 5, 5, 1, 7, 7, 7, 7]),
        Documents(position_ids=[0, 1, 2, 0, 0, 1, 2, 3]),
        Documents(lengths=np.array([3, 1, 4])),
        Documents([torch.tensor(3), torch.tensor(1), torch.tensor(4)]),
        Documents([[3, 1, 4]]),
    ):
        assert same == expected
    assert Documents(position_ids=[[0, 1, 0, 1], [0, 1, 2, 3]]) == Documents([[2, 2], [4]])


def test_few_documents_are_told_by_their_lengths() -> None:
    for mask, words in (
        (Documents([3, 5]), "Documents([3, 5])"),
        (Documents([[3, 5], [8]]), "Documents([[3, 5], [8]])"),
        (Documents(ids=[0, 0, -1]), "Documents([2, 1 padding])"),
        (Documents([3, 4], [5, 4]), "Documents(q_lengths=[3, 4], kv_lengths=[5, 4])"),
        (Documents([1] * 8), "Documents([1, 1, 1, 1, 1, 1, 1, 1])"),
    ):
        assert repr(mask) == words
    assert repr(Documents([1] * 9)).startswith("Documents(9, 9 tokens, digest ")
    assert " by batch row, 2 tokens, digest " in repr(Documents([[2]] * 9))


def _odd(value: Any) -> Any:
    """A value of a type that the argument does not take."""
    return value


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: SlidingWindow(-2), r"left must be .* got -2"),
        (lambda: SlidingWindow(True), "left must be"),
        (lambda: SlidingWindow(3, _odd(1.5)), r"right must be .* got 1\.5"),
        (lambda: Prefix(-1), "length must be"),
        (lambda: Prefix(()), "length must be"),
        (lambda: Prefix(_odd("3")), "length must be"),
        (lambda: Prefix((3, -1)), r"got \(3, -1\)"),
        (lambda: First(_odd(None)), "count must be"),
        (lambda: Chunked(0), "size must be"),
        (lambda: Documents(), "expected lengths, .* got none of them"),
        (lambda: Documents([3], ids=[0, 0, 0]), "got lengths and ids"),
        (lambda: Documents(kv_lengths=[3]), "got kv_lengths"),
        (lambda: Documents([]), "lengths must be integers"),
        (lambda: Documents([0, 0]), "at least 1, got \\[0\\]"),
        (lambda: Documents([3, -1, 4]), r"must be at least 0 and .* got -1 for document 1"),
        (lambda: Documents([1.5, 2.5]), "must be integers"),
        (lambda: Documents([[3, 5], [4, 5]]), r"the same number of queries, .* got \[8, 9\]"),
        (lambda: Documents(cu_seqlens=[1, 3]), "must begin with 0"),
        (lambda: Documents(cu_seqlens=[0, 3, 2]), "must begin with 0 and never fall"),
        (lambda: Documents(cu_seqlens=[0]), "one number more"),
        (lambda: Documents(cu_seqlens=[0, 2**62]), r"at most 2\*\*48, got"),
        (lambda: Documents([[[3]]]), r"got a row of shape \(1, 1\)"),
        (lambda: Documents(torch.ones(2, dtype=torch.int64, device="meta")), "must be integers"),
        (lambda: Documents(torch.tensor([3, 4]).to_sparse()), "must be integers"),
        (lambda: SlidingWindow(_odd(torch.ones((), device="meta").long())), "must be a number"),
        (lambda: Documents(ids=[0, 1, 0]), "document 0 returns"),
        (lambda: Documents(ids=[0, -2]), "got -2"),
        (lambda: Documents(ids=[[[0]]]), "must be integers"),
        (lambda: Documents([1, 2], [3]), r"as many documents, got \[2\] and \[1\]"),
        (lambda: BlockSparse([[1, 0]], 4), "table must be booleans"),
        (lambda: BlockSparse([True], 4), "table must be booleans"),
        (lambda: BlockSparse([[True], [True, False]], 4), "table must be booleans"),
        (lambda: BlockSparse([[True]], 0), "block must be"),
        (lambda: BlockSparse([[True]], 2**63), "block must be"),
        (lambda: BlockSparse(torch.ones(2, 2, dtype=torch.bfloat16), 4), "table must be booleans"),
        (lambda: BlockSparse(torch.ones(2, 2, requires_grad=True), 4), "table must be booleans"),
        (lambda: BlockSparse(torch.ones(2, 2).to_sparse(), 4), "table must be booleans"),
        (lambda: Causal() | _odd("full"), r"mask \| other: expected another Mask, got str"),
        (
            lambda: Documents([1, 2], [3, 4]) & Documents([3], [7]),
            "both say where queries stand",
        ),
        (lambda: Prefix((1, 2)) & Documents([[3], [3], [3]]), "different numbers of batch rows"),
        (
            lambda: Causal() & Documents([1, 2], [3, 4]) | SlidingWindow(3) & Documents([3], [7]),
            "both say where queries stand",
        ),
        (lambda: BlockSparse([[True]], 9) & Documents([1, 2], [3, 4]), "and not with BlockSparse"),
        (lambda: Documents([2**63 - 1, 2**63 - 1, 4]), r"at most 2\*\*48"),
    ],
)
def test_bad_masks_are_refused(make: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        make()


@pytest.mark.parametrize(
    ("mask", "sizes", "said"),
    [
        (Documents([3, 4]), (8, 8, 1), "has 7 keys, and kv_layout has 8 tokens"),
        (Documents([3, 5]), (9, 8, 1), "there are 9 queries: give q_lengths"),
        (Documents([3], [8]), (4, 8, 1), "has 3 queries, and layout has 4 tokens"),
        (Documents([[3], [3]]), (3, 3, 4), "is for 2 batch rows, and q has 4"),
        (Causal() & Prefix((3, 4)), (3, 3, 1), "is for 2 batch rows, and q has 1"),
        (BlockSparse([[True]], 4), (4, 5, 1), "has 1 key blocks, and 5 tokens make 2"),
        (BlockSparse([[True], [True]], 4), (4, 4, 1), "has 2 query blocks"),
        (Causal() | BlockSparse([[True, True]], 4), (4, 4, 1), "has 2 key blocks"),
    ],
    ids=str,
)
def test_masks_of_other_sizes_are_refused(
    mask: Mask, sizes: tuple[int, int, int], said: str
) -> None:
    assert said in (mask.refuses(*sizes) or "")
