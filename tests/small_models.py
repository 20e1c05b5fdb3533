"""Tiny random models of transformers, batches for them, and what one process makes of both."""

from __future__ import annotations

import inspect
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
_WITH_WINDOWS = ("Qwen3", "Mistral", "Gemma2", "Gemma3", "GptOss")
_LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
NAMES = (*_DECODERS, "ModernBert", "T5Gemma")
KINDS = ("plain", "left", "right", "packed")
# Documents of each row of a packed batch.
LENGTHS = ((20, 1, 33, 21), (50, 25))
# transformers masks documents of these in flash-attn's way only, or (Llama 4) scales queries by
# their place in the whole row: what one process makes of a packed batch is what it makes of the
# documents one by one.
_BLIND_TO_PACKING = ("GptOss", "Llama4", "ModernBert")
_TEXT = ("Gemma3", "Llama4")  # whose configurations have "Text" in their names

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
    else:
        options = {**common, **_DECODERS[name]}
        if name in _WITH_WINDOWS:
            options["sliding_window"] = _WINDOW
        if name in ("Gemma3", "GptOss"):
            options["layer_types"] = _LAYER_TYPES
        config = getattr(transformers, f"{name}{'Text' * (name in _TEXT)}Config")(**options)
        kind = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(0)
    model = kind(config)
    model.set_attn_implementation("eager")
    return model.train()


def fully_sharded(model: Any) -> Any:
    """The model under FSDP2. With a policy FSDP2 goes through the arguments of each layer."""
    policy = MixedPrecisionPolicy(torch.float32, torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def make_batch(name: str, kind: str) -> dict[str, torch.Tensor]:
    """Two rows of a kind: plain, padded on the left or right, or packed."""
    generator = torch.Generator().manual_seed(1)

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(3, _CLASSES, (2, count), generator=generator)

    batch = {"input_ids": tokens(TOKENS)}
    if name == "T5Gemma":
        batch |= {"decoder_input_ids": tokens(37), "labels": tokens(37)}
    else:
        batch["labels"] = batch["input_ids"].clone()
        batch["labels"][:, :5] = -100  # a prompt
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
    side = "decoder_input_ids" if "decoder_input_ids" in batch else "input_ids"
    found = next((batch[n] for n in names[side == "input_ids" :] if n in batch), None)
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
    return {"loss": loss.item(), "logits": logits.detach(), "gradients": gradients(model)}


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """By the name in the model itself, whole where FSDP2 has sharded them."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {
        name.removeprefix("module.").removeprefix("_orig_mod."): grad.full_tensor()
        if hasattr(grad, "full_tensor")
        else grad
        for name, grad in found.items()
    }


def _one_by_one(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.stack(
        [
            torch.cat([model(input_ids=part[None]).logits[0] for part in row.split(list(lengths))])
            for row, lengths in zip(batch["input_ids"], LENGTHS, strict=True)
        ]
    )
    labels = batch["labels"]
    if "ForCausalLM" in type(model).__name__:
        labels = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits
