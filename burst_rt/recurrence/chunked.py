"""The stages of recurrences that remember every token, on the chunks of a segment.

A recurrence differs from another in `chunks` alone: what follows is the algebra of its maps
(`maps.py`). Only `chunks` is differentiated by autograd, inside a stage, on leaves of its own. A
backward makes the chunks and the states again, rather than keep them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar

import torch
from torch.nn.functional import hardshrink

from burst_rt.planning.segments import StageFlops
from burst_rt.recurrence.base import SegmentGrads, SegmentTensors, Stages
from burst_rt.recurrence.maps import LEAST, Algebra, Chunks, Reader

__all__ = ["ChunkedRecurrence", "Reach"]

Tensor = torch.Tensor
# Chunks that stages do at once: what they make then stays in the caches of a CPU.
_CHUNKS_TOGETHER = 8


@dataclass(frozen=True)
class ChunkedRecurrence:
    """The base of these recurrences; see `Recurrence`."""

    algebra: ClassVar[Algebra]
    reader: ClassVar[Reader]
    memory: ClassVar[None] = None
    size: int = 64  # tokens of a chunk

    @property
    def name(self) -> str:
        """See `Recurrence.name`."""
        raise NotImplementedError

    def chunks(self, segment: SegmentTensors) -> Chunks:
        """The chunks of a segment. Differentiable by autograd."""
        raise NotImplementedError

    def state_shape(self, tokens: tuple[Tensor, ...], shared: tuple[Tensor, ...]) -> torch.Size:
        """See `Recurrence.state_shape`."""
        raise NotImplementedError

    def out_like(self, tokens: tuple[Tensor, ...]) -> Tensor:
        """See `Recurrence.out_like`."""
        raise NotImplementedError

    def flops(self, tokens: tuple[Tensor, ...], shared: tuple[Tensor, ...]) -> StageFlops:
        """See `Recurrence.flops`."""
        raise NotImplementedError

    def forward(self, segment: SegmentTensors, out: Tensor) -> Stages:
        """See `Recurrence.forward`."""
        parts = [
            _Forward(self, segment.part(at), out[:, at]) for at in _stretches(segment, self.size)
        ]
        return _ForwardInTurn(self.algebra, parts, segment.progress)

    def backward(
        self, segment: SegmentTensors, before: Tensor, dout: Tensor, grads: SegmentGrads
    ) -> Stages:
        """See `Recurrence.backward`."""
        parts = [
            _Backward(self, segment.part(at), dout[:, at], _part_of_grads(grads, at))
            for at in _stretches(segment, self.size)
        ]
        return _BackwardInTurn(self.algebra, parts, segment.progress, before)


class Reach:
    """Which tokens of a chunk are in one document.

    pairs: `[chunks, batch or 1, 1, size, size]`, whether two tokens are. since: `[chunks, batch or
    1, 1, size]`, whether the state before the chunk reaches a token. until: whether a token reaches
    the state after the chunk. through: `[chunks, batch or 1, 1]`, whether the state before the
    chunk reaches the state after it.
    """

    def __init__(self, reader: Reader, begins: Tensor, size: int) -> None:
        number = reader.cut(begins[:, :, None].to(torch.int32), size).cumsum(-1)
        last = number[..., -1:]
        self.pairs = number[..., :, None] == number[..., None, :]
        self.since, self.until = number == 0, number == last
        self.through = (last == 0)[..., 0]


def _stretches(segment: SegmentTensors, size: int) -> list[slice]:
    """The tokens of the parts of a segment that stages do one after another.

    Messages move on between parts, and what only one part needs takes less memory.
    """
    count, most = segment.tokens[0].shape[1], _CHUNKS_TOGETHER * size
    return [slice(start, min(start + most, count)) for start in range(0, count, most)]


def _part_of_grads(grads: SegmentGrads, at: slice) -> SegmentGrads:
    return grads._replace(tokens=tuple(None if dx is None else dx[:, at] for dx in grads.tokens))


class _Forward:
    """The forward of a part of a segment. map: its A and B, once composed."""

    def __init__(self, recurrence: ChunkedRecurrence, segment: SegmentTensors, out: Tensor) -> None:
        self._of, self._segment, self._out = recurrence, segment, out

    def prepare(self) -> None:
        self._chunks = self._of.chunks(self._segment.widened())

    def compose(self) -> None:
        self.map = _composed(self._of.algebra, self._chunks)

    def advance(self, before: Tensor) -> Tensor:
        """Takes the state through the part, and returns it."""
        self._states, last = _states(self._of.algebra, self._chunks, before)
        return last

    def emit(self) -> None:
        reader = self._of.reader
        out = reader.read(self._chunks.q, self._states).add_(self._chunks.o)
        self._out.copy_(reader.join(out, self._out.shape[1]))
        del self._chunks, self._states


class _ForwardInTurn:
    """See `Stages`: the parts of a segment one after another."""

    def __init__(
        self, algebra: Algebra, parts: Sequence[_Forward], progress: Callable[[], None]
    ) -> None:
        self._algebra, self._parts, self._progress = algebra, parts, progress

    def prepare(self) -> None:
        for part in self._parts:
            part.prepare()
            self._progress()

    def compose(self) -> None:
        self._map: tuple[Tensor, Tensor] | None = None
        for part in self._parts:
            part.compose()
            self._map = (
                part.map if self._map is None else _after(self._algebra, self._map, part.map)
            )
            self._progress()

    def fold(self, before: Tensor | None, after: Tensor) -> None:
        assert before is not None
        assert self._map is not None
        a, b = self._map
        torch.add(self._algebra.apply(a, before), b, out=after)

    def advance(self, before: Tensor, after: Tensor | None) -> None:
        for part in self._parts:
            before = part.advance(before)
            self._progress()
        if after is not None:
            after.copy_(before)

    def emit(self) -> None:
        for part in self._parts:
            part.emit()
            self._progress()


class _Backward:
    """The backward of a part of a segment. map: A, and the gradient of the state before the part
    where that of the state after it is 0; once composed.
    """

    def __init__(
        self,
        recurrence: ChunkedRecurrence,
        segment: SegmentTensors,
        dout: Tensor,
        grads: SegmentGrads,
    ) -> None:
        self._of, self._segment, self._dout, self._grads = recurrence, segment, dout, grads

    def prepare(self, before: Tensor) -> Tensor:
        """Makes the forward's chunks and states again. before: the state that it began from.

        Returns the state after the part.
        """
        segment, grads = self._segment, self._grads
        given = (*segment.tokens, *segment.shared)
        sums = (*grads.tokens, *grads.shared)
        with torch.enable_grad():
            leaves = [
                x.detach().to(segment.wide).requires_grad_(grad is not None)
                for x, grad in zip(given, sums, strict=True)
            ]
            count = len(segment.tokens)
            tokens, shared = tuple(leaves[:count]), tuple(leaves[count:])
            self._made = self._of.chunks(segment._replace(tokens=tokens, shared=shared))
        self._wanted = [(x, dx) for x, dx in zip(leaves, sums, strict=True) if dx is not None]
        self._chunks = Chunks(*(x.detach() for x in self._made))
        self._states, last = _states(self._of.algebra, self._chunks, before)
        self._dout = self._of.reader.cut(self._dout.to(segment.wide), self._of.size)
        self._dread = self._of.reader.grad_s(self._chunks.q, self._dout)
        return last

    def compose(self) -> None:
        algebra, (first, *later) = self._of.algebra, self._chunks.a
        ds = torch.zeros_like(self._states[0])
        for a, dread in self._backwards():
            ds = algebra.apply_transposed(a, ds).add_(dread)
        self.map = reduce(lambda whole, a: _product(algebra, a, whole), later, first), ds

    def advance(self, ds: Tensor) -> Tensor:
        """Takes the gradient of the state back through the part, and returns it."""
        for a, dread in self._backwards():
            earlier = self._of.algebra.apply_transposed(a, ds).add_(dread)
            dread.copy_(ds)
            ds = earlier
        self._dstates = self._dread  # each of the state after its chunk
        return ds

    def _backwards(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self._chunks.a, self._dread, strict=True))[::-1]

    def emit(self) -> None:
        algebra, reader, chunks = self._of.algebra, self._of.reader, self._chunks
        made = Chunks(
            a=algebra.grad(chunks.a, self._states, self._dstates),
            b=self._dstates,
            q=reader.grad_q(self._states, self._dout),
            o=self._dout,
        )
        known = [(x, dx) for x, dx in zip(self._made, made, strict=True) if x.requires_grad]
        if not known:
            return
        grads = torch.autograd.grad(
            [x for x, _ in known], [x for x, _ in self._wanted], [dx for _, dx in known],
            allow_unused=True,
        )  # fmt: skip
        for (_, total), grad in zip(self._wanted, grads, strict=True):
            if grad is not None:
                total.add_(grad)
        del self._made, self._chunks, self._states, self._dstates, self._dread


class _BackwardInTurn:
    """See `Stages`: the parts of a segment one after another, the last one first."""

    def __init__(
        self,
        algebra: Algebra,
        parts: Sequence[_Backward],
        progress: Callable[[], None],
        before: Tensor,
    ) -> None:
        self._algebra, self._parts, self._progress = algebra, parts, progress
        self._before = before  # the state that the forward began from

    def prepare(self) -> None:
        state = self._before
        for part in self._parts:
            state = part.prepare(state)
            self._progress()

    def compose(self) -> None:
        self._map: tuple[Tensor, Tensor] | None = None
        for part in reversed(self._parts):
            part.compose()
            a, first = part.map
            if self._map is not None:
                later, ds = self._map
                a = _product(self._algebra, later, a)
                first = self._algebra.apply_transposed(part.map[0], ds).add_(first)
            self._map = a, first
            self._progress()

    def fold(self, before: Tensor | None, after: Tensor) -> None:
        assert before is not None
        assert self._map is not None
        a, first = self._map
        torch.add(self._algebra.apply_transposed(a, before), first, out=after)

    def advance(self, before: Tensor, after: Tensor | None) -> None:
        for part in reversed(self._parts):
            before = part.advance(before)
            self._progress()
        if after is not None:
            after.copy_(before)

    def emit(self) -> None:
        for part in self._parts:
            part.emit()
            self._progress()


def _states(algebra: Algebra, chunks: Chunks, before: Tensor) -> tuple[Tensor, Tensor]:
    """The state before each chunk, in the place of B, and the state after all of them."""
    state = before
    for a, b in zip(chunks.a, chunks.b, strict=True):
        after = algebra.apply(a, state).add_(b)
        b.copy_(state)
        state = after
    return chunks.b, state


def _composed(algebra: Algebra, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """The map of all chunks, one after another."""
    whole = chunks.a[0], chunks.b[0]
    for later in zip(chunks.a[1:], chunks.b[1:], strict=True):
        whole = _after(algebra, whole, later)
    return whole


def _after(
    algebra: Algebra, earlier: tuple[Tensor, Tensor], later: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """A and B of two maps, one after the other."""
    b = algebra.apply(later[0], earlier[1]).add_(later[1])
    return _product(algebra, later[0], earlier[0]), b


def _product(algebra: Algebra, later: Tensor, earlier: Tensor) -> Tensor:
    """A of two maps, one after the other.

    Products of many decays come to nothing; denormal numbers would be slow on their way.
    """
    return hardshrink(algebra.compose(later, earlier), LEAST)
