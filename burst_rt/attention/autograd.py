"""Attention as torch sees it: two custom ops and one autograd function.

The ops are opaque to the compiler (fake implementations give it the shapes) and effectful, because
they communicate: they may be neither dropped nor reordered. They take the handle of an immutable
`CallSpec`. What is saved for the backward is q, k, v, out and lse, nothing else. Second derivatives
are refused. Autocast ends at the ops: sums are kept in the type they are meant to be in.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._library.effects import EffectType
from torch.library import _register_effectful_op

from burst_rt.contract import CallSpec, check_call, check_spec
from burst_rt.errors import ConfigError, InputError
from burst_rt.kernels import sum_dtype

__all__ = ["BurstAttentionFunction", "handle_of", "held_handle"]

# The custom ops take a number, not an object. A spec stands here as long as somebody holds it: the
# call that runs, the graph node that waits for its backward, or the context it was pinned to. So
# closed contexts and lengths of the past leave nothing behind.
_specs: weakref.WeakValueDictionary[int, CallSpec] = weakref.WeakValueDictionary()
_handles: weakref.WeakKeyDictionary[CallSpec, int] = weakref.WeakKeyDictionary()
_next_handle = itertools.count()
_lock = threading.Lock()


def held_handle(spec: CallSpec) -> tuple[CallSpec, int]:
    """The spec to hold, equal to the one given, and the number by which the custom ops know it as
    long as it is held.
    """
    with _lock:
        handle = _handles.get(spec)
        known = None if handle is None else _specs.get(handle)
        if known is not None and handle is not None:
            return known, handle
        _handles.pop(spec, None)
        handle = _handles[spec] = next(_next_handle)
        _specs[handle] = spec
        return spec, handle


def handle_of(spec: CallSpec) -> int:
    """The number by which the custom ops know a spec; the same for equal specs. It holds until the
    spec's context is closed.
    """
    spec, handle = held_handle(spec)
    spec.layout.context.pinned.add(spec)
    return handle


def _spec_of(handle: int) -> CallSpec:
    spec = _specs.get(handle)
    if spec is None:
        raise ConfigError(
            "the context that this call was compiled for is closed; make another with "
            "burst_rt.init and compile anew"
        )
    return spec


def _forward_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, handle: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of this rank's queries. Collective."""
    if torch.is_autocast_enabled(q.device.type):
        with torch.autocast(q.device.type, enabled=False):
            return _forward_op(q, k, v, handle)
    spec = _spec_of(handle)
    ctx = spec.layout.context
    q, k, v = q.detach(), k.detach(), v.detach()
    try:
        check_spec(spec)
        check_call(spec, q, k, v)
        plan = ctx.plan(spec, q, k, forward=True)
    except InputError as error:
        ctx.refuse("burst_attention", error)
    return ctx.run_forward(plan, spec, q, k, v)


def _forward_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, handle: int
) -> tuple[torch.Tensor, torch.Tensor]:
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=sum_dtype(q.dtype))
    return torch.empty_like(q, memory_format=torch.contiguous_format), lse


def _backward_op(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    handle: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv of this rank's tokens (empty where the spec says they are not needed).
    Collective.
    """
    if torch.is_autocast_enabled(q.device.type):
        with torch.autocast(q.device.type, enabled=False):
            return _backward_op(dout, dlse, q, k, v, out, lse, handle)
    spec = _spec_of(handle)
    ctx = spec.layout.context
    saved = tuple(x.detach() for x in (q, k, v, out, lse))
    try:
        plan = ctx.plan(spec, q, k, forward=False)
    except InputError as error:
        ctx.refuse("backward of burst_attention", error)
    dq, dk, dv = ctx.run_backward(
        plan, spec, saved, dout.detach(), None if dlse is None else dlse.detach()
    )
    return (
        q.new_empty(0) if dq is None else dq,
        k.new_empty(0) if dk is None else dk,
        v.new_empty(0) if dv is None else dv,
    )


def _backward_fake(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    handle: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv = (
        torch.empty_like(x, memory_format=torch.contiguous_format) if needed else x.new_empty(0)
        for x, needed in zip((q, k, v), _spec_of(handle).needs_grad, strict=True)
    )
    return dq, dk, dv


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, handle = inputs
    out, lse = output
    ctx.handle = handle
    ctx.spec = _spec_of(handle)  # holds it
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse)


def _backward(
    ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    spec: CallSpec = ctx.spec
    try:
        q, k, v, out, lse = ctx.saved_tensors
    except RuntimeError as error:
        # Changed in place, or freed by an earlier backward: this rank cannot take part, and the
        # others wait for it.
        call = "backward of burst_attention"
        spec.layout.context.refuse(call, InputError(f"{call}: {error}"))
    needs = spec.needs_grad
    if dout is None:
        dout = torch.zeros_like(out)
    grads = _below_autograd(_run_backward, dout, dlse, q, k, v, out, lse, ctx.handle)
    return (*(grad if needed else None for grad, needed in zip(grads, needs, strict=True)), None)


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
_library.define(
    "attention_forward(Tensor q, Tensor k, Tensor v, int handle) -> (Tensor, Tensor)", tags=_tags
)
_library.define(
    "attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, "
    "Tensor lse, int handle) "
    "-> (Tensor, Tensor, Tensor)",
    tags=_tags,
)
_library.impl("attention_forward", _forward_op, "CompositeExplicitAutograd")
_library.impl("attention_backward", _backward_op, "CompositeExplicitAutograd")
torch.library.register_fake("burst_rt::attention_forward", _forward_fake, lib=_library)
torch.library.register_fake("burst_rt::attention_backward", _backward_fake, lib=_library)
torch.library.register_autograd(
    "burst_rt::attention_forward", _backward, setup_context=_setup, lib=_library
)
torch.library.register_autograd("burst_rt::attention_backward", _no_second_derivative, lib=_library)
_register_effectful_op("burst_rt::attention_forward", EffectType.ORDERED)
_register_effectful_op("burst_rt::attention_backward", EffectType.ORDERED)
# The overloads themselves, so that no call has to find them.
_run_forward = torch.ops.burst_rt.attention_forward.default
_run_backward = torch.ops.burst_rt.attention_backward.default


def _below_autograd(op: Callable[..., Any], *args: Any) -> Any:
    """Calls an op from inside an autograd function: where nothing is recorded (no second
    derivative) its own autograd, in Python, is passed over.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return op(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


class BurstAttentionFunction(torch.autograd.Function):
    """`apply(q, k, v, handle)` -> (out, lse): attention over the ranks of the spec's context (see
    `burst_attention` for shapes).

    handle: of a `CallSpec`, from `handle_of`. Collective, forward and backward. lse is
    differentiable. Deterministic.
    """

    # No `setup_context`: with it torch inspects the signature anew in every call, which takes
    # longer than all the rest of `apply`.
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, handle: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the forward op; saves q, k, v, out, lse."""
        out, lse = _below_autograd(_run_forward, q, k, v, handle)
        _setup(ctx, (q, k, v, handle), (out, lse))
        return out, lse

    @staticmethod
    def backward(
        ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """Runs the backward op."""
        return _backward(ctx, dout, dlse)
