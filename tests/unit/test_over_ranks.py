"""Plain torch models inside `over_ranks`, over ranks that are threads, against one process."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from covering import sampled
from plain_models import Decoder, Forward, encoder, errors_between, inputs, over_ranks, plain
from tolerances import ERROR, ROUNDING
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointError, checkpoint

import burst_rt
from burst_rt import Causal, Context, ContextLayout, Documents
from burst_rt.errors import BurstError, InputError

# Any: what comes as *args has no types of its own.
_sdpa: Any = functional.scaled_dot_product_attention


def _causal_encoder(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
    out: torch.Tensor = model(x, mask=mask, is_causal=True)
    return out


def _eval(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model.eval()(x)
    return out


def _eval_without_gradients(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        fast = _eval(model, x)
    out: torch.Tensor = model.train()(x)
    torch.testing.assert_close(fast, out)
    return out


def _checkpointed(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:  # type: ignore[union-attr]
        x = checkpoint(layer, x, use_reentrant=False)
    return x


def _kept(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:  # type: ignore[union-attr]
        x = burst_rt.checkpoint(layer, x)
    return x


def _called(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(x)
    return out


_MODELS: dict[str, tuple[Callable[[], nn.Module], Forward]] = {
    "decoder": (Decoder, _called),
    "decoder, checkpointed": (Decoder, _checkpointed),
    "decoder, attention kept": (Decoder, _kept),
    "encoder": (encoder, _called),
    "encoder, causal": (encoder, _causal_encoder),
    "encoder, eval": (encoder, _eval),
    "encoder, fast path": (encoder, _eval_without_gradients),
}


@sampled(
    name=tuple(_MODELS), kind=("zigzag", "contiguous", "striped"), world_size=(1, 2, 3),
    tokens=(7, 12, 13),
)  # fmt: skip
def test_a_step_is_that_of_one_process(name: str, kind: str, world_size: int, tokens: int) -> None:
    torch.manual_seed(0)
    make, call = _MODELS[name]
    model, x = make().double(), inputs(tokens)
    expected = plain(model, x, call)

    def step(ctx: Context) -> list[float]:
        found = over_ranks(ctx, ctx.layout(tokens, kind), model, x, call)
        return list(errors_between(found, expected))

    for errors in burst_rt.run_local(world_size, step, device="cpu"):
        assert max(errors) < ERROR[torch.float64]


def test_the_backward_may_come_in_a_block_of_its_own() -> None:
    model, x = Decoder().double(), inputs(9)
    expected = plain(model, x, _checkpointed)

    def step(ctx: Context) -> None:
        layout = ctx.layout(9)
        with burst_rt.over_ranks(ctx, layout):
            loss = _checkpointed(model, layout.shard(x)).square().sum()
        with burst_rt.over_ranks(ctx, layout):
            grads = torch.autograd.grad(loss, list(model.parameters()))
        for grad, right in zip(grads, expected.grads, strict=True):
            torch.testing.assert_close(ctx.all_reduce(grad.contiguous()), right)

    burst_rt.run_local(2, step, device="cpu")


def test_a_mask_of_the_block_comes_beside_what_calls_say() -> None:
    documents = Documents([4, 7])
    cells = torch.block_diag(*(torch.ones(n, n, dtype=torch.bool) for n in (4, 7)))
    q, k, v = torch.randn(3, 2, 2, 11, 8, dtype=torch.float64)

    def attend(ctx: Context) -> None:
        layout = ctx.layout(11)
        mine = [layout.shard(x, 2) for x in (q, k, v)]
        with burst_rt.over_ranks(ctx, layout, mask=documents):
            outs = _sdpa(*mine), _sdpa(*mine, is_causal=True)
        for out, mask in zip(outs, (cells, cells.tril()), strict=True):
            torch.testing.assert_close(layout.unshard(out, 2), _sdpa(q, k, v, attn_mask=mask))

    burst_rt.run_local(3, attend, device="cpu")


@pytest.mark.parametrize(
    "shape", [(11, 11), (1, 11), (2, 1, 11, 11), (2, 1, 1, 11), (1, 1, 1, 11)], ids=str
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_boolean_masks_of_the_whole_sequence(shape: tuple[int, ...], is_causal: bool) -> None:
    generator = torch.Generator().manual_seed(len(shape))
    cells = torch.rand(shape, generator=generator) < 0.6
    cells[..., 0] = True
    q, k, v = torch.randn(3, 2, 4, 11, 8, dtype=torch.float64, generator=generator)
    whole = cells & torch.ones(11, 11, dtype=torch.bool).tril() if is_causal else cells
    expected = _sdpa(q, k, v, attn_mask=whole)

    def attend(ctx: Context) -> torch.Tensor:
        layout = ctx.layout(11, "striped")
        with burst_rt.over_ranks(ctx, layout):
            mine = [layout.shard(x, 2) for x in (q, k, v)]
            outs = [_sdpa(*mine, attn_mask=cells, is_causal=is_causal) for _ in range(2)]
        assert torch.equal(*outs)
        return layout.unshard(outs[0], 2)

    for out in burst_rt.run_local(2, attend, device="cpu"):
        torch.testing.assert_close(out, expected)


def test_masks_that_alternate_under_checkpointing() -> None:
    generator = torch.Generator().manual_seed(0)
    masks = [torch.rand(9, 9, generator=generator) < share for share in (0.4, 0.8)]
    x = torch.randn(1, 2, 9, 8, generator=generator).double()

    def layer(x: torch.Tensor) -> torch.Tensor:
        for mask in masks:
            x = x + _sdpa(x, x, x.sin(), attn_mask=mask, is_causal=True)
        return x

    def grad_of(x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        checkpoint(layer, x, use_reentrant=False).square().sum().backward()
        assert x.grad is not None
        return x.grad

    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    whole = x.clone().requires_grad_()
    y = whole
    for mask in masks:
        y = y + _sdpa(y, y, y.sin(), attn_mask=mask & causal)
    y.square().sum().backward()

    def step(ctx: Context) -> torch.Tensor:
        layout = ctx.layout(9)
        with burst_rt.over_ranks(ctx, layout):
            grad = grad_of(layout.shard(x, 2))
        return layout.unshard(grad, 2)

    for grad in burst_rt.run_local(2, step, device="cpu"):
        torch.testing.assert_close(grad, whole.grad)


def test_a_mask_that_changes_in_place_is_read_again() -> None:
    q = torch.randn(1, 2, 5, 8)
    cells = torch.ones(5, 5, dtype=torch.bool)
    with burst_rt.init(device="cpu") as ctx, burst_rt.over_ranks(ctx, ctx.layout(5)):
        first = _sdpa(q, q, q, attn_mask=cells)
        cells[:, 3:] = False
        second = _sdpa(q, q, q, attn_mask=cells)
    torch.testing.assert_close(first, _sdpa(q, q, q))
    torch.testing.assert_close(second, _sdpa(q, q, q, attn_mask=cells))


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 2, 3)], ids=str)
def test_any_batch(lead: tuple[int, ...]) -> None:
    q, k, v = torch.randn(3, *lead, 9, 8, dtype=torch.float64)

    def attend(ctx: Context) -> torch.Tensor:
        layout = ctx.layout(9)
        with burst_rt.over_ranks(ctx, layout):
            out = _sdpa(*(layout.shard(x, -2) for x in (q, k, v)), is_causal=True)
        return layout.unshard(out, -2)

    for out in burst_rt.run_local(2, attend, device="cpu"):
        torch.testing.assert_close(out, _sdpa(q, k, v, is_causal=True))


def test_autocast_means_what_it_means_in_torch() -> None:
    q, k, v = torch.randn(3, 1, 2, 9, 8)
    with burst_rt.init(device="cpu") as ctx, torch.autocast("cpu", torch.bfloat16):
        expected = _sdpa(q, k.bfloat16(), v)
        with burst_rt.over_ranks(ctx, ctx.layout(9)):
            out = _sdpa(q, k.bfloat16(), v)
            precise = _sdpa(q.double(), k.double(), v.double())
    assert out.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected, rtol=0, atol=4 * ROUNDING[torch.bfloat16])
    assert precise.dtype == torch.float64


def test_aten_s_own_name_is_seen() -> None:
    q = torch.randn(1, 2, 9, 8)
    program = torch.export.export(_Exported(), (q,)).module()
    with burst_rt.init(device="cpu") as ctx, burst_rt.over_ranks(ctx, ctx.layout(9)) as _:
        before = ctx.stats().calls
        out = program(q)
        assert ctx.stats().calls == before + 1
    torch.testing.assert_close(out, _sdpa(q, q, q))


class _Exported(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _sdpa(x, x, x)
        return out


def _wrong(**options: Any) -> Callable[[ContextLayout], object]:
    def call(layout: ContextLayout) -> object:
        q = torch.zeros(2, 4, layout.shard_len, 8)
        given = {"query": q, "key": q, "value": q} | options
        return _sdpa(**given)

    return call


def _multihead(layout: ContextLayout, **options: Any) -> object:
    module = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.zeros(1, layout.shard_len, 8)
    return module(x, x, x, **options)


def _padded_encoder(layout: ContextLayout) -> object:
    x = torch.zeros(1, layout.shard_len, 16)
    padding = torch.zeros(1, layout.shard_len, dtype=torch.bool)
    return encoder().eval()(x, src_key_padding_mask=padding)


def _reentrant(layout: ContextLayout) -> object:
    x = torch.zeros(1, layout.shard_len, 16, requires_grad=True)
    return checkpoint(Decoder(), x, use_reentrant=True)


_half = torch.zeros(2, 4, 3, 8)
_REFUSED: dict[str, tuple[Callable[[ContextLayout], object], str]] = {
    "dropout": (_wrong(dropout_p=0.1), "dropout_p: expected 0, got 0.1"),
    "a float mask": (_wrong(attn_mask=torch.zeros(9, 9)), "attn_mask: expected booleans"),
    "a mask of some tokens": (
        _wrong(attn_mask=torch.ones(5, 5, dtype=torch.bool)),
        r"attn_mask: expected the mask of the whole sequence.*\(5, 5\)",
    ),
    "a mask of each head": (
        _wrong(attn_mask=torch.ones(4, 9, 9, dtype=torch.bool)),
        "attn_mask: expected one for all heads",
    ),
    "a mask of another batch": (
        _wrong(attn_mask=torch.ones(3, 1, 9, 9, dtype=torch.bool)),
        "attn_mask: expected one for all heads",
    ),
    "a cache": (
        _wrong(key=_half, value=_half),
        r"key: expected \[\.\.\., heads, this rank's . of 9 tokens",
    ),
    "all tokens": (_wrong(query=torch.zeros(2, 4, 9, 8)), "query: expected"),
    "another batch": (_wrong(key=torch.zeros(1, 4, 4, 8)), "key: expected"),
    "one vector": (_wrong(query=torch.zeros(8)), "query: expected a tensor"),
    "grouped heads, unsaid": (
        lambda layout: _sdpa(
            torch.zeros(1, 4, layout.shard_len, 8), *(torch.zeros(2, 1, 2, layout.shard_len, 8))
        ),
        "say enable_gqa=True",
    ),
    "a negative scale": (_wrong(scale=-1.0), "scale must be None or a finite number above 0"),
    "weights": (_multihead, "need_weights: expected False, got True"),
    "padding by MultiheadAttention": (
        lambda layout: _multihead(
            layout,
            need_weights=False,
            key_padding_mask=torch.zeros(1, layout.shard_len, dtype=torch.bool),
        ),
        "attn_mask: expected booleans",
    ),
    "padding by the encoder": (_padded_encoder, "attn_mask: expected booleans"),
    "dropout of torch's layer": (
        lambda layout: nn.TransformerEncoderLayer(8, 2, batch_first=True)(
            torch.zeros(1, layout.shard_len, 8)
        ),
        "dropout_p: expected 0, got 0.1",
    ),
    "reentrant checkpointing": (_reentrant, "use_reentrant: expected False, got True"),
    "the fast path itself": (
        lambda layout: torch._native_multi_head_attention(
            *(torch.zeros(1, layout.shard_len, 8),) * 3, 8, 2, torch.zeros(24, 8),
            torch.zeros(24), torch.zeros(8, 8), torch.zeros(8),
        ),
        "got _native_multi_head_attention",
    ),
    "nothing": (lambda layout: None, "got none"),
}  # fmt: skip


@pytest.mark.parametrize("name", _REFUSED)
def test_what_is_refused_is_refused_on_all_ranks(name: str) -> None:
    call, words = _REFUSED[name]

    def attempt(ctx: Context, odd: int | None) -> str:
        layout = ctx.layout(9)
        good = torch.zeros(2, 4, layout.shard_len, 8)
        said = "nothing"
        try:
            with burst_rt.over_ranks(ctx, layout):
                if odd in (None, ctx.rank):
                    call(layout)
                else:
                    _sdpa(good, good, good)
            ctx.all_gather("the next call")
        except BurstError as error:
            said = f"{type(error).__name__}: {error}"
        # The context is usable.
        with burst_rt.over_ranks(ctx, layout):
            _sdpa(good, good, good)
        return said

    for odd in (None, 1):
        for said in burst_rt.run_local(2, partial(attempt, odd=odd), device="cpu", timeout_s=60):
            assert re.search(f"InputError: .*{words}", said), said


def test_checkpointing_whose_backward_is_outside() -> None:
    # As many tokens as heads: the second forward saves tensors of the same shapes.
    model, x = Decoder(), inputs(4, torch.float32)
    with burst_rt.init(device="cpu") as ctx:
        layout = ctx.layout(4)
        for check in ("default", "none"):
            with burst_rt.over_ranks(ctx, layout):
                y = checkpoint(model, x, use_reentrant=False, determinism_check=check)
            with pytest.raises(CheckpointError):
                y.sum().backward()
        with burst_rt.over_ranks(ctx, layout, mask=Causal()):
            y = checkpoint(_Bidirectional(), x, use_reentrant=False)
        another = burst_rt.over_ranks(ctx, layout)
        with pytest.raises(InputError, match=r"backward\(\) in the block"), another:
            y.sum().backward()


class _Bidirectional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.linear(x).unflatten(-1, (4, -1)).transpose(1, 2)
        out: torch.Tensor = _sdpa(q, q, q)
        return out


def test_a_layout_of_another_context_is_refused() -> None:
    with burst_rt.init(device="cpu") as ctx, burst_rt.init(device="cpu") as other:
        with pytest.raises(InputError, match="layout: expected one of this context"):
            burst_rt.over_ranks(ctx, other.layout(8))
        with pytest.raises(InputError, match="ctx"):
            burst_rt.over_ranks(None, ctx.layout(8))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["decoder", pytest.param("encoder", marks=pytest.mark.long), "encoder, fast path"]
)
def test_a_compiled_model(name: str) -> None:
    torch._dynamo.reset()
    make, call = _MODELS[name]
    model = make()
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    with burst_rt.init(device="cpu") as ctx:
        for tokens in (9, 12):
            x = inputs(tokens, torch.float32)
            expected = plain(model, x, call)
            model.zero_grad()
            before = ctx.stats().calls
            with burst_rt.over_ranks(ctx, ctx.layout(tokens)):
                out = call(compiled, x)
                out.square().sum().backward()
            assert ctx.stats().calls >= before + 4, "two layers, forward and backward"
            grads = [torch.zeros(0) if p.grad is None else p.grad for p in model.parameters()]
            found = expected._replace(out=out.detach(), grads=grads)
            assert max(errors_between(found, expected)) < ERROR[torch.float32]
        before = ctx.stats().calls
        compiled(inputs(12, torch.float32))
        assert ctx.stats().calls == before, "outside of the block nothing goes over ranks"


def test_a_checkpoint_inside_a_compiled_program() -> None:
    torch._dynamo.reset()
    model, x = Decoder(), inputs(9, torch.float32)
    expected = plain(model, x, _checkpointed)
    with burst_rt.init(device="cpu") as ctx:
        block = partial(burst_rt.over_ranks, ctx, ctx.layout(9))
        whole = torch.compile(_checkpointed, fullgraph=True, backend="aot_eager")
        with (
            pytest.raises(Exception, match=r"over_ranks: .* got tag_activation_checkpoint"),
            block(),
        ):
            whole(model, x)
        broken = torch.compile(_checkpointed, backend="aot_eager")
        before = ctx.stats().calls
        with block():
            out = broken(model, x)
        assert ctx.stats().calls == before + 2
        torch.testing.assert_close(out, expected.out)


def test_boolean_masks_made_in_inference_mode() -> None:
    with torch.inference_mode(), burst_rt.init() as ctx:
        with burst_rt.over_ranks(ctx, ctx.layout(8)):
            x, mask = torch.randn(1, 2, 8, 4), torch.ones(8, 8, dtype=torch.bool).tril()
            functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)
            mask[4:, 0] = False  # which no version tells
            found = functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        right = functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        torch.testing.assert_close(found, right)
