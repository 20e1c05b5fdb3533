"""A model as its config.json says it: transformers builds it without weights, and it is counted.

Needs the extra `hf`, so it is imported only where --model is such a path. transformers knows the
defaults of each family and what its layers are made of; on torch's "meta" device a model takes no
memory and no time to speak of. No code of the folder's own is run, and nothing is downloaded.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError

from burst_rt.errors import ConfigError, InputError
from burst_rt.launch.plan.models import Model
from burst_rt.launch.plan.structure import inactive_weights, kinds_in_words, layers_of

__all__ = ["FAMILIES", "read_config"]

# Families whose layers `structure` takes apart, by the model_type of their text model.
_DENSE = (
    "cohere", "cohere2", "exaone4", "gemma", "gemma2", "gemma3_text", "glm4", "granite", "llama",
    "ministral", "ministral3", "mistral", "olmo2", "olmo3", "phi3", "qwen2", "qwen3", "seed_oss",
    "smollm3", "starcoder2",
)  # fmt: skip
_MIXTURES = (
    "deepseek_v2", "deepseek_v3", "ernie4_5_moe", "glm4_moe", "gpt_oss", "granitemoe",
    "llama4_text", "minimax_m2", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe",
)  # fmt: skip
_HYBRIDS = (
    "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2",
    "lfm2_moe", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_next", "recurrent_gemma", "zamba", "zamba2",
)  # fmt: skip
FAMILIES = tuple(sorted((*_DENSE, *_MIXTURES, *_HYBRIDS)))

_MOST_BYTES = 16 << 20
_MOST_LAYERS = 4096
# Fields without which a default would silently stand for the model's size, each with its other
# names; `attribute_map` has those of a family.
_SIZES: dict[str, tuple[str, ...]] = {
    "hidden_size": (),
    "num_hidden_layers": ("layer_types", "layers_block_type", "hybrid_override_pattern"),
}
_USE_SIZES = "or give sizes: layers=...,dim=...,heads=...,ffn=..."
# Errors that transformers raises for a configuration of which it cannot make a model.
_UNUSABLE = (
    OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError,
    RuntimeError, NotImplementedError, ImportError, StrictDataclassError,
)  # fmt: skip


def read_config(path: Path, name: str) -> Model:
    """The model of a config.json, or of a folder that has one; the text model of a larger one.

    Raises InputError for a file that is none or lacks a size, and for a model that cannot be
    forecast: it names the field. Raises ConfigError where transformers does not know the model.
    """
    file = path / "config.json" if path.is_dir() else path
    given = _parsed(file)
    family = given.get("model_type")
    if not isinstance(family, str):
        raise InputError(
            f"--model: {file}: model_type: expected the name of a family, got {family!r}; take the "
            "config.json that save_pretrained of transformers writes"
        )
    with _quiet():
        config = _config(file, family)
        _check_sizes(file, given, config)
        model = _built(file, config)
    try:
        kinds = Counter(layers_of(model, config, str(file)))
    except (ArithmeticError, AttributeError, TypeError) as error:
        raise _unusable(file, config.model_type, error) from error
    total = sum(weight.numel() for weight in model.parameters())
    layers = tuple((count, layer) for layer, count in kinds.items())
    inside = sum(count * layer.num_weights for count, layer in layers)
    about = f"{config.model_type}: {kinds_in_words(kinds)}"
    return Model(name, layers, total - inside, inactive_weights(model, config), about)


def _parsed(file: Path) -> Mapping[str, Any]:
    """The JSON object in a file."""
    try:
        if not file.is_file():
            raise OSError("it is no file" if file.exists() else "there is none")
        if file.stat().st_size > _MOST_BYTES:
            raise OSError(f"it has more than {_MOST_BYTES:,} bytes")
        parsed = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(parsed, dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"--model: the configuration {file} cannot be read: {error}; expected the config.json "
            "of a model of transformers, or its folder"
        ) from error
    return parsed


def _config(file: Path, family: str) -> Any:
    """transformers' configuration of the text model."""
    try:
        config: Any = transformers.AutoConfig.from_pretrained(
            str(file), local_files_only=True, trust_remote_code=False
        )
        text = config.get_text_config()
    except _UNUSABLE as error:
        if family not in transformers.CONFIG_MAPPING:
            raise ConfigError(
                f"--model: {file}: model_type {family!r}: transformers {transformers.__version__} "
                f"has no such family; update transformers, {_USE_SIZES}"
            ) from error
        raise _unusable(file, family, error) from error
    if config.is_encoder_decoder:
        raise InputError(
            f"--model: {file}: model_type {family!r}: an encoder and a decoder (is_encoder_decoder "
            f"is true), and only decoders are forecast; take a decoder's configuration, "
            f"{_USE_SIZES}"
        )
    if text.model_type not in FAMILIES:
        raise InputError(
            f"--model: {file}: model_type: expected one of {', '.join(FAMILIES)}, got "
            f"{text.model_type!r}; for another model, give sizes: layers=...,dim=...,heads=..., "
            "ffn=..."
        )
    return text


def _check_sizes(file: Path, given: Mapping[str, Any], config: Any) -> None:
    """Raises InputError for a size that the file leaves to a default, and for too many layers."""
    parts = [part for part in given.values() if isinstance(part, dict)]
    for name, others in _SIZES.items():
        names = (name, config.attribute_map.get(name, name), *others)
        if not any(each in part for each in names for part in (given, *parts)):
            raise InputError(
                f"--model: {file}: {name}: expected it, got nothing; add it to the configuration"
            )
    count = config.num_hidden_layers
    if not isinstance(count, int) or not 0 < count <= _MOST_LAYERS:
        raise InputError(
            f"--model: {file}: num_hidden_layers: expected 1 to {_MOST_LAYERS:,}, got {count!r}"
        )


def _built(file: Path, config: Any) -> Any:
    """The model without weights."""
    # Quantised weights have other shapes; forecasts count 16 bits a weight.
    vars(config).pop("quantization_config", None)
    try:
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(
                config, attn_implementation="eager", trust_remote_code=False
            )
    except _UNUSABLE as error:
        raise _unusable(file, config.model_type, error) from error


def _unusable(file: Path, family: str, error: BaseException) -> InputError:
    said = " ".join(str(error).split())[:300].rstrip(".")
    return InputError(
        f"--model: {file}: transformers {transformers.__version__} cannot make a model of it "
        f"(model_type {family!r}; {type(error).__name__}: {said}): a field is missing or wrong; "
        "compare it with a configuration that save_pretrained writes"
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences what transformers logs, such as token numbers beyond the vocabulary."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
