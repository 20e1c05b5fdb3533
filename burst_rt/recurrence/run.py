"""Running a recurrence's plan on tensors, and its autograd function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch._library.effects import EffectType
from torch.library import _register_effectful_op

from burst_rt.attention.autograd import KEPT_OPS, let_count
from burst_rt.attention.execute.ring import SlotRun
from burst_rt.attention.run import autocast_off, check_not_captured
from burst_rt.drivers import Progress, is_out_of_memory
from burst_rt.errors import ConfigError, DeviceError, InputError
from burst_rt.kernels import sum_dtype
from burst_rt.planning.numbers import Numbers
from burst_rt.planning.scan import (
    Advance,
    Collect,
    Compose,
    Emit,
    Fold,
    Offer,
    Prepare,
)
from burst_rt.planning.segments import Way
from burst_rt.recurrence.base import Recurrence, SegmentGrads, SegmentTensors, Stages
from burst_rt.recurrence.call import Bound, RecurrenceCall, RecurrencePlan
from burst_rt.recurrence.chunked import ChunkedRecurrence
from burst_rt.runtime.agreement import Contract
from burst_rt.runtime.bound_schedule import BoundSchedule

__all__ = [
    "RecurrenceFunction",
    "backward_stages",
    "forward_stages",
    "grad_sums",
    "run_alone",
    "segment_sums",
]

Tensor = torch.Tensor


class _Run(SlotRun):
    """One direction of one call.

    first: the state that the first segment begins from; in a backward the gradient of the last
    state on this rank. befores: after the run, the states that this rank's segments begin from, by
    the numbers of the segments before them. last: after `settle`, the state after all segments,
    where this rank has it.
    """

    def __init__(self, plan: RecurrencePlan, call: RecurrenceCall, first: Tensor) -> None:
        super().__init__(plan, call.attention.runtime.machine, poison=call.attention.poison)
        self._call, self._program, self._rank = call, plan.program, plan.rank
        self._part = plan.part_ids
        self._first = first
        self._places = {number: i for i, number in enumerate(self._program.order)}
        self.befores: dict[int | None, Tensor] = {}
        self.last: Tensor | None = None
        # Stages of this rank's segments, by number.
        self.stages: dict[int, Stages] = {}
        self.operations |= {
            Prepare: self._prepare,
            Compose: self._compose,
            Fold: self._fold,
            Advance: self._advance,
            Emit: self._emit,
            Offer: self._offer,
            Collect: self._collect,
        }

    def own(self) -> dict[int, slice]:
        """This rank's segments by number, and their tokens in the shard."""
        segments = enumerate(self._program.segments)
        return {number: s.shard for number, s in segments if s.owner == self._rank}

    def begun(self) -> list[int | None]:
        """The numbers of the segments that this rank's go on from, each once."""
        segments = self._program.segments
        return list(dict.fromkeys(segments[number].before for number in self.own()))

    def state(self, buffer: str, index: int = 0) -> Tensor:
        """The state in a slot, `[batch, ...]`."""
        call = self._call
        raw = self.storage[self._part[buffer, index]]
        return raw.view(call.wide).view(call.state_shape)

    def settle(self) -> None:
        """Takes the last state out of the slots, which the next call receives into again."""
        program, count = self._program, len(self._program.order)
        name = f"after {count - 1}" if program.owners[-1] == self._rank else "last"
        if (name, 0) in self._part:
            self.last = self.state(name).clone()

    def _before(self, number: int) -> Tensor:
        before = self._program.before(self._places[number], self._rank)
        if before is not None:
            return self.state(*before)
        collected = ("collected", 0) in self._part
        return self.state("collected") if collected else self._first

    def _prepare(self, op: Prepare) -> None:
        self.stages[op.number].prepare()

    def _compose(self, op: Compose) -> None:
        self.stages[op.number].compose()

    def _emit(self, op: Emit) -> None:
        self.stages[op.number].emit()

    def _offer(self, _: Offer) -> None:
        self.state("offered").copy_(self._first)

    def _fold(self, op: Fold) -> None:
        folded = self._program.ways[op.number] is Way.FOLDED
        before = self._before(op.number) if folded else None
        self.stages[op.number].fold(before, self.state(f"after {self._places[op.number]}"))

    def _advance(self, op: Advance) -> None:
        program, place = self._program, self._places[op.number]
        before, source = self._before(op.number), program.segments[op.number].before
        if program.forward and source not in self.befores:
            # The slot is received into again in the next call; the first state is the user's.
            self.befores[source] = before.clone()
        relayed = program.ways[op.number] is Way.RELAYED and program.keeps(place)
        after = self.state(f"after {place}") if relayed else None
        self.stages[op.number].advance(before, after)

    def _collect(self, op: Collect) -> None:
        first, *others = (self.state(*part) for part in op.parts)
        total = self.state(*op.total).copy_(first)
        for part in others:
            total.add_(part)


def _segment(wide: torch.dtype, bound: Bound, shard: slice) -> SegmentTensors:
    """The tensors of one of this rank's segments. wide: type of the sums."""
    whole = SegmentTensors(bound.tokens, bound.shared, bound.begins, wide, bound.progress)
    return whole.part(shard)


def forward_stages(call: RecurrenceCall, bound: Bound, shard: slice, out: Tensor) -> Stages:
    """The stages of one of this rank's segments. shard: its tokens. out: of all tokens."""
    return call.kernel.maker.forward(_segment(call.wide, bound, shard), out[:, shard])


def backward_stages(
    call: RecurrenceCall,
    bound: Bound,
    shard: slice,
    before: Tensor,
    dout: Tensor,
    sums: SegmentGrads,
) -> Stages:
    """The stages of one of this rank's segments; dout and sums are those of all tokens."""
    segment = _segment(call.wide, bound, shard)
    tokens = tuple(None if dx is None else dx[:, shard] for dx in sums.tokens)
    maker = call.kernel.maker
    return maker.backward(segment, before, dout[:, shard], sums._replace(tokens=tokens))


def grad_sums(call: RecurrenceCall, bound: Bound) -> SegmentGrads:
    """What the backward's stages add to.

    Each token is added to once, in its own type, but for those that several segments remember.
    """

    def sums(tensors: Sequence[Tensor], needs: Sequence[bool], in_type: bool) -> Any:
        pairs = zip(tensors, needs, strict=True)
        return tuple(
            torch.zeros_like(x, dtype=x.dtype if in_type else call.wide) if needed else None
            for x, needed in pairs
        )

    count = len(bound.tokens)
    return SegmentGrads(
        sums(bound.tokens, call.needs[:count], call.recurrence.memory is None),
        sums(bound.shared, call.needs[count:-1], False),
    )


def segment_sums(sums: SegmentGrads) -> SegmentGrads:
    """What one segment's backward adds to; sums: those of all.

    In which order a rank's segments end may depend on when messages come. So each has sums of its
    own for the tensors that all share, and these are added in one order.
    """
    shared = (None if dx is None else torch.zeros_like(dx) for dx in sums.shared)
    return sums._replace(shared=tuple(shared))


def _forward(call: RecurrenceCall, bound: Bound, initial: Tensor | None) -> list[Tensor]:
    """out, the last state if it is returned, and the states before this rank's segments."""
    shape = call.recurrence.out_like(bound.tokens).shape
    device = bound.tokens[0].device

    def bind(plan: RecurrencePlan) -> tuple[_Run, Tensor]:
        first = _state(call.state_shape, call.wide, initial, device)
        run = _Run(plan, call, first)
        out = run.fresh(*shape, dtype=call.dtype)
        for number, shard in run.own().items():
            run.stages[number] = forward_stages(call, bound, shard, out)
        return run, out

    run, out = _performed(call, call.forward_contract, "forward_plan", bound.progress, bind)
    last = [run.last] if call.returns_state else []
    return [out, *last, *(run.befores[number] for number in run.begun())]


class _Gradients(NamedTuple):
    tokens: tuple[Tensor | None, ...]
    shared: tuple[Tensor | None, ...]
    initial: Tensor | None


def _backward(
    call: RecurrenceCall,
    bound: Bound,
    befores: Sequence[Tensor],
    dout: Tensor,
    dlast: Tensor | None,
) -> _Gradients:

    def bind(plan: RecurrencePlan) -> tuple[_Run, list[SegmentGrads]]:
        run = _Run(plan, call, _state(call.state_shape, call.wide, dlast, dout.device))
        sums, begun = [grad_sums(call, bound)], dict(zip(run.begun(), befores, strict=True))
        for number, shard in run.own().items():
            sums.append(segment_sums(sums[0]))
            before = begun[plan.program.segments[number].before]
            run.stages[number] = backward_stages(call, bound, shard, before, dout, sums[-1])
        return run, sums

    run, sums = _performed(call, call.backward_contract, "backward_plan", bound.progress, bind)
    whole = sums[0]
    for part in sums[1:]:
        for total, dx in zip(whole.shared, part.shared, strict=True):
            if total is not None and dx is not None:
                total.add_(dx)
    initial = None
    if call.needs[-1]:
        # The owner of the first segment has the whole gradient, and other ranks have a share of 0.
        initial = _state(call.state_shape, call.wide, run.last, dout.device)
    return _Gradients(
        _typed(whole.tokens, bound.tokens), _typed(whole.shared, bound.shared), initial
    )


def _typed(sums: Sequence[Tensor | None], tensors: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """The gradients in the types of their tensors."""
    return tuple(
        None if dx is None else dx.to(x.dtype) for dx, x in zip(sums, tensors, strict=True)
    )


def _state(
    shape: torch.Size, wide: torch.dtype, state: Tensor | None, device: torch.device
) -> Tensor:
    """A state as runs take it: of the type of the sums; zeros for None."""
    if state is None:
        return torch.zeros(shape, dtype=wide, device=device)
    return state.to(wide).expand(shape).contiguous()


@torch.no_grad()
def run_alone(
    recurrence: Recurrence, bound: Bound, initial: Tensor | None
) -> tuple[Tensor, Tensor]:
    """out and the last state of tokens that are all on this rank, at least one. Local."""
    like = recurrence.out_like(bound.tokens)
    wide, device, count = sum_dtype(like.dtype), like.device, like.shape[1]
    if isinstance(recurrence, ChunkedRecurrence):  # few tokens would be filled up to a chunk
        recurrence = replace(recurrence, size=min(recurrence.size, count))
    shape = recurrence.state_shape(bound.tokens, bound.shared)
    first, out = _state(shape, wide, initial, device), torch.empty_like(like)
    last = torch.empty_like(first)
    with autocast_off(device.type):
        stages = recurrence.forward(_segment(wide, bound, slice(None)), out)
        stages.prepare()
        stages.advance(first, last)
        stages.emit()
    return out, last


def _performed(
    call: RecurrenceCall,
    contract: Contract,
    plan_name: str,
    progress: Progress,
    bind: Callable[[RecurrencePlan], Any],
) -> Any:  # what `bind` returned
    """Binds a plan's tensors and performs it. Collective; blocks as `Runtime.perform` does."""
    runtime = call.attention.runtime
    try:
        check_not_captured(runtime.device)
        plan: RecurrencePlan = getattr(call, plan_name)
    except (ConfigError, InputError) as error:
        runtime.refuse(contract.call, error)
    try:
        run, result = bind(plan)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        refused = DeviceError(
            f"{contract.call}: out of memory on {runtime.device}; {plan.explain()}",
            rank=runtime.rank,
        )
        refused.__cause__ = error
        runtime.refuse(contract.call, refused)
    bound = BoundSchedule(plan.schedule, run.operations, run.memory, progress, plan, plan.explain)
    _, free = runtime.perform(contract, bound)
    run.settle()
    runtime.machine.give_back(plan, run.slots, free, read_since=True)
    run.forget()
    return run, result


class RecurrenceFunction(torch.autograd.Function):
    """`apply(call, begins, initial_state, count, *tensors)` -> (out, last state or None).

    The first `count` tensors have tokens, the others have none. Collective, and blocks, in the
    forward and in the backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: RecurrenceCall,
        begins: Tensor | None,
        initial: Tensor | None,
        count: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Runs the call, and saves its inputs and the state before each segment."""
        if torch._C._len_torch_dispatch_stack() > 0:
            # A mode, such as one that keeps results for checkpointing, sees one op.
            let_count(recurrence_op, _flops_of)
            with torch._C._AutoDispatchBelowAutograd():
                made = recurrence_op(_CALLS.give(call), begins, initial, count, tensors)
            number, *rest = made
        else:
            bound = Bound(tensors[:count], tensors[count:], begins, Progress())
            with torch.no_grad(), autocast_off(tensors[0].device.type):
                rest = _forward(call, bound, initial)
            number = call.attention.runtime.number
        # The number is that of the first forward, if a checkpoint runs the forward again.
        ctx.call, ctx.count, ctx.number = call, count, number
        out, last, *befores = rest if call.returns_state else (rest[0], None, *rest[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(begins, *tensors, *befores)
        return out, last

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlast: Tensor | None) -> tuple[Tensor | None, ...]:
        """Returns the gradients, None where one is not needed."""
        call: RecurrenceCall = ctx.call
        runtime = call.attention.runtime
        where = f"backward of {call.recurrence.name}"
        if torch.is_grad_enabled():
            text = "second derivatives are not supported; differentiate once, without create_graph"
            runtime.refuse(where, InputError(f"{where}: {text}=True"))
        try:
            begins, *saved = ctx.saved_tensors
        except RuntimeError as error:  # one was changed in place: the other ranks must hear so
            runtime.refuse(where, InputError(f"{where}: {error}"))
        if any(x is not None and _is_batched(x) for x in (dout, dlast)):
            text = "batched gradients (is_grads_batched, vmap) are not supported; take one"
            runtime.refuse(where, InputError(f"{where}: {text} at a time"))
        num = len(call.needs) - 1
        tensors, befores = tuple(saved[:num]), saved[num:]
        bound = Bound(tensors[: ctx.count], tensors[ctx.count :], begins, Progress())
        if dout is None:
            shape = call.recurrence.out_like(bound.tokens).shape
            dout = torch.zeros(shape, dtype=call.dtype, device=tensors[0].device)
        with runtime.backward_of(int(ctx.number)), autocast_off(dout.device.type), torch.no_grad():
            grads = _backward(call, bound, befores, dout, dlast)
        return (None, None, grads.initial, None, *grads.tokens, *grads.shared)


def _is_batched(x: Tensor) -> bool:
    """Whether torch computes with several tensors at once, under the name of one."""
    # torch gives the key of `is_grads_batched` no name.
    return "Batched" in str(torch._C._dispatch_keys(x))


# The calls that go through the dispatcher, which takes numbers and tensors only.
_CALLS: Numbers[RecurrenceCall] = Numbers(2**42)


def _run_op(
    number: int, begins: Tensor | None, initial: Tensor | None, count: int, tensors: list[Tensor]
) -> list[Tensor]:
    """The number of the call among the runtime's, and what `_forward` returns."""
    call = _CALLS.find(number)
    assert call is not None  # the caller holds it
    bound = Bound(tuple(tensors[:count]), tuple(tensors[count:]), begins, Progress())
    with autocast_off(tensors[0].device.type):
        made = _forward(call, bound, initial)
    return [torch.tensor(call.attention.runtime.number, device="cpu"), *made]


def _flops_of(number: int, *_: Any, out_val: list[Tensor]) -> int:
    """Floating-point operations of this rank's part of a call's forward."""
    call = _CALLS.find(number)
    assert call is not None  # the caller holds it
    return call.forward_plan.flops


_library = torch.library.Library("burst_rt", "FRAGMENT")
_library.define(
    "recurrence(int call, Tensor? begins, Tensor? initial, int count, Tensor[] tensors) -> Tensor[]"
)
_library.impl("recurrence", _run_op, "CompositeExplicitAutograd")
_register_effectful_op("burst_rt::recurrence", EffectType.ORDERED)
recurrence_op = torch.ops.burst_rt.recurrence.default
KEPT_OPS.add(recurrence_op)
