"""A run's model as a folder of transformers. Needs the extra `hf`.

The byte-level model is a Llama: the same norms, feed-forward and grouped heads, and rotary pairs
(i, i + head_dim / 2) as in transformers. So its weights get other names, and no row changes place.
transformers forms the angles of rotary positions in float32, where the model forms them in float64:
far out in a long sequence scores differ by more than rounding.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from burst_rt.errors import ConfigError
from burst_rt.launch.train.checkpoint import copy_tensors, find_checkpoint, save_folder
from burst_rt.launch.train.config import ModelConfig
from burst_rt.launch.train.data import SEPARATOR
from burst_rt.launch.train.pretrained import open_folder, save_pretrained

__all__ = ["byte_tokenizer", "export"]

# Names of the byte-level model's weights as transformers has them in a Llama, in order.
_NAMES = (
    (r"^embed\.", "model.embed_tokens."),
    (r"^norm\.", "model.norm."),
    (r"^head\.", "lm_head."),
    (r"^blocks\.", "model.layers."),
    (r"\.attention_norm\.", ".input_layernorm."),
    (r"\.feed_forward_norm\.", ".post_attention_layernorm."),
    (r"\.attention\.query\.", ".self_attn.q_proj."),
    (r"\.attention\.key\.", ".self_attn.k_proj."),
    (r"\.attention\.value\.", ".self_attn.v_proj."),
    (r"\.attention\.out\.", ".self_attn.o_proj."),
    (r"\.feed_forward\.(gate|up|down)\.", r".mlp.\1_proj."),
)


def export(run: Path, folder: Path) -> None:
    """Write the model of the checkpoint that `run` means as `folder`.

    Raises ConfigError if something has that name already, or without a checkpoint; OSError as the
    disk says it.
    """
    if folder.exists():
        raise ConfigError(f"{folder} is there already; choose another FOLDER, or remove it first.")
    checkpoint = find_checkpoint(run)[1]
    config = checkpoint.manifest.config
    weights = checkpoint.weights
    if config.architecture is None:
        source = open_folder(Path(str(config.model)), config.seq_len)
        model: Any = source.load()
        tokenizer = source.tokenizer
    else:
        model = transformers.LlamaForCausalLM(_llama(config.architecture, config.seq_len))
        tokenizer = byte_tokenizer()
        weights = {_renamed(name): tensor for name, tensor in weights.items()}
    copy_tensors(weights, {name: p.detach() for name, p in model.named_parameters()})
    folder.parent.mkdir(parents=True, exist_ok=True)
    save_folder(folder, partial(save_pretrained, model, tokenizer))


def byte_tokenizer() -> Any:
    """A tokenizer whose tokens are the bytes of UTF-8; EOS is byte 0, which separates documents."""
    # A tokenizer writes bytes as printable characters, except byte 0: its printable character may
    # occur in a text, where it would be taken for EOS, and byte 0 itself never occurs.
    characters = bytes_to_unicode() | {SEPARATOR[0]: SEPARATOR.decode()}
    vocabulary = {character: byte for byte, character in characters.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SEPARATOR.decode(),
        clean_up_tokenization_spaces=False,
    )


def _llama(model: ModelConfig, seq_len: int) -> Any:
    return transformers.LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.dim,
        intermediate_size=model.hidden_dim,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        max_position_embeddings=seq_len,
        rms_norm_eps=model.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=SEPARATOR[0],
    )


def _renamed(name: str) -> str:
    for pattern, replacement in _NAMES:
        name = re.sub(pattern, replacement, name)
    return name
