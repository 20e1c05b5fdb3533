"""What a mask of the user's own must keep to, found out before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from burst_rt import Causal, Full, Mask, Relation
from burst_rt.attention.mask_check import check_mask
from burst_rt.errors import InputError
from burst_rt.planning.masks import Piece, Shape


@dataclass(frozen=True)
class Mine(Mask):
    """The causal mask, with methods that a test may put in its place."""

    said: Callable[[range, range], Any] = Causal().relation
    seen: Callable[[Any, Any], Any] = Causal().allows
    cut: Callable[[range, range], Any] | None = None

    def relation(self, q: range, kv: range) -> Any:
        return self.said(q, kv)

    def allows(self, q_position: Any, kv_position: Any) -> Any:
        return self.seen(q_position, kv_position)

    def pieces(self, q: range, kv: range) -> Any:
        return super().pieces(q, kv) if self.cut is None else self.cut(q, kv)

    def __repr__(self) -> str:
        return "Mine()"


@pytest.mark.parametrize(
    "mask", [Full(), Causal(), Mine(), Mine() & Causal(), Mine(cut=Causal().pieces)], ids=repr
)
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (7, 7), (1000, 1000), (3, 40), (40, 3)])
def test_a_good_mask_passes(mask: Mask, q_len: int, kv_len: int) -> None:
    check_mask(mask, q_len, kv_len)


def _always(relation: Relation) -> Callable[[range, range], Relation]:
    return lambda q, kv: relation


BAD: dict[str, tuple[Mask, str]] = {
    "a word for a relation": (
        Mine(said=lambda q, kv: "partial"),
        "relation must return a burst_rt.Relation, got 'partial'",
    ),
    "full where it is not": (Mine(said=_always(Relation.FULL)), "relation returned FULL"),
    "empty where it is not": (Mine(said=_always(Relation.EMPTY)), "relation returned EMPTY"),
    "a number for a truth": (
        Mine(seen=lambda q, kv: q - kv),
        r"broadcasts to \[5, 5\] .*, got torch.int64",
    ),
    "one truth for all": (
        Mine(seen=lambda q, kv: True),
        "must return a tensor of booleans .*, got True",
    ),
    "another shape": (Mine(seen=lambda q, kv: (q >= kv)[:3]), r"got torch.bool of shape \(3, 5\)"),
    "a method that raises": (
        Mine(seen=lambda q, kv: q.no_such_method()),
        "allows raised AttributeError",
    ),
    "pieces that are none": (Mine(cut=lambda q, kv: [1]), "pieces must return a tuple of Pieces"),
    "pieces twice": (
        Mine(
            said=_always(Relation.FULL),
            seen=Full().allows,
            cut=lambda q, kv: 2 * (Piece(0, len(q), 0, len(kv), Shape.RECTANGLE, 1),),
        ),
        "pieces for q .* must cover the pairs for which allows is true, each pair once",
    ),
    "a repr by its address": (
        type("Nameless", (Mask,), {})(),
        r"Nameless: repr\(\) must show every parameter of the mask",
    ),
    "a relation that raises": (
        type("Lost", (Mask,), {"__repr__": lambda self: "Lost()"})(),
        "Lost: relation raised NotImplementedError",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_mask_is_refused(name: str) -> None:
    mask, words = BAD[name]
    with pytest.raises(InputError, match=words):
        check_mask(mask, 40, 40)


def test_a_mask_that_knows_tensors_only_passes() -> None:
    check_mask(
        Mine(said=_always(Relation.PARTIAL), seen=lambda q, kv: torch.where(q >= kv, True, q < 0)),
        40,
        40,
    )


def test_in_a_world_of_one_nobody_compares_masks() -> None:
    nameless = type("Nameless", (Causal,), {"__repr__": object.__repr__})()
    check_mask(nameless, 40, 40, shared=False)
    with pytest.raises(InputError, match=r"repr\(\) must show every parameter"):
        check_mask(nameless, 40, 40)


def test_only_positions_that_exist_are_asked_about() -> None:
    """A mask may look its positions up."""
    documents = torch.arange(100) // 30

    def same(q: Any, kv: Any) -> Any:
        assert int(torch.as_tensor(q).min()) >= 0
        return documents[q] == documents[kv]

    check_mask(Mine(said=_always(Relation.PARTIAL), seen=same), 20, 100)
    check_mask(Mine(said=_always(Relation.PARTIAL), seen=same), 100, 20)
