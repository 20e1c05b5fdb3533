"""Layers that mix tokens by recurrences and short convolutions, over ranks.

In transformers most of these layers call functions of their module: `causal_conv1d_fn`,
`mamba2_chunk_scan` and so on. `prepare` gives each such layer a forward of the same code whose
functions are those of `burst_rt.recurrence`. Two layers mix inline, and have a forward here. A call
that is not sharded runs the layer's own forward.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from contextvars import ContextVar
from types import FunctionType
from typing import Any, NoReturn, TypeAlias

import torch
import transformers
from torch.nn import functional
from transformers.activations import ACT2FN

from burst_rt import recurrence
from burst_rt.context import Context
from burst_rt.errors import InputError
from burst_rt.hf.release import unknown_release
from burst_rt.hf.rotary import hook_of
from burst_rt.hf.shard import KEYWORD, ShardInfo
from burst_rt.runtime.refusing import refuse

__all__ = ["spread_mixing"]

Tensor: TypeAlias = torch.Tensor

_NAME = "hf"
_MODELS = "transformers.models."
# Arguments by which models and layers take a cache.
_CACHES = ("cache", "past_key_values", "cache_params")
# The call that runs in this thread.
_running: ContextVar[ShardInfo] = ContextVar("_running")


def _over() -> dict[str, Any]:
    """What every function of `burst_rt.recurrence` is told of the running call."""
    info = _running.get()
    return {"layout": info.batch.layout, "documents": info.begins}


def _convolve(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    known = activation in (None, "silu", "swish")
    out = recurrence.causal_conv1d(
        hidden_states.transpose(1, 2), weight, bias, activation if known else None, **_over()
    )
    assert isinstance(out, torch.Tensor)
    return (out if known else ACT2FN[activation](out)).transpose(1, 2)


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    out = recurrence.gated_delta_rule(
        query, key, value, g, beta, use_qk_l2norm=use_qk_l2norm_in_kernel, **_over()
    )
    assert isinstance(out, torch.Tensor)
    return out.to(query.dtype), None


def _state_space(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **kwargs: Any,
) -> Tensor:
    steps = _steps(dt, dt_bias, dt_softplus).clamp(*dt_limit)
    out = recurrence.state_space(hidden_states.float(), steps, A, B, C, D, **_over())
    assert isinstance(out, torch.Tensor)
    return out.contiguous()


def _selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    use_mambapy: bool = False,
    use_associative_scan: bool = False,
    **kwargs: Any,
) -> Tensor:
    x, dt, B, C = (each.transpose(1, 2) for each in (hidden_states, dt, B, C))
    steps = _steps(dt, delta_bias, delta_softplus)
    out = recurrence.selective_scan(x.float(), steps, A, B, C, D, **_over())
    assert isinstance(out, torch.Tensor)
    out = out.transpose(1, 2)
    return out if z is None else out * functional.silu(z)


def _steps(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return functional.softplus(dt) if softplus else dt


def _mamba2_fused(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    activation: str = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    **kwargs: Any,
) -> None:
    """None, upon which the layer goes on by its other functions; so does `_mamba_fused`."""


def _mamba_fused(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = True,
    b_rms_weight: Tensor | None = None,
    c_rms_weight: Tensor | None = None,
    dt_rms_weight: Tensor | None = None,
    b_c_dt_rms_eps: float = 1e-6,
    **kwargs: Any,
) -> None:
    pass


# What takes the place of a function that layers call by this name, of the same parameters.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolve,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _state_space,
    "mamba2_split_conv1d_scan_combined": _mamba2_fused,
    "mamba_selective_scan": _selective_scan,
    "mamba_inner_fn": _mamba_fused,
}
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


def _lightning(
    layer: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **_: Any
) -> tuple[Tensor, None]:
    """`MiniMaxLightningAttention.forward`."""
    qkv = layer.act_fn(layer.qkv_proj(hidden_states))
    if attention_mask is not None:
        qkv = (qkv * attention_mask[..., None]).to(qkv.dtype)
    qkv = qkv.unflatten(-1, (layer.num_attention_heads, 3 * layer.head_dim))
    q, k, v = qkv.split(layer.head_dim, -1)
    decays = -layer.slope_rate.flatten()
    out = recurrence.linear_attention(q, k, v, decays, scale=1.0, **_over())
    assert isinstance(out, torch.Tensor)
    gate = layer.output_gate(hidden_states).sigmoid()
    return layer.out_proj(gate * layer.norm(out.flatten(2))), None


def _griffin(
    layer: Any, input_states: Tensor, position_ids: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """`RecurrentGemmaRecurrentBlock.forward`, and its scan.

    It would take padding for tokens; here rows begin after it, as documents do.
    """
    over = _over()
    x = layer.linear_x(input_states)
    taps = layer.conv_1d.weight.squeeze(1)
    x = recurrence.causal_conv1d(x, taps, layer.conv_1d.bias, **over)
    # It takes a token at position 0 for the first one.
    begins = over["documents"]
    places = position_ids if begins is None else (~begins).long()
    x = type(layer.rg_lru).forward(_OverRanks(layer.rg_lru), x, places)
    return layer.linear_out(x * layer.act_fn(layer.linear_y(input_states))), None


class _OverRanks:
    """A `RecurrentGemmaRglru` with another scan, that keeps no states."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    @staticmethod
    def _rnn_scan(
        hidden_states: Tensor,
        recurrent_gate: Tensor,
        reset: Tensor,
        recurrent_states: Tensor | None,
    ) -> tuple[Tensor, None]:
        # The gradient of the logarithm of 0 is no number.
        decays = recurrent_gate.float().clamp_min(torch.finfo(torch.float32).tiny).log()
        out = recurrence.linear_recurrence(hidden_states, decays, **_over())
        assert isinstance(out, torch.Tensor)
        return out, None


# Layers that mix inline: their forward here, and what they need to have.
_INLINE: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "MiniMaxLightningAttention": (
        _lightning,
        ("act_fn", "qkv_proj", "head_dim", "slope_rate", "output_gate", "norm", "out_proj"),
    ),
    "RecurrentGemmaRecurrentBlock": (
        _griffin,
        ("linear_x", "conv_1d", "rg_lru", "linear_y", "act_fn", "linear_out"),
    ),
}
# Models and layers that hand on nothing but the padding mask to what is inside, so that the mask
# has to say how the batch is cut. transformers recomputes the forward of a layer, with the arguments
# of the first time, and none of its hooks.
_TELL_BY_MASK = ("MambaModel", "FalconMambaModel", "JambaMambaDecoderLayer")


def spread_mixing(model: torch.nn.Module, ctx: Context) -> bool:
    """Has the layers of a model that mix tokens without attention do so over ranks.

    Returns whether it has any. Local, idempotent. Raises InputError for what such a model does not
    do over ranks, on every rank that waits for this one, and ConfigError for layers of a release of
    transformers that is not known.
    """
    mixing = [layer for layer in model.modules() if _functions_of(layer) or _inline(layer)]
    if not mixing:
        return False
    config = getattr(model, "config", None)
    if getattr(config, "z_loss_coefficient", 0):
        error = InputError(
            f"hf.prepare: {type(model).__name__}: z_loss_coefficient: expected 0, got "
            f"{config.z_loss_coefficient}: this loss would be the mean of one rank's tokens; set "  # type: ignore[union-attr]
            "model.config.z_loss_coefficient = 0 and model.z_loss_coefficient = 0"
        )
        refuse("hf.prepare", error, ctx.runtime)
    if any(isinstance(vars(layer).get("forward"), _Mixing) for layer in mixing):
        return True
    for layer in mixing:
        _check(layer)
        layer.forward = _Mixing(layer)
    call = _Call()
    model.register_forward_pre_hook(call.before_model, with_kwargs=True, prepend=True)
    model.register_forward_hook(call.after_model, always_call=True)
    for part in model.modules():
        if isinstance(part, transformers.PreTrainedModel) or _tells_by_mask(part):
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
    return _INLINE.get(kinds[0].__name__) if kinds else None


def _check(layer: torch.nn.Module) -> None:
    """Raises ConfigError for a layer that mixes tokens otherwise than is known here."""
    kind = type(layer)
    what, inline = f"hf.prepare: {kind.__name__}", _inline(layer)
    if "forward" in vars(layer):
        raise InputError(
            f"{what}: expected the forward of transformers, got another, of "
            f"{type(vars(layer)['forward']).__name__}; call burst_rt.hf.prepare(model, ctx) before "
            "what replaces forwards"
        )
    if inline is not None:
        missing = [name for name in inline[1] if not hasattr(layer, name)]
        if missing:
            raise unknown_release(what, f"attributes {', '.join(missing)}", "none")
        return
    names = _functions_of(layer)
    unknown = [name for name in names if name not in _STEPS and name not in _FUNCTIONS]
    if unknown:
        raise unknown_release(
            what, f"a layer that mixes by {', '.join(_FUNCTIONS)}", f"one that calls {unknown[0]}"
        )
    known: Any = inspect.unwrap(kind.forward)
    for name in set(names) & _FUNCTIONS.keys():
        expected, got = (
            ", ".join(inspect.signature(function).parameters)
            for function in (_FUNCTIONS[name], known.__globals__[name])
        )
        if expected != got:
            raise unknown_release(what, f"{name}({expected})", f"{name}({got})")


class _Mixing:
    """The forward of a layer that mixes tokens: over ranks in a sharded call, else its own."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self._layer = layer

    def __call__(self, *args: Any, **options: Any) -> Any:
        info = options.pop(KEYWORD, getattr(options.get("attention_mask"), KEYWORD, None))
        if info is None:
            return type(self._layer).forward(self._layer, *args, **options)
        if not isinstance(info, ShardInfo):
            _refuse(
                "generating over ranks is not done with layers that keep states; expected a call "
                "without a cache; generate on one process",
                info.ctx,
            )
        return _run(self._layer, info, args, options)


@torch.compiler.disable
def _run(
    layer: torch.nn.Module, info: ShardInfo, args: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    if info.ctx.world_size > 1 and hook_of(layer) not in info.told:
        _refuse(
            "expected a call of the model that was prepared, or of its base model, got one of a "
            f"part of it ({type(layer).__name__}); call model(**burst_rt.hf.shard(batch, ctx))",
            info.ctx,
        )
    info.attended = True
    # A cache that the model has made in this call, for nobody.
    options = {name: None if name in _CACHES else x for name, x in options.items()}
    token = _running.set(info)
    try:
        return _forward_of(type(layer))(layer, *args, **options)
    finally:
        _running.reset(token)


@functools.cache
def _forward_of(kind: type[torch.nn.Module]) -> Callable[..., Any]:
    """The forward of a kind of layers over ranks."""
    for each in kind.__mro__:
        if each.__name__ in _INLINE:
            return _INLINE[each.__name__][0]
    forward: Any = inspect.unwrap(kind.forward)
    ours = FunctionType(
        forward.__code__, {**forward.__globals__, **_FUNCTIONS}, forward.__name__,
        forward.__defaults__, forward.__closure__,
    )  # fmt: skip
    ours.__kwdefaults__ = forward.__kwdefaults__
    return ours


class _Call:
    """What a model's call was told, for those of its parts to which it does not hand that on."""

    def __init__(self) -> None:
        self._info: ShardInfo | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_info": None}

    def before_model(
        self, module: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        info = options.get(KEYWORD)
        self._info = info if isinstance(info, ShardInfo) else None
        names = (*_CACHES, "use_cache")
        given = [name for name in names if options.get(name) not in (None, False)]
        if self._info is not None and given:
            _refuse(
                f"{given[0]}: expected none: generating over ranks is not done with layers that "
                f"keep states, as {type(module).__name__} has; generate on one process",
                self._info.ctx,
            )

    def after_model(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._info = None

    def before_part(
        self, module: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        info = options.get(KEYWORD, self._info)
        if not isinstance(info, ShardInfo):
            return None
        options = {**options, KEYWORD: info}
        if _tells_by_mask(module):
            options["attention_mask"] = _mask_with(info, options.get("attention_mask"))
        return args, options


def _tells_by_mask(module: torch.nn.Module) -> bool:
    return any(kind.__name__ in _TELL_BY_MASK for kind in type(module).__mro__)


def _mask_with(info: ShardInfo, mask: Tensor | None) -> Tensor:
    """A padding mask that says how the batch is cut."""
    layout, batch = info.batch.layout, info.batch
    if mask is None:
        rows = next(iter(batch.tensors.values())).shape[0]
        mask = torch.ones(rows, layout.shard_len, dtype=torch.int64, device=info.ctx.device)
    mask = mask.view_as(mask)
    setattr(mask, KEYWORD, info)
    return mask


def _refuse(reason: str, ctx: Context) -> NoReturn:
    refuse(_NAME, InputError(f"{_NAME}: {reason}"), ctx.runtime)
