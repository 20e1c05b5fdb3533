"""Activation checkpointing that keeps attention's outputs, and so never runs attention twice.

Torch's own checkpointing, without reentrant autograd, and a policy for it. It keeps a layer's
inputs and attention's outputs (out and lse); every other activation is computed again in the
backward. So each attention call goes round its ring once in the forward and once in the backward.
The policy sees the call because under a mode attention goes through the dispatcher (`autograd`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint as torch_checkpointing
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from burst_rt.attention.autograd import KEPT_OPS
from burst_rt.errors import InputError
from burst_rt.runtime.refusing import refuse, refuse_kinds

__all__ = ["checkpoint", "keep_attention"]

_R = TypeVar("_R")


# ctx: a SelectiveCheckpointContext. op: an OpOverload, or an operator of torch's compiler.
def keep_attention(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy of `checkpoint` for torch's selective checkpointing: says whether an op's result
    is kept.

    MUST_SAVE for the forward of `burst_attention`, whose outputs are out and lse, and for those of
    `burst_rt.recurrence`; PREFER_RECOMPUTE for every other op. As torch takes it, here and wherever
    a `context_fn` goes:

        context_fn = partial(create_selective_checkpoint_contexts, burst_rt.keep_attention)
        torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False, context_fn=context_fn)

    A policy that keeps more calls this policy for the ops that it does not know. Does not block.
    Source: `torch.utils.checkpoint.create_selective_checkpoint_contexts`.
    """
    return CheckpointPolicy.MUST_SAVE if op in KEPT_OPS else CheckpointPolicy.PREFER_RECOMPUTE


@refuse_kinds
def checkpoint(
    function: Callable[..., _R], *args: Any, use_reentrant: bool = False, **kwargs: Any
) -> _R:
    """`function(*args, **kwargs)`, whose activations are computed again in the backward.

    Attention is not: of every `burst_attention` inside, out and lse are kept, of every recurrence
    its result and states, and nothing is sent for the second computation. Gradients are those
    without checkpointing, bit for bit. (Under autocast, of a weight that several layers share:
    those with autocast's cache_enabled=False.) Blocks as `function` does, in the forward; the
    backward blocks as attention's backward does.

    function: a layer, mostly: a module, or any function of tensors that computes the same both
        times. Random numbers are drawn again as they were.
    args, kwargs: what `function` is called with. `preserve_rng_state`, `determinism_check` and
        `early_stop` go to `torch.utils.checkpoint.checkpoint`, and mean what they mean there.
    use_reentrant: False; torch keeps no chosen outputs in its reentrant variant.

    Returns what `function` returns. Without gradients (`torch.no_grad`) that is all that happens.
    A backward runs once: with retain_graph=True a second one raises torch's RuntimeError.

    Raises InputError for use_reentrant=True, and for a `context_fn` or `debug` of torch's, which
    leave no room for this policy; on every rank that waits for this one.
    """
    others = {"context_fn", "debug"} & kwargs.keys()
    if use_reentrant or others:
        wrong = "use_reentrant=True" if use_reentrant else " and ".join(sorted(others))
        error = InputError(
            f"checkpoint: {wrong} cannot be combined with the policy that keeps attention's "
            "outputs; leave it out, or call torch.utils.checkpoint.checkpoint with a policy of "
            "your own that calls burst_rt.keep_attention"
        )
        refuse("checkpoint", error)
    result: _R = torch_checkpointing.checkpoint(
        function, *args, use_reentrant=False, context_fn=_contexts, **kwargs
    )
    return result


def _contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of the two computations, the forward's first. Made when the forward begins."""
    # Autocast remembers a weight that it has cast, until its own end. A weight that an earlier
    # layer has cast would be cast in the second computation alone, and torch refuses ops there that
    # it has not seen in the first.
    torch.clear_autocast_cache()
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(keep_attention)
    return contexts
