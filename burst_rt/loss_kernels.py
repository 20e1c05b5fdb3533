"""What makes losses of a linear head: torch's operators, Liger's kernel, or Apple's.

Liger's Triton kernel reads a row of logits twice and writes its gradient in their place. torch's
operators read and write it some ten times. Before Liger's is first used for a class of losses, its
results are compared with those of torch's operators, and both are timed. "auto" takes the faster.

Liger's kernel is no public interface of its package, so that another release may have another.
Known here is that of liger-kernel 0.8.

Apple's cut-cross-entropy (arXiv 2411.09009) has no logits in memory at all. Its blocks add 16-bit
gradients to one sum as they come, so that bits do not repeat: it is taken by name only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

import torch

from burst_rt.errors import InputError
from burst_rt.kernels.conditions import too_old
from burst_rt.kernels.speed import (
    Figures,
    chip_and_versions,
    error_in_words,
    failures,
    fastest_of,
    known_figures,
    seconds_in_turn,
)

__all__ = [
    "LOSS_KERNELS", "Entropy", "LossKernel", "LossMaker", "check_cut", "cut_losses", "loss_kernel",
]  # fmt: skip

Tensor = torch.Tensor
LOSS_KERNELS = ("auto", "torch", "liger", "cce")
_KIND = "loss-speed"  # the answers' name in `remembered`
# The largest error of a result, relative to the largest value. Rounding to bfloat16 makes 4e-3. A
# sign, a term or a factor that is not as it is known here makes more than 1e-1.
_ALLOWED = 2e-2
_COMPARED = 64  # rows
# Tests under Triton's interpreter set another.
_DEVICE_TYPE = "cuda"
_LIGERS_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# What the package itself takes for these: wider blocks spill registers.
_LIGERS_BLOCK, _LIGERS_WARPS = 32768, 32


@dataclass(frozen=True, kw_only=True)
class Entropy:
    """What a token's loss is, the type in which its products are computed, and the kernel."""

    dtype: torch.dtype
    scale: float = 1.0
    softcap: float | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    kernel: str = "auto"  # one of LOSS_KERNELS

    @property
    def wide(self) -> torch.dtype:
        """The type of logits, once they are multiplied, and of sums."""
        return torch.promote_types(self.dtype, torch.float32)


class LossMaker(Protocol):
    """Makes the losses of one chunk after the other, in the same memory."""

    product: Tensor
    """`[rows, classes]`, of `Entropy.dtype`: what the next chunk's products are written to, from
    the first row on."""

    def __call__(
        self, labels: Tensor, weights: Tensor | None, differentiate: bool
    ) -> tuple[Tensor, Tensor]:
        """The losses of as many rows as there are labels, times their weights, float64 `[rows, 1]`;
        and, if wanted, the gradients of their sum by the products, `[rows, classes]` of the
        products' type or wider. Overwrites `product`.

        labels: `[rows]`, int64. weights: `[rows, 1]`, or None.
        """


class LossKernel(NamedTuple):
    """A kernel, why it was taken, and what makes it for (entropy, rows, classes, device)."""

    name: str
    reason: str
    maker: Callable[[Entropy, int, int, torch.device], LossMaker]


@lru_cache(maxsize=64)
def loss_kernel(entropy: Entropy, rows: int, classes: int, device: torch.device) -> LossKernel:
    """The kernel for chunks of so many rows.

    Blocks while kernels are compared and timed, by this rank or another one; that happens once for
    a chip. Raises InputError where the kernel that `entropy` names does not fit.
    """
    if entropy.kernel == "torch":
        return LossKernel("torch", "asked for by name", _TorchLosses)
    refused = _liger_refuses(entropy, device)
    figures: Figures = {}
    whence = ""
    if refused is None:
        figures, whence = _figures(entropy, rows, classes, device)
        refused = why if isinstance(why := figures["liger"], str) else None
    if entropy.kernel == "liger":
        if refused is not None:
            raise InputError(f"kernel 'liger' was asked for, but {refused}; use 'auto'")
        return LossKernel("liger", "asked for by name", _LigerLosses)
    if not figures:
        return LossKernel("torch", f"the only kernel here that can; {refused}", _TorchLosses)
    best, reason = fastest_of(figures, list(_MAKERS), f"{rows} x {classes} logits", whence)
    return LossKernel(best, reason, _MAKERS[best])


def _liger_refuses(entropy: Entropy, device: torch.device) -> str | None:
    """The first reason why Liger's kernel cannot be used, or None."""
    if entropy.scale != 1:
        return f"Liger's kernel does not scale logits, got scale={entropy.scale}"
    return _refused("Liger", "liger-kernel", _LIGERS_DTYPES, entropy, device)


def _refused(
    whose: str,
    package: str,
    dtypes: tuple[torch.dtype, ...],
    entropy: Entropy,
    device: torch.device,
) -> str | None:
    if device.type != _DEVICE_TYPE:
        return f"{whose}'s kernel takes {_DEVICE_TYPE.upper()} tensors, got {device}"
    if entropy.dtype not in dtypes:
        return f"{whose}'s kernel takes {', '.join(map(str, dtypes))}, got {entropy.dtype}"
    if find_spec(package.replace("-", "_")) is None:
        return f"{package} is not installed (pip install {package})"
    return too_old(package, device) if device.type == "cuda" else None


def _figures(
    entropy: Entropy, rows: int, classes: int, device: torch.device
) -> tuple[Figures, str]:
    terms = (entropy.softcap is not None, entropy.label_smoothing > 0, entropy.z_loss > 0)
    key = chip_and_versions(device, "liger-kernel") | {
        "dtype": str(entropy.dtype), "logits": f"{rows} x {classes}", "terms": str(terms),
    }  # fmt: skip
    return known_figures(_KIND, key, _MAKERS, lambda: _measured(entropy, rows, classes, device))


def _measured(entropy: Entropy, rows: int, classes: int, device: torch.device) -> Figures:
    """Seconds by kernel for a chunk, or the reason why there are none."""
    try:
        wrong = _wrong(entropy, min(rows, _COMPARED), classes, device)
        problem = _Problem(entropy, rows, classes, device)
        able = [name for name in _MAKERS if wrong is None or name == "torch"]
        runs = {name: problem.runs(name) for name in able}
    except torch.OutOfMemoryError as error:
        return dict.fromkeys(_MAKERS, error_in_words(error))
    figures = seconds_in_turn(device, runs)
    return figures if wrong is None else figures | {"liger": wrong}


def _wrong(entropy: Entropy, rows: int, classes: int, device: torch.device) -> str | None:
    """What is wrong with the results of Liger's kernel here, or None."""
    problem = _Problem(entropy, rows, classes, device)
    try:
        made, true = (problem.runs(name)() for name in ("liger", "torch"))
    # The kernel may take other arguments than those known here, or not be there.
    except (ImportError, AttributeError, TypeError, ValueError, AssertionError) as error:
        return error_in_words(error)
    except failures() as error:
        return error_in_words(error)
    return _difference(made, true)


def _difference(made: Sequence[Tensor], true: Sequence[Tensor]) -> str | None:
    """What is wrong with losses and their gradients, or None."""
    for what, x, y in zip(("losses", *["gradients"] * len(made)), made, true, strict=False):
        x, y = x.detach().double(), y.detach().double()
        off = float((x - y).abs().max() / y.abs().max())
        if not off < _ALLOWED:
            return f"its {what} are {off:.0%} off those of torch's operators"
    return None


class _Problem:
    """A chunk of logits of the usual size, for both kernels."""

    def __init__(self, entropy: Entropy, rows: int, classes: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        self._of = entropy, rows, classes, device
        logits = torch.randn(rows, classes, generator=generator, device="cpu")
        self._logits = logits.to(device, entropy.dtype)
        self._labels = torch.randint(classes, (rows,), generator=generator, device="cpu").to(device)

    def runs(self, name: str) -> Callable[[], tuple[Tensor, Tensor]]:
        """What has a kernel make the losses and gradients."""
        maker = _MAKERS[name](*self._of)

        def run() -> tuple[Tensor, Tensor]:
            maker.product.copy_(self._logits)
            return maker(self._labels, None, True)

        return run


class _TorchLosses:
    """By torch's operators; see `LossMaker`. Two wide tensors of a chunk's logits, and the product
    where that is narrower.

    With p the softmax of the logits y and e the smoothing, a loss is
    -(1 - e) log p[label] - e mean(log p) + z lse**2, and its gradient by y is
    (1 + 2 z lse) p - (1 - e) onehot(label) - e / classes.
    """

    def __init__(self, entropy: Entropy, rows: int, classes: int, device: torch.device) -> None:
        self._entropy = entropy
        self._logits, self._log_p = (
            torch.empty(rows, classes, dtype=entropy.wide, device=device) for _ in range(2)
        )
        self.product = self._logits
        if entropy.dtype != entropy.wide:
            self.product = torch.empty(rows, classes, dtype=entropy.dtype, device=device)

    def __call__(
        self, labels: Tensor, weights: Tensor | None, differentiate: bool
    ) -> tuple[Tensor, Tensor]:
        entropy, count = self._entropy, len(labels)
        logits, log_p = self._logits[:count], self._log_p[:count]
        if self.product is not self._logits:
            logits.copy_(self.product[:count])
        smoothing, classes, softcap = entropy.label_smoothing, logits.shape[1], entropy.softcap
        if softcap is not None:
            logits.mul_(entropy.scale / softcap).tanh_().mul_(softcap)
        elif entropy.scale != 1:
            logits *= entropy.scale
        torch.log_softmax(logits, 1, out=log_p)
        of_label = log_p.gather(1, labels[:, None])
        lse = logits.gather(1, labels[:, None]) - of_label
        losses = of_label.double() * (smoothing - 1)
        if smoothing:
            losses -= smoothing * log_p.mean(1, keepdim=True)
        if entropy.z_loss:
            losses += entropy.z_loss * lse.square()
        if weights is not None:
            losses *= weights
        if not differentiate:
            return losses, log_p
        gradients = log_p.exp_()
        if entropy.z_loss:
            gradients *= 1 + 2 * entropy.z_loss * lse
        at = torch.arange(count, device=labels.device)
        gradients[at, labels] -= 1 - smoothing
        if smoothing:
            gradients -= smoothing / classes
        if softcap is not None:
            gradients *= logits.div_(softcap).square_().neg_().add_(1)
        if weights is not None:
            gradients *= weights.to(gradients.dtype) * entropy.scale
        elif entropy.scale != 1:
            gradients *= entropy.scale
        return losses, gradients


@cache
def _ligers_kernel() -> Any:
    return import_module("liger_kernel.ops.cross_entropy").liger_cross_entropy_kernel


class _LigerLosses:
    """By Liger's Triton kernel; see `LossMaker`. No memory but the product's."""

    def __init__(self, entropy: Entropy, rows: int, classes: int, device: torch.device) -> None:
        self.product = torch.empty(rows, classes, dtype=entropy.dtype, device=device)
        softcap = entropy.softcap
        # A row's label is one of the classes; 0 for what is asked of means and of results that
        # are not wanted.
        nothing: dict[str, Any] = dict.fromkeys(
            ("n_non_ignore", "sum_non_ignore_weight", "weight_sum", "token_accuracy_stride",
             "predicted_tokens_stride"), 0,
        ) | dict.fromkeys(
            ("weight_ptr", "z_loss_ptr", "token_accuracy_ptr", "predicted_tokens_ptr"), None
        ) | dict.fromkeys(
            ("HAS_WEIGHT", "RETURN_Z_LOSS", "RETURN_TOKEN_ACCURACY", "RETURN_PREDICTED_TOKENS"),
            False,
        )  # fmt: skip
        self._given = nothing | {
            "X_ptr": self.product, "X_stride": classes, "Y_stride": 1, "loss_stride": 1,
            "n_cols": classes, "ignore_index": -1, "reduction": "none",
            "lse_square_scale": float(entropy.z_loss), "softcap": softcap,
            "label_smoothing": float(entropy.label_smoothing),
            "HAS_SOFTCAPPING": softcap is not None,
            "BLOCK_SIZE": min(_LIGERS_BLOCK, 1 << (classes - 1).bit_length()),
            "num_warps": _LIGERS_WARPS,
        }  # fmt: skip

    def __call__(
        self, labels: Tensor, weights: Tensor | None, differentiate: bool
    ) -> tuple[Tensor, Tensor]:
        gradients = self.product[: len(labels)]
        losses = torch.empty(len(labels), dtype=torch.float32, device=labels.device)
        on_device = torch.cuda.device(labels.device) if labels.is_cuda else nullcontext()
        with on_device:
            _ligers_kernel()[(len(labels),)](
                Y_ptr=labels, loss_ptr=losses, HAS_GRADIENTS=differentiate, **self._given
            )
        if weights is None:
            return losses.double()[:, None], gradients
        if differentiate:
            gradients *= weights.to(gradients.dtype)
        return losses.double()[:, None] * weights, gradients


_MAKERS: dict[str, Callable[[Entropy, int, int, torch.device], LossMaker]] = {
    "torch": _TorchLosses, "liger": _LigerLosses,
}  # fmt: skip


def check_cut(entropy: Entropy, classes: int, device: torch.device, biased: bool) -> None:
    """Raises InputError where Apple's kernels cannot make these losses, or make others here than
    torch's operators do; that is tried once for a kind of losses.
    """
    terms = {
        "bias": biased, "scale": entropy.scale != 1, "label_smoothing": entropy.label_smoothing,
        "z_loss": entropy.z_loss,
    }  # fmt: skip
    unknown = ", ".join(name for name, given in terms.items() if given)
    refused = f"it has no {unknown}" if unknown else _cut_refuses(entropy, classes, device)
    if refused is not None:
        raise InputError(f"kernel 'cce' was asked for, but {refused}; use 'auto'")


def cut_losses(entropy: Entropy, states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The losses of rows, float32 `[rows]`, by Apple's kernels. Differentiable.

    states: `[rows, width]`. weight: `[classes, width]`. labels: `[rows]`. No gradient is left out
    for being small.
    """
    with torch.autocast(states.device.type, enabled=False):
        losses: Tensor = import_module("cut_cross_entropy").linear_cross_entropy(
            states.to(entropy.dtype), weight.to(entropy.dtype), labels,
            softcap=entropy.softcap, reduction="none", filter_eps=None, impl="cce",
        )  # fmt: skip
    return losses


@lru_cache(maxsize=64)
def _cut_refuses(entropy: Entropy, classes: int, device: torch.device) -> str | None:
    """The first reason why Apple's kernels cannot be used, or what is wrong with their results."""
    dtypes = (torch.bfloat16, torch.float16)
    refused = _refused("Apple", "cut-cross-entropy", dtypes, entropy, device)
    if refused is not None:
        return refused
    try:
        with torch.inference_mode(mode=False), torch.enable_grad():
            results = _cut_and_true(entropy, classes, device)
    except (AttributeError, TypeError, ValueError, AssertionError) as error:
        return error_in_words(error)
    except failures() as error:
        return error_in_words(error)
    return _difference(*results)


def _cut_and_true(entropy: Entropy, classes: int, device: torch.device) -> list[tuple[Tensor, ...]]:
    """Losses and gradients of some rows, by Apple's kernels and by torch's operators."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(count, 64, generator=generator, device="cpu").to(device, entropy.dtype)
        for count in (_COMPARED, classes)
    )
    for given in (x, weight):
        given.requires_grad_()
    labels = torch.randint(classes, (_COMPARED,), generator=generator, device="cpu").to(device)
    logits = (x / 8).float() @ weight.float().T
    if entropy.softcap is not None:
        logits = entropy.softcap * torch.tanh(logits / entropy.softcap)
    true = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    made = cut_losses(entropy, x / 8, weight, labels)
    return [(y, *torch.autograd.grad(y.sum(), [x, weight])) for y in (made, true)]
