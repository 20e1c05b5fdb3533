"""What a recurrence's call would do: its plans, and the memory that they take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from burst_rt.arguments import holds_values, wrong_kind
from burst_rt.errors import InputError
from burst_rt.recurrence import api
from burst_rt.recurrence.call import RecurrenceCall, RecurrencePlan
from burst_rt.recurrence.memory import LiveBytes, peak_bytes

__all__ = ["RecurrenceExplanation", "explain_recurrence"]


@dataclass(frozen=True)
class RecurrenceExplanation:
    """The plans of a call, made without running it, and the memory that they take.

    memory: bytes beyond inputs and results, forward and backward. `str()` puts all into words.
    """

    forward: RecurrencePlan
    backward: RecurrencePlan | None  # None where no tensor needs a gradient
    memory: tuple[int, ...]

    def __str__(self) -> str:
        plans = [plan for plan in (self.forward, self.backward) if plan is not None]
        return "\n".join(
            f"{plan.explain()}\n  memory beyond inputs and results: {size:,} bytes"
            for plan, size in zip(plans, self.memory, strict=True)
        )


def explain_recurrence(
    function: Callable[..., Any], *args: Any, **kwargs: Any
) -> RecurrenceExplanation:
    """The plans that a function of this module would run with these arguments.

    A plan tells segments, how states pass, bytes and memory. Local: nothing is sent; the
    first time takes a second. Raises InputError.

    Worked example: `explain_recurrence(gated_delta_rule, q, k, v, g, beta, layout=layout)`.
    """
    bind = getattr(function, "__wrapped__", None)
    if bind is None or getattr(bind, "__module__", "") != api.__name__:
        raise InputError(
            f"explain_recurrence: function must be one of burst_rt.recurrence, got {function!r}"
        )
    error = wrong_kind(bind, args, kwargs)
    if error is not None:
        raise error
    all_given = (*args, *kwargs.values())
    given = tuple(x for x in all_given if isinstance(x, torch.Tensor) and holds_values(x))
    with LiveBytes(given) as made:
        bound = bind(*args, **kwargs)
    call = bound.call
    if call is None:
        raise InputError(
            f"explain_recurrence: layout: expected one, got None: {function.__name__} is then "
            "local, and has no plan"
        )
    memory = [
        peak_bytes(call, forward=forward) + _beside(bound, made, forward=forward)
        for forward in ((True, False) if any(call.needs) else (True,))
    ]
    return RecurrenceExplanation(
        call.forward_plan,
        call.backward_plan if any(call.needs) else None,
        tuple(memory),
    )


def _beside(bound: Any, made: LiveBytes, *, forward: bool) -> int:
    """Bytes that a function takes beside its call.

    What it makes of its arguments lives until the backward, and so do the states that segments
    begin from; the backward adds the gradients of what was made. The call's result may be of a
    wider type than the user's.
    """
    call: RecurrenceCall = bound.call
    out = call.recurrence.out_like(bound.tokens)
    wide = out.numel() * call.dtype.itemsize if call.dtype != call.given_dtype else 0
    if forward:
        return made.bytes + wide - (out.numel() * call.given_dtype.itemsize if wide else 0)
    given: tuple[torch.Tensor, ...] = (*bound.tokens, *bound.shared)
    needed = zip(given, call.needs, strict=False)
    gradients = sum(x.nbytes for x, needs in needed if needs and made.has(x))
    rank, program = call.forward_plan.rank, call.forward_plan.program
    kept = {segment.before for segment in program.segments if segment.owner == rank}
    return made.bytes + wide + gradients + len(kept) * program.state_bytes
