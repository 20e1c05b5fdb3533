"""What a user calls: `burst_attention`, the module `BurstAttention`, and `explain`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import torch

from burst_rt.attention.autograd import BurstAttentionFunction, handle_of, held_handle
from burst_rt.attention.planner import Plan
from burst_rt.attention.sharding import ContextLayout
from burst_rt.context import refuse
from burst_rt.contract import CallSpec, check_call, check_spec
from burst_rt.errors import BurstError, ConfigError, InputError
from burst_rt.planning.masks import Causal, Full, Mask

__all__ = ["BurstAttention", "Explanation", "burst_attention", "call_spec", "explain"]


def burst_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: Mask | None = None,
    causal: bool = False,
    layout: ContextLayout,
    kv_layout: ContextLayout | None = None,
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
        # One opaque op, which checks the tensors itself when it runs.
        handle = _constant_handle(
            mask, causal, layout, kv_layout, scale, strategy, return_lse, *_needs_grad(q, k, v)
        )
        out, lse = torch.ops.burst_rt.attention_forward(q, k, v, handle)
        return (out, lse) if return_lse else out
    try:
        if torch._C._are_functorch_transforms_active():
            raise InputError(
                "burst_attention: torch.func's transforms (grad, vmap, jvp) are not supported; use "
                "loss.backward()"
            )
        spec = _make_spec(
            mask, causal, layout, kv_layout, scale, strategy, return_lse, _needs_grad(q, k, v)
        )
        # Before torch sees them: a tensor of another device would take another way. Values are
        # looked at once, by the op.
        check_call(spec, q, k, v, values=False)
        spec.layout.context.check_open()
    except (InputError, ConfigError) as error:
        _refuse(error, layout, kv_layout)
    spec, handle = held_handle(spec)
    out, lse = BurstAttentionFunction.apply(q, k, v, handle)  # type: ignore[no-untyped-call]
    return (out, lse) if return_lse else out


if torch.__version__ < "2.13":
    # There the compiler takes no layout and no mask for a constant: the call runs as it is, between
    # compiled parts.
    burst_attention = torch.compiler.disable(burst_attention)


def call_spec(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: Mask | None = None,
    causal: bool = False,
    layout: ContextLayout,
    kv_layout: ContextLayout | None = None,
    scale: float | None = None,
    strategy: str = "auto",
    return_lse: bool = False,
) -> CallSpec:
    """The arguments of `burst_attention` as one checked, immutable spec. Local. Raises
    InputError.
    """
    return _make_spec(
        mask, causal, layout, kv_layout, scale, strategy, return_lse, _needs_grad(q, k, v)
    )


def _make_spec(
    mask: Mask | None,
    causal: bool,
    layout: ContextLayout,
    kv_layout: ContextLayout | None,
    scale: float | None,
    strategy: str,
    return_lse: bool,
    needs_grad: tuple[bool, bool, bool],
) -> CallSpec:
    if not isinstance(layout, ContextLayout):
        raise InputError(
            f"burst_attention: layout must come from ctx.layout(...), got {type(layout).__name__}"
        )
    if kv_layout is not None and not isinstance(kv_layout, ContextLayout):
        raise InputError(
            "burst_attention: kv_layout must come from ctx.layout(...), got "
            f"{type(kv_layout).__name__}"
        )
    if not isinstance(causal, bool):
        raise InputError(f"burst_attention: causal must be True or False, got {causal!r}")
    if causal and mask is not None:
        raise InputError(
            "burst_attention: give mask or causal=True, not both; Causal() & mask combines them"
        )
    chosen = mask if mask is not None else Causal() if causal else Full()
    spec = CallSpec(layout, kv_layout or layout, chosen, scale, strategy, return_lse, needs_grad)
    check_spec(spec)
    return spec


def _needs_grad(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[bool, bool, bool]:
    wants = torch.is_grad_enabled()
    needs_q, needs_k, needs_v = (
        wants and isinstance(x, torch.Tensor) and x.requires_grad for x in (q, k, v)
    )
    return needs_q, needs_k, needs_v


def _constant_handle(
    mask: Mask | None,
    causal: bool,
    layout: ContextLayout,
    kv_layout: ContextLayout | None,
    scale: float | None,
    strategy: str,
    return_lse: bool,
    needs_q: bool,
    needs_k: bool,
    needs_v: bool,
) -> int:
    """What the compiler runs once, while it traces. It guards on each argument (objects by
    identity): others are traced anew.
    """
    try:
        return handle_of(
            _make_spec(
                mask,
                causal,
                layout,
                kv_layout,
                scale,
                strategy,
                return_lse,
                (needs_q, needs_k, needs_v),
            )
        )
    except InputError as error:
        _refuse(error, layout, kv_layout)


# What torch.compiler.assume_constant_result does, without importing the compiler, which costs a
# second on every rank.
_constant_handle._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _refuse(error: BurstError, *layouts: object) -> NoReturn:
    """Raises the error on every rank that waits for this rank's call."""
    refuse(
        "burst_attention",
        error,
        next((layout.context for layout in layouts if isinstance(layout, ContextLayout)), None),
    )


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
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: Mask | None = None,
    causal: bool = False,
    layout: ContextLayout,
    kv_layout: ContextLayout | None = None,
    scale: float | None = None,
    strategy: str = "auto",
    return_lse: bool = False,
) -> Explanation:
    """The plans `burst_attention` would run: strategy, bytes, kernel, memory. Local: nothing is
    sent. Raises InputError.
    """
    spec = call_spec(
        q,
        k,
        v,
        mask=mask,
        causal=causal,
        layout=layout,
        kv_layout=kv_layout,
        scale=scale,
        strategy=strategy,
        return_lse=return_lse,
    )
    check_call(spec, q, k, v)
    ctx = layout.context
    return Explanation(
        ctx.plan(spec, q, k, forward=True),
        ctx.plan(spec, q, k, forward=False) if any(spec.needs_grad) else None,
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
        out = burst_attention(
            q,
            k,
            v,
            mask=self.mask,
            causal=self.causal,
            layout=chosen,
            kv_layout=kv_layout,
            scale=self.scale,
            strategy=self.strategy,
        )
        assert isinstance(out, torch.Tensor)
        return out

    def extra_repr(self) -> str:
        """For print(module)."""
        return (
            f"mask={self.mask or ('causal' if self.causal else 'full')}, strategy={self.strategy}"
        )
