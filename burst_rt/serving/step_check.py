"""Checks of what `Step.attend` is given, on this rank alone: masks, and q, k and v."""

from __future__ import annotations

import torch

from burst_rt.attention.options import CAUSAL
from burst_rt.errors import InputError
from burst_rt.kernels import QKV
from burst_rt.planning.masks import Mask
from burst_rt.serving.memory import KVShape

__all__ = ["ATTEND", "check_qkv", "look_of", "structure_of"]

ATTEND = "Step.attend"


def structure_of(mask: Mask | None, capacity: int) -> Mask:
    """What the queries of a step see of a cache with room for `capacity` tokens.

    Raises InputError for a mask that a cache cannot have.
    """
    if mask is None:
        return CAUSAL
    if not isinstance(mask, Mask):
        raise InputError(
            f"{ATTEND}: mask must be a burst_rt.Mask such as SlidingWindow(1023), got "
            f"{type(mask).__name__}"
        )
    if not mask.has_spans or mask.batch > 1 or mask.mover is not None:
        raise InputError(
            f"{ATTEND}: mask must have spans and be one for all sequences, got {mask!r}; "
            "give left padding to KVCache.step, and use a cache for each document"
        )
    misfit = mask.refuses(capacity, capacity, 1)
    if misfit is not None:
        raise InputError(
            f"{ATTEND}: mask must be for as many tokens as the cache has room for (capacity), "
            f"or for any number, got one of another number: {misfit}"
        )
    return CAUSAL & mask


def check_qkv(qkv: QKV, shape: KVShape, num_tokens: int, device: torch.device) -> int:
    """The number of q's heads. Raises InputError for tensors that do not fit the step."""
    q_shape = _shape(qkv.q)
    heads = q_shape[2] if len(q_shape) == 4 else 0
    rows = (shape.batch, num_tokens)
    shapes = (
        (*rows, heads, shape.head_dim),
        (*rows, shape.num_kv_heads, shape.head_dim),
        (*rows, shape.num_kv_heads, shape.v_head_dim),
    )
    for name, x, wanted in zip("qkv", qkv, shapes, strict=True):
        if (
            _shape(x) != wanted
            or x.dtype != shape.dtype
            or x.device != device
            or x.layout != torch.strided
        ):
            raise InputError(
                f"{ATTEND}: {name} must be a dense {shape.dtype} tensor on {device} of shape "
                f"{wanted} ([batch, this rank's tokens of the step, heads, head_dim]), "
                f"got {_in_words(x)}"
            )
    if not heads or heads % shape.num_kv_heads:
        raise InputError(
            f"{ATTEND}: the number of q's heads must be a multiple of the cache's "
            f"{shape.num_kv_heads} kv heads, got {heads}"
        )
    if torch.is_grad_enabled() and any(x.requires_grad for x in qkv):
        raise InputError(
            f"{ATTEND}: q, k and v must not require grad, because a cache has no backward; call "
            "the model under torch.inference_mode()"
        )
    return heads


def _in_words(x: object) -> str:
    """What was given in place of a tensor that fits."""
    if not isinstance(x, torch.Tensor):
        return type(x).__name__
    shape = "a nested shape" if x.is_nested else f"shape {_shape(x)}"
    return f"{x.dtype} of {shape} on {x.device} ({x.layout})"


def _shape(x: object) -> tuple[int, ...]:
    """A tensor's shape; () of what is no tensor, or a nested one."""
    return tuple(x.shape) if isinstance(x, torch.Tensor) and not x.is_nested else ()


def look_of(x: object) -> object:
    """All that a check looks at of an argument that should be a tensor."""
    if not isinstance(x, torch.Tensor) or x.is_nested:
        return type(x)
    return x.shape, x.dtype, x.device, x.layout, x.requires_grad
