"""What a recurrence is to this room, and the documents of a segment.

A `Recurrence` makes the stages of a segment in both directions. Those that remember every token do
so by their chunks (`chunked.py`); a short convolution has stages of its own (`convolution.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from burst_rt.planning.segments import StageFlops

__all__ = ["Recurrence", "RecurrenceWork", "SegmentGrads", "SegmentTensors", "StageMaker", "Stages"]

Tensor = torch.Tensor


class SegmentTensors(NamedTuple):
    """The tensors of one segment, of the types that the user gave.

    tokens: `[batch, tokens, ...]`. shared: those that have no tokens, such as weights. begins:
    `[batch or 1, tokens]`, where documents begin; None: nowhere in the segment.
    """

    tokens: tuple[Tensor, ...]
    shared: tuple[Tensor, ...]
    begins: Tensor | None
    wide: torch.dtype  # type of the sums
    progress: Callable[[], None] = lambda: None  # to be called now and then: it moves messages on

    def part(self, at: slice) -> SegmentTensors:
        """Some of the tokens."""
        begins = None if self.begins is None else self.begins[:, at]
        return self._replace(tokens=tuple(x[:, at] for x in self.tokens), begins=begins)

    def widened(self) -> SegmentTensors:
        """The same in the type of the sums: copies of the tensors of other types."""
        tokens, shared = (tuple(x.to(self.wide) for x in xs) for xs in (self.tokens, self.shared))
        return self._replace(tokens=tokens, shared=shared)


class SegmentGrads(NamedTuple):
    """What a backward adds to, 0 at first: None for a gradient that is not needed."""

    tokens: tuple[Tensor | None, ...]
    shared: tuple[Tensor | None, ...]


class Stages(Protocol):
    """One segment in one direction: see `planning/scan.py` for what follows what.

    A state is `[batch, ...]`; in a backward it is the gradient of the state.
    """

    def prepare(self) -> None:
        """Does what needs no state."""

    def compose(self) -> None:
        """Makes the segment's own map."""

    def fold(self, before: Tensor | None, after: Tensor) -> None:
        """Writes the state after the segment. before: None where that does not depend on it."""

    def advance(self, before: Tensor, after: Tensor | None) -> None:
        """Takes the state through the segment; writes the state after it, if `after` is given."""

    def emit(self) -> None:
        """Writes the results of the segment's tokens."""


class StageMaker(Protocol):
    """What makes the stages of segments: a recurrence itself, or a kernel for it."""

    def forward(self, segment: SegmentTensors, out: Tensor) -> Stages:
        """The stages of a forward, which writes `out`, `[batch, tokens, ...]` of any type."""

    def backward(
        self, segment: SegmentTensors, before: Tensor, dout: Tensor, grads: SegmentGrads
    ) -> Stages:
        """The stages of a backward. before: the state that the forward began from."""


class Recurrence(StageMaker, Protocol):
    """One recurrence with its options: frozen and hashable, because plans are kept by it."""

    @property
    def name(self) -> str:
        """The public function's name."""

    @property
    def memory(self) -> int | None:
        """How many tokens the state remembers; None: all."""

    def state_shape(self, tokens: tuple[Tensor, ...], shared: tuple[Tensor, ...]) -> torch.Size:
        """The shape of the state, `[batch, ...]`."""

    def out_like(self, tokens: tuple[Tensor, ...]) -> Tensor:
        """The tensor of tokens whose shape and type the result has."""

    def flops(self, tokens: tuple[Tensor, ...], shared: tuple[Tensor, ...]) -> StageFlops:
        """The operations of the forward's stages, for one batch row."""


class RecurrenceWork(NamedTuple):
    """The requirements of a call on its kernel.

    tokens: shapes without batch and tokens, and types, of the tensors of tokens. dtype: of the
    user's results.
    """

    recurrence: Recurrence
    tokens: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    dtype: torch.dtype
    device: torch.device
