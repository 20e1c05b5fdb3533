"""Attention as torch sees it: one autograd function, and two custom ops for modes and the compiler.

An eager call takes the direct way: `BurstAttentionFunction` runs the forward and the backward
itself. Under a TorchDispatchMode (selective checkpointing) and in compiled programs a call goes
through the dispatcher, as a custom op, so that the mode or the compiler sees the call. The ops are
opaque: fake implementations give shapes. The ops are also effectful, because they communicate: a
compiler may neither drop nor reorder them.

The forward saves q, k, v, out and lse for the backward, slopes and sinks where there are any, and
nothing else. Second derivatives are refused.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch._library.effects import EffectType
from torch.library import _register_effectful_op

from burst_rt.attention.call import Call, NeedsGrad, make_call
from burst_rt.attention.run import run_backward, run_forward
from burst_rt.attention.sharding import LAYOUTS, ContextLayout
from burst_rt.errors import ConfigError, InputError
from burst_rt.kernels import QKV, Results, ScoreTerms, sum_dtype
from burst_rt.planning.masks import MASKS, Mask
from burst_rt.planning.numbers import set_tracing_check

__all__ = ["BurstAttentionFunction", "forward_op", "terms_of", "terms_of_call"]

# A call as the ops' arguments: the numbers of layout, kv_layout and mask; scale, softcap, strategy
# and return_lse; whether q, k, v and sinks need gradients.
Terms = tuple[int, int, int, float | None, float | None, str, bool, list[bool]]


_NUM_TERMS = 8

# Masks that were made inside compiled programs. The programs keep only the masks' numbers.
_constants: deque[Mask] = deque(maxlen=4096)
set_tracing_check(torch.compiler.is_compiling)


class BurstAttentionFunction(torch.autograd.Function):
    """`apply(q, k, v, call)` -> (out, lse): attention over the ranks of the call's context.

    `apply(q, k, v, call, alibi_slopes, sinks)` where the call has slopes or sinks; None for the one
    that the call lacks.
    call: what `make_call` returned for these tensors. Collective, and blocks, in the forward and in
    the backward; see `burst_attention` for shapes and deadlines. lse is differentiable.
    Deterministic.
    """

    # `setup_context` is missing on purpose, because with one torch inspects the signature in every
    # call. The inspection takes longer than the rest of `apply`.
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        call: Call,
        alibi_slopes: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the call, and saves what the backward needs. Blocks as `run_forward` does."""
        if _somebody_looks(q, k, v):
            with torch._C._AutoDispatchBelowAutograd():
                out, lse, ctx.number = forward_op(
                    q, k, v, *terms_of_call(call), alibi_slopes, sinks
                )
        else:
            terms = ScoreTerms(call.softcap, alibi_slopes, sinks)
            _check_against(call, QKV(q, k, v), terms)
            # The program's own modes (a default device, say) must not apply to the code inside.
            with torch._C.DisableTorchFunction():
                out, lse = run_forward(call, QKV(q, k, v), terms)
            ctx.number = call.setup.runtime.number
        # The number is not a saved tensor: if a checkpoint runs the forward again, the backward
        # still belongs to the first forward.
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, alibi_slopes, sinks)
        return out, lse

    @staticmethod
    def backward(
        ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """Returns the gradients, None where one is not needed. Blocks as `run_backward` does."""
        *saved, alibi_slopes, sinks = _saved(ctx)
        q, k, v, out, lse = saved
        call: Call = ctx.call
        if dout is None:
            dout = torch.zeros_like(out)
        if torch.is_grad_enabled() or _somebody_looks(dout, *saved):
            # The dispatcher's autograd refuses second derivatives.
            terms = terms_of_call(call)
            number = torch.as_tensor(ctx.number, device="cpu")
            *found, dsinks = _needed(
                call.needs, _backward_op(dout, dlse, *saved, number, *terms, alibi_slopes, sinks)
            )
            return (*found, None, None, dsinks)
        with torch._C.DisableTorchFunction():
            grads, dsinks = run_backward(
                call, QKV(q, k, v), Results(out, lse, dout, dlse), int(ctx.number),
                ScoreTerms(call.softcap, alibi_slopes, sinks),
            )  # fmt: skip
            return (*grads, None, None, dsinks)


def _somebody_looks(*tensors: torch.Tensor) -> bool:
    """Whether a dispatch mode or a tensor subclass must see what happens to the tensors."""
    if torch._C._len_torch_dispatch_stack() > 0 or torch.compiler.is_compiling():
        return True
    return not all(type(x) is torch.Tensor or type(x) is torch.nn.Parameter for x in tensors)


def _check_against(call: Call, qkv: QKV, terms: ScoreTerms) -> None:
    """Raises InputError, on every rank, where the tensors are not those that the call was made for.
    Only then it blocks, as `Runtime.refuse` does.
    """
    device, name = call.setup.runtime.device, "burst_attention"
    slopes = None if terms.alibi_slopes is None else terms.alibi_slopes.shape
    sinks = None if terms.sinks is None else terms.sinks.dtype
    given = [x for x in (terms.alibi_slopes, terms.sinks) if x is not None]
    lengths = {x.shape[-1:] for x in given}
    if (
        slopes != call.alibi_slopes
        or sinks != call.sinks
        or lengths - {(call.num_heads,)}
        or any(x.device != device for x in given)
    ):
        error = InputError(
            f"{name}: the call was made for alibi_slopes of shape {call.alibi_slopes} and "
            f"{call.num_heads} sinks of {call.sinks} on {device}, got {slopes} and {sinks}, of "
            f"shapes {[tuple(x.shape) for x in given]}; apply it to the tensors it was made for"
        )
        call.setup.runtime.refuse(name, error)
    for x, shape in zip(qkv, (call.q_shape, call.kv_shape, call.v_shape), strict=True):
        if x.shape != shape or x.dtype != call.dtype or x.device != device:
            error = InputError(
                f"{name}: the call was made for a tensor {shape} of {call.dtype} on {device}, got "
                f"{tuple(x.shape)} of {x.dtype} on {x.device}; make a call for these tensors with "
                "burst_rt.make_call"
            )
            call.setup.runtime.refuse(name, error)


def _saved(ctx: Any) -> tuple[Any, ...]:  # tensors; None for slopes or sinks
    call: Call = ctx.call
    try:
        saved = ctx.saved_tensors
    except RuntimeError as error:
        # A saved tensor was changed in place, or freed by an earlier backward. This rank cannot
        # take part, and the other ranks must hear so, because they wait for this rank.
        name = "backward of burst_attention"
        call.setup.runtime.refuse(name, InputError(f"{name}: {error}"))
    return tuple(saved)


def _needed(
    needs: Sequence[bool], grads: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor | None, ...]:
    """The gradients as autograd takes them: None where no gradient is needed."""
    return tuple(grad if needed else None for grad, needed in zip(grads, needs, strict=True))


def terms_of(
    layout: ContextLayout,
    kv_layout: ContextLayout,
    mask: Mask,
    scale: float | None,
    softcap: float | None,
    strategy: str,
    return_lse: bool,
    needs: NeedsGrad,
) -> Terms:
    """A call as the ops' arguments. The compiler traces this function, so it only reads numbers."""
    mask_number = mask._burst_rt_number or _number_of_constant(mask)
    known = (layout.number, kv_layout.number, mask_number)
    return (*known, scale, softcap, strategy, return_lse, list(needs))


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
        call.layout, call.kv_layout, call.mask, call.scale, call.softcap, call.strategy,
        call.return_lse, call.needs,
    )  # fmt: skip


def _call_of(
    qkv: QKV,
    terms: Terms,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    name: str,
) -> tuple[Call, ScoreTerms]:
    """The call that an op runs, and its terms; blocks only to refuse a call that fails the checks.

    The checks are made here, because the compiler saw numbers and shapes only. Raises ConfigError
    for a layout or a mask that has been collected, InputError on every rank for other faults.
    """
    number, kv_number, mask_number, scale, softcap, strategy, return_lse, needs = terms
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
    needs_q, needs_k, needs_v, needs_sinks = needs
    try:
        call = make_call(
            *qkv, layout=layout, kv_layout=kv_layout, mask=mask, scale=scale, softcap=softcap,
            alibi_slopes=alibi_slopes, sinks=sinks, strategy=strategy, return_lse=return_lse,
            needs_grad=(needs_q, needs_k, needs_v, needs_sinks),
        )  # fmt: skip
    except InputError as error:
        setup.runtime.refuse(name, error)
    return call, ScoreTerms(softcap, alibi_slopes, sinks)


# The tensors of the ops that may be None come last, after the terms; the dispatcher leaves them out
# where they are None.
def _last_two(rest: tuple[Any, ...]) -> tuple[Terms, Any, Any]:
    """The terms, alibi_slopes and sinks of an op's arguments."""
    terms, (slopes, sinks, *_) = rest[:_NUM_TERMS], (*rest[_NUM_TERMS:], None, None)
    return terms, slopes, sinks


def _run_forward_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, lse, and the number of the call: a compiled program keeps it for the backward."""
    qkv = QKV(q, k, v)
    call, terms = _call_of(qkv, *_last_two(rest), "burst_attention")
    out, lse = run_forward(call, qkv, terms)
    return out, lse, torch.tensor(call.setup.runtime.number, device="cpu")


def _fake_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _keep_out_of_cuda_graphs()
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=sum_dtype(q.dtype))
    number = torch.empty((), dtype=torch.int64, device="cpu")
    return q.new_empty((*q.shape[:3], v.shape[3])), lse, number


def _run_backward_op(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    number: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients as an op returns them: an empty tensor where a gradient is not needed."""
    qkv = QKV(q, k, v)
    call, terms = _call_of(qkv, *_last_two(rest), "backward of burst_attention")
    grads, dsinks = run_backward(call, qkv, Results(out, lse, dout, dlse), int(number), terms)
    dq, dk, dv, dsinks = (q.new_empty(0) if grad is None else grad for grad in (*grads, dsinks))
    return dq, dk, dv, dsinks


def _fake_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    number: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    terms, _, sinks = _last_two(rest)
    dq, dk, dv, dsinks = (
        torch.empty_like(x, memory_format=torch.contiguous_format) if needed else q.new_empty(0)
        for x, needed in zip((q, k, v, sinks), terms[-1], strict=True)
    )
    return dq, dk, dv, dsinks


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    """Saves what the op's backward needs. Compiled programs use it: there autograd sees the op."""
    q, k, v, *rest = inputs
    ctx.terms, slopes, sinks = _last_two(tuple(rest))
    ctx.set_materialize_grads(False)
    out, lse, ctx.number = output
    ctx.save_for_backward(q, k, v, out, lse, slopes, sinks)


def _backward(
    ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, _: None
) -> tuple[torch.Tensor | None, ...]:
    *saved, slopes, sinks = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(saved[3])
    grads = _backward_op(dout, dlse, *saved, ctx.number, *ctx.terms, slopes, sinks)
    *grads, dsinks = _needed(ctx.terms[-1], grads)
    return (*grads, *(None for _ in ctx.terms), None, dsinks)


def _no_second_derivative(ctx: Any, *grads: torch.Tensor | None) -> None:
    raise InputError(
        "burst_attention: second derivatives are not supported; differentiate once, without "
        "create_graph=True"
    )


# The ops are registered by hand. `torch.library.custom_op` would do the same, but it wraps the
# function so that the first call imports the compiler, which costs a second on every rank.
_library = torch.library.Library("burst_rt", "DEF")
# See `_keep_out_of_cuda_graphs`.
_tags = tuple(filter(None, [getattr(torch.Tag, "cudagraph_unsafe", None)]))
_TERMS = (
    "SymInt layout, SymInt kv_layout, SymInt mask, float? scale, float? softcap, str strategy, "
    "bool return_lse, bool[] needs_grad, Tensor? alibi_slopes=None, Tensor? sinks=None"
)
_library.define(
    f"attention_forward(Tensor q, Tensor k, Tensor v, {_TERMS}) -> (Tensor, Tensor, Tensor)",
    tags=_tags,
)
_library.define(
    "attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, "
    f"Tensor lse, Tensor number, {_TERMS}) -> (Tensor, Tensor, Tensor, Tensor)",
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
_NAMES = {op.name() for op in (forward_op, _backward_op)}


def _keep_out_of_cuda_graphs() -> None:
    """Makes inductor cut its programs at the ops, so that no CUDA graph is put around them.

    A CUDA graph cannot hold a call: the graph replays launches only, while the host takes part in
    every call (the ranks' agreement, events that the host waits for). The ops' tag says so, but
    torch 2.13 overlooks the tags of effectful ops. Called while a program is traced; where inductor
    is not loaded by then, it does not compile the program.
    """
    config: Any = sys.modules.get("torch._inductor.config")
    cut_at = getattr(config, "custom_should_partition_ops", None)  # not in every torch
    if cut_at is not None and not set(cut_at) >= _NAMES:
        config.custom_should_partition_ops = sorted({*cut_at, *_NAMES})
