"""One call of a recurrence, checked, and its plans."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from burst_rt.attention.planner import RankPlan
from burst_rt.attention.sharding import ContextLayout
from burst_rt.attention.state import AttentionState
from burst_rt.drivers import Progress
from burst_rt.kernels import sum_dtype
from burst_rt.planning.masks import PrefixTree
from burst_rt.planning.scan import Scan
from burst_rt.planning.segments import StageFlops, segments_of, ways_of
from burst_rt.recurrence.base import Recurrence, RecurrenceWork
from burst_rt.recurrence.kernels import RecurrenceKernel, kernel_for
from burst_rt.runtime.agreement import Contract
from burst_rt.runtime.observer import Description
from burst_rt.scheduler import Schedule
from burst_rt.version import __version__

__all__ = ["Bound", "RecurrenceCall", "RecurrencePlan"]


class Bound(NamedTuple):
    """The tensors of one call on this rank, as the user gave them."""

    tokens: tuple[torch.Tensor, ...]  # `[batch, tokens, ...]`
    shared: tuple[torch.Tensor, ...]
    begins: torch.Tensor | None  # `[batch or 1, tokens]`
    progress: Progress


@dataclass(frozen=True, kw_only=True)
class RecurrencePlan(RankPlan):
    """One direction of one call on one rank, verified."""

    name: str
    program: Scan
    kernel: RecurrenceKernel

    def explain(self) -> str:
        """The plan in words."""
        program = self.program
        direction = "forward" if program.forward else "backward"
        memory = sum(part.size_bytes for part in (*self.slots, *self.chunks))
        return (
            f"{direction} of {self.name}: {program}\n"
            f"  floating-point operations of this rank: {self.flops:,}\n"
            f"  kernel {self.kernel.name}: {self.kernel.reason}\n"
            f"  bytes all ranks send: {program.wire_bytes():,}; this rank sends "
            f"{self.bytes_sent():,}, whatever the number of tokens\n"
            f"  slots {memory:,} bytes\n"
            f"  {len(self.graph.tasks)} tasks on this rank"
        )

    def describe(self) -> Description:
        """See `Subject.describe`."""
        return Description(
            kind="forward" if self.program.forward else "backward",
            explain=self.explain(),
            problem=f"{self.name}, {self.program}",
        )


@dataclass(frozen=True, kw_only=True)
class RecurrenceCall:
    """The options of one call, and the shapes and types of its tensors on this rank.

    needs: whether each tensor of tokens, each shared tensor and the initial state need gradients.
    """

    recurrence: Recurrence
    layout: ContextLayout
    batch: int
    dtype: torch.dtype  # type of the results
    given_dtype: torch.dtype  # type of the results that the user gets
    state_shape: torch.Size
    flops: StageFlops
    # Shapes without batch and tokens, and types, of the tensors of tokens and of the shared ones.
    tokens: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    shared: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    documents: str  # in words
    tree: PrefixTree | None
    needs: tuple[bool, ...]
    has_initial_state: bool
    returns_state: bool

    @property
    def attention(self) -> AttentionState:
        """What the calls of this call's context share."""
        return self.layout.attention

    @property
    def wide(self) -> torch.dtype:
        """The type of states and sums."""
        return sum_dtype(self.dtype)

    @property
    def work(self) -> RecurrenceWork:
        """What the kernel is chosen by."""
        device = self.attention.runtime.device
        return RecurrenceWork(self.recurrence, self.tokens, self.given_dtype, device)

    @cached_property
    def kernel(self) -> RecurrenceKernel:
        """The kernel. Blocks and raises as `kernel_for` does."""
        kept, work = self.attention.kept[RecurrenceKernel], self.work
        kernel = kept.get(work) or kernel_for(work, self.attention.recurrence_kernel)
        kept.put(work, kernel)
        return kernel

    def without_data(self) -> Bound:
        """Tensors as of this call on this rank, on the device "meta"."""
        batch, length = self.batch, self.layout.shard_len
        return Bound(
            tuple(
                torch.empty(batch, length, *shape, dtype=dtype, device="meta")
                for shape, dtype in self.tokens
            ),
            tuple(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in self.shared),
            None,
            Progress(),
        )

    @cached_property
    def forward_plan(self) -> RecurrencePlan:
        """The plan of the forward. Local; blocks and raises as `kernel_for` does."""
        return self._plan(forward=True)

    @cached_property
    def backward_plan(self) -> RecurrencePlan:
        """The plan of the backward. Local; blocks and raises as `kernel_for` does."""
        return self._plan(forward=False)

    @cached_property
    def forward_contract(self) -> Contract:
        """The words that the ranks compare before the forward."""
        return self._contract(self.recurrence.name)

    @cached_property
    def backward_contract(self) -> Contract:
        """The words that the ranks compare before the backward."""
        return self._contract(f"backward of {self.recurrence.name}")

    def _contract(self, name: str) -> Contract:
        return Contract(
            {
                "call": name,
                "layout": str(self.layout.map),
                "options": repr(self.recurrence),
                "batch": str(self.batch),
                "dtype": str(self.dtype),
                "shapes": str([shape for shape, _ in (*self.tokens, *self.shared)]),
                "documents": self.documents,
                "needs_grad": str(self.needs),
                "initial_state": str(self.has_initial_state),
                "return_state": str(self.returns_state),
                "version": __version__,
            }
        )

    def _plan(self, *, forward: bool) -> RecurrencePlan:
        key = (
            forward, self.recurrence, self.layout.map, self.tree, self.batch, self.state_shape,
            self.flops, self.wide, self.returns_state, self.kernel,
        )  # fmt: skip
        plans = self.attention.kept[RecurrencePlan]
        plan = plans.get(key)
        if plan is None:
            plan = self._made(forward=forward)
        plans.put(key, plan)
        return plan

    def _made(self, *, forward: bool) -> RecurrencePlan:
        runtime = self.attention.runtime
        branches = {} if self.tree is None else self.tree.branches
        segments = segments_of(self.layout.map, branches)
        flops = self.flops if forward else self.flops.backward()
        program = Scan(
            world_size=runtime.world_size,
            segments=segments,
            ways=ways_of(segments, flops, self.recurrence.memory, forward=forward),
            state_bytes=self.state_shape.numel() * self.wide.itemsize,
            flops=flops,
            batch=self.batch,
            forward=forward,
            shares_last=self.returns_state,
        )
        graph = program.graph(runtime.rank, runtime.machine.lanes)
        schedule = Schedule.of(self.attention.planner.lowered(program, graph))
        return RecurrencePlan(
            rank=runtime.rank, program_graph=graph, schedule=schedule, name=self.recurrence.name,
            program=program, kernel=self.kernel,
        )  # fmt: skip
