"""Tiny random models whose layers mix tokens by recurrences and short convolutions, too."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from small_models import LENGTHS, TOKENS, Truth, gradients, make_batch, seen

__all__ = ["HYBRIDS", "make_hybrid", "token_by_token", "truth_of_hybrid"]

_COMMON: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "attention_dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "use_cache": False,
}  # fmt: skip
_TYPES = ["linear_attention", "full_attention", "linear_attention"]
_DELTA = {
    "head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "layer_types": _TYPES,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_KIMI = {
    "linear_num_heads": 4, "linear_head_dim": 8, "layer_types": _TYPES, "kv_lora_rank": 16,
    "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 24,
    "num_key_value_heads": 4, "mlp_layer_types": ["dense", "sparse", "dense"],
}  # fmt: skip
_STATE_SPACE = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8,
    "mamba_chunk_size": 16,
}  # fmt: skip
_CONV = {"layer_types": ["conv", "full_attention", "conv"]}
HYBRIDS: dict[str, dict[str, Any]] = {
    "Qwen3Next": {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 24},
    "Qwen3_5": _DELTA,
    "Qwen3_5Moe": {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 24},
    "OlmoHybrid": _DELTA,
    "KimiLinear": _KIMI,
    "BailingHybrid": {**_KIMI, "num_expert_group": 2, "topk_group": 1},
    "Mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 16},
    "Bamba": {**_STATE_SPACE, "attn_layer_indices": [1]},
    "GraniteMoeHybrid": {
        **_STATE_SPACE, "layer_types": _TYPES, "num_local_experts": 4, "position_embedding_type":
        "rope", "shared_intermediate_size": 24,
    },
    "NemotronH": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention"],
        "ssm_state_size": 8, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "head_dim":
        8, "chunk_size": 16, "n_routed_experts": 4, "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 24,
    },
    "FalconH1": {**_STATE_SPACE, "mamba_d_ssm": 64, "ssm_in_multiplier": 0.5, "head_dim": 8},
    "Zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"], "mamba_d_state": 8,
        "mamba_ngroups": 2, "n_mamba_heads": 8, "chunk_size": 16, "num_key_value_heads": 4,
        "use_mem_rope": True, "use_shared_attention_adapter": True, "adapter_rank": 4,
    },
    "Lfm2": {**_CONV, "block_auto_adjust_ff_dim": False},
    "Lfm2Moe": {**_CONV, **_EXPERTS, "num_dense_layers": 1},
    "Lfm3": {"layer_types": ["conv", "sliding_attention", "full_attention"], "sliding_window": 16,
             "head_dim": 8, "conv_bias": True},
    "FalconMamba": {"state_size": 4, "time_step_rank": 4},
    "Mamba": {"state_size": 4, "time_step_rank": 4},
    "Jamba": {"attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_state": 4,
              "mamba_dt_rank": 4, "num_experts": 4},
    "MiniMax": {"layer_types": _TYPES, "head_dim": 8, "block_size": 16, "num_local_experts": 4},
    "RecurrentGemma": {"block_types": ["recurrent", "recurrent", "attention"], "lru_width": 32,
                       "attention_window_size": 16, "head_dim": 8},
}  # fmt: skip


def make_hybrid(name: str) -> Any:
    """A model of three layers or four in training mode, the same at every call."""
    text = "Text" if name.startswith("Qwen3_5") else ""
    options = {**_COMMON, **HYBRIDS[name]}
    if "layers_block_type" in options and name == "NemotronH":
        del options["num_hidden_layers"]
    config = getattr(transformers, f"{name}{text}Config")(**options)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for label, x in model.named_parameters():
            # Weights so small as the first ones would have gradients that are rounding alone, and
            # so would decays that forget all but a token.
            x.uniform_(-2, 1) if label.endswith("A_log") else x.add_(torch.randn_like(x) * 0.06)
    model.set_attn_implementation("eager")
    return model.train()


def truth_of_hybrid(name: str, kind: str, model: Any = None) -> Truth:
    """What one process makes of each document, and of each row without its padding, by itself.

    model: another one of that kind.
    """
    model, batch = model or make_hybrid(name), make_batch(name, kind)
    with token_by_token(name):
        return _truth(model, batch, kind)


@contextmanager
def token_by_token(name: str) -> Iterator[None]:
    """Inside, one process computes a model's delta rules token by token, as it decodes: gradients
    of decays are then off by 2e-6; by chunks, in float32, by 1e-5.
    """
    with pytest.MonkeyPatch.context() as patch:
        module = sys.modules[getattr(transformers, f"{name}ForCausalLM").__module__]
        if hasattr(module, _BY_CHUNKS):
            patch.setattr(module, _BY_CHUNKS, module.torch_recurrent_gated_delta_rule)
        yield


_BY_CHUNKS = "torch_chunk_gated_delta_rule"


def _truth(model: Any, batch: dict[str, torch.Tensor], kind: str) -> Truth:
    shown, rows = seen(batch), len(batch["input_ids"])
    logits = torch.zeros(rows, TOKENS, 64)
    for row in range(rows):
        places = shown[row].nonzero().flatten()
        lengths = list(LENGTHS[row]) if kind == "packed" else [len(places)]
        for part in places.split(lengths):
            logits[row, part] = model(input_ids=batch["input_ids"][row, part][None]).logits[0]
    labels = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    return {"loss": loss.item(), "logits": logits.detach(), "gradients": gradients(model)}
