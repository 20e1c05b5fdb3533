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
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

import torch
from torch._library.effects import EffectType
from torch.library import _register_effectful_op
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from burst_rt.attention.call import Call, call_of
from burst_rt.attention.options import PLAIN, NeedsGrad, Options
from burst_rt.attention.run import run_backward, run_forward
from burst_rt.attention.sharding import LAYOUTS
from burst_rt.errors import ConfigError, InputError
from burst_rt.kernels import QKV, Results, ScoreOptions, sum_dtype
from burst_rt.planning.masks import MASKS, Mask
from burst_rt.planning.numbers import set_tracing_check

__all__ = ["KEPT_OPS", "BurstAttentionFunction", "arguments_of", "forward_op", "let_count"]

# A call as the ops' arguments: the numbers of layout, kv_layout and mask; the plain options;
# whether q, k, v and sinks need gradients. Any: the options have several types.
Arguments = tuple[Any, ...]

_NUM_ARGUMENTS = 3 + len(PLAIN) + 1

_WHERE, _BACKWARD = "burst_attention", "backward of burst_attention"

# Masks that were made inside compiled programs. The programs keep only the masks' numbers.
_constants: deque[Mask] = deque(maxlen=4096)
set_tracing_check(torch.compiler.is_compiling)


def let_count(op: Any, flops_of: Callable[..., int]) -> None:
    """Gives every `FlopCounterMode` that is active the formula of an op.

    flops_of: called with the op's arguments, and the result as `out_val`. `register_flop_formula`
    of torch would have to come before the mode is made, and so does the import of its module,
    which takes a tenth of a second on every rank.
    """
    if "torch.utils.flop_counter" not in sys.modules:
        return
    for mode in _get_current_dispatch_mode_stack():
        formulas = getattr(getattr(mode, "counter", None), "flop_registry", None)
        if isinstance(formulas, dict):
            formulas.setdefault(op.overloadpacket, flops_of)


class _KeptHere(threading.local):
    """Inside, this thread runs an op whose call is kept until its backward has run."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


_kept_here = _KeptHere()


def _run_op(op: Any, *arguments: Any) -> tuple[torch.Tensor, ...]:
    """The op's results, for a caller that keeps the call until its backward has run."""
    if torch.compiler.is_compiling():
        return op(*arguments)  # type: ignore[no-any-return]
    let_count(op, _flops_of)
    with _kept_here:
        return op(*arguments)  # type: ignore[no-any-return]


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
                arguments = (*arguments_of(call.options, call.needs), alibi_slopes, sinks)
                out, lse, ctx.number = _run_op(forward_op, q, k, v, *arguments)
        else:
            score_options = call.score_options(alibi_slopes, sinks)
            _check_scores_against(call, score_options)
            _check_against(call, QKV(q, k, v))
            # The program's own modes (a default device, say) must not apply to the code inside.
            with torch._C.DisableTorchFunction():
                out, lse = run_forward(call, QKV(q, k, v), score_options)
            ctx.number = call.attention.runtime.number
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
            number = torch.as_tensor(ctx.number, device="cpu")
            arguments = (*arguments_of(call.options, call.needs), alibi_slopes, sinks)
            made = _run_op(_backward_op, dout, dlse, *saved, number, *arguments)
            *grads, dsinks = _needed(call.needs, made)
            return (*grads, None, None, dsinks)
        with torch._C.DisableTorchFunction():
            dq_dk_dv, dsinks = run_backward(
                call, QKV(q, k, v), Results(out, lse, dout, dlse), int(ctx.number),
                call.score_options(alibi_slopes, sinks),
            )  # fmt: skip
            return (*dq_dk_dv, None, None, dsinks)


def _somebody_looks(*tensors: torch.Tensor) -> bool:
    """Whether a dispatch mode or a tensor subclass must see what happens to the tensors."""
    if torch._C._len_torch_dispatch_stack() > 0 or torch.compiler.is_compiling():
        return True
    for x in tensors:
        kind = type(x)
        if kind is not torch.Tensor and kind is not torch.nn.Parameter:
            return True
    return False


def _check_scores_against(call: Call, score_options: ScoreOptions) -> None:
    """Raises InputError, on every rank, for slopes or sinks that the call was not made for.

    Blocks only then, as `Runtime.refuse` does.
    """
    _, slopes, sinks = score_options
    if slopes is None and sinks is None and call.slopes_shape is None and call.sinks_dtype is None:
        return  # most calls have neither
    device, given = call.attention.runtime.device, [x for x in (slopes, sinks) if x is not None]
    shape = None if slopes is None else slopes.shape
    dtype = None if sinks is None else sinks.dtype
    if (
        shape != call.slopes_shape
        or dtype != call.sinks_dtype
        or any(x.shape[-1:] != (call.num_heads,) or x.device != device for x in given)
    ):
        error = InputError(
            f"{_WHERE}: the call was made for alibi_slopes of shape {call.slopes_shape} and "
            f"{call.num_heads} sinks of {call.sinks_dtype} on {device}, got {shape} and {dtype}, "
            f"of shapes {[tuple(x.shape) for x in given]}; apply it to the tensors it was made for"
        )
        call.attention.runtime.refuse(_WHERE, error)


def _check_against(call: Call, qkv: QKV) -> None:
    """Raises InputError, on every rank, for q, k or v that the call was not made for.

    Blocks only then, as `Runtime.refuse` does.
    """
    device = call.attention.runtime.device
    for x, shape in zip(qkv, (call.q_shape, call.kv_shape, call.v_shape), strict=True):
        if x.shape != shape or x.dtype != call.dtype or x.device != device:
            error = InputError(
                f"{_WHERE}: the call was made for a tensor {shape} of {call.dtype} on {device}, "
                f"got {tuple(x.shape)} of {x.dtype} on {x.device}; make a call for these tensors "
                "with burst_rt.make_call"
            )
            call.attention.runtime.refuse(_WHERE, error)


def _saved(ctx: Any) -> tuple[Any, ...]:  # tensors; None for slopes or sinks
    call: Call = ctx.call
    try:
        saved = ctx.saved_tensors
    except RuntimeError as error:
        # A saved tensor was changed in place, or freed by an earlier backward. This rank cannot
        # take part, and the other ranks must hear so, because they wait for this rank.
        call.attention.runtime.refuse(_BACKWARD, InputError(f"{_BACKWARD}: {error}"))
    return tuple(saved)


def _needed(
    needs: Sequence[bool], grads: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor | None, ...]:
    """The gradients as autograd takes them: None where no gradient is needed."""
    return tuple(grad if needed else None for grad, needed in zip(grads, needs, strict=True))


def arguments_of(options: Options, needs: NeedsGrad) -> Arguments:
    """A call's resolved options, apart from tensors, as the ops' arguments.

    The compiler traces this function, so it only reads numbers.
    """
    layout, kv_layout, mask, *_ = options
    assert kv_layout is not None
    assert mask is not None
    mask_number = mask._burst_rt_number or _number_of_constant(mask)
    return (layout.number, kv_layout.number, mask_number, *options.plain, list(needs))


def _number_of_constant(mask: Mask) -> int:
    """The number of a mask that a compiled program makes itself.

    Such a mask is a constant of the program: the compiler calls this function once, while tracing.
    """
    _constants.append(mask)
    return MASKS.give(mask)


# torch.compiler.assume_constant_result sets the same mark, but importing the compiler costs a
# second on every rank.
_number_of_constant._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _call_of(qkv: QKV, arguments: Arguments, name: str) -> tuple[Call, ScoreOptions]:
    """The call that an op runs, and its score options; blocks only to refuse what fails the checks.

    The checks are made here, because the compiler saw numbers and shapes only. Raises ConfigError
    for a layout or a mask that has been collected, InputError on every rank for other faults.
    """
    (*numbers, mask_number), plain, needs, tensors = _sorted(arguments)
    layout, kv_layout = map(LAYOUTS.find, numbers)
    mask = MASKS.find(mask_number)
    if layout is None or kv_layout is None or mask is None:
        raise ConfigError(
            f"{name}: the layout or the mask of this call has been deleted; keep both alive until "
            "the backward has run"
        )
    attention = layout.attention
    attention.runtime.check_open()
    if not _kept_here.depth:
        for number, thing in zip((*numbers, mask_number), (layout, kv_layout, mask), strict=True):
            attention.held.put(number, thing)
    options = Options(layout, kv_layout, mask, *plain, *tensors)
    try:
        call = call_of(qkv, options, needs)
    except InputError as error:
        attention.runtime.refuse(name, error)
    return call, call.score_options(*tensors)


def _flops_of(*arguments: Any, out_val: Any) -> int:
    """Floating-point operations of this rank's part of a call, forward or backward."""
    forward = isinstance(arguments[3], int)
    q, k, v = arguments[:3] if forward else arguments[2:5]
    numbers, plain, needs, tensors = _sorted(arguments[3 if forward else 8 :])
    layout, kv_layout, mask = *map(LAYOUTS.find, numbers[:2]), MASKS.find(numbers[2])
    assert layout is not None  # the op has run with it
    call = call_of(QKV(q, k, v), Options(layout, kv_layout, mask, *plain, *tensors), needs)
    return (call.forward_plan if forward else call.backward_plan).flops


# The tensors of the ops that may be None come last, after `Arguments`; the dispatcher leaves them
# out where they are None.
def _sorted(arguments: Arguments) -> tuple[list[int], Arguments, NeedsGrad, Arguments]:
    """An op's arguments after its tensors: numbers, plain options, who needs gradients, tensors."""
    slopes, sinks, *_ = (*arguments[_NUM_ARGUMENTS:], None, None)
    *plain, needs = arguments[3:_NUM_ARGUMENTS]
    needs_q, needs_k, needs_v, needs_sinks = needs
    return (
        list(arguments[:3]), tuple(plain), (needs_q, needs_k, needs_v, needs_sinks),
        (slopes, sinks),
    )  # fmt: skip


def _run_forward_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, lse, and the number of the call: a compiled program keeps it for the backward."""
    qkv = QKV(q, k, v)
    call, score_options = _call_of(qkv, rest, _WHERE)
    out, lse = run_forward(call, qkv, score_options)
    return out, lse, torch.tensor(call.attention.runtime.number, device="cpu")


def _fake_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _keep_out_of_cuda_graphs()
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=sum_dtype(q.dtype))
    number = torch.empty((), dtype=torch.int64, device="cpu")
    return q.new_empty((*q.shape[:3], v.shape[3])), lse, number


def _run_backward_op(
    dout: torch.Tensor, dlse: torch.Tensor | None, *rest: Any
) -> tuple[torch.Tensor, ...]:
    """The gradients as an op returns them: an empty tensor where a gradient is not needed."""
    q, k, v, out, lse, number, *arguments = rest
    qkv = QKV(q, k, v)
    call, score_options = _call_of(qkv, tuple(arguments), _BACKWARD)
    results = Results(out, lse, dout, dlse)
    grads, dsinks = run_backward(call, qkv, results, int(number), score_options)
    return tuple(q.new_empty(0) if grad is None else grad for grad in (*grads, dsinks))


def _fake_backward(
    dout: torch.Tensor, dlse: torch.Tensor | None, *rest: Any
) -> tuple[torch.Tensor, ...]:
    q, k, v, _, _, _, *arguments = rest
    *_, needs, (_, sinks) = _sorted(tuple(arguments))
    return tuple(
        torch.empty_like(x, memory_format=torch.contiguous_format) if needed else q.new_empty(0)
        for x, needed in zip((q, k, v, sinks), needs, strict=True)
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    """Saves what the op's backward needs. Compiled programs use it: there autograd sees the op."""
    q, k, v, *arguments = inputs
    ctx.arguments = tuple(arguments[:_NUM_ARGUMENTS])
    *_, ctx.needs, tensors = _sorted(tuple(arguments))
    ctx.set_materialize_grads(False)
    out, lse, ctx.number = output
    ctx.save_for_backward(q, k, v, out, lse, *tensors)


def _backward(
    ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, _: None
) -> tuple[torch.Tensor | None, ...]:
    *saved, slopes, sinks = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(saved[3])
    grads = _backward_op(dout, dlse, *saved, ctx.number, *ctx.arguments, slopes, sinks)
    *grads, dsinks = _needed(ctx.needs, grads)
    return (*grads, *(None for _ in ctx.arguments), None, dsinks)


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
_SCHEMA_TYPES = {bool: "bool", float: "float", float | None: "float?", str: "str"}
_types = get_type_hints(Options)
_PLAIN = ", ".join(f"{_SCHEMA_TYPES[_types[name]]} {name}" for name in PLAIN)
_ARGUMENTS = (
    f"SymInt layout, SymInt kv_layout, SymInt mask, {_PLAIN}, bool[] needs_grad, "
    "Tensor? alibi_slopes=None, Tensor? sinks=None"
)
_library.define(
    f"attention_forward(Tensor q, Tensor k, Tensor v, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    tags=_tags,
)
_library.define(
    "attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, "
    f"Tensor lse, Tensor number, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)",
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
# The ops whose results activation checkpointing keeps, since they send: rooms above add theirs.
KEPT_OPS: set[object] = {forward_op}


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
