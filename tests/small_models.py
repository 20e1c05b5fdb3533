"""Tiny random models of transformers, batches for them, and what one process makes of both."""

from __future__ import annotations

import inspect
import sys
import warnings
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

with warnings.catch_warnings():
    # Of libraries that transformers imports.
    warnings.simplefilter("ignore")
    import transformers
    from transformers.utils import logging

logging.set_verbosity_error()

__all__ = [
    "CACHE",
    "DECODERS",
    "KINDS",
    "LENGTHS",
    "NAMES",
    "TOKENS",
    "Truth",
    "fully_sharded",
    "make_batch",
    "make_model",
    "seen",
    "truth",
]

# A forward's argument for its cache has another name since transformers 5.24.
_ARGUMENTS = inspect.signature(transformers.LlamaForCausalLM.forward).parameters
CACHE = "cache" if "cache" in _ARGUMENTS else "past_key_values"
TOKENS = 75  # divides by none of 2, 4 and twice 3
_CLASSES = 64
_WINDOW = 16
_DECODERS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"head_dim": 8, "use_sliding_window": True, "max_window_layers": 1},
    "Mistral": {},
    "Gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8},
    "Gemma3": {"head_dim": 8, "query_pre_attn_scalar": 8},
    "GptOss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    # Chunks of 8 tokens; layers without rotary positions, whose queries grow from token 11 on.
    "Llama4": {
        "head_dim": 8,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 48,
        "attention_chunk_size": 8,
        "floor_scale": 12,
        "no_rope_layers": [1, 0, 1],
    },
    # Its mask functions are its own.
    "Gemma3Bidirectional": {
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "use_bidirectional_attention": True,
    },
    # Embeddings of its layers; the last layer has the keys of the one before it.
    "Gemma4": {
        "head_dim": 8,
        "global_head_dim": 8,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": _CLASSES,
        "num_kv_shared_layers": 1,
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "full_attention"],
    },
    # The boundary of "longrope" lies among the tokens.
    "Phi3": {
        "original_max_position_embeddings": 40,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 40,
        },
    },
}
# Mixtures of experts that are asked for their balancing loss, which weighs as much as the other.
_BALANCED = ("GptOss", "Mixtral", "Qwen3Moe")
_WITH_WINDOWS = ("Qwen3", "Mistral", "Gemma2", "Gemma3", "Gemma3Bidirectional", "Gemma4", "GptOss")
_LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
# Models of text and images, by the name of the types of their tokens.
_TYPES = {
    "Gemma3Images": "token_type_ids",
    "Gemma4Images": "mm_token_type_ids",
    "Molmo2": "mm_token_type_ids",
    "PaliGemma": "token_type_ids",
    "PaliGemma2": "token_type_ids",
}
# Where their rows have images: across the bounds of ranks, and beside the bounds of documents.
_PICTURES = (((3, 12), (25, 40), (60, 70)), ((10, 30), (44, 58)))
DECODERS = tuple(_DECODERS)
NAMES = (*_DECODERS, "T5Gemma", "ModernBert", *_TYPES)
KINDS = ("plain", "left", "right", "packed")
# Documents of each row of a packed batch.
LENGTHS = ((20, 1, 33, 21), (50, 25))
# transformers masks documents of these in flash-attn's way only, or (Llama 4) scales queries by
# their place in the whole row: what one process makes of a packed batch is what it makes of the
# documents one by one.
# So are images: in 5.23 they see each other across documents (PaliGemma, Molmo2), and Gemma 3 and 4
# look them up by their places in their documents, in layers with windows.
_BLIND_TO_PACKING = ("GptOss", "Llama4", "ModernBert", *_TYPES)
_TEXT = ("Gemma3", "Gemma4", "Llama4")  # whose configurations have "Text" in their names

Truth = dict[str, Any]


def make_model(name: str) -> Any:
    """A model of three layers in training mode, the same at every call, with eager attention."""
    common: dict[str, Any] = {
        "vocab_size": _CLASSES, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 256, "attention_dropout": 0.0, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
    }  # fmt: skip
    if name == "ModernBert":
        config = transformers.ModernBertConfig(
            vocab_size=_CLASSES, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
            num_attention_heads=4, local_attention=_WINDOW, pad_token_id=0, bos_token_id=1,
            eos_token_id=2, cls_token_id=1, sep_token_id=2,
        )  # fmt: skip
        kind = transformers.ModernBertForMaskedLM
    elif name == "T5Gemma":
        part = {**common, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": _WINDOW}
        part["dropout_rate"] = 0.0
        config = transformers.T5GemmaConfig(
            encoder=dict(part), decoder=dict(part), dropout_rate=0.0, vocab_size=_CLASSES
        )
        kind = transformers.T5GemmaForConditionalGeneration
    elif name in _TYPES:
        config, kind = _with_images(name, common)
    else:
        options = {**common, **_DECODERS[name]}
        if name in _WITH_WINDOWS:
            options["sliding_window"] = _WINDOW
        if name in _BALANCED:
            options |= {"output_router_logits": True, "router_aux_loss_coef": 1.0}
        name = name.removesuffix("Bidirectional")
        if name in ("Gemma3", "GptOss"):
            options["layer_types"] = _LAYER_TYPES
        config = getattr(transformers, f"{name}{'Text' * (name in _TEXT)}Config")(**options)
        kind = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(0)
    model = kind(config)
    model.set_attn_implementation("eager")
    return model.train()


def _with_images(name: str, common: dict[str, Any]) -> tuple[Any, Any]:
    """The configuration and the class of a model of text and images."""
    text = {**common, "head_dim": 8}
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2
    }  # fmt: skip
    if name not in ("Molmo2", "PaliGemma"):
        text |= {"query_pre_attn_scalar": 8, "sliding_window": _WINDOW}
    if name == "Gemma3Images":
        text["layer_types"] = _LAYER_TYPES
    if name == "Gemma4Images":
        text |= {
            "num_hidden_layers": 2, "layer_types": _LAYER_TYPES[:2], "global_head_dim": 8,
            "use_bidirectional_attention": "vision", "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": _CLASSES, "num_kv_shared_layers": 0,
        }  # fmt: skip
        # Its tokens of images and sounds are others than any that are drawn.
        ids = {"image_token_id": 2, "video_token_id": 1, "audio_token_id": 0}
        config = transformers.Gemma4Config(
            text_config=transformers.Gemma4TextConfig(**text), audio_config=None,
            vision_config={**vision, "num_key_value_heads": 2, "head_dim": 8}, **ids,
        )  # fmt: skip
        return config, transformers.Gemma4ForConditionalGeneration
    if name == "Gemma3Images":
        config = transformers.Gemma3Config(
            text_config=transformers.Gemma3TextConfig(**text), mm_tokens_per_image=4,
            vision_config=transformers.SiglipVisionConfig(**vision),
        )  # fmt: skip
        return config, transformers.Gemma3ForConditionalGeneration
    if name == "Molmo2":
        vision |= {"num_key_value_heads": 2, "head_dim": 8}
        adapter = {**vision, "vision_feature_layer": [-1], "text_hidden_size": 32}
        config = transformers.Molmo2Config(
            text_config=text, vision_config=vision, adapter_config=adapter
        )
        return config, transformers.Molmo2ForConditionalGeneration
    kind = transformers.GemmaConfig if name == "PaliGemma" else transformers.Gemma2Config
    config = transformers.PaliGemmaConfig(
        text_config=kind(**text), vision_config=transformers.SiglipVisionConfig(**vision),
        projection_dim=32,
    )  # fmt: skip
    return config, transformers.PaliGemmaForConditionalGeneration


def fully_sharded(model: Any) -> Any:
    """The model under FSDP2. With a policy FSDP2 goes through the arguments of each layer."""
    policy = MixedPrecisionPolicy(torch.float32, torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def make_batch(name: str, kind: str) -> dict[str, torch.Tensor]:
    """Two rows of a kind: plain, padded on the left or right, or packed. Those with images are what
    a vision tower and an embedding have made, which learn.
    """
    generator = torch.Generator().manual_seed(1)

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(3, _CLASSES, (2, count), generator=generator)

    batch = {"input_ids": tokens(TOKENS)}
    if name == "T5Gemma":
        batch |= {"decoder_input_ids": tokens(37), "labels": tokens(37)}
    else:
        batch["labels"] = batch["input_ids"].clone()
        batch["labels"][:, :5] = -100  # a prompt
    if name in _TYPES:
        of_image = torch.zeros(2, TOKENS, dtype=torch.int64)
        for row, pictures in zip(of_image, _PICTURES, strict=True):
            for first, last in pictures:
                row[first:last] = 1
        batch["labels"][of_image == 1] = -100
        batch[_TYPES[name]] = 1 - of_image if name.startswith("Pali") else of_image
        del batch["input_ids"]
        embedded = torch.randn(2, TOKENS, 32, generator=generator)
        batch["inputs_embeds"] = embedded.requires_grad_()
        if name == "Gemma4Images":
            of_layers = torch.randn(2, TOKENS, 2, 8, generator=generator)
            batch["per_layer_inputs"] = of_layers.requires_grad_()
    if kind in ("left", "right"):
        shown = torch.ones(2, TOKENS, dtype=torch.int64)
        for row, count in enumerate((9, 30)):
            shown[row, :count] = 0
        if kind == "right":
            shown = shown.flip(1)
        batch["attention_mask"] = shown
        if name == "T5Gemma":
            own = torch.ones(2, 37, dtype=torch.int64)
            own[0, -5:] = 0
            batch["decoder_attention_mask"] = own
            batch["labels"][own == 0] = -100
        else:
            # What padding predicts is nobody's business.
            batch["labels"][(shown == 0) | (shown.roll(1, 1) == 0)] = -100
    if kind == "packed":
        rows = [torch.cat([torch.arange(n) for n in lengths]) for lengths in LENGTHS]
        batch["position_ids"] = torch.stack(rows)
        batch["labels"][batch["position_ids"] == 0] = -100
    return batch


def seen(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Which logits mean something: those of tokens that are no padding."""
    names = ("decoder_attention_mask", "attention_mask")
    side = "decoder_input_ids" if "decoder_input_ids" in batch else "labels"
    found = next((batch[n] for n in names[side == "labels" :] if n in batch), None)
    return torch.ones_like(batch[side], dtype=torch.bool) if found is None else found != 0


def truth(name: str, kind: str) -> Truth:
    """Loss, logits and gradients of one process."""
    model, batch = make_model(name), make_batch(name, kind)
    if kind == "packed" and name in _BLIND_TO_PACKING:
        loss, logits = _one_by_one(model, batch)
    else:
        output = model(**batch)
        loss, logits = output.loss, output.logits
    loss.backward()
    return {"loss": loss.item(), "logits": logits.detach(), "gradients": gradients(model, batch)}


def gradients(
    model: torch.nn.Module, batch: dict[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """By the name in the model itself, whole where FSDP2 has sharded them; also what comes before
    the model in a batch with images.
    """
    named = [*model.named_parameters(), *(batch or {}).items()]
    found = {name: p.grad for name, p in named if p.grad is not None}
    return {
        name.removeprefix("module.").removeprefix("_orig_mod."): grad.full_tensor()
        if hasattr(grad, "full_tensor")
        else grad
        for name, grad in found.items()
    }


def _one_by_one(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    names = {"input_ids", "inputs_embeds", "per_layer_inputs", *_TYPES.values()}.intersection(batch)
    outputs: list[list[Any]] = [[], []]
    for number, lengths in enumerate(LENGTHS):
        parts = {name: batch[name][number].split(list(lengths)) for name in names}
        for document in range(len(lengths)):
            inputs = {name: part[document][None] for name, part in parts.items()}
            outputs[number].append(model(**inputs))
    logits = torch.stack([torch.cat([x.logits[0] for x in row]) for row in outputs])
    labels = batch["labels"]
    if not type(model).__name__.endswith("MaskedLM"):
        labels = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    if getattr(model.config, "output_router_logits", False):
        by_layer = zip(*(x.router_logits for row in outputs for x in row), strict=True)
        loss = loss + sys.modules[type(model).__module__].load_balancing_loss_func(
            tuple(torch.cat(each) for each in by_layer),
            model.num_experts, model.num_experts_per_tok,
        )  # fmt: skip
    return loss, logits
