"""A model of transformers from a folder of this machine, as a run trains and measures it.

Needs the extra `hf`, so it is imported only where --model is given. Nothing is downloaded, and no
code of the folder's own is run. Weights are float32, and what is stored as integers is refused.
Dropout is off, in training too: so a run does not depend on how ranks share the tokens, and a
resumed run goes on bit for bit.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

import burst_rt.hf
from burst_rt.context import Context
from burst_rt.errors import ConfigError, InputError
from burst_rt.job import launched
from burst_rt.launch.train.config import TrainConfig, require_model
from burst_rt.launch.train.data import Encoding, Stream
from burst_rt.launch.train.model import ShardedModel
from burst_rt.launch.train.stored import LOSSLESS, PLAIN, stored_types

__all__ = ["ModelFolder", "ShardedPretrained", "open_folder", "save_pretrained"]

_log = logging.getLogger("burst_rt.train")
_R = TypeVar("_R")

# Errors that transformers raises for a folder that it cannot read.
_UNREADABLE = (
    OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError,
    RuntimeError, ImportError, SafetensorError, StrictDataclassError,
)  # fmt: skip


@dataclass(frozen=True)
class ModelFolder:
    """A folder of transformers, without its weights."""

    path: Path
    # transformers' own types, which change with its version.
    config: Any
    tokenizer: Any

    @cached_property
    def fingerprint(self) -> str:
        """The fingerprint of the configuration, by which a resumed run knows its model."""
        return hashlib.sha256((self.path / "config.json").read_bytes()).hexdigest()

    @cached_property
    def weights_fingerprint(self) -> str:
        digests = []
        for path in sorted(self.path.glob("*.safetensors")):
            with path.open("rb") as file:
                digests.append(hashlib.file_digest(file, "sha256").digest())
        return hashlib.sha256(b"".join(digests)).hexdigest()

    @property
    def encoding(self) -> Encoding:
        """The tokenizer's encoding, without the tokens that it would add to a text; EOS separates
        documents.
        """
        return Encoding(unit="token", separator=self.tokenizer.eos_token_id, encode=self._encode)

    def load(self) -> torch.nn.Module:
        """The model with its weights, on the CPU. Raises ConfigError."""
        stored = _read(self.path, lambda path, **_: stored_types(Path(path)))
        model, report = self._read(
            transformers.AutoModelForCausalLM.from_pretrained,
            dtype=torch.float32,
            attn_implementation="burst_rt",
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are told below
            output_loading_info=True,
        )
        if getattr(model, "is_quantized", False):
            raise ConfigError(
                f"--model: the weights in {self.path} are quantised, and stay so in the model "
                f"({self._quantiser}): expected {', '.join(PLAIN)}, or a quantization_config of "
                "which transformers makes float32; make them floating point with the library that "
                "quantised them, and save the model again with save_pretrained."
            )
        odd = sorted([*report["missing_keys"], *(str(key) for key in report["mismatched_keys"])])
        if odd:
            raise ConfigError(
                f"--model: the weights in {self.path} are not those of its config.json: "
                f"{_few(odd)} missing or of another shape; save the model again with "
                "save_pretrained."
            )
        unused = sorted(report["unexpected_keys"])
        self._check_stored(stored, model, unused)
        if unused and not launched.rank():
            _log.warning(
                "burst-rt: --model: %s has weights that are not in the model of its config.json, "
                "and are left out: %s", self.path, _few(unused),
            )  # fmt: skip
        loaded: torch.nn.Module = model.eval()
        return loaded

    @property
    def _quantiser(self) -> str:
        known = getattr(self.config, "quantization_config", None) or {}
        return str(known.get("quant_method", "none"))

    def _check_stored(
        self, stored: dict[str, Sequence[str]], model: Any, unused: Sequence[str]
    ) -> None:
        """Raise ConfigError for stored weights that are not plain numbers; otherwise tell what was
        cast.
        """
        odd = {kind: names for kind, names in stored.items() if kind not in LOSSLESS}
        # False where a quantization_config was followed, and missing where none was, or is known.
        if not hasattr(model, "is_quantized"):
            # Masks and positions are stored as integers, too, and are not weights.
            others = [*unused, *(name for name, _ in model.named_buffers())]
            ignored = re.compile("|".join(model._keys_to_ignore_on_load_unexpected or ["$."]))
            for kind in sorted(odd.keys() - {*PLAIN}):
                wrong = [
                    name
                    for name in odd.pop(kind)
                    if not ignored.search(name) and not any(_ends_alike(name, x) for x in others)
                ]
                if wrong:
                    raise ConfigError(
                        f"--model: {self.path} has weights that are stored as {kind}, which mean "
                        f"nothing without scales: {_few(wrong)}: expected {', '.join(PLAIN)}, or a "
                        f"quantization_config that transformers {transformers.__version__} knows "
                        f"(got {self._quantiser}); make them floating point with the library that "
                        "quantised them, and save the model again with save_pretrained."
                    )
        if odd and not launched.rank():
            _log.warning(
                "burst-rt: --model: %s has weights that are stored as %s: transformers has made "
                "float32 of them", self.path, ", ".join(sorted(odd)),
            )  # fmt: skip

    def save(self, model: torch.nn.Module, folder: Path) -> None:
        """Write a folder of transformers like this one, with the weights of `model`."""
        save_pretrained(model, self.tokenizer, folder)

    def _encode(self, texts: Sequence[bytes]) -> list[Stream]:
        tokens: list[Stream] = [
            np.array(
                self.tokenizer(text.decode(), add_special_tokens=False, verbose=False)["input_ids"],
                dtype=np.int32,
            )
            for text in texts
        ]
        num_tokens = self.config.get_text_config().vocab_size
        largest = max([self.tokenizer.eos_token_id, *(int(x.max()) for x in tokens if x.size)])
        if largest >= num_tokens:
            raise ConfigError(
                f"--model: the tokenizer in {self.path} is another model's: it gives token "
                f"{largest}, and the model knows {num_tokens} (vocab_size); use the tokenizer that "
                "came with the model."
            )
        return tokens

    def _read(self, read: Callable[..., _R], **options: Any) -> _R:
        return _read(self.path, read, **options)


def _ends_alike(one: str, other: str) -> bool:
    """Whether two names of a tensor differ by prefixes of modules at most."""
    return f".{one}".endswith(f".{other}") or f".{other}".endswith(f".{one}")


def _few(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"


def open_folder(path: Path, seq_len: int) -> ModelFolder:
    """Read configuration and tokenizer. Raises ConfigError for what sequences of `seq_len` tokens
    cannot be made with.
    """
    require_model(path)
    _hush()
    config: Any = _read(path, transformers.AutoConfig.from_pretrained)
    tokenizer: Any = _read(path, transformers.AutoTokenizer.from_pretrained)
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"--model: the tokenizer in {path} has no EOS token, which separates documents; "
            "set eos_token in its tokenizer_config.json."
        )
    # XLNet's -1 means unlimited.
    longest = getattr(config.get_text_config(), "max_position_embeddings", None) or -1
    if 0 < longest < seq_len:
        raise ConfigError(
            f"--seq-len: expected at most the model's max_position_embeddings, {longest}, got "
            f"{seq_len}; choose a smaller --seq-len, or raise it in {path}/config.json, with "
            "rope_parameters that suit the length."
        )
    return ModelFolder(path, config, tokenizer)


def save_pretrained(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a model and a tokenizer of transformers as `folder`."""
    _hush()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in folder.glob("*.safetensors"):
        # They are this user's alone; whoever may read the rest may read them too.
        with suppress(OSError):  # some file systems have modes of their own
            shutil.copymode(folder / "config.json", path)


def _hush() -> None:
    """Silences warnings and progress bars: an error tells once what goes wrong."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def _read(path: Path, read: Callable[..., _R], **options: Any) -> _R:
    try:
        return read(str(path), local_files_only=True, trust_remote_code=False, **options)
    except _UNREADABLE as error:
        if "burst_rt" in str(error):
            raise ConfigError(
                f"--model: the model in {path} cannot take its attention from burst_rt "
                f"({type(error).__name__}: {_one_line(error)}); use a model whose layers ask "
                "transformers for their attention, such as Llama, Qwen, Mistral or Gemma."
            ) from error
        raise ConfigError(
            f"--model: transformers {transformers.__version__} cannot read {path}: "
            f"{_one_line(error)}; save the model and its tokenizer there with save_pretrained."
        ) from error


class ShardedPretrained(ShardedModel):
    """A model of transformers over the ranks of a context."""

    def __init__(self, module: torch.nn.Module, context: Context, config: TrainConfig) -> None:
        super().__init__(module, context, config)
        if config.checkpoint_activations:
            for layer in module.modules():
                if isinstance(layer, GradientCheckpointingLayer):
                    layer.forward = partial(burst_rt.checkpoint, layer.forward)

    def _loss(self, batch: dict[str, Tensor], group: Context) -> Tensor:
        part = burst_rt.hf.shard(batch, self._context, self._layout, group=group)
        options = {}
        if not torch.is_grad_enabled():
            # Perplexity is of tokens, and not of how experts share them.
            options["output_router_logits"] = False
        loss: Tensor = self.module(**part, **options, use_cache=False).loss
        return loss

    def check(self) -> None:
        """Raise ConfigError where ranks do not compute what one process computes. Collective over
        the context.
        """
        try:
            burst_rt.hf.prepare(self.module, self._context)
        except InputError as error:
            raise ConfigError(
                f"--model: {str(error).partition('hf.prepare: ')[2] or error} (--context-parallel "
                "1)."
            ) from error


def _one_line(error: BaseException) -> str:
    """The beginning of what it says."""
    return " ".join(str(error).split("\n\n")[0].split()).rstrip(".") or type(error).__name__
