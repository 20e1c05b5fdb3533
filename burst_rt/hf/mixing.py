"""Layers that mix tokens by recurrences and short convolutions, over ranks.

In transformers most of these layers call functions of their module: `causal_conv1d_fn`,
`mamba2_chunk_scan` and so on. `prepare` gives each such layer a forward of the same code whose
functions are those of `mixers.py`. Calls that `shard` has cut run it, and steps of a cache over
ranks; others run the layer's own forward.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from types import FunctionType
from typing import Any, NoReturn, TypeAlias

import torch
import transformers

from burst_rt.context import Context
from burst_rt.errors import InputError
from burst_rt.hf.loss import wrong_router_loss
from burst_rt.hf.mixers import FUNCTIONS, INLINE, SHORTCUTS, MixingCall, within_call
from burst_rt.hf.release import unknown_release
from burst_rt.hf.rotary import hook_of
from burst_rt.hf.shard import KEYWORD, ShardInfo
from burst_rt.hf.step_info import StepInfo
from burst_rt.runtime.refusing import refuse

__all__ = ["spread_mixing"]

Tensor: TypeAlias = torch.Tensor

_NAME = "hf"
_MODELS = "transformers.models."
# Arguments by which models and layers take a cache.
_CACHES = ("cache", "past_key_values", "cache_params")
# Functions that layers call with a cache only.
_STEPS = frozenset(
    {
        "causal_conv1d_update",
        "torch_recurrent_gated_delta_rule",
        "recurrent_kimi_delta_attention",
        "mamba2_selective_state_update",
        "mamba_selective_state_update",
    }
)
# Pattern of the names of functions that mix tokens.
_MIXES = re.compile(r"conv1d|_scan|delta_rule|delta_attention|state_update|inner_fn")
# Models and layers that hand on nothing but the padding mask to what is inside, so that the mask
# has to say how the batch is cut. transformers recomputes the forward of a layer with the arguments
# of the first time, and without its hooks.
_TELL_BY_MASK = ("MambaModel", "FalconMambaModel", "JambaMambaDecoderLayer")
# Parts of layers whose weights are read where others are called.
_READ = ("conv", "conv1d", "conv_1d", "dt_proj")
# Models that would not run with another class of cache than their own, where they are to use one.
_OWN_CACHES = ("MiniMaxModel",)


def spread_mixing(model: torch.nn.Module, ctx: Context) -> bool:
    """Has the layers of a model that mix tokens without attention do so over ranks.

    Returns whether it has any. Local, idempotent. Raises InputError for what such a model does not
    do over ranks, on every rank that waits for this one, and ConfigError for layers of a release of
    transformers that is not known.
    """
    mixing = [layer for layer in model.modules() if _functions_of(layer) or _inline(layer)]
    if not mixing:
        return False
    if z_loss := getattr(model, "z_loss_coefficient", 0):
        error = InputError(
            f"hf.prepare: {type(model).__name__}: z_loss_coefficient: expected 0, got {z_loss}: "
            "this loss would be the mean of one rank's tokens; set model.z_loss_coefficient = 0"
        )
        refuse("hf.prepare", error, ctx.runtime)
    if any(isinstance(vars(layer).get("forward"), _Mixing) for layer in mixing):
        return True
    for layer in mixing:
        _check(layer, ctx)
        layer.forward = _Mixing(layer)
    call = _Call()
    model.register_forward_pre_hook(call.before_model, with_kwargs=True, prepend=True)
    model.register_forward_hook(call.after_model, always_call=True)
    for part in model.modules():
        if isinstance(part, transformers.PreTrainedModel) or _is_one_of(part, _TELL_BY_MASK):
            part.register_forward_pre_hook(call.before_part, with_kwargs=True, prepend=True)
    return True


def _functions_of(layer: torch.nn.Module) -> list[str]:
    """The names of the functions by which a layer of transformers mixes tokens."""
    forward: Any = inspect.unwrap(type(layer).forward)
    if not forward.__module__.startswith(_MODELS):
        return []
    names, known = forward.__code__.co_names, forward.__globals__
    return [name for name in names if _MIXES.search(name) and callable(known.get(name))]


def _inline(layer: torch.nn.Module) -> tuple[Callable[..., Any], tuple[str, ...]] | None:
    kinds = [kind for kind in type(layer).__mro__ if kind.__module__.startswith(_MODELS)]
    return INLINE.get(kinds[0].__name__) if kinds else None


def _check(layer: torch.nn.Module, ctx: Context) -> None:
    """Raises ConfigError for a layer that mixes tokens otherwise than is known here, and InputError
    for one whose forward was replaced.
    """
    kind = type(layer)
    what, inline = f"hf.prepare: {kind.__name__}", _inline(layer)
    if "forward" in vars(layer):
        error = InputError(
            f"{what}: expected the forward of transformers, got another, a "
            f"{type(vars(layer)['forward']).__name__}; call burst_rt.hf.prepare(model, ctx) before "
            "what replaces forwards"
        )
        refuse("hf.prepare", error, ctx.runtime)
    if inline is not None:
        missing = [name for name in inline[1] if not hasattr(layer, name)]
        if missing:
            raise unknown_release(what, f"attributes {', '.join(missing)}", "none")
        return
    names = _functions_of(layer)
    unknown = set(names) - _STEPS - FUNCTIONS.keys() - SHORTCUTS.keys()
    if unknown:
        expected = f"a layer that mixes by {', '.join((*FUNCTIONS, *SHORTCUTS))}"
        raise unknown_release(what, expected, f"one that calls {min(unknown)}")
    known: Any = inspect.unwrap(kind.forward)
    for name in sorted(FUNCTIONS.keys() & set(names)):
        got = ", ".join(inspect.signature(known.__globals__[name]).parameters)
        expected = FUNCTIONS[name].parameters
        if expected != got:
            raise unknown_release(what, f"{name}({expected})", f"{name}({got})")


class _Mixing:
    """The forward of a layer that mixes tokens: over ranks where a call says so, else its own."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self._layer = layer

    def __call__(self, *args: Any, **options: Any) -> Any:
        info = options.pop(KEYWORD, getattr(options.get("attention_mask"), KEYWORD, None))
        if info is None:
            return type(self._layer).forward(self._layer, *args, **options)
        return _apart(self._layer, info, args, options)


def _run(
    layer: torch.nn.Module,
    info: ShardInfo | StepInfo,
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> Any:
    if info.ctx.world_size > 1 and hook_of(layer) not in info.told:
        _refuse(
            "expected a call of the model that was prepared, or of its base model, got one of a "
            f"part of it ({type(layer).__name__}); call model(**burst_rt.hf.shard(batch, ctx))",
            info.ctx,
        )
    _check_adapters(layer, info.ctx)
    # A cache that the model has made in this call, for nobody, or that of a step.
    options = {name: None if name in _CACHES else x for name, x in options.items()}
    if isinstance(info, ShardInfo):
        hook = hook_of(layer)
        # Where the model has softmax attention, too, that must have asked for it over the ranks.
        info.attended = info.attended or hook is None or not hook.attends
        call = MixingCall(info.batch.layout, info.documents)
    else:
        assert info.states is not None
        # It may be that of other tokens; rows begin after their padding.
        options["attention_mask"] = None
        call = MixingCall(info.layout, info.begins, info.states.of(layer))
    kind: Any = type(layer)  # mypy does not take classes for hashable
    with within_call(call):
        return _forward_of(kind)(layer, *args, **options)


def _check_adapters(layer: torch.nn.Module, ctx: Context) -> None:
    """Raises InputError for an adapter (PEFT) of a part whose weights the layer reads by itself."""
    if hasattr(getattr(layer, "config", None), "_is_quantized"):  # then it calls the part
        return
    for name in _READ:
        if hasattr(getattr(layer, name, None), "base_layer"):
            _refuse(
                f"{type(layer).__name__}.{name}: expected no adapter, got a "
                f"{type(getattr(layer, name)).__name__}, which would count for nothing: "
                f"transformers reads the weights below it; leave {name} out, by exclude_modules "
                "of PEFT",
                ctx,
            )


# Compiled models are cut there.
_apart: Any = torch.compiler.disable(_run)


@functools.cache
def _forward_of(kind: Any) -> Callable[..., Any]:
    """The forward of a class of layers over ranks."""
    for each in kind.__mro__:
        if each.__name__ in INLINE:
            return INLINE[each.__name__][0]
    forward: Any = inspect.unwrap(kind.forward)
    ours = {name: replaced.ours for name, replaced in FUNCTIONS.items()}
    made = FunctionType(
        forward.__code__, {**forward.__globals__, **ours, **SHORTCUTS}, forward.__name__,
        forward.__defaults__, forward.__closure__,
    )  # fmt: skip
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


class _Call:
    """What a model's call was told, for those of its parts to which it does not hand that on."""

    def __init__(self) -> None:
        self._info: ShardInfo | StepInfo | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_info": None}

    def before_model(
        self, module: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        info = options.get(KEYWORD)
        self._info = info if isinstance(info, (ShardInfo, StepInfo)) else None
        if not isinstance(info, ShardInfo):
            return
        names = (*_CACHES, "use_cache")
        given = [name for name in names if options.get(name) not in (None, False)]
        if given:
            _refuse(
                f"{given[0]}: expected none: {type(module).__name__} has layers that keep states, "
                "and a call that burst_rt.hf.shard has cut keeps none; generate with "
                "burst_rt.hf.Cache(model, ctx, capacity=...)",
                info.ctx,
            )
        hook = hook_of(module)
        if info.ctx.world_size == 1 or (hook and hook.balances):
            return
        if reason := wrong_router_loss(options, getattr(module, "config", None)):
            _refuse(reason, info.ctx)

    def after_model(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._info = None

    def before_part(
        self, module: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        info = options.get(KEYWORD, self._info)
        if not isinstance(info, (ShardInfo, StepInfo)):
            return None
        options = {**options, KEYWORD: info}
        if _is_one_of(module, _TELL_BY_MASK):
            options["attention_mask"] = _mask_with(info, options.get("attention_mask"))
        if isinstance(info, StepInfo) and _is_one_of(module, _OWN_CACHES):
            options["use_cache"] = False
        return args, options


def _is_one_of(module: torch.nn.Module, names: tuple[str, ...]) -> bool:
    return any(kind.__name__ in names for kind in type(module).__mro__)


def _mask_with(info: ShardInfo | StepInfo, mask: Tensor | None) -> Tensor:
    """A padding mask that says how the batch is cut."""
    if mask is None:
        shape = (1, 1)  # layers look at no mask in a step
        if isinstance(info, ShardInfo):
            rows = next(iter(info.batch.tensors.values())).shape[0]
            shape = (rows, info.batch.layout.shard_len)
        mask = torch.ones(shape, dtype=torch.int64, device=info.ctx.device)
    mask = mask.view_as(mask)
    setattr(mask, KEYWORD, info)
    return mask


def _refuse(reason: str, ctx: Context) -> NoReturn:
    refuse(_NAME, InputError(f"{_NAME}: {reason}"), ctx.runtime)
