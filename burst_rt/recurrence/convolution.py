"""A short causal convolution by channel: its state is the K - 1 tokens before a segment.

A segment of K - 1 tokens or more sends its last tokens on without waiting for those before it.
Tokens of another document than the one that goes on are 0 in the state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import silu

from burst_rt.planning.recurrences import RecurrenceSizes
from burst_rt.planning.segments import StageFlops
from burst_rt.recurrence.base import SegmentGrads, SegmentTensors, Stages

__all__ = ["Convolution"]

Tensor = torch.Tensor


@dataclass(frozen=True)
class Convolution:
    """See `Recurrence`. Tokens: x `[batch, tokens, channels]`. Shared: weight `[channels, K]`, and
    bias `[channels]`, which may be left out. The state is `[batch, K - 1, channels]`.
    """

    name: ClassVar[str] = "causal_conv1d"
    width: int  # K
    activated: bool = False  # whether SiLU follows

    @property
    def memory(self) -> int:
        """See `Recurrence.memory`."""
        return self.width - 1

    def state_shape(self, tokens: tuple[Tensor, ...], shared: tuple[Tensor, ...]) -> torch.Size:
        """See `Recurrence.state_shape`."""
        batch, _, channels = tokens[0].shape
        return torch.Size((batch, self.memory, channels))

    def out_like(self, tokens: tuple[Tensor, ...]) -> Tensor:
        """See `Recurrence.out_like`: x."""
        return tokens[0]

    def flops(self, tokens: tuple[Tensor, ...], shared: tuple[Tensor, ...]) -> StageFlops:
        """See `Recurrence.flops`."""
        sizes = RecurrenceSizes(rule="convolution", num_heads=tokens[0].shape[2], kernel=self.width)
        return sizes.stage_flops

    def forward(self, segment: SegmentTensors, out: Tensor) -> Stages:
        """See `Recurrence.forward`."""
        return _Forward(self, segment, out)

    def backward(
        self, segment: SegmentTensors, before: Tensor, dout: Tensor, grads: SegmentGrads
    ) -> Stages:
        """See `Recurrence.backward`."""
        return _Backward(self, segment, before, dout, grads)

    def convolved(self, before: Tensor, x: Tensor, segment: SegmentTensors) -> Tensor:
        """The results of a segment's tokens, by autograd's operators."""
        weight, *bias = segment.shared
        tokens = torch.cat([before, x], 1)
        number = None
        if segment.begins is not None:
            number = segment.begins.to(torch.int32).cumsum(1)
            number = torch.cat([number.new_zeros(number.shape[0], self.memory), number], 1)
        out = bias[0].expand_as(x) if bias else torch.zeros_like(x)
        count = x.shape[1]
        for lag in range(self.width):
            at = slice(self.memory - lag, self.memory - lag + count)
            term = tokens[:, at] * weight[:, self.memory - lag]
            if number is not None and lag:
                term = term * (number[:, at] == number[:, self.memory :])[..., None]
            out = out + term
        return silu(out) if self.activated else out

    def kept(self, segment: SegmentTensors) -> Tensor | None:
        """Which of the last K - 1 tokens, those before the segment included, go on: `[batch or 1,
        K - 1, 1]`; None: all.
        """
        if segment.begins is None:
            return None
        ended = segment.begins.to(torch.int32).cumsum(1)
        number = torch.cat([ended.new_zeros(ended.shape[0], self.memory), ended], 1)
        return (number == number[:, -1:])[:, number.shape[1] - self.memory :, None]

    def tail(self, before: Tensor | None, segment: SegmentTensors) -> Tensor:
        """The state after a segment. before: None where the segment is long enough by itself."""
        (x,) = segment.tokens
        tokens = x if before is None else torch.cat([before, x], 1)
        last, kept = tokens[:, tokens.shape[1] - self.memory :], self.kept(segment)
        return last if kept is None else last * kept


class _Forward:
    def __init__(self, convolution: Convolution, segment: SegmentTensors, out: Tensor) -> None:
        self._of, self._segment, self._out = convolution, segment, out

    def prepare(self) -> None:
        """Nothing is to be done."""

    def compose(self) -> None:
        """Nothing is to be done."""

    def fold(self, before: Tensor | None, after: Tensor) -> None:
        after.copy_(self._of.tail(before, self._segment))

    def advance(self, before: Tensor, after: Tensor | None) -> None:
        self._before = before
        if after is not None:
            self.fold(before, after)

    def emit(self) -> None:
        segment = self._segment.widened()
        self._out.copy_(self._of.convolved(self._before, segment.tokens[0], segment))


class _Backward:
    def __init__(
        self,
        convolution: Convolution,
        segment: SegmentTensors,
        before: Tensor,
        dout: Tensor,
        grads: SegmentGrads,
    ) -> None:
        self._of, self._segment, self._before = convolution, segment, before
        self._dout, self._grads = dout, grads

    def prepare(self) -> None:
        """All of it but what comes from the state after the segment."""
        segment, sums = self._segment.widened(), (*self._grads.tokens, *self._grads.shared)
        with torch.enable_grad():
            before = self._before.detach().requires_grad_()
            leaves = [
                x.detach().requires_grad_(grad is not None)
                for x, grad in zip((*segment.tokens, *segment.shared), sums, strict=True)
            ]
            again = segment._replace(shared=tuple(leaves[1:]))
            out = self._of.convolved(before, leaves[0], again)
        wanted = [(x, dx) for x, dx in zip(leaves, sums, strict=True) if dx is not None]
        inputs = [before, *(x for x, _ in wanted)]
        self._dbefore, *grads = torch.autograd.grad(out, inputs, self._dout.to(segment.wide))
        for (_, total), grad in zip(wanted, grads, strict=True):
            total.add_(grad)

    def compose(self) -> None:
        """Nothing is to be done."""

    def fold(self, before: Tensor | None, after: Tensor) -> None:
        after.copy_(self._dbefore)

    def advance(self, before: Tensor, after: Tensor | None) -> None:
        kept, memory = self._of.kept(self._segment), self._of.memory
        dtail = before if kept is None else before * kept
        count = self._segment.tokens[0].shape[1]
        ours = min(count, memory)  # tokens of the segment that are in the state after it
        (dx,) = self._grads.tokens
        if dx is not None and ours:
            dx[:, count - ours :] += dtail[:, memory - ours :]
        if after is not None:
            after.copy_(self._dbefore)
            # A segment shorter than the memory passes the rest on to those before it.
            if ours < memory:
                after[:, ours:] += dtail[:, : memory - ours]

    def emit(self) -> None:
        """Nothing is to be done."""
