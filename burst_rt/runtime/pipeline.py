"""Custom pipelines: a user's own task graph on the engine and transports of a context. See
examples/pipeline.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from burst_rt.drivers import Progress
from burst_rt.errors import BurstError, ConfigError, InputError
from burst_rt.scheduler import Graph, Schedule, Trace
from burst_rt.transport import Memory

if TYPE_CHECKING:
    from burst_rt.context import Context

__all__ = ["Pipeline"]


class Pipeline:
    """A verified custom task graph of a context; made by `Context.pipeline`.

    progress: an operation that takes long calls it now and then: messages move on, and the other
    ranks hear that this one is alive.
    """

    def __init__(self, context: Context, schedule: Schedule, fingerprint: str) -> None:
        self.context = context
        self.schedule = schedule
        self.fingerprint = fingerprint  # of all ranks' graphs; ranks compare it when they run
        self.progress = Progress()

    @property
    def graph(self) -> Graph:
        """This rank's graph."""
        return self.schedule.graph

    def run(
        self,
        *,
        buffers: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
        ops: Mapping[str, Callable[..., None]],
    ) -> Trace:
        """Runs the graph once and returns its trace. Collective; blocks until done, bounded by the
        context's deadlines.

        buffers: the tensors of every buffer that is sent or received (one, or one a part),
        contiguous, at least as large as its messages. ops: what each `Op.name` does; called with
        `Op.args`.
        """
        memory: dict[int, Memory] = {}
        error: BurstError | None = None
        for name, given, of in (
            ("buffers", buffers, "tensors, by the names of buffers"),
            ("ops", ops, "functions, by the names of operations"),
        ):
            if not isinstance(given, Mapping):
                error = error or InputError(
                    f"Pipeline.run: {name} must be a mapping of {of}, got {type(given).__name__}"
                )
        if error is not None:
            self.context.refuse("Pipeline.run", error)
        largest: dict[int, int] = {}
        bound_to: dict[int, torch.Tensor] = {}
        for m in (m for task in self.graph.tasks for m in (*task.sends, *task.recvs)):
            largest[m.part] = max(m.size_bytes, largest.get(m.part, 0))
        for part_id, size in largest.items():
            part = self.graph.parts[part_id]
            tensor = _bound(buffers, part.buffer, part.index)
            error = error or self._refuses(part.name, tensor, size)
            if error is None:
                memory[part_id] = self.context.machine.memory(tensor)
                bound_to[part_id] = tensor
        error = error or self._overlap(bound_to)
        missing = sorted(
            {task.op.name for task in self.graph.tasks if task.op and task.lane != "control"}
            - set(ops)
        )
        if missing:
            error = InputError(f"Pipeline.run: no function given for the operations {missing}")
        self.context.agree({"call": "Pipeline.run", "graphs": self.fingerprint}, error)
        return self.context.run_pipeline(self.schedule, ops, memory, self.progress)

    def _overlap(self, bound_to: Mapping[int, torch.Tensor]) -> BurstError | None:
        """Why messages would meet in memory: a part that is received into shares it with another
        part. Or None.
        """
        received = {m.part for task in self.graph.tasks for m in task.recvs}
        for one in sorted(received & bound_to.keys()):
            for other in bound_to:
                first, last = sorted((bound_to[one], bound_to[other]), key=torch.Tensor.data_ptr)
                if one != other and first.data_ptr() + first.nbytes > last.data_ptr():
                    names = " and ".join(self.graph.parts[part].name for part in (one, other))
                    return InputError(
                        f"Pipeline.run: {names} share memory, and messages are received into the "
                        "first; give each its own"
                    )
        return None

    def _refuses(self, name: str, tensor: object, size: int) -> BurstError | None:
        """Why a tensor cannot be a part of which messages take up to `size` bytes, or None."""
        where, device = f"Pipeline.run: {name}", self.context.device
        if not isinstance(tensor, torch.Tensor):
            return InputError(
                f"{where} must be a tensor, got "
                f"{'nothing' if tensor is None else type(tensor).__name__}"
            )
        if tensor.device.type != "cpu" and self.context.machine.transport_name == "staged":
            # Plans of attention are lowered to copies and chunks; a custom graph is run as it is.
            return ConfigError(
                f"{where} is on {tensor.device}, and custom pipelines are not staged; use NCCL or "
                "an MPI that takes device memory "
                "(`burst-rt doctor`), or buffers on the CPU"
            )
        on_host = self.context.machine.wire is None and tensor.device.type == "cpu"
        if tensor.device != device and not on_host:
            return InputError(
                f"{where} must be on {device}, the context's device, got {tensor.device}"
            )
        if tensor.layout != torch.strided or not tensor.is_contiguous() or tensor.nbytes < size:
            got = (
                f"{tensor.nbytes} bytes, contiguous: {tensor.is_contiguous()}"
                if tensor.layout == torch.strided
                else str(tensor.layout)
            )
            return InputError(
                f"{where} must be a contiguous tensor of at least {size} bytes, got {got}"
            )
        return None


def _bound(
    buffers: Mapping[str, torch.Tensor | Sequence[torch.Tensor]], name: str, index: int
) -> Any:
    """What is given for a part of a buffer, a tensor if all is well: the buffer itself, or one of
    as many as it has parts.
    """
    bound = buffers.get(name)
    if isinstance(bound, Sequence):
        return bound[index] if index < len(bound) else None
    return bound
