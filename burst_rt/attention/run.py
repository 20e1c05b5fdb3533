"""Runs a checked call: gets the plan, binds the tensors, performs the schedule."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from burst_rt.attention.call import Call, check_values
from burst_rt.attention.execute import RUNS, BackwardBinding, Binding
from burst_rt.attention.planner import Plan
from burst_rt.drivers import Progress, is_out_of_memory
from burst_rt.errors import DeviceError, InputError
from burst_rt.runtime.runtime import Runtime

__all__ = ["run_backward", "run_forward"]


def run_forward(
    call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of this rank's queries.

    Collective; blocks and raises as `burst_attention` does.
    """
    if torch.is_autocast_enabled(q.device.type):
        # Autocast would change the dtype of the sums.
        with torch.autocast(q.device.type, enabled=False):
            return run_forward(call, q, k, v)
    setup, name = call.setup, "burst_attention"
    runtime = setup.runtime
    try:
        if setup.check_finite:
            check_values(q, k, v)
        plan = call.forward_plan
    except InputError as error:
        runtime.refuse(name, error)
    progress = Progress()
    with _enough_memory(runtime, name, plan):
        run = RUNS[type(plan.choice.program)].forward(
            Binding(
                plan=plan,
                machine=runtime.machine,
                scale=call.scale,
                progress=progress,
                poison=setup.poison,
                q=q.detach(),
                k=k.detach(),
                v=v.detach(),
            )
        )
    description, digest = call.forward_terms
    _, free = runtime.perform(
        name, plan.schedule, run.operations, run.memory,
        description=description, digest=digest, progress=progress, subject=plan,
        takes=partial(_takes, plan),
    )  # fmt: skip
    runtime.machine.give_back(plan, run.slots, free)
    return run.out, run.lse


def run_backward(
    call: Call,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """dq, dk and dv of this rank's tokens; None for a gradient that the call does not need.

    Collective; blocks and raises as `burst_attention` does.
    """
    if torch.is_autocast_enabled(q.device.type):
        with torch.autocast(q.device.type, enabled=False):
            return run_backward(call, dout, dlse, q, k, v, out, lse)
    setup, name = call.setup, "backward of burst_attention"
    runtime = setup.runtime
    try:
        plan = call.backward_plan
    except InputError as error:
        runtime.refuse(name, error)
    progress = Progress()
    with _enough_memory(runtime, name, plan):
        run = RUNS[type(plan.choice.program)].backward(
            BackwardBinding(
                plan=plan,
                machine=runtime.machine,
                scale=call.scale,
                progress=progress,
                poison=setup.poison,
                q=q.detach(),
                k=k.detach(),
                v=v.detach(),
                out=out.detach(),
                lse=lse.detach(),
                dout=dout.detach(),
                dlse=None if dlse is None else dlse.detach(),
            )
        )
    description, digest = call.backward_terms
    _, free = runtime.perform(
        name, plan.schedule, run.operations, run.memory,
        description=description, digest=digest, progress=progress, subject=plan,
        takes=partial(_takes, plan),
    )  # fmt: skip
    runtime.machine.give_back(plan, run.slots, free)
    return run.grads()


@contextmanager
def _enough_memory(runtime: Runtime, name: str, plan: Plan) -> Iterator[None]:
    """Inside, a call's tensors are bound; if memory runs out, every rank raises DeviceError.

    Binding takes all memory of the call but the tiles' scratch, before anything is sent. To refuse
    the call blocks at most `timeout_s`.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        message = f"out of memory on {runtime.device}: {_takes(plan)}"
        runtime.refuse(name, DeviceError(message, rank=runtime.rank))


def _takes(plan: Plan) -> str:
    """The memory of a call by the plan's formula, in words, and what to do if it is too much."""
    need = plan.memory()
    formula = " + ".join(f"{name} {size:,}" for name, size in need._asdict().items() if size)
    return (
        f"this call takes {need.total:,} bytes beyond its inputs and outputs ({formula}). Use more "
        "ranks, use fewer tokens or heads a call, or free other memory of the device"
    )
