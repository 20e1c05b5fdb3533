"""Where a model counts by itself: packed documents and chunks, and lengths beyond which it acts."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from small_models import make_model
from transformers import masking_utils
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention

import burst_rt
import burst_rt.hf
from burst_rt import Chunked
from burst_rt.errors import ConfigError, InputError
from burst_rt.hf.lengths import lengths_beyond, shorten_lengths
from burst_rt.hf.masks import mask_of
from burst_rt.hf.rotary import frequencies_change_at
from burst_rt.launch.generate.models import cast_model, require_same_frequencies

_SIZE = 8
_TOKENS = 32


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        ({}, None),
        ({"rope_type": "linear", "factor": 2.0}, None),
        ({"rope_type": "dynamic", "factor": 2.0}, 64),
        (
            {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
             "original_max_position_embeddings": 32}, 32,
        ),
    ],
)  # fmt: skip
def test_where_frequencies_change(changes: dict[str, Any], length: int | None) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4} | changes
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=32, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64, rope_parameters=rope,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    assert frequencies_change_at(model) == length
    for tokens, read in ((100, 0), (100, 20)):
        if length is None:
            require_same_frequencies(model, tokens, "--capacity 100", read)
            continue
        with pytest.raises(ConfigError, match=rf"--capacity 100: .* beyond {length} tokens"):
            require_same_frequencies(model, tokens, "--capacity 100", read)
    if length is not None:
        require_same_frequencies(model, length, "--capacity")
        require_same_frequencies(model, 100, "--max-new-tokens", read=length + 1)


def test_a_cast_model_is_as_one_that_was_loaded_so(tmp_path: Path) -> None:
    """Frequencies of rotary embeddings are no weights, and some weights stay in float32."""
    kept = transformers.DeepseekV3Config(
        vocab_size=16, hidden_size=32, intermediate_size=16, moe_intermediate_size=16,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4,
        n_group=2, topk_group=1, num_experts_per_tok=2, q_lora_rank=8, kv_lora_rank=8,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=1,
    )  # fmt: skip
    for model in (make_model("Llama"), transformers.DeepseekV3ForCausalLM(kept)):
        model.save_pretrained(tmp_path)
        for dtype in (torch.bfloat16, torch.float16):
            loaded = type(model).from_pretrained(tmp_path, dtype=dtype)
            cast = cast_model(deepcopy(model), torch.device("cpu"), dtype)
            for kind in ("named_parameters", "named_buffers"):
                expected, found = (dict(getattr(x, kind)()) for x in (loaded, cast))
                assert expected.keys() == found.keys()
                for name, one in expected.items():
                    assert one.dtype == found[name].dtype, name
                    assert torch.equal(one, found[name]), name


def _chunked_cells(batch: dict[str, torch.Tensor], size: int) -> torch.Tensor:
    """`[rows, tokens, tokens]`: what transformers' eager mask shows, by its own function."""
    ids = batch["input_ids"]
    config = transformers.Llama4TextConfig(attention_chunk_size=size)
    config._attn_implementation = "eager"
    mask: torch.Tensor = masking_utils.create_chunked_causal_mask(
        config, torch.zeros(*ids.shape, 1), batch.get("attention_mask"), None,
        batch.get("position_ids"),
    )  # fmt: skip
    return mask[:, 0] == 0


def _cells(mask: burst_rt.Mask, rows: int, tokens: int) -> torch.Tensor:
    spans = mask.bound(tokens, tokens).spans(np.arange(tokens))
    starts, stops = (torch.from_numpy(x.copy()) for x in (spans.starts, spans.stops))
    keys = torch.arange(tokens)
    seen = ((keys >= starts[..., None]) & (keys < stops[..., None])).any(-2)
    return seen.expand(rows, tokens, tokens)


def _positions(*rows: Sequence[int], first: int = 0) -> torch.Tensor:
    each = [torch.cat([torch.arange(n) for n in lengths]) + first for lengths in rows]
    return torch.stack(each)


def _shown(*padding: int, right: bool = False) -> torch.Tensor:
    shown = torch.stack([(torch.arange(_TOKENS) >= count).long() for count in padding])
    return shown.flip(1) if right else shown


# What a batch has beside its tokens.
ROWS: dict[str, dict[str, torch.Tensor]] = {
    "plain": {},
    "one document": {"position_ids": _positions([32])},
    "one document that begins elsewhere": {"position_ids": _positions([32], first=3)},
    "documents at no multiple of a chunk": {"position_ids": _positions([5, 27])},
    "short documents": {"position_ids": _positions([3, 3, 26])},
    "documents that begin elsewhere": {"position_ids": _positions([5, 27], first=3)},
    "a packed row and one that is not": {"position_ids": _positions([5, 27], [32])},
    "padding on the left": {"attention_mask": _shown(5, 0)},
    "padding on the right": {"attention_mask": _shown(5, 11, right=True)},
}


@pytest.mark.parametrize("case", ROWS)
def test_chunks_begin_where_transformers_begins_them(case: str) -> None:
    """Cell by cell, beside the mask that transformers' eager attention gets."""
    rows = max((len(x) for x in ROWS[case].values()), default=1)
    batch = {"input_ids": torch.ones(rows, _TOKENS, dtype=torch.int64), **ROWS[case]}
    expected = _chunked_cells(batch, _SIZE)
    if "attention_mask" in batch:
        meant = batch["attention_mask"] != 0
        expected = expected & meant[:, :, None]  # what padding sees is nobody's business

    def run(ctx: burst_rt.Context) -> torch.Tensor:
        part = burst_rt.shard_batch(batch, ctx)
        mask = burst_rt.Causal() & part.chunks(_SIZE) & part.mask
        assert part.chunks(_SIZE) is part.chunks(_SIZE)  # made once a batch, not once a layer
        return _cells(mask, rows, _TOKENS)

    for found in burst_rt.run_local(2, run, timeout_s=60):
        assert torch.equal(found, expected)


def test_chunks_of_padded_documents_are_those_of_the_documents_alone() -> None:
    """transformers has no mask for these: it looks for documents where there is no padding only."""
    lengths, padding = [5, 20], 7
    positions = torch.cat([torch.zeros(padding, dtype=torch.int64), _positions(lengths)[0]])[None]
    batch = {
        "input_ids": torch.ones(1, _TOKENS, dtype=torch.int64),
        "attention_mask": _shown(padding),
        "position_ids": positions,
    }
    expected = torch.zeros(1, _TOKENS, _TOKENS, dtype=torch.bool)
    begin = padding
    for length in lengths:
        alone = {"input_ids": torch.ones(1, length, dtype=torch.int64)}
        place = slice(begin, begin + length)
        expected[:, place, place] = _chunked_cells(alone, _SIZE)
        begin += length

    def run(ctx: burst_rt.Context) -> torch.Tensor:
        part = burst_rt.shard_batch(batch, ctx)
        return _cells(burst_rt.Causal() & part.chunks(_SIZE) & part.mask, 1, _TOKENS)

    assert torch.equal(burst_rt.run_local(2, run, timeout_s=60)[0], expected)


def test_places_of_chunks_are_one_a_token() -> None:
    documents = burst_rt.Documents([3, 5])
    positions = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4])
    assert documents.chunks(2, positions) == burst_rt.Documents([2, 1, 2, 2, 1])
    wrong: list[tuple[Any, Any]] = [
        (2, positions[:7]), (0, positions), (2.5, positions), ("2", positions),
    ]  # fmt: skip
    for size, places in wrong:
        with pytest.raises(InputError, match="a place for each of 8 tokens in 1 rows, got"):
            documents.chunks(size, places)
    two_rows = burst_rt.Documents([[8], [8]])
    with pytest.raises(InputError, match="tokens in 2 rows, got"):
        two_rows.chunks(2, positions.expand(3, -1))
    with pytest.raises(InputError, match="expected documents by lengths"):
        burst_rt.Documents(q_lengths=[3, 5], kv_lengths=[3, 5]).chunks(2, positions)
    with pytest.raises(InputError, match="ascend by 1 within a document, got 3 after 1 at token 5"):
        documents.chunks(2, torch.tensor([0, 1, 2, 0, 1, 3, 4, 5]))
    with pytest.raises(InputError, match="chunks: places must be integers"):
        documents.chunks(2, positions.float())


class _CountsByItself(Llama4TextAttention):  # type: ignore[misc]  # transformers has no types
    """Llama 4's attention, under a name whose queries nobody rescales."""


class _ForgetsDocuments(Llama4TextAttention):  # type: ignore[misc]  # transformers has no types
    """Sees other tokens than one process does, over ranks and in packed rows only."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **options: Any) -> Any:
        part = options.get("burst_rt")
        packed = part is not None and (part.batch.position_ids.diff(dim=1) < 0).any()
        return super().forward(hidden_states * (2 if packed else 1), *args, **options)


_ForgetsDocuments.__name__ = Llama4TextAttention.__name__  # its queries are rescaled


def _with_attention(kind: type[torch.nn.Module], **options: Any) -> Any:
    model = make_model("Llama4")
    for layer in model.model.layers:
        layer.self_attn.__class__ = kind
    for name, value in options.items():
        setattr(model.config, name, value)
        for layer in model.model.layers:
            setattr(layer.self_attn, name, value)
    return model.eval()


def test_frequencies_that_go_by_the_length_are_no_difference() -> None:
    """Packed rows are compared with documents that are all longer than the small number."""
    torch.manual_seed(0)
    rope = dict(make_model("Phi3").config.rope_parameters)
    config = transformers.Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        pad_token_id=0, rope_parameters={**rope, "original_max_position_embeddings": 40},
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config).eval()
    model.set_attn_implementation("burst_rt")
    for ranks in (2, 3):
        burst_rt.run_local(
            ranks, lambda ctx: burst_rt.hf.prepare(deepcopy(model), ctx) is None, timeout_s=60
        )


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            _with_attention(_CountsByItself, floor_scale=8192),
            r"in padded rows, beyond its floor_scale \(8192\): expected logits that differ by",
        ),
        (_with_attention(_CountsByItself, floor_scale=3), r"in padded rows: expected logits"),
        (_with_attention(_ForgetsDocuments), r"in packed rows: expected logits"),
    ],
    ids=["beyond a length", "before it", "in packed rows"],
)
def test_a_model_that_counts_by_itself_is_refused(model: Any, said: str) -> None:
    model.set_attn_implementation("burst_rt")

    def run(ctx: burst_rt.Context) -> None:
        with pytest.raises(InputError, match=said):
            burst_rt.hf.prepare(deepcopy(model), ctx)
        assert ctx.all_reduce(torch.ones(1)).item() == ctx.world_size  # the context is usable

    burst_rt.run_local(2, run, timeout_s=60)


def test_llama_4_is_compared_on_both_sides_of_its_lengths_and_stays_as_it_is() -> None:
    model = make_model("Llama4")
    before = model.config.to_dict()
    numbers = [layer.self_attn.floor_scale for layer in model.model.layers]
    model.set_attn_implementation("burst_rt")
    names = {name for name, _ in lengths_beyond(model, 9)}
    assert names == {"max_position_embeddings", "floor_scale"}

    def run(ctx: burst_rt.Context) -> None:
        mine = burst_rt.hf.prepare(deepcopy(model), ctx)
        after = {**mine.config.to_dict(), "_attn_implementation": None}
        assert after == {**before, "_attn_implementation": None}
        assert [layer.self_attn.floor_scale for layer in mine.model.layers] == numbers

    burst_rt.run_local(2, run, timeout_s=60)


def test_lengths_are_short_within_and_as_they_were_afterwards() -> None:
    """In configurations, in dicts of them, and in layers that have copied them."""
    phi = make_model("Phi3")
    rope = phi.config.rope_parameters
    assert ("original_max_position_embeddings", 40) in lengths_beyond(phi, 16)
    buffers = {name: x.clone() for name, x in phi.named_buffers()}
    with shorten_lengths(phi, lengths_beyond(phi, 16), 5):
        assert rope["original_max_position_embeddings"] == 5
        phi(torch.ones(1, 16, dtype=torch.int64))  # which chooses the other frequencies
    assert rope["original_max_position_embeddings"] == 40
    assert buffers.keys() == dict(phi.named_buffers()).keys()
    assert all(torch.equal(x, buffers[name]) for name, x in phi.named_buffers())


def test_lengths_of_images_and_numbers_of_layers_are_not_meant() -> None:
    model: Any = torch.nn.Module()
    model.config = transformers.Qwen2Config(max_window_layers=50, sliding_window=4096)
    model.config.vision_config = transformers.Qwen2Config(sliding_window=99)
    names = dict(lengths_beyond(model, 16))
    assert "max_window_layers" not in names
    assert 99 not in names.values()


def test_a_length_that_one_process_cannot_have_is_warned_of() -> None:
    model = make_model("Llama4").eval()
    model.set_attn_implementation("burst_rt")

    def prepare(ctx: burst_rt.Context) -> None:
        mine = deepcopy(model)

        def refuses(module: Any, args: object, options: object) -> None:
            if mine.config.max_position_embeddings < 9:
                raise ValueError("at least 9 positions")

        mine.register_forward_pre_hook(refuses, with_kwargs=True)
        burst_rt.hf.prepare(mine, ctx)

    with pytest.warns(UserWarning, match="was not compared beyond its .*at least 9 positions"):
        burst_rt.run_local(2, prepare, timeout_s=60)


def test_a_mask_of_a_later_transformers_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    def novel_overlay(size: int) -> Any:
        def inner_mask(batch: Any, head: Any, q: Any, kv: Any) -> Any:
            return kv > q - size

        return inner_mask

    function = novel_overlay(4)
    function.__module__ = masking_utils.__name__
    function.__qualname__ = "novel_overlay.<locals>.inner_mask"
    with pytest.raises(ConfigError, match=r"made of novel_overlay of transformers .* not know"):
        mask_of(function)


def test_a_forward_of_a_later_transformers_is_told_as_such() -> None:
    class Renamed(transformers.LlamaForCausalLM):  # type: ignore[misc]  # transformers has no types
        def forward(self, input_ids: torch.Tensor, kept_keys: Any = None) -> Any:
            return super().forward(input_ids)

    def run(ctx: burst_rt.Context) -> None:
        model = Renamed(make_model("Llama").config)
        model.set_attn_implementation("burst_rt")
        # With the newest known release it is no later one's name, but a model without a cache.
        wrong = (ConfigError, InputError)
        with pytest.raises(wrong, match=r"argument past_key_values or cache, .* kept_keys"):
            burst_rt.hf.Cache(model, ctx, capacity=9)
        assert ctx.all_reduce(torch.ones(1)).item() == ctx.world_size  # the context is usable

    burst_rt.run_local(2, run, timeout_s=60)


def test_steps_of_generate_of_a_later_transformers_are_told_as_such() -> None:
    class Renamed(transformers.LlamaForCausalLM):  # type: ignore[misc]  # transformers has no types
        def _prefill(self, tokens: Any) -> Any:
            raise AssertionError

    def run(ctx: burst_rt.Context) -> None:
        model = Renamed(make_model("Llama").config)
        model.set_attn_implementation("burst_rt")
        with pytest.raises(ConfigError, match=r"method _prefill with .* got one with self, tokens"):
            burst_rt.hf.Cache(model, ctx, capacity=9)

    burst_rt.run_local(2, run, timeout_s=60)


def test_chunks_of_a_row_that_is_not_packed_are_plain() -> None:
    def run(ctx: burst_rt.Context) -> burst_rt.Mask:
        batch = {"input_ids": torch.ones(2, _TOKENS, dtype=torch.int64)}
        return burst_rt.shard_batch(batch, ctx).chunks(_SIZE)

    assert burst_rt.run_local(1, run, timeout_s=60) == [Chunked(_SIZE)]
