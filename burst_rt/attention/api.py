"""What a user calls: `burst_attention`, the module `BurstAttention`, and `explain`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NoReturn, Unpack, overload

import torch

from burst_rt.attention.autograd import BurstAttentionFunction, forward_op, terms_of
from burst_rt.attention.call import CAUSAL, FULL, Options, make_call, needs_of
from burst_rt.attention.planner import Plan
from burst_rt.attention.sharding import ContextLayout
from burst_rt.errors import BurstError, ConfigError, InputError
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
    kv_layout: ContextLayout | None = None,
    mask: Mask | None = None,
    causal: bool = False,
    scale: float | None = None,
    strategy: str = "auto",
    return_lse: Literal[False] = False,
) -> torch.Tensor: ...
@overload
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
    strategy: str = "auto",
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
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
    strategy: str = "auto",
    return_lse: bool,
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
    strategy: str = "auto",
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact softmax attention over a sequence spread over the ranks of a context (BurstAttention,
    arXiv 2403.09347). Differentiable.

    q: this rank's queries `[batch, tokens, heads, head_dim]`, float64, float32, bfloat16 or
    float16, in `layout`'s order. k, v: `[batch, tokens, kv_heads, head_dim]`, same dtype, in
    `kv_layout`'s order; heads must be a multiple of kv_heads (query head h uses kv head h // (heads
    / kv_heads)). Strided views are fine. Autocast changes nothing here: what is computed in 16 bits
    is what comes in 16 bits.

    mask: which query sees which key (default all); causal=True is short for mask=Causal(). With Sq
    != Skv the last query stands at the last key: query i sees keys j <= i + Skv - Sq. kv_layout:
    where k and v differ from q in length or kind. scale: of the scores, default 1 / sqrt(head_dim).
    strategy: "ring-kv", "burst", "bidirectional", "two-level[:N]", "all-to-all", "hybrid[:N]" (see
    `attention.strategies`), or "auto": what is forecast to be fastest where `burst-rt calibrate`
    has measured the machine (up to 32 ranks), else "ring-kv" or "burst", the fewer bytes; see
    `explain`. return_lse: also return lse.

    Returns out, like q, contiguous; and lse `[batch, heads, tokens]` (natural log; float64 for
    float64 inputs, else float32), differentiable. A query that sees no key gets out 0, lse -inf and
    zero gradients. torch.compile takes a call for one opaque op; before torch 2.13, where it
    cannot, it compiles what is around it (so not with fullgraph=True).

    Collective: every rank makes the same call; blocks until this rank's part is done. Raises
    InputError or ContractMismatch on every rank alike, before anything is sent; PeerLost or Stalled
    when a rank is gone or nothing moves (deadlines: `init`).
    """
    if torch.compiler.is_compiling():
        # One opaque op, which checks all of this when it runs.
        _check_types(layout, kv_layout, mask)
        chosen = mask if mask is not None else CAUSAL if causal else FULL
        terms = terms_of(
            layout, kv_layout or layout, chosen, scale, strategy, return_lse, needs_of(q, k, v)
        )
        out, lse = forward_op(q, k, v, *terms)
        return (out, lse) if return_lse else out
    try:
        if torch._C._are_functorch_transforms_active():
            raise InputError(
                "burst_attention: torch.func's transforms (grad, vmap, jvp) are not supported; use "
                "loss.backward()"
            )
        call = make_call(
            q, k, v, layout=layout, kv_layout=kv_layout, mask=mask, causal=causal, scale=scale,
            strategy=strategy, return_lse=return_lse,
        )  # fmt: skip
        call.setup.runtime.check_open()
    except (InputError, ConfigError) as error:
        _refuse(error, layout, kv_layout)
    out, lse = BurstAttentionFunction.apply(q, k, v, call)  # type: ignore[no-untyped-call]
    return (out, lse) if return_lse else out


if torch.__version__ < "2.13":
    # There the compiler takes no layout and no mask for an input: the call runs as it is, between
    # compiled parts.
    burst_attention = torch.compiler.disable(burst_attention)


def _check_types(layout: object, kv_layout: object, mask: object) -> None:
    """For the compiler, which reads numbers of these. Raises InputError."""
    for name, given in (("layout", layout), ("kv_layout", kv_layout)):
        if not isinstance(given, ContextLayout) and (name == "layout" or given is not None):
            raise InputError(
                f"burst_attention: {name} must come from ctx.layout(...), got "
                f"{type(given).__name__}"
            )
    if mask is not None and not isinstance(mask, Mask):
        raise InputError(
            "burst_attention: mask must be a burst_rt.Mask such as burst_rt.Causal(), got "
            f"{type(mask).__name__}"
        )


def _refuse(error: BurstError, *layouts: object) -> NoReturn:
    """Raises the error on every rank that waits for this rank's call."""
    meant = next((each.runtime for each in layouts if isinstance(each, ContextLayout)), None)
    refuse("burst_attention", error, meant)


@dataclass(frozen=True)
class Explanation:
    """What would be done for a call, and why. `backward` is None where nothing needs a gradient.
    `str()` says it in words.
    """

    forward: Plan
    backward: Plan | None

    def __str__(self) -> str:
        return "\n".join(
            plan.explain() for plan in (self.forward, self.backward) if plan is not None
        )


def explain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Unpack[Options]
) -> Explanation:
    """The plans `burst_attention` would run with these arguments: strategy, bytes, kernel, memory.
    Local: nothing is sent. Raises InputError.
    """
    call = make_call(q, k, v, **options)
    return Explanation(
        forward=call.forward_plan, backward=call.backward_plan if any(call.needs_grad) else None
    )


class BurstAttention(torch.nn.Module):
    """`burst_attention` as a module without parameters: fixed options, called with q, k, v (and a
    layout, where lengths vary).
    """

    def __init__(
        self,
        layout: ContextLayout | None = None,
        *,
        mask: Mask | None = None,
        causal: bool = False,
        scale: float | None = None,
        strategy: str = "auto",
    ) -> None:
        super().__init__()
        self.layout = layout
        self.mask = mask
        self.causal = causal
        self.scale = scale
        self.strategy = strategy

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: ContextLayout | None = None,
        kv_layout: ContextLayout | None = None,
    ) -> torch.Tensor:
        """out, like q. See `burst_attention`; `layout` overrides the module's."""
        chosen = layout or self.layout
        if chosen is None:
            _refuse(
                InputError("BurstAttention: no layout; give one to the module or to the call"),
                kv_layout,
            )
        return burst_attention(
            q, k, v, layout=chosen, kv_layout=kv_layout, mask=self.mask, causal=self.causal,
            scale=self.scale, strategy=self.strategy,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """For print(module)."""
        return (
            f"mask={self.mask or ('causal' if self.causal else 'full')}, strategy={self.strategy}"
        )
