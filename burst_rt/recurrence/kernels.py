"""The kernels of recurrences, and the choice of one.

`torch` is torch's operators, for every recurrence and type. `fla` is flash-linear-attention's
Triton kernels. They multiply in 16 bits, so they are taken for 16-bit inputs alone. Before their
first use for a class of work, their results are compared with those of torch's operators, and both
kernels are timed. "auto" takes the faster one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch

from burst_rt.attention.run import plain_math
from burst_rt.errors import InputError
from burst_rt.kernels.speed import (
    Figures,
    chip_and_versions,
    error_in_words,
    failures,
    fastest_of,
    known_figures,
    seconds_in_turn,
)
from burst_rt.planning.recurrences import RECURRENCE_KERNELS
from burst_rt.recurrence import fla
from burst_rt.recurrence.base import RecurrenceWork, SegmentGrads, SegmentTensors, StageMaker

__all__ = ["RecurrenceKernel", "kernel_for"]

Tensor = torch.Tensor
_KIND = "recurrence-speed"  # the answers' name in `remembered`
_TIMED = 4096  # tokens that kernels are timed on
_COMPARED = 130  # tokens whose results are compared: two chunks of 64, and a part of one
# The largest error of a result. Products of 16 bits make less than 1e-2; a decay, a scale or a
# sign that is not as it is known here makes more than 1e-1.
_ALLOWED = 5e-2


class RecurrenceKernel(NamedTuple):
    """A kernel, why it was taken, and what makes its stages."""

    name: str
    reason: str
    maker: StageMaker


def kernel_for(work: RecurrenceWork, name: str = "auto") -> RecurrenceKernel:
    """The kernel for some work; `name` insists on one for the recurrences that it has.

    Blocks while kernels are compared and timed, by this rank or another one; that happens once for
    a chip. Raises InputError where the named kernel does not fit.
    """
    ours = RecurrenceKernel("torch", "asked for by name", work.recurrence)
    if name == "torch":
        return ours
    if not fla.serves(work.recurrence):
        return ours._replace(reason="the only kernel of this recurrence")
    theirs = RecurrenceKernel("fla", "asked for by name", fla.FlaStages(work.recurrence))
    makers = {kernel.name: kernel.maker for kernel in (ours, theirs)}
    refused = fla.refuses(work)
    if refused is not None and name == "auto":
        return ours._replace(reason=f"the only kernel here that can compute this call; {refused}")
    figures, whence = ({}, "") if refused is not None else _figures(work, makers)
    if name == "fla":
        if isinstance(why := figures.get("fla", refused), str):
            raise InputError(f"recurrence_kernel 'fla' was asked for, but {why}; use 'auto'")
        return theirs
    best, reason = fastest_of(figures, RECURRENCE_KERNELS, f"{_TIMED:,} tokens", whence)
    return (ours if best == "torch" else theirs)._replace(reason=reason)


def _figures(work: RecurrenceWork, makers: Mapping[str, StageMaker]) -> tuple[Figures, str]:
    key = chip_and_versions(work.device, "fla-core") | {
        "recurrence": type(work.recurrence).__name__, "tokens": str(work.tokens),
    }  # fmt: skip
    return known_figures(_KIND, key, RECURRENCE_KERNELS, partial(_measured, work, makers))


def _measured(work: RecurrenceWork, makers: Mapping[str, StageMaker]) -> Figures:
    """Seconds by kernel, or the reason why there are none."""
    try:
        problem, short = (_Problem(work, count) for count in (_TIMED, _COMPARED))
    except torch.OutOfMemoryError as error:
        return dict.fromkeys(makers, error_in_words(error))
    with plain_math(work.device.type):
        wrong = _wrong(short, makers)
        able = makers if wrong is None else {"torch": makers["torch"]}
        figures = seconds_in_turn(
            work.device, {name: partial(problem.run, maker) for name, maker in able.items()}
        )
    return figures if wrong is None else figures | {"fla": wrong}


def _wrong(problem: _Problem, makers: Mapping[str, StageMaker]) -> str | None:
    """What is wrong with fla's results here, or None."""
    try:
        made, true = (problem.run(makers[name], fold=True) for name in ("fla", "torch"))
    # The library's inner functions may be others than those known here, or not be there.
    except (ImportError, AttributeError, TypeError, ValueError, AssertionError) as error:
        return error_in_words(error)
    except failures() as error:
        return error_in_words(error)
    for name, x in true.items():
        off = float((made[name].float() - x.float()).norm() / x.float().norm())
        if not off < _ALLOWED:
            return f"its {name} is {off:.0%} off that of torch's operators"
    return None


class _Problem:
    """Some tokens of a class of work, bound to memory: numbers of the usual size, two documents."""

    def __init__(self, work: RecurrenceWork, count: int) -> None:
        device, generator = work.device, torch.Generator().manual_seed(0)
        shapes = [((1, count, *shape), dtype) for shape, dtype in work.tokens]
        q, k, v = (torch.randn(shape, generator=generator, device="cpu") for shape, _ in shapes[:3])
        g, *beta = (torch.rand(shape, generator=generator, device="cpu") for shape, _ in shapes[3:])
        made = (q, k * k.shape[-1] ** -0.5, v, -g, *beta)
        tokens = tuple(x.to(device, dtype) for x, (_, dtype) in zip(made, shapes, strict=True))
        begins = (torch.arange(count, device="cpu") == count // 2)[None].to(device)
        self._segment = SegmentTensors(tokens, (), begins, torch.float32)
        state = work.recurrence.state_shape(tokens, ())
        self._state = torch.randn(state, generator=generator, device="cpu").to(
            device, torch.float32
        )
        self._dout = v.roll(1).to(device, work.dtype)

    def run(self, maker: StageMaker, *, fold: bool = False) -> dict[str, Tensor]:
        """Has a kernel do the stages of a forward and of a backward; the results by name.

        Does not wait for the device.
        """
        state, out = self._state, torch.empty_like(self._dout)
        grads = tuple(torch.zeros_like(x) for x in self._segment.tokens)
        made = {"out": out} | {f"gradient {i}": dx for i, dx in enumerate(grads)}
        sums = SegmentGrads(grads, ())
        for way, stages in (
            ("forward", maker.forward(self._segment, out)),
            ("backward", maker.backward(self._segment, state, self._dout, sums)),
        ):
            stages.prepare()
            if fold:
                folded = made[f"folded state, {way}"] = torch.empty_like(state)
                stages.compose()
                stages.fold(state, folded)
            last = made[f"state, {way}"] = torch.empty_like(state)
            stages.advance(state, last)
            stages.emit()
        return made
