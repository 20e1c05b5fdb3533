"""`burst_rt.hf`: what it reads of transformers' masks, and what it refuses on every rank. That
models are right over ranks is tested in tests/mpi/test_models.py.
"""

from __future__ import annotations

import gc
import io
import math
import re
import warnings
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from forked import with_torch
from small_models import TOKENS, make_batch, make_model, seen, truth
from torch.nn.functional import cross_entropy
from transformers import masking_utils
from transformers.loss.loss_utils import LOSS_MAPPING
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast

import burst_rt
import burst_rt.hf
from burst_rt import Causal, Chunked, Full, LayerCosts, Mask, SlidingWindow
from burst_rt.errors import ContractMismatch, InputError
from burst_rt.hf.blocks import mask_of_blocks
from burst_rt.hf.masks import MaskHandover, mask_of
from burst_rt.hf.shard import set_prepared

# Tests that catch what a call raises leave parts that nobody attended by.
pytestmark = [
    pytest.mark.usefixtures("no_parts_left"),
    pytest.mark.filterwarnings("ignore:burst_rt.hf.shard. a part of a batch is gone"),
]

_NO_PADDING = torch.zeros(2, dtype=torch.int64)
_POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 7, 8]] * 2)

MASKS: dict[str, tuple[Callable[..., Any], Mask]] = {
    "causal": (masking_utils.causal_mask_function, Causal()),
    "full": (masking_utils.bidirectional_mask_function, Full()),
    "window": (
        masking_utils.sliding_window_causal_mask_function(4),
        Causal() & SlidingWindow(3),
    ),
    "window both ways": (
        masking_utils.sliding_window_bidirectional_mask_function(4),
        SlidingWindow(4, 4),
    ),
    "chunks": (masking_utils.chunked_causal_mask_function(4, _NO_PADDING), Causal() & Chunked(4)),
    "either": (
        masking_utils.or_masks(
            masking_utils.sliding_window_bidirectional_mask_function(2),
            masking_utils.causal_mask_function,
        ),
        SlidingWindow(2, 2) | Causal(),
    ),
    "images, of which there are none": (
        masking_utils.or_masks(
            masking_utils.causal_mask_function,
            masking_utils.blockwise_overlay(torch.full((1, 12), -1)),
        ),
        Causal(),
    ),
}


def _cells(mask: Mask, tokens: int) -> torch.Tensor:
    """Which key each query sees, by spans."""

    spans = mask.bound(tokens, tokens).spans(np.arange(tokens))
    starts, stops = (torch.from_numpy(x.copy()) for x in (spans.starts, spans.stops))
    keys = torch.arange(tokens)
    return ((keys >= starts[..., None]) & (keys < stops[..., None])).any(-2).reshape(tokens, tokens)


@pytest.mark.parametrize("case", MASKS)
def test_a_mask_function_is_read(case: str) -> None:
    """By the cells that the function itself shows."""
    function, expected = MASKS[case]
    places = torch.arange(12)
    shown = function(0, 0, places[:, None], places)
    found = mask_of(function)
    assert torch.equal(_cells(found, 12), torch.broadcast_to(shown, (12, 12)))
    assert torch.equal(_cells(found, 12), _cells(expected, 12))


def test_documents_are_left_to_shard() -> None:
    packed = masking_utils.find_packed_sequence_indices(_POSITIONS)
    function = masking_utils.and_masks(
        masking_utils.packed_sequence_mask_function(packed),
        masking_utils.remap_positions_for_packed_sequence(
            masking_utils.causal_mask_function, _POSITIONS
        ),
    )
    assert mask_of(function) == Causal()


def _nearby(distance: int) -> Callable[..., Any]:
    """A mask function of a model's own, whose code says what it computes."""

    def function(batch: Any, head: Any, q: Any, kv: Any) -> Any:
        return _less(torch.abs(q - kv), distance) & (head == 0)

    return function


def _less(x: Any, than: int) -> Any:
    return x < than


def test_a_function_of_a_models_own_is_asked_about_each_cell() -> None:
    function = masking_utils.or_masks(masking_utils.causal_mask_function, _nearby(3))
    found = mask_of(function)
    places = torch.arange(12)
    asked = found.second.function(torch.zeros(1), torch.ones(1), places[:, None], places)  # type: ignore[attr-defined]  # a pair
    shown = function(torch.zeros(1), torch.zeros(1), places[:, None], places)
    assert torch.equal(_cells(Causal(), 12) | asked, shown)
    # The same code is the same mask; other numbers in it are another.
    assert mask_of(_nearby(3)) is mask_of(_nearby(3))
    words = {repr(mask_of(_nearby(distance))) for distance in (3, 3, 4)}
    assert len(words) == 2
    assert all("test_hf._nearby.<locals>.function, digest" in each for each in words)


def test_ranks_compare_functions_by_their_code() -> None:
    masks = [mask_of(_nearby(3 + rank)) for rank in range(2)]

    def run(ctx: burst_rt.Context) -> None:
        layout = ctx.layout(16)
        x = torch.ones(1, layout.shard_len, 1, 8)
        with pytest.raises(ContractMismatch, match="mask"):
            burst_rt.burst_attention(x, x, x, mask=Causal() & masks[ctx.rank], layout=layout)

    burst_rt.run_local(2, run, timeout_s=60)


def _of_one_rank(tokens: torch.Tensor) -> Callable[..., Any]:
    def function(batch: Any, head: Any, q: Any, kv: Any) -> Any:
        return tokens[batch, q] == tokens[batch, kv]

    return function


class _Callable:
    def __call__(self, *cells: Any) -> bool:
        return True


UNREADABLE: dict[str, tuple[Callable[..., Any], str]] = {
    "the user's own, of one rank's tokens": (
        masking_utils.and_masks(_of_one_rank(torch.zeros(1, 4))),
        r"mask function .*test_hf\._of_one_rank.* with a torch\.Tensor, which may count in",
    ),
    "an object": (_Callable(), r"mask function .*test_hf\._Callable with a "),
}
UNREADABLE_FROM_A_CACHE: dict[str, tuple[Callable[..., Any], str]] = {
    "the user's own": (_nearby(3), "a mask function of the model's own is not done with a cache"),
    "image tokens": (
        masking_utils.blockwise_overlay(torch.zeros(1, 4)),
        "token_type_ids: tokens of an image see each other.*which is not done with a cache",
    ),
    "chunks behind padding": (
        masking_utils.chunked_causal_mask_function(4, _NO_PADDING + 1),
        "over a cache with left padding is not done",
    ),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_mask_function_that_is_not_known_is_refused(case: str) -> None:
    function, message = UNREADABLE[case]
    with pytest.raises(InputError, match=message):
        mask_of(function)


@pytest.mark.parametrize("case", UNREADABLE_FROM_A_CACHE)
def test_a_mask_function_that_needs_all_tokens_is_refused_over_a_cache(case: str) -> None:
    function, message = UNREADABLE_FROM_A_CACHE[case]
    with pytest.raises(InputError, match=message):
        MaskHandover(function).mask(None)


def test_blocks_are_of_tokens_with_one_number_in_one_document() -> None:
    ids = torch.tensor([[0, 0, -1, 0, 7, 7, -1, 0], [-1, 3, 3, -1, 3, -1, -1, 3]])
    documents = [burst_rt.Full(), burst_rt.Documents([[3, 5], [4, 4]])]
    tokens, of_document = torch.arange(8), torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]] * 2)
    of_document[1, 3] = 0
    for number, mask in enumerate(documents):
        found = mask_of_blocks(ids, mask)
        together = (ids[..., None] == ids[:, None]) & (ids >= 0)[..., None]
        if number:
            together &= of_document[..., None] == of_document[:, None]
        assert torch.equal(found.allows(tokens[:, None], tokens), together)
        assert found == mask_of_blocks(ids, mask)
        assert found != mask_of_blocks(ids.flip(1), mask)
        assert found.refuses(8, 8, 2) is None
        assert "9" in str(found.refuses(9, 9, 2))


@pytest.mark.parametrize("kind", ["plain", "left", "packed"])
def test_a_mask_function_of_a_models_own_over_ranks(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The first 4 tokens of all, or of each document, are seen by all; functions say that."""
    own = partial(
        masking_utils.create_causal_mask, or_mask_function=lambda batch, head, q, kv: kv < 4
    )
    monkeypatch.setattr(transformers.models.llama.modeling_llama, "create_causal_mask", own)
    expected = truth("Llama", kind)
    models, meant = [make_model("Llama") for _ in range(3)], seen(make_batch("Llama", kind))

    def run(ctx: burst_rt.Context) -> tuple[float, torch.Tensor]:
        model = models[ctx.rank]
        model.set_attn_implementation("burst_rt")
        burst_rt.hf.prepare(model, ctx)
        part = burst_rt.hf.shard(make_batch("Llama", kind), ctx)
        output = model(**part)
        output.loss.backward()
        return output.loss.item(), part["burst_rt"].batch.layout.unshard(output.logits.detach())

    for loss, logits in burst_rt.run_local(3, run, timeout_s=60):
        assert loss == pytest.approx(expected["loss"], rel=1e-5)
        off = (logits - expected["logits"])[meant].abs().max()
        assert off <= 1e-5 * expected["logits"].abs().max()


def test_other_models_losses_stay_as_they_are() -> None:
    logits, labels = torch.randn(1, 5, 7), torch.tensor([[1, 2, 3, -100, 4]])
    loss = LOSS_MAPPING["ForCausalLM"](logits=logits, labels=labels, vocab_size=7)
    expected = transformers.loss.loss_utils.ForCausalLMLoss(logits, labels, 7)
    assert torch.equal(loss, expected)


def _over_ranks(
    model: Any, call: Callable[[Any, dict[str, Any], burst_rt.Context], object], kind: str = "plain"
) -> list[str]:
    """What each of two ranks refuses a call with."""
    model.set_attn_implementation("burst_rt")
    name = "T5Gemma" if model.config.is_encoder_decoder else "Llama"

    def run(ctx: burst_rt.Context) -> str:
        burst_rt.hf.prepare(make_model("Llama"), ctx)  # another model
        with pytest.raises(InputError) as caught:
            call(deepcopy(model), burst_rt.hf.shard(make_batch(name, kind), ctx), ctx)
        assert ctx.all_reduce(torch.ones(1)).item() == 2  # the context is usable
        return re.sub(r"^(rank \d: )*", "", str(caught.value))

    return burst_rt.run_local(2, run, timeout_s=60)


def _naive(model: Any, part: dict[str, Any], ctx: burst_rt.Context) -> object:
    return model(input_ids=part["input_ids"], labels=part["input_ids"])


def _one_rank_naive(model: Any, part: dict[str, Any], ctx: burst_rt.Context) -> object:
    burst_rt.hf.prepare(model, ctx)
    return model(**part) if ctx.rank == 0 else _naive(model, part, ctx)


def _local_positions(model: Any, part: dict[str, Any], ctx: burst_rt.Context) -> object:
    positions = torch.arange(part["input_ids"].shape[1])[None]
    return _prepared(model, {**part, "position_ids": positions}, ctx)


def _without_positions(model: Any, part: dict[str, Any], ctx: burst_rt.Context) -> object:
    named = {name: x for name, x in part.items() if name != "position_ids"}
    return _prepared(model, named, ctx)


def _as_it_is(model: Any, part: dict[str, Any], ctx: burst_rt.Context) -> object:
    return model(**part)


def _with_a_matrix(model: Any, part: dict[str, Any], ctx: burst_rt.Context) -> object:
    tokens = part["input_ids"].shape[1]
    return _prepared(model, part | {"attention_mask": torch.ones(2, 1, tokens, tokens)}, ctx)


def _with_router(model: Any, part: dict[str, Any], ctx: burst_rt.Context) -> object:
    return _prepared(model, part | {"output_router_logits": True}, ctx)


def _with_types(model: Any, part: dict[str, Any], ctx: burst_rt.Context) -> object:
    types = torch.ones_like(part["input_ids"])
    return _prepared(model, part | {"mm_token_type_ids": types}, ctx)


def _with_late_types(model: Any, part: dict[str, Any], ctx: burst_rt.Context) -> object:
    return _prepared(model, part | {"token_type_ids": torch.ones_like(part["input_ids"])}, ctx)


def _without_shifted_labels(model: Any, part: dict[str, Any], ctx: burst_rt.Context) -> object:
    named = {name: x for name, x in part.items() if name != "shift_labels"}
    return _prepared(model, named, ctx)


def _small(kind: str, model: str, **options: Any) -> Callable[[], Any]:
    config = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "pad_token_id": 0, "use_cache": False, **options,
    }  # fmt: skip

    def make() -> Any:
        return getattr(transformers, model)(getattr(transformers, kind)(**config)).train()

    return make


def _router_of_its_own() -> Any:
    """A Mixtral with a forward in the place of its own, which balances one rank's tokens."""

    def forward(self: Any, input_ids: Any, labels: Any = None, **options: Any) -> Any:
        output = self.model(input_ids, output_router_logits=True, **options)
        share = output.router_logits[0].softmax(-1).mean(0)
        return MoeCausalLMOutputWithPast(
            logits=self.lm_head(output[0]), aux_loss=4 * (share * share).sum()
        )

    model = make_model("Mixtral")
    model.forward = MethodType(forward, model)
    return model


def _with_a_loss_of_its_own() -> Any:
    """A Llama with a forward in the place of its own, as libraries of fused losses put one."""

    def forward(self: Any, input_ids: Any, labels: Any = None, **options: Any) -> Any:
        shifted = options.pop("shift_labels", None)
        logits = self.lm_head(self.model(input_ids, **options)[0])
        if labels is None:
            return CausalLMOutputWithPast(logits=logits)
        if shifted is None:
            shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
        meant = torch.as_tensor(shifted != -100)
        losses = logits.log_softmax(-1).gather(-1, shifted.clamp_min(0)[..., None])[..., 0]
        return CausalLMOutputWithPast(loss=-losses[meant].mean(), logits=logits)

    model = make_model("Llama")
    model.forward = MethodType(forward, model)
    return model


def _bart() -> Any:
    config = transformers.BartConfig(
        vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, dropout=0.0,
        max_position_embeddings=128, is_encoder_decoder=False,
    )  # fmt: skip
    return transformers.BartForCausalLM(config).eval()


def _t5() -> Any:
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4, dropout_rate=0.0
    )
    return transformers.T5EncoderModel(config).eval()


def _mamba() -> Any:
    config = transformers.MambaConfig(
        vocab_size=64, hidden_size=32, state_size=4, num_hidden_layers=2, use_cache=False
    )
    return transformers.MambaForCausalLM(config).eval()


def _xlstm() -> Any:
    torch.manual_seed(0)
    config = transformers.xLSTMConfig(
        vocab_size=64, hidden_size=32, num_blocks=2, num_heads=2, pad_token_id=0, use_cache=False
    )
    return transformers.xLSTMForCausalLM(config).eval()


def _bloom() -> Any:
    config = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4)
    return transformers.BloomForCausalLM(config).eval()


def _bert() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def _modernbert() -> Any:
    return transformers.ModernBertForTokenClassification(make_model("ModernBert").config)


def _prepared(model: Any, part: dict[str, Any], ctx: burst_rt.Context) -> object:
    return burst_rt.hf.prepare(model, ctx)(**part)


def _a_layer(model: Any, part: dict[str, Any], ctx: burst_rt.Context) -> object:
    layer = burst_rt.hf.prepare(model, ctx).model.layers[0].self_attn
    turns = torch.zeros(2, 5, layer.head_dim)
    return layer(torch.zeros(2, 5, 32), (turns, turns), None, burst_rt=part["burst_rt"])


def _without_the_loss(model: Any, part: dict[str, Any], ctx: burst_rt.Context) -> object:
    return burst_rt.hf.prepare(model, ctx, loss=False)(**part)


def _without_labels(model: Any, part: dict[str, Any], ctx: burst_rt.Context) -> object:
    return burst_rt.hf.prepare(model, ctx)(**_unlabelled(part))


def _last_logits(model: Any, part: dict[str, Any], ctx: burst_rt.Context) -> object:
    return burst_rt.hf.prepare(model, ctx)(**_unlabelled(part), logits_to_keep=1)


def _unlabelled(part: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in part.items() if "labels" not in name}


def _eager(model: Any, part: dict[str, Any], ctx: burst_rt.Context) -> object:
    model = burst_rt.hf.prepare(model, ctx)
    model.set_attn_implementation("eager")
    return model(**_unlabelled(part))


def _loss_of_logits(model: Any, part: dict[str, Any], ctx: burst_rt.Context) -> object:
    logits = model(**_unlabelled(part)).logits
    return burst_rt.cross_entropy(logits, part["shift_labels"], group=ctx)


def _own_loss() -> Any:
    """One that no function of torch's makes."""
    model = _bert()

    def forward(self: Any, labels: torch.Tensor | None = None, **options: Any) -> Any:
        output = type(self).forward(self, **options)
        if labels is not None:
            counted = labels != -100
            chosen = output.logits.log_softmax(-1).gather(-1, labels.clamp(0)[..., None])[..., 0]
            output.loss = -(chosen * counted).sum() / counted.sum()
        return output

    model.forward = MethodType(forward, model)
    return model


def _call_encoder(model: Any, part: dict[str, Any], ctx: burst_rt.Context) -> object:
    return model(input_ids=part["input_ids"], burst_rt=part["burst_rt"])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"position_ids": list(range(TOKENS))}, "position_ids: expected a tensor; got list"),
        ({"attention_mask": [[1] * TOKENS] * 2}, "attention_mask: expected a tensor; got list"),
        ({"position_ids": np.arange(TOKENS)}, "position_ids: expected a tensor; got ndarray"),
        ({"cu_seq_lens_q": [0, TOKENS]}, "cu_seq_lens_q: expected a tensor; got list"),
        ({"input_ids": torch.zeros(0, 8, dtype=torch.int64)}, "at least a row"),
        ({"num_items_in_batch": -1}, "num_items_in_batch: expected .*, above 0; got -1"),
        ({"num_items_in_batch": "7"}, "num_items_in_batch: expected .*, above 0; got '7'"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused(changed: dict[str, Any], message: str) -> None:
    def run(ctx: burst_rt.Context) -> None:
        set_prepared(ctx, attends=True, costs=LayerCosts())
        batch = {"input_ids": torch.ones(2, TOKENS, dtype=torch.int64)}
        with pytest.raises(InputError, match=message):
            burst_rt.hf.shard({**batch, **changed}, ctx)

    burst_rt.run_local(2, run, timeout_s=60)


def test_a_batch_is_tensors_by_name_and_its_number_the_same() -> None:
    def run(ctx: burst_rt.Context) -> None:
        set_prepared(ctx, attends=True, costs=LayerCosts())
        batch = {"input_ids": torch.ones(2, TOKENS, dtype=torch.int64)}
        with pytest.raises(InputError, match="batch: expected tensors by name, got list"):
            burst_rt.hf.shard([batch], ctx)  # type: ignore[arg-type]
        with pytest.raises(ContractMismatch, match=r"got \[10.0, 11.0\] by rank"):
            burst_rt.hf.shard({**batch, "num_items_in_batch": 10 + ctx.rank}, ctx)
        with pytest.raises(InputError, match=r"got tensor\(\[7\]\), which is no single number"):
            burst_rt.hf.shard({**batch, "num_items_in_batch": torch.tensor([7])}, ctx)
        numbers = torch.arange(TOKENS).expand(2, -1) // 9
        with pytest.raises(InputError, match="seq_idx: expected documents to be told by"):
            burst_rt.hf.shard({**batch, "seq_idx": numbers}, ctx)
        given = {"num_items_in_batch": torch.tensor(7), "seq_idx": numbers[:, :9] * 0}
        part = burst_rt.hf.shard({**batch, **given}, ctx)
        assert part["num_items_in_batch"] == 7
        part["burst_rt"].excused = True

    burst_rt.run_local(2, run, timeout_s=60)


_DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
REFUSED: dict[str, tuple[Callable[[], Any], Any, str]] = {
    "a fused loss": (_with_a_loss_of_its_own, _prepared, "computes its loss by itself"),
    "weights elsewhere": (
        lambda: _small("Qwen2Config", "Qwen2ForCausalLM")().to("meta"), _prepared,
        r"expected weights on cpu, where .* got some on meta; call model\.to\(ctx\.device\)",
    ),
    "a shard without the keyword": (
        lambda: make_model("Llama"), _naive, "expected the keyword 'burst_rt', got none",
    ),
    "a shard without the keyword, on one rank": (
        lambda: make_model("Llama"), _one_rank_naive, "expected the keyword 'burst_rt', got none",
    ),
    "positions that count on this rank": (
        lambda: make_model("Llama"), _local_positions, "position_ids: expected those of",
    ),
    "no positions": (
        lambda: make_model("Llama"), _without_positions, "position_ids: expected those of",
    ),
    "labels that are not shifted": (
        lambda: make_model("Llama"), _without_shifted_labels, "expected shift_labels",
    ),
    "dropout": (
        _small("LlamaConfig", "LlamaForCausalLM", attention_dropout=0.1), _prepared,
        "attention_dropout: expected 0, got 0.1",
    ),
    "a mask of its own for each row": (
        lambda: make_model("Llama"), _with_a_matrix,
        r"attention_mask: expected .*, got Tensor of shape \(2, 1,",
    ),
    "a router's loss that is not known": (
        lambda: make_model("Llama4"), _with_router, "output_router_logits: expected False, or",
    ),
    "a router's loss of the model's own": (
        _router_of_its_own, _without_the_loss, "expected a model that asks transformers' load_bal",
    ),
    "types of images that may be positions": (
        lambda: make_model("Llama"), _with_types, "mm_token_type_ids: LlamaForCausalLM: expected",
    ),
    "types of images that were not in the batch": (
        lambda: make_model("Gemma3Images"), _with_late_types,
        "token_type_ids: expected those of the whole batch, got some in the call alone",
    ),
    "a model that was not prepared": (
        lambda: make_model("Llama"), _as_it_is,
        r"modeling_llama: expected a model that was prepared .* call burst_rt.hf.prepare\(model,",
    ),
    "a part of a model": (
        lambda: make_model("Llama"), _a_layer, r"got one of a part of it \(LlamaAttention\)",
    ),
    "positions that a model does not take": (_bart, _prepared, "not what it is on one process"),
    "recurrent layers": (_xlstm, _prepared, "not what it is on one process"),
    "state spaces that nothing asks about": (_mamba, _as_it_is, "none of whose layers has asked"),
    "state spaces without labels": (_mamba, _loss_of_logits, "none of whose layers has asked"),
    "attention that was changed later": (
        lambda: make_model("Llama"), _eager, "none of whose layers has asked",
    ),
    "a head that pools": (
        _small("LlamaConfig", "LlamaForSequenceClassification"), _without_labels,
        r"LlamaForSequenceClassification: expected an output .* got one of shape \(2, 2\)",
    ),
    "a pooled output beside the tokens'": (
        lambda: transformers.BertModel(_bert().config), _without_labels,
        r"BertModel: expected an output .* got one of shape \(2, 32\), 'pooler_output'",
    ),
    "the last logits": (
        lambda: make_model("Llama"), _last_logits, r"got one of shape \(2, 1, 64\)",
    ),
    "a mask that is looked into": (
        _small("DogeConfig", "DogeForCausalLM"), _as_it_is,
        r"attention_mask\.dtype: expected a model that hands its mask on",
    ),
    "attention of its own": (_bloom, _prepared, "cannot take its attention from burst_rt"),
    # In 16 bits a mean of one rank's tokens is within the rounding that `prepare` allows.
    "a loss of torch's": (
        lambda: _bert().bfloat16(), _prepared, "one that calls torch's cross_entropy",
    ),
    "a loss of torch's that is not compared": (
        _bert, _without_the_loss, "one that calls torch's cross_entropy",
    ),
    "a loss of its own": (_own_loss, _prepared, "BertForMaskedLM computes its loss by itself"),
    "a head with a loss of its own": (
        _modernbert, _prepared, "one that calls torch's cross_entropy",
    ),
    "layers that are no attention": (
        _small(
            "ZayaConfig", "ZayaForCausalLM", head_dim=8, num_experts=4, moe_intermediate_size=16
        ),
        _prepared,
        "layers of type hybrid mix tokens",
    ),
    "layers that choose their keys": (
        _small(
            "DeepseekV32Config", "DeepseekV32ForCausalLM", q_lora_rank=8, kv_lora_rank=8,
            qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, index_n_heads=2,
            index_head_dim=8, n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2,
            moe_intermediate_size=16, num_key_value_heads=4,
        ),
        _as_it_is,
        "layers of type indexed_attention mix tokens",
    ),
    "a bias of positions": (_t5, _call_encoder, r"position_bias \(T5's\) is not done"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_call_that_would_be_wrong_is_refused_on_every_rank(case: str) -> None:
    make, call, message = REFUSED[case]
    first, second = _over_ranks(make(), call)
    assert re.search(message, first), first
    assert re.search(message, second), second


def test_a_model_that_is_compared_once() -> None:
    torch.manual_seed(0)
    model = _small("Qwen2Config", "Qwen2ForCausalLM")()
    batch = make_batch("Llama", "packed")
    expected = deepcopy(model)(**batch).loss.item()

    def run(ctx: burst_rt.Context) -> float:
        mine = deepcopy(model)
        mine.set_attn_implementation("burst_rt")
        burst_rt.hf.prepare(mine, ctx)
        assert mine.training
        return float(mine(**burst_rt.hf.shard(batch, ctx)).loss.item())

    assert burst_rt.run_local(3, run, timeout_s=60) == pytest.approx([expected] * 3, rel=1e-6)


def _gemma3() -> Any:
    """With eyes, windows and full attention."""
    text = make_model("Gemma3").config.to_dict()
    eyes = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "patch_size": 4,
        "num_attention_heads": 2, "image_size": 8,
    }  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text, vision_config=eyes, mm_tokens_per_image=4, image_token_id=63
    )
    torch.manual_seed(0)
    return transformers.Gemma3ForConditionalGeneration(config).train()


@pytest.mark.parametrize("kind", ["plain", "left", "packed"])
def test_token_types_of_text_alone_change_nothing(kind: str) -> None:
    """As Gemma 3's processor gives them. The truth is one process's, without them where documents
    are packed: transformers looks for documents in some calls only.
    """
    model, batch = _gemma3(), make_batch("Gemma3", kind)
    model.set_attn_implementation("eager")
    typed = batch | {"token_type_ids": torch.zeros_like(batch["input_ids"])}
    alone = deepcopy(model)(**(batch if kind == "packed" else typed), use_cache=False)
    expected = alone.loss.item()
    if kind != "packed":
        assert deepcopy(model)(**batch, use_cache=False).loss.item() == pytest.approx(expected)

    def run(ctx: burst_rt.Context) -> tuple[float, torch.Tensor]:
        mine = deepcopy(model)
        mine.set_attn_implementation("burst_rt")
        burst_rt.hf.prepare(mine, ctx)
        part = burst_rt.hf.shard(typed, ctx)
        output = mine(**part, use_cache=False)
        whole = part["burst_rt"].batch.layout.unshard(output.logits.detach())
        return float(output.loss.item()), whole

    shown = batch.get("attention_mask", torch.ones_like(batch["input_ids"])) != 0
    for loss, logits in burst_rt.run_local(3, run, timeout_s=60):
        assert loss == pytest.approx(expected, rel=1e-6)
        torch.testing.assert_close(logits[shown], alone.logits[shown], rtol=1e-5, atol=1e-5)


def test_image_tokens_of_another_model_are_refused_on_every_rank() -> None:
    """Where the model's types are not known to mean images, and are those of one rank."""
    model = _gemma3()
    model.set_attn_implementation("burst_rt")
    model.config.model_type = "another"
    batch = make_batch("Gemma3", "plain")
    batch["token_type_ids"] = torch.zeros_like(batch["input_ids"])
    batch["token_type_ids"][0, -3:] = 1  # in one block of tokens

    def run(ctx: burst_rt.Context) -> str:
        mine = burst_rt.hf.prepare(deepcopy(model), ctx)
        with pytest.raises(InputError) as caught:
            mine(**burst_rt.hf.shard(batch, ctx, "contiguous"))
        assert ctx.all_reduce(torch.ones(1)).item() == 2
        return re.sub(r"^(rank \d: )*", "", str(caught.value))

    first, second = burst_rt.run_local(2, run, timeout_s=60)
    assert first == second
    assert "token_type_ids: tokens of an image see each other" in first
    assert f"expected the types of all {TOKENS} tokens" in first


def _with_a_tower() -> Any:
    model = make_model("Gemma3Images")
    model.config.image_token_id = 63
    weight = model.model.multi_modal_projector.mm_input_projection_weight
    torch.nn.init.normal_(weight)  # 0 in a new model
    return model


def test_a_vision_tower_learns_over_ranks_as_on_one_process() -> None:
    """Its images become embeddings before the cut."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, 60, (2, TOKENS), generator=generator)
    tokens[0, 10:14] = tokens[1, 35:39] = 63
    types = (tokens == 63).long()
    rest = {"token_type_ids": types, "labels": tokens.masked_fill(types == 1, -100)}
    pixels = torch.randn(2, 3, 224, 224, generator=generator)
    models = [_with_a_tower() for _ in range(3)]
    alone = models[0]
    expected = alone(input_ids=tokens, pixel_values=pixels, **rest).loss
    expected.backward()
    as_text = alone(input_ids=tokens, pixel_values=pixels, labels=rest["labels"]).loss
    assert abs(as_text / expected - 1) > 1e-5, "what images see must matter"

    def run(ctx: burst_rt.Context) -> Any:
        model = models[1 + ctx.rank]
        model.set_attn_implementation({"text_config": "burst_rt", "vision_config": "sdpa"})
        burst_rt.hf.prepare(model, ctx)
        embedded = model.get_input_embeddings()(tokens)
        images = model.get_image_features(pixels).pooler_output
        embedded = embedded.masked_scatter((tokens == 63)[..., None], images)
        part = burst_rt.hf.shard({"inputs_embeds": embedded, **rest}, ctx)
        loss = model(**part).loss
        loss.backward()
        burst_rt.average_gradients(model.parameters(), group=ctx)
        return loss.item(), dict(model.named_parameters())

    for loss, parameters in burst_rt.run_local(2, run, timeout_s=60):
        assert loss == pytest.approx(expected.item(), rel=1e-6)
        for name, parameter in alone.named_parameters():
            if parameter.grad is None or name.endswith("k_proj.bias"):  # which changes no softmax
                assert (parameters[name].grad is None) == (parameter.grad is None), name
                continue
            off = (parameters[name].grad - parameter.grad).abs().max()
            assert off <= 1e-5 * parameter.grad.abs().max(), name


def test_a_model_whose_loss_is_computed_of_its_logits() -> None:
    model, batch = _bert(), make_batch("Llama", "right")
    expected = deepcopy(model)(**batch).loss.item()
    model.set_attn_implementation("burst_rt")

    def run(ctx: burst_rt.Context) -> float:
        mine = burst_rt.hf.prepare(deepcopy(model), ctx, loss=False)
        part = burst_rt.hf.shard(batch, ctx)
        labels = part.pop("labels")
        loss = burst_rt.cross_entropy(mine(**part).logits, labels, group=ctx)
        return float(loss.item())

    assert burst_rt.run_local(3, run, timeout_s=60) == pytest.approx([expected] * 3, rel=1e-6)


def test_copies_of_labels_are_labels() -> None:
    """Wrappers copy a model's arguments, and models change their shape."""

    def run(ctx: burst_rt.Context) -> None:
        logits = torch.zeros(2 * 75, 64)
        part = burst_rt.hf.shard(make_batch("Llama", "plain"), ctx)
        labels = part["labels"]
        for same in (deepcopy(labels), labels.to(torch.int64, copy=True), labels[..., :]):
            with pytest.raises(InputError, match="calls torch's cross_entropy"):
                torch.nn.functional.cross_entropy(logits, same.view(-1))
        assert type(labels != -100) is torch.Tensor

    burst_rt.run_local(1, run, timeout_s=60)


def test_preparing_leaves_modes_as_they_are_and_hooks_once() -> None:
    model = _small("Qwen2Config", "Qwen2ForCausalLM")()
    model.set_attn_implementation("burst_rt")

    def run(ctx: burst_rt.Context) -> tuple[bool, bool, int]:
        mine = deepcopy(model)
        mine.model.layers[0].eval()
        for _ in range(3):
            burst_rt.hf.prepare(mine, ctx)
        layers = mine.model.layers
        return layers[0].training, layers[1].training, len(mine._forward_pre_hooks)

    assert burst_rt.run_local(2, run, timeout_s=60) == [(False, True, 3)] * 2


def test_a_mask_that_is_changed_is_refused() -> None:
    mask: Any = MaskHandover(masking_utils.causal_mask_function)
    assert not hasattr(mask, "keys")
    assert mask[:, :, 0:, :] is mask
    changes: list[Callable[[], object]] = [
        lambda: mask[:, :4], lambda: torch.ones(2) + mask, lambda: mask.to("cpu"),
    ]  # fmt: skip
    for change in changes:
        with pytest.raises(InputError, match="expected a model that hands its mask on"):
            change()


def test_heads_whose_output_is_of_tokens_can_be_prepared() -> None:
    """Beside those that are tested."""
    torch.manual_seed(0)
    for name in ("LlamaModel", "LlamaForQuestionAnswering"):
        model, batch = _small("LlamaConfig", name)(), make_batch("Llama", "right")
        expected = deepcopy(model)(**_unlabelled(batch))[0]
        model.set_attn_implementation("burst_rt")

        def run(ctx: burst_rt.Context, model: Any = model, batch: Any = batch) -> torch.Tensor:
            mine = burst_rt.hf.prepare(deepcopy(model), ctx)
            part = burst_rt.hf.shard(_unlabelled(batch), ctx)
            layout: burst_rt.ContextLayout = part["burst_rt"].batch.layout
            return layout.unshard(mine(**part)[0].detach())

        shown = batch["attention_mask"] != 0
        for found in burst_rt.run_local(2, run, timeout_s=60):
            torch.testing.assert_close(found[shown], expected[shown], rtol=1e-4, atol=1e-5)


def test_logits_that_are_chosen_stay() -> None:
    model = make_model("Llama")
    model.set_attn_implementation("burst_rt")

    def run(ctx: burst_rt.Context) -> list[int]:
        mine = burst_rt.hf.prepare(deepcopy(model), ctx)
        part = _unlabelled(burst_rt.hf.shard(make_batch("Llama", "plain"), ctx))
        return list(mine(**part, logits_to_keep=torch.tensor([3, 5])).logits.shape)

    assert burst_rt.run_local(2, run, timeout_s=60) == [[2, 2, 64]] * 2


def test_one_rank_needs_no_attention_over_ranks() -> None:
    model, batch = _mamba(), make_batch("Llama", "plain")
    expected = model(**batch).loss.item()

    def run(ctx: burst_rt.Context) -> tuple[float, float]:
        part = burst_rt.hf.shard(batch, ctx)
        output = model(**part)
        own = burst_rt.cross_entropy(output.logits, part["shift_labels"], group=ctx)
        return output.loss.item(), own.item()

    for found in burst_rt.run_local(1, run, timeout_s=60):
        assert found == pytest.approx((expected, expected), rel=1e-6)


def _warnings_of(num_ranks: int, use: Callable[[list[dict[str, Any]]], object]) -> list[str]:
    """What is warned of while `use` has three parts on each rank, beside a prepared model."""
    batch = _unlabelled(make_batch("Llama", "plain"))

    def run(ctx: burst_rt.Context) -> None:
        burst_rt.hf.prepare(make_model("Llama"), ctx)
        use([burst_rt.hf.shard(batch, ctx) for _ in range(3)])

    gc.collect()  # parts of other tests
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        burst_rt.run_local(num_ranks, run, timeout_s=60)
        gc.collect()
    return [str(each.message) for each in caught if "hf.shard" in str(each.message)]


def test_logits_of_a_model_that_never_attends_are_warned_of() -> None:
    """One that was not prepared, where another one was."""

    def use(parts: list[dict[str, Any]]) -> None:
        while parts:
            _mamba()(**parts.pop())

    found = _warnings_of(2, use)
    assert len(found) == 2 * 3
    assert all("no layer has attended by it" in said for said in found)
    assert _warnings_of(1, use) == []


def test_parts_that_were_used_or_refused_are_not_warned_of() -> None:
    model = make_model("Llama")
    model.set_attn_implementation("burst_rt")

    def attending(parts: list[dict[str, Any]]) -> None:
        mine = burst_rt.hf.prepare(deepcopy(model), parts[0]["burst_rt"].ctx)
        for part in parts:
            mine(**part)

    def failing(parts: list[dict[str, Any]]) -> None:
        for part in parts:
            with pytest.raises(InputError, match="expected a model that was prepared"):
                model(**part)

    def interrupted(parts: list[dict[str, Any]]) -> None:
        """As by a loop that leaves out a batch for which there is no memory."""
        mine = burst_rt.hf.prepare(deepcopy(model), parts[0]["burst_rt"].ctx)
        mine.model.layers[0].register_forward_pre_hook(_out_of_memory)
        for part in parts:
            with pytest.raises(MemoryError):
                mine(**part)

    assert _warnings_of(2, attending) == []
    assert _warnings_of(2, failing) == []
    assert _warnings_of(2, interrupted) == []


def _out_of_memory(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
    raise MemoryError


def test_a_prepared_model_is_saved_whole_after_a_call() -> None:
    model, batch = make_model("Llama"), make_batch("Llama", "plain")
    model.set_attn_implementation("burst_rt")

    def run(ctx: burst_rt.Context) -> list[float]:
        mine, losses = burst_rt.hf.prepare(deepcopy(model), ctx), []
        for _ in range(2):
            part = burst_rt.hf.shard(batch, ctx)
            losses.append(mine(**part).loss.item())
            file = io.BytesIO()
            torch.save(mine, file)
            file.seek(0)
            mine = torch.load(file, weights_only=False)
        return losses

    for first, second in burst_rt.run_local(2, run, timeout_s=60):
        assert first == second


def test_without_a_prepared_model_there_are_no_parts() -> None:
    batch = make_batch("Llama", "plain")

    def run(ctx: burst_rt.Context) -> None:
        with pytest.raises(InputError, match=r"hf\.shard: expected a model that was prepared"):
            burst_rt.hf.shard(batch, ctx)

    burst_rt.run_local(2, run, timeout_s=60)


def test_batches_that_differ_are_refused() -> None:
    batch = make_batch("Llama", "plain")

    def run(ctx: burst_rt.Context) -> None:
        burst_rt.hf.prepare(make_model("Llama"), ctx)
        other = batch | {"input_ids": (batch["input_ids"] + ctx.rank) % 64}
        with pytest.raises(ContractMismatch, match="expected the same batch on all ranks"):
            burst_rt.hf.shard(other, ctx)

    burst_rt.run_local(2, run, timeout_s=60)


def test_a_model_prepared_in_a_world_of_one_is_not_yet_compared() -> None:
    xlstm = _xlstm()
    burst_rt.run_local(1, lambda ctx: burst_rt.hf.prepare(xlstm, ctx), timeout_s=60)
    first, _ = _over_ranks(xlstm, _prepared)
    assert "not what it is on one process" in first


def test_two_models_with_one_part() -> None:
    """That one was prepared says nothing of the other."""

    def both(mine: Any, part: dict[str, Any], ctx: burst_rt.Context) -> object:
        other = deepcopy(mine)
        burst_rt.hf.prepare(mine, ctx)(**part)
        return other(**part)

    for text in _over_ranks(make_model("Llama"), both):
        assert "expected a model that was prepared" in text


def test_a_model_with_chunks_has_transformers_loss() -> None:
    """It is compared with padding behind its tokens, which predicts nothing."""
    torch.manual_seed(0)
    model = _small(
        "Llama4TextConfig", "Llama4ForCausalLM", attention_chunk_size=8, num_local_experts=2,
        num_experts_per_tok=1, intermediate_size_mlp=48, head_dim=8,
    )()  # fmt: skip
    batch = make_batch("Llama", "right")
    expected = deepcopy(model)(**batch).loss.item()
    model.set_attn_implementation("burst_rt")

    def run(ctx: burst_rt.Context) -> float:
        mine = burst_rt.hf.prepare(deepcopy(model), ctx)
        return float(mine(**burst_rt.hf.shard(batch, ctx)).loss.item())

    assert burst_rt.run_local(3, run, timeout_s=60) == pytest.approx([expected] * 3, rel=1e-5)


def test_what_is_no_context_or_no_model() -> None:
    model, nothing = make_model("Llama"), cast(Any, None)

    def run(ctx: burst_rt.Context) -> None:
        with pytest.raises(InputError, match=r"hf\.prepare: ctx must be a context"):
            burst_rt.hf.prepare(model, nothing)
        with pytest.raises(InputError, match=r"hf\.prepare: model: expected .* got NoneType"):
            burst_rt.hf.prepare(nothing, ctx)
        with pytest.raises(InputError, match=r"hf\.shard: ctx must be a context"):
            burst_rt.hf.shard(make_batch("Llama", "plain"), nothing)
        assert ctx.all_reduce(torch.ones(1)).item() == 2  # the context is usable

    burst_rt.run_local(2, run, timeout_s=60)


def test_labels_that_are_no_tokens_are_refused_on_every_rank() -> None:
    model, batch = make_model("Llama"), make_batch("Llama", "plain")
    model.set_attn_implementation("burst_rt")
    batch["labels"][0, -1] = model.config.vocab_size  # the last rank's

    def run(ctx: burst_rt.Context) -> None:
        mine = burst_rt.hf.prepare(deepcopy(model), ctx)
        part = burst_rt.hf.shard(batch, ctx, layout="contiguous")
        with pytest.raises(InputError, match=r"labels: expected 0 to 63, or -100 .*, got 64"):
            mine(**part)
        assert ctx.all_reduce(torch.ones(1)).item() == 2  # the context is usable

    burst_rt.run_local(2, run, timeout_s=60)


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((2,), "labels of whole sequences cannot be cut"),
        ((2, 5), "labels come with decoder_input_ids"),
    ],
    ids=["of rows", "of a decoder without its inputs"],
)
def test_labels_of_something_else_are_refused(shape: tuple[int, ...], said: str) -> None:
    batch = {"input_ids": make_batch("Llama", "plain")["input_ids"], "labels": torch.zeros(shape)}

    def run(ctx: burst_rt.Context) -> None:
        burst_rt.hf.prepare(make_model("Llama"), ctx)
        with pytest.raises(InputError, match=said):
            burst_rt.hf.shard(batch, ctx)

    burst_rt.run_local(2, run, timeout_s=60)


def test_a_loss_whose_model_keeps_the_keyword_to_itself() -> None:
    """Token classifiers call their loss without the keywords of their forward."""
    model = _small("LlamaConfig", "LlamaForTokenClassification", classifier_dropout=0.0)()
    batch = make_batch("Llama", "plain")
    batch["labels"] %= 2
    batch["labels"][0, :30] = -100
    expected = deepcopy(model)(**batch).loss.item()
    model.set_attn_implementation("burst_rt")

    def run(ctx: burst_rt.Context) -> float:
        mine = burst_rt.hf.prepare(deepcopy(model), ctx)
        return float(mine(**burst_rt.hf.shard(batch, ctx)).loss.item())

    assert burst_rt.run_local(3, run, timeout_s=60) == pytest.approx([expected] * 3, rel=1e-6)


def test_dynamic_rotary_scaling_once_it_is_prepared() -> None:
    make = _small(
        "LlamaConfig", "LlamaForCausalLM", rope_parameters=_DYNAMIC, max_position_embeddings=40
    )
    torch.manual_seed(0)
    model, batch = make(), make_batch("Llama", "plain")
    expected = deepcopy(model)(**batch).logits
    model.set_attn_implementation("burst_rt")

    def run(ctx: burst_rt.Context) -> torch.Tensor:
        mine = burst_rt.hf.prepare(deepcopy(model), ctx)
        part = burst_rt.hf.shard(batch, ctx)
        layout: burst_rt.ContextLayout = part["burst_rt"].batch.layout
        return layout.unshard(mine(**part).logits.detach())

    for found in burst_rt.run_local(3, run, timeout_s=60):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_sum_of_losses_over_a_number_that_is_given() -> None:
    """As transformers' Trainer asks for it with gradient accumulation."""
    model, batch = make_model("Llama"), make_batch("Llama", "plain")
    expected = model(**batch, num_items_in_batch=torch.tensor(500)).loss.item()
    model.set_attn_implementation("burst_rt")

    def run(ctx: burst_rt.Context) -> float:
        mine = burst_rt.hf.prepare(deepcopy(model), ctx)
        part = burst_rt.hf.shard({**batch, "num_items_in_batch": torch.tensor(500)}, ctx)
        return float(mine(**part).loss.item())

    assert burst_rt.run_local(3, run, timeout_s=60) == pytest.approx([expected] * 3, rel=1e-6)


_ROOT = Path(__file__).parents[2]
_PAGES = ("docs/transformers.md", "README.md")


class _Own(torch.nn.Module):
    """A model of one's own: positions are added to what tokens are, then attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(64, 16)
        self.head = torch.nn.Linear(16, 64)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, attend: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        x = self.embed(tokens) + positions[..., None] / 100
        x = attend(*[x.unflatten(-1, (2, 8))] * 3).flatten(-2)
        return torch.as_tensor(self.head(x))


def test_the_pages_run(tmp_path: Path) -> None:
    """The step with a model of transformers, and README's with a model of one's own."""
    make_model("Llama").save_pretrained(tmp_path)
    pages = [(_ROOT / name).read_text(encoding="utf-8") for name in _PAGES]
    shown = re.findall(r"```python\n(.*?)```", "".join(pages), re.DOTALL)
    names: dict[str, Any] = {
        "path": tmp_path, "batches": [make_batch("Llama", "packed")] * 3, "partial": partial,
    }  # fmt: skip
    exec(next(block for block in shown if "batches" in block), names)
    assert 0 < names["loss"].item() < 5
    names |= {"batch": names["batches"][0], "model": _Own()}
    exec(next(block for block in shown if "shard_batch" in block), names)
    assert 0 < names["loss"].item() < 5
    assert all(p.grad is not None for p in names["model"].parameters())
    names["ctx"].close()


def test_whole_logits_and_perplexity_as_the_page_shows_them() -> None:
    text = (_ROOT / "docs" / "transformers.md").read_text(encoding="utf-8")
    shown = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    blocks = [block for block in shown if "unshard" in block or "perplexity" in block]
    assert len(blocks) == 2
    eager, own = make_model("Llama").eval(), make_model("Llama").eval()
    own.set_attn_implementation("burst_rt")
    ids = [torch.arange(3, 3 + 2 * tokens).view(2, tokens) for tokens in (19, 10)]
    batches = [{"input_ids": x, "labels": x} for x in ids]
    with torch.no_grad():
        logits = [eager(x).logits for x in ids]
    sums = [
        cross_entropy(y[:, :-1].flatten(0, 1), x[:, 1:].flatten(), reduction="sum")
        for x, y in zip(ids, logits, strict=True)
    ]
    expected = torch.stack(sums).sum() / (2 * 18 + 2 * 9)

    def run(ctx: burst_rt.Context) -> None:
        model = deepcopy(own)
        burst_rt.hf.prepare(model, ctx)
        names: dict[str, Any] = {
            "burst_rt": burst_rt, "torch": torch, "math": math, "ctx": ctx, "model": model,
            "batch": batches[0], "batches": batches,
        }  # fmt: skip
        exec(blocks[0], names)
        torch.testing.assert_close(names["logits"], logits[0], rtol=1e-4, atol=1e-5)
        exec(blocks[1], names)
        assert names["perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)

    burst_rt.run_local(2, run, timeout_s=60)


@pytest.mark.parametrize("missing", ["transformers", "accelerate"])
def test_a_package_that_is_missing_is_named_with_what_brings_it(missing: str) -> None:
    source = f"""
import sys
sys.modules[{missing!r}] = None  # as if it were not installed
import burst_rt
try:
    import burst_rt.hf
except ImportError as error:
    assert isinstance(error, burst_rt.errors.ConfigError)
    print(error)
"""
    done = with_torch().run(source)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(
        rf"burst_rt\.hf needs transformers .* \(.*{missing}.*\); in the clone of burst_rt say: "
        r"pip install '\.\[hf\]' -c constraints\.txt\n",
        done.stdout,
    ), done.stdout
