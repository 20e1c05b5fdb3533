"""Attention as torch sees it: one autograd function, and two custom ops for modes and the compiler.

An eager call takes the direct way: `BurstAttentionFunction` runs the forward and the backward
itself. Under a TorchDispatchMode (selective checkpointing) and in compiled programs a call goes
through the dispatcher, as a custom op, so that the mode or the compiler sees the call. The ops are
opaque: fake implementations give shapes. The ops are also effectful, because they communicate: a
compiler may neither drop nor reorder them.

The forward saves q, k, v, out and lse for the backward, and nothing else. Second derivatives are
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
from burst_rt.kernels import QKV, Results, sum_dtype
from burst_rt.planning import numbers
from burst_rt.planning.masks import MASKS, Mask

__all__ = ["BurstAttentionFunction", "forward_op", "terms_of", "terms_of_call"]

# A call as the ops' arguments: the numbers of layout, kv_layout and mask; scale, strategy and
# return_lse; whether q, k and v need gradients.
Terms = tuple[int, int, int, float | None, str, bool, list[bool]]


# Masks that were made inside compiled programs. The programs keep only the masks' numbers.
_constants: deque[Mask] = deque(maxlen=4096)
numbers.is_tracing = torch.compiler.is_compiling


class BurstAttentionFunction(torch.autograd.Function):
    """`apply(q, k, v, call)` -> (out, lse): attention over the ranks of the call's context.

    call: what `make_call` returned for these tensors. Collective, and blocks, in the forward and in
    the backward; see `burst_attention` for shapes and deadlines. lse is differentiable.
    Deterministic.
    """

    # There is no `setup_context`, because with one torch inspects the signature in every call. The
    # inspection takes longer than the rest of `apply`.
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the call, and saves q, k, v, out and lse. Blocks as `run_forward` does."""
        if _somebody_looks(q, k, v):
            with torch._C._AutoDispatchBelowAutograd():
                out, lse = forward_op(q, k, v, *terms_of_call(call))
        else:
            _check_against(call, q, k, v)
            # Modes of the program's own (a default device, say) are not meant for what is inside.
            with torch._C.DisableTorchFunction():
                out, lse = run_forward(call, QKV(q, k, v))
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    def backward(
        ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """Returns dq, dk and dv, None where one is not needed. Blocks as `run_backward` does."""
        saved = _saved(ctx)
        q, k, v, out, lse = saved
        if dout is None:
            dout = torch.zeros_like(out)
        if torch.is_grad_enabled() or _somebody_looks(dout, *saved):
            # The dispatcher's autograd refuses second derivatives.
            return _needed(ctx, _backward_op(dout, dlse, *saved, *terms_of_call(ctx.call)))
        with torch._C.DisableTorchFunction():
            return (*run_backward(ctx.call, QKV(q, k, v), Results(out, lse, dout, dlse)), None)


def _somebody_looks(*tensors: torch.Tensor) -> bool:
    """Whether a dispatch mode or a tensor subclass must see what happens to the tensors."""
    if torch._C._len_torch_dispatch_stack() > 0 or torch.compiler.is_compiling():
        return True
    return not all(type(x) is torch.Tensor or type(x) is torch.nn.Parameter for x in tensors)


def _check_against(call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raises InputError, on every rank, where the tensors are not those that the call was made for.
    Only then it blocks, as `Runtime.refuse` does.
    """
    device = call.setup.runtime.device
    for x, shape in ((q, call.q_shape), (k, call.kv_shape), (v, call.kv_shape)):
        if x.shape != shape or x.dtype != call.dtype or x.device != device:
            name = "burst_attention"
            error = InputError(
                f"{name}: the call was made for a tensor {shape} of {call.dtype} on {device}, got "
                f"{tuple(x.shape)} of {x.dtype} on {x.device}; make a call for these tensors with "
                "burst_rt.make_call"
            )
            call.setup.runtime.refuse(name, error)


def _saved(ctx: Any) -> tuple[torch.Tensor, ...]:
    call: Call = ctx.call
    try:
        saved = ctx.saved_tensors
    except RuntimeError as error:
        # A saved tensor was changed in place, or freed by an earlier backward. This rank cannot
        # take part, and the other ranks must hear so, because they wait for this rank.
        name = "backward of burst_attention"
        call.setup.runtime.refuse(name, InputError(f"{name}: {error}"))
    return tuple(saved)


def _needed(ctx: Any, grads: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor | None, ...]:
    """The gradients as autograd takes them: None for the call and where no gradient is needed."""
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
    """A call as the ops' arguments. The compiler traces this function, so it only reads numbers."""
    mask_number = mask._burst_rt_number or _number_of_constant(mask)
    known = (layout.number, kv_layout.number, mask_number)
    return (*known, scale, strategy, return_lse, list(needs_grad))


def _number_of_constant(mask: Mask) -> int:
    """The number of a mask that a compiled program makes itself.

    Such a mask is a constant of the program: the compiler calls this function once, while tracing.
    """
    _constants.append(mask)
    return MASKS.give(mask)


# torch.compiler.assume_constant_result sets the same mark, but importing the compiler costs a
# second on every rank.
_number_of_constant._dynamo_marked_constant = True  # type: ignore[attr-defined]


def terms_of_call(call: Call) -> Terms:
    """A checked call as the ops' arguments."""
    return terms_of(
        call.layout, call.kv_layout, call.mask, call.scale, call.strategy, call.return_lse,
        call.needs_grad,
    )  # fmt: skip


def _call_of(qkv: QKV, terms: Terms, name: str) -> Call:
    """The call that an op runs; blocks only to refuse a call that fails the checks.

    The checks are made here, because the compiler saw numbers and shapes only. Raises ConfigError
    for a layout or a mask that has been collected, InputError on every rank for other faults.
    """
    number, kv_number, mask_number, scale, strategy, return_lse, needs_grad = terms
    layout, kv_layout = LAYOUTS.find(number), LAYOUTS.find(kv_number)
    mask = MASKS.find(mask_number)
    if layout is None or kv_layout is None or mask is None:
        raise ConfigError(
            f"{name}: the layout or the mask of this call has been deleted; keep both alive until "
            "the backward has run"
        )
    setup = layout.setup
    setup.runtime.check_open()
    for each, thing in ((number, layout), (kv_number, kv_layout), (mask_number, mask)):
        setup.held.put(each, thing)
    needs_q, needs_k, needs_v = needs_grad
    try:
        return make_call(
            *qkv, layout=layout, kv_layout=kv_layout, mask=mask, scale=scale,
            strategy=strategy, return_lse=return_lse, needs_grad=(needs_q, needs_k, needs_v),
        )  # fmt: skip
    except InputError as error:
        setup.runtime.refuse(name, error)


def _run_forward_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *terms: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    qkv = QKV(q, k, v)
    return run_forward(_call_of(qkv, terms, "burst_attention"), qkv)


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
    """The gradients as an op returns them: an empty tensor where a gradient is not needed."""
    qkv = QKV(q, k, v)
    call = _call_of(qkv, terms, "backward of burst_attention")
    grads = run_backward(call, qkv, Results(out, lse, dout, dlse))
    dq, dk, dv = (q.new_empty(0) if grad is None else grad for grad in grads)
    return dq, dk, dv


def _fake_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    needs_grad = rest[-1]  # the last of the terms
    dq, dk, dv = (
        torch.empty_like(x, memory_format=torch.contiguous_format) if needed else x.new_empty(0)
        for x, needed in zip((q, k, v), needs_grad, strict=True)
    )
    return dq, dk, dv


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Saves what the op's backward needs. Compiled programs use it: there autograd sees the op."""
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


# The ops are registered by hand. `torch.library.custom_op` would do the same, but it wraps the
# function so that the first call imports the compiler, which costs a second on every rank.
_library = torch.library.Library("burst_rt", "DEF")
# A CUDA graph cannot hold a call: the graph replays launches only, while the host takes part in
# every call (the ranks' agreement, events that the host waits for).
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
# These are the overloads themselves, so that no call has to look them up.
forward_op = torch.ops.burst_rt.attention_forward.default
_backward_op = torch.ops.burst_rt.attention_backward.default
