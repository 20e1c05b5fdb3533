"""Attention as torch sees it: one autograd function, and two custom ops for who looks in between.

An eager call takes the direct way: `BurstAttentionFunction` runs the forward and the backward
itself. Under a TorchDispatchMode (selective checkpointing) and in compiled programs a call goes
through the dispatcher, as a custom op, so that the mode or the compiler sees it. The ops are opaque
(fake implementations give shapes) and effectful, because they communicate: they may be neither
dropped nor reordered.

What is saved for the backward is q, k, v, out and lse, nothing else. Second derivatives are
refused.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch._library.effects import EffectType
from torch.library import _register_effectful_op

from burst_rt.attention.call import Call, make_call
from burst_rt.attention.run import run_backward, run_forward
from burst_rt.attention.sharding import LAYOUTS, ContextLayout
from burst_rt.errors import ConfigError, InputError
from burst_rt.kernels import sum_dtype
from burst_rt.planning import numbers
from burst_rt.planning.masks import MASKS, Mask

__all__ = ["BurstAttentionFunction", "forward_op", "terms_of", "terms_of_call"]

# What the ops know of a call: the numbers of layout, kv_layout and mask, scale, strategy,
# return_lse, and whether q, k and v need gradients.
Terms = tuple[int, int, int, float | None, str, bool, list[bool]]


# Masks that compiled programs have made; the programs know their numbers only.
_constants: deque[Mask] = deque(maxlen=4096)
numbers.is_tracing = torch.compiler.is_compiling


class BurstAttentionFunction(torch.autograd.Function):
    """`apply(q, k, v, call)` -> (out, lse): attention over the ranks of the call's context (see
    `burst_attention` for shapes).

    call: from `burst_rt.make_call`, for these tensors. Collective, forward and backward. lse is
    differentiable. Deterministic.
    """

    # No `setup_context`: with it torch inspects the signature anew in every call, which takes
    # longer than all the rest of `apply`.
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the call; saves q, k, v, out, lse."""
        if _somebody_looks(q, k, v):
            with torch._C._AutoDispatchBelowAutograd():
                out, lse = forward_op(q, k, v, *terms_of_call(call))
        else:
            out, lse = run_forward(call, q, k, v)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    def backward(
        ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """dq, dk and dv, where they are needed."""
        saved = _saved(ctx)
        if dout is None:
            dout = torch.zeros_like(saved[3])
        if torch.is_grad_enabled() or _somebody_looks(dout, *saved):
            # Through the dispatcher, which refuses second derivatives.
            return _needed(ctx, _backward_op(dout, dlse, *saved, *terms_of_call(ctx.call)))
        return (*run_backward(ctx.call, dout, dlse, *saved), None)


def _somebody_looks(*tensors: torch.Tensor) -> bool:
    """Whether a mode, a tensor class or the compiler is to see what happens to the tensors."""
    return torch._C._len_torch_dispatch_stack() > 0 or not all(
        type(x) is torch.Tensor or type(x) is torch.nn.Parameter for x in tensors
    )


def _saved(ctx: Any) -> tuple[torch.Tensor, ...]:
    call: Call = ctx.call
    try:
        saved = ctx.saved_tensors
    except RuntimeError as error:
        # Changed in place, or freed by an earlier backward: this rank cannot take part, and the
        # others wait for it.
        name = "backward of burst_attention"
        call.setup.runtime.refuse(name, InputError(f"{name}: {error}"))
    return tuple(saved)


def _needed(ctx: Any, grads: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor | None, ...]:
    """The gradients as autograd takes them: None where none is needed, and for the call."""
    needs = ctx.call.needs_grad
    return (*(grad if needed else None for grad, needed in zip(grads, needs, strict=True)), None)


def terms_of(
    layout: ContextLayout,
    kv_layout: ContextLayout,
    mask: Mask,
    scale: float | None,
    strategy: str,
    return_lse: bool,
    needs_grad: tuple[bool, bool, bool],
) -> Terms:
    """What the ops know of a call. The compiler traces this: numbers are read, nothing else."""
    mask_number = mask.number or _number_of_constant(mask)
    known = (layout.number, kv_layout.number, mask_number)
    return (*known, scale, strategy, return_lse, list(needs_grad))


def _number_of_constant(mask: Mask) -> int:
    """The number of a mask that is made inside a compiled program, and so is a constant of it. The
    compiler calls this once, while it traces, with a mask like that.
    """
    _constants.append(mask)
    return MASKS.give(mask)


# What torch.compiler.assume_constant_result does, without importing the compiler, which costs a
# second on every rank.
_number_of_constant._dynamo_marked_constant = True  # type: ignore[attr-defined]


def terms_of_call(call: Call) -> Terms:
    """What the ops know of a call that has been made."""
    return terms_of(
        call.layout, call.kv_layout, call.mask, call.scale, call.strategy, call.return_lse,
        call.needs_grad,
    )  # fmt: skip


def _call_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, terms: Terms, name: str) -> Call:
    """The call that an op runs: checked here, for the compiler saw numbers and shapes only."""
    number, kv_number, mask_number, scale, strategy, return_lse, needs_grad = terms
    layout, kv_layout = LAYOUTS.find(number), LAYOUTS.find(kv_number)
    mask = MASKS.find(mask_number)
    if layout is None or kv_layout is None or mask is None:
        raise ConfigError(
            f"{name}: the layout or the mask of this call is no more; the program must keep both "
            "until the backward has run"
        )
    setup = layout.setup
    setup.runtime.check_open()
    for each, thing in ((number, layout), (kv_number, kv_layout), (mask_number, mask)):
        setup.hold(each, thing)
    needs_q, needs_k, needs_v = needs_grad
    try:
        return make_call(
            q, k, v, layout=layout, kv_layout=kv_layout, mask=mask, scale=scale,
            strategy=strategy, return_lse=return_lse, needs_grad=(needs_q, needs_k, needs_v),
        )  # fmt: skip
    except InputError as error:
        setup.runtime.refuse(name, error)


def _run_forward_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *terms: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return run_forward(_call_of(q, k, v, terms, "burst_attention"), q, k, v)


def _fake_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=sum_dtype(q.dtype))
    return torch.empty_like(q, memory_format=torch.contiguous_format), lse


def _run_backward_op(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *terms: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Empty tensors stand for gradients that are not needed."""
    call = _call_of(q, k, v, terms, "backward of burst_attention")
    dq, dk, dv = run_backward(call, dout, dlse, q, k, v, out, lse)
    return (
        q.new_empty(0) if dq is None else dq,
        k.new_empty(0) if dk is None else dk,
        v.new_empty(0) if dv is None else dv,
    )


def _fake_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *terms: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv = (
        torch.empty_like(x, memory_format=torch.contiguous_format) if needed else x.new_empty(0)
        for x, needed in zip((q, k, v), terms[-1], strict=True)
    )
    return dq, dk, dv


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    """What the op's backward needs, where autograd meets the op itself (in compiled programs)."""
    q, k, v, *ctx.terms = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output)


def _backward(
    ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    saved = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(saved[3])
    grads = _backward_op(dout, dlse, *saved, *ctx.terms)
    needed = (grad if need else None for grad, need in zip(grads, ctx.terms[-1], strict=True))
    return (*needed, *(None for _ in ctx.terms))


def _no_second_derivative(ctx: Any, *grads: torch.Tensor | None) -> None:
    raise InputError(
        "burst_attention: second derivatives are not supported; differentiate once, without "
        "create_graph=True"
    )


# Registered by hand: `torch.library.custom_op` does the same, but wraps the function so that its
# first call imports the compiler, which costs a second on every rank.
_library = torch.library.Library("burst_rt", "DEF")
# The host takes part in every call (the ranks' agreement, events it waits for): a graph that
# replays launches cannot hold one.
_tags = tuple(filter(None, [getattr(torch.Tag, "cudagraph_unsafe", None)]))
_TERMS = (
    "SymInt layout, SymInt kv_layout, SymInt mask, float? scale, str strategy, bool return_lse, "
    "bool[] needs_grad"
)
_library.define(
    f"attention_forward(Tensor q, Tensor k, Tensor v, {_TERMS}) -> (Tensor, Tensor)", tags=_tags
)
_library.define(
    "attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, "
    f"Tensor lse, {_TERMS}) -> (Tensor, Tensor, Tensor)",
    tags=_tags,
)
_library.impl("attention_forward", _run_forward_op, "CompositeExplicitAutograd")
_library.impl("attention_backward", _run_backward_op, "CompositeExplicitAutograd")
torch.library.register_fake("burst_rt::attention_forward", _fake_forward, lib=_library)
torch.library.register_fake("burst_rt::attention_backward", _fake_backward, lib=_library)
torch.library.register_autograd(
    "burst_rt::attention_forward", _backward, setup_context=_save, lib=_library
)
torch.library.register_autograd("burst_rt::attention_backward", _no_second_derivative, lib=_library)
_register_effectful_op("burst_rt::attention_forward", EffectType.ORDERED)
_register_effectful_op("burst_rt::attention_backward", EffectType.ORDERED)
# The overloads themselves, so that no call has to find them.
forward_op = torch.ops.burst_rt.attention_forward.default
_backward_op = torch.ops.burst_rt.attention_backward.default
