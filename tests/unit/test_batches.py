"""`shard_batch` and its kin: what each rank gets of a batch, and what is refused on every rank."""

from __future__ import annotations

import re
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional

import burst_rt
from burst_rt import Causal, Documents, Full, Mask
from burst_rt.errors import ContractMismatch, InputError

_TOKENS = 23
_IDS = torch.arange(2 * _TOKENS).view(2, _TOKENS)
# The second row has two documents of 10 and 13 tokens.
_PACKED = torch.stack([torch.arange(_TOKENS), torch.arange(_TOKENS) % 10])
_PACKED[1, 10:] = torch.arange(13)


def _shards(world_size: int, batch: dict[str, Any], layout: str = "auto") -> list[Any]:
    return burst_rt.run_local(
        world_size, lambda ctx: burst_rt.shard_batch(batch, ctx, layout), timeout_s=60
    )


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "balanced"])
def test_short_sequences(layout: str) -> None:
    for tokens in (4, 5, 6, 7):
        shards = _shards(4, {"input_ids": _IDS[:, :tokens]}, layout)
        assert all(shard.input_ids.shape[1] for shard in shards)
        found = torch.cat([shard.input_ids[0] for shard in shards])
        assert found.sort().values.tolist() == list(range(tokens))


def test_a_rank_without_a_token_is_refused() -> None:
    with pytest.raises(InputError, match="at least a token for each of 4 ranks; got 3"):
        _shards(4, {"input_ids": _IDS[:, :3]}, "zigzag")


@pytest.mark.parametrize("layout", ["auto", "contiguous", "zigzag", "striped", "balanced"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_token_is_on_one_rank_with_its_successors_label(world_size: int, layout: str) -> None:
    labels = _IDS.clone()
    labels[0, :4] = -100
    batch = {"input_ids": _IDS, "labels": labels, "token_type_ids": _IDS % 2}
    shards = _shards(world_size, batch, layout)
    successors = functional.pad(labels, (0, 1), value=-100)[:, 1:]
    places = []
    for rank, shard in enumerate(shards):
        at = shard.layout.positions(rank)
        places.append(at)
        assert torch.equal(shard.position_ids, at[None])
        assert torch.equal(shard.input_ids, _IDS[:, at])
        assert torch.equal(shard.labels, labels[:, at])
        assert torch.equal(shard.token_type_ids, (_IDS % 2)[:, at])
        assert torch.equal(shard.shift_labels, successors[:, at])
        assert shard.mask == Full()
        assert shard.largest_positions[rank] == at.max()
    assert torch.cat(places).sort().values.tolist() == list(range(_TOKENS))


def test_labels_that_are_shifted_already_are_cut_as_they_are() -> None:
    (shard,) = _shards(1, {"input_ids": _IDS, "shift_labels": _IDS})
    assert torch.equal(shard.shift_labels, _IDS)


_LEFT = torch.ones(2, _TOKENS, dtype=torch.int64)
_LEFT[0, :5] = 0
_RIGHT = _LEFT.flip(1)
_SAME = torch.zeros(_TOKENS, dtype=torch.int64)


def _ids(*rows: tuple[tuple[int, int], ...]) -> list[list[int]]:
    """Rows of documents, as (number, tokens)."""
    return [[number for number, count in row for _ in range(count)] for row in rows]


MASKS: dict[str, tuple[dict[str, Any], Mask]] = {
    "no mask": ({}, Full()),
    "all tokens shown": (
        {"attention_mask": torch.ones(2, _TOKENS, dtype=torch.bfloat16)},
        Full(),
    ),
    "padding before": (
        {"attention_mask": _LEFT},
        Documents(ids=_ids(((-1, 5), (0, 18)), ((0, 23),))),
    ),
    "padding behind": (
        {"attention_mask": _RIGHT.bool()},
        Documents(ids=_ids(((0, 18), (-1, 5)), ((0, 23),))),
    ),
    "positions that restart": (
        {"position_ids": _PACKED},
        Documents(ids=_ids(((0, 23),), ((0, 10), (1, 13)))),
    ),
    "positions that restart, and a mask": (
        {"position_ids": _PACKED, "attention_mask": torch.ones(2, _TOKENS)},
        Documents(ids=_ids(((0, 23),), ((0, 10), (1, 13)))),
    ),
    "positions that count from the first token": (
        # As generation has them: padding is at 1.
        {"position_ids": (_LEFT.cumsum(1) - 1).masked_fill(_LEFT == 0, 1), "attention_mask": _LEFT},
        Documents(ids=_ids(((-1, 5), (0, 18)), ((0, 23),))),
    ),
    "a row of padding": (
        {"attention_mask": torch.stack([_SAME, _SAME + 1])},
        Documents(ids=_ids(((-1, 23),), ((0, 23),))),
    ),
}


@pytest.mark.parametrize("case", MASKS)
def test_documents_and_padding_become_a_mask(case: str) -> None:
    given, expected = MASKS[case]
    for shard in _shards(2, {"input_ids": _IDS, **given}):
        assert shard.mask == expected
        assert shard.layout.kind == ("zigzag" if expected == Full() else "balanced")


@pytest.mark.parametrize("more", [{}, {"attention_mask": _SAME[None] + 1}])
def test_bounds_of_documents_become_a_mask(more: dict[str, Any]) -> None:
    """A mask that hides nothing may be beside them, as collators give it."""
    bounds = torch.tensor([0, 10, 23], dtype=torch.int32)
    given = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds.long(), "position_ids": _PACKED[1]}
    for shard in _shards(2, {"input_ids": _IDS[:1], **given, **more}):
        assert shard.mask == Documents(cu_seqlens=bounds)
        assert not hasattr(shard, "cu_seq_lens_q")


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no tokens": ({"input_ids": None}, {}, "input_ids or inputs_embeds: expected"),
    "a vector": ({"input_ids": _IDS[0]}, {}, r"got shape \(23,\)"),
    "a name": ({"pixel_values": _IDS}, {}, "'pixel_values' is not known"),
    "a list": ({"labels": [1]}, {}, "labels: expected a tensor; got list"),
    "tokens on meta": (
        {"input_ids": _IDS.to("meta")},
        {},
        "input_ids: expected a dense tensor of real",
    ),
    "sparse tokens": ({"input_ids": _IDS.to_sparse()}, {}, "got torch.int64 .* torch.sparse_coo"),
    "positions on meta": ({"position_ids": _IDS.to("meta")}, {}, "position_ids: expected a dense"),
    "no positions": (
        {"position_ids": torch.full((2, _TOKENS), torch.nan)},
        {},
        "position_ids: expected finite numbers; got infinite ones or NaN",
    ),
    "complex positions": (
        {"position_ids": _IDS * 1j},
        {},
        "position_ids: expected .* got torch.complex64",
    ),
    "labels of rows": (
        {"labels": torch.tensor([0, 1])},
        {},
        r"labels: expected shape \[batch, tokens\] = \(2, 23\); got \(2,\); labels of whole",
    ),
    "other rows of layers": (
        {"per_layer_inputs": torch.ones(1, _TOKENS, 3, 4)},
        {},
        r"per_layer_inputs: expected shape \[batch, tokens\] = \(2, 23\); got \(1, 23, 3, 4\)",
    ),
    "a matrix for a mask": (
        {"attention_mask": torch.ones(2, 1, _TOKENS, _TOKENS)},
        {},
        r"attention_mask: expected shape .*\(2, 23\); got \(2, 1, 23, 23\)",
    ),
    "numbers of documents for a mask": (
        {"attention_mask": torch.full((2, _TOKENS), 2)},
        {},
        "attention_mask: expected 0 for padding and 1 elsewhere; got up to 2",
    ),
    "padding among tokens": (
        {"attention_mask": (torch.arange(_TOKENS) != 7).expand(2, -1)},
        {},
        "attention_mask: expected padding before or after",
    ),
    "positions of other rows": (
        {"position_ids": torch.zeros(3, _TOKENS, dtype=torch.int64)},
        {},
        r"position_ids: expected shape .*; got \(3, 23\)",
    ),
    "bounds of two rows": (
        {"cu_seq_lens_q": torch.tensor([0, 23])},
        {},
        "cu_seq_lens_q: expected bounds of the documents of one row; got 2 rows; put all documents",
    ),
    "bounds of two rows, of keys alone": (
        {"cu_seq_lens_k": torch.tensor([0, 23])},
        {},
        "cu_seq_lens_k: expected bounds of the documents of one row; got 2 rows",
    ),
    "bounds beside padding": (
        {
            "input_ids": _IDS[:1],
            "attention_mask": _RIGHT[:1],
            "cu_seq_lens_q": torch.tensor([0, 18, 23]),
            "cu_seq_lens_k": torch.tensor([0, 18, 23]),
        },
        {},
        "attention_mask: expected none beside cu_seq_lens_q, or 1 everywhere; got another number "
        "for 5 of 23 tokens; leave padding out",
    ),
    "other bounds of the keys": (
        {
            "input_ids": _IDS[:1],
            "cu_seq_lens_q": torch.tensor([0, 10, 23]),
            "cu_seq_lens_k": torch.tensor([0, 12, 23]),
        },
        {},
        "cu_seq_lens_k: expected the bounds of cu_seq_lens_q; got 12 in place of 10 as bound 1; ",
    ),
    "fewer bounds of the keys": (
        {
            "input_ids": _IDS[:1],
            "cu_seq_lens_q": torch.tensor([0, 10, 23]),
            "cu_seq_lens_k": torch.tensor([0, 23]),
        },
        {},
        "cu_seq_lens_k: expected the bounds of cu_seq_lens_q; got 2 bounds in place of 3; ",
    ),
    "bounds that end early": (
        {"input_ids": _IDS[:1], "cu_seq_lens_q": torch.tensor([0, 10, 22])},
        {},
        "cu_seq_lens_q: expected a last bound of 23 tokens",
    ),
    "fewer tokens than ranks": ({"input_ids": _IDS[:, :1]}, {}, "for each of 2 ranks; got 1"),
    "a layout's name": ({}, {"layout": "spiral"}, "'spiral'"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("alone", [False, True])
def test_a_wrong_batch_is_refused_on_every_rank(case: str, alone: bool) -> None:
    """alone: only rank 1 gives it; the other rank waits in a call."""
    changed, options, message = WRONG[case]
    batch = {name: x for name, x in {"input_ids": _IDS, **changed}.items() if x is not None}

    def call(ctx: burst_rt.Context) -> None:
        if alone and ctx.rank == 0:
            ctx.all_reduce(torch.zeros(1))
        else:
            burst_rt.shard_batch(batch, ctx, **options)

    def run(ctx: burst_rt.Context) -> str:
        with pytest.raises(InputError, match=message) as caught:
            call(ctx)
        total = ctx.all_reduce(torch.ones(1))  # the context is usable
        assert total.item() == 2
        return re.sub(r"^(rank \d: )*", "", str(caught.value))

    first, second = burst_rt.run_local(2, run, timeout_s=60)
    assert first == second


@pytest.mark.parametrize("name", ["input_ids", "attention_mask", "dtype", "nothing"])
def test_ranks_compare_their_batches(name: str) -> None:
    def run(ctx: burst_rt.Context) -> str:
        batch = {"input_ids": _IDS.clone(), "attention_mask": _LEFT.clone()}
        if ctx.rank == 1 and name == "dtype":
            batch["attention_mask"] = batch["attention_mask"].bool()
        elif ctx.rank == 1 and name != "nothing":
            batch[name][0, 5] = 0
        try:
            burst_rt.shard_batch(batch, ctx, check=True)
        except ContractMismatch as error:
            return str(error)
        finally:
            assert ctx.all_reduce(torch.ones(1)).item() == 2  # the context is usable
        return ""

    for said in burst_rt.run_local(2, run, timeout_s=60):
        assert ("expected the same batch on all ranks" in said) == (name != "nothing")


def test_a_layout_of_another_length_is_refused() -> None:
    def run(ctx: burst_rt.Context) -> None:
        with pytest.raises(InputError, match="got 24 tokens over 2 ranks"):
            burst_rt.shard_batch({"input_ids": _IDS}, ctx, ctx.layout(24))

    burst_rt.run_local(2, run, timeout_s=60)


def _step(model: torch.nn.Module, ctx: burst_rt.Context, batch: dict[str, torch.Tensor]) -> float:
    shard = burst_rt.shard_batch(batch, ctx)
    scores = model(functional.one_hot(shard.input_ids % 7, 7).double())
    assert shard.shift_labels is not None
    loss = burst_rt.cross_entropy(scores, shard.shift_labels, group=ctx)
    loss.backward()
    burst_rt.average_gradients(model.parameters(), group=ctx)
    return loss.item()


@pytest.mark.parametrize("world_size", [2, 3])
def test_loss_and_gradients_are_those_of_one_rank(world_size: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(7, 7).double()
    labels = _IDS % 7
    labels[0, :9] = -100  # ranks have different numbers of labels

    def run(ctx: burst_rt.Context) -> tuple[float, list[Any]]:
        mine = deepcopy(model)
        loss = _step(mine, ctx, {"input_ids": _IDS, "labels": labels})
        return loss, [p.grad for p in mine.parameters()]

    ((loss, expected),) = burst_rt.run_local(1, run, timeout_s=60)
    for found, grads in burst_rt.run_local(world_size, run, timeout_s=60):
        assert found == pytest.approx(loss, rel=1e-6)
        for grad, other in zip(grads, expected, strict=True):
            # The loss is computed in float32.
            torch.testing.assert_close(grad, other, rtol=1e-5, atol=1e-7)


def test_gradients_that_some_ranks_lack_count_as_zero() -> None:
    def run(ctx: burst_rt.Context) -> list[Any]:
        parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
        parameters[0].grad = torch.full((2,), 2.0 + ctx.rank)
        if ctx.rank == 1:
            parameters[1].grad = torch.full((2,), 4.0)
        half = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        half.grad = torch.full((3,), 1.0 + ctx.rank, dtype=torch.bfloat16)
        burst_rt.average_gradients([*parameters, half], group=ctx)
        return [p.grad for p in (*parameters, half)]

    for first, second, none, half in burst_rt.run_local(2, run, timeout_s=60):
        assert none is None
        assert torch.equal(first, torch.tensor([2.5, 2.5]))
        assert torch.equal(second, torch.tensor([2.0, 2.0]))
        assert torch.equal(half, torch.tensor([1.5] * 3, dtype=torch.bfloat16))


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="gradients are as parameters")
def test_gradients_may_have_a_dtype_of_their_own() -> None:
    """float32 for parameters of bfloat16, say; also on a rank that has no gradient."""

    def run(ctx: burst_rt.Context) -> None:
        first: Any = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
        second: Any = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
        first.grad_dtype = torch.float32
        value = 1 + 2**-20  # bfloat16 has no such number
        if ctx.rank == 1:
            first.grad = torch.full((2,), 2 * value)
        second.grad = torch.ones(2, dtype=torch.bfloat16)
        burst_rt.average_gradients([second, first], group=ctx)
        assert torch.equal(first.grad, torch.full((2,), value))
        assert torch.equal(second.grad, torch.ones(2, dtype=torch.bfloat16))
        if ctx.rank == 1:
            first.grad = None
            first.grad_dtype = torch.bfloat16
        burst_rt.average_gradients([first], group=ctx)

    with pytest.raises(ContractMismatch, match=r"bfloat16 \(2,\), gradients of float32"):
        burst_rt.run_local(2, run, timeout_s=60)


def test_gradients_that_lie_together_are_averaged_where_they_are() -> None:
    def run(ctx: burst_rt.Context) -> torch.Tensor:
        flat = torch.arange(10.0) * (ctx.rank + 1)
        parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((2, 3), (4,))]
        for parameter, part in zip(parameters, flat.split([6, 4]), strict=True):
            parameter.grad = part.view_as(parameter)
        burst_rt.average_gradients(parameters, group=ctx)
        return flat

    for found in burst_rt.run_local(3, run, timeout_s=60):
        assert torch.equal(found, torch.arange(10.0) * 2)


def test_the_mask_of_a_packed_batch_goes_with_a_models_own() -> None:
    """Rows that differ in their documents, in one call."""
    heads = (2, _TOKENS, 2, 8)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(heads, generator=generator) for _ in range(3))
    batch = {"input_ids": _IDS, "position_ids": _PACKED}

    def run(ctx: burst_rt.Context) -> torch.Tensor:
        shard = burst_rt.shard_batch(batch, ctx)
        mine = [shard.layout.shard(x) for x in (q, k, v)]
        mask = Causal() & shard.mask
        out = burst_rt.burst_attention(*mine, layout=shard.layout, mask=mask)
        return shard.layout.unshard(out)

    ids = torch.tensor(_ids(((0, 23),), ((0, 10), (1, 13))))
    shown = torch.ones(_TOKENS, _TOKENS, dtype=torch.bool).tril() & (
        ids[:, None, :, None] == ids[:, None, None, :]
    )
    expected = functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=shown
    ).transpose(1, 2)
    for found in burst_rt.run_local(3, run, timeout_s=60):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_batch_without_names_is_refused() -> None:
    with pytest.raises(InputError, match=r"batch: expected Mapping.* got torch.int64"):
        burst_rt.shard_batch(_IDS, burst_rt.init())  # type: ignore[arg-type]


def test_a_label_that_is_no_class_is_refused_on_every_rank() -> None:
    def run(ctx: burst_rt.Context) -> None:
        labels = torch.tensor([1, -100, 7 if ctx.rank else 2])
        with pytest.raises(InputError, match=r"labels: expected 0 to 4, or -100 .*, got 7"):
            burst_rt.cross_entropy(torch.zeros(3, 5), labels, group=ctx)
        with pytest.raises(InputError, match=r"labels: expected torch.int64, got torch.int32"):
            burst_rt.cross_entropy(torch.zeros(3, 5), labels.int(), group=ctx)
        assert ctx.all_reduce(torch.ones(1)).item() == 2  # the context is usable

    burst_rt.run_local(2, run, timeout_s=60)


def test_what_is_no_context_is_refused() -> None:
    nothing: Any = None
    with pytest.raises(InputError, match=r"ctx: expected Context; got None"):
        burst_rt.shard_batch({"input_ids": _IDS}, nothing)


class _Small(torch.nn.Module):
    """One layer of attention, the same on every rank."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.qkv, self.out = (
            torch.nn.Parameter(torch.randn(size, generator=generator).to(dtype))
            for size in ((32, 3 * 16), (16, 32))
        )

    def forward(self, ids: torch.Tensor, attend: Any) -> torch.Tensor:
        x = functional.one_hot(ids, 32).to(self.qkv.dtype) @ self.qkv
        q, k, v = x.unflatten(-1, (3, 2, 8)).unbind(2)
        found: torch.Tensor = attend(q, k, v).flatten(2) @ self.out
        return found


def _packed_step() -> list[dict[str, torch.Tensor]]:
    """Four micro-batches of packed documents; each has another number of labels."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for number, lengths in enumerate([(40,), (7, 30, 3), (20, 20), (1, 1, 38)]):
        ids = torch.randint(32, (1, 40), generator=generator)
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        labels = ids.masked_fill(positions == 0, -100)
        labels[0, : 9 * number] = -100  # a prompt
        found.append({"input_ids": ids, "position_ids": positions, "labels": labels})
    return found


def _whole_step() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The loss of the step's tokens in one process, in float64, and its gradients."""
    model = _Small(torch.float64)
    scores, wanted = [], []
    for batch in _packed_step():
        documents = (batch["position_ids"][0] == 0).cumsum(0)
        shown = (documents[:, None] == documents).tril()

        def attend(*qkv: torch.Tensor, shown: torch.Tensor = shown) -> torch.Tensor:
            q, k, v = (x.transpose(1, 2) for x in qkv)
            out = functional.scaled_dot_product_attention(q, k, v, attn_mask=shown)
            return out.transpose(1, 2)

        scores.append(model(batch["input_ids"], attend)[0, :-1])
        wanted.append(batch["labels"][0, 1:])
    loss = functional.cross_entropy(torch.cat(scores), torch.cat(wanted))
    loss.backward()
    return loss.detach(), [x.grad for x in model.parameters() if x.grad is not None]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_micro_batches_add_up_to_the_step(world_size: int) -> None:
    truth, gradients = _whole_step()

    def run(ctx: burst_rt.Context) -> None:
        model = _Small(torch.float32)
        parts = [burst_rt.shard_batch(batch, ctx) for batch in _packed_step()]
        count = sum(part.num_labels for part in parts)
        assert len({part.num_labels for part in parts}) == 4
        total = torch.zeros(())
        for part in parts:
            mask = Causal() & part.mask
            attend = partial(burst_rt.burst_attention, layout=part.layout, mask=mask)
            logits = model(part.input_ids, attend)
            assert part.shift_labels is not None
            # A number, and a tensor of it.
            given = count if part is parts[0] else torch.tensor(count)
            loss = burst_rt.cross_entropy(logits, part.shift_labels, group=ctx, count=given)
            loss.backward()
            total += loss.detach()
        burst_rt.average_gradients(model.parameters(), group=ctx)
        torch.testing.assert_close(total, truth.float())
        for parameter, expected in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, expected.float(), rtol=1e-4, atol=1e-6)

    burst_rt.run_local(world_size, run)


@pytest.mark.parametrize(
    ("count", "got"),
    [
        (0, "0"), (-3, "-3"), (torch.nan, "nan"), (torch.inf, "inf"), (True, "True"),
        ("8", "'8'"), ([8], r"\[8\]"), (torch.ones(2), r"torch.float32 \(2,\)"),
        (torch.tensor(0), r"tensor\(0\)"), (10**400, "1000"), (2j, "2j"),
    ],
)  # fmt: skip
def test_counts_that_are_refused(count: Any, got: str) -> None:
    """By every rank, though one rank alone is wrong."""

    def run(ctx: burst_rt.Context) -> None:
        given = count if ctx.rank == 1 else 8
        logits, labels = torch.zeros(1, 3, 5), torch.ones(1, 3, dtype=torch.int64)
        with pytest.raises(InputError, match=f"count must be a number above 0, .*; got {got}"):
            burst_rt.cross_entropy(logits, labels, group=ctx, count=given)
        assert burst_rt.cross_entropy(logits, labels, group=ctx, count=8).isfinite()

    burst_rt.run_local(2, run)


def test_labels_may_be_bytes() -> None:
    """Models of bytes have no other numbers than these, and -100 is none of them."""
    with burst_rt.init() as ctx:
        tokens = torch.arange(8, dtype=torch.uint8)[None]
        part = burst_rt.shard_batch({"input_ids": tokens, "labels": tokens}, ctx)
    assert part.shift_labels is not None
    assert part.shift_labels.tolist() == [[1, 2, 3, 4, 5, 6, 7, -100]]
    assert part.num_labels == 7


def test_a_loss_of_a_single_token() -> None:
    with burst_rt.init() as ctx:
        logits, label = torch.randn(7), torch.tensor(3)
        found = burst_rt.cross_entropy(logits, label, group=ctx)
    torch.testing.assert_close(found, torch.nn.functional.cross_entropy(logits, label))
