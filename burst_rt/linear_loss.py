"""The cross-entropy of a linear layer's classes over all ranks' tokens, without its logits.

The logits of a rank's tokens are the largest tensor of a training step: float32 ones of 128K tokens
and 152K classes take 80 GB. Here a few hundred tokens at a time get their logits, which become
gradients at once. (arXiv 2410.10989, section 3.2, does so on a GPU, in a kernel.)
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple, NoReturn

import torch
from torch.autograd.function import once_differentiable

from burst_rt.arguments import describe_value, holds_values
from burst_rt.batches import IGNORED_LABEL
from burst_rt.errors import InputError
from burst_rt.loss_kernels import LOSS_KERNELS, Entropy, check_cut, cut_losses, loss_kernel
from burst_rt.losses import plain_labels, weights_of
from burst_rt.runtime.mean import mean_of_sums
from burst_rt.runtime.sums import RanksOrGroup, refuse_in

__all__ = ["computed_in", "linear_cross_entropy", "sum_of_losses"]

_NAME = "linear_cross_entropy"
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# A chunk's logits take this much, ...
_CHUNK_BYTES = 64 << 20
# ... or are those of as many tokens as hidden is wide, up to so many tokens: for each chunk the sum
# of weight's gradients is read and written, which takes time if chunks are small.
_MOST_ROWS = {"cpu": 512}
_MOST_ROWS_OF_A_GPU = 2048
# Gradients of a 16-bit weight are added up in 32 bits, for so many classes at a time that their
# products, which are of so many bytes, stay in a CPU's caches.
_BLOCK_BYTES = {"cpu": 16 << 20}
_BLOCK_BYTES_OF_A_GPU = 64 << 20


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = IGNORED_LABEL,
    group: RanksOrGroup | None = None,
    count: float | torch.Tensor | None = None,
    kernel: str = "auto",
) -> torch.Tensor:
    """The mean cross-entropy, in nats, of all ranks' labelled tokens, without the logits.

    It is `cross_entropy(hidden @ weight.T + bias, labels, weights=weights, group=group,
    count=count)`, but never has the logits of more than a chunk of tokens.

    hidden: `[..., width]`, float16, bfloat16, float32 or float64. weight: `[classes, width]`, such
        as that of `torch.nn.Linear`, and bias `[classes]` or None, of hidden's type. Under autocast
        any types; the products are then of autocast's. The logits of a product count in float32
        (float64 for float64).
    labels: `[...]`, int64, shifted already where the model predicts the next token. Tokens with the
        label ignore_index have no loss and no gradient, and are not computed.
    weights: `[...]`, by how much each label counts; None: all alike. Tokens of weight 0 are not
        computed.
    scale, softcap: the logits are scale * (hidden @ weight.T + bias), and with a softcap above 0
        softcap * tanh(those / softcap), as in Gemma 2 (arXiv 2408.00118, section 2).
    label_smoothing: 0 to 1. That part of a label is spread over all classes, as in torch's
        cross_entropy.
    z_loss: at least 0; z_loss * lse**2 is added for each token, where lse is the log of the sum of
        its exponentials (PaLM, arXiv 2204.02311, section 5).
    group, count: as in `cross_entropy`.
    kernel: makes a chunk's losses and the gradients of its logits. "torch" is torch's operators;
        "liger" is Liger's Triton kernel (liger-kernel, on GPUs, of 32 bits at most, scale 1), whose
        losses and gradients are compared with torch's before its first use on a chip. "auto" takes
        the faster of these, timed once for a chip. "cce" is Apple's cut-cross-entropy (25.1, 16
        bits, on GPUs; softcap and weights only), compared likewise. It has no logits at all, makes
        gradients in the backward, and adds them up in 16 bits in an order that changes.

    Returns a scalar, float32 (float64 for float64), NaN where no rank has a label. Collective;
    blocks as `mean_over_ranks` does, and on a GPU waits for labels.

    The forward computes the gradients too, where they are wanted. It then takes three products, as
    many as the forward and backward of a linear head. Until the backward it holds hidden's
    gradient, and weight's in float32 (float64 for float64), which is as large as a float32 weight.
    A weight that does not require grad has none. Beside these there are two float32 tensors of a
    chunk's logits, and a 16-bit one for 16-bit products (with Liger's kernel what the products
    take, and no more). A chunk has as many tokens as 64 MiB of float32 logits, or, where that is
    more, as many as hidden is wide, but at most 512 on a CPU and 2048 on a GPU. Sums of 16-bit
    products take up to 48 MiB (192 on a GPU), and under autocast weight is held in its type. A CPU
    with AVX-512 that lacks its bfloat16 instructions takes one more float32 tensor of logits. The
    same inputs give the same bits, except with "cce". Gradients of gradients are refused.

    Raises InputError for wrong shapes, types or ranges, and for a weight that is sharded by FSDP2
    (call this within the forward of the module that FSDP2 wraps): on every rank that waits for this
    one if group is a Context, else on this rank.
    """
    _check_tensors(hidden, weight, bias, group)
    if not _is_number(scale):
        _wrong(group, f"scale: expected a finite number, got {scale!r}")
    if not _is_number(label_smoothing) or not 0 <= label_smoothing <= 1:
        _wrong(group, f"label_smoothing: expected a number from 0 to 1, got {label_smoothing!r}")
    if not _is_number(z_loss) or z_loss < 0:
        _wrong(group, f"z_loss: expected a number of at least 0, got {z_loss!r}")
    if softcap is not None and not (_is_number(softcap) and softcap > 0):
        _wrong(group, f"softcap: expected None or a number above 0, got {softcap!r}")
    if kernel not in LOSS_KERNELS:
        _wrong(group, f"kernel: expected one of {', '.join(LOSS_KERNELS)}, got {kernel!r}")
    if type(ignore_index) is not int or not -(2**63) <= ignore_index < 2**63:
        _wrong(group, f"ignore_index: expected an integer of 64 bits, got {ignore_index!r}")
    dtype = computed_in(hidden)
    if dtype == hidden.dtype and {x.dtype for x in (weight, bias) if x is not None} != {dtype}:
        _wrong(group, f"weight and bias: expected hidden's type {dtype}, or autocast, got "
               f"{describe_value(weight)}, {describe_value(bias)}")  # fmt: skip
    if (
        not isinstance(labels, torch.Tensor)
        or labels.is_nested
        or labels.shape != hidden.shape[:-1]
    ):
        _wrong(group, f"labels: expected {tuple(hidden.shape[:-1])}, one for each of hidden's "
               f"tokens, got {describe_value(labels)}; cut both alike")  # fmt: skip
    entropy = Entropy(
        dtype=dtype,
        scale=float(scale),  # torch takes integers of 64 bits only
        softcap=None if softcap is None else float(softcap),
        label_smoothing=label_smoothing,
        z_loss=float(z_loss),
        kernel=kernel,
    )
    try:
        if kernel == "cce":
            check_cut(entropy, len(weight), hidden.device, bias is not None)
        else:
            loss_kernel(entropy, *_chunk(hidden, weight, entropy))
    except InputError as error:
        _wrong(group, str(error))
    plain = plain_labels(labels, len(weight), group, ignore_index, _NAME)
    counted = weights_of(labels, weights, group, _NAME, ignore_index).to(hidden.device)
    total = sum_of_losses(hidden, weight, bias, plain, counted, entropy)
    mean = mean_of_sums(total, counted.double().sum(), group, _NAME, count)
    return mean.to(torch.promote_types(hidden.dtype, torch.float32))


def computed_in(hidden: torch.Tensor) -> torch.dtype:
    """The type in which a linear layer multiplies hidden: its own, or autocast's."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return hidden.dtype


def sum_of_losses(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    counted: torch.Tensor,
    entropy: Entropy,
) -> torch.Tensor:
    """The sum of this rank's losses, each times what its label counts, a float64 scalar. Local.

    labels and counted: flattened, as `plain_labels` and `weights_of` give them.
    """
    rows = counted.to(hidden.device).nonzero().flatten()
    labels = labels.to(hidden.device)[rows]
    weights = None if counted.dtype == torch.bool else counted.to(hidden.device)[rows, None]
    if entropy.kernel == "cce" and len(rows):
        losses = cut_losses(entropy, hidden.flatten(0, -2)[rows], weight, labels).double()
        return (losses if weights is None else losses * weights[:, 0]).sum()
    wanted = torch.is_grad_enabled()
    needs = [wanted and x is not None and x.requires_grad for x in (hidden, weight, bias)]
    tokens = _Tokens(rows, labels, weights, needs)
    total: torch.Tensor = _SumOfLosses.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, tokens, entropy
    )
    return total


class _Tokens(NamedTuple):
    """The tokens that count, and what is asked of them."""

    rows: torch.Tensor  # their numbers
    labels: torch.Tensor  # `[rows]`
    weights: torch.Tensor | None  # `[rows, 1]`
    needs: list[bool]  # which of hidden, weight and bias get gradients


def _chunk(
    hidden: torch.Tensor, weight: torch.Tensor, entropy: Entropy
) -> tuple[int, int, torch.device]:
    """The tokens and classes of a chunk, and where they are. They follow from shapes alone, as the
    bits of sums do.
    """
    (classes, width), device = weight.shape, hidden.device
    most = min(width, _MOST_ROWS.get(device.type, _MOST_ROWS_OF_A_GPU))
    return max(1, _CHUNK_BYTES // (classes * entropy.wide.itemsize), most), classes, device


class _SumOfLosses(torch.autograd.Function):
    """`apply(hidden, weight, bias, tokens, entropy)` -> the sum, float64."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tokens: _Tokens,
        entropy: Entropy,
    ) -> torch.Tensor:
        rows, labels, weights, needs = tokens
        total = hidden.new_zeros((), dtype=torch.float64)
        states, (classes, width) = hidden.reshape(-1, hidden.shape[-1]), weight.shape
        dtype, wide = entropy.dtype, entropy.wide
        like: dict[str, Any] = {"dtype": wide, "device": hidden.device}
        d_hidden = torch.zeros_like(states, dtype=dtype) if needs[0] else None
        d_weight = torch.zeros(classes, width, **like) if needs[1] else None
        d_bias = torch.zeros(classes, **like) if needs[2] else None
        size, *_ = chunk_of = _chunk(hidden, weight, entropy)
        # All chunks write to the same memory: new memory takes time, page by page.
        most = min(size, len(rows)), *chunk_of[1:]
        losses_of = loss_kernel(entropy, *chunk_of).maker(entropy, *most)
        add_product = None if d_weight is None else _Adding(d_weight, dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            # Casts that autocast would make for each product.
            matrix = weight.to(dtype)
            added = None if bias is None else bias.to(dtype)
            for at in range(0, len(rows), size):
                chunk, of_chunk = rows[at : at + size], slice(at, at + size)
                product = losses_of.product[: len(chunk)]
                x = states[chunk].to(dtype)
                if added is None:
                    torch.mm(x, matrix.T, out=product)
                else:
                    torch.addmm(added, x, matrix.T, out=product)
                counted = None if weights is None else weights[of_chunk]
                losses, d_logits = losses_of(labels[of_chunk], counted, any(needs))
                total += losses.sum()
                if not any(needs):
                    continue
                if d_bias is not None:
                    d_bias += d_logits.sum(0, dtype=wide)
                if d_logits.dtype != dtype:
                    d_logits = product.copy_(d_logits)
                if d_hidden is not None:
                    d_hidden[chunk] = d_logits @ matrix
                if add_product is not None:
                    add_product(d_logits, x)
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        ctx.wide = wide
        ctx.like = [None if x is None else (x.shape, x.dtype) for x in (hidden, weight, bias)]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # A scalar that has a dimension is no scalar to torch, which would round it to 16 bits.
        factor = grad.to(ctx.wide).view(1)
        scaled: list[torch.Tensor | None] = []
        for x, like in zip(ctx.saved_tensors, ctx.like, strict=True):
            if x is not None:
                shape, dtype = like
                x = torch.mul(x, factor, out=torch.empty_like(x, dtype=dtype)).view(shape)
            scaled.append(x)
        return *scaled, None, None


class _Adding:
    """Adds `d_logits.T @ x` to a sum in a wider type, some classes at a time."""

    def __init__(self, total: torch.Tensor, dtype: torch.dtype) -> None:
        self.total, self.is_wide = total, dtype == total.dtype
        if not self.is_wide:
            (classes, width), device = total.shape, total.device
            size = _BLOCK_BYTES.get(device.type, _BLOCK_BYTES_OF_A_GPU)
            self.size = min(classes, max(1, size // (width * dtype.itemsize)))
            # Products, and these in the wider type: the sum would make its own copy each time.
            self.product = torch.empty(self.size, width, dtype=dtype, device=device)
            self.widened = torch.empty(self.size, width, dtype=total.dtype, device=device)

    def __call__(self, d_logits: torch.Tensor, x: torch.Tensor) -> None:
        if self.is_wide:
            self.total.addmm_(d_logits.T, x)
            return
        parts = zip(self.total.split(self.size), d_logits.split(self.size, 1), strict=True)
        for part, d_part in parts:
            product = torch.mm(d_part.T, x, out=self.product[: len(part)])
            part += self.widened[: len(part)].copy_(product)


def _check_tensors(hidden: object, weight: object, bias: object, group: object) -> None:
    if not _is_dense(hidden) or not hidden.ndim:  # type: ignore[attr-defined]  # a tensor then
        _wrong(group, f"hidden: expected dense floating-point numbers [..., width], got "
               f"{describe_value(hidden)}")  # fmt: skip
    width = hidden.shape[-1]  # type: ignore[attr-defined]
    if not _is_dense(weight) or weight.ndim != 2 or weight.shape[1] != width or not len(weight):  # type: ignore[attr-defined, arg-type]
        _wrong(group, f"weight: expected dense floating-point numbers [classes, {width}], got "
               f"{describe_value(weight)}; call it within the forward of the module that FSDP2 "
               "wraps, where weights are whole")  # fmt: skip
    classes = len(weight)  # type: ignore[arg-type]
    if bias is not None and (not _is_dense(bias) or bias.shape != (classes,)):  # type: ignore[attr-defined]
        _wrong(group, f"bias: expected None, or dense floating-point numbers [{classes}], got "
               f"{describe_value(bias)}")  # fmt: skip
    devices = {str(x.device) for x in (hidden, weight, bias) if x is not None}  # type: ignore[attr-defined]
    if len(devices) > 1:
        _wrong(group, f"weight: expected it on hidden's device, got {', '.join(sorted(devices))}")


def _is_dense(x: object) -> bool:
    """Whether it is a tensor of numbers that are all here: no shard of a DTensor."""
    return (
        isinstance(x, torch.Tensor)
        and x.dtype in _FLOATS
        and holds_values(x)
        and not hasattr(x, "placements")
    )


def _is_number(x: object) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and abs(x) <= sys.float_info.max


def _wrong(group: Any, reason: str) -> NoReturn:
    refuse_in(group, _NAME, InputError(f"{_NAME}: {reason}"))
