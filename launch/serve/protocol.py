"""OpenAI's chat and completions protocol: what a request asks for, and the shape of answers.

After https://platform.openai.com/docs/api-reference (chat, completions, models, errors). What is
not done is refused by its name.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from burst_rt.launch.serve.sampling import Chosen, Sampler

__all__ = ["ParsedRequest", "Refusal", "Reply", "error_body", "read_chat", "read_completion"]

Json = dict[str, Any]  # as JSON gives it
_MOST_LIKELY = 20  # tokens whose probabilities a request may ask for
_MOST_STOPS = 16
_LARGEST_SEED = 2**63 - 1
# What asks for nothing, under names that are not done otherwise.
_IDLE: dict[str, tuple[object, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "suffix": ("",), "presence_penalty": (0,),
    "frequency_penalty": (0,), "logit_bias": ({},), "response_format": ({"type": "text"},),
    "tools": ([],), "tool_choice": ("none", "auto"), "parallel_tool_calls": (True, False),
    "store": (False,), "service_tier": ("auto", "default"),
}  # fmt: skip
_UNREAD = {"user", "metadata", "safety_identifier", "prompt_cache_key"}
_COMMON = {
    "model", "temperature", "top_p", "top_k", "seed", "stop", "stream", "stream_options",
    "max_tokens", "logprobs",
}  # fmt: skip


class Refusal(Exception):
    """A request that is not done: the status, why, and the name of the parameter."""

    def __init__(self, status: int, why: str, name: str | None = None, code: str = "") -> None:
        super().__init__(why)
        self.status, self.why, self.name, self.code = status, why, name, code


@dataclass(frozen=True, kw_only=True)
class ParsedRequest:
    """What a request asks for. It has one of a prompt, its tokens, and a chat's messages."""

    prompt: str | None = None
    tokens: list[int] | None = None
    messages: list[Json] | None = None
    model: str
    sampling: Sampler
    seed: int | None
    most_tokens: int | None
    stops: tuple[str, ...]
    streams: bool
    tells_usage: bool  # at the end of a stream

    @property
    def is_chat(self) -> bool:
        """Whether the answer is a message."""
        return self.messages is not None


def read_chat(body: Json) -> ParsedRequest:
    """What `POST /v1/chat/completions` asks for. Raises Refusal."""
    special = {"messages", "max_completion_tokens", "top_logprobs"}
    _check_names(body, _COMMON | special)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", "a list of messages, one or more", messages)
    num_likely = None
    if _is_true(body, "logprobs"):
        num_likely = _whole(body, "top_logprobs", 0, 0, _MOST_LIKELY)
    elif body.get("top_logprobs") is not None:
        raise _wrong("top_logprobs", "none without logprobs=true", body["top_logprobs"])
    most = _whole(body, "max_completion_tokens", None, 1)
    if most is None:
        most = _whole(body, "max_tokens", None, 1)
    return _parsed(body, num_likely, most, messages=[_message(x) for x in messages])


def read_completion(body: Json) -> ParsedRequest:
    """What `POST /v1/completions` asks for. Raises Refusal."""
    _check_names(body, _COMMON | {"prompt"})
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    tokens = isinstance(prompt, list) and all(_is_whole(x) and x >= 0 for x in prompt)
    if not prompt or not (isinstance(prompt, str) or tokens):
        raise _wrong("prompt", "one text, or its tokens, not empty", prompt)
    num_likely = _whole(body, "logprobs", None, 0, _MOST_LIKELY)
    most = _whole(body, "max_tokens", 16, 1)  # the protocol's default
    if isinstance(prompt, str):
        return _parsed(body, num_likely, most, prompt=_text("prompt", prompt))
    return _parsed(body, num_likely, most, tokens=prompt)


def _parsed(body: Json, num_likely: int | None, most: int | None, **what: Any) -> ParsedRequest:
    """The rest of a request. what: is written on."""
    stops = body.get("stop")
    stops = [stops] if isinstance(stops, str) else stops or []
    if (
        not isinstance(stops, list)
        or len(stops) > _MOST_STOPS
        or not all(isinstance(x, str) and x for x in stops)
    ):
        raise _wrong("stop", f"a text or at most {_MOST_STOPS} of them, none empty", body["stop"])
    options = body.get("stream_options") or {}
    if not isinstance(options, dict) or set(options) - {"include_usage", "include_obfuscation"}:
        raise _wrong("stream_options", "include_usage alone", options)
    model = body.get("model", "")
    if not isinstance(model, str):
        raise _wrong("model", "a name", model)
    return ParsedRequest(
        **what, model=model,
        sampling=Sampler(
            temperature=_number(body, "temperature", 1.0, 0.0, 2.0),
            top_p=_number(body, "top_p", 1.0, 1e-9, 1.0),
            top_k=_whole(body, "top_k", 0, 0) or 0, num_likely=num_likely,
        ),
        seed=_whole(body, "seed", None, -_LARGEST_SEED - 1, _LARGEST_SEED), most_tokens=most,
        stops=tuple(stops), streams=_is_true(body, "stream"),
        tells_usage=_is_true(options, "include_usage"),
    )  # fmt: skip


def _check_names(body: Json, known: set[str]) -> None:
    for name, value in body.items():
        if name in known or name in _UNREAD or value is None:
            continue
        if name not in _IDLE:
            raise Refusal(400, f"{name} is not known here; leave it out", name, "unknown_parameter")
        if value not in _IDLE[name]:
            raise Refusal(
                400, f"{name} is not done here: expected {_IDLE[name][0]!r} or none, got "
                f"{value!r:.80}", name, "unsupported_value",
            )  # fmt: skip


def _message(message: object) -> Json:
    """A message, whose text may come in parts. Raises Refusal."""
    expected = "messages of a role and a text"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _wrong("messages", expected, message)
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            raise _wrong("messages", f"{expected}, or parts of type text alone", content)
        content = "".join(str(part.get("text", "")) for part in content)
    odd = {name for name, value in message.items() if value is not None} - {
        "role",
        "content",
        "name",
    }
    name = message.get("name")
    if not isinstance(content, str) or odd or not (name is None or isinstance(name, str)):
        raise _wrong("messages", expected, message)
    said = {"role": message["role"], "content": content} | ({} if name is None else {"name": name})
    return {what: _text("messages", text) for what, text in said.items()}


def _text(name: str, text: str) -> str:
    """A text of characters; JSON can also have halves of them. Raises Refusal."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _wrong(name, f"text in Unicode ({error.reason})", text) from error
    return text


def _is_true(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise _wrong(name, "true or false", value)
    return bool(value)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _whole(
    body: Json, name: str, default: int | None, least: int, most: int | None = None
) -> int | None:
    value = body.get(name)
    if value is None:
        return default
    if not _is_whole(value) or value < least or (most is not None and value > most):
        limit = "" if most is None else f" and at most {most}"
        raise _wrong(name, f"a whole number of at least {least}{limit}", value)
    return int(value)


def _number(body: Json, name: str, default: float, least: float, most: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise _wrong(name, f"a number of {least:g} to {most:g}", value)
    return float(value)


def _wrong(name: str, expected: str, got: object) -> Refusal:
    return Refusal(400, f"{name}: expected {expected}, got {got!r:.80}", name, "invalid_value")


def error_body(refused: Refusal) -> Json:
    """The body of an answer to a request that is not done."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = "server_error" if refused.status >= 500 else kinds.get(refused.status)
    return {
        "error": {
            "message": refused.why, "type": kind or "invalid_request_error", "param": refused.name,
            "code": refused.code or None,
        }
    }  # fmt: skip


@dataclass(kw_only=True)
class Reply:
    """The answer to a request, whole or in parts.

    word: of a token, its text. bytes_of: its bytes, or None where they are not known.
    """

    asked: ParsedRequest
    model: str
    num_prompt: int
    word: Callable[[int], str]
    bytes_of: Callable[[int], bytes | None]
    num_new: int = 0
    text: str = ""
    chosen: list[Chosen] = field(default_factory=list)  # where their probabilities are asked for
    ended: str = ""  # "stop" or "length"

    def __post_init__(self) -> None:
        kind = "chatcmpl" if self.asked.is_chat else "cmpl"
        self._id, self._made = f"{kind}-{secrets.token_hex(12)}", int(time.time())
        self._begun = False  # whether a part has been made
        # The texts of the chosen tokens, as far as they were needed, and where they begin and end.
        self._words, self._offsets = list[str](), [0]

    def whole(self) -> Json:
        """The whole answer."""
        choice: Json = {"index": 0, "finish_reason": self.ended, "logprobs": self._logprobs(0)}
        if self.asked.is_chat:
            choice["message"] = {"role": "assistant", "content": self.text, "refusal": None}
        else:
            choice["text"] = self.text
        return self._body("chat.completion", [choice], usage=self._usage())

    def part(self, text: str, first: int) -> Json:
        """A part of a stream: this text, and the tokens that have come since the first one."""
        choice: Json = {
            "index": 0, "finish_reason": self.ended or None, "logprobs": self._logprobs(first),
        }  # fmt: skip
        if self.asked.is_chat:
            begins = {} if self._begun else {"role": "assistant"}
            choice["delta"] = {**begins, **({"content": text} if text or begins else {})}
            self._begun = True
        else:
            choice["text"] = text
        more = {"usage": None} if self.asked.tells_usage else {}
        return self._body("chat.completion.chunk", [choice], **more)

    def last_part(self) -> Json:
        """The part of a stream that says how many tokens there were."""
        return self._body("chat.completion.chunk", [], usage=self._usage())

    def _body(self, kind: str, choices: list[Json], **more: object) -> Json:
        kind = kind if self.asked.is_chat else "text_completion"
        return {
            "id": self._id, "object": kind, "created": self._made, "model": self.model,
            "choices": choices, **more,
        }  # fmt: skip

    def _usage(self) -> Json:
        return {
            "prompt_tokens": self.num_prompt, "completion_tokens": self.num_new,
            "total_tokens": self.num_prompt + self.num_new,
        }  # fmt: skip

    def _logprobs(self, first: int) -> Json | None:
        if self.asked.sampling.num_likely is None:
            return None
        chosen = self.chosen[first:]
        if self.asked.is_chat:
            return {"content": [self._with_likely(x) for x in chosen], "refusal": None}
        for x in self.chosen[len(self._words) :]:
            self._words.append(self.word(x.token))
            self._offsets.append(self._offsets[-1] + len(self._words[-1]))
        return {
            "tokens": self._words[first:], "token_logprobs": [x.logprob for x in chosen],
            # Where tokens have one text, the likeliest counts, which comes first.
            "top_logprobs": [{self.word(t): p for t, p in reversed(x.likely)} for x in chosen],
            "text_offset": self._offsets[first:-1],
        }  # fmt: skip

    def _with_likely(self, chosen: Chosen) -> Json:
        entry = self._entry(chosen.token, chosen.logprob)
        return {**entry, "top_logprobs": [self._entry(*one) for one in chosen.likely]}

    def _entry(self, token: int, logprob: float) -> Json:
        known = self.bytes_of(token)
        return {
            "token": self.word(token), "logprob": logprob,
            "bytes": None if known is None else list(known),
        }  # fmt: skip
