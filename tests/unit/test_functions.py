"""`Mask.from_function`: what is asked of a function, what ranks compare, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mask_truths import Sizes, cells_of
from spec import errors_of, reference
from tolerances import ERROR
from worlds import Case, attend_over_threads

import burst_rt
from burst_rt import Causal, Documents, Full, Mask, Relation, SlidingWindow
from burst_rt.attention import function_check
from burst_rt.errors import ContractMismatch, InputError
from burst_rt.kernels import cpu
from burst_rt.planning.masks import Shape, spans_of

Function = Callable[[Any, Any, Any, Any], Any]


def odd(batch: Any, head: Any, q: Any, kv: Any) -> Any:
    """Every other key."""
    return (q - kv) % 2 == 1


def of_heads(batch: Any, head: Any, q: Any, kv: Any) -> Any:
    """Head h sees what is at least h tokens away."""
    return (q - kv).abs() >= head


def attend(ctx: burst_rt.Context, mask: Mask, tokens: int = 8, **options: Any) -> None:
    """A call of 2 heads and 2 batch rows."""
    layout = ctx.layout(tokens)
    x = torch.randn(2, layout.shard_len, 2, 16)
    burst_rt.burst_attention(x, x, x, mask=mask, layout=layout, **options)


def test_equal_masks_are_those_of_one_function_object() -> None:
    mask = Mask.from_function(odd, Causal())
    assert mask == Mask.from_function(odd, Causal())
    assert hash(mask) == hash(Mask.from_function(odd, Causal()))
    others = [
        Mask.from_function(odd),
        Mask.from_function(of_heads, Causal()),
        Mask.from_function(lambda *cell: odd(*cell), Causal()),
        Mask.from_function(odd, Causal(), key="odd"),
    ]
    assert all(mask != other for other in others)
    assert Mask.from_function(odd, key="a") != Mask.from_function(odd, key="b")


def test_its_words_say_everything_and_no_address() -> None:
    assert repr(Mask.from_function(odd)) == "from_function(odd, within=Full())"
    keyed = Mask.from_function(lambda *cell: odd(*cell), Causal(), key="every other")
    assert repr(keyed) == "from_function(key='every other', within=Causal())"

    class Callable:
        def __call__(self, *cell: Any) -> Any:
            return odd(*cell)

    assert " at 0x" not in repr(Mask.from_function(Callable()))


def test_plans_go_by_within_alone() -> None:
    window = SlidingWindow(5)
    asked: list[object] = []
    mask = Mask.from_function(lambda *cell: asked.append(cell), window)
    assert mask.relation(range(10, 20), range(4)) is Relation.EMPTY
    assert mask.relation(range(10, 12), range(8, 10)) is Relation.PARTIAL
    assert mask.pieces(range(10, 20), range(4)) == ()
    (piece,) = mask.pieces(range(10, 20), range(20))
    assert piece.shape is Shape.MASKED
    assert piece.num_cells == spans_of(window, range(10, 20)).num_cells(range(20))
    both, either = mask & Documents([12, 8]), mask | Documents([12, 8])
    assert both.relation(range(12, 20), range(12)) is Relation.EMPTY
    assert either.relation(range(13, 20), range(7)) is Relation.EMPTY
    assert not both.has_spans
    assert not either.has_spans
    assert not asked


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"function": 3}, r"expected a function of \(batch, head, q, kv\), got 3"),
        ({"function": odd, "within": "causal"}, "within must be a mask that has spans.*'causal'"),
        ({"function": odd, "within": Mask.from_function(odd)}, "within must be a mask that has"),
        ({"function": odd, "key": ""}, "key must be a string that is not empty, got ''"),
        ({"function": odd, "key": 7}, "key must be a string that is not empty, got 7"),
    ],
    ids=lambda x: x if isinstance(x, str) else " ".join(x),
)
def test_what_it_is_made_of_is_checked(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=rf"Mask\.from_function: {said}"):
        Mask.from_function(**arguments)


def test_documents_that_move_queries_belong_in_within() -> None:
    documents = Documents(q_lengths=[3, 5], kv_lengths=[4, 4])
    with pytest.raises(InputError, match="give a function all other masks as `within`"):
        documents & Mask.from_function(odd)
    with pytest.raises(InputError, match="give a function all other masks as `within`"):
        Causal() & Mask.from_function(odd, documents)


def test_only_a_call_can_ask() -> None:
    with pytest.raises(InputError, match="allows knows neither batch row nor head"):
        Mask.from_function(odd).allows(1, 2)


def _random(batch: Any, head: Any, q: Any, kv: Any) -> Any:
    return torch.rand(torch.broadcast_shapes(*(x.shape for x in (batch, head, q, kv)))) < 0.5


def _raises(batch: Any, head: Any, q: Any, kv: Any) -> Any:
    raise KeyError("no such token")


BAD: dict[str, tuple[Function, str]] = {
    "raises": (_raises, "the function raised KeyError: 'no such token'"),
    "returns numbers": (
        lambda b, h, q, kv: q - kv,
        "must return a tensor of booleans.*torch.int64",
    ),
    "returns a bool": (lambda b, h, q, kv: True, "must return a tensor of booleans.*got True"),
    "returns None": (lambda b, h, q, kv: None, "must return a tensor of booleans.*got None"),
    "returns another shape": (lambda b, h, q, kv: (q >= kv)[..., :3], r"of shape .*3\]"),
    "returns a dimension more": (lambda b, h, q, kv: (q >= kv)[None], r"of shape \[1, "),
    "is on another device": (lambda b, h, q, kv: (q >= kv).to("meta"), "booleans on cpu"),
    "changes its mind": (_random, "must say the same each time"),
    "looks at other cells": (
        lambda b, h, q, kv: q + 0 * kv >= q.float().mean(),
        "must decide on each cell by itself",
    ),
}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_function_is_refused_before_anything_is_sent(name: str, world: int) -> None:
    function, said = BAD[name]

    def run(ctx: burst_rt.Context) -> int:
        with pytest.raises(InputError, match=said):
            attend(ctx, Causal() & Mask.from_function(function, key="k"))
        attend(ctx, Causal(), strategy="ring-kv")
        return ctx.stats().bytes_sent

    sent = sum(burst_rt.run_local(world, run))
    # Those of the good call alone: k and v of a shard's tokens.
    assert sent <= world * 2 * 2 * 4 * 2 * 16 * 4


def test_ranks_compare_drawn_cells() -> None:
    def run(ctx: burst_rt.Context) -> None:
        # The same name, other cells.
        step = 2 + ctx.rank

        def function(batch: Any, head: Any, q: Any, kv: Any) -> Any:
            return (q + kv) % step == 0

        with pytest.raises(ContractMismatch, match=r"mask: .*4096 cells [0-9a-f]{32}"):
            attend(ctx, Mask.from_function(function))
        with pytest.raises(ContractMismatch, match=r"mask: .*4096 cells"):
            attend(ctx, Mask.from_function(function, Causal()) | SlidingWindow(1))
        # Each rank's own function object, which says the same.
        attend(ctx, Mask.from_function(lambda *cell: odd(*cell)))

    burst_rt.run_local(2, run)


def test_a_key_stands_for_the_function() -> None:
    def run(ctx: burst_rt.Context) -> None:
        step = 2 + ctx.rank
        attend(ctx, Mask.from_function(lambda b, h, q, kv: (q + kv) % step == 0, key="steps"))
        with pytest.raises(ContractMismatch, match=r"key='steps \d'"):
            attend(ctx, Mask.from_function(odd, key=f"steps {step}"))

    burst_rt.run_local(2, run)


def test_cells_are_drawn_from_the_whole_call() -> None:
    """Of all batch rows, heads, queries and keys, and for Sq > Skv from before the first key."""
    asked: list[tuple[torch.Tensor, ...]] = []

    def function(*cell: torch.Tensor) -> torch.Tensor:
        asked.append(cell)
        return cell[2] >= cell[3]

    function_check.cells_said(Mask.from_function(function), (3, 4, 9, 5), torch.device("cpu"))
    batch, head, q, kv = asked[0]
    assert batch.shape == head.shape == q.shape == kv.shape == (4096,)
    assert batch.dtype == head.dtype == q.dtype == kv.dtype == torch.int64
    for values, expected in (
        (batch, range(3)),
        (head, range(4)),
        (q, range(-4, 5)),
        (kv, range(5)),
    ):
        assert values.unique().tolist() == list(expected)


@pytest.mark.parametrize("strategy", ["burst", "all-to-all"])
def test_parts_are_bounded_and_inside_within(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a window in 512 tokens, in parts of at most 1,500 cells, heads and batch rows counted."""
    monkeypatch.setattr(cpu, "MOST_MASKED", 1500)
    monkeypatch.setattr(function_check, "_digest", lambda *rest: "")
    asked: list[tuple[torch.Tensor, ...]] = []

    def function(*cell: torch.Tensor) -> Any:
        asked.append(cell)
        return of_heads(*cell)

    window = SlidingWindow(20, 3)
    mask = Mask.from_function(function, window)
    case = Case(512, heads=4, kv_heads=2, batch=2, mask=mask, strategy=strategy)
    cells = torch.stack([of_heads(0, h, *_pairs(512)) for h in range(4)])
    truth = reference(*case.inputs(), mask=(cells & cells_of(window, Sizes(512, 512, 1)))[None])
    for name, error in errors_of(attend_over_threads(2, case), truth).items():
        assert error < ERROR[torch.float32], name
    assert asked
    for cell in asked:
        assert math.prod(torch.broadcast_shapes(*(x.shape for x in cell))) <= 1500
        (_, _, q, kv) = cell
        assert bool(window.allows(q, kv).any())
    heads = [set(cell[1].reshape(-1).tolist()) for cell in asked]
    assert set.union(*heads) == {0, 1, 2, 3}


def _pairs(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(tokens)[:, None], torch.arange(tokens)[None, :]


def test_what_within_hides_is_not_sent() -> None:
    def sent(mask: Mask) -> int:
        def run(ctx: burst_rt.Context) -> int:
            layout = ctx.layout(64, "contiguous")
            x = torch.randn(1, layout.shard_len, 2, 16)
            burst_rt.burst_attention(x, x, x, mask=mask, layout=layout)
            return ctx.stats().bytes_sent

        return sum(burst_rt.run_local(4, run))

    window = SlidingWindow(5)
    assert sent(Mask.from_function(of_heads, window)) == sent(window) < sent(Full())


def test_a_function_that_breaks_its_word_in_the_middle_of_a_call() -> None:
    """What the drawn cells cannot show: the error is typed all the same."""

    def function(batch: Any, head: Any, q: Any, kv: Any) -> Any:
        right = q >= kv
        return right if q.numel() != 8 else right.int()

    def run(ctx: burst_rt.Context) -> None:
        with pytest.raises(InputError, match=r"must return a tensor of booleans.*torch\.int32"):
            attend(ctx, Mask.from_function(function, key="k"))

    burst_rt.run_local(1, run)


def test_inside_a_compiled_function() -> None:
    """A mask is an input of the program, as other masks are."""
    q, k, v = (torch.randn(1, 12, 2, 16) for _ in range(3))

    def run(ctx: burst_rt.Context) -> None:
        layout = ctx.layout(12)

        def call(mask: Mask) -> torch.Tensor:
            return burst_rt.burst_attention(q, k, v, mask=mask, layout=layout) * 2

        compiled = torch.compile(call, backend="eager", fullgraph=True)
        for mask in (Mask.from_function(of_heads, Causal()), Mask.from_function(odd, Causal())):
            assert torch.equal(compiled(mask), call(mask))

    burst_rt.run_local(1, run)
