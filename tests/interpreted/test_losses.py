"""Liger's and Apple's kernels in `linear_cross_entropy`, interpreted on a CPU or compiled.

The interpreter takes bfloat16 for integers (`findings/triton_interprets_bfloat16.sh`), so the
inputs are float32, which shows what is computed, and float16, which shows roundings.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from covering import sampled
from triton.runtime import interpreter

import burst_rt
from burst_rt import Context, loss_kernels
from burst_rt.errors import InputError
from burst_rt.kernels import speed
from burst_rt.loss_kernels import Entropy, loss_kernel

_CLASSES, _WIDTH, _TOKENS = 300, 24, 20
_INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
_DEVICE = torch.device("cpu" if _INTERPRETING else "cuda")
# The largest difference from float64, relative to the largest value.
_ROUNDING = {torch.float32: 2e-6, torch.float16: 4e-3}
if not _INTERPRETING:
    _ROUNDING[torch.bfloat16] = 3e-2
pytestmark = pytest.mark.skipif(
    not _INTERPRETING and not (find_spec("liger_kernel") and find_spec("cut_cross_entropy")),
    reason="needs liger-kernel and cut-cross-entropy",
)
_EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "smoothing": {"label_smoothing": 0.2},
    "z-loss": {"z_loss": 0.05},
    "everything": {"softcap": 2.5, "label_smoothing": 0.3, "z_loss": 0.02},
}


def _argument(x: Any) -> Any:
    """A compiled kernel's numbers are tensors; the interpreter leaves floats to Python."""
    if isinstance(x, float):
        return tl.tensor(
            interpreter.TensorHandle(np.array([x], np.float32), tl.float32), tl.float32
        )
    return _implicit_cvt(x)


_implicit_cvt = interpreter._implicit_cvt


def _tanh(x: Any) -> Any:
    return 2 / (1 + tl.exp(-2 * x)) - 1


class _Libdevice:
    """The interpreter has no functions of CUDA's libdevice."""

    tanh = staticmethod(_tanh)

    @staticmethod
    def log1p(x: Any) -> Any:
        return tl.log(1 + x)


@pytest.fixture(autouse=True)
def seconds_by_kernel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[dict[str, float]]:
    """Liger's kernel takes tensors of a CPU in the interpreter. Yields the seconds by kernel."""
    seconds = {"torch": 1.0, "liger": 0.5}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(speed, "_known", {})
    if _INTERPRETING:
        monkeypatch.setattr(interpreter, "_implicit_cvt", _argument)
        monkeypatch.setattr(import_module("liger_kernel.ops.cross_entropy"), "tanh", _tanh)
        monkeypatch.setattr(import_module("cut_cross_entropy.tl_utils"), "tl_libdevice", _Libdevice)
        monkeypatch.setattr(loss_kernels, "_DEVICE_TYPE", "cpu")
    monkeypatch.setattr(loss_kernels, "_COMPARED", 8)
    monkeypatch.setattr(
        loss_kernels, "seconds_in_turn", lambda _, runs: {name: seconds[name] for name in runs}
    )
    for function in (loss_kernel, loss_kernels._cut_refuses):
        function.cache_clear()
    # cut-cross-entropy has torch compile small functions, which takes longer than the tests.
    with torch.compiler.set_stance("force_eager"):
        yield seconds
    for function in (loss_kernel, loss_kernels._cut_refuses):
        function.cache_clear()


def _results(
    ctx: Context, dtype: torch.dtype, kernel: str, extra: dict[str, Any], weighted: bool, bias: bool
) -> list[torch.Tensor]:
    """The loss, and the gradients of hidden, weight and bias."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        drawn = torch.randn(*shape, generator=generator).to(torch.float16)
        return drawn.to(_DEVICE, dtype).requires_grad_()

    hidden, weight = numbers(_TOKENS, _WIDTH), numbers(_CLASSES, _WIDTH)
    added = numbers(_CLASSES) if bias else None
    labels = torch.randint(_CLASSES, (_TOKENS,), generator=generator)
    labels[torch.rand(_TOKENS, generator=generator) < 0.3] = -100
    counts = torch.randint(0, 4, (_TOKENS,), generator=generator).to(_DEVICE) / 2
    given: dict[str, Any] = {"weights": counts if weighted else None, "kernel": kernel, **extra}
    labels = labels.to(_DEVICE)
    loss = burst_rt.linear_cross_entropy(hidden, weight, labels, bias=added, group=ctx, **given)
    with torch.no_grad():
        again = burst_rt.linear_cross_entropy(
            hidden, weight, labels, bias=added, group=ctx, **given
        )
    assert torch.equal(loss, again) or kernel == "cce"
    inputs = [hidden, weight, *([] if added is None else [added])]
    return [loss.detach(), *torch.autograd.grad(loss, inputs)]


@sampled(extra=tuple(_EXTRAS), dtype=tuple(_ROUNDING), weighted=(True, False), bias=(True, False))
def test_its_losses_and_gradients_are_those_of_float64(
    extra: str, dtype: torch.dtype, weighted: bool, bias: bool
) -> None:
    given = _EXTRAS[extra], weighted, bias
    with burst_rt.init(device=_DEVICE.type) as ctx:
        made = _results(ctx, dtype, "liger", *given)
        truth = _results(ctx, torch.float64, "torch", *given)
    for x, expected in zip(made, truth, strict=True):
        off = float((x.double() - expected).abs().max() / expected.abs().max())
        assert off <= _ROUNDING[dtype]


@pytest.mark.parametrize("dtype", set(_ROUNDING) - {torch.float32}, ids=str)
@pytest.mark.parametrize(("extra", "weighted"), [("plain", True), ("softcap", False)])
def test_apples_losses_and_gradients_are_those_of_float64(
    extra: str, weighted: bool, dtype: torch.dtype
) -> None:
    given = _EXTRAS[extra], weighted, False
    with burst_rt.init(device=_DEVICE.type) as ctx:
        made = _results(ctx, dtype, "cce", *given)
        truth = _results(ctx, torch.float64, "torch", *given)
    assert made[0].dtype == torch.float32
    for x, expected in zip(made, truth, strict=True):
        off = float((x.double() - expected).abs().max() / expected.abs().max())
        assert off <= _ROUNDING[dtype]


def test_no_labels_at_all_make_no_gradient() -> None:
    """Of Apple's kernels, too: a rank may have none, or all of weight 0."""
    x, weight = (
        torch.ones(count, 16, dtype=torch.float16, device=_DEVICE, requires_grad=True)
        for count in (4, 9)
    )
    labels = torch.zeros(4, dtype=torch.int64, device=_DEVICE)
    for kernel in ("liger", "cce"):
        with burst_rt.init(device=_DEVICE.type) as ctx:
            loss = burst_rt.linear_cross_entropy(
                x, weight, labels - 100, group=ctx, count=3, kernel=kernel
            )
        gradients = torch.autograd.grad(loss, [x, weight])
        assert loss == 0
        assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"z_loss": 0.1, "label_smoothing": 0.1}, "it has no label_smoothing, z_loss"),
        ({"scale": 2.0}, "it has no scale"),
        ({"bias": torch.ones(9, dtype=torch.float16)}, "it has no bias"),
        ({}, "Apple's kernel takes torch.bfloat16, torch.float16, got torch.float32"),
    ],
)
def test_what_apples_kernels_lack_is_refused(given: dict[str, Any], why: str) -> None:
    dtype = torch.float16 if given else torch.float32
    x, weight = (torch.ones(count, 16, dtype=dtype, device=_DEVICE) for count in (4, 9))
    labels = torch.zeros(4, dtype=torch.int64, device=_DEVICE)
    given = {name: x.to(_DEVICE) if name == "bias" else x for name, x in given.items()}
    with (
        burst_rt.init(device=_DEVICE.type) as ctx,
        pytest.raises(InputError, match=f"kernel 'cce' was asked for, but {why}; use 'auto'"),
    ):
        burst_rt.linear_cross_entropy(x, weight, labels, group=ctx, kernel="cce", **given)


def test_apples_kernels_of_other_results_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    library = import_module("cut_cross_entropy")
    right = library.linear_cross_entropy
    monkeypatch.setattr(
        library, "linear_cross_entropy", lambda *args, **given: 1.1 * right(*args, **given)
    )
    with (
        burst_rt.init(device=_DEVICE.type) as ctx,
        pytest.raises(InputError, match=r"kernel 'cce' .*its losses are 1.% off those of torch's"),
    ):
        _results(ctx, torch.float16, "cce", {}, weighted=False, bias=False)


def test_auto_takes_the_faster_one(seconds_by_kernel: dict[str, float]) -> None:
    entropy = Entropy(dtype=torch.float32)
    kernel = loss_kernel(entropy, 16, _CLASSES, _DEVICE)
    assert kernel.name == "liger"
    assert kernel.reason.startswith("the fastest of liger 500.000 ms, torch 1000.000 ms")
    seconds_by_kernel["liger"] = 2.0
    assert loss_kernel(entropy, 32, _CLASSES, _DEVICE).name == "torch"  # measured anew
    assert loss_kernel(
        Entropy(dtype=torch.float32, kernel="liger"), 32, _CLASSES, _DEVICE
    ).name == ("liger")


@pytest.mark.parametrize("argument", ["label_smoothing", "lse_square_scale", "softcap", "BLOCK"])
def test_a_kernel_of_other_results_or_arguments_is_not_taken(
    argument: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another release may have."""
    kernel = loss_kernels._ligers_kernel()

    class _Another:
        def __getitem__(self, grid: Any) -> Any:
            def run(**given: Any) -> None:
                if argument == "BLOCK":
                    given["BLOCK"] = given.pop("BLOCK_SIZE")
                else:
                    given[argument] = 2 * given[argument]
                kernel[grid](**given)

            return run

    monkeypatch.setattr(loss_kernels, "_ligers_kernel", _Another)
    extra = _EXTRAS["everything"] | {"z_loss": 0.2}
    auto = loss_kernel(Entropy(dtype=torch.float32, **extra), 16, _CLASSES, _DEVICE)
    assert auto.name == "torch"
    assert "liger failed: " in auto.reason
    words = "BLOCK" if argument == "BLOCK" else "% off those of torch's operators"
    with (
        burst_rt.init(device=_DEVICE.type) as ctx,
        pytest.raises(InputError, match=f"linear_cross_entropy: kernel 'liger' .*{words}.*'auto'"),
    ):
        _results(ctx, torch.float32, "liger", extra, weighted=False, bias=False)


def test_what_it_cannot_do_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    for entropy, why in (
        (Entropy(dtype=torch.float32, scale=0.5), r"does not scale logits, got scale=0.5"),
        (Entropy(dtype=torch.float64), "torch.float32, got torch.float64"),
    ):
        kernel = loss_kernel(entropy, 16, _CLASSES, _DEVICE)
        assert kernel.name == "torch"
        assert why in kernel.reason
    monkeypatch.setattr(loss_kernels, "find_spec", lambda name: None)
    kernel = loss_kernel(Entropy(dtype=torch.float32), 48, _CLASSES, _DEVICE)
    assert "liger-kernel is not installed (pip install liger-kernel)" in kernel.reason
