"""What a user calls: recurrences over a sequence that is spread over ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, NoReturn, ParamSpec, TypeAlias

import torch

from burst_rt.arguments import wrong_kind
from burst_rt.attention.sharding import ContextLayout
from burst_rt.drivers import Progress
from burst_rt.errors import BurstError, InputError
from burst_rt.planning.masks import Documents, PrefixTree
from burst_rt.planning.segments import check_runs
from burst_rt.recurrence.base import Recurrence
from burst_rt.recurrence.call import Bound, RecurrenceCall
from burst_rt.recurrence.checks import Given, begins_of, check_heads, check_sizes, scale_of
from burst_rt.recurrence.convolution import Convolution
from burst_rt.recurrence.elements import LinearRecurrence, SelectiveScan
from burst_rt.recurrence.matrix import DeltaRule, LinearAttention
from burst_rt.recurrence.run import RecurrenceFunction, run_alone
from burst_rt.runtime.refusing import refuse

__all__ = [
    "causal_conv1d",
    "gated_delta_rule",
    "linear_attention",
    "linear_recurrence",
    "selective_scan",
    "state_space",
]

Tensor = torch.Tensor
_P = ParamSpec("_P")
# out; with return_state (out, state).
_Result: TypeAlias = Any


class _Bound(NamedTuple):
    """A checked call with its tensors. after: makes the user's results of out and the state."""

    recurrence: Recurrence
    call: RecurrenceCall | None  # None: without a layout, and local
    begins: Tensor | None
    given: Given
    tokens: tuple[Tensor, ...]
    shared: tuple[Tensor, ...]
    after: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]] = lambda *both: both


def _collective(bind: Callable[_P, _Bound]) -> Callable[_P, _Result]:
    """The function that binds a call, and runs it; what `bind` finds wrong, every rank raises."""

    def run(*args: _P.args, **kwargs: _P.kwargs) -> _Result:
        try:
            error = wrong_kind(bind, args, kwargs)
            if error is not None:
                raise error
            bound = bind(*args, **kwargs)
        except InputError as error:
            _refuse(bind.__name__, error, kwargs.get("layout"))
        given, tokens, shared = bound.given, bound.tokens, bound.shared
        results: tuple[Tensor, Tensor | None]
        if bound.call is None:
            alone = Bound(tokens, shared, bound.begins, Progress())
            out, last = run_alone(bound.recurrence, alone, given.initial_state)
            results = out, last if given.return_state else None
        else:
            results = RecurrenceFunction.apply(  # type: ignore[no-untyped-call]
                bound.call, bound.begins, given.initial_state, len(tokens), *tokens, *shared
            )
        out, state = bound.after(*results)
        return out if state is None else (out, state)

    # Compiled programs are cut there; else the compiler would trace the runtime.
    cut: Callable[_P, _Result] = torch.compiler.disable(run)
    return wraps(bind)(cut)


@_collective
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    layout: ContextLayout | None,
    documents: Documents | PrefixTree | Tensor | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
) -> _Bound:
    """A causal convolution of each channel over the K tokens up to each token, over ranks.

    x: this rank's tokens `[batch, tokens, channels]`. weight: `[channels, K]`, K at least 2. bias:
        `[channels]`. activation: None, "silu" or "swish" (the same). As causal-conv1d has them.
    State: `[batch, channels, K - 1]`, the tokens before; 0 where they are of another document.

    Returns `[batch, tokens, channels]` in x's dtype. Collective; the rest is as in
    `gated_delta_rule`.
    """
    name = "causal_conv1d"
    if activation not in (None, "silu", "swish"):
        raise InputError(f"{name}: activation must be None, 'silu' or 'swish', got {activation!r}")
    sizes = check_sizes(name, layout, {"x": (x, "b t c"), "weight": (weight, "c k")})
    if bias is not None:
        check_sizes(name, layout, {"bias": (bias, "c")}, sizes)
    taps = sizes["k"]
    if taps < 2:
        raise InputError(f"{name}: weight must be [channels, K], K at least 2, got K = {taps}")
    if initial_state is not None:
        known = sizes | {"m": taps - 1}
        check_sizes(name, layout, {"initial_state": (initial_state, "b c m")}, known)
        initial_state = initial_state.transpose(1, 2)
    shared = (weight,) if bias is None else (weight, bias)
    given = Given(layout, documents, initial_state, return_state)
    bound = _bound(Convolution(taps, activation is not None), (x,), shared, given)
    return bound._replace(
        after=lambda out, state: (out, None if state is None else state.transpose(1, 2))
    )


@_collective
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    layout: ContextLayout | None,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
    documents: Documents | PrefixTree | Tensor | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
) -> _Bound:
    """The gated delta rule over a sequence that is spread over the ranks of a context, exactly.

    For each head, with the state S `[K, V]`: S <- exp(g) S, then S <- S + beta k (v - S^T k)^T,
    then out = scale S^T q. Sources: arXiv 2412.06464 (g for each head), 2510.26692 (Kimi delta
    attention: g for each key channel).

    Collective: every rank makes the same call. Blocks until this rank's part is done, within the
    deadlines of `init`. Differentiable in every tensor, the initial state included; deterministic.

    q, k: this rank's tokens `[batch, tokens, key heads, K]` in `layout`'s order. v: `[batch,
        tokens, heads, V]`; heads is a multiple of the key heads, each of which serves as many
        heads in a row. float64, float32, bfloat16 or float16.
    g: logarithms of decays, at most 0: `[batch, tokens, heads]` or `[batch, tokens, heads, K]`.
    beta: `[batch, tokens, heads]`.
    layout: "zigzag", "contiguous", "balanced" or "whole": runs of consecutive tokens. None: this
        rank has all tokens, as where every rank decodes the same ones; such a call is local, never
        blocks, and has no gradients.
    scale: of the result; the default is 1 / sqrt(K).
    use_qk_l2norm: whether q and k are divided by their lengths first.
    documents: the sequence's `Documents`, or a bool tensor `[batch or 1, tokens]` that is true
        where a token of this rank begins a document. The state is 0 there. Or the `PrefixTree` of
        the row: a token's state is that of its path. A tree has many last states, so it is taken
        without initial_state and return_state, and with a layout.
    initial_state: `[batch, heads, K, V]`, the same on every rank; its gradient is this rank's
        share, as for any parameter that all ranks hold. None: 0.
    return_state: whether the state after the last token is returned too, on every rank.

    Sums and states are float32, float64 for float64 inputs. Returns out `[batch, tokens, heads, V]`
    in v's dtype; with return_state (out, state). Raises InputError or ContractMismatch on every
    rank alike, before anything is sent; PeerLost and Stalled.
    """
    name = "gated_delta_rule"
    by_channel = isinstance(g, Tensor) and g.ndim == 4
    tensors = {
        "v": (v, "b t h v"), "q": (q, "b t q k"), "k": (k, "b t q k"), "beta": (beta, "b t h"),
        "g": (g, "b t h k" if by_channel else "b t h"),
    }  # fmt: skip
    sizes = check_sizes(name, layout, tensors)
    check_heads(name, sizes)
    if initial_state is not None:
        check_sizes(name, layout, {"initial_state": (initial_state, "b h k v")}, sizes)
    rule = DeltaRule(
        # Decays by channel take `size` times the memory of the keys.
        size=16 if by_channel else 64,
        scale=scale_of(name, scale, sizes["k"]),
        normalised=bool(use_qk_l2norm),
    )
    given = Given(layout, documents, initial_state, return_state)
    return _bound(rule, (q, k, v, g, beta), (), given)


@_collective
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    layout: ContextLayout | None,
    scale: float | None = None,
    documents: Documents | PrefixTree | Tensor | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
) -> _Bound:
    """Decayed linear attention over ranks: S <- exp(g) S + k v^T, out = scale S^T q.

    Lightning attention and RetNet give one decay for each head, gated linear attention one for each
    token too. Source: arXiv 2401.04658, 2307.08621.

    q, k, v, scale: as `gated_delta_rule` takes them. g: `[batch, tokens, heads]`, or `[heads]`.
    State: `[batch, heads, K, V]`. Collective; see `gated_delta_rule` for the rest.
    """
    name = "linear_attention"
    by_head = isinstance(g, Tensor) and g.ndim == 1
    tensors = {
        "v": (v, "b t h v"), "q": (q, "b t q k"), "k": (k, "b t q k"),
        "g": (g, "h" if by_head else "b t h"),
    }  # fmt: skip
    sizes = check_sizes(name, layout, tensors)
    check_heads(name, sizes)
    if initial_state is not None:
        check_sizes(name, layout, {"initial_state": (initial_state, "b h k v")}, sizes)
    given = Given(layout, documents, initial_state, return_state)
    tokens = (q, k, v, g.expand(v.shape[:3]) if by_head else g)
    return _bound(LinearAttention(scale=scale_of(name, scale, sizes["k"])), tokens, (), given)


@_collective
def state_space(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    layout: ContextLayout | None,
    documents: Documents | PrefixTree | Tensor | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
) -> _Bound:
    """Mamba-2's state space over ranks: S <- exp(dt A) S + dt x B^T, out = S C + D x.

    Source: arXiv 2405.21060. It is linear attention: C queries, B keys, dt x values.

    x: this rank's tokens `[batch, tokens, heads, P]`. dt: `[batch, tokens, heads]`, steps above 0
        (after bias and softplus). A: `[heads]`, below 0. B, C: `[batch, tokens, groups, N]`; heads
        is a multiple of groups. D: `[heads]` or `[heads, P]`.
    State: `[batch, heads, P, N]`, as mamba-ssm has it.

    Returns `[batch, tokens, heads, P]` in x's dtype. Collective; the rest is as in
    `gated_delta_rule`.
    """
    name = "state_space"
    tensors = {
        "x": (x, "b t h v"), "dt": (dt, "b t h"), "A": (A, "h"), "B": (B, "b t q k"),
        "C": (C, "b t q k"),
    }  # fmt: skip
    sizes = check_sizes(name, layout, tensors)
    check_heads(name, sizes)
    if initial_state is not None:
        check_sizes(name, layout, {"initial_state": (initial_state, "b h v k")}, sizes)
        initial_state = initial_state.transpose(2, 3)
    if D is not None:
        shape = "h v" if isinstance(D, Tensor) and D.ndim == 2 else "h"
        check_sizes(name, layout, {"D": (D, shape)}, sizes)
    wide = torch.promote_types(x.dtype, torch.float32)
    steps = dt.to(wide)
    tokens = (C, B, x.to(wide) * steps[..., None], steps * A.to(wide))

    def after(out: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if D is not None:
            out = out + x.to(wide) * (D if D.ndim == 2 else D[:, None])
        return out.to(x.dtype), None if state is None else state.transpose(2, 3)

    given = Given(layout, documents, initial_state, return_state)
    bound = _bound(LinearAttention(name="state_space"), tokens, (), given, x.dtype)
    return bound._replace(after=after)


@_collective
def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    layout: ContextLayout | None,
    documents: Documents | PrefixTree | Tensor | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
) -> _Bound:
    """Mamba-1's selective scan over ranks: S <- exp(dt A) S + dt x B, out = S C + D x.

    Source: arXiv 2312.00752.

    x: this rank's tokens `[batch, tokens, channels]`. dt: the same shape, steps above 0 (after bias
        and softplus). A: `[channels, N]`, below 0. B, C: `[batch, tokens, N]`. D: `[channels]`.
    State: `[batch, channels, N]`.

    Returns `[batch, tokens, channels]` in x's dtype. Collective; the rest is as in
    `gated_delta_rule`.
    """
    name = "selective_scan"
    tensors = {
        "x": (x, "b t d"), "dt": (dt, "b t d"), "A": (A, "d n"), "B": (B, "b t n"),
        "C": (C, "b t n"),
    }  # fmt: skip
    sizes = check_sizes(name, layout, tensors)
    if initial_state is not None:
        check_sizes(name, layout, {"initial_state": (initial_state, "b d n")}, sizes)
    if D is not None:
        check_sizes(name, layout, {"D": (D, "d")}, sizes)
    given = Given(layout, documents, initial_state, return_state)
    bound = _bound(SelectiveScan(), (x, dt, B, C), (A,), given)
    if D is None:
        return bound
    return bound._replace(after=lambda out, state: ((out + x * D).to(x.dtype), state))


@_collective
def linear_recurrence(
    x: Tensor,
    log_a: Tensor,
    *,
    layout: ContextLayout | None,
    documents: Documents | PrefixTree | Tensor | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
) -> _Bound:
    """A recurrence of each channel by itself over ranks: S <- exp(log_a) S + x, out = S.

    The recurrence inside RG-LRU (arXiv 2402.19427).

    x, log_a: this rank's tokens `[batch, tokens, channels]`. State: `[batch, channels]`.

    Returns `[batch, tokens, channels]` in x's dtype. Collective; the rest is as in
    `gated_delta_rule`.
    """
    name = "linear_recurrence"
    sizes = check_sizes(name, layout, {"x": (x, "b t d"), "log_a": (log_a, "b t d")})
    if initial_state is not None:
        check_sizes(name, layout, {"initial_state": (initial_state, "b d")}, sizes)
        initial_state = initial_state[..., None]
    given = Given(layout, documents, initial_state, return_state)
    bound = _bound(LinearRecurrence(), (x, log_a), (), given)
    return bound._replace(after=lambda out, state: (out, None if state is None else state[..., 0]))


def _bound(
    recurrence: Recurrence, tokens: tuple[Tensor, ...], shared: tuple[Tensor, ...], given: Given,
    dtype: torch.dtype | None = None,
) -> _Bound:  # fmt: skip
    """The checked call with its tensors. Local. Raises InputError.

    dtype: of what the user gets, where `after` changes the type.
    """
    layout, documents, initial, returns_state = given
    begins = begins_of(recurrence.name, given, tokens[0])
    wants = torch.is_grad_enabled()
    needs = tuple(wants and x is not None and x.requires_grad for x in (*tokens, *shared, initial))
    if layout is None:
        if any(needs):
            raise InputError(
                f"{recurrence.name}: layout: expected one where tensors need gradients, got None; "
                "call it under torch.no_grad(), or with Context.layout(tokens)"
            )
        return _Bound(recurrence, None, begins, given, tokens, shared)
    layout.runtime.check_open()
    check_runs(layout.map)
    said = "a tensor" if isinstance(documents, Tensor) else repr(documents)
    call = RecurrenceCall(
        recurrence=recurrence,
        layout=layout,
        batch=tokens[0].shape[0],
        dtype=recurrence.out_like(tokens).dtype,
        given_dtype=dtype or recurrence.out_like(tokens).dtype,
        state_shape=recurrence.state_shape(tokens, shared),
        flops=recurrence.flops(tokens, shared),
        tokens=tuple((tuple(x.shape[2:]), x.dtype) for x in tokens),
        shared=tuple((tuple(x.shape), x.dtype) for x in shared),
        documents="none" if documents is None else said,
        tree=documents if isinstance(documents, PrefixTree) else None,
        needs=needs,
        has_initial_state=initial is not None,
        returns_state=bool(returns_state),
    )
    return _Bound(recurrence, call, begins, given, tokens, shared)


def _refuse(name: str, error: BurstError, layout: object) -> NoReturn:
    """Raises the error on every rank that waits for this rank's call; blocks as `refuse` does."""
    refuse(name, error, layout.runtime if isinstance(layout, ContextLayout) else None)
