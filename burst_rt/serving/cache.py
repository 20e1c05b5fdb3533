"""Serving: keys and values of sequences, kept over the ranks of a context, and attention to them.

A `KVCache` is filled and read in steps. A step is one forward of a model: a chunk of a prompt
(prefill), or a few new tokens (decode). The ranks agree once a step; the layers of the step then
attend without another word. See `chunks.py` for who owns which token.

In a prefill each rank has its own tokens only, here and in the rest of the model: keys and values
travel, or queries do. In a decode every rank has all new tokens; each attends to its own shard, and
the partial results come together (`decode_run.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol, TypeAlias

import numpy as np
import torch

from burst_rt.attention.state import AttentionState
from burst_rt.errors import BurstError, DeviceError, InputError
from burst_rt.kernels import DTYPES
from burst_rt.planning.masks.positions import integer, is_count
from burst_rt.runtime.refusing import refuse
from burst_rt.serving.chunks import BatchRows, Dealt
from burst_rt.serving.history import History
from burst_rt.serving.memory import KVMemory, KVShape
from burst_rt.serving.step import Step

__all__ = ["DECODED_TOGETHER", "KVCache"]

_STEP = "KVCache.step"

# The most new tokens of a sequence that every rank has (decode); more are spread (prefill).
DECODED_TOGETHER = 16
_LARGEST_BLOCK = 1 << 40

# Numbers of tokens as a user has them: one for all sequences, or one for each.
_Counts: TypeAlias = int | np.integer[Any] | Sequence[int] | np.ndarray[Any, Any] | torch.Tensor


class _Context(Protocol):
    """What a cache takes of a `burst_rt.Context`."""

    @property
    def attention(self) -> AttentionState: ...


class KVCache:
    """Keys and values of a batch of sequences, spread over the ranks of a context.

    Collective: every rank makes the same cache. The ranks agree twice, and each time block at most
    `timeout_s`: before they take memory, and after.

    ctx: the `burst_rt.Context`. num_layers, batch, num_kv_heads, head_dim, v_head_dim: of the
        model's attention and of the sequences; v_head_dim: None takes head_dim. num_layers 0 counts
        the tokens of a model that keeps states alone.
    capacity: the most tokens of a sequence, left padding included. The memory is taken at once:
        on each rank capacity // (block * world_size) * block tokens, and at most block for what is
        left of the capacity, rounded up to 256, x batch x num_layers x num_kv_heads x (head_dim +
        v_head_dim) elements; see `nbytes`.
    dtype: of q, k and v: float64, float32, bfloat16 or float16.
    block: position p of a sequence belongs to rank (p // block) % world_size.

    Raises, on every rank, InputError for another argument, ContractMismatch, and DeviceError with
    the formula where the memory is not there; on CPUs, where a host has not enough free memory for
    all of its ranks.
    """

    def __init__(
        self,
        ctx: _Context,
        *,
        num_layers: int,
        batch: int,
        num_kv_heads: int,
        head_dim: int,
        capacity: int,
        dtype: torch.dtype,
        v_head_dim: int | None = None,
        block: int = 128,
    ) -> None:
        if not isinstance(getattr(ctx, "attention", None), AttentionState):
            got = type(ctx).__name__
            reason = f"KVCache: ctx must be a context of burst_rt.init, got {got}"
            refuse("KVCache", InputError(reason))
        runtime = ctx.attention.runtime
        self.attention = ctx.attention
        self.num_layers, self.batch, self.num_kv_heads = num_layers, batch, num_kv_heads
        self.head_dim = head_dim
        self.v_head_dim = head_dim if v_head_dim is None else v_head_dim
        self.dtype = dtype
        self.block = block
        words = {
            "call": "KVCache",
            "layers": str(num_layers),
            "batch": str(batch),
            "heads": f"{num_kv_heads} kv",
            "head_dim": f"{head_dim} and {self.v_head_dim} of v",
            "capacity": str(capacity),
            "block": str(block),
            "dtype": str(dtype),
        }
        error: BurstError | None = self._refuses(capacity)
        if error is None:
            shape = KVShape(num_layers, batch, num_kv_heads, head_dim, self.v_head_dim, dtype)
            self._memory = KVMemory(runtime, shape, Dealt(block, runtime.world_size))
            error = self._memory.lacks(capacity)
        runtime.agree(words, error)
        # Every rank has looked at the host's free memory before any rank takes some of it.
        self._take(words, capacity)
        self._history = History(batch)
        # The caches of a context are told apart by the call that made them.
        self._name = f"made in call {runtime.number}"

    def _refuses(self, capacity: int) -> InputError | None:
        """Why there can be no such cache, or None."""
        numbers = {
            "num_layers": self.num_layers,
            "batch": self.batch,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "v_head_dim": self.v_head_dim,
            "capacity": capacity,
        }
        for name, number in numbers.items():
            least = 0 if name == "num_layers" else 1
            if not is_count(number, least):
                return InputError(
                    f"KVCache: {name} must be an integer of at least {least}, got {number!r}"
                )
        if not is_count(self.block, 1) or self.block > _LARGEST_BLOCK:
            return InputError(
                f"KVCache: block must be an integer of 1 to {_LARGEST_BLOCK:,} tokens, got "
                f"{self.block!r}"
            )
        if not isinstance(self.dtype, torch.dtype) or self.dtype not in DTYPES:
            return InputError(
                f"KVCache: dtype must be float64, float32, bfloat16 or float16, got {self.dtype!r}"
            )
        return None

    def _take(self, words: dict[str, str], capacity: int) -> None:
        """Takes memory on every rank, or on none: then raises DeviceError on every rank."""
        layers = self._memory.allocate(capacity)
        self.attention.runtime.agree(words, layers if isinstance(layers, DeviceError) else None)
        assert not isinstance(layers, DeviceError)
        self._memory.adopt(layers, capacity)

    @property
    def capacity(self) -> int:
        """The most tokens of a sequence, left padding included."""
        return self._memory.capacity

    @property
    def nbytes(self) -> int:
        """Bytes that the cache takes on this rank."""
        return self._memory.nbytes

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many tokens of each sequence are cached, left padding included."""
        return tuple(self._history.lengths)

    @property
    def padding(self) -> tuple[int, ...]:
        """How many tokens at the left of each sequence are padding."""
        return tuple(self._history.padding)

    def reserve(self, capacity: int) -> None:
        """Makes room for more tokens: `capacity` of each sequence. What is cached stays.

        Takes the new memory before it gives back the old. Collective; blocks as making a cache.
        Raises, on every rank, InputError for less than there is, and DeviceError where memory is
        out; the cache is then as before.
        """
        error: BurstError | None = None
        if not is_count(capacity, self.capacity):
            error = InputError(
                f"KVCache.reserve: capacity must be an integer of at least {self.capacity}, which "
                f"there is, got {capacity!r}"
            )
        words = {"call": "KVCache.reserve", "cache": self._name, "capacity": str(capacity)}
        self.attention.runtime.agree(words, error or self._memory.lacks(capacity))
        self._take(words, capacity)

    def truncate(self, lengths: _Counts) -> None:
        """Forgets the last tokens: sequences keep `lengths` tokens. Local.

        lengths: one for all sequences, or one for each; every rank gives the same, which the ranks
        compare in the next step. Raises InputError, on every rank that waits for this one.
        """
        wanted = self._of_rows(lengths)
        if wanted is None or any(a > b for a, b in zip(wanted, self._history.lengths, strict=True)):
            self._refuse(
                "truncate",
                f"lengths must be one integer, or {self.batch}, of at least 0 and at most the "
                f"sequences' {self._few(self._history.lengths)}, got {lengths!r}",
            )
        assert wanted is not None
        self._history.truncate(wanted)

    def reset(self) -> None:
        """Forgets all tokens; the memory stays. Local; never blocks."""
        self.truncate(0)
        self._history.reordered.clear()
        self._history.said = ""

    def reorder(self, rows: torch.Tensor | Sequence[int]) -> None:
        """Row i becomes what row `rows[i]` was, as beam search needs it. Local.

        rows: `[batch]`, any integers of 0 to batch - 1; every rank gives the same, which the ranks
        compare in the next step. After `reorder`, a step that lacks its commit alone must still be
        dropped. Raises InputError, on every rank that waits for this one.
        """
        try:
            chosen = [operator.index(row) for row in rows]
        except TypeError:
            chosen = []
        if len(chosen) != self.batch or not all(0 <= row < self.batch for row in chosen):
            self._refuse(
                "reorder", f"rows must be {self.batch} numbers of rows below {self.batch}, got "
                f"{rows}"
            )  # fmt: skip
        if chosen == list(range(self.batch)):
            return
        self._memory.reorder(chosen, max(self._history.lengths))
        self._history.reorder(chosen)

    def copy(
        self, row: int, source: KVCache, source_row: int = 0, tokens: int | None = None
    ) -> None:
        """Row `row` becomes the first tokens of row `source_row` of another cache, or of this one.

        Local: each rank copies what it holds. Every rank does the same, which the ranks compare in
        the next step. A prompt can so be read by a cache of one sequence while others go on, and
        then take its place among them.

        source: of the same context, and made with the same numbers but for batch and capacity.
        tokens: how many; None: all.

        Raises InputError, on every rank that waits for this one.
        """
        if reason := self._refuses_copy(row, source, source_row, tokens):
            self._refuse("copy", reason)
        theirs, name = source._history, f"row {source_row} of a cache {source._name}"
        taken = theirs.lengths[source_row] if tokens is None else tokens
        if self is not source or row != source_row:
            self._memory.copy(row, source._memory, source_row, taken)
        padding = min(theirs.padding[source_row], taken)
        self._history.replace(row, taken, padding, f"{name}: {taken}")

    def _refuses_copy(
        self, row: int, source: KVCache, source_row: int, tokens: int | None
    ) -> str | None:
        """Why a row cannot become another one, in words."""
        if not isinstance(source, KVCache) or source.attention is not self.attention:
            return f"source must be a KVCache of the same context, got {source!r:.80}"
        mine, theirs = (x._memory.shape._replace(batch=1) for x in (self, source))
        if (mine, self.block) != (theirs, source.block):
            return (
                "source must have the same layers, heads, dtype and block, got "
                f"{theirs} in blocks of {source.block}, expected {mine} in blocks of {self.block}"
            )
        for name, number, cache in (("row", row, self), ("source_row", source_row, source)):
            if not is_count(number, 0) or number >= cache.batch:
                return f"{name} must be an integer of 0 to {cache.batch - 1}, got {number!r}"
        if self._history.lacks_commit or source._history.lacks_commit:
            return (
                "a step of one of the caches was not committed; call step.commit() at a step's "
                "end, or cache.truncate(cache.lengths) to drop it"
            )
        known = source._history.lengths[source_row]
        wanted = known if tokens is None else tokens
        if not is_count(wanted, 0) or wanted > min(known, self.capacity):
            return (
                f"tokens must be an integer of 0 to {known:,}, which row {source_row} has, and at "
                f"most the capacity of {self.capacity:,}, got {wanted!r}"
            )
        return None

    def step(
        self,
        tokens: _Counts,
        *,
        padding: _Counts | None = None,
        sharded: bool | None = None,
        about: str = "",
    ) -> Step:
        """Begins a step: the ranks agree on how many tokens come.

        Collective; blocks at most `timeout_s`. The step's layers then call `Step.attend`, and
        `Step.commit` ends it. A step that an error has interrupted leaves the cache as it was. One
        whose layers have all attended must be committed, or dropped: `truncate(cache.lengths)`.

        tokens: new tokens of each sequence; one number for all, or one for each (0 is fine). Here
            and in `padding`, integers of Python, numpy or torch.
        padding: how many of each sequence's first tokens are padding at its left, which nobody
            sees; one number for all, or one for each. It may grow while a sequence is padding
            alone; None: as before, at first none.
        sharded: whether each rank has its own tokens only (prefill), or every rank has all of them
            (decode, at most 16 a sequence). None: decode where there are at most 16.
        about: more that the ranks compare, such as a digest of the tokens.

        Raises, on every rank, InputError for other numbers, more tokens than the capacity, or a
        last step that lacks its commit alone, and ContractMismatch where ranks differ, also in what
        the last step's layers were called with: then only `reset` helps, because ranks have cached
        different things. Tokens themselves are compared by `about` alone.
        """
        new = self._of_rows(tokens)
        pads = self._history.padding if padding is None else self._of_rows(padding)
        error = self._refuses_step(new, tokens, pads, padding, sharded, about)
        words = {
            "call": "KVCache.step",
            "cache": self._name,
            "lengths": self._few(self._history.lengths),
            "tokens": str(tokens) if new is None else self._few(new),
            "padding": str(padding) if pads is None else self._few(pads),
            "sharded": str(sharded),
            "about": about if isinstance(about, str) else repr(about),
            "layers of the last step": self._history.said,
            "rows since the last step": str(self._history.reordered),
        }
        self.attention.runtime.agree(words, error)
        self._history.reordered.clear()
        assert new is not None
        assert pads is not None
        if sharded is None:
            sharded = max(new) > DECODED_TOGETHER
        return Step(
            self.attention,
            self._memory,
            self._history,
            BatchRows.of(self._history.lengths, new, pads, self.capacity),
            tuple(new),
            sharded=sharded,
        )

    def _refuses_step(
        self,
        new: list[int] | None,
        tokens: object,
        pads: list[int] | None,
        padding: object,
        sharded: bool | None,
        about: str,
    ) -> InputError | None:
        """Why there can be no such step, or None.

        new, pads: of each row; None where `tokens`, or `padding`, are no such numbers.
        """
        where = _STEP
        if not (sharded is None or isinstance(sharded, bool)) or not isinstance(about, str):
            return InputError(
                f"{where}: sharded must be True, False or None, and about a text, got {sharded!r} "
                f"and {about!r}"
            )
        if self._history.lacks_commit:
            return InputError(
                f"{where}: all layers of the last step have attended, and it was not committed: "
                "its tokens would be lost; call step.commit() at a step's end, or "
                "cache.truncate(cache.lengths) to drop it"
            )
        if new is None or max(new) < 1:
            return InputError(
                f"{where}: tokens must be an integer of at least 1, or one of at least 0 for each "
                f"of {self.batch} sequences, got {tokens!r}"
            )
        return self._lacks_room(new, sharded) or self._refuses_padding(new, pads, padding)

    def _lacks_room(self, new: list[int], sharded: bool | None) -> InputError | None:
        """Why the cache, or a decode, cannot take so many new tokens, or None."""
        full = [row for row, n in enumerate(new) if self._history.lengths[row] + n > self.capacity]
        if full:
            row = full[0]
            return InputError(
                f"{_STEP}: the capacity is {self.capacity:,} tokens a sequence; sequence {row} has "
                f"{self._history.lengths[row]:,} and gets {new[row]:,}: make room with "
                "cache.reserve(capacity), or use truncate or reset"
            )
        if sharded is False and max(new) > DECODED_TOGETHER:
            return InputError(
                f"{_STEP}: sharded=False takes at most {DECODED_TOGETHER} new tokens a sequence, "
                f"got {max(new)}; give more of them with sharded=True"
            )
        return None

    def _refuses_padding(
        self, new: list[int], pads: list[int] | None, padding: object
    ) -> InputError | None:
        """Why the sequences cannot have this padding at their left, or None."""
        after = [at + n for at, n in zip(self._history.lengths, new, strict=True)]
        if pads is None or any(p > to for p, to in zip(pads, after, strict=True)):
            return InputError(
                f"{_STEP}: padding must be a number of at least 0 and at most the tokens of each "
                f"of {self.batch} sequences, got {padding!r}"
            )
        rows = zip(pads, self._history.padding, self._history.lengths, strict=True)
        if any(p != old and old < at for p, old, at in rows):
            return InputError(
                f"{_STEP}: padding is for an empty cache, or for sequences of padding alone, "
                f"and this cache has {self._few(self._history.lengths)} tokens a sequence, "
                f"{self._few(self._history.padding)} of them padding; call reset first, or leave "
                "it out"
            )
        return None

    def _of_rows(self, numbers: object) -> list[int] | None:
        """A number of at least 0 for each row; None for anything else."""
        several = isinstance(numbers, (Sequence, np.ndarray, torch.Tensor))
        several = several and getattr(numbers, "ndim", 1) > 0
        each: Any = numbers if several else [numbers] * self.batch
        found = [integer(number, 0) for number in each]
        rows = [number for number in found if number is not None]
        return rows if len(rows) == len(found) == self.batch else None

    def _few(self, numbers: Sequence[int]) -> str:
        """Numbers of the rows in few words."""
        return str(numbers[0]) if len(set(numbers)) == 1 else str(list(numbers))

    def _refuse(self, name: str, reason: str) -> NoReturn:
        self.attention.runtime.refuse(f"KVCache.{name}", InputError(f"KVCache.{name}: {reason}"))
