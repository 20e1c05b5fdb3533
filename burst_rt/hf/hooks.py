"""Hooks on a model that has caches over ranks: the model's calls become steps of the caches.

Calls with such a cache are cut, and their logits come from all ranks. Other calls are left as they
are. When the last cache of a model is gone, so are the hooks.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial, wraps
from types import MethodType
from typing import Any, Literal, NoReturn

import torch
import transformers
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from burst_rt.context import Context
from burst_rt.eager import eager
from burst_rt.errors import BurstError, ConfigError, InputError
from burst_rt.hf.prepare import attends
from burst_rt.hf.release import cache_name, check_release, wrong_cache_name
from burst_rt.hf.shard import KEYWORD
from burst_rt.hf.spread import of_rank_0
from burst_rt.planning.masks.positions import is_count
from burst_rt.runtime.refusing import refuse

__all__ = ["HookedCache", "attach", "check_model", "detach", "why_no_cache"]

_NAME = "hf.Cache"
_HOOKS = "_burst_rt_hooks"  # name of a model's attribute
# Criteria whose answers follow from the tokens, which all ranks share.
_BY_TOKENS = (MaxLengthCriteria, EosTokenCriteria, StopStringCriteria)


class HookedCache(transformers.Cache):  # type: ignore[misc]  # transformers has no types
    """A cache with which a call of its model begins and ends a step."""

    def __init__(self, model: Any, ctx: Context) -> None:
        super().__init__(layers=[])
        self.model, self.ctx = model, ctx
        # The part of a prompt that the model's calls get, while `generate` runs one.
        self.prompt: Literal["none", "whole", "chunk"] = "none"
        self.asked = ""  # the stopping criteria that rank 0 is asked
        self.begun = False  # whether calls get a step that was begun before

    def begin(self, options: dict[str, Any]) -> dict[str, Any]:
        """Begins a step, and returns the arguments with which the model is called instead of
        these.
        """
        raise NotImplementedError

    def end(self, logits: torch.Tensor) -> torch.Tensor:
        """Ends the step, and returns the logits with which all ranks go on."""
        raise NotImplementedError

    def check_text(self, text: torch.Tensor, new: int) -> None:
        """Refuses a text `[batch, tokens]` that does not begin with the tokens that are cached.

        new: how many tokens at its end are not cached yet.
        """
        raise NotImplementedError

    def refuse(self, reason: str) -> NoReturn:
        """Raises InputError on every rank that waits for this one."""
        raise NotImplementedError


def cache_among(options: dict[str, Any]) -> HookedCache | None:
    """The cache over ranks that a call is given, by whatever name; None where it is given none."""
    return next((x for x in options.values() if isinstance(x, HookedCache)), None)


def check_model(model: Any) -> None:
    """Raises InputError for one that cannot generate over ranks.

    Raises ConfigError where the release of transformers is not known.
    """
    name = type(model).__name__
    if not isinstance(model, transformers.PreTrainedModel) or not model.can_generate():
        raise InputError(f"{_NAME}: expected a model of transformers that can generate, got {name}")
    if model.config.is_encoder_decoder:
        raise InputError(
            f"{_NAME}: encoder-decoders are not done: expected a decoder, got {name}, whose "
            "cross-attention would need a cache of its own"
        )
    if (got := model.config._attn_implementation) != KEYWORD and attends(model):
        raise InputError(
            f"{_NAME}: expected a model with attn_implementation={KEYWORD!r}, got {got!r}; load it "
            f"with that, or call model.set_attn_implementation({KEYWORD!r})"
        )
    check_release(model)


def why_no_cache(model: Any, capacity: object, batch: object, block: object) -> BurstError | None:
    """The reason why such a cache is impossible, or None."""
    for name, number in (("capacity", capacity), ("batch", batch), ("block", block)):
        if not is_count(number, 1) and not (name == "batch" and number is None):
            return InputError(f"{_NAME}: {name} must be an integer of at least 1, got {number!r}")
    try:
        check_model(model)
    except (ConfigError, InputError) as error:
        return error
    return None


class _Hooks:
    """The hooks of a model while it has caches."""

    def __init__(self, model: Any) -> None:
        self.num_caches = 0
        self.ctx: Context | None = None  # context of the cache of the model's last call
        self.asked = ""  # names of the criteria that the last `generate` asks
        self._handles = [
            # First, so that other hooks know how the call is cut.
            model.register_forward_pre_hook(_before, prepend=True, with_kwargs=True),
            model.register_forward_hook(_after, with_kwargs=True),
        ]
        model.prepare_inputs_for_generation = MethodType(_prepared(type(model)), model)
        model._get_stopping_criteria = MethodType(_stopping(type(model)), model)
        model._prefill = MethodType(_prompted(type(model)), model)

    def remove(self, model: Any) -> None:
        for handle in self._handles:
            handle.remove()
        del model.prepare_inputs_for_generation, model._get_stopping_criteria, model._prefill

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hooks:
        """The hooks of a copy of the model, which has no caches."""
        hooks = _Hooks.__new__(_Hooks)
        hooks.num_caches, hooks.ctx, hooks.asked = 0, None, ""
        hooks._handles = copy.deepcopy(self._handles, memo)
        return hooks


def attach(model: Any) -> None:
    """Counts one more cache of a model. Local."""
    if not hasattr(model, _HOOKS):
        setattr(model, _HOOKS, _Hooks(model))
    getattr(model, _HOOKS).num_caches += 1


def detach(model: Any) -> None:
    """Counts one less. Local."""
    hooks: _Hooks = getattr(model, _HOOKS)
    hooks.num_caches -= 1
    if not hooks.num_caches:
        hooks.remove(model)
        delattr(model, _HOOKS)


@eager
def _before(
    model: Any, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if args:
        bound = inspect.signature(model.forward).bind_partial(*args)
        options = {**bound.arguments, **options}
    cache, hooks = cache_among(options), getattr(model, _HOOKS, None)
    if hooks is not None:
        hooks.ctx = None if cache is None else cache.ctx
    if cache is None or cache.begun:
        return None
    if cache.model is not model:
        cache.refuse(
            f"expected a call of the {type(cache.model).__name__} that this cache was made for, "
            f"got another {type(model).__name__}; make a cache for it"
        )
    name = next(name for name, x in options.items() if x is cache)
    if reason := wrong_cache_name(model, name):
        cache.refuse(reason)
    return (), cache.begin(options)


@eager
def _after(model: Any, args: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
    cache = cache_among(options)
    if cache is not None and not cache.begun:
        output.logits = cache.end(output.logits)
        output[cache_name(model)] = cache  # some models leave it out, and `generate` takes it there


def _prepared(kind: Any) -> Callable[..., dict[str, Any]]:
    """The class's own, which is given the whole text, and takes the tokens that are not cached.

    The text is checked here. Some models leave the cache out, to begin again without it:
    Phi-3 does where "longrope" changes its frequencies, as cached keys have the other ones. The
    cache then begins again.
    """

    @wraps(kind.prepare_inputs_for_generation)
    def prepare_inputs(
        self: Any, input_ids: torch.Tensor, *args: Any, **options: Any
    ) -> dict[str, Any]:
        cache, new = cache_among(options), options.get("next_sequence_length")
        if cache is not None and new is not None and new > 0:
            cache.check_text(input_ids, new)
        inputs: dict[str, Any] = kind.prepare_inputs_for_generation(
            self, input_ids, *args, **options
        )
        if cache is not None and cache_among(inputs) is None:
            if cache.prompt == "chunk" and cache.get_seq_length():
                cache.refuse(
                    f"this {type(self).__name__} begins again at this length, and a chunk comes "
                    "without the text before it; expected the whole text, got it in chunks; leave "
                    "prefill_chunk_size out"
                )
            cache.reset()
            inputs[cache_name(self)] = cache
        return inputs

    return prepare_inputs


def _prompted(kind: Any) -> Callable[..., Any]:
    """The class's own, which runs a prompt, or the part of a text that is not cached yet."""

    @wraps(kind._prefill)
    def prefill(
        self: Any, input_ids: torch.Tensor, generation_config: Any, model_kwargs: Any, *args: Any,
        **options: Any,
    ) -> Any:  # fmt: skip
        cache, size = cache_among(model_kwargs), generation_config.prefill_chunk_size
        if cache is None:
            return kind._prefill(self, input_ids, generation_config, model_kwargs, *args, **options)
        if size is not None and not is_count(size, 1):
            cache.refuse(f"prefill_chunk_size: expected an integer of at least 1, got {size!r}")
        cache.prompt = "whole" if size is None else "chunk"
        cache.asked = getattr(self, _HOOKS).asked
        mask, tokens = model_kwargs.get("attention_mask"), input_ids.shape[1]
        # As transformers finds out whether these are all tokens, or the new ones alone.
        told = getattr(generation_config, "_mask_length", -1) if mask is None else mask.shape[1]
        new = tokens - cache.get_seq_length()
        try:
            if size is not None and told == tokens and new > 0:
                cache.check_text(input_ids, new)  # here, because no chunk has all of it
            return kind._prefill(self, input_ids, generation_config, model_kwargs, *args, **options)
        finally:
            cache.prompt = "none"

    return prefill


def _stopping(kind: Any) -> Callable[..., StoppingCriteriaList]:
    """The class's own criteria. Only rank 0 is asked the criteria that ranks may answer
    differently.
    """

    @wraps(kind._get_stopping_criteria)
    def get_stopping_criteria(self: Any, *args: Any, **options: Any) -> StoppingCriteriaList:
        criteria = kind._get_stopping_criteria(self, *args, **options)
        alike = [criterion for criterion in criteria if isinstance(criterion, _BY_TOKENS)]
        asked = StoppingCriteriaList(
            criterion for criterion in criteria if not isinstance(criterion, _BY_TOKENS)
        )
        hooks: _Hooks = getattr(self, _HOOKS)
        hooks.asked = ", ".join(type(criterion).__name__ for criterion in asked)
        together = [_StopsWithRank0(hooks, asked)] if asked else []
        return StoppingCriteriaList(alike + together)

    return get_stopping_criteria


class _StopsWithRank0(StoppingCriteria):  # type: ignore[misc]  # transformers has no types
    """Stopping criteria that rank 0 is asked, for every rank."""

    def __init__(self, hooks: _Hooks, criteria: StoppingCriteriaList) -> None:
        self._hooks, self._criteria = hooks, criteria

    def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        """The rows that end: bool `[rows]`. Collective after a call with a cache over ranks."""
        ctx = self._hooks.ctx
        ask: Callable[[], torch.Tensor] = partial(self._criteria, input_ids, scores, **options)
        if ctx is None or ctx.world_size == 1:
            return ask()
        ended = torch.zeros(len(input_ids), dtype=torch.bool, device="cpu")
        if ctx.rank == 0:
            ended = self._asked(ask, len(input_ids), ctx)
        return of_rank_0(ctx, ended).to(input_ids.device)

    def _asked(self, ask: Callable[[], torch.Tensor], rows: int, ctx: Context) -> torch.Tensor:
        try:
            ended = ask()
            if ended.shape != (rows,):
                raise TypeError(f"shape {tuple(ended.shape)}")
            return ended.bool()
        except BurstError:
            raise  # the other ranks have heard of it
        except Exception as error:  # noqa: BLE001  (whatever a criterion raises: the other ranks wait for its answer)
            wrong = InputError(
                f"{_NAME}: max_time or stopping criteria ({self._hooks.asked}): expected a bool of "
                f"each of {rows} rows, got {error!r} on rank 0"
            )
            wrong.__cause__ = error
            refuse(_NAME, wrong, ctx.runtime)
