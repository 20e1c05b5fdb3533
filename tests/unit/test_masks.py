"""Masks: relation, pieces and booleans agree with each other and with plain loops."""

from __future__ import annotations

import copy
import functools
import pickle
import random
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import pytest
import torch
from spec import seen

from burst_rt import Causal, Full, Mask
from burst_rt.errors import InputError
from burst_rt.planning.masks import MASKS as ALL_MASKS
from burst_rt.planning.masks import Both, Piece, Relation, Rule, Shape, Spans


@dataclass(frozen=True)
class Window(Mask):
    """A query sees the `width` keys up to its own position, and those after it."""

    width: int

    def relation(self, q: range, kv: range) -> Relation:
        if kv[-1] <= q[0] - self.width:
            return Relation.EMPTY
        return Relation.FULL if kv[0] > q[-1] - self.width else Relation.PARTIAL

    def allows(self, q_position: Any, kv_position: Any) -> Any:  # ints or tensors
        return kv_position > q_position - self.width


MASKS = {
    "full": Full(),
    "causal": Causal(),
    "window": Window(5),
    "causal window": Causal() & Window(5),
    "two windows": Window(9) & Window(3),
}


def _random_ranges() -> list[tuple[range, range]]:
    chance = random.Random(0)
    pairs = []
    for _ in range(400):
        step, other = chance.choice([(1, 1), (2, 2), (3, 3), (1, 3), (4, 2)])
        q_start, kv_start = chance.randrange(-12, 20), chance.randrange(20)
        q_len, kv_len = chance.randrange(1, 13), chance.randrange(1, 13)
        pairs.append(
            (
                range(q_start, q_start + q_len * step, step),
                range(kv_start, kv_start + kv_len * other, other),
            )
        )
    return pairs


def _cells(piece: Piece, mask: Mask, q: range, kv: range) -> set[tuple[int, int]]:
    """What a kernel computes for the piece: (row of the q-block, row of the kv-block)."""
    return {
        (i, j)
        for i in range(piece.q_start, piece.q_stop)
        for j in range(piece.kv_start, piece.kv_stop)
        if not (piece.shape is Shape.LOWER and j - piece.kv_start > i - piece.q_start)
        and (piece.shape is not Shape.MASKED or mask.allows(q[i], kv[j]))
    }


@pytest.mark.parametrize("name", MASKS)
def test_pieces_are_exactly_what_is_seen(name: str) -> None:
    mask = MASKS[name]
    for q, kv in _random_ranges():
        truth = {(i, j) for i in range(len(q)) for j in range(len(kv)) if mask.allows(q[i], kv[j])}
        relation = mask.relation(q, kv)
        if relation is not Relation.PARTIAL:
            assert len(truth) == (0 if relation is Relation.EMPTY else len(q) * len(kv)), (q, kv)
        pieces = mask.pieces(q, kv)
        cells = [_cells(piece, mask, q, kv) for piece in pieces]
        assert sum(map(len, cells)) == len(truth), (q, kv)
        assert set().union(*cells) == truth, (q, kv)
        for piece, computed in zip(pieces, cells, strict=True):
            assert 0 <= piece.q_start < piece.q_stop <= len(q)
            assert 0 <= piece.kv_start < piece.kv_stop <= len(kv)
            assert piece.shape in (Shape.RECTANGLE, Shape.LOWER, Shape.MASKED)
            bound = (piece.q_stop - piece.q_start) * (piece.kv_stop - piece.kv_start)
            known = mask.has_spans or piece.shape is not Shape.MASKED
            most = len(computed) if known else bound
            assert len(computed) <= piece.num_cells <= most, (q, kv, piece)


@pytest.mark.parametrize("name", ["full", "causal"])
def test_only_a_clash_of_steps_needs_a_boolean_mask(name: str) -> None:
    for q, kv in _random_ranges():
        if q.step == kv.step:
            assert not any(piece.shape is Shape.MASKED for piece in MASKS[name].pieces(q, kv)), (
                q,
                kv,
            )


def test_the_worked_example_of_causal_pieces() -> None:
    rectangle, triangle = Causal().pieces(range(4, 8), range(2, 8))
    assert rectangle == Piece(0, 4, 0, 2, Shape.RECTANGLE, 8)
    assert triangle == Piece(0, 4, 2, 6, Shape.LOWER, 10)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_empty_blocks_have_no_pieces(mask: Mask) -> None:
    assert mask.pieces(range(3, 3), range(8)) == mask.pieces(range(8), range(4, 4)) == ()


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("q_len", "kv_len"), [(6, 6), (4, 9), (9, 4)])
def test_tensors_and_ints_get_the_same_answer(name: str, q_len: int, kv_len: int) -> None:
    mask = MASKS[name]
    shift = kv_len - q_len
    assert seen(mask, q_len, kv_len).tolist() == [
        [bool(mask.allows(i + shift, j)) for j in range(kv_len)] for i in range(q_len)
    ]


def test_causal_is_bottom_right() -> None:
    assert seen(Causal(), 2, 4).tolist() == [[True, True, True, False], [True, True, True, True]]
    assert seen(Causal(), 4, 2).tolist() == [
        [False, False],
        [False, False],
        [True, False],
        [True, True],
    ]


def test_and() -> None:
    assert Causal() & Full() == Full() & Causal() == Causal() & Causal() == Causal()
    assert Full() & Full() == Full()
    both = Causal() & Window(3)
    assert both == Both(Causal(), Window(3))
    assert repr(both) == "Both(first=Causal(), second=Window(width=3))"
    assert {both, Causal() & Window(3), Causal() & Window(4)} == {both, Both(Causal(), Window(4))}
    with pytest.raises(InputError, match="expected another Mask, got str"):
        Causal() & "full"  # type: ignore[operator]


def test_a_mask_without_answers_says_so() -> None:
    class Nothing(Mask):
        pass

    for question in (Nothing().relation, Nothing().allows):
        with pytest.raises(NotImplementedError):
            question(range(1), range(1))
    assert not torch.is_tensor(Causal().allows(1, 2))


class _Slotted(Mask):
    __slots__ = ("width",)

    def __init__(self, width: int) -> None:
        object.__setattr__(self, "width", width)


@dataclass(frozen=True)
class _Numbered(Mask):
    number: int


_T = TypeVar("_T")


class _Of(Mask, Generic[_T]):
    pass


@pytest.mark.parametrize("mask", [Causal(), Full() & Causal(), _Slotted(3), _Numbered(3)])
def test_a_copy_is_the_same_mask_with_a_number_of_its_own(mask: Mask) -> None:
    for other in (copy.copy(mask), copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert other._burst_rt_number != mask._burst_rt_number
        assert ALL_MASKS.find(other._burst_rt_number) is other
        for field in ("width", "number"):
            assert getattr(other, field, None) == getattr(mask, field, None)
        if not isinstance(mask, _Slotted):
            assert other == mask
            assert repr(other) == repr(mask)


def test_a_mask_may_have_other_base_classes_but_no_field_called_rule() -> None:
    assert isinstance(_Of[int](), Mask)
    assert _Of.rule is Rule.OWN
    with pytest.raises(InputError, match="must not be named rule"):

        @dataclass(frozen=True)
        class Ruled(Mask):
            rule: str  # type: ignore[assignment,misc]


def test_a_subclass_of_a_mask_that_kernels_know_is_not_known() -> None:
    class Later(Causal):
        pass

    assert (Full.rule, Causal.rule, Later.rule) == (Rule.EVERYTHING, Rule.NOT_LATER, Rule.OWN)


def test_a_wrapper_of_spans_inherits_no_word_about_them() -> None:
    class EveryOther(Causal):
        def spans(self, q: Any) -> Spans:
            return Causal.spans(self, q // 2)

        functools.update_wrapper(spans, Causal.spans)

    assert vars(EveryOther.spans).keys() == vars(Causal.spans).keys() | {"__wrapped__"}
    assert Causal()._period == 0
    assert EveryOther()._period == 1
    assert not EveryOther()._steady
