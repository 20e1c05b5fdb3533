"""Custom pipelines: a user's own task graph, run by a context. See examples/pipeline.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch

from burst_rt.arguments import describe_value
from burst_rt.drivers import Progress, is_out_of_memory
from burst_rt.eager import eager
from burst_rt.errors import BurstError, ConfigError, DeviceError, InputError, InternalError
from burst_rt.runtime.agreement import AgreedWhen, Contract
from burst_rt.runtime.bound_schedule import BoundSchedule
from burst_rt.runtime.refusing import refuse
from burst_rt.runtime.runtime import Runtime
from burst_rt.scheduler import CONTROL, Buffer, Graph, Op, Part, Schedule, Trace, check_world
from burst_rt.transport import Memory

__all__ = ["Pipeline", "make_pipeline"]

_RUN = {"call": "Pipeline.run"}
_AGREE = Op("agree")  # the ranks agree before each run: a graph may say so, and need not


def make_pipeline(runtime: Runtime, build: Callable[[int], Graph]) -> Pipeline:
    """Builds and verifies a custom pipeline; blocks and raises as `Context.pipeline` does."""
    try:
        graphs = _built(runtime, build)
        runtime.machine.check_tags(graphs[runtime.rank])
    except (InputError, ConfigError) as error:
        refuse("pipeline", error, runtime)
    tasks = Contract({"tasks": repr([graph.tasks for graph in graphs])})
    fingerprint = format(tasks.digest, "x")
    return Pipeline(runtime, Schedule.of(graphs[runtime.rank]), fingerprint)


def _built(runtime: Runtime, build: Callable[[int], Graph]) -> list[Graph]:
    """All ranks' graphs, verified. Raises InputError."""
    graphs = []
    for rank in range(runtime.world_size):
        try:
            graph = build(rank)
        except Exception as error:
            raise InputError(
                f"Context.pipeline: build({rank}) raised {type(error).__name__}: {error}"
            ) from error
        if not isinstance(graph, Graph):
            raise InputError(
                f"Context.pipeline: build({rank}) must return a Graph, got {type(graph).__name__}; "
                "end it with `return g.build()`"
            )
        if (graph.rank, graph.world_size) != (rank, runtime.world_size):
            raise InputError(
                f"Context.pipeline: build({rank}) must return the graph of rank {rank} of "
                f"{runtime.world_size}, got that of rank {graph.rank} of {graph.world_size}; begin "
                f"it with GraphBuilder(rank, {runtime.world_size}, ...)"
            )
        _check_tasks(graph)
        graphs.append(graph)
    try:
        check_world(graphs)
    except InternalError as error:  # here the graphs are the user's
        raise InputError(f"Context.pipeline: {error.message}") from None
    return graphs


class Pipeline:
    """A verified custom task graph of a context; made by `Context.pipeline`.

    progress: a function that long operations call now and then. It moves messages on, and tells
    the other ranks that this rank is alive.
    """

    def __init__(
        self, runtime: Runtime, schedule: Schedule, fingerprint: str,
        words: Mapping[str, str] = _RUN,
    ) -> None:  # fmt: skip
        self._words = words  # what a run is called where ranks compare their calls
        self.runtime = runtime
        self.schedule = schedule
        self.fingerprint = fingerprint  # digest of all ranks' graphs; compared in every run
        self.progress = Progress()
        # The call in which the pipeline ran first: it tells pipelines of equal graphs apart.
        self._first = 0
        by_buffer = groupby(schedule.graph.parts, lambda part: part.buffer)
        self._parts = {name: list(parts) for name, parts in by_buffer}

    @property
    def graph(self) -> Graph:
        """This rank's graph."""
        return self.schedule.graph

    @eager
    def run(
        self,
        *,
        buffers: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
        ops: Mapping[str, Callable[..., None]],
    ) -> Trace:
        """Runs the graph once and returns its trace, which on a GPU is filled by
        `Context.gather_last_run`, once the device has ended.

        Collective; blocks until this rank's part is done, within the context's deadlines. With NCCL
        blocks until all work is on streams. Ranks compare the call in which their pipelines ran
        first: one that a rank has made anew by itself is refused, with ContractMismatch.

        buffers: for every buffer that is sent, received or named by an operation, one tensor or a
        tensor for each part, by the buffer's name. One tensor for several parts is cut along its
        first dimension, by the parts' sizes. The tensor of a part that is sent or received must be
        contiguous and of the part's size. The tensor of a buffer that is not `initialised` may be
        left out: the run then makes one, of bytes (uint8). Each run may be given other tensors.

        ops: the function for each `Op.name`, called with `Op.args`. For a part, or a buffer made
        with one part, the function gets a tensor; for a buffer with more parts, a tuple of tensors.
        "add" need not be given: `Op("add", (total, term))` adds the term to the total, and
        `Op("add", (total, term, offset))` adds it from that byte of the total on.

        Autograd records nothing of a run (see `burst_rt.differentiable`), so tensors that require
        grad are refused while it would.

        Raises InputError and ConfigError (a wrong argument), DeviceError (no memory for buffers)
        and ContractMismatch (different graphs, or another pipeline than the one that ran together
        with this one first) on every rank alike, before anything is sent; PeerLost, Stalled and
        other DeviceErrors later.
        """
        error = self._refuses_names(buffers, ops)
        if error is not None:
            self.runtime.refuse("Pipeline.run", error)
        tasks = self.graph.tasks
        moved = frozenset(m.part for task in tasks for m in (*task.sends, *task.recvs))
        bound_to, absent, error = self._bind(buffers, moved)
        words = {**self._words, "graphs": self.fingerprint}
        if self._first:
            words["the pipeline that ran first"] = f"in call {self._first}"
        contract = Contract(words)
        device = next((bound_to[part].device for part in sorted(moved) if part in bound_to), None)
        try:
            for part in absent if error is None else ():
                bound_to[part.id] = torch.empty(
                    part.size_bytes, dtype=torch.uint8, device=device or self.runtime.device
                )
        except (MemoryError, RuntimeError) as failed:
            if not is_out_of_memory(failed):
                raise
            size = sum(part.size_bytes for part in absent)
            text = f"Pipeline.run: out of memory: the buffers that it makes take {size:,} bytes"
            error = DeviceError(text, rank=self.runtime.rank)
        # The ranks agree before anything else, because a user's graph need not open with an
        # agreement.
        self.runtime.agree(words, error)
        self._first = self._first or self.runtime.number
        memory: dict[int, Memory] = {
            part: self.runtime.machine.memory(bound_to[part]) for part in moved
        }
        functions: dict[str, Callable[..., None]] = {"add": _add, **ops}

        def tensors(arg: object) -> object:
            if isinstance(arg, Buffer) and len(arg.parts) > 1:
                return tuple(bound_to[part.id] for part in arg.parts)
            named = _parts_of(arg)
            return bound_to[named[0].id] if named else arg

        def perform(op: Op) -> None:
            functions[op.name](*map(tensors, op.args))

        bound = BoundSchedule(
            self.schedule, {Op: perform}, memory, progress=self.progress, counted=False
        )
        # Autograd would record the operations, and not what messages bring.
        with torch.no_grad():
            driver, _ = self.runtime.perform(contract, bound, AgreedWhen.BEFORE)
        for received in {m.part for task in tasks for m in task.recvs}:
            if not bound_to[received].is_inference():  # else a backward could use what is no more
                torch.autograd.graph.increment_version(bound_to[received])
        return driver.trace

    def _refuses_names(self, buffers: object, ops: object) -> BurstError | None:
        """The error of arguments that are not buffers and functions of this graph, or None."""
        for name, given, of in (
            ("buffers", buffers, "tensors, by the names of buffers"),
            ("ops", ops, "functions, by the names of operations"),
        ):
            if not isinstance(given, Mapping):
                return InputError(
                    f"Pipeline.run: {name} must be a mapping of {of}, got {type(given).__name__}"
                )
        assert isinstance(buffers, Mapping)
        assert isinstance(ops, Mapping)
        if unknown := sorted(map(str, set(buffers) - set(self._parts))):
            return InputError(
                f"Pipeline.run: buffers must be among the graph's {sorted(self._parts)}, got "
                f"{unknown}"
            )
        named = {task.op.name for task in self.graph.tasks if task.op and task.op != _AGREE}
        if missing := sorted(named - {"add", *ops}):
            return InputError(
                f"Pipeline.run: ops must have a function for each operation; missing: {missing}"
            )
        if uncallable := sorted(name for name in named & set(ops) if not callable(ops[name])):
            name = uncallable[0]
            return InputError(
                f"Pipeline.run: ops: {name!r} must be a function, got {describe_value(ops[name])}"
            )
        return None

    def _bind(
        self, buffers: Mapping[str, torch.Tensor | Sequence[torch.Tensor]], moved: frozenset[int]
    ) -> tuple[dict[int, torch.Tensor], list[Part], BurstError | None]:
        """The tensors of parts, the parts that the run makes itself, and what is wrong, if any.

        moved: the parts that are sent or received.
        """
        error: BurstError | None = None
        bound_to: dict[int, torch.Tensor] = {}
        absent: list[Part] = []
        cut: dict[str, Any] = {}
        for part_id in sorted(moved | _named(self.graph)):
            part = self.graph.parts[part_id]
            if part.buffer not in buffers and not part.initialised:
                absent.append(part)
                continue
            if error is None and part.buffer not in cut:
                parts = self._parts[part.buffer]
                cut[part.buffer], error = _cut(buffers.get(part.buffer), parts)
            tensor = _bound(cut, part)
            error = error or self._refuses(part, tensor, part_id in moved)
            if error is None:
                bound_to[part_id] = tensor
        return bound_to, absent, error or self._overlap(bound_to)

    def _overlap(self, bound_to: Mapping[int, torch.Tensor]) -> BurstError | None:
        """Why tasks would overwrite each other's parts, or None.

        They would where a part that a task changes shares memory with another part: the graph's
        order is that of parts.
        """
        tasks = self.graph.tasks
        changed = {m.part for task in tasks for m in task.recvs}
        changed.update(part for task in tasks for part in (*task.writes, *task.accumulates))
        places = sorted(
            (str(x.device), x.data_ptr(), x.data_ptr() + x.nbytes, part)
            for part, x in bound_to.items()
            if x.layout == torch.strided and x.is_contiguous() and x.nbytes
        )
        # The part that reaches furthest so far: of all, and of those that tasks change.
        furthest: dict[bool, tuple[str, int, int]] = {}
        for device, begin, end, part in places:
            for only_changed, (on, until, other) in furthest.items():
                if on == device and begin < until and (only_changed or part in changed):
                    names = " and ".join(self.graph.parts[x].name for x in (part, other))
                    return InputError(
                        f"Pipeline.run: {names} share memory, and a task changes one of them; give "
                        "each its own memory"
                    )
            for only_changed in (False, True) if part in changed else (False,):
                on, until, _ = furthest.get(only_changed, ("", 0, 0))
                if on != device or end > until:
                    furthest[only_changed] = (device, end, part)
        return None

    def _refuses(self, part: Part, tensor: object, moves: bool) -> BurstError | None:
        """Why a tensor cannot be a part, or None.

        moves: whether messages carry the part; otherwise it may be any tensor.
        """
        where, device = f"Pipeline.run: {part.name}", self.runtime.device
        if not isinstance(tensor, torch.Tensor):
            return InputError(
                f"{where} must be a tensor, got "
                f"{'nothing' if tensor is None else type(tensor).__name__}"
            )
        if tensor.requires_grad and torch.is_grad_enabled():
            return InputError(
                f"{where} requires grad, and autograd records nothing of a run; give x.detach(), "
                "or run in burst_rt.differentiable"
            )
        if not moves:
            return None
        if tensor.device.type != "cpu" and self.runtime.machine.choice.staged:
            # The graphs of attention are lowered to copies and chunks; a custom graph is not.
            return ConfigError(
                f"{where} is on {tensor.device}, and the staged transport does not support custom "
                "pipelines; use NCCL or an MPI that takes device memory (see `burst-rt doctor`), "
                "or buffers on the CPU"
            )
        on_host = self.runtime.machine.wire is None and tensor.device.type == "cpu"
        if tensor.device != device and not on_host:
            return InputError(
                f"{where} must be on {device}, the context's device, got {tensor.device}"
            )
        if tensor.device.type != "cpu" and not self.graph.has_ordered_lanes:
            # There a task counts as ended once its kernels are launched.
            return ConfigError(
                f"{where} is on {tensor.device}, and the graph has the lanes of a host; pass "
                "ctx.lanes to GraphBuilder"
            )
        size = part.size_bytes
        if tensor.layout != torch.strided or not tensor.is_contiguous() or tensor.nbytes != size:
            got = (
                f"{tensor.nbytes} bytes, contiguous: {tensor.is_contiguous()}"
                if tensor.layout == torch.strided
                else str(tensor.layout)
            )
            return InputError(f"{where} must be a contiguous tensor of its {size} bytes, got {got}")
        return None


def _bound(buffers: Mapping[str, Any], part: Part) -> Any:
    """The user's value for a part: one value for the buffer, or one for each part.

    A tensor if the user made no mistake; None where nothing was given.
    """
    bound = buffers.get(part.buffer)
    if isinstance(bound, Sequence):
        return bound[part.index] if part.index < len(bound) else None
    return bound


def _cut(tensor: Any, parts: Sequence[Part]) -> tuple[Any, BurstError | None]:
    """The rows for each part, of one tensor for a buffer of several parts; else the given value.

    And why it cannot be cut, or None.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or len(parts) == 1:
        return tensor, None
    num_rows = len(tensor) if tensor.dim() else 0
    row_bytes = tensor.nbytes // max(1, num_rows)
    sizes = [part.size_bytes for part in parts]
    rows = [size // max(1, row_bytes) for size in sizes]
    if sum(rows) == num_rows and sizes == [n * row_bytes for n in rows]:
        return tensor.split(rows), None
    return tensor, InputError(
        f"Pipeline.run: {parts[0].buffer} must be a tensor for each of its {len(parts)} parts, or "
        f"one whose rows make parts of {sizes} bytes; got {num_rows} rows of {row_bytes} bytes"
    )


def _parts_of(arg: object) -> tuple[Part, ...]:
    """The parts that an argument of an operation names."""
    if isinstance(arg, Buffer):
        return arg.parts
    return (arg,) if isinstance(arg, Part) else ()


def _named(graph: Graph) -> set[int]:
    """The parts that operations name."""
    ops = (task.op for task in graph.tasks if isinstance(task.op, Op))
    return {part.id for op in ops for arg in op.args for part in _parts_of(arg)}


def _check_tasks(graph: Graph) -> None:
    """Raises InputError for a task that a run could not perform, and where an operation names a
    part that its task does not declare.
    """
    for task in graph.tasks:
        where = f"Context.pipeline: rank {graph.rank}: task {task.name!r}"
        agrees = isinstance(task.op, Op) and task.op == _AGREE
        if task.lane == CONTROL.name and not agrees:
            raise InputError(
                f"{where} is on the lane {task.lane!r}, which has nothing but the ranks' "
                "agreement; give it another of the builder's lanes"
            )
        if not isinstance(task.op, Op):
            if task.op is not None:
                raise InputError(
                    f"{where}: op: expected a name or an Op, got {type(task.op).__name__}; give "
                    "burst_rt.scheduler.Op(name, args)"
                )
            continue
        declared = {graph.parts[part] for part in (*task.reads, *task.writes, *task.accumulates)}
        for part in (part for arg in task.op.args for part in _parts_of(arg)):
            if part not in declared:
                raise InputError(
                    f"{where}: the operation names {part.name}, which the task neither reads, "
                    "writes nor accumulates; give it to GraphBuilder.compute in reads=, writes= or "
                    "accumulates="
                )


def _add(total: torch.Tensor, term: torch.Tensor, offset: int | None = None) -> None:
    """Adds the term, which may be bytes, to the total. offset: where in the total, in bytes.

    Without an offset the term's memory may be larger than the total.
    """
    flat, terms = total.view(-1), term.view(-1).view(total.dtype)
    if offset is None:
        flat.add_(terms[: flat.numel()])
    else:
        flat[offset // flat.itemsize :][: terms.numel()].add_(terms)
