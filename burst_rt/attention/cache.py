"""Serving: keys and values of sequences, kept over the ranks of a context, and attention to them.

A `KVCache` is filled and read in steps. A step is one forward of a model: a chunk of a prompt
(prefill), or a few new tokens (decode). The ranks agree once a step; the layers of the step then
attend without another word. See `planning/cached.py` for who owns which token.

In a prefill each rank has its own tokens only, here and in the rest of the model: keys and values
travel, or queries do. In a decode every rank has all new tokens; each attends to its own shard, and
the partial results come together (`attention/decode.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, ClassVar, NamedTuple, NoReturn, Protocol, TypeAlias

import numpy as np
import torch

from burst_rt.attention.call import CAUSAL, check_factors, check_scores
from burst_rt.attention.decode import DecodePlan, plan_decode, run_decode
from burst_rt.attention.planner import Plan, PlanKey
from burst_rt.attention.run import plain_math, run_forward
from burst_rt.attention.setup import Setup
from burst_rt.drivers import is_out_of_memory
from burst_rt.errors import BurstError, ConfigError, DeviceError, InputError
from burst_rt.kernels import DTYPES, QKV, ScoreTerms, sum_dtype
from burst_rt.kernels.decode import Seen
from burst_rt.planning.cached import Cached, Dealt, Rows, in_columns
from burst_rt.planning.masks import Mask, Positions
from burst_rt.planning.masks.positions import integer
from burst_rt.planning.needs import ROWS_TOGETHER
from burst_rt.planning.problem import ScoreOptions
from burst_rt.planning.strategies import check_name
from burst_rt.runtime.agreement import Contract
from burst_rt.runtime.free_memory import free_host_bytes
from burst_rt.runtime.reductions import all_reduce

__all__ = ["DECODED_TOGETHER", "KVCache", "Step", "is_count"]

# The most new tokens of a sequence that every rank has (decode); more are spread (prefill).
DECODED_TOGETHER = 16
_LARGEST_BLOCK = 1 << 40
_ATTEND = "KVCache.attend"
_CONTRACT = Contract({"call": _ATTEND})
_STALE = "another step has been begun since, or the cache's rows were changed"


class _Layer(NamedTuple):
    """One layer's shard: k `[batch, columns, kv_heads, head_dim]`, v with its own head_dim.

    In memory the columns come first, so that those that are filled are one stretch.
    """

    k: torch.Tensor
    v: torch.Tensor


# Some of the new tokens: rows of the batch, and their tokens. None: all tokens of all rows.
_Some: TypeAlias = tuple[slice, slice | list[int]] | None

# Numbers of tokens as a user has them: one for all sequences, or one for each.
_Counts: TypeAlias = int | np.integer[Any] | Sequence[int] | np.ndarray[Any, Any] | torch.Tensor


class _Views(NamedTuple):
    """One layer's shard as a step uses it."""

    # Where new keys and values go, and which of the new tokens go there.
    targets: list[tuple[torch.Tensor, torch.Tensor, _Some]]
    filled: _Layer  # the columns that are filled after the step


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A call of `Step.attend` that was checked.

    It stands for all layers of the step that are called alike: to check each of them would take
    longer than a small task.
    """

    words: str  # what all ranks must have said
    structure: Mask  # what queries see of the cache
    terms: ScoreTerms  # but for sinks, which are each layer's own
    decode: tuple[DecodePlan, Seen] | None  # None: the tokens are spread


@dataclass(frozen=True)
class _Chunk:
    """The attention of one layer to a chunk: the `Forward` that runs it."""

    setup: Setup
    forward_plan: Plan
    scale: float | None
    forward_contract: Contract = _CONTRACT
    agreed: ClassVar[bool] = True


class _Context(Protocol):
    """What a cache takes of a `burst_rt.Context`."""

    @property
    def setup(self) -> Setup: ...


class KVCache:
    """Keys and values of a batch of sequences, spread over the ranks of a context.

    Collective: every rank makes the same cache. The ranks agree twice, and each time block at most
    `timeout_s`: before they take memory, and after.

    ctx: the `burst_rt.Context`. num_layers, batch, num_kv_heads, head_dim, v_head_dim: of the
        model's attention and of the sequences; v_head_dim: None takes head_dim.
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
        if not isinstance(getattr(ctx, "setup", None), Setup):
            raise InputError(
                f"KVCache: ctx must be a context of burst_rt.init, got {type(ctx).__name__}"
            )
        runtime = ctx.setup.runtime
        self.setup = ctx.setup
        self.num_layers, self.batch, self.num_kv_heads = num_layers, batch, num_kv_heads
        self.head_dim = head_dim
        self.v_head_dim = head_dim if v_head_dim is None else v_head_dim
        self.dtype = dtype
        self.capacity = capacity
        self.block = block
        self._layers: list[_Layer] = []
        self._said = ""  # what the layers of the last step were called with
        self._reordered: list[list[int]] = []  # what rows became since the last step
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
        error: BurstError | None = self._refuses()
        if error is None:
            self._dealt = Dealt(block, runtime.world_size)
            error = self._lacks_memory(capacity)
        runtime.agree(words, error)
        # Every rank has looked at the host's free memory before any rank takes some of it.
        runtime.agree(words, self._take(capacity))
        self._lengths, self._padding = [0] * batch, [0] * batch
        self._written = 0  # the most tokens that a row has had, forgotten ones included
        self._changes = 0  # steps begun, and rows changed: a step begun before is none any more
        self._uncommitted: int | None = None  # `_changes` of a step that lacks its commit alone
        # The caches of a context are told apart by the call that made them.
        self._name = f"made in call {runtime.number}"

    def _refuses(self) -> InputError | None:
        """Why there can be no such cache, or None."""
        for name in ("num_layers", "batch", "num_kv_heads", "head_dim", "v_head_dim", "capacity"):
            if not is_count(getattr(self, name), 1):
                return InputError(
                    f"KVCache: {name} must be an integer of at least 1, got {getattr(self, name)!r}"
                )
        if not is_count(self.block, 1) or self.block > _LARGEST_BLOCK:
            return InputError(
                f"KVCache: block must be an integer of 1 to {_LARGEST_BLOCK:,} tokens, got "
                f"{self.block!r}"
            )
        if self.dtype not in DTYPES:
            return InputError(
                f"KVCache: dtype must be float64, float32, bfloat16 or float16, got {self.dtype!r}"
            )
        return None

    def _take(self, capacity: int) -> DeviceError | None:
        """Takes memory for `capacity` tokens of each sequence; or why there is not enough."""
        device = self.setup.runtime.device
        new: list[_Layer] = []
        columns = self._columns(capacity)
        try:
            # A later step outside inference mode could not write to tensors made inside it.
            with torch.inference_mode(False), torch.no_grad():
                for _ in range(self.num_layers):
                    shape = (columns, self.batch, self.num_kv_heads)
                    # Zeros: kernels load whole blocks, and must find numbers there.
                    k = torch.zeros(*shape, self.head_dim, dtype=self.dtype, device=device)
                    v = torch.zeros(*shape, self.v_head_dim, dtype=self.dtype, device=device)
                    fresh = _Layer(k.transpose(0, 1), v.transpose(0, 1))
                    if self._layers:
                        for old, x in zip(self._layers[len(new)], fresh, strict=True):
                            x[:, : old.shape[1]].copy_(old)
                    new.append(fresh)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return self._too_large(capacity)
        self._layers, self.capacity = new, capacity
        return None

    def _lacks_memory(self, capacity: int) -> DeviceError | None:
        """Why the ranks of this host cannot all take memory for so many tokens, or None.

        A GPU says so itself. A host gives out more memory than it has. Control groups are taken to
        hold all ranks of the host.
        """
        runtime = self.setup.runtime
        if runtime.device.type != "cpu":
            return None
        ranks, free = runtime.machine.ranks_here, free_host_bytes()
        need = ranks * self._columns(capacity) * self._token_bytes
        if need <= free:
            return None
        return self._too_large(
            capacity, f"; {ranks} ranks of this host need {need:,}, and {free:,} are free"
        )

    def _too_large(self, capacity: int, beside: str = "") -> DeviceError:
        runtime, columns = self.setup.runtime, self._columns(capacity)
        return DeviceError(
            f"KVCache: out of memory on {runtime.device}: capacity {capacity:,} takes "
            f"{columns * self._token_bytes:,} bytes on this rank ({columns:,} tokens x "
            f"{self.batch} sequences x {self.num_layers} layers x {self.num_kv_heads} kv heads x "
            f"({self.head_dim} + {self.v_head_dim}) x {self.dtype.itemsize} bytes){beside}. Use "
            "more ranks, a smaller capacity or batch, or a smaller dtype",
            rank=runtime.rank,
        )

    def _columns(self, capacity: int) -> int:
        """Columns of this rank's shard, in whole blocks of kernels."""
        own = max(self._dealt.count(capacity, rank) for rank in range(self._dealt.world_size))
        return -(-own // ROWS_TOGETHER) * ROWS_TOGETHER

    @property
    def _token_bytes(self) -> int:
        """Bytes of one column of all layers."""
        channels = self.num_kv_heads * (self.head_dim + self.v_head_dim)
        return self.num_layers * self.batch * channels * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes that the cache takes on this rank."""
        return self._columns(self.capacity) * self._token_bytes

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many tokens of each sequence are cached, left padding included."""
        return tuple(self._lengths)

    @property
    def padding(self) -> tuple[int, ...]:
        """How many tokens at the left of each sequence are padding."""
        return tuple(self._padding)

    def reserve(self, capacity: int) -> None:
        """Makes room for more tokens: `capacity` of each sequence. What is cached stays.

        Takes the new memory before it gives back the old. Collective; blocks as making a cache.
        Raises, on every rank, InputError for less than there is, and DeviceError where memory is
        out; the cache is then as before.
        """
        runtime = self.setup.runtime
        error: BurstError | None = None
        before, capacity_before = self._layers, self.capacity
        if not is_count(capacity, self.capacity):
            error = InputError(
                f"KVCache.reserve: capacity must be an integer of at least {self.capacity}, which "
                f"there is, got {capacity!r}"
            )
        words = {"call": "KVCache.reserve", "cache": self._name, "capacity": str(capacity)}
        runtime.agree(words, error or self._lacks_memory(capacity))
        try:
            runtime.agree(words, self._take(capacity))
        except BurstError:
            self._layers, self.capacity = before, capacity_before
            raise

    def truncate(self, lengths: _Counts) -> None:
        """Forgets the last tokens: sequences keep `lengths` tokens. Local.

        lengths: one for all sequences, or one for each; every rank gives the same, which the ranks
        compare in the next step. Raises InputError, on every rank that waits for this one.
        """
        wanted = self._of_rows(lengths)
        if wanted is None or any(a > b for a, b in zip(wanted, self._lengths, strict=True)):
            self._refuse(
                "truncate",
                f"lengths must be one integer, or {self.batch}, of at least 0 and at most the "
                f"sequences' {self._few(self._lengths)}, got {lengths!r}",
            )
        assert wanted is not None
        self._changes += 1
        self._lengths = wanted
        self._padding = [min(p, n) for p, n in zip(self._padding, wanted, strict=True)]

    def reset(self) -> None:
        """Forgets all tokens; the memory stays. Local, as `truncate`."""
        self.truncate(0)
        self._reordered.clear()
        self._said = ""

    def reorder(self, rows: torch.Tensor | Sequence[int]) -> None:
        """Row i becomes what row `rows[i]` was, as beam search needs it. Local, as `truncate`.

        rows: `[batch]`, any integers of 0 to batch - 1; every rank gives the same, which the ranks
        compare in the next step. A step that lacks its commit alone must be dropped all the same.
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
        lost = self._uncommitted == self._changes
        self._changes += 1
        if lost:
            self._uncommitted = self._changes
        self._reordered.append(chosen)
        index = torch.tensor(chosen, device=self.setup.runtime.device)
        used = self._columns(max(self._lengths))
        with torch.no_grad():
            for layer in self._layers:
                for x in layer:
                    x[:, :used].copy_(x[:, :used].index_select(0, index))
        self._lengths = [self._lengths[row] for row in chosen]
        self._padding = [self._padding[row] for row in chosen]

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
        pads = self._padding if padding is None else self._of_rows(padding)
        error = self._refuses_step(new, tokens, pads, padding, sharded, about)
        words = {
            "call": "KVCache.step",
            "cache": self._name,
            "lengths": self._few(self._lengths),
            "tokens": str(tokens) if new is None else self._few(new),
            "padding": str(padding) if pads is None else self._few(pads),
            "sharded": str(sharded),
            "about": about if isinstance(about, str) else repr(about),
            "layers of the last step": self._said,
            "rows since the last step": str(self._reordered),
        }
        self.setup.runtime.agree(words, error)
        self._reordered.clear()
        assert new is not None
        assert pads is not None
        if sharded is None:
            sharded = max(new) > DECODED_TOGETHER
        return Step(
            self,
            Rows.of(self._lengths, new, pads, self.capacity),
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
        where = "KVCache.step"
        if not (sharded is None or isinstance(sharded, bool)) or not isinstance(about, str):
            return InputError(
                f"{where}: sharded must be True, False or None, and about a text, got {sharded!r} "
                f"and {about!r}"
            )
        if self._uncommitted == self._changes:
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
        full = [row for row, n in enumerate(new) if self._lengths[row] + n > self.capacity]
        if full:
            row = full[0]
            return InputError(
                f"{where}: the capacity is {self.capacity:,} tokens a sequence; sequence {row} has "
                f"{self._lengths[row]:,} and gets {new[row]:,}: make room with "
                "cache.reserve(capacity), or use truncate or reset"
            )
        if sharded is False and max(new) > DECODED_TOGETHER:
            return InputError(
                f"{where}: sharded=False takes at most {DECODED_TOGETHER} new tokens a sequence, "
                f"got {max(new)}; give more of them with sharded=True"
            )
        after = [at + n for at, n in zip(self._lengths, new, strict=True)]
        if pads is None or any(p > to for p, to in zip(pads, after, strict=True)):
            return InputError(
                f"{where}: padding must be a number of at least 0 and at most the tokens of each "
                f"of {self.batch} sequences, got {padding!r}"
            )
        rows = zip(pads, self._padding, self._lengths, strict=True)
        if any(p != old and old < at for p, old, at in rows):
            return InputError(
                f"{where}: padding is for an empty cache, or for sequences of padding alone, "
                f"and this cache has {self._few(self._lengths)} tokens a sequence, "
                f"{self._few(self._padding)} of them padding; call reset first, or leave it out"
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
        self.setup.runtime.refuse(f"KVCache.{name}", InputError(f"KVCache.{name}: {reason}"))

    def _ended(self, rows: Sequence[int], padding: Sequence[int], said: str) -> None:
        """What `Step.commit` does."""
        self._lengths = [at + new for at, new in zip(self._lengths, rows, strict=True)]
        self._padding = list(padding)
        self._said = said
        self._uncommitted = None


class Step:
    """One step of a cache; made by `KVCache.step`.

    sharded: whether this rank has its own new tokens only. num_tokens: how many tokens of each row
    this rank's tensors have.
    """

    def __init__(
        self, cache: KVCache, rows: Rows, tokens: tuple[int, ...], *, sharded: bool
    ) -> None:
        self.cache, self.sharded = cache, sharded
        self._rows, self._tokens = rows, tokens
        self._dealt, self._rank = cache._dealt, cache.setup.runtime.rank
        self.num_tokens = rows.queries(self._dealt, self._rank) if sharded else max(tokens)
        self._plans: dict[object, Plan] = {}
        self._seen: dict[Mask, Seen] = {}
        self._views: list[_Views] = []
        self._views_of: object = None  # the list of layers that these are views of
        self._known: dict[object, _Call] = {}  # by all that a check looks at, but for the layer
        self._called: list[tuple[int, _Call]] = []  # by layer, for the next step
        self._done = False
        self._waiting = set(range(cache.num_layers))  # layers that have not attended
        cache._changes += 1
        self._change = cache._changes
        cache._written = max(cache._written, *rows.after)

    @cached_property
    def _places(self) -> Positions:
        """Where this rank's tokens stand in their rows; -1 for none. `[rows, num_tokens]`."""
        found = []
        for before, after in zip(self._rows.before, self._rows.after, strict=True):
            at = np.arange(self.num_tokens, dtype=np.int64)
            if self.sharded:
                first = self._dealt.count(before, self._rank)
                at = self._dealt.position(first + at, self._rank)
            else:
                at += before
            found.append(np.where(at < after, at, -1))
        return np.stack(found)

    @cached_property
    def valid(self) -> torch.Tensor:
        """Which of this rank's tokens there are: bool `[batch, num_tokens]`."""
        return self._on_device(self._places >= 0)

    @cached_property
    def positions(self) -> torch.Tensor:
        """Where this rank's tokens stand in their sequences: int64 `[batch, num_tokens]`.

        Left padding counts. 0 where there is no token.
        """
        return self._on_device(np.maximum(self._places, 0))

    @cached_property
    def _index(self) -> torch.Tensor:
        """Which of the new tokens this rank's are: int64 `[batch, num_tokens]`."""
        before = np.array(self._rows.before, np.int64)[:, None]
        return self._on_device(np.maximum(self._places - before, 0))

    @property
    def last_owner(self) -> tuple[int, ...]:
        """For each row, a rank that has the row's last new token, as the last of its own."""
        batch = self.cache.batch
        owners = [self._dealt.owner(max(0, after - 1)) for after in self._rows.after]
        owners = owners if self.sharded else [0] * len(owners)
        return tuple(owners * batch if len(owners) == 1 else owners)

    def cut(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's `[batch, num_tokens, ...]` of all new tokens `[batch, tokens, ...]`.

        Rows with fewer tokens than others end with whatever comes. Local.
        """
        if x.ndim < 2 or x.shape[:2] != (self.cache.batch, max(self._tokens)):
            self.cache._refuse(
                "step", f"cut: x must be [batch, tokens, ...] of {self.cache.batch} sequences and "
                f"{max(self._tokens)} new tokens, got shape {tuple(x.shape)}"
            )  # fmt: skip
        if not self.sharded:
            return x
        index = self._index.view(*self._index.shape, *(1,) * (x.ndim - 2))
        return x.gather(1, index.expand(*self._index.shape, *x.shape[2:]))

    def last(self, x: torch.Tensor) -> torch.Tensor:
        """Of each row the values of its last new token, on every rank.

        Collective where the tokens are spread (`sharded`): every rank calls it, and it blocks at
        most `timeout_s`; otherwise local. No gradients.

        x: `[batch, num_tokens, ...]` of this rank's tokens; float64, float32, bfloat16 or float16.

        Returns `[batch, ...]`, the same values on every rank; zeros for a row without new tokens.
        Raises InputError on every rank that waits for this one.
        """
        rows = (self.cache.batch, self.num_tokens)
        if not isinstance(x, torch.Tensor) or x.shape[:2] != rows or x.dtype not in DTYPES:
            got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
            self.cache._refuse(
                "step", f"last: x must be floating point [batch, this rank's tokens of the step, "
                f"...] = {rows}, got {got}"
            )  # fmt: skip
        runtime = self.cache.setup.runtime
        # Every number of these dtypes is one of the wider dtype, and a sum with zeros is exact.
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        found = torch.zeros(len(x), *x.shape[2:], dtype=wide, device=x.device)
        for row, (owner, new) in enumerate(zip(self.last_owner, self._tokens, strict=True)):
            own = new and (owner == self._rank or not self.sharded)
            if own:
                at = int((self._places[row if len(self._places) > 1 else 0] >= 0).sum())
                found[row] = x[row, at - 1].detach()
        return (all_reduce(runtime, found) if self.sharded else found).to(x.dtype)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        mask: Mask | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        strategy: str = "auto",
    ) -> torch.Tensor:
        """Adds this rank's keys and values to a layer, and attends to all that the layer has.

        Collective: every rank calls it for every layer, in one order. Blocks until this rank's part
        is done; another rank may come as late as `timeout_s`. No gradients.

        q: `[batch, num_tokens, heads, head_dim]`; k, v: the same with the cache's kv heads and, of
            v, its v_head_dim; all of the cache's dtype.
        mask: what queries see beside being causal, by positions in the sequence: SlidingWindow(w),
            for example. It has spans, and tells no rows apart. Documents and BlockSparse must be
            for `capacity` tokens.
        scale, softcap, sinks: as in `burst_attention`.
        strategy: of a prefill: "auto", "ring-kv" (keys travel), "ring-q" (queries travel), or
            another one of `burst_attention`.

        Returns out `[batch, num_tokens, heads, v_head_dim]`; of a decode the same bits on every
        rank. Raises InputError on every rank that makes the same call, also for a layer that has
        attended in this step; PeerLost and Stalled. An InputError of one rank alone breaks the
        context, because the others are in the call: they raise ContractMismatch, PeerLost or
        ProtocolError. Where memory runs out on a rank, every rank raises DeviceError, and the
        context is broken. Raises ConfigError once the context is closed.
        """
        cache = self.cache
        runtime = cache.setup.runtime
        runtime.check_open()
        try:
            self._check_turn(layer)
            call = self._checked(QKV(q, k, v), sinks, mask, scale, softcap, strategy)
        except InputError as error:
            runtime.refuse(_ATTEND, error)
        self._called.append((layer, call))
        terms = call.terms if sinks is None else call.terms._replace(sinks=sinks)
        with plain_math(q.device.type):
            if self._views_of is not cache._layers:
                self._view()
            targets, filled = self._views[layer]
            for keys, values, chosen in targets:
                keys.copy_(k if chosen is None else k[chosen])
                values.copy_(v if chosen is None else v[chosen])
            if call.decode is None:
                out = self._prefill(cache._layers[layer], q, call.structure, scale, terms, strategy)
            else:
                plan, seen = call.decode
                out = run_decode(
                    cache.setup, _CONTRACT, plan, QKV(q, *filled), seen, scale=scale, terms=terms
                )
        self._waiting.discard(layer)
        if not self._waiting:
            cache._uncommitted = self._change
        return out

    def explain(self, num_heads: int, mask: Mask | None = None, strategy: str = "auto") -> str:
        """How a layer of this step would attend, in words: what travels, bytes, memory. Local."""
        check_name(strategy)
        structure = CAUSAL if mask is None else self._structure(mask)
        if self.sharded:
            return self._plan(num_heads, structure, ScoreTerms(), strategy).explain()
        return self._plan_decode(num_heads, ScoreOptions()).explain()

    def commit(self) -> None:
        """Ends the step: the tokens are cached. Local. Calls after the first do nothing.

        Raises InputError, on every rank that waits for this one, where a layer has not attended,
        or where another step has been begun since, or the cache's rows were changed.
        """
        if not self._done:
            waiting = self._waiting
            if waiting or self._change != self.cache._changes:
                why = f"layer {min(waiting)} has not attended" if waiting else _STALE
                self.cache._refuse("step", f"commit: {why}; begin another: cache.step(n)")
            self._done = True
            rows = len(self._rows)
            padding = self._rows.padding * (self.cache.batch if rows == 1 else 1)
            self.cache._ended(self._tokens, padding, _in_words(self._called))
            if self.sharded:  # all layers have been cleared behind the step's tokens
                self.cache._written = max(self._rows.after)

    def _structure(self, mask: Mask) -> Mask:
        if not isinstance(mask, Mask):
            raise InputError(
                f"{_ATTEND}: mask must be a burst_rt.Mask such as SlidingWindow(1023), got "
                f"{type(mask).__name__}"
            )
        if not mask.has_spans or mask.batch > 1 or mask.mover is not None:
            raise InputError(
                f"{_ATTEND}: mask must have spans and be one for all sequences, got {mask!r}; "
                "give left padding to KVCache.step, and use a cache for each document"
            )
        capacity = self.cache.capacity
        misfit = mask.refuses(capacity, capacity, 1)
        if misfit is not None:
            raise InputError(
                f"{_ATTEND}: mask must be for as many tokens as the cache has room for (capacity), "
                f"or for any number, got one of another number: {misfit}"
            )
        return CAUSAL & mask

    def _check_turn(self, layer: int) -> None:
        """Raises InputError where the layer may not attend now."""
        cache, where = self.cache, _ATTEND
        if self._done:
            raise InputError(f"{where}: this step has been committed; begin another: cache.step(n)")
        if self._change != cache._changes:
            raise InputError(f"{where}: {_STALE}; begin another: cache.step(n)")
        if not (is_count(layer, 0) and layer < cache.num_layers):
            raise InputError(
                f"{where}: layer must be a number from 0 to {cache.num_layers - 1}, got {layer!r}"
            )
        if layer not in self._waiting:
            raise InputError(
                f"{where}: layer {layer} has attended in this step; expected each layer once; give "
                "every layer its own number"
            )

    def _checked(
        self,
        qkv: QKV,
        sinks: torch.Tensor | None,
        mask: Mask | None,
        scale: float | None,
        softcap: float | None,
        strategy: str,
    ) -> _Call:
        """The call, which was checked now or for an earlier layer. Raises InputError."""
        options = (mask, scale, softcap, strategy)
        said = (
            *options, *map(type, options), torch.is_grad_enabled(), *map(_look, (*qkv, sinks)),
        )  # fmt: skip
        try:
            call = self._known.get(said)
        except TypeError:  # what has no hash has not passed
            call = None
        if call is not None:
            return call
        structure = CAUSAL if mask is None else self._structure(mask)
        num_heads = self._check(qkv, (scale, softcap), strategy)
        check_scores(_ATTEND, qkv.q, structure, scale, softcap, None, sinks)
        decode = None
        if not self.sharded:
            scores = ScoreOptions(softcap=softcap is not None, sinks=sinks is not None)
            decode = self._plan_decode(num_heads, scores), self._what_is_seen(structure)
        call = self._known[said] = _Call(
            words=f"{num_heads} heads, mask {mask!r}, scale {scale}, softcap {softcap}, "
            f"strategy {strategy}, {'no ' * (sinks is None)}sinks",
            structure=structure, terms=ScoreTerms(softcap), decode=decode,
        )  # fmt: skip
        return call

    def _check(self, qkv: QKV, factors: tuple[float | None, ...], strategy: str) -> int:
        """The number of q's heads. Raises InputError for what does not fit the step."""
        cache, where = self.cache, _ATTEND
        check_name(strategy)
        check_factors(where, *factors)
        q_shape = _shape(qkv.q)
        heads = q_shape[2] if len(q_shape) == 4 else 0
        rows = (cache.batch, self.num_tokens)
        expected = QKV(
            (*rows, heads, cache.head_dim),  # type: ignore[arg-type]  # shapes, by the same names
            (*rows, cache.num_kv_heads, cache.head_dim),  # type: ignore[arg-type]
            (*rows, cache.num_kv_heads, cache.v_head_dim),  # type: ignore[arg-type]
        )
        device = cache.setup.runtime.device
        for name, x, shape in zip("qkv", qkv, expected, strict=True):
            if (
                _shape(x) != shape
                or x.dtype != cache.dtype
                or x.device != device
                or x.layout != torch.strided
            ):
                got = type(x).__name__
                if isinstance(x, torch.Tensor):
                    its_shape = "a nested shape" if x.is_nested else f"shape {_shape(x)}"
                    got = f"{x.dtype} of {its_shape} on {x.device} ({x.layout})"
                raise InputError(
                    f"{where}: {name} must be a dense {cache.dtype} tensor on {device} of shape "
                    f"{shape} ([batch, this rank's tokens of the step, heads, head_dim]), got {got}"
                )
        if not heads or heads % cache.num_kv_heads:
            raise InputError(
                f"{where}: the number of q's heads must be a multiple of the cache's "
                f"{cache.num_kv_heads} kv heads, got {heads}"
            )
        if torch.is_grad_enabled() and any(x.requires_grad for x in qkv):
            raise InputError(
                f"{where}: q, k and v must not require grad, because a cache has no backward; call "
                "the model under torch.inference_mode()"
            )
        return heads

    def _places_in_shard(self) -> list[tuple[tuple[slice, slice], _Some]]:
        """Where new tokens go, (rows of the batch, columns of the shard), and which of them go."""
        count, owner = self._dealt.count, self._dealt.owner
        found: list[tuple[tuple[slice, slice], _Some]] = []
        rows = list(zip(self._rows.before, self._rows.after, strict=True))
        for number, (before, after) in enumerate(rows):
            first, last = count(before, self._rank), count(after, self._rank)
            if first == last:
                continue
            tokens: slice | list[int] = slice(last - first)
            if not self.sharded and last - first < after - before:
                tokens = [at - before for at in range(before, after) if owner(at) == self._rank]
            batch = slice(None) if len(rows) == 1 else slice(number, number + 1)
            every = len(rows) == 1 and last - first == self.num_tokens
            found.append(((batch, slice(first, last)), None if every else (batch, tokens)))
        return found

    def _view(self) -> None:
        """Makes the views of all layers at once.

        Between two layers a model and its keys sweep the processor's caches, and an operator of
        torch that finds its code in none of them takes ten times as long.
        """
        layers, filled, places = self.cache._layers, self._num_columns, self._places_in_shard()
        # Layers outside inference mode could not write to views made inside it.
        with torch.inference_mode(False), torch.no_grad():
            self._views = [
                _Views(
                    [(k[at], v[at], chosen) for at, chosen in places],
                    _Layer(k.narrow(1, 0, filled), v.narrow(1, 0, filled)),
                )
                for k, v in layers
            ]
        self._views_of = layers

    def _clear(self, layer: _Layer) -> None:
        """Zeros in the place of tokens that were forgotten, behind those of the step.

        They may be NaN; kernels load whole blocks, and what is hidden is multiplied by 0.
        """
        alike, last = len(self._rows) == 1, self._dealt.count(self.cache._written, self._rank)
        for row, after in enumerate(self._rows.after):
            for x in layer if after < self.cache._written else ():
                x[slice(None) if alike else row, self._dealt.count(after, self._rank) : last] = 0

    @cached_property
    def _num_columns(self) -> int:
        """How many columns of this rank's shard are filled after the step."""
        return max(self._dealt.count(after, self._rank) for after in self._rows.after)

    def _prefill(
        self,
        layer: _Layer,
        q: torch.Tensor,
        structure: Mask,
        scale: float | None,
        terms: ScoreTerms,
        strategy: str,
    ) -> torch.Tensor:
        setup = self.cache.setup
        try:
            plan = self._plan(q.shape[2], structure, terms, strategy)
        except (ConfigError, InputError) as error:
            setup.runtime.refuse(_ATTEND, error)
        columns = self._rows.columns(self._dealt, self._rank)
        self._clear(layer)
        k, v = (x.narrow(1, 0, columns) for x in layer)
        out, _ = run_forward(_Chunk(setup, plan, scale), QKV(q, k, v), terms)
        return out

    def _plan(self, num_heads: int, structure: Mask, terms: ScoreTerms, strategy: str) -> Plan:
        """The plan of a prefill; layers with the same mask share it."""
        cache = self.cache
        scores = ScoreOptions(softcap=terms.softcap is not None, sinks=terms.sinks is not None)
        key = (structure, num_heads, scores, strategy)
        plan = self._plans.get(key)
        if plan is None:
            problem = Cached(structure, self._dealt, self._rows).problem(
                batch=cache.batch, num_heads=num_heads, num_kv_heads=cache.num_kv_heads,
                head_dim=cache.head_dim, v_head_dim=cache.v_head_dim,
                input_bytes=cache.dtype.itemsize, sum_bytes=sum_dtype(cache.dtype).itemsize,
                scores=scores,
            )  # fmt: skip
            setup = cache.setup
            plan = self._plans[key] = setup.planner.plan(
                PlanKey(
                    forward=True,
                    problem=problem,
                    strategy=strategy,
                    kernel=setup.kernel,
                    dtype=cache.dtype,
                    device=setup.runtime.device,
                    partials=setup.partials,
                )
            )
        return plan

    def _plan_decode(self, num_heads: int, scores: ScoreOptions) -> DecodePlan:
        cache = self.cache
        q_shape = (cache.batch, self.num_tokens, num_heads, cache.head_dim)
        return plan_decode(
            cache.setup, q_shape, cache.num_kv_heads, cache.v_head_dim, cache.dtype,
            keys=cache.capacity, scores=scores,
        )  # fmt: skip

    def _what_is_seen(self, structure: Mask) -> Seen:
        """What the queries of a decode see of this rank's shard: one object for all layers."""
        seen = self._seen.get(structure)
        if seen is None:
            spans = self._rows.spans(structure, self._places)
            own = in_columns(spans, self._dealt, self._rank)
            seen = self._seen[structure] = Seen(own, self._num_columns)
        return seen

    def _on_device(self, x: np.ndarray[Any, Any]) -> torch.Tensor:
        found = torch.from_numpy(x).to(self.cache.setup.runtime.device)
        return found.expand(self.cache.batch, -1)


def _in_words(called: list[tuple[int, _Call]]) -> str:
    """The layers of a step in the order of their calls, and what each was called with."""
    found = []
    for words, group in groupby(called, lambda each: each[1].words):
        layers = [layer for layer, _ in group]
        first, last = layers[0], layers[-1]
        in_order = len(layers) > 1 and layers == list(range(first, last + 1))
        told = f"{first} to {last}" if in_order else ", ".join(map(str, layers))
        found.append(f"layer{'s' * (len(layers) > 1)} {told}: {words}")
    return "; ".join(found)


def _shape(x: object) -> tuple[int, ...]:
    """A tensor's shape; () of what is no tensor, or a nested one."""
    return tuple(x.shape) if isinstance(x, torch.Tensor) and not x.is_nested else ()


def _look(x: object) -> object:
    """All that a check looks at of an argument that should be a tensor."""
    if not isinstance(x, torch.Tensor) or x.is_nested:
        return type(x)
    return x.shape, x.dtype, x.device, x.layout, x.requires_grad


def is_count(number: object, least: int) -> bool:
    """Whether this is an integer of at least `least`."""
    return isinstance(number, int) and not isinstance(number, bool) and number >= least
