"""`burst_rt.hf.Cache`: what it refuses on every rank, and what it leaves behind. That models
generate the same over ranks is tested in tests/mpi/test_generate.py.
"""

from __future__ import annotations

import gc
import re
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from small_generation import make_decoder
from small_models import CACHE, make_model
from transformers import GenerationConfig

import burst_rt
import burst_rt.hf
from burst_rt.errors import BurstError, ContractMismatch, InputError

# Made once: ranks that are threads share one random state.
_LLAMA = make_decoder("Llama", "burst_rt")
_EAGER = make_decoder("Llama", "eager")
# Tests that catch what a call raises leave parts that nobody attended by.
pytestmark = [
    pytest.mark.usefixtures("no_parts_left"),
    pytest.mark.filterwarnings("ignore:burst_rt.hf.shard. a part of a batch is gone"),
]

_IDS = torch.arange(3, 53).view(2, 25)


def _llama() -> Any:
    return deepcopy(_LLAMA)


def _generate(model: Any, cache: Any, ids: torch.Tensor = _IDS, **options: Any) -> torch.Tensor:
    given = {"max_new_tokens": 2, "use_cache": True, "do_sample": False, **options}
    found: torch.Tensor = model.generate(ids, **{CACHE: cache}, **given)
    return found


def _cache(model: Any, ctx: burst_rt.Context, **options: Any) -> burst_rt.hf.Cache:
    return burst_rt.hf.Cache(model, ctx, **{"capacity": 40, "block": 4, **options})


def _filled(
    model: Any, cache: Any, ctx: burst_rt.Context, ids: torch.Tensor, **options: Any
) -> None:
    _generate(model, cache)
    _generate(model, cache, ids, **options)


def _closed(model: Any, cache: Any, ctx: burst_rt.Context) -> None:
    cache.close()
    model(_IDS, **{CACHE: _cache(model, ctx)})  # hooks of another cache are there
    _generate(model, cache)


def _of_another(model: Any, cache: Any, ctx: burst_rt.Context) -> None:
    _generate(deepcopy(model), cache)


def _of_a_model_without_caches(model: Any, cache: Any, ctx: burst_rt.Context) -> None:
    _generate(_llama(), cache)


def _part_of_the_model(model: Any, cache: Any, ctx: burst_rt.Context) -> None:
    model.model(_IDS, **{CACHE: cache})


def _shown(*hidden: tuple[int, int]) -> torch.Tensor:
    shown = torch.ones(2, 25, dtype=torch.int64)
    for row, at in hidden:
        shown[row, at] = 0
    return shown


def _longer_padding(model: Any, cache: Any, ctx: burst_rt.Context) -> None:
    model(_IDS, **{CACHE: cache})
    shown = torch.ones(2, 26, dtype=torch.int64)
    shown[1, 0] = 0
    model(_IDS[:, :1], attention_mask=shown, **{CACHE: cache})


def _cut_before(model: Any, cache: Any, ctx: burst_rt.Context) -> None:
    part = burst_rt.hf.shard({"input_ids": _IDS}, ctx)
    model(**part, **{CACHE: cache})


def _no_causal_model(model: Any, cache: Any, ctx: burst_rt.Context) -> None:
    model.model.layers[0].self_attn.is_causal = False
    _generate(model, cache)


def _positions_of_three(model: Any, cache: Any, ctx: burst_rt.Context) -> None:
    model(_IDS, position_ids=torch.arange(25).expand(3, -1), **{CACHE: cache})


def _several_logits(model: Any, cache: Any, ctx: burst_rt.Context) -> None:
    model(_IDS, **{CACHE: cache}, logits_to_keep=2)


def _true(ids: torch.Tensor, scores: object) -> torch.Tensor:
    return torch.ones(len(ids), dtype=torch.int64)


def _under_autocast(model: Any, cache: Any, ctx: burst_rt.Context) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        model(_IDS, **{CACHE: cache})


# With a Llama and a cache of it; what the ranks raise.
REFUSED: dict[str, tuple[Callable[[Any, Any, burst_rt.Context], object], str]] = {
    "more tokens than there is room": (
        lambda model, cache, ctx: _generate(model, cache, max_new_tokens=20),
        r"hf.Cache: the capacity is 40 tokens .* make room with cache.reserve\(capacity\)",
    ),
    "another text after the first, much shorter": (
        lambda model, cache, ctx: _filled(model, cache, ctx, _IDS[:, :12]),
        r"expected new tokens behind the 26 that are cached, got none; .* cache.reset\(\)",
    ),
    "another text after the first, longer": (
        lambda model, cache, ctx: _filled(model, cache, ctx, torch.cat([_IDS, _IDS], 1)),
        r"begins with the 26 tokens .* got one with token 3 at 25 of row 0, where \d+ is cached",
    ),
    "another text after the first, in chunks": (
        lambda model, cache, ctx: _filled(
            model, cache, ctx, torch.cat([_IDS, _IDS], 1), prefill_chunk_size=8
        ),
        r"begins with the 26 tokens .* got one with token 3 at 25 of row 0, where \d+ is cached",
    ),
    "another text after the first": (
        lambda model, cache, ctx: _filled(model, cache, ctx, _IDS[:, :20]),
        r"position_ids: expected .* as 26 are cached, .* cache.reset\(\) .* max_new_tokens",
    ),
    "another batch": (
        lambda model, cache, ctx: _filled(model, cache, ctx, _IDS[:1]),
        "expected a batch of 2 sequences",
    ),
    "a cache that is closed": (_closed, "this cache is closed"),
    "a copy of the model": (_of_another, "that this cache was made for, got another"),
    "another model": (_of_a_model_without_caches, "that this cache was made for, got one of"),
    "a part of the model": (_part_of_the_model, "got one of another model, or of a part of it"),
    "padding behind": (
        lambda model, cache, ctx: _generate(model, cache, attention_mask=_shown((0, 24))),
        "expected padding before a row's tokens",
    ),
    "padding among tokens": (
        lambda model, cache, ctx: _generate(model, cache, attention_mask=_shown((0, 0), (0, 7))),
        "expected padding before a row's tokens",
    ),
    "padding that comes later": (_longer_padding, "expected the padding that the cached tokens"),
    "a mask of the new tokens alone": (
        lambda model, cache, ctx: model(
            _IDS, attention_mask=_shown()[:, :5], **{CACHE: cache}
        ),
        r"attention_mask: expected \[batch, cached and new tokens\] = \(2, 25\)",
    ),
    "a batch that was cut": (_cut_before, "a call with a cache is cut by the cache"),
    "hidden states": (
        lambda model, cache, ctx: _generate(
            model, cache, output_hidden_states=True, return_dict_in_generate=True
        ),
        "output_hidden_states is not done",
    ),
    "a loss": (
        lambda model, cache, ctx: model(_IDS, labels=_IDS, **{CACHE: cache}),
        "labels is not done",
    ),
    "positions of another batch": (
        _positions_of_three, r"position_ids: expected 25 tokens .* got shape \(3, 25\)",
    ),
    "several logits": (_several_logits, "logits_to_keep: expected 0 or 1, got 2"),
    "autocast": (_under_autocast, "without autocast, .* dtype=torch.bfloat16"),
    "no cache in use": (
        lambda model, cache, ctx: _generate(model, cache, use_cache=False),
        "use_cache: expected True, got False",
    ),
    "images": (
        lambda model, cache, ctx: model(
            _IDS, pixel_values=torch.ones(1, 3), **{CACHE: cache}
        ),
        "pixel_values is not known; expected text alone",
    ),
    "attention to later tokens": (_no_causal_model, "attention to later tokens is not done"),
    "a time that is none": (
        lambda model, cache, ctx: _generate(model, cache, max_time="a minute"),
        r"max_time or stopping criteria \(MaxTimeCriteria\): expected .* got TypeError.* on rank 0",
    ),
    "a criterion of another shape": (
        lambda model, cache, ctx: _generate(
            model, cache, stopping_criteria=[lambda ids, scores: torch.ones(len(ids), 1).bool()]
        ),
        r"expected a bool of each of 2 rows, got TypeError\('shape \(2, 2\)'\) on rank 0",
    ),
    "a criterion of one rank": (
        lambda model, cache, ctx: _generate(
            model, cache, stopping_criteria=[_true] if ctx.rank else None
        ),
        "stopping criteria: none on rank 0, .*; stopping criteria: function on rank 1",
    ),
    "assisted decoding": (
        lambda model, cache, ctx: _generate(model, cache, _IDS[:1], prompt_lookup_num_tokens=2),
        "assisted decoding .* is not done",
    ),
    "a cache of transformers'": (
        lambda model, cache, ctx: _generate(model, None),
        "a cache made by burst_rt.hf.Cache",
    ),
    "a static cache": (
        lambda model, cache, ctx: _generate(model, None, cache_implementation="static"),
        "a static cache or a prefix is not done; .* a cache made by burst_rt.hf.Cache",
    ),
    "rows that are repeated": (
        lambda model, cache, ctx: cache.batch_repeat_interleave(2), "contrastive search",
    ),
    "a crop to nothing": (
        lambda model, cache, ctx: cache.crop(None), "expected a number .* or less, got None",
    ),
    "chunks of no token": (
        lambda model, cache, ctx: _generate(model, cache, prefill_chunk_size=0),
        "prefill_chunk_size: expected an integer of at least 1, got 0",
    ),
    "a crop to a length": (lambda model, cache, ctx: cache.crop(7), "expected a number .* or less"),
    "another implementation": (
        lambda model, cache, ctx: _cache(make_decoder("Llama", "sdpa"), ctx),
        "expected a model with attn_implementation='burst_rt', got 'sdpa'",
    ),
    "an encoder-decoder": (
        lambda model, cache, ctx: _cache(make_model("T5Gemma"), ctx),
        "encoder-decoders are not done",
    ),
    "a model without a head": (
        lambda model, cache, ctx: _cache(model.model, ctx), "expected a model .* that can generate",
    ),
    "no capacity": (
        lambda model, cache, ctx: _cache(model, ctx, capacity=0), "Cache: capacity must be .* 0",
    ),
    "a capacity of one rank that is none": (
        lambda model, cache, ctx: _cache(model, ctx, capacity=("many", 40)[ctx.rank]),
        "capacity must be an integer of at least 1, got 'many'",
    ),
    "half a token": (
        lambda model, cache, ctx: _cache(model, ctx, capacity=10.5), "capacity must be .* 10.5",
    ),
    "no batch": (lambda model, cache, ctx: _cache(model, ctx, batch=0), "batch must be .* got 0"),
    "capacities that differ": (
        lambda model, cache, ctx: _cache(model, ctx, capacity=40 + ctx.rank),
        "capacity: 40 on rank 0, 41 on rank 1",
    ),
    "less room": (lambda model, cache, ctx: cache.reserve(39), "reserve: .* at least 40, .* 39"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_call_that_would_be_wrong_is_refused_on_every_rank(case: str) -> None:
    call, message = REFUSED[case]

    @torch.no_grad()
    def run(ctx: burst_rt.Context) -> str:
        model = _llama()
        cache = _cache(model, ctx)
        with pytest.raises(BurstError) as caught:
            call(model, cache, ctx)
        assert ctx.all_reduce(torch.ones(1)).item() == 2  # the context is usable
        return str(caught.value)

    for found in burst_rt.run_local(2, run, timeout_s=60):
        assert re.search(message, found), found


def _config(kind: str, **options: Any) -> Any:
    return getattr(transformers, kind)(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, **options,
    )  # fmt: skip


def _gemma4() -> Any:
    return make_model("Gemma4")


def _gemma4_of_two_widths() -> Any:
    types = ["sliding_attention", "full_attention"]
    options = {"layer_types": types, "global_head_dim": 16, "head_dim": 8}
    config = _config("Gemma4TextConfig", **options)
    return transformers.Gemma4ForCausalLM(config)


def _rwkv() -> Any:
    return transformers.RwkvForCausalLM(_config("RwkvConfig", context_length=32))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (_rwkv, "expected a forward with an argument past_key_values .*, got RwkvForCausalLM"),
        (_gemma4, "keys and values of their own, got one that does not .Gemma4TextAttention"),
        (_gemma4_of_two_widths, r"keep tensors of one shape, got .*\(2, 16, 16, torch.float32\)"),
    ],
)
def test_layers_that_keep_something_else_are_refused(make: Callable[[], Any], said: str) -> None:
    model = make().eval()
    model.set_attn_implementation("burst_rt")

    def run(ctx: burst_rt.Context) -> None:
        with pytest.raises(BurstError, match=said):
            _cache(model, ctx)
        assert ctx.all_reduce(torch.ones(1)).item() == 2  # the context is usable

    burst_rt.run_local(2, run, timeout_s=60)


def test_attention_that_is_no_function_of_transformers_is_refused() -> None:
    """By the cache on one rank; on more, `prepare` compares such models."""
    model = transformers.BloomForCausalLM(_config("BloomConfig"))

    def run(ctx: burst_rt.Context) -> None:
        with pytest.raises(InputError, match="got BloomForCausalLM, none of whose layers does"):
            _cache(model, ctx)

    burst_rt.run_local(1, run, timeout_s=60)


def test_layers_that_ask_a_cache_for_more_are_refused() -> None:
    model = _llama()
    attention = model.model.layers[1].self_attn

    def asking(module: Any, args: Any, options: Any) -> None:
        options[CACHE].get_recurrent_state(1)

    attention.register_forward_pre_hook(asking, with_kwargs=True)

    def run(ctx: burst_rt.Context) -> None:
        with pytest.raises(InputError, match=r"for keys and values alone, .*IndexError"):
            _cache(model, ctx)

    burst_rt.run_local(1, run, timeout_s=60)


def test_keys_that_are_kept_compressed() -> None:
    """Of latent attention the keys are kept as attention takes them."""
    config = _config(
        "DeepseekV3Config", n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
        moe_intermediate_size=16, first_k_dense_replace=1,
    )  # fmt: skip
    config.num_key_value_heads = 4
    torch.manual_seed(0)
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    model.set_attn_implementation("eager")
    expected = _generate(model, None, max_new_tokens=6)

    def run(ctx: burst_rt.Context) -> None:
        mine = deepcopy(model)
        mine.set_attn_implementation("burst_rt")
        cache = _cache(mine, ctx, batch=2)
        assert torch.equal(_generate(mine, cache, max_new_tokens=6), expected)
        assert cache.kv is not None
        assert (cache.kv.num_kv_heads, cache.kv.head_dim, cache.kv.v_head_dim) == (4, 8, 8)

    burst_rt.run_local(2, run, timeout_s=60)


def test_gradients_are_refused() -> None:
    def run(ctx: burst_rt.Context) -> None:
        model = _llama()
        with pytest.raises(InputError, match="expected a call without gradients"):
            model(_IDS, **{CACHE: _cache(model, ctx)})

    burst_rt.run_local(2, run, timeout_s=60)


def test_a_model_that_is_compared_first() -> None:
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(_config("Qwen2Config")).eval()
    expected = _generate(model, None)
    model.set_attn_implementation("burst_rt")

    def run(ctx: burst_rt.Context) -> None:
        mine = deepcopy(model)
        assert torch.equal(_generate(mine, _cache(mine, ctx)), expected)

    burst_rt.run_local(2, run, timeout_s=60)


@pytest.mark.skipif(not hasattr(transformers, "Molmo2TextConfig"), reason="a newer model")
def test_a_model_that_is_compared_and_has_no_padding_token() -> None:
    """Its configuration does not name one."""
    config = transformers.Molmo2TextConfig(
        vocab_size=64, additional_vocab_size=0, hidden_size=32, intermediate_size=48,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    assert not hasattr(config, "pad_token_id")
    torch.manual_seed(0)
    model = import_module("transformers.models.molmo2.modeling_molmo2").Molmo2TextModel(config)
    model.set_attn_implementation("burst_rt")
    burst_rt.run_local(2, lambda ctx: burst_rt.hf.prepare(deepcopy(model), ctx), timeout_s=60)


def test_text_through_a_model_that_also_sees_images() -> None:
    """`generate` gives its positions once more for each axis of an image."""
    model = _qwen_vl()
    ids = torch.arange(3, 53).view(2, 25)
    shown = _shown((0, 0), (0, 1), (0, 2))
    given = {"attention_mask": shown, "max_new_tokens": 6}
    expected = _generate(model, None, ids, **given)

    def run(ctx: burst_rt.Context) -> None:
        mine = deepcopy(model)
        mine.set_attn_implementation("burst_rt")
        cache = _cache(mine, ctx)
        assert torch.equal(_generate(mine, cache, ids, **given), expected)
        cache.reset()
        of_image = torch.arange(25).expand(3, 2, -1).clone()
        of_image[1] *= 2
        for wrong in (of_image, of_image[..., 1:]):
            with torch.inference_mode(), pytest.raises(InputError, match="position_ids"):
                mine(ids, position_ids=wrong, **{CACHE: cache})

    burst_rt.run_local(2, run, timeout_s=60)


def _qwen_vl() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "depth": 1}
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            **sizes, "vocab_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]
            },
        },
        vision_config={**sizes, "out_hidden_size": 32, "fullatt_block_indexes": [0]},
        image_token_id=70, video_token_id=71, vision_start_token_id=72, vision_end_token_id=73,
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.Qwen2_5_VLForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("inference", [False, True])
def test_a_compiled_model_takes_a_cache(inference: bool) -> None:
    """Its program breaks where ranks meet, and goes on behind."""

    def run(ctx: burst_rt.Context) -> None:
        model = _llama()
        cache = _cache(model, ctx)
        compiled: Any = torch.compile(model, backend="eager")
        with torch.inference_mode() if inference else torch.no_grad():
            compiled(_IDS, **{CACHE: cache})
            found = compiled(_IDS[:, :1], **{CACHE: cache}).logits[:, -1]
            text = torch.cat([_IDS, _IDS[:, :1]], 1)
            expected = _EAGER(text, use_cache=False).logits[:, -1]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)

    burst_rt.run_local(1, run)
    torch.compiler.reset()


def test_ranks_with_other_tokens_do_not_go_on() -> None:
    """At the first call, or at any later one."""

    @torch.no_grad()
    def run(ctx: burst_rt.Context) -> list[str]:
        model = _llama()
        cache = _cache(model, ctx)
        found = []
        for count in (25, 1):
            model(_IDS[:, :count], **{CACHE: cache})
            with pytest.raises(ContractMismatch) as caught:
                model(_IDS[:, :1] + ctx.rank, **{CACHE: cache})
            found.append(str(caught.value))
            assert cache.get_seq_length() == count
            cache.reset()
        return found

    for texts in burst_rt.run_local(2, run, timeout_s=60):
        assert all("about: tokens that differ" in text for text in texts)


def test_one_ranks_error_is_every_ranks() -> None:
    def run(ctx: burst_rt.Context) -> str:
        model = _llama()
        cache = _cache(model, ctx)
        with pytest.raises(InputError) as caught:
            _generate(model, cache, attention_mask=_shown(*[(0, 24)] * ctx.rank))
        expected = _generate(_EAGER, None)
        assert torch.equal(_generate(model, cache), expected)  # the cache is usable
        return str(caught.value)

    for text in burst_rt.run_local(2, run, timeout_s=60):
        assert text.startswith("rank 1: hf.Cache: attention_mask")


def test_a_forward_without_generate() -> None:
    """All logits of a few tokens, those of the last of many; positions are the cache's."""
    expected = _EAGER(_IDS).logits.detach()

    @torch.no_grad()
    def run(ctx: burst_rt.Context) -> None:
        model = _llama()
        cache = _cache(model, ctx, batch=2)
        few = model(_IDS[:, :3], **{CACHE: cache}).logits
        torch.testing.assert_close(few, expected[:, :3], rtol=1e-4, atol=1e-5)
        many = model(input_ids=_IDS[:, 3:], **{CACHE: cache}).logits
        torch.testing.assert_close(many, expected[:, -1:], rtol=1e-4, atol=1e-5)
        cache.crop(-20)
        assert cache.get_seq_length() == 5
        assert cache.get_mask_sizes(2, 0) == (7, 0)
        again = model(_IDS[:, 5:10], **{CACHE: cache}, logits_to_keep=None).logits
        torch.testing.assert_close(again, expected[:, 5:10], rtol=1e-4, atol=1e-5)

    burst_rt.run_local(3, run, timeout_s=60)


@pytest.mark.parametrize("filled", [False, True])
def test_room_is_made(filled: bool) -> None:
    expected = _generate(_EAGER, None, max_new_tokens=20)

    def run(ctx: burst_rt.Context) -> None:
        model = _llama()
        cache = _cache(model, ctx, capacity=28)
        if filled:
            tokens = _generate(model, cache)
            cache.reserve(50)
            longer = _generate(model, cache, tokens, max_new_tokens=18)
        else:
            cache.reserve(50)
            longer = _generate(model, cache, max_new_tokens=20)
        assert torch.equal(longer, expected)
        assert cache.kv is not None
        assert cache.capacity == cache.kv.capacity == 50

    burst_rt.run_local(2, run, timeout_s=60)


def test_the_other_releases_name_of_the_cache() -> None:
    """5.24 takes the older name with a warning; 5.23 would take the newer one in silence."""
    expected = _EAGER(_IDS).logits[:, -1:].detach()
    other = "past_key_values" if CACHE == "cache" else "cache"

    @torch.no_grad()
    def run(ctx: burst_rt.Context) -> None:
        model = _llama()
        cache = _cache(model, ctx)
        if CACHE == "cache":
            with pytest.warns(FutureWarning, match="past_key_values"):
                found = model(_IDS, **{other: cache}).logits
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        else:
            with pytest.raises(InputError, match="expected the cache as past_key_values=, as"):
                model(_IDS, **{other: cache})

    burst_rt.run_local(1, run, timeout_s=60)  # one thread catches warnings


def test_the_whole_text_in_a_call_of_ones_own_is_warned_of() -> None:
    """Once, by rank 0; new tokens alone are not."""

    @torch.no_grad()
    def run(ctx: burst_rt.Context) -> None:
        model = _llama()
        cache = _cache(model, ctx)
        model(_IDS[:, :7], **{CACHE: cache})
        model(_IDS[:, 7:20], **{CACHE: cache})
        cache.crop(-13)
        with nullcontext() if ctx.rank else pytest.warns(match="begin with the 7 tokens that are"):
            model(_IDS[:, :10], **{CACHE: cache})

    burst_rt.run_local(2, run, timeout_s=60)


def test_a_call_that_an_error_has_ended_is_made_again() -> None:
    """After all layers have attended, and before the tokens are cached."""
    expected = _EAGER(_IDS).logits.detach()

    @torch.no_grad()
    def run(ctx: burst_rt.Context) -> None:
        model = _llama()
        cache = _cache(model, ctx)

        def fail(*_: Any) -> None:
            raise MemoryError("of this test")

        handle = model.lm_head.register_forward_pre_hook(fail)
        with pytest.raises(MemoryError, match="of this test"):
            model(_IDS, **{CACHE: cache})
        handle.remove()
        logits = model(_IDS, **{CACHE: cache}).logits
        torch.testing.assert_close(logits, expected[:, -1:], rtol=1e-4, atol=1e-5)

    burst_rt.run_local(2, run, timeout_s=60)


class _Clock(threading.local):
    """A rank's own clock, which goes on by `a_token` seconds for each token."""

    now, a_token = 0.0, 1.0

    def time(self) -> float:
        return self.now

    def tick(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """A processor of logits."""
        self.now += self.a_token
        return scores


def _own_criterion(clock: _Clock) -> dict[str, Any]:
    def ends(ids: torch.Tensor, scores: object) -> torch.Tensor:
        return torch.full((len(ids),), clock.now > 2.5)

    return {"stopping_criteria": [ends]}


def _limited(model: Any) -> dict[str, Any]:
    model.generation_config.max_time = 2.5
    return {}


_LIMITS: dict[str, Callable[[Any, _Clock], dict[str, Any]]] = {
    "the call": lambda model, clock: {"max_time": 2.5},
    "a configuration": lambda model, clock: {
        "generation_config": GenerationConfig(max_new_tokens=9, do_sample=False, max_time=2.5)
    },
    "the model": lambda model, clock: _limited(model),
    "a criterion": lambda model, clock: _own_criterion(clock),
}


@pytest.mark.parametrize("given_by", _LIMITS)
def test_rank_0_says_when_a_text_ends(given_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its third token, though the other ranks' clocks are ahead, or behind."""
    clock = _Clock()
    monkeypatch.setattr("transformers.generation.stopping_criteria.time", clock)
    expected = _generate(_EAGER, None, max_new_tokens=3)

    def run(ctx: burst_rt.Context) -> None:
        clock.a_token = (1.0, 100.0, 0.0)[ctx.rank]
        model = _llama()
        options = {"logits_processor": [clock.tick], **_LIMITS[given_by](model, clock)}
        if "generation_config" not in options:
            options |= {"max_new_tokens": 9, "do_sample": False}
        found = model.generate(_IDS, **{CACHE: _cache(model, ctx)}, use_cache=True, **options)
        assert torch.equal(found, expected)

    burst_rt.run_local(3, run, timeout_s=60)


def test_criteria_that_give_integers() -> None:
    expected = _generate(_EAGER, None, max_new_tokens=1)

    def run(ctx: burst_rt.Context) -> None:
        model = _llama()
        found = _generate(
            model, _cache(model, ctx), max_new_tokens=9, stopping_criteria=[_true]
        )  # fmt: skip
        assert torch.equal(found, expected)

    burst_rt.run_local(2, run, timeout_s=60)


def test_ranks_stay_in_step_where_a_criterion_has_been_refused() -> None:
    expected = _generate(_EAGER, None)

    def run(ctx: burst_rt.Context) -> None:
        model = _llama()
        cache = _cache(model, ctx)

        def ends(ids: torch.Tensor, scores: object) -> torch.Tensor:
            model(ids)
            raise AssertionError

        with pytest.raises(InputError, match=r"burst_rt\.hf\.shard"):
            _generate(model, cache, stopping_criteria=[ends])
        for _ in range(2):
            cache.reset()
            assert torch.equal(_generate(model, cache), expected)

    burst_rt.run_local(2, run, timeout_s=60)


def test_a_copy_of_a_model_with_a_cache_is_a_model_like_others() -> None:
    """Its own caches have rank 0's criteria, and without a cache each rank goes on alone."""
    expected = _generate(_EAGER, None, max_new_tokens=1)

    def run(ctx: burst_rt.Context) -> None:
        model = _llama()
        cache = _cache(model, ctx)
        _generate(model, cache)
        copied = deepcopy(model)

        def ends(ids: torch.Tensor, scores: object) -> torch.Tensor:
            return torch.full((len(ids),), ctx.rank == 0)

        options: dict[str, Any] = {"max_new_tokens": 9, "stopping_criteria": [ends]}
        own = _cache(copied, ctx)
        assert torch.equal(_generate(copied, own, **options), expected)
        own.close()
        copied.set_attn_implementation("eager")
        if ctx.rank == 0:
            assert torch.equal(_generate(copied, None, **options), expected)

    burst_rt.run_local(2, run, timeout_s=60)


def test_a_cache_is_used_in_inference_mode_and_outside() -> None:
    expected = _generate(_EAGER, None, max_new_tokens=6)

    def run(ctx: burst_rt.Context) -> None:
        model = _llama()
        cache = _cache(model, ctx)
        with torch.inference_mode():
            model(_IDS[:, :20], **{CACHE: cache})
            cache.reserve(45)
        assert torch.equal(_generate(model, cache, max_new_tokens=6), expected)
        cache.reset()
        with torch.inference_mode():
            assert torch.equal(_generate(model, cache, max_new_tokens=6), expected)

    burst_rt.run_local(2, run, timeout_s=60)


def test_any_positions_of_padding_are_taken() -> None:
    """transformers' own processors give 0 there, others 1."""
    shown = _shown((0, 0), (0, 1), (0, 2))
    expected = _generate(_EAGER, None, attention_mask=shown)

    def run(ctx: burst_rt.Context) -> None:
        model = _llama()
        for fill in (0, 1):
            positions = (shown.cumsum(-1) - 1).masked_fill(shown == 0, fill)
            cache = _cache(model, ctx)
            found = _generate(model, cache, attention_mask=shown, position_ids=positions)
            assert torch.equal(found, expected)

    burst_rt.run_local(2, run, timeout_s=60)


def test_a_text_that_begins_again_in_chunks_is_refused() -> None:
    """Phi-3 drops its cache where "longrope" changes, and has but a chunk of the text there."""
    text = (torch.arange(70) % 60 + 3)[None]

    def run(ctx: burst_rt.Context) -> None:
        model = make_decoder("Phi3", "burst_rt")
        cache = _cache(model, ctx, capacity=80)
        _generate(model, cache, text[:, :20], max_new_tokens=1)
        with pytest.raises(InputError, match=r"without the text before it; .* leave prefill_chunk"):
            _generate(model, cache, text, prefill_chunk_size=50)
        assert cache.get_seq_length() == 20

    burst_rt.run_local(2, run, timeout_s=60)


@pytest.mark.parametrize("size", [1, 4, 12, 13, 17, 23, 40])
def test_a_prompt_in_chunks_is_spread_and_gives_the_same_tokens(size: int) -> None:
    """Also in chunks that each rank could run as it runs new tokens, and of which some have none.

    Of 12 tokens each rank has some.
    """
    ids = _IDS.flatten()[None]
    tokens, block, ranks = ids.shape[1], 4, 3
    expected = _generate(_EAGER, None, ids, max_new_tokens=6)

    def run(ctx: burst_rt.Context) -> int:
        model, counts = _llama(), [0, 0]
        cache = _cache(model, ctx, capacity=60, block=block)

        def count(module: object, args: tuple[torch.Tensor, ...]) -> None:
            if cache.get_seq_length() < tokens:
                counts[0] += args[0].shape[1]
                counts[1] += 1

        model.model.layers[1].mlp.register_forward_pre_hook(count)
        found = _generate(model, cache, ids, max_new_tokens=6, prefill_chunk_size=size)
        assert torch.equal(found, expected)
        assert counts[1] == -(-tokens // size)
        own = [at // block % ranks == ctx.rank for at in range(tokens)]
        stand_ins = sum(not any(own[start : start + size]) for start in range(0, tokens, size))
        assert size < ranks * block or stand_ins <= 1  # of the last chunk, which is shorter
        return counts[0] - (stand_ins if size < ranks * block else 0)

    assert max(burst_rt.run_local(ranks, run, timeout_s=60)) <= -(-tokens // ranks) + block


def test_a_short_prompt_is_spread_where_blocks_are_small() -> None:
    """And is not where every rank may run all of it."""
    expected = _EAGER(_IDS[:, :16]).logits[:, -1:].detach()

    def run(ctx: burst_rt.Context) -> None:
        model = _llama()
        counts: list[int] = []
        model.model.layers[1].mlp.register_forward_pre_hook(
            lambda module, args: counts.append(args[0].shape[1])
        )
        for block, most in ((4, 8), (16, 16)):
            cache = _cache(model, ctx, block=block)
            counts.clear()
            found: Any = _generate(
                model, cache, _IDS[:, :16], max_new_tokens=1, output_logits=True,
                return_dict_in_generate=True,
            )  # fmt: skip
            assert counts == [most]
            torch.testing.assert_close(found.logits[0], expected[:, 0], rtol=1e-4, atol=1e-5)

    burst_rt.run_local(2, run, timeout_s=60)


_PAGE = Path(__file__).parents[2] / "docs" / "generating.md"


def test_the_page_runs() -> None:
    page = _PAGE.read_text(encoding="utf-8").replace("cache=cache", f"{CACHE}=cache")
    shown = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    block = next(block for block in shown if "generate" in block)
    loop = next(block for block in shown if "argmax" in block)
    expected = _generate(_EAGER, None, max_new_tokens=200)

    def run(ctx: burst_rt.Context) -> None:
        model = _llama()
        model.generation_config.use_cache = True
        inputs = {"input_ids": _IDS, "attention_mask": torch.ones_like(_IDS)}
        names: dict[str, Any] = {"burst_rt": burst_rt, "model": model, "ctx": ctx, "inputs": inputs}
        exec(block.replace("100_000", "1_000"), names)
        assert torch.equal(names["tokens"], expected)
        names |= {"torch": torch, "prompt": _IDS, "chosen": []}
        exec(loop.replace("        logits", "        chosen.append(token)\n        logits"), names)
        assert torch.equal(torch.cat(names["chosen"], 1), expected[:, 25:45])

    burst_rt.run_local(2, run, timeout_s=60)


def test_memory_is_given_back_though_the_model_lives_on() -> None:
    def run(ctx: burst_rt.Context) -> None:
        model = _llama()
        cache = _cache(model, ctx)
        with torch.no_grad():
            model(_IDS, **{CACHE: cache})
        kv = weakref.ref(cache.kv)
        cache.close()
        assert kv() is None

    burst_rt.run_local(2, run, timeout_s=60)


def test_a_model_is_as_before_once_its_caches_are_gone() -> None:
    def run(ctx: burst_rt.Context) -> None:
        model = _llama()
        before = set(vars(model)), len(model._forward_hooks), len(model._forward_pre_hooks)
        first, second = _cache(model, ctx), _cache(model, ctx)
        first.close()
        first.close()
        assert _generate(model, second).shape == (2, 27)
        del second
        gc.collect()
        now = set(vars(model)), len(model._forward_hooks), len(model._forward_pre_hooks)
        assert now == before

    burst_rt.run_local(1, run, timeout_s=60)


def test_bfloat16_gives_the_logits_of_one_process() -> None:
    """Of every token of a text that is given: chosen tokens could differ where two are near."""
    expected = deepcopy(_EAGER).bfloat16()(_IDS).logits.float().detach()

    @torch.no_grad()
    def run(ctx: burst_rt.Context) -> None:
        model = _llama().bfloat16()
        cache = _cache(model, ctx)
        for start, stop in ((0, 19), (19, 20), (20, 25)):
            logits = model(_IDS[:, start:stop], **{CACHE: cache}).logits[:, -1].float()
            off = (logits - expected[:, stop - 1]).abs().max() / expected.abs().max()
            assert off < 2e-2
        assert cache.kv is not None
        assert cache.kv.dtype == torch.bfloat16

    burst_rt.run_local(3, run, timeout_s=60)
