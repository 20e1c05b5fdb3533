"""The memory of a recurrence's call: its stages run on tensors without data, and what lives counts.

A formula would have to say again what the stages do; this follows from them.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from burst_rt.planning.scan import Scan
from burst_rt.planning.segments import Way
from burst_rt.recurrence import fla
from burst_rt.recurrence.base import Stages
from burst_rt.recurrence.call import RecurrenceCall
from burst_rt.recurrence.run import backward_stages, forward_stages, grad_sums, segment_sums

__all__ = ["LiveBytes", "peak_bytes"]

Tensor = torch.Tensor


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operators have made, and the most at a time."""

    def __init__(self, known: tuple[Tensor, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.peak = 0
        self._known = {x.untyped_storage()._cdata for x in known}
        self._made: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, Tensor):
                self._count(x.untyped_storage())
        return made

    def has(self, x: Tensor) -> bool:
        """Whether an operator made it, and it lives."""
        return x.untyped_storage()._cdata in self._made

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or key in self._made:
            return
        self._made.add(key)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._made.discard(key)
        self.bytes -= size


def peak_bytes(call: RecurrenceCall, *, forward: bool) -> int:
    """The most bytes that a direction takes at a time on this rank beyond inputs and results.

    Slots are counted, and all that the stages make, in program order. Takes about a second of
    processor time for each 25,000 tokens of this rank, and with the fla kernel none.
    """
    plan = call.forward_plan if forward else call.backward_plan
    slots = sum(part.size_bytes for part in (*plan.slots, *plan.chunks))
    bound = call.without_data()
    if call.kernel.name == "fla":
        # The library's kernels run on no tensors without data.
        num_tokens = call.batch * call.layout.shard_len
        return slots + fla.stage_bytes(call.work, num_tokens, forward=forward)
    # Results, or in a backward their gradient, which has to be there.
    out = torch.empty_like(call.recurrence.out_like(bound.tokens), dtype=call.dtype)
    sums = None if forward else grad_sums(call, bound)
    given, grads = (*bound.tokens, *bound.shared), (*sums.tokens, *sums.shared) if sums else ()
    living = LiveBytes((*given, out, *(dx for dx in grads if dx is not None)))
    if sums is not None:
        # Sums of the inputs' own type are the results.
        living.bytes = sum(
            dx.nbytes
            for x, dx in zip(given, grads, strict=True)
            if dx is not None and dx.dtype != x.dtype
        )
    with torch.no_grad(), living:
        state = torch.zeros(call.state_shape, dtype=call.wide, device="meta")
        stages = {}
        for number, segment in enumerate(plan.program.segments):
            if segment.owner != plan.rank:
                continue
            shard = segment.shard
            stages[number] = (
                forward_stages(call, bound, shard, out)
                if sums is None
                else backward_stages(call, bound, shard, state, out, segment_sums(sums))
            )
        _go_through(stages, plan.program, state)
    return living.peak + slots


def _go_through(stages: dict[int, Stages], program: Scan, state: Tensor) -> None:
    """Runs the stages of a rank's segments in program order; in a tree results come last, because
    tasks come first that others wait for.
    """
    kept: dict[int | None, Tensor] = {}  # for the backward, by the segment before; see `_Run`
    for stage in stages.values():
        stage.prepare()
    for number, stage in stages.items():
        if program.ways[number] is Way.FOLDED:
            stage.compose()
    for number in filter(stages.__contains__, program.order):
        after = torch.empty_like(state)
        if program.forward:
            kept.setdefault(program.segments[number].before, after)
        if program.ways[number] is not Way.RELAYED:
            stages[number].fold(state, after)
        stages[number].advance(state, after)
        if program.is_chain:
            stages[number].emit()
    if not program.is_chain:
        for stage in stages.values():
            stage.emit()
