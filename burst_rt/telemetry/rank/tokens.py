"""`TokenMeter`: time to first token, time per token, and the fill of a cache, told to viewers.

The program says when tokens are ready, by the calls that transformers makes to a streamer. A time
is thus the time that its reader waits for (the model, the choice of the token, the other ranks),
and the time between two texts belongs to neither.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from burst_rt.telemetry.rank.joining import report

__all__ = ["TokenMeter"]

# Seconds between two reports to viewers, because a token may take less than a millisecond. First
# and last tokens are always reported.
_PERIOD_S = 0.2


class _Streamer(Protocol):
    """The protocol that transformers calls a streamer."""

    def put(self, value: Any) -> None: ...

    def end(self) -> None: ...


class TokenMeter:
    """Measures tokens as they come, and reports them as `telemetry.report` does.

        meter = burst_rt.telemetry.TokenMeter(cache)
        model.generate(**inputs, cache=cache, streamer=meter)

    Your own loop calls `put(prompt)`, `put(token)` for each token (or a few at once), and `end()`,
    also where a text breaks off by an error. Every rank of the cache's context may have
    one: rank 0 alone reports.

    cache: a `KVCache` or a `burst_rt.hf.Cache`; None: no figures of a cache, and every rank that
        has a meter reports.
    to: another streamer, which gets the same calls.

    time_to_first_token_s: of the last prompt, from `put(prompt)` to the first token after it.
    last_token_s: between the last token and the one before it. None where there is none yet.
    """

    def __init__(self, cache: Any = None, *, to: _Streamer | None = None) -> None:
        self._cache, self._to = cache, to
        self._last_s: float | None = None  # when the last tokens came; None between two texts
        self._reported_s = 0.0
        self._first = False  # the next tokens are the first of their text
        self._rows = 1
        self._num_tokens = 0  # output tokens of a sequence
        # Number of those that came after another token; the same over all sequences; their seconds.
        self._num_timed, self._num_timed_all, self._timed_s = 0, 0, 0.0
        self.time_to_first_token_s: float | None = None
        self.last_token_s: float | None = None

    @property
    def mean_token_s(self) -> float | None:
        """Mean time of an output token; None before the second token of a text."""
        return self._timed_s / self._num_timed if self._num_timed else None

    @property
    def tokens_per_s(self) -> float | None:
        """Output tokens a second over all sequences, without the first token of each."""
        return self._num_timed_all / self._timed_s if self._timed_s else None

    def put(self, value: Any) -> None:
        """The tokens of a prompt (the first call, and the first after `end`), or the next tokens.

        value: `[tokens]` of one sequence or `[batch, tokens]`, of new ones also `[batch]`; or one
        number.
        """
        now_s = time.perf_counter()
        if self._last_s is None:
            self._rows = _num_rows(value)
            self._first = True
        else:
            self._came(max(1, _count(value) // self._rows), now_s - self._last_s)
        self._last_s = now_s
        if self._to is not None:
            self._to.put(value)

    def end(self) -> None:
        """The text ends: no time counts until the next prompt."""
        self._last_s = None
        self._report()
        if self._to is not None:
            self._to.end()

    def _came(self, num_tokens: int, took_s: float) -> None:
        self._num_tokens += num_tokens
        if self._first:
            self.time_to_first_token_s = took_s
        else:
            self.last_token_s = took_s / num_tokens
            self._num_timed += num_tokens
            self._num_timed_all += num_tokens * self._rows
            self._timed_s += took_s
        if self._first or time.perf_counter() - self._reported_s >= _PERIOD_S:
            self._report()
        self._first = False

    def _report(self) -> None:
        kv = getattr(self._cache, "kv", self._cache)
        if self.time_to_first_token_s is None or (kv is not None and kv.attention.runtime.rank):
            return
        self._reported_s = time.perf_counter()
        values = {
            "time_to_first_token_s": self.time_to_first_token_s,
            "time_per_token_s": self.last_token_s,
            "mean_time_per_token_s": self.mean_token_s,
            "output_tokens_per_s": self.tokens_per_s,
        }
        if kv is not None:
            values["cached_tokens"] = sum(kv.lengths)
            values["cache_capacity_tokens"] = kv.capacity * kv.batch
        known = {name: value for name, value in values.items() if value is not None}
        report(self._num_tokens, **known)


def _num_rows(prompt: Any) -> int:
    return len(prompt) if getattr(prompt, "ndim", 1) > 1 else 1


def _count(tokens: Any) -> int:
    if hasattr(tokens, "numel"):
        return int(tokens.numel())
    return len(tokens) if isinstance(tokens, Sequence) else 1
