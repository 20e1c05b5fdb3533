"""What a model is called with when it has a cache over ranks, checked before anything is sent."""

from __future__ import annotations

import hashlib
import operator
from dataclasses import dataclass
from typing import Any, cast

import torch

from burst_rt.errors import InputError
from burst_rt.hf.shard import KEYWORD
from burst_rt.runtime.objects import bytes_of
from burst_rt.serving.cache import DECODED_TOGETHER, KVCache

__all__ = ["CachedCall"]

_NAME = "hf.Cache"
_GO_ON = (
    "give generate the whole text so far, with its attention_mask, and a call of your own the new "
    "tokens alone; call cache.reset() before another text; where another rank still generates, "
    "give all ranks the same arguments, such as max_new_tokens"
)
# Names of arguments of a forward with one value a token, which are cut and which the ranks compare.
_PER_TOKEN = ("input_ids", "inputs_embeds", "position_ids", "token_type_ids")
# Names of arguments for results that would be of one rank's tokens, or that need all tokens.
_REFUSED = ("labels", "output_hidden_states", "output_attentions", "output_router_logits")


@dataclass(frozen=True)
class CachedCall:
    """The checked arguments of a forward with a cache."""

    rows: int
    tokens: int  # new ones, of each row
    padding: list[int]  # left padding of each row
    about: str  # what the ranks compare
    cut: dict[str, torch.Tensor]
    largest_position: int
    counts: list[int] | None = None  # new tokens of each row, where rows differ

    @classmethod
    def of_rows(
        cls, tokens: Any, kv: KVCache | None, device: torch.device, *, states: bool
    ) -> CachedCall:
        """A call in which rows have different numbers of new tokens, each behind its own.

        states: whether layers keep states, which the filling of a shorter row would change.

        Raises InputError, on this rank alone, for what is not done.
        """
        where = f"{_NAME}: extend"
        if kv is None or any(kv.padding):
            got = "rows that are not known" if kv is None else f"padding {list(kv.padding)}"
            raise InputError(
                f"{where}: expected a cache with rows and no padding, got {got}; make it with "
                "batch=N, and read prompts one by one"
            )
        try:
            rows = [[operator.index(token) for token in row] for row in tokens]
        except TypeError:
            rows = []
        counts, most = [len(row) for row in rows], 1 if states else DECODED_TOGETHER
        if len(rows) != kv.batch or not 0 < max(counts) <= most:
            why = " (layers of the model keep states)" if states else ""
            raise InputError(
                f"{where}: tokens: expected {kv.batch} lists of at most {most} integers{why}, not "
                f"all empty, got {tokens!r:.200}"
            )
        ids = torch.tensor([row + [0] * (max(counts) - len(row)) for row in rows], device="cpu")
        new = torch.arange(max(counts), device="cpu")
        # What fills short rows up is at the position of their last token: a model may have no more.
        last = torch.tensor(counts, device="cpu")[:, None].sub(1).clamp(min=0)
        at = torch.tensor(kv.lengths, device="cpu")[:, None] + torch.minimum(new, last)
        cut = {"input_ids": ids.to(device), "position_ids": at.to(device)}
        return cls(
            len(rows), max(counts), list(kv.padding), _digest(cut), cut, int(at.max()), counts
        )

    @classmethod
    def of(cls, options: dict[str, Any], kv: KVCache | None, capacity: int) -> CachedCall:
        """Raises InputError, on this rank alone, for what is not done or does not go on."""
        _check_options(options)
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise InputError(
                f"{_NAME}: expected a call without autocast, because cached keys keep the model's "
                "own dtype, got one with it; load the model with dtype=torch.bfloat16 in its place"
            )
        if kv is not None and len(set(kv.lengths)) > 1:
            raise InputError(
                f"{_NAME}: expected rows of one length, got {list(kv.lengths)} cached tokens; call "
                "cache.extend(tokens), which takes a list for each row, in place of the model or "
                "generate"
            )
        length = 0 if kv is None else max(kv.lengths)
        per_token = {name: options[name] for name in _PER_TOKEN if options.get(name) is not None}
        first = per_token.get("input_ids", per_token.get("inputs_embeds"))
        if first is None or first.ndim < 2:
            raise _wrong("input_ids or inputs_embeds", "[batch, tokens]", first)
        rows, tokens = first.shape[:2]
        _check_new_tokens(rows, tokens, kv, length)
        _check_tensors(options, per_token, (rows, tokens))
        cached = [0] * rows if kv is None else list(kv.padding)
        padding = _padding(options.get("attention_mask"), cached, length, tokens)
        if length + tokens > capacity:
            raise InputError(
                f"{_NAME}: the capacity is {capacity:,} tokens of a sequence, {length:,} are "
                f"cached, and {tokens:,} come; make room with cache.reserve(capacity), or forget "
                "tokens by cache.crop(-number) or cache.reset()"
            )
        largest = length + tokens - 1 - min(padding)
        per_token["position_ids"] = _positions(
            per_token.get("position_ids"), first.device, padding, length, tokens
        )
        return cls(rows, tokens, padding, _digest(per_token), per_token, max(largest, 0))


def _check_options(options: dict[str, Any]) -> None:
    """Raises InputError for what a forward with a cache cannot give."""
    if options.get(KEYWORD) is not None:
        raise InputError(
            f"{_NAME}: expected the whole batch, got one that burst_rt.hf.shard has cut; a call "
            "with a cache is cut by the cache"
        )
    for name in _REFUSED:
        if options.get(name) is not None and options[name] is not False:
            raise InputError(
                f"{_NAME}: {name} is not done with a cache over ranks; expected none; leave it out"
            )
    for name in ("use_cache", "return_dict"):
        if options.get(name) is False:
            raise InputError(
                f"{_NAME}: {name}: expected True, got False, of the call or of the model's "
                f"configuration; call it with {name}=True"
            )
    keep = options.get("logits_to_keep")
    if keep is not None and (isinstance(keep, torch.Tensor) or keep not in (0, 1)):
        raise InputError(
            f"{_NAME}: logits_to_keep: expected 0 or 1, got {keep!r}: a call gives the logits of "
            "the last token"
        )


def _check_new_tokens(rows: int, tokens: int, kv: KVCache | None, length: int) -> None:
    """Raises InputError for a call without new tokens, or with other rows than the cache has."""
    if not tokens:
        raise InputError(
            f"{_NAME}: expected new tokens behind the {length} that are cached, got none; {_GO_ON}"
        )
    if kv is not None and kv.batch != rows:
        raise InputError(
            f"{_NAME}: expected a batch of {kv.batch} sequences (times beams), as this cache "
            f"was made for, got {rows}; make another cache"
        )


def _check_tensors(
    options: dict[str, Any], per_token: dict[str, torch.Tensor], shape: tuple[int, int]
) -> None:
    """Raises InputError for a tensor that is not known, or of other rows and tokens."""
    for name, x in options.items():
        known_name = name in per_token or name in ("attention_mask", "position_ids")
        if isinstance(x, torch.Tensor) and x.ndim and not known_name:
            raise InputError(
                f"{_NAME}: {name} is not known; expected text alone "
                f"({', '.join(_PER_TOKEN)}, attention_mask)"
            )
        if name in per_token and name != "position_ids" and x.shape[:2] != shape:
            raise _wrong(name, f"[batch, tokens] = {shape}", x)


def _wrong(name: str, expected: str, got: object) -> InputError:
    shape = tuple(got.shape) if isinstance(got, torch.Tensor) else got
    return InputError(f"{_NAME}: {name}: expected {expected}, got {shape}")


def _padding(mask: object, cached: list[int], length: int, tokens: int) -> list[int]:
    """Left padding of each row; cached: of the tokens that are cached already.

    Raises InputError for padding that does not go on with them.
    """
    if mask is None:
        return cached
    padding = _left_padding(mask, len(cached), length + tokens)
    # A row whose cached tokens are padding alone may have more of it.
    if any(new != old and old < length for new, old in zip(padding, cached, strict=True)):
        raise InputError(
            f"{_NAME}: attention_mask: expected the padding that the cached tokens have, "
            f"{cached} at the left of the rows, got {padding}; {_GO_ON}"
        )
    return padding


def _left_padding(mask: Any, rows: int, tokens: int) -> list[int]:
    """Number of padding tokens of each row. Raises InputError for padding elsewhere."""
    if not isinstance(mask, torch.Tensor) or mask.shape != (rows, tokens):
        raise _wrong("attention_mask", f"[batch, cached and new tokens] = {(rows, tokens)}", mask)
    shown = mask.cpu() != 0
    padding = (~shown).sum(1)
    if not torch.equal(shown, torch.arange(tokens, device="cpu") >= padding[:, None]):
        raise InputError(
            f"{_NAME}: attention_mask: expected padding before a row's tokens, got some among or "
            "behind them; pad on the left (tokenizer.padding_side = 'left')"
        )
    return cast(list[int], padding.tolist())


def _positions(
    given: torch.Tensor | None, device: torch.device, padding: list[int], length: int, tokens: int
) -> torch.Tensor:
    """`[batch, tokens]`, as the cache counts. Raises InputError where others are given.

    given: also one such for each axis of an image, which are all the same in text. Padding may be
    given any.
    """
    places = torch.arange(length, length + tokens, device="cpu")
    from_padding = places - torch.tensor(padding, device="cpu")[:, None]
    expected = from_padding.clamp(min=0)
    if given is not None:
        if given.ndim == 3 and given.shape[1:] == expected.shape:
            axes = given.cpu()
            if ((axes == axes[:1]) | (from_padding < 0)).all():
                given = given[0]
        fits = given.ndim == 2 and given.shape[1] == tokens and len(given) in (1, len(padding))
        wrong = torch.ones(1, dtype=torch.bool, device="cpu")
        if fits:
            wrong = (given.cpu() != expected) & (from_padding >= 0)
        if wrong.any():
            got = f"shape {tuple(given.shape)}"
            if fits:
                got = str(given.expand(len(padding), -1).cpu()[wrong][0].item())
            raise InputError(
                f"{_NAME}: position_ids: expected {tokens} tokens from {int(expected[0, 0])} on, "
                f"as {length} are cached, got {got}; {_GO_ON}"
            )
    return expected.to(device)


def _digest(per_token: dict[str, torch.Tensor]) -> str:
    """A short digest of the values, which an error shows if the ranks' values differ."""
    digest = hashlib.blake2b(digest_size=8)
    for name, x in sorted(per_token.items()):
        digest.update(f"{name} {tuple(x.shape)} {x.dtype}".encode())
        digest.update(bytes_of(x))
    return f"tokens that differ, digest {digest.hexdigest()}"
