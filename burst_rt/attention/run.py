"""Runs a checked call: gets the plan, binds the tensors, performs the schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import NamedTuple, NoReturn, Protocol, TypeVar

import torch

from burst_rt.attention.call import Call
from burst_rt.attention.execute import BackwardRun, Binding, ForwardRun, run_types
from burst_rt.attention.execute.straight import StraightBackward, StraightForward
from burst_rt.attention.planner import Plan
from burst_rt.attention.state import AttentionState
from burst_rt.attention.tensor_check import check_values
from burst_rt.drivers import Progress, is_out_of_memory
from burst_rt.errors import ConfigError, DeviceError, InputError
from burst_rt.kernels import QKV, Gradients, Results, ScoreOptions
from burst_rt.runtime.agreement import AgreedWhen, Contract
from burst_rt.runtime.bound_schedule import BoundSchedule

__all__ = [
    "Forward",
    "autocast_off",
    "check_not_captured",
    "plain_math",
    "run_backward",
    "run_forward",
]

_NONE = ScoreOptions()
_R = TypeVar("_R", ForwardRun, BackwardRun)
_B = TypeVar("_B")
_NOTHING = nullcontext()


class Forward(Protocol):
    """The arguments of `run_forward` for one call."""

    @property
    def attention(self) -> AttentionState: ...

    @property
    def forward_contract(self) -> Contract: ...

    @property
    def forward_plan(self) -> Plan:
        """Raises InputError and ConfigError where there is none."""

    @property
    def scale(self) -> float | None: ...

    @property
    def agreed(self) -> AgreedWhen:
        """The time at which the ranks agree on the call."""


def run_forward(
    call: Forward, qkv: QKV, score_options: ScoreOptions = _NONE
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of this rank's queries. score_options: of all heads, as the user gave them.

    Collective; blocks and raises as `burst_attention` does.
    """
    attention, contract = call.attention, call.forward_contract
    runtime = attention.runtime
    with autocast_off(qkv.q.device.type):
        try:
            check_not_captured(runtime.device)
            # A layer of a step has checked its values before they were cached.
            if attention.check_finite and call.agreed is AgreedWhen.OPENING:
                check_values(contract.call, qkv, score_options)
            plan = call.forward_plan
        except (ConfigError, InputError) as error:
            runtime.refuse(contract.call, error)
        stream = _straight_stream(call, plan) if plan.straight else None
        if stream is not None:
            bind = partial(StraightForward, plan, call.scale, qkv, score_options, stream)
            straight = _in_memory(call, plan, contract, bind)
            runtime.perform_straight(contract, plan.graph, straight.steps, plan.takes)
            return straight.out, straight.lse
        make = run_types(type(plan.choice.program)).forward
        run = _bound(call, plan, make, _Given(contract, qkv, score_options))
        _, free = runtime.perform(contract, _schedule(plan, run), call.agreed)
        runtime.machine.give_back(plan, run.slots, free)
        run.forget()
        return run.out, run.lse


def run_backward(
    call: Call, qkv: QKV, results: Results, forward: int, score_options: ScoreOptions = _NONE
) -> tuple[Gradients, torch.Tensor | None]:
    """The gradients of this rank's tokens, and its share of the sinks'; None for one not needed.

    forward: the number of the call that is differentiated, which the ranks compare. Collective;
    blocks and raises as `burst_attention` does.
    """
    contract, runtime = call.backward_contract, call.attention.runtime
    with runtime.backward_of(forward), autocast_off(qkv.q.device.type):
        try:
            check_not_captured(runtime.device)
            plan = call.backward_plan
        except (ConfigError, InputError) as error:
            runtime.refuse(contract.call, error)
        stream = _straight_stream(call, plan) if plan.straight else None
        if stream is not None:
            bind = partial(StraightBackward, plan, call.scale, qkv, results, score_options, stream)
            straight = _in_memory(call, plan, contract, bind)
            runtime.perform_straight(contract, plan.graph, straight.steps, plan.takes)
            return straight.grads(), None
        make = run_types(type(plan.choice.program)).backward
        run = _bound(call, plan, make, _Given(contract, qkv, score_options, results))
        _, free = runtime.perform(contract, _schedule(plan, run))
        runtime.machine.give_back(plan, run.slots, free)
        run.forget()
        dsinks = run.dsinks
        if dsinks is not None and score_options.sinks is not None:
            dsinks = dsinks.to(score_options.sinks.dtype)
        return run.grads(), dsinks


def check_not_captured(device: torch.device) -> None:
    """Raises InputError where the caller's stream is being captured into a CUDA graph.

    The graph would replay this call's launches, without the other ranks' consent and without
    whatever the host does.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise InputError(
            "burst_attention: a CUDA graph cannot hold a call, because the host takes part in "
            "every call; capture the code before it and after it (torch.compile with "
            'mode="reduce-overhead" does so while torch._inductor.config.graph_partition is on)'
        )


def autocast_off(device_type: str) -> AbstractContextManager[object]:
    """Inside, autocast is off: it would change the dtype of the sums."""
    if not torch.is_autocast_enabled(device_type):
        return _NOTHING
    return torch.autocast(device_type, enabled=False)


def plain_math(device_type: str) -> AbstractContextManager[object]:
    """Inside, autograd is off, and so is autocast."""
    on = torch.is_grad_enabled() or torch.is_autocast_enabled(device_type)
    return _plain_math(device_type) if on else _NOTHING


@contextmanager
def _plain_math(device_type: str) -> Iterator[None]:
    with torch.no_grad(), autocast_off(device_type):
        yield


class _Given(NamedTuple):
    """One direction of a call: its words, and its tensors; a backward has results."""

    contract: Contract
    qkv: QKV
    score_options: ScoreOptions
    results: Results | None = None


def _bound(call: Forward, plan: Plan, make: Callable[[Binding], _R], given: _Given) -> _R:
    """Binds a call's tensors: the run that is to be performed.

    To bind takes all memory of the call but the tiles' scratch, before anything is sent. If memory
    runs out, every rank raises DeviceError: the call is refused, which blocks at most `timeout_s`.
    One of several calls that the ranks agreed on at once cannot be refused: there this rank fails.
    """
    contract, qkv, score_options, results = given

    def bind() -> _R:
        return make(
            Binding(
                plan=plan,
                machine=call.attention.runtime.machine,
                scale=call.scale,
                progress=Progress(),
                poison=call.attention.poison,
                qkv=qkv.detach(),
                results=None if results is None else results.detach(),
                score_options=score_options.bound(plan.key.dtype, plan.key.problem.batch),
            )
        )

    return _in_memory(call, plan, contract, bind)


def _in_memory(call: Forward, plan: Plan, contract: Contract, bind: Callable[[], _B]) -> _B:
    """What `bind` gives, which takes memory as `_bound` does.

    Where it finds too little, it is tried once more without the idle slots of other plans.
    """
    try:
        return bind()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error) or not call.attention.runtime.machine.forget():
            _no_memory(call, plan, contract, error)
    # The first try's tensors have gone with its error.
    try:
        return bind()
    except (MemoryError, RuntimeError) as error:
        _no_memory(call, plan, contract, error)


def _no_memory(call: Forward, plan: Plan, contract: Contract, error: Exception) -> NoReturn:
    """Raises what follows from an error of binding, on every rank if memory has run out."""
    if not is_out_of_memory(error):
        raise error
    runtime = call.attention.runtime
    refused = DeviceError(f"out of memory on {runtime.device}: {plan.takes()}", rank=runtime.rank)
    refused.__cause__ = error
    if call.agreed is AgreedWhen.WITH_OTHERS:
        runtime.fail(refused)
    runtime.refuse(contract.call, refused)


def _straight_stream(call: Forward, plan: Plan) -> int | None:
    """The handle of the caller's stream, if the call may take the straight way.

    It may not where somebody looks on: at times, or at what is read before it is written.
    """
    attention = call.attention
    runtime = attention.runtime
    opens = call.agreed is AgreedWhen.OPENING
    if not opens or attention.poison or runtime.takes_times:
        return None
    return runtime.machine.straight_stream()


def _schedule(plan: Plan, run: ForwardRun | BackwardRun) -> BoundSchedule:
    """A plan's schedule, bound to a run's tensors."""
    return BoundSchedule(plan.schedule, run.operations, run.memory, run.progress, plan, plan.takes)
