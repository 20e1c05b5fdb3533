"""What the tokens of a model's folder mean: texts and chats as tokens, and back."""

from __future__ import annotations

import re
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from burst_rt.launch.generate.models import encode_chat, folder_ends
from burst_rt.launch.serve.protocol import ParsedRequest, Refusal
from burst_rt.launch.serve.text import INCOMPLETE
from burst_rt.launch.train.pretrained import ModelFolder

__all__ = ["Vocabulary"]

# How vocabularies name bytes: byte-level ones by a character for each, others as <0x0A>.
_BYTES = {name: byte for byte, name in bytes_to_unicode().items()}
_BYTE = re.compile("<0x([0-9A-F]{2})>")


class Vocabulary:
    """A folder's tokenizer and chat template, and its model's tokens.

    ends: tokens that end a text.
    """

    def __init__(self, folder: ModelFolder, model: Any) -> None:
        self._folder = folder
        self._size = model.config.get_text_config().vocab_size
        self.ends = folder_ends(folder, model)
        text = folder.tokenizer("a", verbose=False, add_special_tokens=False)
        self._before: list[int] = text["input_ids"]

    def encode(self, asked: ParsedRequest) -> list[int]:
        """The tokens of a request's prompt. Raises Refusal."""
        tokens: list[int]
        if asked.tokens is not None:
            tokens = asked.tokens
        elif asked.messages is not None:
            tokens = self._encode_chat(asked.messages)
        else:
            tokens = self._folder.tokenizer(asked.prompt, verbose=False)["input_ids"]
        if max(tokens, default=0) >= self._size:
            raise Refusal(400, f"prompt: tokens must be below {self._size}", "prompt")
        return tokens

    def decode(self, tokens: list[int]) -> str:
        """The text of these tokens, without special ones."""
        text: str = self._folder.tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def word(self, token: int) -> str:
        """The text of a token behind other text: some tokenizers leave the first space out."""
        before = self._before
        return self.decode([*before, token])[len(self.decode(before)) :]

    def bytes_of(self, token: int) -> bytes | None:
        """The bytes of `word`, also of a token that is a part of a character, as the vocabulary
        names them; None where it does not.
        """
        word = self.word(token)
        if INCOMPLETE not in word:
            return word.encode()
        name: str = self._folder.tokenizer.convert_ids_to_tokens(token)
        if match := _BYTE.fullmatch(name):
            return bytes.fromhex(match[1])
        known = all(character in _BYTES for character in name)
        return bytes(_BYTES[character] for character in name) if known else None

    def _encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        try:
            return encode_chat(self._folder, messages)
        except Exception as error:  # a template is a program of the model's
            why = f"messages: the model's chat template refuses them: {error}"
            raise Refusal(400, why, "messages") from error
