"""`linear_cross_entropy`: the loss and the gradients that the logits give, without the logits."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import sampled
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import burst_rt
from burst_rt import Context, linear_loss
from burst_rt.errors import ContractMismatch, InputError

_CLASSES, _WIDTH = 37, 12
# By the type of the inputs: the largest difference, relative to the largest value. In 16 bits the
# logits of a product are rounded, and so are their gradients.
_ROUNDING = {
    torch.float64: 1e-13,
    torch.float32: 1e-6,
    torch.bfloat16: 4e-2,
    torch.float16: 3e-3,
}
_EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "scale and softcap": {"scale": 0.7, "softcap": 3.0},
    "smoothing": {"label_smoothing": 0.2},
    "z-loss": {"z_loss": 0.05},
    "everything": {"scale": -1.5, "softcap": 2.5, "label_smoothing": 0.3, "z_loss": 0.02},
}
# How many of each rank's tokens have labels; the last rank of three has none.
_LABELLED = {"all": (1.0, 1.0, 1.0), "some": (0.4, 0.9, 0.0), "none of the first": (0.0, 0.5, 0.5)}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 5 rows: all are 17 or fewer. 16-bit sums are of 10 classes of 37."""
    monkeypatch.setattr(linear_loss, "_CHUNK_BYTES", 0)
    monkeypatch.setattr(linear_loss, "_MOST_ROWS", {"cpu": 5})
    monkeypatch.setattr(linear_loss, "_BLOCK_BYTES", {"cpu": 10 * _WIDTH * 2})


@dataclass
class _Case:
    """The tensors of all ranks; leaves that require grad."""

    hidden: list[torch.Tensor]
    weight: torch.Tensor
    bias: torch.Tensor | None
    labels: list[torch.Tensor]


def _make(world_size: int, labelled: str, dtype: torch.dtype, *, bias: bool = True) -> _Case:
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return drawn.to(dtype).requires_grad_()

    hidden, labels = [], []
    for rank in range(world_size):
        hidden.append(numbers(2, 7 + rank - rank % 2, _WIDTH))
        shape = hidden[-1].shape[:-1]
        drawn = torch.randint(_CLASSES, shape, generator=generator)
        kept = torch.rand(shape, generator=generator) < _LABELLED[labelled][rank]
        labels.append(drawn.masked_fill(~kept, -100))
    return _Case(hidden, numbers(_CLASSES, _WIDTH), numbers(_CLASSES) if bias else None, labels)


def _logits(
    x: torch.Tensor, case: _Case, scale: float = 1.0, softcap: float | None = None
) -> torch.Tensor:
    logits = scale * functional.linear(x, case.weight, case.bias)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _truth(case: _Case, options: dict[str, Any]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The loss of all ranks' tokens in float64, and the gradients of each rank's hidden, of weight
    and of bias.
    """
    wide = _Case(
        [x.detach().double().requires_grad_() for x in case.hidden],
        case.weight.detach().double().requires_grad_(),
        None if case.bias is None else case.bias.detach().double().requires_grad_(),
        case.labels,
    )
    capping = {name: options[name] for name in ("scale", "softcap") if name in options}
    logits = torch.cat([_logits(x, wide, **capping).flatten(0, 1) for x in wide.hidden])
    labels = torch.cat([x.flatten() for x in case.labels])
    loss = functional.cross_entropy(
        logits, labels, label_smoothing=options.get("label_smoothing", 0.0)
    )
    lse = logits.logsumexp(1)[labels != -100]
    loss = loss + options.get("z_loss", 0.0) * lse.square().mean()
    inputs = [*wide.hidden, wide.weight, *([] if wide.bias is None else [wide.bias])]
    return loss.detach(), list(torch.autograd.grad(loss, inputs))


def _off(found: torch.Tensor | None, expected: torch.Tensor) -> float:
    assert found is not None
    scale = max(float(expected.abs().max()), 1e-12)
    return float((found.detach().double() - expected).abs().max()) / scale


@sampled(
    world_size=(1, 2, 3),
    extra=tuple(_EXTRAS),
    labelled=tuple(_LABELLED),
    dtype=tuple(_ROUNDING),
    bias=(True, False),
)
def test_loss_and_gradients_are_those_of_the_logits(
    world_size: int, extra: str, labelled: str, dtype: torch.dtype, bias: bool
) -> None:
    if labelled == "none of the first" and world_size == 1:
        labelled = "some"
    case = _make(world_size, labelled, dtype, bias=bias)
    options = _EXTRAS[extra]
    loss, gradients = _truth(case, options)
    rounding = _ROUNDING[dtype]

    def run(ctx: Context) -> None:
        mine = [torch.nn.Parameter(x.detach()) for x in (case.weight, case.bias) if x is not None]
        x = case.hidden[ctx.rank].detach().requires_grad_()
        found = burst_rt.linear_cross_entropy(
            x,
            mine[0],
            case.labels[ctx.rank],
            bias=mine[1] if bias else None,
            group=ctx,
            **options,
        )
        assert found.dtype == torch.promote_types(dtype, torch.float32)
        assert _off(found, loss) <= rounding
        found.backward()
        # All ranks' losses are the same mean: the average of gradients is that of the mean.
        burst_rt.average_gradients(mine, group=ctx)
        assert x.grad is not None
        assert not x.grad[case.labels[ctx.rank] == -100].any()
        found_gradients = [x.grad / world_size, *(y.grad for y in mine)]
        wanted = [gradients[ctx.rank], *gradients[world_size:]]
        for found_gradient, expected in zip(found_gradients, wanted, strict=True):
            assert found_gradient is not None
            assert found_gradient.dtype == dtype
            assert _off(found_gradient, expected) <= rounding

    burst_rt.run_local(world_size, run, timeout_s=60)


def test_chunks_change_only_the_rounding_and_the_same_inputs_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = _make(1, "some", torch.float32)

    def run() -> list[torch.Tensor]:
        x = case.hidden[0].detach().requires_grad_()
        with burst_rt.init() as ctx:
            loss = burst_rt.linear_cross_entropy(
                x, case.weight, case.labels[0], bias=case.bias, group=ctx
            )
            return [loss.detach(), *torch.autograd.grad(loss, [x, case.weight])]

    found, again = run(), run()
    assert all(torch.equal(x, y) for x, y in zip(found, again, strict=True))
    monkeypatch.setattr(linear_loss, "_CHUNK_BYTES", 1 << 20)
    torch.testing.assert_close(run(), found, rtol=1e-5, atol=1e-7)


def test_autocast_chooses_the_type_of_products() -> None:
    """As for a linear layer; the weight's gradient is of its own type."""
    case = _make(1, "all", torch.float32, bias=False)
    x, weight = case.hidden[0], case.weight
    with burst_rt.init() as ctx, torch.autocast("cpu", torch.bfloat16):
        logits = functional.linear(x, weight)
        assert logits.dtype == torch.bfloat16
        expected = burst_rt.cross_entropy(logits, case.labels[0], group=ctx)
        found = burst_rt.linear_cross_entropy(x, weight, case.labels[0], group=ctx)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    wanted = torch.autograd.grad(expected, [x, weight])
    for gradient, other in zip(torch.autograd.grad(found, [x, weight]), wanted, strict=True):
        assert gradient.dtype == torch.float32
        assert _off(gradient, other.double()) <= _ROUNDING[torch.bfloat16]


class _Largest(TorchDispatchMode):
    """The shapes of what operators make, and their names."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: set[tuple[int, ...]] = set()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(func.name().partition(".")[0])
        made = func(*args, **(kwargs or {}))
        self.shapes |= {tuple(x.shape) for x in tree_leaves(made) if isinstance(x, torch.Tensor)}
        return made


@sampled(world_size=(1, 2), extra=tuple(_EXTRAS), dtype=tuple(_ROUNDING))
def test_weights_are_those_of_cross_entropy(
    world_size: int, extra: str, dtype: torch.dtype
) -> None:
    """Of labels, some of them 0 or below."""
    case, options = _make(world_size, "some", dtype), dict(_EXTRAS[extra])
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(-1, 5, y.shape, generator=generator) / 2 for y in case.labels]
    wide = [x.detach().double().requires_grad_() for x in (*case.hidden, case.weight)]
    capping = {name: options.pop(name) for name in ("scale", "softcap") if name in options}
    bias = None if case.bias is None else case.bias.detach().double()
    total, weight = torch.zeros((), dtype=torch.float64), 0.0
    for x, labels, weights in zip(wide, case.labels, drawn, strict=False):
        logits = _logits(x, _Case([], wide[-1], bias, []), **capping).flatten(0, 1)
        smoothing = options.get("label_smoothing", 0.0)
        losses = functional.cross_entropy(
            logits, labels.flatten(), reduction="none", label_smoothing=smoothing
        )
        losses = losses + options.get("z_loss", 0.0) * logits.logsumexp(1).square()
        counted = weights.flatten() * (labels.flatten() != -100)
        total, weight = total + (counted * losses).sum(), weight + float(counted.sum())
    truth = torch.autograd.grad(total / weight, wide)

    def run(ctx: Context) -> None:
        x = case.hidden[ctx.rank].detach().requires_grad_()
        matrix = torch.nn.Parameter(case.weight.detach())
        given: dict[str, Any] = {"weights": drawn[ctx.rank], "group": ctx}
        found = burst_rt.linear_cross_entropy(
            x, matrix, case.labels[ctx.rank], bias=case.bias, **given, **_EXTRAS[extra]
        )
        assert _off(found, (total / weight).detach()) <= _ROUNDING[dtype]
        if extra == "plain" and dtype == torch.float32:
            logits = functional.linear(x, matrix, case.bias)
            same = burst_rt.cross_entropy(logits, case.labels[ctx.rank], **given)
            assert found.item() == pytest.approx(same.item(), rel=1e-6)
        found.backward()
        burst_rt.average_gradients([matrix], group=ctx)
        assert x.grad is not None
        assert not x.grad[drawn[ctx.rank] == 0].any()
        assert _off(x.grad / world_size, truth[ctx.rank]) <= 2 * _ROUNDING[dtype]
        assert _off(matrix.grad, truth[-1]) <= 2 * _ROUNDING[dtype]

    burst_rt.run_local(world_size, run, timeout_s=60)


def test_calls_take_the_memory_that_is_stated() -> None:
    """And a model of transformers less than half of its logits in float32, which it had thrice."""
    settings = {"MALLOC_MMAP_THRESHOLD_": "65536"}
    program = [sys.executable, str(Path(__file__).parents[1] / "head_peaks.py")]
    done = subprocess.run(program, env=os.environ | settings, capture_output=True, text=True)
    *stated, model = [float(line) for line in done.stdout.split()]
    assert len(stated) == 3, done.stderr
    assert all(0.9 < ratio < 1.1 for ratio in stated), stated
    assert model < 0.5


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_no_more_logits_are_alive_than_a_chunks(frozen: bool, grad: bool) -> None:
    """And a gradient of the weight only where it is wanted."""
    case = _make(1, "all", torch.float32)
    weight = case.weight.detach() if frozen else case.weight
    seen = _Largest()
    with burst_rt.init() as ctx, torch.set_grad_enabled(grad), seen:
        loss = burst_rt.linear_cross_entropy(case.hidden[0], weight, case.labels[0], group=ctx)
        if grad:
            loss.backward()
    assert loss.requires_grad == grad
    shapes = {shape for shape in seen.shapes if _CLASSES in shape}
    gradients = {(_WIDTH, _CLASSES), (_CLASSES, _WIDTH)}  # and the transposed weight
    assert {min(shape) for shape in shapes - gradients} == {4, 5}  # of 14 rows
    # 3 chunks: logits and hidden's gradients, and the weight's.
    assert seen.names.count("aten::mm") == 3 * (1 + grad)
    assert seen.names.count("aten::addmm_") == 3 * (grad and not frozen)
    assert (case.weight.grad is None) == (frozen or not grad)


def test_hidden_without_grad_gets_none() -> None:
    """The head alone learns: no product makes hidden's gradient."""
    case = _make(1, "all", torch.float32, bias=False)
    with burst_rt.init() as ctx, _Largest() as seen:
        burst_rt.linear_cross_entropy(
            case.hidden[0].detach(), case.weight, case.labels[0], group=ctx
        ).backward()
    assert case.weight.grad is not None
    assert (14, _WIDTH) in seen.shapes  # hidden
    # Logits and the weight's gradients of 3 chunks.
    assert seen.names.count("aten::mm") == seen.names.count("aten::addmm_") == 3


def test_a_backward_may_come_twice_and_is_not_differentiated_again() -> None:
    case = _make(1, "some", torch.float64)
    inputs = [case.hidden[0], case.weight]
    with burst_rt.init() as ctx:
        loss = burst_rt.linear_cross_entropy(inputs[0], inputs[1], case.labels[0], group=ctx)
        once = torch.autograd.grad(loss, inputs, retain_graph=True)
        twice = torch.autograd.grad(3 * loss, inputs, retain_graph=True)
        for x, y in zip(once, twice, strict=True):
            torch.testing.assert_close(3 * x, y)
        gradients = torch.autograd.grad(loss, inputs, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradients[0].sum().backward()


def test_micro_batches_and_other_ignored_labels() -> None:
    """Two calls by the count of both give the mean of both."""
    case = _make(2, "some", torch.float64)
    truth, gradients = _truth(case, {})
    count = sum(int((labels != -100).sum()) for labels in case.labels)
    with burst_rt.init() as ctx:
        losses = [
            burst_rt.linear_cross_entropy(
                x, case.weight, labels.masked_fill(labels == -100, 40), bias=case.bias,
                ignore_index=40, group=ctx, count=count,
            )
            for x, labels in zip(case.hidden, case.labels, strict=True)
        ]  # fmt: skip
        loss = torch.stack(losses).sum()
        assert _off(loss, truth) <= 1e-13
        found = torch.autograd.grad(loss, [*case.hidden, case.weight])
        for x, expected in zip(found, gradients, strict=False):
            assert _off(x, expected) <= 1e-13


def test_no_labels_at_all_are_no_number() -> None:
    case = _make(2, "all", torch.float32)

    def run(ctx: Context) -> None:
        labels = torch.full_like(case.labels[ctx.rank], -100)
        x = case.hidden[ctx.rank].detach()
        assert burst_rt.linear_cross_entropy(x, case.weight, labels, group=ctx).isnan()

    burst_rt.run_local(2, run, timeout_s=60)


_X, _W, _Y = torch.ones(3, 4), torch.ones(5, 4), torch.ones(3, dtype=torch.int64)
_WRONG: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "a list": (([1.0], _W, _Y), {}, r"hidden: expected .* \[..., width\], got list"),
    "integers": ((_Y, _W, _Y), {}, r"hidden: expected .*, got torch.int64 \(3,\)"),
    "another width": ((_X, _W[:, 1:], _Y), {}, r"weight: .* \[classes, 4\], got .* \(5, 3\)"),
    "no classes": ((_X, _W[:0], _Y), {}, r"weight: .* \[classes, 4\], got .* \(0, 4\)"),
    "another type": (
        (_X, _W.half(), _Y),
        {},
        "weight and bias: .* or autocast, got .*16",
    ),
    "bias": ((_X, _W, _Y), {"bias": _W[0]}, r"bias: expected None, or .* \[5\], got .* \(4,\)"),
    "meta": ((_X, _W.to("meta"), _Y), {}, "weight: expected dense .* on meta"),
    "few weights": (
        (_X, _W, _Y),
        {"weights": torch.ones(2)},
        r"weights: expected .* \(3,\), one for each label, .* got torch.float32 \(2,\)",
    ),
    "weights that learn": (
        (_X, _W, _Y),
        {"weights": torch.ones(3, requires_grad=True)},
        "weights: expected .* that does not require grad",
    ),
    "few labels": ((_X, _W, _Y[1:]), {}, r"labels: expected \(3,\), one .* \(2,\).*; cut both"),
    "int labels": ((_X, _W, _Y.int()), {}, r"labels: expected torch.int64, got torch.int32"),
    "label": ((_X, _W, _Y + 4), {}, r"labels: expected 0 to 4, or -100 .*, got 5"),
    "labels on meta": ((_X, _W, _Y.to("meta")), {}, "labels: expected a dense tensor of"),
    "softcap": ((_X, _W, _Y), {"softcap": 0}, "softcap: expected None or a number above 0, got 0"),
    "scale": ((_X, _W, _Y), {"scale": torch.nan}, "scale: expected a finite number, got nan"),
    "smoothing": ((_X, _W, _Y), {"label_smoothing": 2}, "label_smoothing: .* 0 to 1, got 2"),
    "z-loss": ((_X, _W, _Y), {"z_loss": -1.0}, "z_loss: expected .* at least 0, got -1.0"),
    "kernel": (
        (_X, _W, _Y),
        {"kernel": "x"},
        "kernel: expected one of auto, torch, liger, cce, got 'x'",
    ),
    "Liger on a CPU": (
        (_X, _W, _Y),
        {"kernel": "liger"},
        "kernel 'liger' was asked for, but Liger's kernel takes CUDA tensors, got cpu; use 'auto'",
    ),
    "index": (
        (_X, _W, _Y),
        {"ignore_index": None},
        "ignore_index: expected an integer of 64 bits, got None",
    ),
    "count": ((_X, _W, _Y), {"count": 0}, "count must be a number above 0, .* got 0"),
}


@pytest.mark.parametrize("case", _WRONG)
def test_what_one_rank_gets_wrong_is_refused_on_all(case: str) -> None:
    args, options, message = _WRONG[case]

    def run(ctx: Context) -> None:
        given = (args, options) if ctx.rank else ((_X, _W, _Y), {})
        with pytest.raises(InputError, match=f"linear_cross_entropy: {message}"):
            burst_rt.linear_cross_entropy(*given[0], **given[1], group=ctx)
        assert burst_rt.linear_cross_entropy(_X, _W, _Y, group=ctx).isfinite()

    burst_rt.run_local(2, run, timeout_s=60)


def test_counts_that_differ_are_refused_on_every_rank() -> None:
    def run(ctx: Context) -> None:
        with pytest.raises(ContractMismatch, match="count"):
            burst_rt.linear_cross_entropy(_X, _W, _Y, group=ctx, count=8 + ctx.rank)

    burst_rt.run_local(2, run, timeout_s=60)
