"""What a user calls: `burst_attention`, the module `BurstAttention`, and `explain`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NoReturn, Unpack, overload

import torch
from torch.autograd import forward_ad

from burst_rt.attention.autograd import BurstAttentionFunction, arguments_of, forward_op
from burst_rt.attention.call import call_of, needs_of
from burst_rt.attention.dtensors import any_dtensor, over_mesh
from burst_rt.attention.options import OptionArguments, Options, check_types
from burst_rt.attention.planner import Plan
from burst_rt.attention.sharding import ContextLayout
from burst_rt.errors import BurstError, ConfigError, InputError
from burst_rt.kernels import QKV
from burst_rt.planning.evenness import evenness_in_words
from burst_rt.planning.masks import Mask
from burst_rt.runtime.refusing import refuse

__all__ = ["BurstAttention", "Explanation", "burst_attention", "explain"]


@overload
def burst_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: ContextLayout,
    return_lse: Literal[False] = False,
    **options: Unpack[OptionArguments],
) -> torch.Tensor: ...
@overload
def burst_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: ContextLayout,
    return_lse: Literal[True],
    **options: Unpack[OptionArguments],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def burst_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: ContextLayout,
    return_lse: bool,
    **options: Unpack[OptionArguments],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
def burst_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: ContextLayout,
    kv_layout: ContextLayout | None = None,
    mask: Mask | None = None,
    causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    strategy: str = "auto",
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact softmax attention over a sequence that is spread over the ranks of a context.

    Collective: every rank makes the same call. Blocks until this rank's part is done, within the
    deadlines of `init`; with NCCL, until all of its work is on streams. Differentiable. Source:
    BurstAttention, arXiv 2403.09347.

    q: this rank's queries `[batch, tokens, heads, head_dim]` in `layout`'s order; float64, float32,
        bfloat16 or float16. Strided views are fine. GPUs have kernels for a head_dim of 16 to 256
        and not for float64; with `init(kernel="untiled")` they take all, slowly.
    k, v: this rank's keys and values `[batch, tokens, kv_heads, head_dim]` in `kv_layout`'s order;
        same dtype as q. heads must be a multiple of kv_heads: query head h uses kv head
        h // (heads / kv_heads). v may have a head_dim of its own, as in MLA.
        q, k and v may be DTensors, whose tokens are sharded (`Shard(1)`) over one mesh axis, that
        of the context, and batch and heads over others. out and lse are then DTensors alike.
    layout, kv_layout: which tokens each rank holds. kv_layout is needed only where k and v differ
        from q in length or kind.
    mask: which query sees which key; the default is that every query sees every key. With Sq != Skv
        the last query is at the position of the last key: causally, query i sees keys
        j <= i + Skv - Sq.
    causal: True is short for mask=Causal().
    scale: the factor of the scores; the default is 1 / sqrt(head_dim).
    softcap: a number c above 0: a scaled score s becomes c * tanh(s / c), before anything else.
    alibi_slopes: `[heads]` or `[batch, heads]`, any float dtype: slope * |i + Skv - Sq - j| is
        taken from the score of query i and key j (ALiBi, arXiv 2108.12409, as flash-attn does).
        Computed in lse's dtype; they must not require grad.
    sinks: `[heads]`, any float dtype: the score of one more key of each head, which every query
        sees and whose value is 0, as gpt-oss has them. Neither scaled nor capped. lse counts it:
        a query that sees no key has lse = sink. Differentiable: the gradient is this rank's
        share, as for any parameter that all ranks hold, and `average_gradients`, DDP or FSDP2
        combines the shares. Slopes and sinks must hold the same values on every rank.
    dropout_p: 0. Dropout is refused: attention is exact here.
    strategy: "ring-kv", "burst", "ring-q", "bidirectional", "two-level[:N]", "direct",
        "all-to-all", "hybrid[:N]", "sliced[:N]" (see `planning.strategies`), or "auto". Where
        the machine is known (measured by `init` or `burst-rt calibrate`, named by BURST_RT_HARDWARE
        or by its GPU), "auto" takes the strategy with the fastest forecast, but never "sliced" (up
        to 16 ranks: the one with the fewest bytes of those within 2 % of it); above 256 ranks
        only where all hops take the same time. Elsewhere "auto" takes "ring-kv",
        "burst", "direct" or, for few queries and many keys, "ring-q", whichever sends the fewest
        bytes. `explain` tells the choice.
    return_lse: whether lse is returned too.

    Returns out, contiguous, `[batch, tokens, heads, v's head_dim]` in q's dtype; with return_lse
    (out, lse). lse is `[batch, heads, tokens]`, natural log, float64 for float64 inputs and float32
    otherwise, and differentiable. A query that sees no key, and no sink, gets out 0, lse -inf and
    zero gradients.

    Autocast changes nothing: inputs keep the dtype that they come in. torch.compile takes
    the call as one opaque op. Before torch 2.13 torch.compile cannot do so: the call is a graph
    break, and fullgraph=True fails.

    Raises InputError or ContractMismatch on every rank alike, before anything is sent; PeerLost
    when a rank is gone, and Stalled when nothing moves.
    """
    options = Options(
        layout, kv_layout, mask, causal, scale, softcap, dropout_p, strategy, return_lse,
        alibi_slopes, sinks,
    )  # fmt: skip
    if not (type(q) is torch.Tensor is type(k) is type(v)) and any_dtensor(q, k, v):
        return over_mesh(burst_attention, QKV(q, k, v), options)  # type: ignore[no-any-return]
    if torch.compiler.is_compiling():
        if forward_ad._current_level >= 0:  # the op would drop tangents, which nobody sees here
            raise InputError(f"burst_attention: {_NO_TANGENTS}")
        # The call becomes one opaque op, and the op checks the arguments when it runs.
        check_types(options)
        arguments = arguments_of(options.resolved(), needs_of(q, k, v, sinks))
        out, lse, _ = forward_op(q, k, v, *arguments, alibi_slopes, sinks)
        return (out, lse) if return_lse else out
    try:
        if torch._C._are_functorch_transforms_active():
            raise InputError(
                "burst_attention: torch.func's transforms (grad, vmap, jvp) are not supported; use "
                "loss.backward()"
            )
        call = call_of(QKV(q, k, v), options)
        if forward_ad._current_level >= 0:
            _check_no_tangents(q, k, v, sinks, alibi_slopes)
        call.attention.runtime.check_open()
    except (InputError, ConfigError) as error:
        _refuse(error, layout, kv_layout)
    out, lse = BurstAttentionFunction.apply(  # type: ignore[no-untyped-call]
        q, k, v, call, alibi_slopes, sinks
    )
    return (out, lse) if return_lse else out


if torch.__version__ < "2.13":
    # Before 2.13 the compiler accepts neither a layout nor a mask as an input. So the call runs
    # eagerly, between compiled parts.
    burst_attention = torch.compiler.disable(burst_attention)


_NO_TANGENTS = "forward-mode differentiation is not supported; use loss.backward()"


def _check_no_tangents(*tensors: torch.Tensor | None) -> None:
    """Raises InputError for a tensor that forward-mode differentiation carries a tangent with."""
    for name, x in zip(("q", "k", "v", "sinks", "alibi_slopes"), tensors, strict=True):
        if isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise InputError(f"burst_attention: {name} has a tangent, and {_NO_TANGENTS}")


def _refuse(error: BurstError, *layouts: object) -> NoReturn:
    """Raises the error on every rank that waits for this rank's call; blocks as `refuse` does."""
    runtimes = (layout.runtime for layout in layouts if isinstance(layout, ContextLayout))
    refuse("burst_attention", error, next(runtimes, None))


@dataclass(frozen=True)
class Explanation:
    """The plans of a call, made without running it.

    `str()` puts them into words, and says how even the layout is and what others would be.
    """

    forward: Plan
    backward: Plan | None  # None where no input needs a gradient

    def __str__(self) -> str:
        plans = [plan for plan in (self.forward, self.backward) if plan is not None]
        even = evenness_in_words([plan.choice.program for plan in plans])
        return "\n".join([*(plan.explain() for plan in plans), even])


def explain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: ContextLayout,
    return_lse: bool = False,
    **options: Unpack[OptionArguments],
) -> Explanation:
    """The plans that `burst_attention` would run with these arguments.

    A plan tells strategy, bytes, kernel and memory. Local: nothing is sent, and no other rank is
    waited for; blocks while several kernels are timed, once for each chip. Raises InputError.
    """
    qkv, given = QKV(q, k, v), Options(layout=layout, return_lse=return_lse, **options)
    if any_dtensor(*qkv):
        qkv = QKV(*(x.to_local() if any_dtensor(x) else x for x in qkv))  # type: ignore[attr-defined]
    call = call_of(qkv, given)
    return Explanation(
        forward=call.forward_plan, backward=call.backward_plan if any(call.needs) else None
    )


class BurstAttention(torch.nn.Module):
    """`burst_attention` with fixed options, as a module without parameters.

    The module is called with q, k and v, and with a layout where lengths vary. Tensors cannot be
    options: alibi_slopes and sinks come with the call, and belong to the enclosing module.
    """

    def __init__(
        self,
        layout: ContextLayout | None = None,
        *,
        mask: Mask | None = None,
        causal: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
        strategy: str = "auto",
    ) -> None:
        """Takes the options of `burst_attention`; layout may come with each call instead."""
        super().__init__()
        self.layout = layout
        self.mask = mask
        self.causal = causal
        self.scale = scale
        self.softcap = softcap
        self.strategy = strategy

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: ContextLayout | None = None,
        kv_layout: ContextLayout | None = None,
        *,
        alibi_slopes: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention's output. Collective; blocks as `burst_attention` does.

        `layout` overrides the module's layout.
        """
        chosen = self.layout if layout is None else layout
        if chosen is None:
            _refuse(
                InputError(
                    "BurstAttention: layout is missing; give it to the module or to the call"
                ),
                kv_layout,
            )
        return burst_attention(
            q, k, v, layout=chosen, kv_layout=kv_layout, mask=self.mask, causal=self.causal,
            scale=self.scale, softcap=self.softcap, alibi_slopes=alibi_slopes, sinks=sinks,
            strategy=self.strategy,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """The options, as `print(module)` shows them."""
        return (
            f"mask={self.mask or ('causal' if self.causal else 'full')}, strategy={self.strategy}"
        )
