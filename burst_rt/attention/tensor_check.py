"""Checks of a call's tensors, on this rank alone: shapes, types, devices, and the layout's tokens.

Checks of options that depend on tensors are here, too. Nothing here is collective.
"""

from __future__ import annotations

import math

import torch

from burst_rt.attention.options import Options
from burst_rt.attention.sharding import ContextLayout
from burst_rt.errors import InputError
from burst_rt.kernels import DTYPES, QKV, ScoreOptions, sum_dtype
from burst_rt.planning.masks import Mask

__all__ = ["check_not_of_inference", "check_scores", "check_tensors", "check_values"]

_WHERE = "burst_attention"


def check_not_of_inference(*tensors: torch.Tensor | None) -> None:
    """Raises InputError for a tensor of q, k, v, sinks that autograd cannot keep."""
    for name, x in zip(("q", "k", "v", "sinks"), tensors, strict=True):
        if x is not None and isinstance(x, torch.Tensor) and x.is_inference():
            raise InputError(
                f"{_WHERE}: {name} was made in inference mode, and another argument requires grad; "
                f"pass {name}.clone(), or call under torch.no_grad()"
            )


def check_tensors(qkv: QKV, options: Options) -> None:
    """Checks this rank's q, k and v, each by itself and with the others. Raises InputError."""
    layout, kv_layout = options.layout, options.kv_layout or options.layout
    for name, x in qkv._asdict().items():
        _check_kind(name, x, layout.runtime.device)
        _check_tokens(name, x, layout, layout if name == "q" else kv_layout)
        if x.dtype != qkv.q.dtype:
            raise InputError(f"{_WHERE}: {name} must have q's dtype {qkv.q.dtype}, got {x.dtype}")
        if x.shape[0] != qkv.q.shape[0]:
            raise InputError(
                f"{_WHERE}: {name} must have q's batch size {qkv.q.shape[0]}, got {x.shape[0]}"
            )
    _check_heads(qkv, options.scale)


def _check_kind(name: str, x: object, device: torch.device) -> None:
    """Raises InputError for what is no dense tensor of four dimensions on this device."""
    where = f"{_WHERE}: {name}"
    if not isinstance(x, torch.Tensor):
        raise InputError(f"{where} must be a torch.Tensor, got {type(x).__name__}")
    expected = f"{where} must be a dense tensor [batch, tokens, heads, head_dim], got"
    if x.is_nested:
        raise InputError(f"{expected} a nested one")
    if x.layout != torch.strided or x.ndim != 4:
        raise InputError(f"{expected} {x.layout} of shape {tuple(x.shape)}")
    if x.device != device:
        raise InputError(
            f"{where} must be on {device}, the context's device, got {x.device}; move it with "
            f"{name}.to(ctx.device)"
        )
    if x.dtype not in DTYPES:
        raise InputError(f"{where} must be float64, float32, bfloat16 or float16, got {x.dtype}")
    if 0 in (x.shape[0], x.shape[2], x.shape[3]):
        raise InputError(
            f"{where} must have a batch size, a number of heads and a head_dim of at least 1, "
            f"got shape {tuple(x.shape)}"
        )


def _check_tokens(name: str, x: torch.Tensor, layout: ContextLayout, side: ContextLayout) -> None:
    """Raises InputError where dimension 1 is not this rank's tokens. side: the tensor's layout."""
    if x.shape[1] != side.shard_len:
        argument = "layout" if side is layout else "kv_layout"
        raise InputError(
            f"{_WHERE}: {name} must be [batch, this rank's {side.shard_len} of {side.seq_len} "
            f"tokens, heads, head_dim] ({argument}: {side.kind}), got {tuple(x.shape)}; "
            f"{_remedy(name, x, side, argument)}"
        )


def _remedy(name: str, x: torch.Tensor, side: ContextLayout, argument: str) -> str:
    """Advice about a tensor whose dimension 1 is not this rank's tokens."""
    if x.shape[1] != side.seq_len:
        for dim in (2, 0):
            if x.shape[dim] == side.shard_len:
                return f"give {name}.transpose({min(1, dim)}, {max(1, dim)})"
    cut = f"cut the model's inputs with burst_rt.shard_batch or {argument}.shard"
    return f"{cut}, not {name} alone" if side.seq_len in x.shape[:3] else cut


def _check_heads(qkv: QKV, scale: float | None) -> None:
    """Raises InputError where heads do not fit together, or the scale does not fit the sums."""
    q, k, v = qkv
    if k.shape[3] != q.shape[3]:
        raise InputError(f"{_WHERE}: k must have q's head_dim {q.shape[3]}, got {k.shape[3]}")
    if v.shape[2] != k.shape[2]:
        raise InputError(f"{_WHERE}: v must have k's {k.shape[2]} heads, got {v.shape[2]}")
    wide = sum_dtype(q.dtype)
    if (
        scale is not None
        and not 0 < torch.tensor(scale, dtype=wide, device="cpu").item() < math.inf
    ):
        # Fused kernels would turn masked scores into NaN.
        raise InputError(
            f"{_WHERE}: scale must be finite and above 0 in {wide}, in which scores are computed, "
            f"got {scale!r}"
        )
    if q.shape[2] % k.shape[2]:
        raise InputError(
            f"{_WHERE}: the number of q's heads must be a multiple of the number of k's heads, got "
            f"{q.shape[2]} and {k.shape[2]}"
        )


def check_scores(
    where: str, q: torch.Tensor, mask: Mask, scale: float | None, score_options: ScoreOptions
) -> None:
    """Checks what changes the scores; the factors are numbers above 0. Raises InputError."""
    softcap, slopes, sinks = score_options
    batch, _, heads, head_dim = q.shape
    if softcap is not None:
        wide = sum_dtype(q.dtype)
        cap = torch.tensor(softcap, dtype=wide, device="cpu")
        inside = (head_dim**-0.5 if scale is None else scale) / cap
        if not (0 < cap.item() < math.inf and 0 < inside.item() < math.inf):
            raise InputError(
                f"{where}: softcap, and scale / softcap, must be finite and above 0 in {wide}, in "
                f"which scores are computed, got softcap {softcap!r} and scale {scale!r}"
            )
    if slopes is not None:
        _check_of_heads(f"{where}: alibi_slopes", slopes, q, ((heads,), (batch, heads)))
        if mask.mover is not None:
            raise InputError(
                f"{where}: alibi_slopes go by the distance in the whole sequence, and "
                f"{mask.mover!r} moves queries in their documents; give documents of as many "
                "queries as keys"
            )
    if sinks is not None:
        _check_of_heads(f"{where}: sinks", sinks, q, ((heads,),))


def _check_of_heads(
    where: str, x: torch.Tensor, q: torch.Tensor, shapes: tuple[tuple[int, ...], ...]
) -> None:
    """Checks a tensor that has a number for each head. Raises InputError."""
    allowed = " or ".join(map(str, shapes))
    if not isinstance(x, torch.Tensor):
        raise InputError(
            f"{where} must be a torch.Tensor of shape {allowed}, got {type(x).__name__}"
        )
    if x.is_nested or x.layout != torch.strided or tuple(x.shape) not in shapes:
        got = "a nested one" if x.is_nested else f"{x.layout} of shape {tuple(x.shape)}"
        raise InputError(
            f"{where} must be a dense tensor of shape {allowed}, a number for each of q's heads, "
            f"got {got}"
        )
    if x.dtype not in DTYPES:
        raise InputError(f"{where} must be float64, float32, bfloat16 or float16, got {x.dtype}")
    if x.device != q.device:
        raise InputError(f"{where} must be on {q.device}, q's device, got {x.device}")


def check_values(where: str, qkv: QKV, score_options: ScoreOptions) -> None:
    """Raises InputError where a tensor holds a value that is not finite. Reads all values."""
    tensors = {**qkv._asdict(), **score_options._asdict()}
    for name, x in tensors.items():
        if isinstance(x, torch.Tensor) and not bool(torch.isfinite(x).all()):
            raise InputError(
                f"{where}: {name} must hold finite values (check_finite is on), got inf or NaN"
            )
