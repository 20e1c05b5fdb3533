"""Functions whose forward and backward are both written by hand: a pipeline each, say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from burst_rt.arguments import check_kinds
from burst_rt.eager import eager
from burst_rt.errors import InputError
from burst_rt.runtime.process import process
from burst_rt.runtime.runtime import Runtime

__all__ = ["differentiable"]


# Arguments, results and gradients are as many as the user's function has: hence `Any`.
@check_kinds
def differentiable(
    forward: Callable[..., tuple[Any, Sequence[torch.Tensor]]], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """A function that autograd differentiates: forward and backward may each run a pipeline.

    forward: `forward(*args)` returns the function's result, which is a tensor or a tuple of
        tensors, and a sequence of the tensors to keep for the backward.
    backward: `backward(kept, *grads)` gets these tensors, and a gradient for each tensor of the
        result. It returns a gradient, or None, for each of args: a tuple, or one for one. The grads
        are its own to overwrite, contiguous, and zeros for what the program did not use.

    Neither is recorded by autograd, so gradients of gradients are refused. The function takes
    positional arguments only, and blocks as forward and backward do. In a program over ranks, all
    ranks must differentiate what some rank differentiates, in the same order: where the forward
    makes calls over ranks, the backward's calls raise ContractMismatch on ranks that are in
    backwards of different forwards. As `jax.custom_vjp`.
    """

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            runtimes = [made for made in process.made_for_here() if isinstance(made, Runtime)]
            before = [runtime.number for runtime in runtimes]
            both = forward(*args)
            pair = isinstance(both, (tuple, list)) and len(both) == 2
            if not pair or not isinstance(both[1], Sequence):
                raise InputError(
                    "differentiable: forward: expected it to return (result, tensors to keep), got "
                    f"{type(both).__name__}; end it with `return result, ()` where nothing is kept"
                )
            result, kept = both
            ctx.save_for_backward(*kept)
            # The last call that the forward made in each group says which forward it was.
            ctx.calls = [
                (runtime, runtime.number)
                for runtime, number in zip(runtimes, before, strict=True)
                if runtime.number != number
            ]
            return result

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            mine = [grad.clone(memory_format=torch.contiguous_format) for grad in grads]
            try:
                kept = ctx.saved_tensors  # a checkpoint may run a forward for these
            except RuntimeError as error:  # one was changed in place, or let go
                refused = InputError(f"differentiable: backward: {error}")
                for runtime, _ in ctx.calls[-1:]:
                    runtime.refuse("differentiable", refused)
                raise refused from error
            with ExitStack() as stack:
                for runtime, number in ctx.calls:
                    stack.enter_context(runtime.backward_of(number))
                return backward(kept, *mine)

    return eager(Function.apply)
