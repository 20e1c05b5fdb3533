"""A cache of transformers that is spread over ranks, so that `model.generate` works on all of them.

    cache = burst_rt.hf.Cache(model, ctx, capacity=100_000)
    tokens = model.generate(**inputs, cache=cache)  # the same inputs on every rank

A call of the model with the cache is one step of a `KVCache`: a chunk of a prompt is cut before the
model sees it (`cached_call.py`, `hooks.py`), the layers attend by the step (`attention.py`), and
what one rank finds for the next token becomes what all ranks go on with (`spread.py`).
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch

from burst_rt.attention.sharding import ContextLayout
from burst_rt.context import Context, require_context
from burst_rt.errors import BurstError, ConfigError, InputError
from burst_rt.hf.cached_call import CachedCall
from burst_rt.hf.hooks import HookedCache, attach, detach, why_no_cache
from burst_rt.hf.prepare import prepare
from burst_rt.hf.release import cache_name
from burst_rt.hf.shard import KEYWORD
from burst_rt.hf.spread import spread
from burst_rt.hf.states import States, dealt_layout
from burst_rt.hf.step_info import ASKING_ERRORS, AskingStep, StepInfo
from burst_rt.planning.masks.positions import is_count
from burst_rt.runtime.refusing import refuse
from burst_rt.serving.cache import KVCache
from burst_rt.serving.step import Step

__all__ = ["Cache"]

_NAME = "hf.Cache"


class Cache(HookedCache):
    """The keys and values of a model's layers over the ranks of a context; see the module.

    Collective: every rank makes the same cache. Blocks as `KVCache` and `prepare` do.

    model: can generate, is not an encoder-decoder, and has attn_implementation="burst_rt". It may
        be wrapped by `fully_shard`. Where it needs `prepare`, that is done here. It is asked for
        one token, on each rank alone: what its layers would keep of it is what the cache holds.
    capacity: maximum number of tokens of a sequence, left padding and new tokens included.
    batch: number of sequences, times beams or num_return_sequences; None: as the first call has.
        The memory is taken as soon as that is known; see `KVCache`.
    block: as in `KVCache`.

    In `model.generate(..., cache=cache)` each rank runs only its part of a prompt through
    the model, at most ceil(tokens / ranks) + block of them. (A rank that has no token of a chunk
    runs a dummy token; every rank has some tokens of a chunk of ranks x block tokens.) After each
    call every rank has the logits of the last token and the state of rank 0's random generators of
    torch; the logits of a prompt come from the rank that has its last token. `max_time` and
    stopping criteria, which every rank is given, are asked of rank 0 alone; they make no call of
    ranks.

    Raises, on every rank, InputError for a model or a number that cannot be used, and
    ContractMismatch where the ranks' numbers differ. A forward raises, on every rank, InputError
    for other arguments and ContractMismatch where the ranks' tokens differ. It takes the new tokens
    alone (`generate` the whole text), and warns where they begin with all that are cached.
    """

    def __init__(
        self, model: Any, ctx: Context, *, capacity: int, batch: int | None = None, block: int = 128
    ) -> None:
        require_context(ctx, _NAME)
        super().__init__(model, ctx)
        self.capacity, self.block = capacity, block
        self._info: StepInfo | None = None  # while a call is in progress
        self._of_rows: CachedCall | None = None  # the call of `extend` that is under way
        self._kv: KVCache | None = None
        # The tokens that are cached, -1 for unknown ones. No tensor: one that was made in inference
        # mode could not be written to outside of it.
        self._text: np.ndarray[Any, np.dtype[np.int64]] | None = None
        self._new: torch.Tensor | None = None  # input_ids of the call under way
        words = {
            "call": _NAME, "model": type(model).__name__, "capacity": str(capacity),
            "batch": str(batch), "block": str(block),
        }  # fmt: skip
        ctx.runtime.agree(words, why_no_cache(model, capacity, batch, block))
        prepare(model, ctx, loss=False)
        asked, states = self._ask()
        self._layers = asked.layers
        self._states = States() if states else None
        self._make = partial(KVCache, ctx, block=block, **asked.shape())
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        if batch is not None:
            self._kv = self._make(batch=batch, capacity=capacity)
        attach(model)
        self._detach = weakref.finalize(self, detach, model)
        self._detach.atexit = False

    @torch.no_grad()
    def _ask(self) -> tuple[AskingStep, bool]:
        """Has the model run a token of which nothing is cached: what its layers would keep of it.

        Returns a step that has seen their keys and values, and whether there are states.
        """
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.ctx.device)
        asking, states = AskingStep(), States()
        info = StepInfo(self.ctx, asking, token, 0, token, 0, asking.layers, states=states)
        given = {"input_ids": token, "use_cache": True, cache_name(self.model): self, KEYWORD: info}
        self._info, self.begun = info, True
        try:
            self.model(**given)
        except BurstError:
            raise
        except ASKING_ERRORS as error:
            wrong = InputError(
                f"{_NAME}: expected a model whose layers ask a cache for keys and values alone, "
                f"got {type(self.model).__name__}: {type(error).__name__}: {error}; generate on "
                "one process"
            )
            wrong.__cause__ = error
            refuse(_NAME, wrong, self.ctx.runtime)
        finally:
            self._info, self.begun = None, False
        if reason := asking.refuses(type(self.model).__name__, bool(states)):
            self.refuse(reason)
        return asking, bool(states)

    @property
    def kv(self) -> KVCache | None:
        """The cache underneath; None where the batch is not known yet."""
        return self._kv

    @property
    def keeps_states(self) -> bool:
        """Whether layers of the model keep states, of a row's last token alone."""
        return self._states is not None

    def close(self) -> None:
        """Gives the memory back, and leaves the model alone. Local. Idempotent."""
        self._detach()
        self._kv = self._info = self._text = self._new = None

    def extend(self, tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """Runs new tokens of each row, behind those that the row has, through the model.

        Rows may have different lengths, as where each is a request of its own. `copy` brings in a
        row whose prompt another cache of the model has read. Collective; blocks and raises as a
        call of the model does.

        tokens: at most 16 for each row, at most one where `keeps_states`; some rows may have none.
            The same on every rank.

        Returns logits `[rows, vocabulary]` of each row's last new token; zeros where there is none.
        Every rank computes all of them; where devices round differently, go on with rank 0's.
        Raises, on every rank, InputError for other numbers, without `batch` or for padding;
        ContractMismatch where the ranks' tokens differ.
        """
        self._check_open()
        try:
            self._of_rows = CachedCall.of_rows(
                tokens, self._kv, self.ctx.device, states=self.keeps_states
            )
        except InputError as error:
            refuse(_NAME, error, self.ctx.runtime)
        given = {cache_name(self.model): self, "use_cache": True}
        try:
            logits: torch.Tensor = self.model(**self._of_rows.cut, **given).logits
        finally:
            self._of_rows = None
        return logits[:, 0]

    def copy(self, row: int, source: Cache, source_row: int = 0, tokens: int | None = None) -> None:
        """Row `row` becomes the first tokens of another cache's row: see `KVCache.copy`.

        Raises InputError as that does; also for a cache without `batch`, or `tokens` where layers
        keep states, which only whole rows have.
        """
        self._check_open()
        theirs = getattr(source, "_kv", None)
        if self._kv is None or theirs is None:
            got = f"{self!r} and {source!r:.80}"
            self.refuse(f"copy: expected two caches with batch=N, got {got}")
        if self._states is not None and tokens is not None:
            self.refuse(f"copy: tokens: expected None: only whole rows have states; got {tokens!r}")
        self._kv.copy(row, theirs, source_row, tokens)
        if self._states is not None and source._states is not None:
            self._states.copy(row, self._kv.batch, source._states, source_row)
        self._text = None  # unknown from here on

    # What transformers asks of a cache. In `generate` rows have the same length: their padding is
    # cached too.

    def __repr__(self) -> str:
        return f"<burst_rt.hf.Cache of {self.get_seq_length()} of {self.capacity} tokens>"

    def __len__(self) -> int:
        return int(self.model.config.get_text_config(decoder=True).num_hidden_layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of each sequence that are cached, left padding included."""
        return 0 if self._kv is None else max(self._kv.lengths)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """The capacity."""
        return self.capacity

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Number of keys that a call with this many new tokens sees, and the first of them."""
        return self.get_seq_length() + query_length, 0

    @property
    def batch_size(self) -> int:
        """Number of sequences; -1 if it is not known yet."""
        return -1 if self._kv is None else self._kv.batch

    @property
    def is_compileable(self) -> bool:
        """False: ranks meet in every layer."""
        return False

    @property
    def is_croppable(self) -> bool:
        """False: `generate` would run a token more than it needs, to take it back by `crop`."""
        return False

    @property
    def is_linear(self) -> list[bool]:
        """False for each layer, whatever it keeps: `generate` would run the whole text again."""
        return [False] * len(self)

    @property
    def is_initialized(self) -> bool:
        """Whether the memory has been taken."""
        return self._kv is not None

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Nothing: the attention function appends. Raises InputError outside of a model's call."""
        if self._info is None:
            self._check_open()
            self.refuse(
                f"expected a call of the {type(self.model).__name__} that this cache was made for, "
                "got one of another model, or of a part of it; call that model, or make a cache "
                "for this one"
            )
        self._info.current = layer_idx
        return key_states, value_states

    def reserve(self, capacity: int) -> None:
        """Makes room for more tokens: `capacity` of each sequence. As `KVCache.reserve`."""
        self._check_open()
        error: InputError | None = None
        if not is_count(capacity, self.capacity):
            error = InputError(
                f"{_NAME}: reserve: capacity must be an integer of at least {self.capacity:,}, "
                f"which there is, got {capacity!r}"
            )
        words = {"call": f"{_NAME}.reserve", "capacity": str(capacity)}
        self.ctx.runtime.agree(words, error)
        if self._kv is not None:
            self._kv.reserve(capacity)
        if self._text is not None:
            more = capacity - self.capacity
            self._text = np.pad(self._text, ((0, 0), (0, more)), constant_values=-1)
        self.capacity = capacity

    def reset(self) -> None:
        """Forgets all tokens. Local; every rank does the same."""
        if self._kv is not None:
            self._kv.reset()
        if self._states is not None:
            self._states.forget()

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last tokens, `-tokens_to_remove` of each sequence. Local, as `reset`."""
        if not isinstance(tokens_to_remove, int) or tokens_to_remove > 0:
            self.refuse(
                "crop: expected a number of tokens to remove as 0 or less, got "
                f"{tokens_to_remove!r}"
            )
        if self._states is not None and tokens_to_remove:
            self.refuse(
                f"crop: expected a model whose layers keep keys, got {type(self.model).__name__}, "
                "some of whose layers keep states, which forget nothing; call cache.reset()"
            )
        if self._kv is not None and tokens_to_remove:
            self._kv.truncate([n + tokens_to_remove for n in self._kv.lengths])

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes what row `beam_idx[i]` was. Local, as `reset`."""
        if self._kv is not None:
            self._kv.reorder(beam_idx.cpu())
        if self._states is not None:
            self._states.reorder(beam_idx)
        if self._text is not None:
            self._text = self._text[beam_idx.cpu().numpy()]

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        """Raises InputError: not supported."""
        self.refuse("contrastive search and others that repeat a cache's rows are not done")

    def batch_select_indices(self, indices: torch.Tensor) -> NoReturn:
        """Raises InputError: not supported."""
        self.refuse("generation that drops rows of a cache is not done")

    def activate_past_recording(self) -> NoReturn:
        """Raises InputError: assisted decoding, which calls it, is not supported."""
        self.refuse(
            "assisted decoding (assistant_model, prompt_lookup_num_tokens) is not done; expected "
            "greedy search, sampling or beam search; leave it out"
        )

    # A call of the model.

    def begin(self, options: dict[str, Any]) -> dict[str, Any]:
        """Begins a step, and returns the arguments with which the model is called instead of these.

        Collective; blocks and raises as `KVCache.step`.
        """
        self._check_open()
        if torch.is_grad_enabled() and any(x.requires_grad for x in self.model.parameters()):
            self.refuse(
                "expected a call without gradients, because a cache has no backward, got one with "
                "them; call the model under torch.inference_mode()"
            )
        try:
            call = self._of_rows or CachedCall.of(options, self._kv, self.capacity)
        except InputError as error:
            refuse(_NAME, error, self.ctx.runtime)
        if self._kv is None:
            self._kv = self._make(batch=call.rows, capacity=self.capacity)
        if self._info is not None:  # an error has interrupted the call before
            self._kv.truncate(self._kv.lengths)
        if call.counts is None:
            self._warn_of_whole_text(options.get("input_ids"), call.tokens)
        # Every rank may run a short prompt, but not one short chunk after another.
        most = -(-call.tokens // self.ctx.world_size) + self.block
        spread_too = self.prompt == "chunk" or (self.prompt == "whole" and call.tokens > most)
        asked = f"; stopping criteria: {self.asked or 'none'}" if self.prompt != "none" else ""
        step = self._kv.step(
            call.tokens if call.counts is None else call.counts,
            padding=call.padding,
            sharded=True if spread_too else None,  # None: if there are many
            about=call.about + asked,
        )

        def cut(x: torch.Tensor) -> torch.Tensor:
            # A rank without tokens runs one that nobody sees: not every model takes none.
            x = x.to(self.ctx.device)
            return step.cut(x) if step.num_tokens else x[:, :1]

        mine, past = {name: cut(x) for name, x in call.cut.items()}, self.get_seq_length()
        places = mine["position_ids"]
        if call.counts is None:
            places = cut(torch.arange(past, past + call.tokens, device="cpu").expand(call.rows, -1))
        self._info = StepInfo(
            self.ctx, step, mine["position_ids"], past, places, call.largest_position, self._layers
        )
        if self._states is not None:
            self._states.begin()
            self._info.states, self._info.padding = self._states, tuple(call.padding)
            if step.sharded:
                chunk = dealt_layout(past, call.tokens, self.block, self.ctx.world_size)
                self._info.layout = ContextLayout(self.ctx.attention, chunk)
        self._new = options.get("input_ids")
        keywords = {**options, **mine, KEYWORD: self._info}
        if step.sharded and self._keeps_logits:
            keywords["logits_to_keep"] = 1
        elif keywords.get("logits_to_keep", 0) is None:  # models would index with it
            del keywords["logits_to_keep"]
        return keywords

    def end(self, logits: torch.Tensor) -> torch.Tensor:
        """Ends the step: the logits that all ranks go on with. Collective; blocks as `agree`."""
        assert self._info is not None
        step, self._info, rows = self._info.step, None, self._of_rows
        assert isinstance(step, Step)
        if rows is not None:  # every rank has run all tokens
            spread_logits = step.last(logits)[:, None]
        else:
            source = step.last_owner[0] if step.sharded else 0
            spread_logits = spread(self.ctx, logits[:, -1:] if step.sharded else logits, source)
        before = self.get_seq_length()
        step.commit()
        if self._states is not None:
            self._states.commit(rows.counts if rows else None)
        if rows is None:
            self._remember(before)
        else:
            self._text = None
        return spread_logits

    def check_text(self, text: torch.Tensor, new: int) -> None:
        """See `HookedCache`. Tokens that are not known (inputs_embeds) pass."""
        length = self.get_seq_length()
        if self._text is None or text.shape != (len(self._text), length + new):
            return  # not the whole text, or another batch, which the model's call refuses
        # While new tokens are written, the text before the last one is the text of the previous
        # call.
        first = 0 if self.prompt != "none" else max(0, length - 1)
        cached, given = self._text[:, first:length], text[:, first:length].cpu().numpy()
        wrong = np.argwhere((cached != given) & (cached >= 0))
        if len(wrong):
            row, at = wrong[0]
            self.refuse(
                f"expected a text that begins with the {length} tokens that are cached, got one "
                f"with token {given[row, at]} at {first + at} of row {row}, where "
                f"{cached[row, at]} is cached; call cache.reset() before another text"
            )

    def _warn_of_whole_text(self, text: torch.Tensor | None, new: int) -> None:
        """Warns if new tokens begin with all cached tokens: they are most likely the whole text."""
        length = self.get_seq_length()
        if self._text is None or text is None or not 0 < length < new or self.ctx.rank:
            return
        if np.array_equal(self._text[:, :length], text[:, :length].cpu().numpy()):
            warnings.warn(
                f"{_NAME}: input_ids begin with the {length} tokens that are cached, and come "
                "behind them: a call of the model takes the new tokens alone (generate takes the "
                "whole text)",
                stacklevel=2,
            )

    def _remember(self, before: int) -> None:
        """Keeps the tokens of a step that has ended. before: how many were cached."""
        assert self._kv is not None
        if self._text is None:
            self._text = np.full((self._kv.batch, self.capacity), -1, np.int64)
        after = self.get_seq_length()
        self._text[:, before:after] = -1 if self._new is None else self._new.cpu().numpy()
        self._new = None

    def _check_open(self) -> None:
        if not self._detach.alive:
            error = ConfigError(f"{_NAME}: this cache is closed; make another")
            refuse(_NAME, error, self.ctx.runtime)

    def refuse(self, reason: str) -> NoReturn:
        """Raises InputError on every rank that waits for this one."""
        refuse(_NAME, InputError(f"{_NAME}: {reason}"), self.ctx.runtime)
