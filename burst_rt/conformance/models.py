"""Tiny models of transformers, batches for them, and their truth.

The truth is eager attention in float64 in one process, each document in a row of its own, without
padding and without a cache. transformers itself computes norms, rotary angles and the softmax in
float32 even then, so the truth is as exact as float32.
"""

from __future__ import annotations

from typing import Any

import torch

from burst_rt.conformance.cases import ModelCase

__all__ = ["ARCHITECTURES", "draw_batch", "gradients", "make_model", "true_model"]

Tensors = dict[str, torch.Tensor]

_WINDOW = 9
_COMMON: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "attention_dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "use_cache": False, "tie_word_embeddings": False,
}  # fmt: skip
_MIXED = ["sliding_attention", "full_attention"]
# Class and options. Every expert is asked: a choice that rounding can change compares nothing.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "Qwen2-window": (
        "Qwen2", {"use_sliding_window": True, "sliding_window": _WINDOW, "layer_types": _MIXED},
    ),
    "Gemma2-softcap": (
        "Gemma2",
        {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": _WINDOW,
         "attn_logit_softcapping": 1.5, "layer_types": ["full_attention"] * 2},
    ),
    "GptOss-sinks": (
        "GptOss",
        {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 2,
         "sliding_window": _WINDOW, "layer_types": ["full_attention"] * 2},
    ),
    "Qwen3Next-hybrid": (
        "Qwen3Next",
        {"head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
         "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 2,
         "num_experts_per_tok": 2, "moe_intermediate_size": 24,
         "shared_expert_intermediate_size": 24,
         "layer_types": ["linear_attention", "full_attention"]},
    ),
}  # fmt: skip
_LENGTHS = {"plain": 48, "odd": 47, "right": 48, "left": 48, "packed": 48}
_DOCUMENTS = (7, 20, 1, 20)
_PADDING = 13


def make_model(case: ModelCase) -> Any:
    """The model of a case, float32, the same weights at every call; a transformers model."""
    import transformers

    name, options = ARCHITECTURES[case.architecture]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**_COMMON, **options)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # Scores and logits of some size, which a cap or a sink that is left out changes.
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
            elif name == "GptOss" and parameter.shape == (4,):
                parameter.normal_(1, 1)
    return model.train(case.train)


def draw_batch(case: ModelCase) -> Tensors:
    """input_ids, position_ids where rows are packed, attention_mask where padded, and labels.

    Labels are not shifted. Some are -100, so that ranks have different numbers of them; so are
    padding and each document's first. How many are left divides by 2, 3 and 4, but for "odd".
    """
    draw = torch.Generator().manual_seed(0)
    length = _LENGTHS[case.batch]
    rows = 1 if case.batch == "packed" else 2
    ids = torch.randint(3, 64, (rows, length), generator=draw, device="cpu")
    labels = ids.clone()
    labels[:, 5:23] = -100
    batch = {"input_ids": ids, "labels": labels}
    if case.batch == "packed":
        positions = torch.cat([torch.arange(n, device="cpu") for n in _DOCUMENTS])[None]
        batch["position_ids"] = positions
        labels[positions == 0] = -100
    elif case.batch in ("right", "left"):
        real = torch.ones_like(ids)
        real[1, slice(length - _PADDING, None) if case.batch == "right" else slice(_PADDING)] = 0
        batch["attention_mask"] = real
        ids[real == 0] = 0
        labels[real == 0] = -100
        labels[1, _PADDING] = -100
    spare = int((labels[:, 1:] != -100).sum() - 7 * (case.batch == "odd")) % 12
    row, place = (labels != -100).nonzero()[-spare:].T if spare else ([], [])
    labels[row, place] = -100
    return batch


def true_model(case: ModelCase, model: Any, batch: Tensors) -> Tensors:
    """logits, loss, and in training the gradient of each parameter by its name.

    model: as `make_model` gives it; it is changed to float64 and left so. The logits of padding
    are 0.
    """
    model = model.double()
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")  # the default's operator takes no float64
    ids, labels = batch["input_ids"], batch["labels"]
    rows = []
    for row, ids_of_row in enumerate(ids):
        kept = batch["attention_mask"][row].bool() if "attention_mask" in batch else ids_of_row >= 0
        starts = (batch["position_ids"][row] == 0) if "position_ids" in batch else None
        places = kept.nonzero()[:, 0]
        bounds = [0] if starts is None else starts.nonzero()[:, 0].tolist()
        logits = torch.zeros(
            len(ids_of_row), model.config.vocab_size, dtype=torch.float64, device="cpu"
        )
        for start, stop in zip(bounds, [*bounds[1:], len(places)], strict=True):
            mine = places[start:stop]
            out = model(input_ids=ids_of_row[mine][None], use_cache=False).logits[0]
            logits = logits.index_copy(0, mine, out)
        rows.append(logits)
    logits = torch.stack(rows)
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
    )
    truth = {"logits": logits.detach(), "loss": loss.detach()}
    if case.train:
        loss.backward()
        truth |= gradients(model)
    return truth


def gradients(model: Any) -> Tensors:
    """The gradient of each parameter that has one, by its name."""
    return {
        f"gradient of {name}": parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
