"""The examples of sparse attention, over the ranks of a context, against plain torch on the whole.

The references share no code with the examples: matrices of weights over all tokens, and gradients
by torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from spec import relative_error
from torch import Tensor

from burst_rt import Context

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from downsampled import Downsampled
from linformer import Linformer
from performer import Performer, phi

__all__ = ["CHECKS", "EXAMPLES"]

EXAMPLES = Path(__file__).parents[1] / "examples"
_HEADS, _DIM, _V_DIM = 2, 8, 6


def linformer(ctx: Context, tokens: int, rows: int) -> float:
    """The largest error with `rows` projected keys."""
    shapes = [*_qkv(tokens), (tokens, rows)]

    def whole(q: Tensor, k: Tensor, v: Tensor, projection: Tensor) -> Tensor:
        keys, values = (torch.einsum("tr,thd->rhd", projection, x) for x in (k, v))
        weights = torch.einsum("qhd,rhd->hqr", q, keys).div(_DIM**0.5).softmax(-1)
        return torch.einsum("hqr,rhd->qhd", weights, values)

    shares = [len(part) for part in torch.arange(tokens).tensor_split(ctx.world_size)]
    attend = Linformer(ctx, rows, _HEADS * (_DIM + _V_DIM), torch.float64)
    return _largest_error(ctx, attend, whole, shapes, shares)


def performer(ctx: Context, tokens: int, causal: bool) -> float:
    """The largest error, causal or not."""
    noise = torch.Generator().manual_seed(1)
    features = torch.randn(_DIM, 12, generator=noise, dtype=torch.float64)

    def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = (phi(x.transpose(0, 1), features) for x in (q, k))
        weights = q @ k.mT
        weights = weights.tril() if causal else weights
        return (weights @ v.transpose(0, 1) / weights.sum(-1, keepdim=True)).transpose(0, 1)

    state = torch.empty(_HEADS, 12, _V_DIM + 1, dtype=torch.float64)
    of = Performer(ctx, tokens, state.to(ctx.device), causal)
    on_device = features.to(ctx.device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return of(q, k, v, on_device).transpose(0, 1)

    return _largest_error(ctx, attend, whole, _qkv(tokens), of.shares)


def downsampled(ctx: Context, tokens: int, window: int, stride: int) -> float:
    """The largest error with this window, and blocks of this many tokens."""

    def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = (torch.cat([x, x.unflatten(0, (-1, stride)).mean(1)]) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, keys) / _DIM**0.5
        at, block = torch.arange(tokens)[:, None], torch.arange(tokens // stride)
        first = ((at - window + 1) // stride * stride).clamp(min=0)
        seen = torch.cat([(first <= at.T) & (at >= at.T), block * stride + stride <= first], 1)
        counts = torch.tensor([1.0] * tokens + [float(stride)] * len(block), dtype=torch.float64)
        weights = (scores + counts.log()).masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values)

    attend = Downsampled(ctx, tokens, window, stride, _HEADS * (_DIM + _V_DIM) * 8)
    return _largest_error(ctx, attend, whole, _qkv(tokens), attend.shares)


# With ranks that have no tokens, parts that have no rows, windows wider than a rank's tokens.
CHECKS: dict[str, Callable[[Context], float]] = {
    "linformer": lambda ctx: linformer(ctx, 103, 14),
    "linformer, 2 rows": lambda ctx: linformer(ctx, 3, 2),
    "performer, full": lambda ctx: performer(ctx, 259, causal=False),
    "performer, causal": lambda ctx: performer(ctx, 259, causal=True),
    "performer, 3 tokens": lambda ctx: performer(ctx, 3, causal=True),
    "downsampled": lambda ctx: downsampled(ctx, 120, 20, 4),
    "downsampled, wide": lambda ctx: downsampled(ctx, 120, 90, 8),
    "downsampled, exact": lambda ctx: downsampled(ctx, 120, 5, 1),
    "downsampled, chunks": lambda ctx: downsampled(ctx, 1200, 40, 20),
    "downsampled, 3 blocks": lambda ctx: downsampled(ctx, 12, 5, 4),
}


def _qkv(tokens: int) -> list[tuple[int, ...]]:
    return [(tokens, _HEADS, dim) for dim in (_DIM, _DIM, _V_DIM)]


def _largest_error(
    ctx: Context,
    attend: Callable[..., Tensor],
    whole: Callable[..., Tensor],
    shapes: Sequence[tuple[int, ...]],
    shares: Sequence[int],
) -> float:
    """Of the output and the gradients of all inputs, in whose rows this rank has its share."""
    noise = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=noise, dtype=torch.float64) for shape in shapes]
    mine = [x.split(list(shares))[ctx.rank].clone().to(ctx.device) for x in inputs]
    mine = [x.requires_grad_() for x in mine]
    inputs = [x.requires_grad_() for x in inputs]
    expected, out = whole(*inputs), attend(*mine)
    dout = torch.randn(expected.shape, generator=noise, dtype=torch.float64)
    expected.backward(dout)
    out.backward(dout.split(list(shares))[ctx.rank].to(ctx.device))
    found, truths = [out, *(x.grad for x in mine)], [expected, *(x.grad for x in inputs)]
    errors = []
    for got, truth in zip(found, truths, strict=True):
        assert truth is not None
        if got is None:  # the gradient of no query
            assert shares[ctx.rank] == 0
            continue
        both = list(truth.split(list(shares)))
        assert both[ctx.rank].shape == got.shape
        both[ctx.rank] = got.cpu()
        errors.append(relative_error(torch.cat(both), truth))
    return max(errors)
