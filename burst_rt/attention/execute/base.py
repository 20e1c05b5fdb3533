"""What the runs of all plans share: slots, a call's binding, and what a program is run by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from burst_rt.attention.planner import Plan, RankPlan
from burst_rt.drivers import Progress
from burst_rt.kernels import QKV, Results, ScoreTerms
from burst_rt.runtime.machine import Machine, Slots
from burst_rt.transport.staged import ToDevice, ToHost

if TYPE_CHECKING:
    from burst_rt.attention.execute.ring import BackwardRun, ForwardRun

__all__ = ["Binding", "RunTypes", "SlotRun", "dense"]


@dataclass(frozen=True, kw_only=True)
class Binding:
    """One call of a plan: what a run is made from."""

    plan: Plan
    machine: Machine
    scale: float | None
    progress: Progress  # operations that take long call it now and then
    poison: bool  # whether fresh memory is filled with NaN
    qkv: QKV
    results: Results | None = None  # of the forward; a backward has them
    terms: ScoreTerms = field(default_factory=ScoreTerms)  # of all heads


class SlotRun:
    """What the runs of all plans share: slots, and the copies of a staged transport.

    `storage[part]`: the raw bytes of a slot, of an own block that is sent staged, or of a chunk
    that messages are staged through. `memory[part]`: the bytes of a part as the transport takes
    them. `slots`: what goes back to the machine after the run. `operations`: the function for each
    type of operation; each kind of run adds its own types.
    """

    def __init__(self, plan: RankPlan, machine: Machine, *, poison: bool) -> None:
        self.operations: dict[type, Callable[..., None]] = {
            ToHost: self._to_host,
            ToDevice: self._to_device,
        }
        self._plan = plan
        self._poison = poison
        self._machine = machine
        self._device = machine.device
        self.slots = machine.take(plan, self._slots)
        self.storage, self.memory = self.slots.storage, self.slots.memory
        if poison:
            for slot in self.storage.values():
                slot.fill_(255)  # all ones is NaN in every floating type

    def forget(self) -> None:
        """Lets go of the operations. To be called after the run.

        They are the run's own methods, so with them its tensors would live on until Python looks
        for cycles.
        """
        self.operations.clear()

    def fresh(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory; NaN where the context poisons fresh memory."""
        new = torch.empty(shape, dtype=dtype, device=self._device)
        return new.fill_(torch.nan) if self._poison else new

    def on_device(self) -> dict[int, torch.Tensor]:
        """New memory for the plan's slots, by part: uint8."""
        return {
            part.id: torch.empty(part.size_bytes, dtype=torch.uint8, device=self._device)
            for part in self._plan.slots
        }

    def _slots(self) -> Slots:
        """New slots on the device and chunks on the host."""
        pinned = self._device.type != "cpu"
        # A later call outside inference mode could not write to tensors made inside it.
        with torch.inference_mode(False):
            slots = self.on_device() | {
                part.id: torch.empty(part.size_bytes, dtype=torch.uint8, pin_memory=pinned)
                for part in self._plan.chunks
            }
        return Slots(
            slots,
            {part: self._machine.memory(slot) for part, slot in slots.items()},
            self._machine.caller(),
        )

    def _to_host(self, op: ToHost) -> None:
        self.storage[op.chunk][: op.size_bytes].copy_(
            self.storage[op.part][op.offset : op.offset + op.size_bytes], non_blocking=True
        )

    def _to_device(self, op: ToDevice) -> None:
        self.storage[op.part][op.offset : op.offset + op.size_bytes].copy_(
            self.storage[op.chunk][: op.size_bytes], non_blocking=True
        )


class RunTypes(NamedTuple):
    """What runs one kind of program."""

    forward: Callable[[Binding], ForwardRun]
    backward: Callable[[Binding], BackwardRun]


def dense(x: torch.Tensor) -> torch.Tensor:
    """x as kernels take it: itself, or a copy for a broadcast or a strided last dimension."""
    return x if x.stride(-1) == 1 and 0 not in x.stride() else x.contiguous()
