"""What can generate: the byte-level model of a run, or a model of transformers, over ranks.

Both take new tokens and give the scores of the token after them. The cache of the one is a
`KVCache`, of the other a `burst_rt.hf.Cache`, which has one.
"""

from __future__ import annotations

import codecs
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from burst_rt import KVCache
from burst_rt.context import Context
from burst_rt.errors import ConfigError
from burst_rt.launch.train.data import SEPARATOR
from burst_rt.launch.train.model import Decoder
from burst_rt.runtime.objects import bytes_of

if TYPE_CHECKING:
    from burst_rt.launch.train.pretrained import ModelFolder

__all__ = [
    "ByteStreamer",
    "CachedModel",
    "Source",
    "bytes_source",
    "encode_chat",
    "folder_ends",
    "folder_source",
    "longest_text",
]


class CachedModel(Protocol):
    """A model with a cache of one sequence."""

    @property
    def kv(self) -> KVCache: ...

    def __call__(self, tokens_BS: Tensor) -> Tensor:
        """Scores `[vocab_size]` of the token after these, which go on with what is cached.

        Takes all new tokens, the same on every rank; every rank gets the same scores. Collective.
        """


class _Streamer(Protocol):
    def put(self, value: Tensor) -> None: ...

    def end(self) -> None: ...


@dataclass(frozen=True)
class Source:
    """A model before its cache, and what its tokens mean."""

    encode: Callable[[bytes], list[int]]
    ends: frozenset[int]  # tokens that end the text
    unit: str  # the word for a token
    longest: int | None  # tokens of a sequence that the model was made for
    streamer: Callable[[], _Streamer]  # prints tokens as text as they come
    # For the prompt's tokens and so many new ones; collective. Raises ConfigError.
    cached: Callable[[int, int], CachedModel]


class _ByteModel:
    def __init__(self, decoder: Decoder, world: Context, capacity: int, dtype: torch.dtype) -> None:
        self._decoder = decoder.to(world.device, dtype)
        config = decoder.config
        self.kv = KVCache(
            world, num_layers=config.layers, batch=1, num_kv_heads=config.kv_heads,
            head_dim=config.head_dim, capacity=capacity, dtype=dtype,
        )  # fmt: skip

    def __call__(self, tokens_BS: Tensor) -> Tensor:
        about = hashlib.blake2b(bytes_of(tokens_BS), digest_size=8).hexdigest()
        step, layers = self.kv.step(tokens_BS.shape[1], about=about), count()

        def attend(q_BSHE: Tensor, k_BSGE: Tensor, v_BSGE: Tensor) -> Tensor:
            return step.attend(next(layers), q_BSHE, k_BSGE, v_BSGE)

        scores_BSV = self._decoder(step.cut(tokens_BS), step.positions[0], attend)
        step.commit()
        return step.last(scores_BSV)[0].float()


class ByteStreamer:
    """Prints bytes as text: each character when it is complete, and U+FFFD for invalid bytes."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def put(self, value: Tensor) -> None:
        print(self._decoder.decode(bytes(value.flatten().tolist())), end="", flush=True)

    def end(self) -> None:
        print(self._decoder.decode(b"", final=True), flush=True)


def bytes_source(decoder: Decoder, world: Context, *, seq_len: int, dtype: torch.dtype) -> Source:
    """The byte-level model, trained with sequences of `seq_len` bytes."""
    return Source(
        encode=list,
        ends=frozenset(SEPARATOR),
        unit="byte",
        longest=seq_len,
        streamer=ByteStreamer,
        cached=lambda read, new: _ByteModel(decoder, world, read + new, dtype),
    )


class _Pretrained:
    def __init__(self, model: Any, world: Context, capacity: int) -> None:
        import burst_rt.hf
        from burst_rt.hf.release import cache_name

        config = model.config.get_text_config()
        if getattr(config, "output_router_logits", False):
            config.output_router_logits = False  # for a loss
        self._model = model
        self._cache = burst_rt.hf.Cache(model, world, capacity=capacity, batch=1)
        self._given = {cache_name(model): self._cache}

    @property
    def kv(self) -> KVCache:
        assert self._cache.kv is not None  # the batch is known
        return self._cache.kv

    def __call__(self, tokens_BS: Tensor) -> Tensor:
        logits_BSV = self._model(input_ids=tokens_BS, **self._given).logits
        last: Tensor = logits_BSV[0, -1].float()
        return last


def cast_model(model: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """The model of transformers on a device, with weights as from_pretrained(dtype=...) gives them.

    `model.to(dtype)` would round what the model has computed for itself, too: frequencies of rotary
    embeddings, by which positions beyond some hundreds lose their places in bfloat16. Weights that
    transformers keeps in float32 stay so.
    """
    plan = model._get_dtype_plan(dtype)
    kept = [re.compile(re.escape(name).replace(r"\*", ".*")) for name in plan]
    model.to(device)
    for name, weight in model.state_dict(keep_vars=True).items():
        if weight.is_floating_point() and not any(each.search(name) for each in kept):
            weight.data = weight.data.to(dtype)
    return model


def require_same_frequencies(model: Any, tokens: int, option: str, read: int = 0) -> None:
    """Raises ConfigError where cached keys would have other frequencies than later ones.

    tokens: the longest text. option: by which it is chosen, and its number. read: tokens that are
    read together first.
    """
    from burst_rt.hf.rotary import frequencies_change_at

    most = frequencies_change_at(model)
    if most is not None and read <= most < tokens:
        raise ConfigError(
            f"{option}: the model's rotary embeddings take other frequencies beyond {most:,} "
            "tokens, which keys that are cached before do not have; choose at most "
            f"{most:,} tokens for a text, or model.generate of transformers, which begins again."
        )


def folder_ends(folder: ModelFolder, model: Any) -> frozenset[int]:
    """The tokens that end a text."""
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return frozenset(end for end in (*ends, folder.tokenizer.eos_token_id) if end is not None)


def longest_text(folder: ModelFolder) -> int | None:
    """Tokens of a sequence that the model was made for; None where it does not say."""
    longest = getattr(folder.config.get_text_config(), "max_position_embeddings", None) or -1
    return longest if longest > 0 else None


def encode_chat(folder: ModelFolder, messages: list[dict[str, str]]) -> list[int]:
    """The tokens of a chat up to the answer, as the chat template of the folder says.

    Raises ValueError where it has none, and whatever else a template raises.
    """
    if folder.tokenizer.chat_template is None:
        raise ValueError("the model's folder has no chat template")
    text = folder.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    # The template writes what the tokenizer would put before a text.
    tokens: list[int] = folder.tokenizer(text, verbose=False, add_special_tokens=False)["input_ids"]
    return tokens


def folder_source(
    folder: ModelFolder, model: Any, world: Context, *, dtype: torch.dtype, chat: bool
) -> Source:
    """A model of transformers, and its tokenizer. chat: the prompt is a user's message, and only
    the answer is printed.
    """
    import transformers

    def encode(prompt: bytes) -> list[int]:
        try:
            text = prompt.decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"the prompt: {error}; give a text in UTF-8.") from error
        if not chat:
            tokens: list[int] = folder.tokenizer(text, verbose=False)["input_ids"]
            return tokens
        try:
            return encode_chat(folder, [{"role": "user", "content": text}])
        except Exception as error:  # a template is a program of the model's
            raise ConfigError(f"--chat: {error}; leave it out, or mend the template.") from error

    def cached(read: int, new: int) -> CachedModel:
        require_same_frequencies(model, read + new, f"--max-new-tokens {new:,}", read)
        return _Pretrained(cast_model(model, world.device, dtype), world, read + new)

    return Source(
        encode=encode,
        ends=folder_ends(folder, model),
        unit="token",
        longest=longest_text(folder),
        streamer=lambda: transformers.TextStreamer(
            folder.tokenizer, skip_prompt=chat, skip_special_tokens=True
        ),
        cached=cached,
    )
