"""What layers of transformers call to mix tokens, over ranks, with the arguments that layers give.

Two layers mix inline, and have a forward here. Each goes on for the call under way
(`within_call`), by a function of `burst_rt.recurrence`. Caches of transformers are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.nn import functional
from transformers.activations import ACT2FN

from burst_rt import recurrence
from burst_rt.attention.sharding import ContextLayout
from burst_rt.hf.states import LayerStates
from burst_rt.planning.masks import PrefixTree

__all__ = ["FUNCTIONS", "INLINE", "SHORTCUTS", "MixingCall", "within_call"]

Tensor: TypeAlias = torch.Tensor


class MixingCall(NamedTuple):
    """What runs over ranks: one layer in one call.

    layout, documents: see `burst_rt.recurrence`. states: None where no call goes on from this one.
    """

    layout: ContextLayout | None
    documents: PrefixTree | Tensor | None
    states: LayerStates | None = None


# In this thread.
_layer_call: ContextVar[MixingCall] = ContextVar("_layer_call")


@contextmanager
def within_call(what: MixingCall) -> Iterator[None]:
    """Inside, the functions of this module are of this."""
    token = _layer_call.set(what)
    try:
        yield
    finally:
        _layer_call.reset(token)


def _mixed(
    function: Callable[..., Any], name: str, tokens: dict[str, Tensor], **options: Any
) -> Tensor:
    """The result of a function of `burst_rt.recurrence` for what is running.

    name: of its state. tokens: its tensors of one row for each token. A rank without tokens of a
    step has one that nobody sees.
    """
    layout, documents, states = _layer_call.get()
    given = next(iter(tokens.values())).shape[1]
    count = given if layout is None else layout.shard_len
    tokens = {name: x[:, :count] for name, x in tokens.items()}
    if isinstance(documents, Tensor):
        documents = documents[:, :count]
    options |= {"layout": layout, "documents": documents}
    if states is None:
        out: Tensor = function(**tokens, **options)
        return out
    out, state = function(**tokens, **options, initial_state=states.get(name), return_state=True)
    states.put(name, state)
    return out if given == count else functional.pad(out, (0, 0) * (out.ndim - 2) + (0, given))


def _convolve(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    known = activation in (None, "silu", "swish")
    out = _mixed(
        recurrence.causal_conv1d, "conv", {"x": hidden_states.transpose(1, 2)},
        weight=weight, bias=bias, activation=activation if known else None,
    )  # fmt: skip
    return (out if known else ACT2FN[activation](out)).transpose(1, 2)


def _delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, None]:
    tokens = {"q": query, "k": key, "v": value, "g": g, "beta": beta}
    normalised = options["use_qk_l2norm_in_kernel"]
    out = _mixed(recurrence.gated_delta_rule, "recurrent", tokens, use_qk_l2norm=normalised)
    return out.to(query.dtype), None


def _state_space(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **options: Any
) -> Tensor:
    steps = _steps(dt, options["dt_bias"], options["dt_softplus"]).clamp(*options["dt_limit"])
    tokens = {"x": hidden_states.float(), "dt": steps, "B": B, "C": C}
    out = _mixed(recurrence.state_space, "recurrent", tokens, A=A, D=options["D"])
    return out.contiguous()


def _selective_scan(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **options: Any
) -> Tensor:
    x, dt, B, C = (each.transpose(1, 2) for each in (hidden_states, dt, B, C))
    steps = _steps(dt, options["delta_bias"], options["delta_softplus"])
    tokens = {"x": x.float(), "dt": steps, "B": B, "C": C}
    out = _mixed(recurrence.selective_scan, "recurrent", tokens, A=A, D=options["D"])
    return out.transpose(1, 2) * functional.silu(options["z"])


def _steps(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return functional.softplus(dt) if softplus else dt


def _no_shortcut(*_: Any, **__: Any) -> None:
    """Nothing, upon which a layer goes on by its other functions."""


class Replaced(NamedTuple):
    """A function that layers call: what takes its place, and the parameters that it must have."""

    ours: Callable[..., Any]
    parameters: str


_RULE = (
    "query, key, value, g, beta, chunk_size, initial_state, output_final_state, "
    "use_qk_l2norm_in_kernel, kwargs"
)
# By name.
FUNCTIONS = {
    "causal_conv1d_fn": Replaced(_convolve, "hidden_states, weight, bias, activation, kwargs"),
    "torch_chunk_gated_delta_rule": Replaced(_delta_rule, _RULE),
    "chunk_kimi_delta_attention": Replaced(_delta_rule, _RULE),
    "mamba2_chunk_scan": Replaced(
        _state_space,
        "hidden_states, dt, A, B, C, chunk_size, D, dt_bias, initial_states, dt_softplus, "
        "dt_limit, return_final_states, kwargs",
    ),
    "mamba_selective_scan": Replaced(
        _selective_scan,
        "hidden_states, dt, A, B, C, D, z, delta_bias, delta_softplus, return_last_state, "
        "use_mambapy, use_associative_scan, kwargs",
    ),
}
# What takes the place of functions that do all of a layer at once, or return None, by name.
SHORTCUTS: dict[str, Callable[..., Any]] = {
    "mamba2_split_conv1d_scan_combined": _no_shortcut,
    "mamba_inner_fn": _no_shortcut,
}


def _lightning(
    layer: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **_: Any
) -> tuple[Tensor, None]:
    """`MiniMaxLightningAttention.forward`."""
    qkv = layer.act_fn(layer.qkv_proj(hidden_states))
    if attention_mask is not None:
        qkv = (qkv * attention_mask[..., None]).to(qkv.dtype)
    qkv = qkv.unflatten(-1, (layer.num_attention_heads, 3 * layer.head_dim))
    q, k, v = qkv.split(layer.head_dim, -1)
    tokens, decays = {"q": q, "k": k, "v": v}, -layer.slope_rate.flatten()
    out = _mixed(recurrence.linear_attention, "recurrent", tokens, g=decays, scale=1.0)
    gate = layer.output_gate(hidden_states).sigmoid()
    return layer.out_proj(gate * layer.norm(out.flatten(2))), None


def _griffin(
    layer: Any, input_states: Tensor, position_ids: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """`RecurrentGemmaRecurrentBlock.forward`, and its scan.

    It would take padding for tokens; here rows begin after it, as documents do.
    """
    x, conv = layer.linear_x(input_states), layer.conv_1d
    taps = conv.weight.squeeze(1)
    x = _mixed(recurrence.causal_conv1d, "conv", {"x": x}, weight=taps, bias=conv.bias)
    # It takes a token at position 0 for the first one.
    begins = _layer_call.get().documents  # a tree's tokens are at the positions of their paths
    places = (~begins).long() if isinstance(begins, Tensor) else position_ids
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
        tokens = {"x": hidden_states, "log_a": decays}
        return _mixed(recurrence.linear_recurrence, "recurrent", tokens), None


# Layers that mix inline: their forward here, and what they need to have.
INLINE: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "MiniMaxLightningAttention": (
        _lightning,
        ("act_fn", "qkv_proj", "head_dim", "slope_rate", "output_gate", "norm", "out_proj"),
    ),
    "RecurrentGemmaRecurrentBlock": (
        _griffin,
        ("linear_x", "conv_1d", "rg_lru", "linear_y", "act_fn", "linear_out"),
    ),
}
