"""A request's text as its tokens come: whole characters, up to a stop sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["INCOMPLETE", "TextOfTokens"]

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer gives for a part of a character


class TextOfTokens:
    """Turns tokens into text that may be sent. decode: of a tokenizer, for any tokens.

    stops: sequences before which the text ends. A text that may be the beginning of one is kept
    back until it is known.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        stops: Sequence[str] = (),
        behind: Sequence[int] = (),
    ) -> None:
        self.stopped = False
        self._decode, self._stops = decode, tuple(stops)
        self._tokens = [*behind]
        # Tokens from `_from` on are decoded together, since a token's text depends on those before
        # it. The text of those before `_told` has been taken.
        self._from, self._told = 0, len(self._tokens)
        self._kept = ""

    def put(self, token: int) -> str:
        """The text that may be sent now that this token has come."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._from : self._told])
        after = self._decode(self._tokens[self._from :])
        if after.endswith(INCOMPLETE) or len(after) <= len(before):
            return ""
        self._from, self._told = self._told, len(self._tokens)
        return self._take(after[len(before) :])

    def end(self) -> str:
        """The rest of the text, where no stop sequence has ended it."""
        before = self._decode(self._tokens[self._from : self._told])
        rest = self._decode(self._tokens[self._from :])[len(before) :]
        self._told = self._from = len(self._tokens)
        text = self._take(rest) + ("" if self.stopped else self._kept)
        self._kept = ""
        return text

    def _take(self, text: str) -> str:
        text = self._kept + text
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._kept = True, ""
            return text[: min(found)]
        kept = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._kept = text[len(text) - kept :]
        return text[: len(text) - kept]


def _overlap(text: str, stop: str) -> int:
    """The most characters at the end of a text that a stop sequence begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
